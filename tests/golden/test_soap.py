"""SOAP follows the records of the original step by step; ``make_soap.py`` describes them."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optzoo
from optzoo.testing.samples import step_of

FOLDER = pathlib.Path(__file__).with_name("soap")
RECORDS = sorted(path.stem for path in FOLDER.glob("*.npz"))
TOLERANCE = 1e-5


def load(name):
    """The arguments of the original, and ``group(prefix)`` of the arrays."""
    arrays = dict(np.load(FOLDER / f"{name}.npz"))
    kwargs = json.loads(str(arrays.pop("meta")))["kwargs"]
    cut = lambda key, prefix: key.removeprefix(f"{prefix}/")
    return kwargs, lambda prefix: {
        cut(key, prefix): a for key, a in arrays.items() if key.startswith(f"{prefix}/")
    }


def translated(kwargs):
    """Our arguments."""
    b1, b2 = kwargs.get("betas", (0.95, 0.95))
    names = {
        "eps": "eps",
        "lr": "learning_rate",
        "max_precond_dim": "max_matrix_size",
        "precondition_frequency": "preconditioner_interval",
        "shampoo_beta": "shampoo_b2",
        "weight_decay": "weight_decay",
    }
    ours = {names[key]: value for key, value in kwargs.items() if key in names}
    return {**ours, "b1": b1, "b2": b2, "skip_vectors": not kwargs.get("precondition_1d", False)}


def with_bases(state, bases):
    """The state with the recorded bases: where eigenvalues are equal, others are as right."""
    names = state[0].slots.basis
    new = {
        name: tuple(
            jnp.asarray(bases[f"{name}/{i}"]) if np.size(q) else () for i, q in enumerate(of_name)
        )
        for name, of_name in names.items()
    }
    assert sum(map(len, map(jax.tree.leaves, new.values()))) == len(bases)
    return (state[0]._replace(slots=state[0].slots._replace(basis=new)), *state[1:])


def follow(tx, x, grads, bases=None):
    """The parameters after each step, and the state."""
    take, state, after = jax.jit(step_of(tx)), tx.init(x), []
    for t in range(len(next(iter(grads.values())))):
        x, state = take(x, state, {name: g[t] for name, g in grads.items()})
        if t == 0 and bases is not None:
            state = with_bases(state, bases)
        after.append(x)
    return {name: np.stack([x[name] for x in after]) for name in x}, state


@pytest.mark.every_value
@pytest.mark.parametrize("name", RECORDS)
def test_original(name):
    kwargs, group = load(name)
    tx, init, grads, want = (
        optzoo.soap(**translated(kwargs)),
        *map(group, ("init", "grad", "param")),
    )
    bases = group("basis")
    with_basis = {key.split("/")[0] for key in bases}
    assert with_basis
    some = lambda tree: {n: a for n, a in tree.items() if n in with_basis}
    rest = lambda tree: {n: a for n, a in tree.items() if n not in with_basis}
    # The original decays weights after a step, and not where it waits; here they decay before it:
    # the parameters are the original's before it decays them.
    kept = 1 - kwargs["lr"] * kwargs["weight_decay"]
    start = {n: x / kept**2 for n, x in some(init).items()}
    recorded = bases if name == "far_from_square" else None
    got, state = follow(tx, start, some(grads), recorded)
    assert state[0].shared["num_failed_bases"] == 0
    # Without a basis the original leaves out the first gradient; here it counts.
    if rest(init):
        start = {n: x / kept for n, x in rest(init).items()}
        later, _ = follow(tx, start, {n: g[1:] for n, g in rest(grads).items()})
        got |= {n: np.concatenate([start[n][None], xs]) for n, xs in later.items()}
    for n, x in want.items():
        np.testing.assert_allclose(kept * got[n], x, rtol=0, atol=TOLERANCE, err_msg=n)
    # Where the original sorts v at a refresh, here the columns of the basis stay in their places.
    for n, v in state[0].slots.v.items():
        v, theirs = (np.sort(np.ravel(a)) for a in (v, group("exp_avg_sq")[n]))
        np.testing.assert_allclose(v, theirs, rtol=1e-3, atol=1e-6 * theirs[-1], err_msg=n)


def test_the_records_are_where_the_bases_matter():
    """Adam alone goes elsewhere, and so does a basis that is never refreshed."""
    kwargs, group = load("plain")
    init, grads, want = group("init"), group("grad"), group("param")
    ours = translated(kwargs)
    for other in ({"max_matrix_size": 0}, {"preconditioner_interval": 10**6}):
        got, _ = follow(optzoo.soap(**{**ours, **other}), init, grads)
        assert all(np.max(np.abs(got[n] - want[n])) > 0.01 for n in ("square", "oblong", "cube"))
