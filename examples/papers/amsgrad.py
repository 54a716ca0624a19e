"""AMSGrad's counter-examples: Adam goes to the worst point of a line, AMSGrad to the best one.

Each loss is linear on [-1, 1]. Its gradient is rarely large and positive, else small and negative.
The mean gradient is positive, so -1 is best. Adam divides the large gradient by the large root mean
square that it causes, and the small ones by one that has decayed, so that they prevail.

- ``theorem``: gradients 4, -1, -1, ...; b1 = 0, b2 = 1 / (1 + 4^2) (theorem 1 of the paper).
- ``online``: 1010 in every 101st step, else -10; b1 = 0.9, b2 = 0.99 (section 5).
- ``stochastic``: 1010 with probability 0.01, else -10; the same decays (section 5).
"""

import jax
import jax.numpy as jnp
import optax

import optzoo

PAPER = "Reddi et al. 2018, [AMSGrad](https://openreview.net/forum?id=ryQu7f-RZ)"
CLAIM = "on a line, Adam converges to the worst end, AMSGrad to the best"
PUBLISHED = "Adam +1, AMSGrad -1, online and stochastic (theorem 1, figure 1)"

EXAMPLES = ("theorem", "online", "stochastic")


def gradient(example, t, key):
    """The gradient at step t, counted from 1."""
    if example == "theorem":
        return jnp.where(t % 3 == 1, 4.0, -1.0)
    if example == "online":
        return jnp.where(t % 101 == 1, 1010.0, -10.0)
    return jnp.where(jax.random.bernoulli(jax.random.fold_in(key, t), 0.01), 1010.0, -10.0)


def optimizers(example, rate):
    """Both optimizers, with the same decays and rates that fall with the root of t."""
    b1, b2 = (0.0, 1 / 17) if example == "theorem" else (0.9, 0.99)
    schedule = lambda count: rate / jnp.sqrt(count + 1.0)
    return {"adam": optzoo.adam(schedule, b1, b2), "amsgrad": optzoo.amsgrad(schedule, b1, b2)}


def path(tx, example, steps, points, seed):
    """Where the parameter is at some points of a run from 0, and its mean regret over the run."""
    key = jax.random.key(seed)

    def step(carry, t):
        x, state, total = carry
        g = gradient(example, t, key)
        updates, state = tx.update(g, state, x)
        return (jnp.clip(optax.apply_updates(x, updates), -1, 1), state, total + g * (x + 1)), None

    def stretch(carry, times):
        carry, _ = jax.lax.scan(step, carry, times)
        return carry, carry[0]

    x = jnp.zeros(())
    times = jnp.arange(1, steps + 1).reshape(points, -1)
    (_, _, total), places = jax.lax.scan(stretch, (x, tx.init(x), jnp.zeros(())), times)
    return places, total / steps


def run(examples=EXAMPLES, steps=1_000_000, points=1000, rate=1.0, seeds=4):
    """Where each optimizer ends, the mean and the extremes over the seeds."""
    results = {}
    for example in examples:
        number = seeds if example == "stochastic" else 1
        for name, tx in optimizers(example, rate).items():
            one = jax.jit(jax.vmap(lambda seed, tx=tx, e=example: path(tx, e, steps, points, seed)))
            places, regret = one(jnp.arange(number))
            results.setdefault(example, {})[name] = {
                "path": places.mean(axis=0).tolist(),
                "end": [float(places[:, -1].min()), float(places[:, -1].max())],
                "regret": float(regret.mean()),
            }
    return {"steps": steps, "rate": rate, "seeds": seeds, "examples": results}


def holds(result):
    """Whether Adam ends near +1 and AMSGrad near -1, with every seed."""
    ends = [{name: r["end"] for name, r in found.items()} for found in result["examples"].values()]
    return all(end["adam"][0] > 0.9 and end["amsgrad"][1] < -0.9 for end in ends)


def here(result):
    """One line about the result."""
    end = lambda r: f"{sum(r['end']) / 2:+.2f}"
    return f"after {result['steps']:,} steps: " + "; ".join(
        f"{example}: Adam {end(found['adam'])}, AMSGrad {end(found['amsgrad'])}"
        for example, found in result["examples"].items()
    )


def draw(result, figure):
    """The paths."""
    found = result["examples"]
    for axes, (example, paths) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        for name, r in paths.items():
            steps = [result["steps"] * (i + 1) / len(r["path"]) for i in range(len(r["path"]))]
            axes.semilogx(steps, r["path"], label=name)
        axes.set(title=example, xlabel="step", ylim=(-1.1, 1.1))
    figure.axes[0].set_ylabel("parameter; -1 is best")
    figure.axes[0].legend()
