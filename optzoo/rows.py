"""Row-sparse gradients and tables: conversion, arithmetic, layouts, deferred rows."""

from .core.lines import Lines as Lines
from .core.lines import from_lines as from_lines
from .core.lines import to_lines as to_lines
from .core.rows import coalesce as coalesce
from .core.rows import densify as densify
from .core.rows import on_values as on_values
from .deferred.catch_up import catch_up as catch_up
from .deferred.caught_up import take_over as take_over
from .sparse.row_major import compiler_options as compiler_options
from .sparse.row_major import formats as formats
from .sparse.row_major import row_major as row_major
from .transforms.arithmetic import add as add
from .transforms.arithmetic import global_norm as global_norm
from .transforms.arithmetic import psum as psum
