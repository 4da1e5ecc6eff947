"""Attention proper: causal over a whole sequence. (Against a cache: dk_jax.generation.kv_cache.)

Scores and softmax are float32. There are no segment ids: a row holds one sequence, right-padded, and
causality alone keeps padding out of every real position. Packing several sequences into a row is not
supported.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dk_jax.models.layers import product_precision

BLOCK_SCORES = 2**22
"""About how many scores of a head "blocks" holds at once."""
MASKED = -1e30
"""Score of a forbidden key. Finite, so that a query with no key at all gives an average, never a NaN."""


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    lengths: Int[Array, " B"],
    implementation: Literal["xla", "cudnn", "blocks"],
) -> Float[Array, "B T N H"]:
    """Grouped-query causal attention over right-padded rows.

    Args:
      q, k, v: queries, keys and values; N is a multiple of K.
      lengths: real tokens of each row; only cuDNN needs them, to skip work on padding.
      implementation: "xla" materialises [B, N, T, T] scores; "cudnn" is the fused kernel for bfloat16; "blocks" takes the queries in
        blocks whose scores it computes again in the backward pass, so that memory grows with T and not with its square, on any device.

    Returns:
      The mixed values; positions at or beyond a row's length are unspecified but finite.
    """
    if implementation == "cudnn":
        lengths = jnp.maximum(lengths, 1).astype(jnp.int32)
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )
    if implementation == "blocks":
        return _in_blocks(q, k, v, min(q.shape[1], max(16, BLOCK_SCORES // q.shape[1])))
    return _attend(q, k, v, jnp.arange(q.shape[1]))


def _attend(q: Float[Array, "B t N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], positions: Int[Array, " t"]):
    """Queries at these positions look at all keys up to their own."""
    b, t, n, h = q.shape
    precision = product_precision(q.dtype)
    grouped = q.reshape(b, t, k.shape[2], n // k.shape[2], h)
    scores = jnp.einsum(
        "btkgh,bskh->bkgts", grouped, k, precision=precision, preferred_element_type=jnp.float32
    )
    weights = masked_softmax(scores * h**-0.5, positions[:, None] >= jnp.arange(k.shape[1])[None, :]).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v, precision=precision).reshape(b, t, n, h)


def _in_blocks(q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], size: int):
    """The same with `size` queries at a time."""
    b, t, n, h = q.shape
    count = -(-t // size)
    blocks = jnp.pad(q, ((0, 0), (0, count * size - t), (0, 0), (0, 0))).reshape(b, count, size, n, h).swapaxes(0, 1)

    def block(_, piece):
        return None, _attend(piece[0], k, v, piece[1])

    positions = jnp.arange(count * size).reshape(count, size)
    _, mixed = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), None, (blocks, positions))
    return mixed.swapaxes(0, 1).reshape(b, count * size, n, h)[:, :t]


def masked_softmax(scores: Float[Array, " ..."], allowed: Bool[Array, " ..."]) -> Float[Array, " ..."]:
    """Over the last axis, of what is allowed."""
    return jax.nn.softmax(jnp.where(allowed, scores, MASKED), axis=-1)
