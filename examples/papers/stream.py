"""A stream of sparse binary examples from real text, as in the prediction of clicks.

Does a word end here? The text is that of the problem ``characters`` of the race, the source of
Python's standard library. The features of an example are the last one to five characters, each of
the five hashed: a few are frequent, and most are rare.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optzoo.race.problems import characters

LONGEST = 5  # characters of a feature


class Stream(NamedTuple):
    """Batches to train on, in order, and examples to judge by."""

    ids: np.ndarray  # (steps, batch, 5)
    labels: np.ndarray  # (steps, batch)
    test_ids: np.ndarray  # (examples, 5)
    test_labels: np.ndarray
    size: int  # number of features


def word_ends(size=2**15, steps=1000, batch=200, tests=20_000):
    """The stream."""
    text, after = characters().train
    hashed, ids = np.zeros(text.shape, np.int64), []
    for length in range(
        LONGEST
    ):  # a multiplicative hash of the characters before, and their number
        hashed = (hashed + np.roll(text, length, axis=1) * 31**length) * 1_000_003 % 2_147_483_647
        ids.append(hashed % size)
    ids = np.stack(ids, axis=-1)[:, LONGEST - 1 :].reshape(-1, LONGEST)
    in_word = np.array([chr(code).isalnum() or chr(code) == "_" for code in range(128)])
    labels = ~in_word[after[:, LONGEST - 1 :]].ravel()
    order = np.random.default_rng(0).permutation(len(ids))[: steps * batch + tests]
    ids, labels = ids[order].astype(np.int32), labels[order].astype(np.float32)
    cut = steps * batch
    train = ids[:cut].reshape(steps, batch, LONGEST), labels[:cut].reshape(steps, batch)
    return Stream(*train, ids[cut:], labels[cut:], size)


def logit(weights, ids):
    """The sum of the weights of the features of each example."""
    return weights[ids].sum(axis=-1)


def loss(weights, ids, labels):
    """The logistic loss, summed over the examples: as if they came one by one."""
    s = logit(weights, ids)
    return jnp.sum(jnp.logaddexp(0.0, s) - labels * s)


def auc(scores, labels):
    """The probability that a positive example has a higher score than a negative one."""
    order = np.argsort(scores, kind="stable")
    _, group, count = np.unique(scores[order], return_inverse=True, return_counts=True)
    middle = np.cumsum(count) - (count - 1) / 2  # equal scores share their mean rank
    ranks = np.empty(len(scores))
    ranks[order] = middle[group]
    positive = labels > 0.5
    total = positive.sum()
    return float((ranks[positive].sum() - total * (total + 1) / 2) / (total * (~positive).sum()))
