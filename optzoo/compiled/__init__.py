"""Compiler reports of a step, also for devices that are not present."""

from .devices import devices_of as devices_of
from .report import CompileReport as CompileReport
from .report import Placement as Placement
from .requirements import RequirementError as RequirementError
