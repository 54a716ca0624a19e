"""Several processes compute what one device does, and the example survives the death of one."""

import pathlib
import re
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import optzoo
from tests.processes import started

from .cases import ROWS, mesh_of
from .test_minimize import LAZY, start, train_on_one

WORKER = pathlib.Path(__file__).with_name("worker.py")
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "wide_and_deep.py"


def test_two_processes_equal_one_device(tmp_path):
    with started(2, WORKER, tmp_path, checkpoints=tmp_path / "saved") as processes:
        processes.done()
    tx, mesh = LAZY["lazy_adam"], mesh_of(1)
    s = optzoo.sharded.RowSharding(ROWS, 1, multiple=16)
    like = dict(zip(("params", "state"), start(tx, mesh, s), strict=True))
    wanted = ocp.args.StandardRestore(like)
    found = ocp.StandardCheckpointHandler().restore(epath.Path(tmp_path / "saved"), args=wanted)
    params, state, _ = train_on_one(tx, "zipf", mesh_of(2))
    expected = jax.tree.leaves({"params": params, "state": state})
    for a, b in zip(jax.tree.leaves(found), expected, strict=True):
        a = np.asarray(a)[: len(b)] if b.shape[:1] == (ROWS,) else a
        np.testing.assert_allclose(a, b, atol=2e-6)


def losses(processes):
    found = re.findall(r"^step (\d+) loss ([\d.]+)", processes.log(), re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.full
def test_the_example_resumes_on_another_number_of_processes(tmp_path):
    options = {"steps": 40, "save_every": 20, "test": 4096, "heartbeat": 10}
    options["quick_to_compile"] = False
    with started(1, EXAMPLE, tmp_path, checkpoints=tmp_path / "one", **options) as processes:
        processes.done()
        whole = losses(processes)
    assert list(whole) == [20, 40]
    options["checkpoints"] = tmp_path / "run"
    with started(4, EXAMPLE, tmp_path, **options) as processes:
        processes.until((tmp_path / "run" / "20").exists)
        processes.all[2].send_signal(signal.SIGKILL)
        assert all(processes.ends()), processes.show()
    with started(2, EXAMPLE, tmp_path, **options) as processes:
        processes.done()
        resumed = losses(processes)
    # Rounding grows from step to step.
    assert resumed == {40: pytest.approx(whole[40], rel=2e-4)}
