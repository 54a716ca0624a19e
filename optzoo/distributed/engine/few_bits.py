"""Sums over the replicas in few bits: codes are sent, with a scale for each block.

Codes cannot be summed in transit. Each replica receives the codes of its part from all others,
decodes and sums them, encodes the sum, and sends it to all. Each element is sent twice, as in a
ring all-reduce, independently of the number of replicas.
"""

import functools
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from .collectives import Replicas, join, split

Few = Literal["bfloat16", "int8", "int4", "int2"]
NAMES = get_args(Few)
BLOCK = 512  # elements with one scale: of 2 bits 128 bytes, a row of lanes

# Of numbers of a normal distribution four equidistant levels are best with this distance, in
# standard deviations (Max, 1960). Scaled by the largest number, most would be rounded away.
_LEVELS_OF_TWO_BITS = 0.9957


def encode(parts: Array, few: Few) -> Array:
    """Encodes float32 numbers of shape (parts, blocks, ``BLOCK``): one row for each part."""
    if few == "bfloat16":
        # As integers: compilers send numbers of 16 bits in 32 where they cannot add them.
        return _rows(lax.bitcast_convert_type(parts.astype(jnp.bfloat16), jnp.uint16))
    if few == "int2":
        deviation = jnp.sqrt(jnp.mean(parts**2, axis=-1, keepdims=True))
        scales = _LEVELS_OF_TWO_BITS * deviation
        codes = jnp.clip(jnp.floor(_divide(parts, scales)) + 2, 0, 3)
    else:
        most = _most(few)
        scales = jnp.max(jnp.abs(parts), axis=-1, keepdims=True) / most
        codes = jnp.clip(jnp.round(_divide(parts, scales)), -most, most) + most
    packed = _pack(codes.astype(jnp.uint8), _bits(few))
    # One message: of several messages only one may overlap with other operations.
    return jnp.concatenate([_rows(packed), _rows(lax.bitcast_convert_type(scales, jnp.uint8))], 1)


def decode(sent: Array, few: Few) -> Array:
    """The inverse of :func:`encode`, up to rounding."""
    if few == "bfloat16":
        numbers = lax.bitcast_convert_type(sent, jnp.bfloat16).astype(jnp.float32)
        return numbers.reshape(len(sent), -1, BLOCK)
    of_block = BLOCK * _bits(few) // 8
    blocks = sent.shape[1] // (of_block + 4)
    packed, scales = jnp.split(sent, [blocks * of_block], axis=1)
    scales = lax.bitcast_convert_type(scales.reshape(len(sent), blocks, 1, 4), jnp.float32)
    codes = _unpack(packed.reshape(len(sent), blocks, of_block), _bits(few)).astype(jnp.float32)
    zero = 1.5 if few == "int2" else _most(few)
    return (codes - zero) * scales


def sum_in_few_bits(replicas: Replicas, tree: Any, few: Few) -> tuple[Any, Any]:
    """The rounded sum over all replicas, and the rounding error of each replica.

    The exact sum is the first result plus the sum of the errors. Computed in float32.
    """
    leaves, treedef = jax.tree.flatten(tree)
    sums, lost = list(leaves), list(leaves)
    for bucket in replicas.buckets(leaves):
        parts = [leaves[i] for i in bucket]
        of_bucket = _sum(replicas, join(parts).ravel().astype(jnp.float32), few)
        for results, joined in zip((sums, lost), of_bucket, strict=True):
            whole = joined.reshape(parts[0].shape) if len(parts) == 1 else joined
            for i, part in zip(bucket, split(whole, parts), strict=True):
                results[i] = part.astype(leaves[i].dtype)
    return treedef.unflatten(sums), treedef.unflatten(lost)


def _sum(replicas: Replicas, vector: Array, few: Few) -> tuple[Array, Array]:
    number, length = replicas.size, len(vector)
    blocks = math.ceil(length / (number * BLOCK))  # of each part
    padded = jnp.pad(vector, (0, number * blocks * BLOCK - length))
    parts = padded.reshape(number, blocks, BLOCK)
    sent = encode(parts, few)
    lost = parts - decode(sent, few)
    mine = jnp.sum(decode(replicas.exchange(sent), few), axis=0, keepdims=True)
    result = encode(mine, few)
    lost = lost.at[replicas.index].add((mine - decode(result, few))[0])
    whole = decode(replicas.gather(result), few)
    return whole.reshape(-1)[:length], lost.reshape(-1)[:length]


def _rows(parts: Array) -> Array:
    return parts.reshape(len(parts), -1)


def _bits(few: Few) -> int:
    return int(few.removeprefix("int"))


def _most(few: Few) -> int:
    return 2 ** (_bits(few) - 1) - 1


def _divide(blocks: Array, scales: Array) -> Array:
    """``x / scale``, and zero for a block of zeros."""
    return jnp.where(scales > 0, blocks / jnp.where(scales > 0, scales, 1), 0)


def _pack(codes: Array, bits: int) -> Array:
    """Several codes in each byte, one from each run of a block, so that lanes are not permuted."""
    runs = jnp.split(codes, 8 // bits, axis=-1)
    return functools.reduce(jnp.bitwise_or, [run << (bits * i) for i, run in enumerate(runs)])


def _unpack(packed: Array, bits: int) -> Array:
    runs = [(packed >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)]
    return jnp.concatenate(runs, axis=-1)
