"""What lies between the joined product of queries, keys and values and attention, for the first tokens of prompts, as one kernel.

Norms on heads, RoPE, and the cache's writing: XLA makes seven kernels of them, which together take two to three times as long as the
layer's products (seen on an H200 with 32 prompts of 512 tokens and a model of 0.6B). Here the products are read once and everything is written once.

For NVIDIA GPUs (Pallas, lowered to Triton); `interpret` runs the same program anywhere, slowly, for tests.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

TOKENS, WARPS = 16, 4
"""Tokens of a key head and of its query heads that a program works on, and its warps."""

Pair = tuple[Array, Array]


def fused_first(
    products: Float[Array, "b T N+2K H"],
    scale: Float[Array, "N+K H"] | None,
    rope: tuple[Float[Array, "T H"], Float[Array, "T H"]],
    k: Array,
    v: Array,
    rows: Int[Array, " b"],
    *,
    eps: float,
    heads_first: bool,
    tokens: int = TOKENS,
    num_warps: int = WARPS,
    interpret: bool = False,
) -> tuple[Float[Array, "b T N H"], Float[Array, "b T K H"], Float[Array, "b T K H"], Pair]:
    """Queries, keys and values of T tokens a row, the first of their sequences, for attention and in the cache.

    Args:
      products: of N query, K key and K value heads; N is a multiple of K, H a power of two of at least 32.
      scale: of the RMSNorms on query and key heads, if there are such. eps: theirs.
      rope: cosines and sines of positions 0 to T - 1, float32, both halves alike.
      k, v: the cache, [B, K, S, H] if `heads_first`, else [B, S, K, H]; changed in place where the caller gives it away.
      rows: of the cache, where the tokens are written from slot 0 on; a row beyond B takes nothing, nor does a slot beyond S.
      tokens, num_warps: see `TOKENS`, `WARPS`.

    Returns:
      Queries and keys after norm and RoPE and the values, each in one piece, and the cache. Rounded where `RMSNorm` and `rotate` round.
    """
    b, length, both, h = products.shape
    batch, kv = k.shape[0], k.shape[1 if heads_first else 2]
    slots, n = k.shape[2 if heads_first else 1], both - 2 * kv
    cosines, sines = (angles[:, : h // 2] for angles in rope)

    def whole(array):
        return pl.BlockSpec(array.shape, lambda *_: (0,) * len(array.shape))

    def a_row(heads: int):
        return pl.BlockSpec((None, length, heads, h), lambda row, *_: (row, 0, 0, 0))

    scales = [] if scale is None else [scale]
    kernel = functools.partial(
        _first, n=n, kv=kv, tokens=tokens, length=length, held=min(length, slots), batch=batch, heads_first=heads_first,
        normed=scale is not None, eps=eps,
    )  # fmt: skip
    at = 3 + len(scales)
    q, own_k, own_v, keys, values = pl.pallas_call(
        kernel,
        grid=(b, pl.cdiv(length, tokens), kv),
        in_specs=[a_row(both), *map(whole, scales), whole(cosines), whole(sines), whole(k), whole(v), pl.BlockSpec((None,), lambda row, *_: (row,))],
        out_specs=[a_row(n), a_row(kv), a_row(kv), whole(k), whole(v)],
        out_shape=[
            *(jax.ShapeDtypeStruct((b, length, heads, h), products.dtype) for heads in (n, kv, kv)),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)),
        ],
        input_output_aliases={at: 3, at + 1: 4},
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="first_chunk",
    )(products, *scales, cosines, sines, k, v, rows.astype(jnp.int32))
    return q, own_k, own_v, (keys, values)


def _first(products_ref, *refs, n: int, kv: int, tokens: int, length: int, held: int, batch: int, heads_first: bool, normed: bool, eps: float):
    """Some tokens of one key head, its query heads and its value head."""
    (scale_ref,), refs = (refs[:1], refs[1:]) if normed else ((None,), refs)
    cos_ref, sin_ref, _, _, row_ref, q_ref, own_k_ref, own_v_ref, keys_ref, values_ref = refs
    h, dtype, group = products_ref.shape[-1], products_ref.dtype, n // kv
    half, start, head, row = h // 2, pl.program_id(1) * tokens, pl.program_id(2), row_ref[()]
    here, halves = pl.ds(start, tokens), (pl.ds(0, half), pl.ds(half, half))
    at = start + jnp.arange(tokens)
    real = jnp.broadcast_to((at < length)[:, None], (tokens, half))
    kept = jnp.broadcast_to(((at < held) & (row >= 0) & (row < batch))[:, None], (tokens, half))
    home = jnp.clip(row, 0, batch - 1)
    cos, sin = (plgpu.load(ref.at[here, halves[0]], mask=real, other=0.0) for ref in (cos_ref, sin_ref))

    def read(number):
        return [plgpu.load(products_ref.at[here, number, columns], mask=real, other=0.0) for columns in halves]

    def turned(number):
        """Both halves of a head, through its norm and RoPE, in float32 but rounded as the model does."""
        first, second = (part.astype(jnp.float32) for part in read(number))
        if normed:
            mean = (jnp.sum(first * first, axis=-1, keepdims=True) + jnp.sum(second * second, axis=-1, keepdims=True)) / h
            inverse_rms = jax.lax.rsqrt(mean + eps)
            of_first, of_second = (plgpu.load(scale_ref.at[number, columns]).astype(jnp.float32)[None, :] for columns in halves)
            first = (first * inverse_rms * of_first).astype(dtype).astype(jnp.float32)
            second = (second * inverse_rms * of_second).astype(dtype).astype(jnp.float32)
        return (first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype)

    def write(parts, ref, number, cache_ref=None):
        for columns, part in zip(halves, parts, strict=True):
            plgpu.store(ref.at[here, number, columns], part, mask=real)
            if cache_ref is not None:
                place = (home, head, here, columns) if heads_first else (home, here, head, columns)
                plgpu.store(cache_ref.at[place], part, mask=kept)

    for query in range(group):
        write(turned(head * group + query), q_ref, head * group + query)
    write(turned(n + head), own_k_ref, head, keys_ref)
    write(read(n + kv + head), own_v_ref, head, values_ref)
