"""Conformance tests for optimizers, including your own: see ``optzoo.testing.contract``."""

import pytest

# Before the import, so that failing assertions show their values.
pytest.register_assert_rewrite("optzoo.testing.contract")
