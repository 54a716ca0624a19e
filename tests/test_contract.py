"""The conformance tests, on every optimizer of the catalogue."""

from optzoo.testing.contract import *  # noqa: F403
