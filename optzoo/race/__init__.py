"""All optimizers side by side on real data, from the command line or from Python."""

from .problem import Problem as Problem
from .problems import PROBLEMS as PROBLEMS
from .runner import Settings as Settings
from .session import run as run
