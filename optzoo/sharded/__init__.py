"""Tables sharded by rows over the devices of a mesh: lookups, training steps, checkpoints."""

from .create_table import create_table as create_table
from .create_table import uniform_rows as uniform_rows
from .lookup import lookup as lookup
from .order_of_ids import from_order_of_ids as from_order_of_ids
from .order_of_ids import in_order_of_ids as in_order_of_ids
from .params_sharding import params_sharding as params_sharding
from .row_sharding import RowSharding as RowSharding
