"""Triton kernels for matrix products with what comes before and after them, and fused attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dk_jax.sft.triton_maps import flat
from dk_jax.sft.triton_ops import Code, Module, Place, load
from dk_jax.sft.triton_plan import Segment
from dk_jax.sft.triton_recipes import NORMS
from dk_jax.sft.triton_schedules import Schedule, launch, schedule
from dk_jax.tasks.ops import number
from dk_jax.tasks.spec import Linear, Matmul, OpSpec, RowNorm, Scalar, Stage


def tiled(
    module: Module,
    segment: Segment,
    *,
    bm: int = 64,
    bn: int = 64,
    bk: int = 32,
    warps: int = 4,
    stages: int = 3,
    precision: str = "ieee",
    grouped: bool = False,
) -> None:
    """A tile of the result a program, a loop over K, and elementwise stages before the tile is stored."""
    code = Code()
    if grouped:
        programs, total = "tl.program_id(1), tl.program_id(0)", "tl.num_programs(1), tl.num_programs(0)"
        code.add(f"pm, pn = tl.swizzle2d({programs}, {total}, 8)")
    first, second = ("pm", "pn") if grouped else ("tl.program_id(0)", "tl.program_id(1)")
    code.add(f"m = {first} * BM + tl.arange(0, BM)", f"n = {second} * BN + tl.arange(0, BN)")
    _product(code, segment, "0", "K", precision)
    code.add("i = m[:, None] * N + n[None, :]", "mask = (m[:, None] < M) & (n[None, :] < N)")
    if segment.after:
        code.add("v = acc").maps(
            segment.after, Place(flat="i", column="n", column_mask="n < N", spread="[None, :]")
        )
    code.add(f"tl.store(out_ptr + i, {'v' if segment.after else 'acc'}, mask=mask)")
    grid = [f"triton.cdiv(M, {bm})", f"triton.cdiv(N, {bn})"]
    constants = {"BM": bm, "BN": bn, "BK": bk} | ({"num_stages": stages} if stages != 3 else {})
    _launch(module, segment, code, grid[::-1] if grouped else grid, warps, **constants)


def split_k(
    module: Module,
    segment: Segment,
    *,
    bm: int = 64,
    bn: int = 64,
    bk: int = 32,
    parts: int = 4,
    precision: str = "ieee",
) -> None:
    """K split among programs, which add their parts atomically; elementwise stages in another kernel."""
    code = Code().add(
        "m = tl.program_id(0) * BM + tl.arange(0, BM)", "n = tl.program_id(1) * BN + tl.arange(0, BN)"
    )
    code.add("first = tl.program_id(2) * SPLIT")
    _product(code, segment, "first", "first + SPLIT", precision)
    code.add(
        "i = m[:, None] * N + n[None, :]",
        "mask = (m[:, None] < M) & (n[None, :] < N)",
        "tl.atomic_add(out_ptr + i, acc, mask=mask)",
    )
    split = -(-segment.mid_shape[1] // (parts * bk)) * bk
    grid = [f"triton.cdiv(M, {bm})", f"triton.cdiv(N, {bn})", f"triton.cdiv(K, {split})"]
    _launch(module, segment, code, grid, 4, how="torch.zeros", apart=True, SPLIT=split, BM=bm, BN=bn, BK=bk)


def row_sums(module: Module, segment: Segment, *, block: int = 64, bk: int = 64, warps: int = 4) -> None:
    """A block of one row of the result a program, as sums of products without tl.dot."""
    weights = (
        "w_ptr + n[:, None] * K + k[None, :]"
        if _is_transposed(segment)
        else "w_ptr + k[None, :] * N + n[:, None]"
    )
    code = Code().add(
        "m = tl.program_id(0)",
        "n = tl.program_id(1) * BN + tl.arange(0, BN)",
        "acc = tl.zeros((BN,), dtype=tl.float32)",
    )
    code.loop("start in range(0, K, BK)").add("k = start + tl.arange(0, BK)")
    code.add(f"v = {load('x', 'm * K + k', 'k < K', '0.0')}").maps(
        segment.before, Place(flat="m * K + k", column="k", mask="k < K", column_mask="k < K")
    )
    code.add(
        f"b = tl.load({weights}, mask=(n[:, None] < N) & (k[None, :] < K), other=0.0)",
        "acc += tl.sum(b * v[None, :], axis=1)",
    ).close()
    code.add("i = m * N + n", "mask = n < N")
    if segment.after:
        code.add("v = acc").maps(segment.after, Place(flat="i", column="n"))
    code.add(f"tl.store(out_ptr + i, {'v' if segment.after else 'acc'}, mask=mask)")
    _launch(module, segment, code, ["M", f"triton.cdiv(N, {block})"], warps, BN=block, BK=bk)


def attention_of(spec: OpSpec) -> tuple[str, float, str] | None:
    """(keys, scale, values) if a pipeline is softmax(x @ keys.t() * scale) @ values, in one tile's width."""
    match spec.stages:
        case (
            Matmul(name=keys, transposed=True),
            Scalar(op="mul", value=scale),
            RowNorm(fn="softmax"),
            Matmul(name=values, width=width, transposed=False),
        ) if width == spec.cols and width in (16, 32, 64, 128):
            return keys, scale, values
    return None


