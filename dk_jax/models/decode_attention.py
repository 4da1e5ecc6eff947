"""One query a row against its keys and values, as a kernel that reads no slot beyond a row's length.

Flash decoding (Dao et al. 2023): a row's slots are shared out to several programs, each of which keeps a running softmax over its part;
their parts are put together afterwards. All query heads of a key head are worked on together, so keys and values are read once.

For NVIDIA GPUs (Pallas, lowered to Triton); `interpret` runs the same program anywhere, slowly, for tests.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from dk_jax.models.attention import MASKED
from dk_jax.models.layers import product_precision

SLOTS = 64
"""Slots that a program looks at together."""
LEAST_QUERIES = 16
"""Rows of the smallest product that tensor cores do; fewer queries are filled up."""
PROGRAMS = 1024
"""So many programs keep a large GPU busy: rows are split where there are fewer."""


def splits_of(rows: int, kv_heads: int, slots: int) -> int:
    """Programs that share a row's key head: a power of two, none of them with less than `SLOTS` slots of a full row."""
    splits = 1
    while rows * kv_heads * splits < PROGRAMS and slots >= 2 * splits * SLOTS:
        splits *= 2
    return splits


def fused_attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    lengths: Int[Array, " B"],
    *,
    splits: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B N H"]:
    """Grouped-query attention of single queries.

    Args:
      q, k, v: queries, and keys and values of all slots; N is a multiple of K, H a power of two of at least 16.
      lengths: slots of each row that are looked at, at least 1.
      splits: see `splits_of`, which is the default.

    Returns:
      The mixed values in q's type; sums are float32.
    """
    b, n, h = q.shape
    kv, slots = k.shape[1], k.shape[2]
    group, parts = n // kv, splits or splits_of(b, kv, slots)
    queries = max(LEAST_QUERIES, 1 << (group - 1).bit_length())
    grouped = jnp.pad(q.reshape(b, kv, group, h), ((0, 0), (0, 0), (0, queries - group), (0, 0)))
    kernel = functools.partial(_part, parts=parts, slots=slots, scale=h**-0.5)
    a_head = pl.BlockSpec((None, None, slots, h), lambda row, head, part: (row, head, 0, 0))

    def per_part(*sizes):
        zeros = (0,) * len(sizes)
        return pl.BlockSpec((None, None, None, *sizes), lambda row, head, part: (row, head, part, *zeros))

    mixed, largest, total = pl.pallas_call(
        kernel,
        grid=(b, kv, parts),
        in_specs=[
            pl.BlockSpec((None, None, queries, h), lambda row, head, part: (row, head, 0, 0)),
            a_head,
            a_head,
            pl.BlockSpec((None,), lambda row, head, part: (row,)),
        ],
        out_specs=[per_part(queries, h), per_part(queries), per_part(queries)],
        out_shape=[
            jax.ShapeDtypeStruct((b, kv, parts, queries, h), jnp.float32),
            jax.ShapeDtypeStruct((b, kv, parts, queries), jnp.float32),
            jax.ShapeDtypeStruct((b, kv, parts, queries), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="decode_attention",
    )(grouped, k, v, lengths.astype(jnp.int32))
    weight = jnp.exp(largest - jnp.max(largest, axis=2, keepdims=True))
    together = jnp.sum(weight[..., None] * mixed, axis=2) / jnp.sum(weight * total, axis=2)[..., None]
    return together[:, :, :group].reshape(b, n, h).astype(q.dtype)


def _product(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
    """`left`'s last axis with that axis of `right`, added up in float32 (the kernel language's own product is gone from newer versions)."""
    dims = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(left, right, dims, precision=product_precision(left.dtype), preferred_element_type=jnp.float32)


def _part(q_ref, k_ref, v_ref, length_ref, mixed_ref, largest_ref, total_ref, *, parts: int, slots: int, scale: float):
    """One part of one row's key head: values weighted by exp(score - largest), not yet divided by their total."""
    length = length_ref[()]
    blocks = pl.cdiv(length, SLOTS)
    each = pl.cdiv(blocks, parts)
    first = each * pl.program_id(2)
    last = jnp.minimum(first + each, blocks)
    q = q_ref[...]

    def look(number, carry):
        mixed, largest, total = carry
        start = number * SLOTS
        at = start + jnp.arange(SLOTS)
        here = pl.ds(start, SLOTS)
        real = at < length
        inside = jnp.broadcast_to((at < slots)[:, None], (SLOTS, q.shape[1]))
        keys = plgpu.load(k_ref.at[here, :], mask=inside, other=0.0)
        values = plgpu.load(v_ref.at[here, :], mask=jnp.broadcast_to(real[:, None], inside.shape), other=0.0)
        scores = jnp.where(real[None, :], _product(q, keys, 1) * scale, MASKED)
        highest = jnp.maximum(largest, jnp.max(scores, axis=1))
        kept, weights = jnp.exp(largest - highest), jnp.exp(scores - highest[:, None])
        mixed = kept[:, None] * mixed + _product(weights.astype(values.dtype), values, 0)
        return mixed, highest, kept * total + jnp.sum(weights, axis=1)

    empty = jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[0], MASKED, jnp.float32), jnp.zeros(q.shape[0], jnp.float32)
    mixed_ref[...], largest_ref[...], total_ref[...] = jax.lax.fori_loop(first, last, look, empty)
