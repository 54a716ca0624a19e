"""Every optimizer of TensorFlow 1 and of RETURNN, as optax gradient transformations."""

__version__ = "0.1.0"

from .catalog import CATALOG as CATALOG
from .core.leafwise import LeafwiseState as LeafwiseState
from .core.leafwise import dense as dense
from .core.leafwise import full as full
from .core.leafwise import lazy as lazy
from .core.leafwise import leafwise as leafwise
from .core.leafwise import linear as linear
from .core.leafwise import touched as touched
from .core.leafwise import zeros as zeros
from .core.learning_rate import scale_by_learning_rate as scale_by_learning_rate
from .core.lookup import lookup as lookup
from .core.lookup import value_and_grad as value_and_grad
from .core.minimize import minimize as minimize
from .core.rows import SparseRows as SparseRows
from .core.rows import clip_by_global_norm as clip_by_global_norm
from .core.rows import coalesce as coalesce
from .core.rows import densify as densify
from .core.rows import on_values as on_values
from .first_order.adagrad import adagrad as adagrad
from .first_order.adagrad import scale_by_adagrad as scale_by_adagrad
from .first_order.adam import adam as adam
from .first_order.adam import lazy_adam as lazy_adam
from .first_order.adam import scale_by_adam as scale_by_adam
from .first_order.adam import scale_by_lazy_adam as scale_by_lazy_adam
from .first_order.adamax import adamax as adamax
from .first_order.adamax import scale_by_adamax as scale_by_adamax
from .first_order.add_sign import add_sign as add_sign
from .first_order.add_sign import scale_by_add_sign as scale_by_add_sign
from .first_order.gradient_descent import gradient_descent as gradient_descent
from .first_order.momentum import momentum as momentum
from .first_order.momentum import scale_by_momentum as scale_by_momentum
from .first_order.rmsprop import rmsprop as rmsprop
from .first_order.sign_decay import cosine_sign_decay as cosine_sign_decay
from .first_order.sign_decay import linear_sign_decay as linear_sign_decay
from .first_order.sign_decay import restart_sign_decay as restart_sign_decay
from .proximal.ftrl import ftrl as ftrl
