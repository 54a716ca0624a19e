"""Options of the race, of its problems and settings, and of its command."""

import contextlib
import functools
import io
import pathlib
import tempfile
from unittest import mock

import jax.numpy as jnp
import numpy as np

import optzoo
from optzoo import CATALOG, race
from optzoo.__main__ import main
from optzoo.race import runner, session

from .effects import Table

TABLE = Table()
effect = TABLE.effect


def problem(**changes):
    """A loss of which the gradient is 1, from a parameter of 1."""
    fields = {
        "name": "usual",
        "init": lambda key: {"w": jnp.ones(())},
        "loss": lambda p, batch: jnp.mean(batch) * p["w"],
        "train": np.ones(8, np.float32),
        "valid": np.ones(8, np.float32),
        "batch_size": 4,
        "steps": 4,
        "evaluations": 2,
    }
    return race.Problem(**{**fields, **changes})


def settings(**changes):
    fields = {"rates": (0.125,), "seeds": 1, "timed_steps": 1, "timed_stretches": 1}
    return race.Settings(**{**fields, **changes})


def ran(of=None, of_settings=None, **options):
    """What a race says of one run of gradient descent; and of its problem."""
    options = {"optimizers": ["gradient_descent"], **options}
    document = race.run([of or problem()], settings=of_settings or settings(), **options)
    [result] = document["results"]
    return {**document["problems"][result["problem"]], **result}


@functools.cache
def usual():
    return ran()


@functools.cache
def other():
    """Of a problem with another value of each field that does not change the training."""
    return ran(
        problem(
            name="other",
            metrics={"w": lambda p, _: p["w"]},
            steps=6,
            evaluations=3,
            target=0.75,
            track=lambda p: p["w"],
            published=lambda optimizer: {"of": optimizer},
            embeddings=True,
            about="A line.",
        ),
        settings(rates=(0.25, 0.125), seeds=2),
    )


def differs(function, option, expected, seen):
    """A row: what is seen in the two runs."""
    usually, otherwise = expected
    row = effect(function, option, {"usual": usually, "other": otherwise})
    row(lambda which: seen({"usual": usual, "other": other}[which]()))


of_problem = functools.partial(differs, "race.Problem")
of_problem("name", ("usual", "other"), lambda run: run["problem"])
of_problem("metrics", ({}, ["w"]), lambda run: run["metrics"] and [*run["metrics"]])
of_problem("steps", (4, 6), lambda run: run["curve"]["steps"][-1])
of_problem("evaluations", (3, 4), lambda run: len(run["curve"]["steps"]))
of_problem(
    "target", (None, 2), lambda run: run["steps to target"] and run["steps to target"]["mean"]
)
of_problem("track", (None, 4), lambda run: run["track"] and len(run["track"]))
of_problem("published", (None, {"of": "gradient_descent"}), lambda run: run.get("published"))
of_problem("embeddings", (False, True), lambda run: "seconds per dense step" in run)
of_problem("about", ("", "A line."), lambda run: run["about"])
differs("race.run", "problems", ("usual", "other"), lambda run: run["problem"])
differs("race.run", "settings", (1, 2), lambda run: len(run["rates"]))
differs(
    "race.Settings",
    "rates",
    ([0.125], [0.25, 0.125]),
    lambda run: [r["rate"] for r in run["rates"]],
)
differs("race.Settings", "seeds", (1, 2), lambda run: len(run["rates"][0]["losses"]))

# The loss at the end: the parameter becomes 0.5 in four steps.
TRAINED = {
    "init": (lambda key: {"w": jnp.full((), 2.0)}, 1.5),
    "loss": (lambda p, batch: 2 * jnp.mean(batch) * p["w"], 0.0),
    "train": (np.full(8, 2, np.float32), 0.0),
    "valid": (np.full(8, 3, np.float32), 1.5),
    "l1": (1.0, 0.0),  # the gradient is twice as large
}
for option, (value, expected) in TRAINED.items():

    @effect("race.Problem", option, {"usual": 0.5, "other": expected})
    def _(which, option=option, value=value):
        return (usual() if which == "usual" else ran(problem(**{option: value})))["loss"]["mean"]


@effect("catalog.Entry", "l1_of_the_sum", {False: 0.5, True: 2.0})
def _(l1_of_the_sum):
    """The strength that the optimizer is given for one of 0.5: of a step, or of all four."""
    found = set()

    def mine(learning_rate, l1_regularization_strength=0.0):
        found.add(l1_regularization_strength)
        return optzoo.gradient_descent(learning_rate)

    optzoo.registry.register("mine", mine, l1_of_the_sum=l1_of_the_sum)
    try:
        ran(problem(l1=0.5), optimizers=["mine"])
    finally:
        CATALOG.pop("mine")
    return max(found)


@effect("race.Problem", "batch_size", {4: {(4,)}, 2: {(2,)}})
def _(batch_size):
    """The shape of a batch: other calls have one example, or all."""
    shapes = set()

    def loss(p, batch):
        shapes.add(batch.shape)
        return jnp.mean(batch) * p["w"]

    ran(problem(loss=loss, batch_size=batch_size))
    return shapes - {(1,), (8,)}


