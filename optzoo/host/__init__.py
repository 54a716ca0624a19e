"""Tables on the host, with a cache on the device."""

from .table import HostTable as HostTable
from .table import Stats as Stats
