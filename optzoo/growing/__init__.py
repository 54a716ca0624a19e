"""Tables that grow: more rows, rows for other ids, and the assignment of ids to rows."""

from .reset_rows import reset_rows as reset_rows
from .resize_table import resize_table as resize_table
from .vocabulary import Vocabulary as Vocabulary
