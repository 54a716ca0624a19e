"""Optimizers of rows on the SparseCore of TPUs."""

from .api import sparsecore as sparsecore
