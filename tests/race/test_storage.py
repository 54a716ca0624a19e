"""Nothing that a race has written is lost: two races in one folder, and damaged files."""

import copy
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import types

import optax
import pytest

from optzoo import race
from optzoo.core import locks
from optzoo.core.locks import locked
from optzoo.race import report, storage

from .test_race import QUICK, line


def names(runs):
    return sorted(run["optimizer"] for run in runs)


def start(folder, optimizers, **more):
    return race.run([line()], optimizers, settings=QUICK, out=folder, **more)


def in_file(folder):
    document = json.loads((folder / "results.json").read_text())
    return names(document["results"] + document["skipped"] + document["others"])


def on_page(folder):
    """The optimizers that the page shows."""
    text = (folder / "index.html").read_text()
    shown = text.split('id="data">')[1].split("</script>")[0]
    return sorted(optimizer["name"] for optimizer in json.loads(shown)["optimizers"])


# --------------------------------------------------------------------------- two at a time
def test_a_race_keeps_what_another_one_writes_meanwhile(tmp_path):
    def watch(progress):
        if progress.optimizer == "adam":
            start(tmp_path, ["momentum", "gradient_descent"])

    document = start(tmp_path, ["adam"], watch=watch)
    assert names(document["results"]) == ["adam"]
    assert names(document["others"]) == ["gradient_descent", "momentum"]
    assert in_file(tmp_path) == ["adam", "gradient_descent", "momentum"]
    assert on_page(tmp_path) == ["adam", "gradient_descent", "momentum"]


def test_the_page_has_the_runs_of_all_races_with_these_settings(tmp_path):
    def watch(progress):
        if progress.optimizer == "momentum":  # a race of another problem, one of other settings
            race.run([line(name="other")], ["ftrl", "adam"], settings=QUICK, out=tmp_path)
            fewer = race.Settings(rates=(0.1,), seeds=1, timed_steps=1)
            race.run([line()], ["ftrl"], settings=fewer, out=tmp_path)
            race.run([line(name="other")], ["ftrl", "adam"], settings=QUICK, out=tmp_path)

    start(tmp_path, ["adam", "momentum"], watch=watch)
    shown = json.loads((tmp_path / "results.json").read_text())
    assert {(r["problem"], r["optimizer"]) for r in shown["results"]} == {
        ("line", "adam"),
        ("line", "momentum"),
        ("other", "ftrl"),
        ("other", "adam"),
    }
    assert list(shown["problems"]) == ["line", "other"] and names(shown["others"]) == ["ftrl"]
    assert on_page(tmp_path) == ["adam", "ftrl", "momentum"]
    text = (tmp_path / "leaderboard.md").read_text()
    assert "## line" in text and "## other" in text and "| ftrl |" in text
    assert "runs are finished." not in (tmp_path / "index.html").read_text()


def test_a_changed_problem_or_factory_is_not_on_the_page(tmp_path):
    def rate_times(factor):
        def mine(rate):
            return optax.sgd(factor * rate)

        return mine

    race.run([line()], [rate_times(1), "adam"], settings=QUICK, out=tmp_path)
    race.run([line()], [rate_times(2)], settings=QUICK, out=tmp_path)
    assert len(on_page(tmp_path)) == 2 and len(in_file(tmp_path)) == 3
    race.run([line(steps=20)], ["momentum"], settings=QUICK, out=tmp_path)
    assert on_page(tmp_path) == ["momentum"] and len(in_file(tmp_path)) == 4


def test_damaged_facts_of_problems_are_left_out(tmp_path):
    race.run([line(name="other")], ["adam"], settings=QUICK, out=tmp_path)
    file = tmp_path / "results.json"
    document = json.loads(file.read_text())
    del document["problems"]["other"]["about"]
    file.write_text(json.dumps(document))
    start(tmp_path, ["momentum"])
    assert on_page(tmp_path) == ["momentum"] and in_file(tmp_path) == ["adam", "momentum"]