def attention(
    module: Module, spec: OpSpec, *, bm: int = 64, bn: int = 32, warps: int = 4, precision: str = "ieee"
) -> None:
    """Attention in one kernel that never writes the scores: maximum and sum of a row are kept up to date."""
    found = attention_of(spec)
    assert found is not None
    keys, scale, values = found
    dot = f'input_precision="{precision}"'
    code = Code().add("m = tl.program_id(0) * BM + tl.arange(0, BM)", "d = tl.arange(0, D)")
    code.add("i = m[:, None] * D + d[None, :]", f"q = {load('x', 'i', 'm[:, None] < rows', '0.0')}")
    code.add(
        'top = tl.full((BM,), float("-inf"), dtype=tl.float32)',
        "s = tl.zeros((BM,), dtype=tl.float32)",
        "acc = tl.zeros((BM, D), dtype=tl.float32)",
    )
    code.loop("start in range(0, N, BN)").add("n = start + tl.arange(0, BN)")
    code.add(f"key = {load(keys, 'n[None, :] * D + d[:, None]', 'n[None, :] < N', '0.0')}")
    code.add(f"p = tl.dot(q, key, {dot}) * {number(scale)}", 'p = tl.where(n[None, :] < N, p, float("-inf"))')
    code.add(
        "new = tl.maximum(top, tl.max(p, axis=1))",
        "p = tl.exp(p - new[:, None])",
        "old = tl.exp(top - new)",
        "s = s * old + tl.sum(p, axis=1)",
    )
    code.add(f"value = {load(values, 'n[:, None] * D + d[None, :]', 'n[:, None] < N', '0.0')}")
    code.add(f"acc = acc * old[:, None] + tl.dot(p, value, {dot})", "top = new").close()
    code.add("tl.store(out_ptr + i, acc / s[:, None], mask=m[:, None] < rows)")
    constants = [f"{name}: tl.constexpr" for name in ("D", "BM", "BN")]
    kernel = module.kernel(
        "attention_kernel",
        ["x_ptr", f"{keys}_ptr", f"{values}_ptr", "out_ptr", "rows", "N", *constants],
        code,
    )
    module.run("rows, D = x.shape", f"N = {keys}.shape[0]", "out = torch.empty_like(x)")
    module.run(
        launch(
            kernel,
            [f"triton.cdiv(rows, {bm})"],
            ["x", keys, values, "out", "rows", "N"],
            warps,
            D="D",
            BM=bm,
            BN=bn,
        )
    )


def rows_normalised(
    module: Module, segment: Segment, norm: RowNorm, rest: Sequence[Stage], *, bm: int = 64, warps: int = 4, precision: str = "tf32x3"
) -> None:
    """Tiles as wide as the result, whose rows are normalised before they are stored: `segment`, then `norm`, then elementwise `rest`."""
    recipe, place = NORMS[norm.fn], Place(flat="i", column="n", column_mask="n < N", spread="[None, :]")
    code = Code().add("m = tl.program_id(0) * BM + tl.arange(0, BM)", "n = tl.arange(0, BN)")
    _product(code, segment, "0", "K", precision)
    code.add("i = m[:, None] * N + n[None, :]", "mask = (m[:, None] < M) & (n[None, :] < N)", "v = acc").maps(segment.after, place)
    code.add(f"v = tl.where(mask, v, {recipe.neutral})")
    code.add(*(line.format(n="N", axis="axis=1, keep_dims=True") for line in recipe.whole))
    code.maps(rest, place).add("tl.store(out_ptr + i, v, mask=mask)")
    whole = dataclasses.replace(segment, after=(*segment.after, *rest), target="out")
    _launch(module, whole, code, [f"triton.cdiv(M, {bm})"], warps, BM=bm, BN="triton.next_power_of_2(N)", BK=32)


def _is_transposed(segment: Segment) -> bool:
    return isinstance(segment.core, Linear) or segment.core.transposed


