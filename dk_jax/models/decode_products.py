"""A decode step's products with what stands next to them, as kernels: gate and up with SiLU, and those that are added to the residual stream.

A few rows times a matrix is bounded by the memory that the matrix is read from, and for a small model by what it takes to start a kernel
and to end it. XLA shares the sum over a matrix's rows out to several programs, which leaves their parts to a further kernel; here programs
share out columns only, so SiLU and the addition are done where the sums are. Ten kernels a layer become seven.

For NVIDIA GPUs (Pallas, lowered to Triton); `interpret` runs the same programs anywhere, slowly, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from dk_jax.models.backbone import Block, OfProducts, joins
from dk_jax.models.config import BackboneConfig
from dk_jax.models.layers import product_precision

LEAST = 16
"""Of rows and of columns, for tensor cores."""
PROGRAMS = 96
"""So many programs are wanted; an H100 or H200 has 132 multiprocessors."""
INNER = 128
"""Rows of the matrix that a program reads together."""


class Cut(NamedTuple):
    """How a product is shared out: rows, columns and inner places of a program's piece, its warps, and how many pieces are under way."""

    rows: int
    columns: int
    inner: int
    warps: int = 4
    stages: int = 4


def cut_of(rows: int, inner: int, columns: int, widest: int = 128) -> Cut:
    """The largest pieces of at most 64 rows and `widest` columns with which there are `PROGRAMS` programs, or the smallest there are."""
    tall = min(64, max(LEAST, 1 << (rows - 1).bit_length()))
    wide = widest
    while wide > LEAST and (columns % wide or pl.cdiv(rows, tall) * (columns // wide) < PROGRAMS):
        wide //= 2
    while tall > LEAST and pl.cdiv(rows, tall) * (columns // wide) < PROGRAMS:
        tall //= 2
    deep = INNER
    while deep > LEAST and inner % deep:
        deep //= 2
    return Cut(tall, wide, deep)


def takes_kernels(cfg: BackboneConfig) -> bool:
    """Whether the kernels can do this model: no LoRA on it, and sizes that divide into pieces."""
    sizes = (cfg.d_model, cfg.n_heads * cfg.head_dim, cfg.d_ff, cfg.n_kv_heads * cfg.head_dim)
    plain = joins(cfg, "qkv") and joins(cfg, "gate_up") and not (cfg.lora_rank and {"o", "down"} & set(cfg.lora_targets))
    return plain and not any(size % LEAST for size in sizes)


def product(x: Float[Array, "M K"], kernel: Float[Array, "K N"], *, cut: Cut | None = None, interpret: bool = False) -> Float[Array, "M N"]:
    """x W in x's type, summed in float32."""
    return _call(_sum, x, kernel, kernel.shape[1], x.dtype, cut, interpret, "decode_product")


def gated(x: Float[Array, "M K"], kernel: Float[Array, "K 2F"], *, cut: Cut | None = None, interpret: bool = False) -> Float[Array, "M F"]:
    """silu(x G) * x U in x's type, for W = [G U]; both products are rounded to it first, as `MLP` does."""
    columns = kernel.shape[1] // 2
    cut = cut or cut_of(*x.shape, columns, widest=64)  # of either product; 128 take more shared memory than there is
    return _call(_gate, x, kernel, columns, x.dtype, cut, interpret, "decode_gated")


def added(
    residual: Float[Array, "M N"], x: Float[Array, "M K"], kernel: Float[Array, "K N"], *, cut: Cut | None = None, interpret: bool = False
) -> Float[Array, "M N"]:
    """The residual stream, float32, plus x W rounded to x's type, as `Block` does."""
    return _call(_add, x, kernel, kernel.shape[1], residual.dtype, cut, interpret, "decode_added", residual)


def fused_block(block: Block, x: Float[Array, "B 1 D"], rope: Any, attend: OfProducts, *, interpret: bool = False) -> tuple[Array, Any]:
    """A joined block on a token a row, as calling it does; see `takes_kernels`."""
    rows, a = x[:, 0], block.attention
    heads = (x.shape[0], 1, -1, a.head_dim)
    scale, eps = (a.qk_norm.scale[...], a.qk_norm.eps) if a.normed else (None, 0.0)
    mixed, kept = attend.look(product(block.attention_norm(rows), a.qkv.kernel[...], interpret=interpret).reshape(heads), scale, eps, rope)
    rows = added(rows, mixed.reshape(x.shape[0], -1), a.o.kernel[...], interpret=interpret)
    hidden = gated(block.mlp_norm(rows), block.mlp.gate_up.kernel[...], interpret=interpret)
    return added(rows, hidden, block.mlp.down.kernel[...], interpret=interpret)[:, None], kept


def _call(kernel: Callable, x: Array, matrix: Array, columns: int, dtype: Any, cut: Cut | None, interpret: bool, name: str, *more: Array) -> Array:
    rows, inner = x.shape
    cut = cut or cut_of(rows, inner, columns)
    if inner % cut.inner or columns % cut.columns:
        raise ValueError(f"a product of {inner} places and {columns} columns does not divide into pieces of {cut.inner} and {cut.columns}")

    def whole(array: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda *_: (0, 0))

    out = jax.ShapeDtypeStruct((rows, columns), dtype)
    return pl.pallas_call(
        functools.partial(kernel, cut=cut, rows=rows, inner=inner, columns=columns),
        grid=(columns // cut.columns, pl.cdiv(rows, cut.rows)),
        in_specs=[whole(array) for array in (x, matrix, *more)],
        out_specs=whole(out),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name=name,
    )(x, matrix, *more)


def _sums(x_ref: Any, matrix_ref: Any, starts: tuple[Any, ...], cut: Cut, rows: int, inner: int) -> tuple[tuple[Array, ...], Any, Array]:
    """A program's sums for each of its beginnings of columns, float32; the slice of its rows, and which of them are there."""
    here = pl.ds(pl.program_id(1) * cut.rows, cut.rows)
    real = (pl.program_id(1) * cut.rows + jnp.arange(cut.rows) < rows)[:, None]

    def step(number: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        places = pl.ds(number * cut.inner, cut.inner)
        piece = plgpu.load(x_ref.at[here, places], mask=jnp.broadcast_to(real, (cut.rows, cut.inner)), other=0.0)
        return tuple(
            total + _product(piece, plgpu.load(matrix_ref.at[places, pl.ds(start, cut.columns)])) for total, start in zip(sums, starts, strict=True)
        )

    zeros = tuple(jnp.zeros((cut.rows, cut.columns), jnp.float32) for _ in starts)
    return jax.lax.fori_loop(0, inner // cut.inner, step, zeros), here, jnp.broadcast_to(real, (cut.rows, cut.columns))


def _sum(x_ref: Any, matrix_ref: Any, out_ref: Any, *, cut: Cut, rows: int, inner: int, columns: int) -> None:
    start = pl.program_id(0) * cut.columns
    (total,), here, real = _sums(x_ref, matrix_ref, (start,), cut, rows, inner)
    plgpu.store(out_ref.at[here, pl.ds(start, cut.columns)], total.astype(out_ref.dtype), mask=real)


def _gate(x_ref: Any, matrix_ref: Any, out_ref: Any, *, cut: Cut, rows: int, inner: int, columns: int) -> None:
    start = pl.program_id(0) * cut.columns
    sums, here, real = _sums(x_ref, matrix_ref, (start, columns + start), cut, rows, inner)
    gate, up = (total.astype(out_ref.dtype).astype(jnp.float32) for total in sums)
    hidden = (gate / (1 + jnp.exp(-gate))).astype(out_ref.dtype).astype(jnp.float32) * up
    plgpu.store(out_ref.at[here, pl.ds(start, cut.columns)], hidden.astype(out_ref.dtype), mask=real)


def _add(x_ref: Any, matrix_ref: Any, residual_ref: Any, out_ref: Any, *, cut: Cut, rows: int, inner: int, columns: int) -> None:
    start = pl.program_id(0) * cut.columns
    (total,), here, real = _sums(x_ref, matrix_ref, (start,), cut, rows, inner)
    place = (here, pl.ds(start, cut.columns))
    before = plgpu.load(residual_ref.at[place], mask=real, other=0.0)
    plgpu.store(out_ref.at[place], before + total.astype(x_ref.dtype).astype(before.dtype), mask=real)


def _product(left: Array, right: Array) -> Array:
    dims = (((1,), (0,)), ((), ()))
    return jax.lax.dot_general(left, right, dims, precision=product_precision(left.dtype), preferred_element_type=jnp.float32)
