"""The picture of each optimizer: its path in a valley, its loss by step, its loss by rate."""

import functools
import hashlib
import io
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

import optzoo

STEPS = 300
START = jnp.array([[-1.2, 1.4]])  # one row of two parameters, so row-wise optimizers have a slot
RATES = np.logspace(-2, 1.5, 22)  # times the catalogue's
# Colours that can be seen on white and on black.
LINE, MARK, GREY = "#d9631e", "#2f8fd0", "#858585"


def valley(x):
    """Rosenbrock's function with a factor of 10: a curved valley with its minimum at (1, 1)."""
    return (1 - x[..., 0]) ** 2 + 10 * (x[..., 1] - x[..., 0] ** 2) ** 2


def track(entry: optzoo.catalog.Entry, rate):
    """The points that an optimizer visits in the valley, the start included."""
    tx = entry.make(1.0)
    loss = lambda x: jnp.sum(valley(x))

    def step(carry, count):
        x, state = carry
        updates, state = tx.update(
            jax.grad(loss)(x), state, x, learning_rate=rate, global_step=count
        )
        x = optax.apply_updates(x, updates)
        return (x, state), x[0]

    _, points = jax.lax.scan(step, (START, tx.init(START)), jnp.arange(STEPS))
    return jnp.concatenate([START, points])


def draw(name: str, cache: pathlib.Path) -> bytes:
    """The picture of an optimizer as SVG; it is computed again only if its program changes."""
    entry = optzoo.CATALOG[name]
    rates = jnp.array(RATES * entry.rate, jnp.float32)
    run = jax.vmap(functools.partial(track, entry))
    program = re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(run)(rates)))
    parts = [jax.__version__, pathlib.Path(__file__).read_text(), str(rates), program]
    key = hashlib.sha256("".join(parts).encode()).hexdigest()[:16]
    file = cache / f"{name}-{key}.svg"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        for old in cache.glob(f"{name}-????????????????.svg"):
            old.unlink()
        file.write_bytes(_figure(np.asarray(rates), np.asarray(jax.jit(run)(rates))))
    return file.read_bytes()


def _figure(rates: np.ndarray, tracks: np.ndarray) -> bytes:
    """Three panels of the tracks at all rates; the first two show the best rate."""
    with np.errstate(over="ignore", invalid="ignore"):
        losses = np.maximum(valley(tracks.astype(np.float64)), 1e-9)
    reached = np.where(np.isfinite(losses[:, -1]), losses[:, -1], np.inf)
    best = int(np.argmin(reached))
    settings = {"svg.fonttype": "none", "svg.hashsalt": "optzoo", "font.family": "sans-serif"}
    settings |= dict.fromkeys(
        ["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"], GREY
    )
    with rc_context({**settings, "font.size": 9.5, "xtick.labelsize": 8, "ytick.labelsize": 8}):
        figure = Figure(figsize=(4.6, 1.8), layout="constrained")
        path, curve, rate = figure.subplots(1, 3, width_ratios=[1.1, 1, 1])
        _path(path, tracks[best], rates[best])
        curve.plot(losses[best], color=LINE, linewidth=1.5)
        curve.set_xlabel("step")
        rate.plot(rates, reached, color=LINE, linewidth=1.5)
        rate.plot(rates[best], reached[best], "o", color=MARK, markersize=4)
        rate.set_xscale("log")
        rate.set_xlabel("learning rate")
        for axes in (curve, rate):
            axes.set_yscale("log")
            axes.set_ylim(3e-10, 3e2)
            axes.set_yticks([1e-8, 1e-4, 1], ["1e-8", "1e-4", "1"])
            axes.minorticks_off()
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.2)
        curve.set_title("loss", fontsize=9)
        rate.set_title(f"loss at step {STEPS}", fontsize=9)
        buffer = io.BytesIO()
        FigureCanvasSVG(figure)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return re.sub(rb"\n\s*", b"\n", re.sub(rb"<!DOCTYPE.*?>", b"", buffer.getvalue(), flags=re.S))


def _path(axes, points: np.ndarray, rate: float) -> None:
    """The path in the valley, with contours."""
    x, y = np.meshgrid(np.linspace(-1.8, 1.8, 70), np.linspace(-0.7, 2.3, 60))
    height = np.log10(valley(np.stack([x, y], -1)) + 1e-2)
    axes.contour(x, y, height, levels=9, colors=GREY, linewidths=0.5, alpha=0.55)
    inside = np.clip(points, -30, 30)
    axes.plot(*inside.T, color=LINE, linewidth=1.3)
    axes.plot(*points[0], "o", color=MARK, markersize=4)
    axes.plot(1, 1, "*", color="#3a9d5d", markersize=9)
    axes.set(xlim=(-1.8, 1.8), ylim=(-0.7, 2.3), xticks=[], yticks=[])
    axes.set_title(f"path, rate {rate:.2g}", fontsize=9)
