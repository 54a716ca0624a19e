"""States of optimizers: types, storage, slots by name, averages, shardings."""

from .averages import swap_averages as swap_averages
from .saved import state_like as state_like
from .storage.stored import slots_like as slots_like
from .types import LeafwiseState as LeafwiseState
from .types import Slot as Slot
