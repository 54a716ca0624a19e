"""Several processes: they compute what one does, and failures end as docs/many_hosts.md says."""

import importlib.util
import pathlib
import re
import shutil
import signal
import time

import chex
import jax
import orbax.checkpoint as ocp
import pytest
from etils import epath

import optzoo
from tests.processes import started

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "multihost.py"
SURVIVORS = SCRIPT.with_name("survivors.py")
WORKER = pathlib.Path(__file__).with_name("worker.py")
HEARTBEAT = 10
METHOD, STEPS, SAVE_EVERY, PERIOD = "elastic_average", 40, 8, 3


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


multihost = load(SCRIPT)


def start(number, checkpoints, script=SCRIPT, **options):
    options = {"checkpoints": checkpoints, "period": PERIOD, **options}
    return started(number, script, checkpoints.parent, **options)


def run(number, checkpoints, **options):
    """The lines on steps of a run in which nothing happens, and its log."""
    settings = {"steps": STEPS, "save_every": SAVE_EVERY, "heartbeat": HEARTBEAT, "method": METHOD}
    with start(number, checkpoints, **{**settings, **options}) as processes:
        return processes.done(), processes.log()


def interrupted(number, checkpoints, victim, sig, when, **options):
    """The exit codes and logs of a run in which a process is sent a signal."""
    settings = {"steps": STEPS, "save_every": SAVE_EVERY, "heartbeat": HEARTBEAT, "method": METHOD}
    with start(number, checkpoints, **{**settings, **options}) as processes:
        processes.until(lambda: when(processes))
        processes.all[victim].send_signal(sig)
        others = [i for i in range(number) if i != victim]
        began = time.monotonic()
        codes = processes.ends(*others)
        took = time.monotonic() - began
        return codes, [processes.log(i) for i in others], took


def began_at(log):
    return int(re.search(r"begin at step (\d+)", log)[1])


def simulated(method, stages):
    """Parameters and state after stages of so many replicas up to so many steps, on one device."""
    step, carry = 0, None
    for number, until in stages:
        training = multihost.Training(method, PERIOD, num_replicas=number)
        if carry is None:
            carry = training.init()
        else:
            carry = optzoo.replicas.resize_replicas(training.tx, *carry, number)
        for at in range(step, until):
            *carry, _ = training.step(*carry, *training.batch(at))
        step = until
    return dict(zip(("params", "state"), carry, strict=True))


def assert_saved(checkpoints, method, stages):
    number, step = stages[-1]
    training = multihost.Training(method, PERIOD, num_replicas=number)
    saved, _ = multihost.Checkpoints(checkpoints, training).load(checkpoints / str(step))
    chex.assert_trees_all_close(saved, simulated(method, stages), rtol=1e-6, atol=1e-6)


def all_methods_equal_the_simulation(number, folder):
    with start(number, folder, script=WORKER, steps=8) as processes:
        expected = {method: simulated(method, [(number, 8)]) for method in multihost.METHODS}
        processes.done()
    wanted = ocp.args.StandardRestore(expected)
    found = ocp.StandardCheckpointHandler().restore(epath.Path(folder), args=wanted)
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-6)


def test_two_processes_equal_the_simulation(tmp_path):
    all_methods_equal_the_simulation(2, tmp_path / "run")


@pytest.mark.full
def test_four_processes_equal_the_simulation(tmp_path):
    all_methods_equal_the_simulation(4, tmp_path / "run")


# Points at which something happens.
def has_begun(processes):
    return "begin at step" in processes.log()


def has_saved(processes):
    """Between two saves, or at the beginning of the second."""
    return (processes.options["checkpoints"] / str(SAVE_EVERY)).exists()


def is_saving(processes):
    return f"step {2 * SAVE_EVERY} " in processes.log()


