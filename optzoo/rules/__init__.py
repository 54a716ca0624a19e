"""From a rule for one array to a transformation of a whole tree."""

from ..state.types import Exact, NotNegative, Signed, Sum
from .leafwise import full, leafwise, zeros
from .policies import RowsPolicy, RowsRule, Rule, dense, lazy, linear, touched
from .treewise import treewise

__all__ = [
    "Exact",
    "NotNegative",
    "RowsPolicy",
    "RowsRule",
    "Rule",
    "Signed",
    "Sum",
    "dense",
    "full",
    "lazy",
    "leafwise",
    "linear",
    "touched",
    "treewise",
    "zeros",
]
