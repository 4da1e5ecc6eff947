"""One query a row against its keys and values, as kernels that read no slot beyond a row's length.

Flash decoding (Dao et al. 2023): a row's slots are shared out to several programs, each of which keeps a running softmax over its part;
their parts are put together afterwards. All query heads of a key head are worked on together, so keys and values are read once.
`fused_attention` is that alone. `fused_step` takes what the product of queries, keys and values gives, and does what lies between it and
the output's product: norms, RoPE, the new slot's writing, attention. A small model's step is made of kernels that each take as long as
starting one does, so their number is what counts.

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

SLOTS, STAGES = 64, 2
"""Slots that a program looks at together, and how many such looks are under way: the fastest of ten cuts on an H200, for 64 rows with 8 key heads
of 128 numbers and 768 slots. Half full 30.0 us, all full 51.8 us, where the memory's own time is 24.0 and 47.9; 64 slots in 3 stages take
33.4 and 57.6 us, 32 in 4 stages 31.3 and 53.9 (`scripts/bench/results/kernels_attention.json`)."""
LEAST_QUERIES = 16
"""Rows of the smallest product that tensor cores do; fewer queries are filled up."""
PROGRAMS = 1024
"""So many programs keep a large GPU busy: rows are split where there are fewer."""
SHORT = 1024
"""Slots up to which half as many do for `fused_step`, whose rows that are not split need no kernel more to put their parts together (the same
64 rows in two parts: 34.4 us half full, 56.9 all full)."""


def splits_of(rows: int, kv_heads: int, slots: int, programs: int = PROGRAMS) -> int:
    """Programs that share a row's key head: a power of two, none of them with less than `SLOTS` slots of a full row."""
    splits = 1
    while rows * kv_heads * splits < programs and slots >= 2 * splits * SLOTS:
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
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=STAGES),
        interpret=interpret,
        name="decode_attention",
    )(grouped, k, v, lengths.astype(jnp.int32))
    weight = jnp.exp(largest - jnp.max(largest, axis=2, keepdims=True))
    together = jnp.sum(weight[..., None] * mixed, axis=2) / jnp.sum(weight * total, axis=2)[..., None]
    return together[:, :, :group].reshape(b, n, h).astype(q.dtype)


