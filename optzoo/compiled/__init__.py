"""What compilers report of a step, for devices that need not be there."""

from .devices import devices_of as devices_of
from .report import CompileReport as CompileReport
from .report import Placement as Placement
from .requirements import RequirementError as RequirementError
