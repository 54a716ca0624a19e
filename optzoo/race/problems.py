"""The built-in problems: real data, without downloads."""

import collections
import functools
import pathlib
import re
import sysconfig
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ..sparse.lookup import lookup
from .problem import Problem
from .published import quadratic_deep


def digits() -> Problem:
    """Handwritten digits (scikit-learn's copy of UCI's data), a small perceptron."""
    from sklearn import datasets

    images, labels = (np.asarray(a) for a in datasets.load_digits(return_X_y=True))
    train, valid = _split(images.astype(np.float32) / 16, labels.astype(np.int32))

    def init(key):
        k1, k2 = jax.random.split(key)
        return {
            "hidden": {"w": jax.random.normal(k1, (64, 32)) / 8, "b": jnp.zeros(32)},
            "out": {"w": jax.random.normal(k2, (32, 10)) / 32**0.5, "b": jnp.zeros(10)},
        }

    def logits(p, x):
        hidden = jax.nn.relu(x @ p["hidden"]["w"] + p["hidden"]["b"][None])
        return hidden @ p["out"]["w"] + p["out"]["b"][None]

    return Problem(
        name="digits",
        init=init,
        loss=lambda p, batch: _cross_entropy(logits(p, batch[0]), batch[1]),
        train=train,
        valid=valid,
        metrics={"accuracy": lambda p, b: jnp.mean(jnp.argmax(logits(p, b[0]), axis=1) == b[1])},
        target=0.2,
        about="1,797 handwritten digits, 64-32-10 perceptron, cross-entropy on a held-out quarter",
    )


def breast_cancer() -> Problem:
    """Breast cancer diagnosis (scikit-learn's copy of UCI's data), logistic regression with L1."""
    from sklearn import datasets

    features, labels = (np.asarray(a) for a in datasets.load_breast_cancer(return_X_y=True))
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    train, valid = _split(features.astype(np.float32), labels.astype(np.float32))

    def init(key):
        return {"w": 0.1 * jax.random.normal(key, (features.shape[1],)), "b": jnp.zeros(())}

    def logit(p, x):
        return x @ p["w"] + p["b"]

    def loss(p, batch):
        x, y = batch
        return jnp.mean(jax.nn.softplus(logit(p, x)) - y * logit(p, x))

    return Problem(
        name="breast_cancer",
        init=init,
        loss=loss,
        train=train,
        valid=valid,
        metrics={
            "accuracy": lambda p, b: jnp.mean((logit(p, b[0]) > 0) == (b[1] > 0.5)),
            "zero weights": lambda p, _: jnp.sum(p["w"] == 0.0),
        },
        l1=0.01,
        target=0.2,
        about="569 cases, 30 features, logistic regression with an L1 penalty of 0.01",
    )


def words(num_rows: int = 12_000) -> Problem:
    """Skip-gram with negative sampling over the source text of Python's standard library."""
    rng = np.random.default_rng(0)
    ids, frequency = _words(num_rows)
    examples, width, negatives = 120_000, 16, 5
    positions = rng.integers(2, len(ids) - 2, examples)
    # A word, one of its four neighbours, and negative samples drawn by their frequency.
    context = ids[positions + rng.choice([-2, -1, 1, 2], examples)]
    unigram = frequency**0.75
    other = np.searchsorted(
        np.cumsum(unigram) / unigram.sum(), rng.random((examples, negatives))
    ).clip(max=num_rows - 1)
    data = (ids[positions], context, other.astype(np.int32))
    train, valid = (tuple(a[part] for a in data) for part in (slice(2048, None), slice(2048)))

    def init(key):
        k1, k2 = jax.random.split(key)
        shape = (num_rows, width)
        return {
            "word": jax.random.normal(k1, shape) * 0.3,
            "context": jax.random.normal(k2, shape) * 0.3,
        }

    def scores(p, batch):
        word, context, other = batch
        candidates = jnp.concatenate([context[:, None], other], axis=1)
        rows = lookup(p["context"], candidates)
        return jnp.einsum("bd,bkd->bk", lookup(p["word"], word), rows)

    def loss(p, batch):
        s = scores(p, batch)
        return jnp.mean(jax.nn.softplus(-s[:, 0]) + jnp.sum(jax.nn.softplus(s[:, 1:]), axis=1))

    return Problem(
        name="words",
        init=init,
        loss=loss,
        train=train,
        valid=valid,
        metrics={"accuracy": lambda p, b: jnp.mean(jnp.argmax(scores(p, b), axis=1) == 0)},
        batch_size=256,
        steps=200,
        evaluations=10,
        target=3.6,
        embeddings=True,
        about=f"skip-gram over Python's standard library, two tables of {num_rows:,} x {width}",
    )