def test_races_side_by_side(tmp_path):
    entrants = [["adam"], ["momentum"], ["gradient_descent"], ["adagrad"]]
    threads = [threading.Thread(target=start, args=(tmp_path, one)) for one in entrants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert in_file(tmp_path) == on_page(tmp_path) == sorted(name for [name] in entrants)
    files = {"results.json", "leaderboard.md", "curves.png", "index.html"}
    assert {file.name for file in tmp_path.iterdir()} == files


def test_a_fresh_race_keeps_old_runs_until_they_are_repeated(tmp_path):
    old = {r["optimizer"]: r for r in start(tmp_path, ["adam", "momentum"])["results"]}

    def stop(progress):
        if progress.optimizer == "momentum":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, ["adam", "momentum"], fresh=True, watch=stop)
    document = json.loads((tmp_path / "results.json").read_text())
    assert names(document["results"]) == ["adam"] and document["others"] == [old["momentum"]]


def test_a_lock_is_waited_for(tmp_path):
    seen, path = [], tmp_path / ".lock"

    def other():
        with locked(path):
            seen.append("other")

    thread = threading.Thread(target=other)
    with locked(path):
        thread.start()
        thread.join(0.3)
        seen.append("first")
    thread.join()
    assert seen == ["first", "other"] and not path.exists()


def test_the_lock_of_a_dead_process_does_not_block(tmp_path):
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('locked', flush=True); sys.stdin.read()"
    )
    path = tmp_path / ".lock"
    command = [sys.executable, "-c", code, path]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"locked\n"
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    assert path.exists()
    with locked(path):
        pass
    assert not path.exists()


def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path, monkeypatch):
    path, lock = tmp_path / ".lock", locks._lock
    calls = []

    def lock_after_a_removal(file):
        lock(file)
        calls.append(file)
        if len(calls) == 1:
            path.unlink()

    monkeypatch.setattr(locks, "_lock", lock_after_a_removal)
    with locked(path):
        assert path.exists()
    assert len(calls) == 2 and calls[0].closed


def test_windows_is_asked_again(tmp_path, monkeypatch):
    """It has no lock that waits for as long as it takes."""
    asked = []

    def locking(descriptor, how, nbytes):
        asked.append((how, nbytes))
        if len(asked) < 3:
            raise PermissionError

    windows = types.SimpleNamespace(locking=locking, LK_NBLCK="not blocking")
    monkeypatch.setattr(locks, "msvcrt", windows, raising=False)
    monkeypatch.setattr(locks, "sys", types.SimpleNamespace(platform="win32"))
    monkeypatch.setattr(locks, "time", types.SimpleNamespace(sleep=lambda seconds: None))
    with locked(tmp_path / ".lock"):
        assert asked == 3 * [("not blocking", 1)]


def test_without_locks_there_is_a_warning(tmp_path, monkeypatch):
    def refuse(file):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks, "_lock", refuse)
    warns = pytest.warns(
        RuntimeWarning, match="does not support a lock for .*: let only one process"
    )
    with warns, locked(tmp_path / ".lock"):
        reached = True
    assert reached


def test_other_errors_of_locks_are_raised(tmp_path, monkeypatch):
    files = []

    def fail(file):
        files.append(file)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(locks, "_lock", fail)
    with pytest.raises(OSError, match="Input/output error"), locked(tmp_path / ".lock"):
        pass
    assert files[0].closed


