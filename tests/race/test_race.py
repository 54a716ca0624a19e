"""The race: its results, its files and its command."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optzoo import race
from optzoo.__main__ import main
from optzoo.catalog import CATALOG
from optzoo.race import __main__ as command
from optzoo.race import plots, report, runner, session
from optzoo.race.problems import DEFAULT_PROBLEMS, PROBLEMS

QUICK = race.Settings(rates=(0.01, 0.1), seeds=2, timed_steps=2)


def line(**changes):
    """Fitting a line: fast, and possible for every optimizer."""
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    fields = {
        "name": "line",
        "init": lambda key: {"w": jax.random.normal(key, ()), "b": jnp.zeros(())},
        "loss": lambda p, batch: jnp.mean((p["w"] * batch[0] + p["b"] - batch[1]) ** 2),
        "train": (x, 2 * x + 1),
        "valid": (x, 2 * x + 1),
        "metrics": {"slope": lambda p, _: p["w"]},
        "steps": 40,
        "evaluations": 4,
        "target": 0.5,
    }
    return race.Problem(**(fields | changes))


def test_finds_the_better_rate_and_describes_its_runs():
    [result] = race.run([line()], ["gradient_descent"], settings=QUICK)["results"]
    assert result["rate"] == 0.1 and not result["diverged"]
    assert [r["rate"] for r in result["rates"]] == [0.01, 0.1]
    assert result["rates"][1]["loss"] == result["loss"]["mean"] < result["rates"][0]["loss"]
    assert result["curve"]["steps"] == [0, 10, 20, 30, 40]
    assert result["curve"]["mean"][-1] == result["loss"]["mean"] < result["curve"]["mean"][0]
    assert result["metrics"]["slope"]["mean"] > 1
    assert result["steps to target"]["mean"] in range(0, 41)
    assert result["state bytes per parameter"] == 4 / 2  # one count for two parameters


def keys_of(x):
    """The keys of a dict and of those in it, but for names of arguments, metrics and problems."""
    if isinstance(x, dict):
        by_name = {"arguments", "metrics", "published"}
        return set(x).union(*(keys_of(x[key]) for key in x.keys() - by_name))
    return set().union(*map(keys_of, x)) if isinstance(x, list) else set()


def test_the_keys_of_a_result_are_those_of_the_docstring():
    """All of them, and no others."""
    problem = line(
        embeddings=True, published=lambda name: {"runs": 1}, track=lambda params: params["w"]
    )
    unsuited = line(name="unsuited", init=lambda key: {"w": jnp.array(1j), "b": jnp.zeros(())})
    document = race.run([problem, unsuited], ["adam"], settings=QUICK)
    [result], [skipped] = document["results"], document["skipped"]
    parts = inspect.getdoc(race.run).partition("Returns:\n")[2].partition("Raises:\n")[0]
    of_all, _, of_result = parts.partition("A result has")
    named = lambda text: set(re.findall(r"``([a-z]+(?:\s+\w+)*)``", text)) - {"out"}
    named_in = lambda text: {" ".join(key.split()) for key in named(text)}
    want = {*document, *document["problems"]["line"], *skipped}
    assert named_in(of_all) == want
    assert {"line", "unsuited"} == document["problems"].keys()
    assert result["metrics"].keys() == {"slope"}
    assert named_in(of_result) == keys_of(result)


def test_the_curve_is_what_a_plain_loop_gives():
    """With the whole data set as a batch and one seed."""
    problem = line(train=(np.ones(1, np.float32), np.ones(1, np.float32)), batch_size=1)
    settings = race.Settings(rates=(0.1,), seeds=1, timed_steps=1)
    [result] = race.run([problem], ["momentum"], settings=settings)["results"]
    [key] = jax.random.split(jax.random.key(0), 1)
    params, velocity = problem.init(key), {"w": 0.0, "b": 0.0}
    losses = []
    for step in range(41):
        if step % 10 == 0:
            losses.append(float(problem.loss(params, problem.valid)))
        grads = jax.grad(problem.loss)(params, problem.train)
        velocity = {k: 0.9 * velocity[k] + grads[k] for k in params}
        params = {k: params[k] - 0.1 * velocity[k] for k in params}
    np.testing.assert_allclose(result["curve"]["mean"], losses, rtol=1e-4)


def test_a_best_rate_at_the_edge_extends_the_grid():
    settings = race.Settings(num_rates=2, extensions=1, seeds=1, timed_steps=1)
    flat = line(loss=lambda p, batch: 1e-3 * jnp.sum((p["w"] - 2) ** 2))
    [result] = race.run([flat], ["gradient_descent"], settings=settings)["results"]
    rates = [r["rate"] for r in result["rates"]]
    np.testing.assert_allclose(rates, [0.1, 0.32, 1.0, 3.2])
    assert result["rate"] == 3.2


def test_replicas_split_the_batch():
    """The mean of the gradients of eight shares is the gradient of the batch."""
    settings = race.Settings(rates=(0.1,), seeds=2, timed_steps=1)
    problem = line(batch_size=16)
    document = race.run([problem], ["adam", "sync_replicas", "agn"], settings=settings)
    alone, synchronous, pushed = document["results"]
    np.testing.assert_allclose(synchronous["curve"]["mean"], alone["curve"]["mean"], rtol=1e-4)
    assert pushed["curve"]["mean"][-1] < 0.9 * pushed["curve"]["mean"][0]
    assert pushed["curve"]["mean"] != alone["curve"]["mean"]


def test_divergence_is_reported():
    settings = race.Settings(rates=(1e20,), seeds=2, timed_steps=1)
    document = race.run([line()], ["gradient_descent"], settings=settings)
    [result] = document["results"]
    assert result["diverged"] and result["loss"]["mean"] is None
    assert "diverged" in report.markdown(document)
    json.dumps(document, allow_nan=False)


def test_unsupported_optimizers_are_skipped_with_a_reason():
    def complex_weight(key):
        del key
        return {"w": jnp.array(1.0 + 1j), "b": jnp.zeros(())}

    problem = line(init=complex_weight, loss=lambda p, b: jnp.abs(p["w"]) ** 2, metrics={})
    document = race.run([problem], ["adam"], settings=QUICK)
    assert document["results"] == []
    [skipped] = document["skipped"]
    assert "complex" in skipped["skipped"]
    assert "adam on line" in report.markdown(document)


def test_l1_goes_to_the_optimizer_that_has_it():
    plain, ftrl = CATALOG["adagrad"], CATALOG["ftrl"]
    problem = line(l1=0.5)
    assert runner._l1_arguments(problem, plain, 40) == {}
    assert runner._l1_arguments(problem, ftrl, 40) == {"l1_regularization_strength": 20.0}
    assert runner._l1_arguments(line(), ftrl, 40) == {}
    params = {"w": jnp.array(2.0), "b": jnp.array(-1.0)}
    difference = runner._objective(problem, params, problem.valid) - problem.loss(
        params, problem.valid
    )
    np.testing.assert_allclose(difference, 1.5, rtol=1e-6)


def test_writes_and_resumes(tmp_path):
    seen = []
    go = lambda problem, **more: race.run(
        [problem],
        ["adam", "momentum"],
        settings=QUICK,
        out=tmp_path,
        watch=lambda p: seen.append(p.optimizer),
        **more,
    )
    first = go(line())
    assert seen == ["adam", "momentum", ""]
    names = {"results.json", "leaderboard.md", "curves.png", "index.html"}
    assert {f.name for f in tmp_path.iterdir()} == names
    page = (tmp_path / "index.html").read_text()
    assert "momentum" in page and "<img" not in page.split("<script")[0] and "plotly.js" in page
    seen.clear()
    assert go(line()) == first and seen == [""]  # nothing repeated
    assert go(line(steps=20)) != first and seen[1:] == ["adam", "momentum", ""]
    seen.clear()
    assert go(line())["results"] == first["results"] and seen == [""]  # kept by the other race
    seen.clear()
    go(line(steps=20), fresh=True)
    assert seen == ["adam", "momentum", ""]


def test_curves_against_time():
    document = race.run([line()], ["adam"], settings=QUICK)
    seconds = document["results"][0]["seconds per step"]
    for against, unit in ((False, 1), (True, seconds)):
        [axes] = plots.curves(document, time=against).axes
        np.testing.assert_allclose(axes.lines[0].get_xdata(), unit * np.arange(0, 41, 10))


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": {"slope": lambda p, _: 2 * p["w"]}},
        {"loss": lambda p, batch: p["w"] ** 2},
        {"train": (np.zeros(64, np.float32), np.ones(64, np.float32))},
        {"track": lambda p: p["w"]},
        {"embeddings": True},
        {"l1": 0.1},
    ],
    ids=["metrics", "loss", "data", "track", "embeddings", "l1"],
)
def test_a_changed_problem_is_run_again(changes):
    prints = [session._fingerprint(p, QUICK) for p in (line(), line(), line(**changes))]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_a_changed_constant_of_the_loss_is_run_again(array):
    weights = [array([1.0, second], np.float32) for second in (3, 4)]
    losses = [lambda p, _, c=c: jnp.sum(c * p["w"] ** 2) for c in weights]
    first, second = (session._fingerprint(line(loss=f), QUICK) for f in losses)
    assert first != second


def test_an_interruption_keeps_what_is_finished(tmp_path):
    def stop(progress):
        if progress.optimizer == "momentum":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race.run([line()], ["adam", "momentum"], settings=QUICK, out=tmp_path, watch=stop)
    kept = json.loads((tmp_path / "results.json").read_text())
    assert [r["optimizer"] for r in kept["results"]] == ["adam"]
    seen = []
    race.run(
        [line()], ["adam", "momentum"], settings=QUICK, out=tmp_path, watch=lambda p: seen.append(p)
    )
    assert [p.optimizer for p in seen] == ["momentum", ""]


@pytest.mark.parametrize("name", PROBLEMS)
def test_built_in_problems_train(name):
    problem = PROBLEMS[name]()
    settings = race.Settings(rates=(0.001,), seeds=1, steps=3, timed_steps=1)
    [result] = race.run([problem], ["lazy_adam"], settings=settings)["results"]
    assert np.isfinite(result["loss"]["mean"])
    assert ("seconds per dense step" in result) == (name == "words")
    assert (result["track"] is not None) == (name == "valley")


def test_words_is_large_and_its_gradients_are_rows():
    import optzoo

    problem = PROBLEMS["words"]()
    params = problem.init(jax.random.key(0))
    assert all(len(table) >= 10_000 for table in params.values())
    batch = jax.tree.map(lambda a: a[:4], problem.train)
    _, grads = optzoo.value_and_grad(problem.loss)(params, batch)
    assert all(isinstance(g, optzoo.SparseRows) for g in grads.values())


def test_characters_is_causal():
    problem = PROBLEMS["characters"]()
    params, loss = problem.init(jax.random.key(0)), jax.jit(problem.loss)
    text, following = (jnp.asarray(a[:1]) for a in problem.train)
    np.testing.assert_array_equal(text[:, 1:], following[:, :-1])

    def at_position_9(text):
        """The loss at this position alone."""
        other = following.at[0, 9].set(ord("?"))
        return loss(params, (text, following)) - loss(params, (text, other))

    past, future = (text.at[0, place].set(ord("?")) for place in (8, 10))
    assert abs(at_position_9(text) - at_position_9(future)) < 1e-6
    assert abs(at_position_9(text) - at_position_9(past)) > 1e-4


def test_command_runs_and_shows_a_leaderboard(tmp_path, capsys):
    arguments = "--problem valley --optimizers adam,ftrl --rates 0.1 --seeds 1 --steps 5 --out"
    assert main(["race", *arguments.split(), str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "[1/2] ftrl on valley" in shown
    # The first line is about the time, the last ones are the advice and the page.
    first = " ".join(shown.split("[0/2]")[0].split())
    assert first.startswith("2 runs, estimated time 0:00 minutes on two idle cores")
    assert "Ctrl-C keeps finished runs" in first and "--quick" in first
    advice, last = shown.rsplit("\n\n", 1)
    assert "For dense models start with" in advice and last.endswith("out/index.html\n")
    assert (tmp_path / "out" / "valley.png").stat().st_size > 1000
    assert "data:image/png;base64" in (tmp_path / "out" / "index.html").read_text()


def test_command_takes_a_module_of_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    code = "import optax\n\ndef mine(rate):\n    return optax.sgd(rate)\n"
    (tmp_path / "module_of_the_race.py").write_text(code)
    names = "adam,optax.adamw,module_of_the_race:mine"
    arguments = f"--problem valley --optimizers {names} --rates 0.001 --seeds 1 --steps 5 --out out"
    assert main(["race", *arguments.split()]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names.split(","))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--optimizers adan", "did you mean adam"),
        ("--optimizers adam,optax.adamv", "did you mean optax.adam"),
        ("--problem digit", "did you mean digits"),
        ("--problem ,", "at least one problem"),
        ("--optimizers ,", "at least one optimizer"),
        ("--seeds 0", "positive integer"),
        ("--seeds 11 --problem quadratic_deep", "seeds must be at most 10, got 11"),
        ("--rates -1", "must be positive"),
        ("--rates ,", "at least one learning rate"),
        ("--rates 0.1,a", "could not convert string to float: 'a'"),
        ("--rates 3", "write --rates 3.0 for this learning rate, or --num-rates 3 for 3 rates"),
        ("--rates 0.1 --num-rates 3", "not allowed with"),
        ("--out /dev/null/race", "cannot be written"),
    ],
)
def test_bad_arguments_end_with_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["race", *arguments.split()])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        (["0.1"], (0.1,)),
        (["3.0"], (3.0,)),
        (["3,1,0.3"], (3.0, 1.0, 0.3)),
        (["3,", "1", "0.3"], (3.0, 1.0, 0.3)),
    ],
)
def test_rates_of_the_command(given, rates):
    assert command._rates(given) == rates


def test_num_rates_is_the_size_of_the_grid(monkeypatch):
    sizes = []

    def run(*unused, settings, **unused_too):
        sizes.append(settings.num_rates)
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "run", run)
    for flags in ([], ["--quick"], ["--num-rates", "3"], ["--quick", "--num-rates", "3"]):
        main(["race", "--problem", "valley", *flags])
    assert sizes == [5, 4, 3, 3]


def test_tables_fit_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    name = max(CATALOG, key=len)
    results = race.run([line()], [name, "adam"], settings=QUICK)
    results["problems"]["line"]["about"] = "many words " * 20
    results["results"] *= 4
    command._Screen().leaderboard(results)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert name in shown and "…" not in shown
    assert all(word in shown for word in ("rate", "loss", "µs/step", "and 2 more"))
    assert "state B/param" not in shown
    monkeypatch.setenv("COLUMNS", "200")
    command._Screen().leaderboard(results)
    assert "state B/param" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_race_as_ctrl_c_does(name, tmp_path, monkeypatch, capsys):
    number, run_one = getattr(signal, name), session.run_one
    before = signal.SIG_DFL  # whatever this process has inherited: nohup ignores SIGHUP
    inherited = signal.signal(number, before)

    def run(start, optimizer, entrant, program):
        if optimizer == "ftrl":
            assert signal.getsignal(number) != before  # or it would end the tests
            signal.raise_signal(number)
        return run_one(start, optimizer, entrant, program)

    monkeypatch.setattr(session, "run_one", run)
    arguments = "--problem valley --optimizers adam,ftrl --rates 0.1 --seeds 1 --steps 5 --out"
    try:
        code = main(["race", *arguments.split(), str(tmp_path)])
    finally:
        after = signal.signal(number, inherited)
    assert (code, after) == (128 + number, before)
    assert "Interrupted: 1 of 2 runs are finished." in (tmp_path / "index.html").read_text()
    assert "index.html shows the finished runs" in capsys.readouterr().out


def test_a_race_from_python_leaves_the_signals_alone():
    seen = []
    before = signal.getsignal(signal.SIGTERM)
    watch = lambda p: seen.append(signal.getsignal(signal.SIGTERM))
    race.run([line()], ["adam"], settings=QUICK, watch=watch)
    assert seen == [before, before]


def test_a_problem_is_prepared_once(monkeypatch):
    prepare, seen = session.prepare, []
    count = lambda problem, settings: seen.append(problem.name) or prepare(problem, settings)
    monkeypatch.setattr(session, "prepare", count)
    race.run([line()], ["adam", "momentum", "ftrl"], settings=QUICK)
    assert seen == ["line"]


def test_an_error_leaves_a_page(tmp_path, monkeypatch):
    run_one = session.run_one

    def run(start, optimizer, entrant, program):
        if optimizer == "momentum":
            raise RuntimeError("out of memory")
        return run_one(start, optimizer, entrant, program)

    monkeypatch.setattr(session, "run_one", run)
    with pytest.raises(RuntimeError, match="out of memory"):
        race.run([line()], ["adam", "momentum"], settings=QUICK, out=tmp_path)
    assert "Interrupted: 1 of 2 runs are finished." in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize("arguments", ["list", "race --list"])
def test_a_closed_pipe_is_no_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    run = [sys.executable, "-m", "optzoo", *arguments.split()]
    done = subprocess.run(run, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_the_estimate_of_the_time():
    """The usual time at first; then that of the runs, and of other problems at their pace."""
    usual, problems = race.Settings(), [PROBLEMS[name]() for name in ("digits", "valley")]
    clock = session._Clock(problems, usual)
    digits, valley = clock.usual["digits"], clock.usual["valley"]
    assert clock.left(["digits", "digits", "valley"]) == 2 * digits + valley
    clock.took("digits", 3 * digits)
    np.testing.assert_allclose(clock.left(["digits", "valley"]), 3 * (digits + valley))
    # Fewer runs are shorter, except for what is compiled.
    quick = session._Clock(problems, race.Settings(num_rates=4, seeds=2)).usual["digits"]
    assert 2 / 3 * digits < quick < digits


def test_characters_is_not_a_default_problem(monkeypatch):
    raced = []

    def run(problems, *unused, **unused_too):
        raced.append([p.name for p in problems])
        raise KeyboardInterrupt

    assert inspect.signature(race.run).parameters["problems"].default == tuple(DEFAULT_PROBLEMS)
    monkeypatch.setattr(session, "run", run)
    assert main(["race"]) == main(["race", "--problem", "characters"]) == 130
    assert (
        raced == [list(DEFAULT_PROBLEMS), ["characters"]] and "characters" not in DEFAULT_PROBLEMS
    )


def test_list_and_usage(capsys):
    assert main(["race", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "lazy_adam" in shown and "breast_cancer" in shown
    named = [line.split()[0] for line in shown.splitlines() if "Only if named" in line]
    assert named == ["characters", "quadratic_deep"]
    assert main([]) == 2 and main(["--help"]) == 0