def fused_step(
    products: Float[Array, "B N+2K H"],
    scale: Float[Array, "N+K H"] | None,
    rope: tuple[Float[Array, "B H"], Float[Array, "B H"]],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    positions: Int[Array, " B"],
    slots: Int[Array, " B"],
    *,
    eps: float,
    splits: int | None = None,
    block: int = SLOTS,
    num_warps: int = 4,
    num_stages: int = STAGES,
    interpret: bool = False,
) -> tuple[Float[Array, "B N H"], tuple[Array, Array]]:
    """A decode step's attention, from the raw queries, keys and values of a token a row to the mixed values.

    Args:
      products: of N query, K key and K value heads; N is a multiple of K, H a power of two of at least 32.
      scale: of the RMSNorms on query and key heads, if there are such. eps: theirs.
      rope: cosines and sines of the tokens' positions, float32, both halves alike.
      k, v: what is there, changed in place where the caller gives it away.
      positions: where each row's token stands: it looks at the slots before, and at itself.
      slots: where its key and value are written; nowhere if at or beyond S.
      splits: see `splits_of`, which is the default.
      block: slots that a program looks at together.

    Returns:
      The mixed values in the products' type, and keys and values with the new ones. Rounded where `fused_attention` after norms and
      `rotate` rounds; sums are float32.
    """
    b, both, h = products.shape
    kv, all_slots = k.shape[1], k.shape[2]
    n = both - 2 * kv
    group, parts = n // kv, splits or splits_of(b, kv, all_slots, PROGRAMS // 2 if all_slots <= SHORT else PROGRAMS)
    queries = max(LEAST_QUERIES, 1 << (group - 1).bit_length())
    a_row = lambda *sizes: pl.BlockSpec((None, *sizes), lambda row, head, part: (row, *(0,) * len(sizes)))  # noqa: E731
    a_head = pl.BlockSpec((None, None, all_slots, h), lambda row, head, part: (row, head, 0, 0))
    whole = [] if scale is None else [pl.BlockSpec((both - kv, h), lambda row, head, part: (0, 0))]
    cosines, sines = (angles[:, : h // 2] for angles in rope)
    alone = parts == 1

    def per_part(*sizes):
        zeros = (0,) * len(sizes)
        return pl.BlockSpec((None, None, None, *sizes), lambda row, head, part: (row, head, part, *zeros))

    kernel = functools.partial(
        _step, n=n, kv=kv, queries=queries, parts=parts, slots=all_slots, block=block, normed=scale is not None, eps=eps
    )  # fmt: skip
    sums = [] if alone else [jax.ShapeDtypeStruct((b, kv, parts, group), jnp.float32)] * 2
    mixed_as = jax.ShapeDtypeStruct((b, n, h), products.dtype) if alone else jax.ShapeDtypeStruct((b, kv, parts, group, h), jnp.float32)
    first = 3 + len(whole)
    *found, keys, values = pl.pallas_call(
        kernel,
        grid=(b, kv, parts),
        in_specs=[a_row(both, h), *whole, a_row(h // 2), a_row(h // 2), a_head, a_head, a_row(), a_row()],
        out_specs=[a_row(n, h) if alone else per_part(group, h), *([per_part(group)] * len(sums)), a_head, a_head],
        out_shape=[mixed_as, *sums, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v))],
        input_output_aliases={first: 1 + len(sums), first + 1: 2 + len(sums)},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name="decode_step",
    )(products, *([] if scale is None else [scale]), cosines, sines, k, v, positions.astype(jnp.int32), slots.astype(jnp.int32))
    if alone:
        return found[0], (keys, values)
    mixed, largest, total = found
    weight = jnp.exp(largest - jnp.max(largest, axis=2, keepdims=True))
    together = jnp.sum(weight[..., None] * mixed, axis=2) / jnp.sum(weight * total, axis=2)[..., None]
    return together.reshape(b, n, h).astype(products.dtype), (keys, values)


def _step(products_ref, *refs, n: int, kv: int, queries: int, parts: int, slots: int, block: int, normed: bool, eps: float):
    """One part of one row's key head; the last one has the new slot. A single part divides by its total itself."""
    (scale_ref,), refs = (refs[:1], refs[1:]) if normed else ((None,), refs)
    cos_ref, sin_ref, k_ref, v_ref, position_ref, slot_ref, mixed_ref, *sum_refs, k_out_ref, v_out_ref = refs
    h, dtype, group = products_ref.shape[-1], products_ref.dtype, n // kv
    half, head, part = h // 2, pl.program_id(1), pl.program_id(2)
    low, high = pl.ds(0, half), pl.ds(half, half)
    cos, sin = cos_ref[...], sin_ref[...]
    real_query = jnp.arange(queries) < group

    def turned(first, second, scale_first, scale_second):
        """Both halves of heads, through their norm and RoPE, in float32 but rounded as the model does."""
        if normed:
            mean = (jnp.sum(first * first, axis=-1, keepdims=True) + jnp.sum(second * second, axis=-1, keepdims=True)) / h
            inverse_rms = jax.lax.rsqrt(mean + eps)
            first = (first * inverse_rms * scale_first).astype(dtype).astype(jnp.float32)
            second = (second * inverse_rms * scale_second).astype(dtype).astype(jnp.float32)
        return (first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype)

    def heads(ref, start, count, columns):
        """Some heads' halves; `count` None: of one head."""
        if count is None:
            return plgpu.load(ref.at[pl.ds(start, 1), columns]).astype(jnp.float32)
        mask = jnp.broadcast_to(real_query[:, None], (count, half))
        return plgpu.load(ref.at[pl.ds(start, count), columns], mask=mask, other=0.0).astype(jnp.float32)

    def both_halves(start, count):
        halves = [heads(products_ref, start, count, columns) for columns in (low, high)]
        scales = [heads(scale_ref, start, count, columns) if normed else None for columns in (low, high)]
        return turned(*halves, *scales)

    q_low, q_high = both_halves(head * group, queries)
    new_low, new_high = both_halves(n + head, None)
    new_value = plgpu.load(products_ref.at[pl.ds(n + kv + head, 1), :])
    position, slot = position_ref[()], slot_ref[()]
    blocks = pl.cdiv(position, block)
    each = pl.cdiv(blocks, parts)
    first = jnp.minimum(each * part, blocks)
    last = jnp.minimum(first + each, blocks)

    def look(number, carry):
        mixed, largest, total = carry
        at = number * block + jnp.arange(block)
        here, real = pl.ds(number * block, block), at < position
        inside = jnp.broadcast_to(real[:, None], (block, half))
        keys_low, keys_high = (plgpu.load(k_ref.at[here, columns], mask=inside, other=0.0) for columns in (low, high))
        values = plgpu.load(v_ref.at[here, :], mask=jnp.broadcast_to(real[:, None], (block, h)), other=0.0)
        scores = (_product(q_low, keys_low, 1) + _product(q_high, keys_high, 1)) * h**-0.5
        scores = jnp.where(real[None, :], scores, MASKED)
        highest = jnp.maximum(largest, jnp.max(scores, axis=1))
        kept, weights = jnp.exp(largest - highest), jnp.exp(scores - highest[:, None])
        mixed = kept[:, None] * mixed + _product(weights.astype(values.dtype), values, 0)
        return mixed, highest, kept * total + jnp.sum(weights, axis=1)

    empty = jnp.zeros((queries, h), jnp.float32), jnp.full(queries, MASKED, jnp.float32), jnp.zeros(queries, jnp.float32)
    mixed, largest, total = jax.lax.fori_loop(first, last, look, empty)

    mine = part == parts - 1
    score = jnp.sum(q_low.astype(jnp.float32) * new_low.astype(jnp.float32) + q_high.astype(jnp.float32) * new_high.astype(jnp.float32), axis=1)
    score = jnp.where(mine, score * h**-0.5, MASKED)
    highest = jnp.maximum(largest, score)
    kept, weight = jnp.exp(largest - highest), jnp.where(mine, jnp.exp(score - highest), 0.0)
    mixed = kept[:, None] * mixed + weight.astype(dtype).astype(jnp.float32)[:, None] * new_value.astype(jnp.float32)
    total = kept * total + weight

    written = jnp.broadcast_to(mine & (slot < slots), (1, half))
    here = pl.ds(jnp.minimum(slot, slots - 1), 1)
    plgpu.store(k_out_ref.at[here, low], new_low, mask=written)
    plgpu.store(k_out_ref.at[here, high], new_high, mask=written)
    plgpu.store(v_out_ref.at[here, :], new_value, mask=jnp.broadcast_to(mine & (slot < slots), (1, h)))
    real = jnp.broadcast_to(real_query[:, None], (queries, h))
    if parts == 1:
        plgpu.store(mixed_ref.at[pl.ds(head * group, queries), :], (mixed / total[:, None]).astype(dtype), mask=real)
        return
    plgpu.store(mixed_ref.at[pl.ds(0, queries), :], mixed, mask=real)
    for ref, value in zip(sum_refs, (highest, total), strict=True):
        plgpu.store(ref.at[pl.ds(0, queries)], value, mask=real_query)


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
