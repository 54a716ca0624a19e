"""Tables on the host, of which the device has a cache."""

from .table import HostTable as HostTable
from .table import Stats as Stats
