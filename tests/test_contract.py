"""Every optimizer of the catalogue passes the battery."""

from optzoo.testing.contract import *  # noqa: F403
