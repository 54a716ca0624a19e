"""The stability bound of elastic averaging in the round-robin scheme.

Each replica minimizes ``x^2 / 2`` with the rate ``eta`` and is drawn to the center, and the center
to it, with the moving rate ``alpha``, one replica after the other. A round is a linear map of all
parameters and the center; training is stable if none of its eigenvalues is larger than 1.

The paper takes the gradient and the distance to the center at the same parameters: ``same``, here
an exchange with a zero gradient, then a local step with the gradient of the parameters before.
TensorFlow's optimizer, and ours, exchange the parameters after the local step: ``after``. Both
halves of a round are then symmetric maps without eigenvalues beyond 1, so it is always stable.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo

PAPER = "Zhang et al. 2015, [EASGD](https://arxiv.org/abs/1412.6651)"
CLAIM = (
    "round-robin elastic averaging of $x^2/2$ is stable if $0 \\le \\eta \\le 2$ and "
    "$0 \\le \\alpha \\le (4 - 2\\eta) / (4 - \\eta)$, for any number of replicas"
)
PUBLISHED = "proved"

ORDERS = ("same", "after")


def bound(eta):
    """The largest stable alpha of the paper."""
    return (4 - 2 * eta) / (4 - eta)


def a_round(eta, alpha, replicas, order):
    """The map of (parameters of each replica, center) to those after a round."""
    tx = optzoo.elastic_average(
        optzoo.gradient_descent(eta),
        replicas,
        communication_period=1,
        moving_rate=alpha,
        order="round_robin",
    )

    def replica(x, state):
        gradient = x
        for g, exchange in {"same": ((0 * x, True), (gradient, False)), "after": ((x, True),)}[
            order
        ]:
            updates, state = tx.update(g, state, x, exchange=exchange)
            x = optax.apply_updates(x, updates)
        return x, state

    def step(point):
        x, state = optzoo.replicas.replicate(jnp.zeros(()), tx.init(jnp.zeros(())), replicas)
        state = state._replace(replicated=state.replicated._replace(center=point[-1]))
        x, state = optzoo.replicas.map_over_replicas(replica)(point[:-1], state)
        return jnp.append(x, state.replicated.center)

    return step


def radius(etas, alphas, replicas, order):
    """The largest magnitude of an eigenvalue of a round, of shape (etas, alphas)."""
    eye = jnp.eye(replicas + 1)
    matrix = lambda eta, alpha: jax.vmap(a_round(eta, alpha, replicas, order))(eye)
    matrices = jax.jit(jax.vmap(jax.vmap(matrix, (None, 0)), (0, None)))(etas, alphas)
    return np.abs(np.linalg.eigvals(np.asarray(matrices, np.float64))).max(axis=-1)


def run(replicas=(1, 2, 4, 8), points=40, margin=0.01):
    """The radius on a grid, and where it is larger than 1, by order and number of replicas.

    Points closer than ``margin`` to the bound are not counted.
    """
    etas = (np.arange(points) + 0.5) * 2.2 / points
    alphas = (np.arange(points) + 0.5) / points
    limit = np.where(etas <= 2, bound(etas), -1.0)[:, None]
    clear = (np.abs(alphas - limit) > margin) & (np.abs(etas - 2) > margin)[:, None]
    within = alphas <= limit
    result = {"etas": etas.tolist(), "alphas": alphas.tolist(), "points": int(clear.sum())}
    for order in ORDERS:
        result[order] = {}
        for number in replicas:
            found = radius(jnp.float32(etas), jnp.float32(alphas), number, order)
            stable = found <= 1 + 1e-5
            result[order][str(number)] = {
                "radius": np.round(found, 4).tolist(),
                "unstable within the bound": int((~stable & within & clear).sum()),
                "stable beyond the bound": int((stable & ~within & clear).sum()),
                "unstable, eta below 2": int((~stable & (etas < 2)[:, None]).sum()),
            }
    return result


def holds(result):
    """Whether all points within the bound are stable, in the order of the paper."""
    return not any(r["unstable within the bound"] for r in result["same"].values())


def here(result):
    """One line about the result."""
    same = result["same"]
    within = sum(r["unstable within the bound"] for r in same.values())
    beyond = {n: r["stable beyond the bound"] for n, r in same.items()}
    exact = ", ".join(n for n, count in beyond.items() if count == 0)
    slack = ", ".join(f"{count} with {n} replicas" for n, count in beyond.items() if count)
    unstable = sum(r["unstable, eta below 2"] for r in result["after"].values())
    return (
        f"{len(same)} grids of {result['points']} points: {within} are unstable within the bound; "
        f"beyond it none is stable with {exact} replicas, and {slack or 'none'}. This is for the "
        "gradient before the exchange; TensorFlow's optimizer, and ours, exchange after the step: "
        f"then {unstable} points with $\\eta < 2$ are unstable"
    )


def draw(result, figure):
    """The radius in both orders, with the bound."""
    etas, alphas = (np.array(result[key]) for key in ("etas", "alphas"))
    titles = {"same": "gradient before the exchange (paper)", "after": "exchange after the step"}
    last = [*result["same"]][-1]
    for axes, (order, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        found = np.array(result[order][last]["radius"])
        image = axes.pcolormesh(etas, alphas, found.T, vmin=0.5, vmax=1.5, cmap="RdBu_r")
        line = np.linspace(0, 2, 100)
        axes.plot(line, bound(line), "k--", label="bound of the paper")
        axes.set(title=f"{title}, {last} replicas", xlabel="eta", ylabel="alpha", ylim=(0, 1))
    figure.axes[0].legend(loc="upper right")
    figure.colorbar(image, ax=figure.axes, label="largest eigenvalue of a round")
