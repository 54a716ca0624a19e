"""FlashOptim: slots in 8 bits train as well as in 32 if they are companded, and not if linear.

A causal transformer of a million parameters predicts the next character of the source of Python's
standard library. AdamW's slots are in float32, in 8 bits as ``optzoo.slots_dtype(tx, "int8")`` has
them, and in 8 bits without its functions: both moments linear in groups of 32. The second moment
is then zero where it is less than 1/510 of the greatest of its group, and the update divides by
what a single gradient adds to zero. Each method has the same seeds and batches.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optzoo
from optzoo.race import Problem
from optzoo.race.problems import characters
from optzoo.state import types
from optzoo.state.storage.codes import GROUP, decoded, encoded
from optzoo.state.storage.eight_bits import RootCodes, SignedCodes
from optzoo.state.types import LeafwiseState, NotNegative, Signed, map_nodes

PAPER = "Ortiz et al. 2026, [FlashOptim](https://arxiv.org/abs/2602.23349)"
CLAIM = "with companding, slots in 8 bits train as well as in 32; linear codes do not"
PUBLISHED = "AdamW, SGD and Lion: no measurable loss of quality on any task; linear codes diverge"
CHANCE = np.log(128)  # the loss of equal probabilities: a run that ends above it has diverged

RATE, DECAY = 1e-3, 1e-2


def model(width=128, layers=5, heads=4, steps=400):
    """A transformer on the text of the problem ``characters`` of the race."""
    data, vocabulary = characters(), 128
    context = data.train[0].shape[1]
    head = width // heads

    def init(key):
        keys = iter(jax.random.split(key, 3 + 4 * layers))
        matrix = lambda rows, columns: jax.random.normal(next(keys), (rows, columns)) / rows**0.5

        def layer():
            matrices = {"read": matrix(width, 3 * width), "join": matrix(width, width)}
            matrices |= {"widen": matrix(width, 4 * width), "narrow": matrix(4 * width, width)}
            return matrices | {"attention norm": jnp.ones(width), "norm": jnp.ones(width)}

        start = {"character": 0.3 * jax.random.normal(next(keys), (vocabulary, width))}
        start["place"] = 0.3 * jax.random.normal(next(keys), (context, width))
        rest = {"layers": [layer() for _ in range(layers)], "norm": jnp.ones(width)}
        return start | rest | {"next": matrix(width, vocabulary)}

    def block(p, x):
        h = jax.nn.standardize(x) * p["attention norm"][None]
        q, k, v = jnp.split((h @ p["read"]).reshape(-1, context, 3 * heads, head), 3, axis=2)
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + h @ p["join"]
        h = jax.nn.standardize(x) * p["norm"][None]
        return x + jax.nn.relu(h @ p["widen"]) @ p["narrow"]

    def loss(p, batch):
        text, after = batch
        x = (p["character"][text] + p["place"][None]).reshape(-1, width)
        for layer in p["layers"]:
            x = block(layer, x)
        logits = (jax.nn.standardize(x) * p["norm"][None]) @ p["next"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, after.ravel())
        return jnp.mean(losses)

    train, valid = data.train, data.valid
    return Problem(
        name="text", init=init, loss=loss, train=train, valid=valid, batch_size=4, steps=steps
    )


def _linear(what, x):
    """An array as it is after it was stored in 8 bits, linear between zero and the greatest."""
    if what not in (Signed, NotNegative) or x.ndim < 2:
        return x
    *rest, columns = x.shape
    filled = jnp.pad(x, [(0, 0)] * len(rest) + [(0, -columns % GROUP)])
    groups = filled.reshape(*rest, -1, GROUP)
    scale = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / (127 if what is Signed else 255)
    codes = jnp.round(groups / jnp.where(scale > 0, scale, 1))
    return (scale * codes).reshape(filled.shape)[..., :columns]


def linear_slots(tx):
    """An optimizer whose slots are rounded to linear codes of 8 bits after each update."""

    def store(node):
        trees = zip(types.holds(node.slots).values(), node.slots, strict=True)
        slots = (jax.tree.map(functools.partial(_linear, what), tree) for what, tree in trees)
        return node._replace(slots=node.slots._make(slots))

    def update(updates, state, params=None):
        updates, state = tx.update(updates, state, params)
        return updates, map_nodes(LeafwiseState, store, state)

    return optax.GradientTransformation(tx.init, update)


def methods(tx):
    """An optimizer with its slots in each of the forms that are compared."""
    in_codes = optzoo.slots_dtype(tx, "int8")
    return {"32 bits": tx, "8 bits": in_codes, "8 bits, linear": linear_slots(tx)}


def runs(problem, tx, seeds, start=lambda params, tx: (params, tx.init(params))):
    """The loss on the held-out text after each seed's run, and the last state and gradients.

    ``start(params, tx)`` gives the first parameters and state. The loss sees parameters in float32.
    """
    train, valid = jax.tree.map(jnp.asarray, (problem.train, problem.valid))
    wide = lambda params: jax.tree.map(lambda x: x.astype(jnp.float32), params)
    examples = len(jax.tree.leaves(train)[0])

    @jax.jit
    def run(key, batches):
        def step(carry, ids):
            params, state = carry
            batch = jax.tree.map(lambda a: a[ids], train)
            _, grads = optzoo.value_and_grad(lambda p: problem.loss(wide(p), batch))(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        carry = start(problem.init(key), tx)
        (params, state), _ = jax.lax.scan(step, carry, batches)
        return problem.loss(wide(params), valid), state

    losses = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        batches = rng.integers(examples, size=(problem.steps, problem.batch_size))
        loss, state = run(jax.random.key(seed), jnp.asarray(batches, jnp.int32))
        losses.append(float(loss))
    return losses, state


def errors(state):
    """The squared errors of both codes of Adam's slots, relative to their squares."""
    found = {}
    for name, what, kind in (("m", Signed, SignedCodes), ("v", NotNegative, RootCodes)):
        for form, stored in {
            "8 bits": lambda x, kind=kind: decoded(encoded(kind, x)),
            "8 bits, linear": functools.partial(_linear, what),
        }.items():
            matrices = [x for x in jax.tree.leaves(optzoo.get_slot(state, name)) if x.ndim > 1]
            # What the update divides by is the root of the second moment.
            of = jnp.sqrt if name == "v" else lambda x: x
            square = lambda x: float(jnp.sum(x**2))
            lost = sum(square(of(stored(x)) - of(x)) for x in matrices)
            found.setdefault(form, {})[name] = lost / sum(square(of(x)) for x in matrices)
    return found


