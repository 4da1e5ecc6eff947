"""Copies of one row's slots to other rows of the same array, in place, as a kernel.

What XLA makes of it either gathers all copies before it writes them, or copies one row after the other. Here programs that copy the same
piece to different rows run side by side, so the piece is read from memory once, and nothing but the copies is written.

For NVIDIA GPUs (Pallas, lowered to Triton); `interpret` runs the same program anywhere, slowly, for tests.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

PIECE = 4096
"""Elements that a program copies: 8 KiB in bfloat16, 64 bytes a thread."""


def copied_rows(
    array: Float[Array, "B R C"], source: Int[Array, " n"], target: Int[Array, " n"], count: Int[Array, ""], width: int, *, interpret: bool = False
) -> Float[Array, "B R C"]:
    """The array with the first `width` of C elements of rows `source` in the place of those of rows `target`, for the first `count` pairs.

    Changed in place where the caller gives it away. No row may be both source and target.
    """
    rows, lines, _ = array.shape
    whole = pl.BlockSpec(array.shape, lambda pair, line, piece: (0, 0, 0))
    numbers = pl.BlockSpec((len(source),), lambda pair, line, piece: (0,))
    return pl.pallas_call(
        functools.partial(_copy, width=width),
        grid=(len(source), lines, pl.cdiv(width, PIECE)),
        in_specs=[whole, numbers, numbers, pl.BlockSpec((), lambda pair, line, piece: ())],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(array.shape, array.dtype),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="copied_rows",
    )(array, source.astype(jnp.int32), target.astype(jnp.int32), count.astype(jnp.int32))


def _copy(array_ref, source_ref, target_ref, count_ref, out_ref, *, width: int):
    pair, line, start = pl.program_id(0), pl.program_id(1), pl.program_id(2) * PIECE
    here = pl.ds(start, PIECE)
    real = (start + jnp.arange(PIECE) < width) & (pair < count_ref[()])
    piece = plgpu.load(array_ref.at[source_ref[pair], line, here], mask=real)
    plgpu.store(out_ref.at[target_ref[pair], line, here], piece, mask=real)
