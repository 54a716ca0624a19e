"""Which tests a compiler can run."""

import jax

# Older compilers end the process at some programs for SparseCores: libtpu 0.0.52 is the first that
# compiles them, and JAX 0.12 the first that takes it.
collect_ignore = ["test_sparsecore.py"] if jax.__version_info__ < (0, 12) else []
