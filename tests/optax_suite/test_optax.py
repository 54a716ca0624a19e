"""The files of optax's test suite that are written for any optimizer, run on all of ours."""

import collections
import fnmatch
import functools
import inspect
import types

import jax
import optax
import pytest
from optax._src import transform

import optzoo
from optzoo import CATALOG
from optzoo.testing import samples

from ..selection import chosen_first
from .loader import load
from .tables import AS_SGD, DESCENT, EXCLUDED, QUICK, SLOW, WRAPPERS, times

if optax.__version__ != "0.2.8":
    reason = f"replaces private names of optax 0.2.8; this is {optax.__version__}"
    pytest.skip(reason, allow_module_level=True)

# Optimizers used together with the one under test: SAM takes two.
ADVERSARIES = {"gradient_descent": optzoo.gradient_descent, "adam": optzoo.adam}


def files(name):
    """Optax's files, and the globals to replace in each to test the optimizer of this name."""
    factory = samples.factory(CATALOG[name])
    descent = {
        "learning_rate": CATALOG[name].rate,
        **CATALOG[name].required,
        **DESCENT.get(name, {}),
    }

    @functools.wraps(factory)  # the tests read its signature
    def sgd(*rate, **kwargs):
        """At rate 1 for tests of wrappers, which pass the rate by position; others use keywords."""
        return factory(**(AS_SGD.get(name, descent) if rate else kwargs))

    sgd.__signature__ = inspect.signature(factory, eval_str=True)

    def split(**kwargs):
        return optax.contrib.split_real_and_imaginary(factory(**kwargs))

    def uphill():
        return optax.chain(sgd(1.0), optax.scale(-1.0))

    alias = types.SimpleNamespace(sgd=sgd, real=factory, split=split, **ADVERSARIES)
    rows = [{"opt_name": "sgd", "opt_kwargs": descent}]
    contrib_rows = [
        {
            "opt_name": "sgd",
            "opt_kwargs": {**descent, "learning_rate": times(factor, descent["learning_rate"])},
            "wrapper_name": wrapper,
            "wrapper_kwargs": kwargs,
        }
        for wrapper, (kwargs, factor) in WRAPPERS.items()
    ]
    adversaries = [
        {"adv_opt_name": other, "adv_opt_kwargs": {"learning_rate": 1e-4}} for other in ADVERSARIES
    ]
    return {
        "_src/alias_test.py": {
            "alias": alias,
            "_OPTIMIZERS_UNDER_TEST": [
                {"opt_name": kind, "opt_kwargs": descent} for kind in ("real", "split")
            ],
        },
        "contrib/_common_test.py": {
            "alias": alias,
            "_MAIN_OPTIMIZERS_UNDER_TEST": contrib_rows,
            "_ALL_OPTIMIZERS_UNDER_TEST": contrib_rows,
        },
        "_src/sharding_test.py": {
            # The file compares versions as strings ("0.10" < "0.7") and would skip its tests.
            "jax": types.SimpleNamespace(**{**vars(jax), "__version__": "1"}),
            "OPTIMIZERS": {name: factory(**descent)},
        },
        "_src/float64_test.py": {"ALL_MODULES": [(name, factory, descent)]},
        "transforms/_accumulation_test.py": {
            "alias": alias,
            "transform": types.SimpleNamespace(**{**vars(transform), "scale_by_adam": uphill}),
            "OPTIMIZERS_TO_TEST": rows,
        },
        "transforms/_masking_test.py": {"alias": alias},
        "transforms/_conditionality_test.py": {"alias": alias},
        "contrib/_sam_test.py": {
            "alias": alias,
            "_BASE_OPTIMIZERS_UNDER_TEST": [
                {"base_opt_name": "sgd", "base_opt_kwargs": SLOW.get(name, descent)}
            ],
            "_ADVERSARIAL_OPTIMIZERS_UNDER_TEST": adversaries,
        },
    }


def matches(test, patterns):
    return any(fnmatch.fnmatchcase(test, pattern) for pattern in patterns)


# Defines the classes of optax's files here, where pytest finds them: MaskedTest_adam, ...
TESTS = collections.defaultdict(list)
for name in chosen_first(CATALOG, QUICK):
    out = [pattern for pattern, names, _ in EXCLUDED if name in names]
    for path, overrides in files(name).items():
        for case in load(path, f"{__name__}.{name}.{path}", **overrides):
            for method in [m for m in vars(case) if m.startswith("test")]:
                test = f"{case.__name__}.{method}"
                TESTS[name].append(test)
                if matches(test, out):
                    delattr(case, method)
            globals()[f"{case.__name__}_{name}"] = case
del case  # otherwise pytest finds the last one twice


@pytest.mark.parametrize(("pattern", "names", "reason"), EXCLUDED)
def test_what_is_excluded_exists(pattern, names, reason):
    for name in names:
        assert any(matches(test, [pattern]) for test in TESTS[name]), name
