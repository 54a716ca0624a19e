"""Optimizers and states of FBGEMM."""

from ...first_order.counter_row_wise_adagrad import (
    counter_row_wise_adagrad as counter_row_wise_adagrad,
)
from ...first_order.cowclip_row_wise_adagrad import (
    cowclip_row_wise_adagrad as cowclip_row_wise_adagrad,
)
from ...first_order.global_decay_row_wise_adagrad import (
    global_decay_row_wise_adagrad as global_decay_row_wise_adagrad,
)
from ...wrappers.ema_in_place import ema_in_place as ema_in_place
from ...wrappers.ensemble import ensemble as ensemble
from .optimizer import fbgemm_optimizer as fbgemm_optimizer
from .state import fbgemm_state_dict as fbgemm_state_dict
from .state import load_fbgemm_state as load_fbgemm_state
from .state import save_fbgemm_state as save_fbgemm_state