def run(seeds=8, **sizes):
    """The losses of all seeds, None of those that diverge, and the errors of the codes."""
    problem = model(**sizes)
    tx = optzoo.adamw(RATE, weight_decay_per_step=DECAY * RATE)
    losses = {}
    for name, method in methods(tx).items():
        found, state = runs(problem, method, seeds)
        losses[name] = [x if x < CHANCE else None for x in found]
        if name == "32 bits":
            lost = errors(state)
    shapes = jax.tree.leaves(jax.eval_shape(problem.init, jax.random.key(0)))
    size = sum(x.size for x in shapes)
    return {"parameters": size, "steps": problem.steps, "losses": losses, "errors": lost}


def holds(result):
    """Whether 8 bits are within the noise of the seeds, and linear ones worse with every seed.

    Within the noise: the means differ by less than two standard errors of their difference.
    """
    wide, codes = (np.asarray(result["losses"][name]) for name in ("32 bits", "8 bits"))
    error = np.sqrt((wide.var(ddof=1) + codes.var(ddof=1)) / len(wide))
    same = abs(wide.mean() - codes.mean()) < 2 * error
    fails = all(x is None or x > max(wide) for x in result["losses"]["8 bits, linear"])
    return True if same and fails else "in part" if same or fails else False


def here(result):
    """One line about the result."""

    def shown(losses):
        if wrong := losses.count(None):
            return f"diverges with {wrong} of {len(losses)} seeds"
        return f"{np.mean(losses):.3f} ± {np.std(losses, ddof=1):.3f}"

    losses = "; ".join(f"{name}: {shown(found)}" for name, found in result["losses"].items())
    errors = "; ".join(
        f"{name}: {found['m']:.0e} and {found['v']:.0e}" for name, found in result["errors"].items()
    )
    sizes = f"{result['parameters']:,} parameters, {result['steps']} steps"
    return (
        f"AdamW, {sizes}, loss on held-out text: {losses}. Squared errors of the mean and of the "
        f"root of the second moment, relative: {errors}"
    )


def draw(result, figure):
    """The losses of all seeds."""
    axes = figure.subplots()
    for i, (name, losses) in enumerate(result["losses"].items()):
        found = [x for x in losses if x is not None]
        axes.semilogy([i] * len(found), found, "o", label=name)
    axes.set(ylabel="loss on held-out text", xticks=[])
    axes.legend()
