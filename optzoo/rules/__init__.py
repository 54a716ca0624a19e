"""From a rule for one array to a transformation of a whole tree."""

from ..state.types import Exact, NotNegative, Signed, Sum
from .leafwise import full, leafwise, zeros
from .learning_rate import scale_by_learning_rate
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
    "scale_by_learning_rate",
    "touched",
    "treewise",
    "zeros",
]
