"""The config of ``docs/returnn.md``, run by the installed RETURNN from data to checkpoints."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture
def config():
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "returnn.md").read_text(), re.DOTALL
    )
    [found] = [block for block in blocks if block.startswith("# config.py")]
    return found


def returnn(config, folder):
    """The log of a training in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.py").write_text(config)
    path = [str(ROOT)]
    if importlib.util.find_spec("torch") is None:  # the JAX backend needs its name alone
        (folder / "torch").mkdir(exist_ok=True)
        (folder / "torch" / "torch.py").write_text("")
        path.append(str(folder / "torch"))
    done = subprocess.run(
        [sys.executable, "-m", "returnn", "config.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "RETURNN_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


@pytest.mark.full
def test_a_training(config, tmp_path):
    """It learns, and resumed after two epochs it ends where the uninterrupted one does."""
    whole = returnn(config, tmp_path / "whole")
    assert "JAX updater: optzoo.create({'class': 'nadam', 'epsilon': 1e-08})" in whole
    losses = [float(x) for x in re.findall(r"dev: dev_loss_ce (\S+)", whole)]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2] < 0.25
    two = config.replace("max_seqs, num_epochs = 2000, 20, 3", "max_seqs, num_epochs = 2000, 20, 2")
    assert two != config
    first = returnn(two, tmp_path / "parts")
    resumed = returnn(config, tmp_path / "parts")
    assert "Continuing after epoch 2" in resumed
    parts = [float(x) for x in re.findall(r"dev: dev_loss_ce (\S+)", first + resumed)]
    assert parts == losses


@pytest.mark.full
def test_a_training_as_with_the_updater_of_returnn(config, tmp_path):
    """The decay spares biases and blacklisted modules: the engine hands on the model."""
    ours, settings = (
        config.split("optimizer = ")[0],
        """
optimizer = {"class": "adamw", "weight_decay": 1.0, "weight_decay_modules_blacklist": [Own]}
learning_rate, accum_grad_multiple_step, gradient_clip_global_norm = 0.1, 2, 1.0
learning_rate_file, log_verbosity = "newbob.data", 4
""",
    )
    ours = ours.replace(
        "def get_model(**_):\n    return rf.Linear(features, classes)",
        """
class Own(rf.Linear):
    pass

def get_model(**_):
    return rf.Sequential(rf.Linear(features, features), Own(features, classes))
""",
    )
    exchange = "returnn.jax.engine.Updater = OptzooUpdater"
    assert exchange in ours and "rf.Sequential" in ours
    theirs = ours.replace(exchange, "")
    logs = [returnn(c + settings, tmp_path / n) for n, c in (("ours", ours), ("theirs", theirs))]
    assert "JAX updater: optax.adamw({'weight_decay': 1.0})" in logs[0]
    assert "JAX updater: weight decay on 1 of 4 parameters" in logs[1]
    losses = [re.findall(r"dev: dev_loss_ce (\S+)", text) for text in logs]
    assert len(losses[0]) == 3 and losses[0] == losses[1]