def kill_and_restart(number, victim, when, whole, checkpoints):
    codes, logs, _ = interrupted(number, checkpoints, victim, signal.SIGKILL, when)
    assert all(codes), logs
    lines, log = run(number, checkpoints)
    began = began_at(log)
    assert began % SAVE_EVERY == 0 and began < STEPS, logs
    assert lines == whole[began // SAVE_EVERY :]
    return began


@pytest.mark.full
def test_kill_and_restart(tmp_path):
    whole, _ = run(2, tmp_path / "whole")
    assert len(whole) == STEPS // SAVE_EVERY
    assert kill_and_restart(2, 1, has_saved, whole, tmp_path / "run") >= SAVE_EVERY


@pytest.fixture(scope="module")
def whole_of_four(tmp_path_factory):
    return run(4, tmp_path_factory.mktemp("whole") / "run")[0]


@pytest.mark.full
@pytest.mark.parametrize("when", [has_begun, has_saved, is_saving], ids=lambda f: f.__name__)
@pytest.mark.parametrize("victim", [0, 3])
def test_kill_one_of_four_and_restart(victim, when, whole_of_four, tmp_path):
    kill_and_restart(4, victim, when, whole_of_four, tmp_path / "run")


@pytest.mark.full
def test_term_saves_and_stops(whole_of_four, tmp_path):
    """SIGTERM to one process: all save at the same step, end, and a restart resumes from it."""
    with start(4, tmp_path / "run", steps=100_000, save_every=STEPS, method=METHOD) as processes:
        processes.until(lambda: has_begun(processes))
        processes.all[2].send_signal(signal.SIGTERM)
        last = processes.done()[-1]
        assert "stopped early" in processes.log()
    step = int(last.split()[1])
    lines, log = run(4, tmp_path / "run", steps=max(STEPS, step + 1))
    assert began_at(log) == step
    if step < STEPS:
        assert lines[-1] == whole_of_four[-1]


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_hung_process_ends_the_others(victim, tmp_path):
    codes, logs, took = interrupted(
        3, tmp_path / "run", victim, signal.SIGSTOP, has_saved, steps=100_000
    )
    assert all(codes) and took < 3 * HEARTBEAT
    assert any("Terminating process because the JAX distributed service" in log for log in logs)


@pytest.mark.full
@pytest.mark.parametrize("method", ["elastic_average", "diloco", "sync_replicas"])
def test_restart_with_other_numbers_of_replicas(method, tmp_path):
    stages = [(2, 8), (4, 16), (3, 24)]
    for number, steps in stages:
        _, log = run(number, tmp_path / "run", steps=steps, method=method)
    assert began_at(log) == 16
    assert_saved(tmp_path / "run", method, stages)


def largest(path):
    return max((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "truncated_arrays": lambda path: truncate(largest(path)),
    "truncated_arrays_of_process_1": lambda path: truncate(
        largest(path / "train" / "ocdbt.process_1")
    ),
    "a_bit_in_the_arrays": lambda path: flip_a_bit(largest(path)),
    "no_arrays": lambda path: largest(path).unlink(),
    "no_metadata": lambda path: (path / "train" / "_METADATA").unlink(),
    "truncated_metadata": lambda path: truncate(path / "about" / "metadata"),
}


@pytest.fixture(scope="module")
def twelve_steps(tmp_path_factory):
    """What two processes leave after twelve of the steps, and what they say of all."""
    folder = tmp_path_factory.mktemp("twelve")
    run(2, folder / "run", steps=12)
    whole, _ = run(2, folder / "whole")
    return folder / "run", whole


@pytest.mark.full
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(damage, twelve_steps, tmp_path):
    saved, whole = twelve_steps
    shutil.copytree(saved, tmp_path / "run")
    DAMAGES[damage](tmp_path / "run" / "12")
    lines, log = run(2, tmp_path / "run")
    assert f"refused checkpoint {tmp_path / 'run' / '12'}: " in log
    assert began_at(log) == 8 and lines == whole[1:]
    assert [f.name for f in (tmp_path / "run").glob("refused_12_*")]


@pytest.mark.full
def test_a_save_that_did_not_end_is_passed_over(twelve_steps, tmp_path):
    saved, whole = twelve_steps
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "run" / "12").rename(tmp_path / "run" / "12.orbax-checkpoint-tmp")
    lines, log = run(2, tmp_path / "run")
    assert began_at(log) == 8 and lines == whole[1:]


@pytest.mark.full
def test_without_a_good_checkpoint_nothing_begins(twelve_steps, tmp_path):
    shutil.copytree(twelve_steps[0], tmp_path / "run")
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    for name in names:
        truncate(tmp_path / "run" / name / "about" / "metadata")
    with start(2, tmp_path / "run", method=METHOD) as processes:
        assert all(processes.ends()), processes.show()
        assert "no good checkpoint" in processes.log()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names


@pytest.mark.full
@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="JAX has no ProcessFailureError")
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
def test_survivors_go_on(sig, tmp_path):
    options = {"steps": 300, "heartbeat": 6, "method": "diloco", "period": PERIOD}
    with started(3, SURVIVORS, tmp_path, **options) as processes:
        processes.until(lambda: "step 30 of 3 replicas" in processes.log())
        processes.all[1].send_signal(sig)
        assert processes.ends(0, 2) == [0, 0], processes.show()
        ends = [
            re.findall(r"step 300 of 2 replicas.* (checksum .*)", processes.log(i)) for i in (0, 2)
        ]
    assert ends[0] and ends[0] == ends[1]
