"""Conformance tests for optimizers, including yours: see ``contract`` and :func:`check_stacked`."""

import pytest

# Before the import, so that failing assertions show their values.
pytest.register_assert_rewrite("optzoo.testing.contract")

from .stacks import check_stacked as check_stacked  # noqa: E402
