"""What other libraries have trained fills the host, and goes on as an ordinary table does."""

import jax
import numpy as np
import pytest

import optzoo

from .cases import CACHE, ROWS, WIDTH, batches, ordinary, others, same, table, train

pytestmark = pytest.mark.optimized
SLOT = np.abs(table(seed=7)) + 0.1
LIKE = {"table": jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32), **others()}


def of_tf1():
    """A checkpoint of TensorFlow 1: Adagrad, and Adam of rows."""
    tx = optzoo.lazy_adam(0.1)
    saved = {"table": table(), "w": np.asarray(others()["w"]), "global_step": np.array(7)}
    for name, like in (("table", SLOT), ("w", np.ones(WIDTH, np.float32))):
        saved |= {f"{name}/Adam": like / 9, f"{name}/Adam_1": like}
    saved |= {"beta1_power": np.float32(0.9**8), "beta2_power": np.float32(0.999**8)}
    return tx, optzoo.load_tf1_state(tx, LIKE, saved)


def of_fbgemm():
    tx = optzoo.row_wise_adagrad(0.1)
    saved = {"table/weights": table(), "table/momentum1": SLOT[:, 0], "iter": np.array([7])}
    saved |= {
        "w/weights": np.asarray(others()["w"]),
        "w/momentum1": np.full(WIDTH, 0.5, np.float32),
    }
    return tx, optzoo.interop.fbgemm.load_fbgemm_state(tx, LIKE, saved)


@pytest.mark.parametrize("source", [of_tf1, of_fbgemm])
@pytest.mark.parametrize("mapped", [False, True])
def test_imports(source, mapped, tmp_path):
    tx, (params, state) = source()
    slots = jax.tree.map(np.array, state)
    *want, losses = ordinary(tx, params, state=state)
    shape = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)
    folder = {"folder": tmp_path} if mapped else {}
    store = optzoo.host.HostTable(shape, tx, CACHE, **folder)
    params, state = store.load({"table": table(), **others()}, slots)
    params, state, values = train(store, params, state, batches())
    same(store.flush(params, state), tuple(want))
    assert values == losses