def valley() -> Problem:
    """Rosenbrock's function in two dimensions, for the figure."""

    def init(key):
        return jnp.array([-1.2, 1.0]) + 0.1 * jax.random.normal(key, (2,))

    def loss(x, batch):
        del batch
        return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2

    nothing = np.zeros(1, np.float32)
    return Problem(
        name="valley",
        init=init,
        loss=loss,
        train=nothing,
        valid=nothing,
        batch_size=1,
        steps=300,
        evaluations=300,
        target=0.1,
        track=lambda x: x,
        about="Rosenbrock's function, exact gradients, 300 steps from around (-1.2, 1)",
    )


def characters() -> Problem:
    """A causal transformer over the characters of the source of Python's standard library."""
    context, width, heads, layers, vocabulary = 32, 32, 2, 2, 128
    text = np.frombuffer(_standard_library().encode("ascii", "replace"), np.uint8)
    cut = len(text) * 9 // 10
    rng = np.random.default_rng(0)

    def examples(text, number):
        starts = rng.integers(len(text) - context, size=number)
        windows = text[starts[:, None] + np.arange(context + 1)[None]].astype(np.int32)
        return windows[:, :-1], windows[:, 1:]

    def init(key):
        keys = iter(jax.random.split(key, 3 + 6 * layers))
        table = lambda rows: jax.random.normal(next(keys), (rows, width))
        matrix = lambda rows, columns: jax.random.normal(next(keys), (rows, columns)) / rows**0.5

        def layer():
            attention = {name: matrix(width, width) for name in ("query", "key", "value", "join")}
            perceptron = {"widen": matrix(width, 4 * width), "narrow": matrix(4 * width, width)}
            norms = {name: jnp.ones(width) for name in ("attention_norm", "perceptron_norm")}
            return attention | perceptron | norms

        return {
            "character": table(vocabulary),
            "position": table(context),
            "layers": [layer() for _ in range(layers)],
            "norm": jnp.ones(width),
            "next": matrix(width, vocabulary),
        }

    def normed(x, scale):
        return jax.nn.standardize(x) * scale[None]

    def attention(p, x):
        q, k, v = (
            (x @ p[name]).reshape(-1, context, heads, width // heads)
            for name in ("query", "key", "value")
        )
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["join"]

    def perceptron(p, x):
        return jax.nn.relu(x @ p["widen"]) @ p["narrow"]

    def logits(p, text):
        """The logits of the next character, one row for each character."""
        h = (p["character"][text] + p["position"][None]).reshape(-1, width)
        for layer in p["layers"]:
            h = h + attention(layer, normed(h, layer["attention_norm"]))
            h = h + perceptron(layer, normed(h, layer["perceptron_norm"]))
        return normed(h, p["norm"]) @ p["next"]

    return Problem(
        name="characters",
        init=init,
        loss=lambda p, batch: _cross_entropy(logits(p, batch[0]), batch[1].ravel()),
        train=examples(text[:cut], 10_000),
        valid=examples(text[cut:], 64),
        metrics={
            "accuracy": lambda p, b: jnp.mean(jnp.argmax(logits(p, b[0]), axis=1) == b[1].ravel())
        },
        batch_size=16,
        target=2.55,
        about=f"the next character of Python's standard library, causal transformer of {layers} "
        f"layers of {width}, cross-entropy on held-out modules",
    )


# The problems of a race by default, and all built-in problems.
DEFAULT_PROBLEMS: dict[str, Callable[[], Problem]] = {
    "digits": digits,
    "breast_cancer": breast_cancer,
    "words": words,
    "valley": valley,
}
PROBLEMS = DEFAULT_PROBLEMS | {"characters": characters, "quadratic_deep": quadratic_deep}


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy over the rows."""
    log_probability = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probability, labels[:, None], axis=1))


def _split(*arrays: np.ndarray):
    """Splits into training and validation data: a fixed random quarter is held out."""
    order = np.random.default_rng(0).permutation(len(arrays[0]))
    cut = len(order) // 4
    train, valid = order[cut:], order[:cut]
    return tuple(a[train] for a in arrays), tuple(a[valid] for a in arrays)


@functools.cache
def _words(vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """All words of the modules as ids, by decreasing frequency, and the frequencies.

    Words that are too rare for an own id have id 0.
    """
    tokens = re.findall(r"[A-Za-z_][A-Za-z_0-9]*", _standard_library())
    common = collections.Counter(tokens).most_common(vocabulary - 1)
    if len(common) < vocabulary - 1:
        raise ValueError(
            f"the standard library in {_STDLIB} has only {len(common):,} different words; "
            f"words needs {vocabulary - 1:,}: is its source installed?"
        )
    number = {word: i for i, (word, _) in enumerate(common, start=1)}
    ids = np.fromiter((number.get(t, 0) for t in tokens), np.int32, len(tokens))
    return ids, np.bincount(ids, minlength=vocabulary).astype(np.float64)


_STDLIB = pathlib.Path(sysconfig.get_paths()["stdlib"])


@functools.cache
def _standard_library() -> str:
    """The source text of all modules of Python's standard library without its tests."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = sorted(f for f in _STDLIB.rglob("*.py") if not skipped & set(f.parts))
    return "\n".join(f.read_text("utf-8", errors="ignore") for f in files)