def _weights(segment: Segment) -> str:
    return segment.expressions[
        f"{segment.core.name}_weight" if isinstance(segment.core, Linear) else segment.core.name
    ]


def _product(code: Code, segment: Segment, low: str, high: str, precision: str) -> None:
    """Set `acc` to the tile (m, n) of x @ w over K from low to high."""
    code.add("acc = tl.zeros((BM, BN), dtype=tl.float32)").loop(f"start in range({low}, {high}, BK)").add(
        "k = start + tl.arange(0, BK)"
    )
    mask = "(m[:, None] < M) & (k[None, :] < K)"
    if segment.before:
        code.add("i = m[:, None] * K + k[None, :]", f"mask = {mask}", f"v = {load('x', 'i', 'mask')}")
        code.maps(segment.before, Place(flat="i", column="k", column_mask="k < K", spread="[None, :]")).add(
            "a = tl.where(mask, v, 0.0)"
        )
    else:
        code.add(f"a = {load('x', 'm[:, None] * K + k[None, :]', mask, '0.0')}")
    weights = "n[None, :] * K + k[:, None]" if _is_transposed(segment) else "k[:, None] * N + n[None, :]"
    code.add(f"b = {load('w', weights, '(k[:, None] < K) & (n[None, :] < N)', '0.0')}")
    code.add(f'acc = tl.dot(a, b, acc, input_precision="{precision}")').close()


def _launch(
    module: Module,
    segment: Segment,
    code: Code,
    grid: list[str],
    warps: int,
    how: str = "torch.empty",
    apart: bool = False,
    **constants: int | str,
) -> None:
    """Add and launch a kernel; `apart` leaves the stages after the product to a kernel of their own."""
    before = [stage.name for stage in segment.before if hasattr(stage, "name")]
    names = list(dict.fromkeys(before)) if apart else list(segment.operands)
    declared = [f"{name}: tl.constexpr" for name in constants if name != "num_stages"]
    parameters = ["x_ptr", "w_ptr", *(f"{name}_ptr" for name in names), "out_ptr", "M", "N", "K", *declared]
    kernel = module.kernel(
        "linear_kernel" if isinstance(segment.core, Linear) else "matmul_kernel", parameters, code
    )
    weights, transposed = _weights(segment), _is_transposed(segment)
    module.bind("M, K", segment.source, segment.mid_shape)
    module.bind_one("N", f"{weights}.shape[{0 if transposed else 1}]", segment.core.width)
    separate = apart and bool(segment.after)
    target = f"{segment.target}_sum" if separate else segment.target
    module.run(f"{target} = {how}((M, N), device={segment.source}.device)")
    arguments = [
        segment.source,
        weights,
        *(segment.expressions[name] for name in names),
        target,
        "M",
        "N",
        "K",
    ]
    module.run(launch(kernel, grid, arguments, warps, **constants))
    if separate:
        shape = segment.out_shape
        rest = {"before": segment.after, "core": None, "after": (), "source": target}
        flat(module, dataclasses.replace(segment, in_shape=shape, widths=shape[-1:], **rest))


def _deep(segment: Segment) -> bool:
    """Whether the result has few tiles for a long K, so that splitting K finds work for more programs."""
    rows, depth = segment.mid_shape
    return rows <= 128 and depth >= 64


def _few_rows(segment: Segment) -> bool:
    return segment.mid_shape[0] <= 128


MATMULS: tuple[Schedule, ...] = (
    schedule(tiled, "good", "tiled"),
    schedule(tiled, "good", "tiled large_tiles tf32x3", bm=128, bn=64, precision="tf32x3"),
    schedule(split_k, "good", "tiled split_k", fits=_deep),
    schedule(
        tiled,
        "good",
        "tiled large_tiles tf32x3 grouped_order many_warps",
        bm=128,
        bn=128,
        warps=8,
        precision="tf32x3",
        grouped=True,
    ),
    schedule(tiled, "good", "tiled large_tiles pipelined", bm=128, bn=64, bk=16, stages=4),
    schedule(tiled, "good", "tiled grouped_order", grouped=True),
    schedule(tiled, "good", "tiled tf32x3", precision="tf32x3"),
    schedule(split_k, "good", "tiled split_k tf32x3", parts=8, precision="tf32x3", fits=_deep),
    schedule(tiled, "good", "tiled small_tiles", bm=16, bn=64, bk=64, fits=_few_rows),
    schedule(tiled, "slow", "tiled small_tiles few_warps", bm=16, bn=16, bk=16, warps=1, stages=1),
    schedule(tiled, "slow", "tiled small_tiles", bm=32, bn=32, stages=1),
    schedule(row_sums, "slow", "no_dot"),
)
