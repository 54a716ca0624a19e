"""Runs a test file of the installed optax with one of our optimizers instead of its `sgd`."""

import ast
import collections
import functools
import itertools
import os
import pathlib
import sys
import types
import unittest
import warnings
from unittest import mock

import optax
from absl.testing import parameterized

ROOT = pathlib.Path(optax.__file__).parent


def load(path, module_name, **overrides):
    """The TestCase classes of optax's file at ``path``, with some of its globals replaced."""
    module = types.ModuleType(module_name)
    module.OVERRIDES = {"parameterized": Named, **overrides}
    sys.modules[module_name] = module  # flax looks up the file's modules there
    # One of the files sets XLA_FLAGS, and another one warns.
    with mock.patch.dict(os.environ), warnings.catch_warnings(action="ignore"):
        exec(compiled(path), module.__dict__)
    classes = [v for v in vars(module).values() if isinstance(v, type)]
    return [c for c in classes if issubclass(c, unittest.TestCase)]


@functools.cache
def compiled(path):
    """The code of the file, with the overrides inserted before its first class.

    The classes need them: decorators of their methods create the tests.
    """
    file = ROOT / path
    tree = ast.parse(file.read_text())
    first_class = next(i for i, node in enumerate(tree.body) if isinstance(node, ast.ClassDef))
    tree.body[first_class:first_class] = ast.parse("globals().update(OVERRIDES)").body
    return compile(ast.fix_missing_locations(tree), str(file), "exec")


class Named:
    """Replaces absl's ``parameterized``: the tests of a product get readable names."""

    TestCase = parameterized.TestCase
    parameters = parameterized.parameters
    named_parameters = parameterized.named_parameters

    @staticmethod
    def product(*sequences, **grid):
        sequences += tuple([{k: v} for v in values] for k, values in grid.items())
        cases = [dict(collections.ChainMap(*parts)) for parts in itertools.product(*sequences)]
        named = [{"testcase_name": label(case), **case} for case in cases]
        return parameterized.named_parameters(*named)


def label(case):
    """The name of a case, such as "complex64_rosenbrock"."""
    words = []
    for key, value in sorted(case.items()):
        if isinstance(value, bool):
            words.append(key if value else f"no_{key}")
        elif key.endswith("_kwargs") or value == "sgd" or (key, value) == ("wrapper_name", None):
            continue
        else:
            words.append(getattr(value, "__name__", str(value)).removeprefix("_setup_"))
    return "_".join(words)