@effect("race.Problem", "batches", {0: 1.0, 1: 0.5})
def _(example):
    """The loss, if each batch is that example: 0 or 1."""
    batches = lambda seed, steps: np.full((steps, 4), example)
    train = np.arange(8, dtype=np.float32)
    return ran(problem(train=train, batches=batches))["loss"]["mean"]


@effect("race.Settings", "steps", {None: 4, 2: 2})
def _(steps):
    return (usual() if steps is None else ran(None, settings(steps=steps)))["curve"]["steps"][-1]


@effect("race.Settings", "num_rates", {2: 2, 3: 3})
def _(num_rates):
    return len(race.Settings(num_rates=num_rates).grid(0.1))


@effect("race.Settings", "extensions", {0: 2, 1: 4})
def _(extensions):
    """How many rates are tried, of which the greatest is always the best one."""
    return len(ran(None, settings(rates=None, num_rates=2, extensions=extensions))["rates"])


@effect("race.Settings.grid", "block", {0: [0.1, 0.32], 1: [1.0, 3.2]})
def _(block):
    return race.Settings(num_rates=2).grid(0.1, block).tolist()


for option, argument in {"timed_steps": "steps", "timed_stretches": "stretches"}.items():

    @effect("race.Settings", option, {1: 1, 2: 2})
    def _(number, option=option, argument=argument):
        with mock.patch.object(runner, "time_stretches", return_value=[1.0]) as timed:
            ran(None, settings(**{option: number}))
        return timed.call_args.kwargs[argument]


@effect("race.run", "optimizers", {"gradient_descent": "gradient_descent", "momentum": "momentum"})
def _(name):
    return ran(optimizers=[name])["optimizer"]


def in_folder(folder, **options):
    """The optimizers that are run; the files for readers are not written."""
    seen = []
    with mock.patch.object(session, "_publish"):
        ran(out=folder, watch=lambda progress: seen.append(progress.optimizer), **options)
    return seen


@effect("race.run", "out", {False: [], True: ["results.json"]})
def _(out):
    with tempfile.TemporaryDirectory() as folder:
        in_folder(folder if out else None)
        return [path.name for path in pathlib.Path(folder).glob("*.json")]


@effect("race.run", "fresh", {False: [""], True: ["gradient_descent", ""]})
def _(fresh):
    """What is run when it was run before."""
    with tempfile.TemporaryDirectory() as folder:
        in_folder(folder)
        return in_folder(folder, fresh=fresh)


@effect("race.run", "watch", {False: [], True: ["gradient_descent", ""]})
def _(watch):
    seen = []
    note = lambda progress: seen.append(progress.optimizer)
    ran(watch=note if watch else None)
    return seen


# The command


@functools.cache
def commanded(flags):
    """The problems, the optimizers and the other arguments of the race that a command starts."""
    with mock.patch.object(session, "run", side_effect=KeyboardInterrupt) as run:
        flags = flags if "--problem" in flags else f"--problem valley {flags}"
        main(["race", *flags.split()])
    problems, optimizers = run.call_args.args
    return {"problems": problems, "optimizers": optimizers, **run.call_args.kwargs}


def of_settings(flags, name):
    return getattr(commanded(flags)["settings"], name)


def command(option, expected):
    return effect("optzoo race", option, expected)


@command("--problem", {"valley": ["valley"], "quadratic_deep": ["quadratic_deep"]})
def _(name):
    return [p.name for p in commanded(f"--problem {name} --seeds 1")["problems"]]


@command("--optimizers", {"adam": ["adam"], "adam,ftrl": ["adam", "ftrl"]})
def _(names):
    return commanded(f"--optimizers {names}")["optimizers"]


@command("--replicas", {"": False, "--replicas": True})
def _(flags):
    return "diloco" in commanded(flags)["optimizers"]


@command("--rates", {"": None, "--rates 1 0.1": (1.0, 0.1)})
def _(flags):
    return of_settings(flags, "rates")


@command("--num-rates", {"": 5, "--num-rates 3": 3})
def _(flags):
    return of_settings(flags, "num_rates")


@command("--seeds", {"": 3, "--seeds 4": 4})
def _(flags):
    return of_settings(flags, "seeds")


@command("--steps", {"": None, "--steps 9": 9})
def _(flags):
    return of_settings(flags, "steps")


@command("--quick", {"": (5, 3, False), "--quick": (4, 2, True)})
def _(flags):
    """The rates, the seeds, and whether there are 16 optimizers."""
    of_command = [of_settings(flags, name) for name in ("num_rates", "seeds")]
    return (*of_command, len(commanded(flags)["optimizers"]) == 16)


@command("--out", {"": "race", "--out other": "other"})
def _(flags):
    return commanded(flags)["out"]


@command("--fresh", {"": False, "--fresh": True})
def _(flags):
    return commanded(flags)["fresh"]


@command("--list", {"": False, "--list": True})
def _(flags):
    """Whether names are shown, and nothing is run."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), mock.patch.object(session, "run") as run:
        run.side_effect = KeyboardInterrupt
        main(["race", "--problem", "valley", *flags.split()])
    return "breast_cancer" in shown.getvalue() and not run.called


test_an_option_has_its_effect = TABLE.test()
