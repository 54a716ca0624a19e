"""Warnings point at a line of the user, whatever is between."""

import errno
import pathlib
import re
import types
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import optzoo
from optzoo import race
from optzoo.core import locks
from optzoo.core.warn import warn
from optzoo.interop import fbgemm

TABLE = {"t": jnp.ones((20_000, 2))}
IDS = jnp.array([0])


def loss(params, ids):
    return jnp.sum(params["t"][ids] ** 2)


def tied(table):
    return jnp.sum(optzoo.lookup(table, IDS) @ table.T)


def of_step():
    step, state = optzoo.minimize(loss, optax.sgd(0.1)), optax.sgd(0.1).init(TABLE)
    return jax.eval_shape(step, TABLE, state, IDS)


def of_caught_up():
    tx = optzoo.caught_up(optzoo.adam(0.1))
    step = optzoo.minimize(lambda params, ids: loss(params, ids) + params["t"].sum(), tx)
    return jax.eval_shape(step, TABLE, tx.init(TABLE), IDS)


def of_a_file(tmp_path):
    (tmp_path / "results.json").write_text("{")
    problem = race.Problem(
        name="line",
        init=lambda key: {"w": jnp.zeros(())},
        loss=lambda params, batch: jnp.mean((params["w"] * batch - batch) ** 2),
        train=jnp.ones(4),
        valid=jnp.ones(4),
        evaluations=1,
    )
    settings = race.Settings(rates=(0.1,), seeds=1, steps=1, timed_steps=1)
    race.run([problem], ["gradient_descent"], settings=settings, out=tmp_path)


def of_a_lock(tmp_path):
    def refuse(file):
        raise OSError(errno.ENOLCK, "no locks here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locks, "_lock", refuse)
        with locks.locked(tmp_path / "lock"):
            pass


WARN = {
    "a loss": lambda _: optzoo.value_and_grad(tied)(jnp.ones((3, 2))),
    "a loss in jit": lambda _: jax.jit(optzoo.value_and_grad(tied)).trace(jnp.ones((3, 2))),
    "a step": lambda _: of_step(),
    "deferred rows": lambda _: of_caught_up(),
    "counters": lambda _: fbgemm.counter_row_wise_adagrad(
        0.1, weight_decay=0.1, weight_decay_mode="l2", half_life=-1
    ),
    "FBGEMM": lambda _: fbgemm.fbgemm_optimizer("EXACT_SGD", learning_rate=0.1, eps=0.5),
    "a file": of_a_file,
    "a lock": of_a_lock,
}


@pytest.mark.parametrize("name", WARN)
def test_the_line_is_the_user_s(name, tmp_path):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        WARN[name](tmp_path)
    assert seen and {w.filename for w in seen} == {__file__}


@pytest.mark.parametrize("package", ["optzoo.some", "jax._src.api", "contextlib", "optzoo_of_mine"])
def test_packages_between(package):
    """Each is known by its name; one whose name begins with that of the library is the user's."""
    code = "def call(f, *args):\n    return f(*args)\n"
    module = types.ModuleType(package)
    exec(compile(code, "between.py", "exec"), module.__dict__)
    with pytest.warns(UserWarning, match="here") as seen:
        module.call(
            lambda: module.call(lambda: eval("warn('here')", {**vars(module), "warn": warn}))
        )
    assert (seen[0].filename == __file__) == (package != "optzoo_of_mine")


def test_no_warning_has_another_way():
    files = pathlib.Path(optzoo.__file__).parent.rglob("*.py")
    found = [f.name for f in files if re.search(r"\bwarnings\.warn\(", f.read_text())]
    assert found == ["warn.py"]