# ------------------------------------------------------------------------- damaged results
@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The text of ``results.json`` after two runs."""
    folder = tmp_path_factory.mktemp("whole")
    start(folder, ["adam", "momentum"])
    return (folder / "results.json").read_text()


def changed(change):
    """Damage to the first run."""

    def damage(text):
        document = json.loads(text)
        change(document["results"][0])
        return json.dumps(document)

    return damage


def nested(levels):
    return "[" * levels + "]" * levels


# By name: the damage, and how many of the two runs are kept.
DAMAGES = {
    "empty": (lambda text: "", 0),
    "truncated": (lambda text: text[: len(text) // 2], 0),
    "no JSON": (lambda text: "results", 0),
    "no text": (lambda text: b"\xff\xfe\x00", 0),
    "a list": (lambda text: "[]", 0),
    "null": (lambda text: "null", 0),
    "without lists": (lambda text: "{}", 0),
    "a list is a dict": (lambda text: text.replace('"skipped": []', '"skipped": {}'), 2),
    "another format": (lambda text: text.replace('"others"', '"other"'), 2),
    "runs are strings": (lambda text: '{"results": ["a"], "skipped": [1], "others": [null]}', 0),
    "deep nesting": (lambda text: nested(100_000), 0),
    "deep nesting in a run": (
        lambda text: text.replace('"rows": ', f'"more": {nested(800)}, "rows": ', 1),
        1,
    ),
    "no fingerprint": (changed(lambda run: run.pop("fingerprint")), 1),
    "a fingerprint is a list": (changed(lambda run: run.update(fingerprint=[])), 1),
    "no loss": (changed(lambda run: run.pop("loss")), 1),
    "a loss is a string": (changed(lambda run: run.update(loss="0.1")), 1),
    "a mean loss is a string": (changed(lambda run: run["loss"].update(mean="0.1")), 1),
    "a loss is null": (changed(lambda run: run["loss"].update(mean=None)), 1),
    "a loss is NaN": (changed(lambda run: run["loss"].update(mean=float("nan"))), 1),
    "a rate is huge": (changed(lambda run: run.update(rate=10**400)), 1),
    "a time is a bool": (changed(lambda run: run.update({"seconds per step": True})), 1),
    "a target is empty": (changed(lambda run: run.update({"steps to target": {}})), 1),
    "a curve is shorter": (changed(lambda run: run["curve"]["mean"].pop()), 1),
    "a track is ragged": (changed(lambda run: run.update(track=[[1, 2], [3]])), 1),
    "half a character": (changed(lambda run: run.update(skipped="\ud800")), 1),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_results_are_set_aside(name, whole, tmp_path):
    damage, kept = DAMAGES[name]
    damaged = damage(whole)
    damaged = damaged if isinstance(damaged, bytes) else damaged.encode()
    assert damaged != whole.encode()
    (tmp_path / "results.json").write_bytes(damaged)
    with pytest.warns(
        UserWarning, match=r"results\.json is damaged .*; it was renamed to results\.dam"
    ):
        runs = storage.read_runs(tmp_path)
    assert len(runs) == kept
    assert (tmp_path / "results.damaged-1.json").read_bytes() == damaged
    # What is kept is in the file again, before the first new run.
    assert storage.read_runs(tmp_path) == runs


def test_a_race_goes_on_after_damage(whole, tmp_path):
    damaged = DAMAGES["no loss"][0](whole)
    (tmp_path / "results.json").write_text(damaged)
    (tmp_path / "results.damaged-1.json").write_text("older")
    seen = []
    with pytest.warns(UserWarning, match=r"it was renamed to results\.damaged-2\.json"):
        start(tmp_path, ["adam", "momentum"], watch=lambda p: seen.append(p.optimizer))
    assert seen == ["adam", ""] and in_file(tmp_path) == ["adam", "momentum"]
    assert (tmp_path / "results.damaged-1.json").read_text() == "older"
    assert (tmp_path / "results.damaged-2.json").read_text() == damaged


def test_a_folder_in_the_place_of_the_results(tmp_path):
    (tmp_path / "results.json" / "inside").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"is damaged \(it is a folder\)"):
        start(tmp_path, ["adam"])
    assert in_file(tmp_path) == ["adam"]
    assert (tmp_path / "results.damaged-1.json" / "inside").is_dir()


def test_good_results_are_not_set_aside(whole, tmp_path):
    (tmp_path / "results.json").write_text(whole)
    assert len(storage.read_runs(tmp_path)) == 2
    diverged = race.Settings(rates=(1e20,), seeds=1, timed_steps=1)
    race.run([line()], ["gradient_descent"], settings=diverged, out=tmp_path)
    assert len(storage.read_runs(tmp_path)) == 3
    assert not list(tmp_path.glob("results.damaged*"))


# ------------------------------------------------------------------------------- the pages
def test_markdown_is_escaped(whole):
    document = copy.deepcopy(json.loads(whole))
    [facts] = document["problems"].values()
    document["problems"] = {"a|b *c*\n# d": facts | {"about": "- <b>x</b> [y](z) `w`"}}
    for run in document["results"]:
        run["problem"] = "a|b *c*\n# d"
        run["metrics"] = {"under_score|": run["metrics"]["slope"]}
    document["skipped"] = [{"optimizer": "o", "problem": "p", "skipped": "1 < 2\n\n# no heading"}]
    lines = report.markdown(document).splitlines()
    assert r"## a\|b \*c\* \# d" in lines
    assert r"\- \<b\>x\</b\> \[y\](z) \`w\`; target loss 0.5" in lines
    assert r"- o on p: 1 \< 2 \# no heading" in lines
    table = [line for line in lines if line.startswith("| ")]
    assert len(table) == 4 and r" under\_score\| " in table[0]
    bars = {row.replace(r"\|", "").count("|") for row in table}
    assert len(bars) == 1
