"""Triton kernels for column reductions: one sweep over all rows, or rows split among programs."""

from __future__ import annotations

import dataclasses

from dk_jax.sft.triton_maps import flat
from dk_jax.sft.triton_ops import Code, Module, Place, filled, load
from dk_jax.sft.triton_plan import Segment
from dk_jax.sft.triton_schedules import Schedule, launch, schedule
from dk_jax.tasks.spec import ColReduce, Scalar

# Function -> (start, fold of a block into an accumulator, fold along rows, value of the result).
_FOLDS: dict[str, tuple[str, str, str, str]] = {
    "sum": ("0.0", "acc += {v}", "tl.sum({v}, axis=0)", "v"),
    "mean": ("0.0", "acc += {v}", "tl.sum({v}, axis=0)", "v / rows"),
    "amax": ("-inf", "acc = tl.maximum(acc, {v})", "tl.max({v}, axis=0)", "v"),
    "l2": ("0.0", "acc += {v}", "tl.sum({v}, axis=0)", "tl.sqrt(v)"),
}
_BLOCK_PLACE = Place(flat="i", column="n", column_mask="n < cols", spread="[None, :]")
_COLUMN = Place(flat="n", column="n", mask="n < cols", column_mask="n < cols")


def sweep(module: Module, segment: Segment, *, tall: int = 32, wide: int = 64, warps: int = 4) -> None:
    """A block of columns a program, which goes down all rows."""
    code = Code().add("n = tl.program_id(0) * BN + tl.arange(0, BN)")
    _accumulate(code, segment, "0", "rows")
    _value(code, segment)
    code.maps(segment.after, _COLUMN).add("tl.store(out_ptr + n, v, mask=n < cols)")
    kernel = module.kernel(_name(segment), _parameters(segment, "BM", "BN"), code)
    module.bind("rows, cols", segment.source, segment.in_shape).allocate(segment, "(cols,)")
    arguments = [segment.source, *segment.values, segment.target, "rows", "cols"]
    module.run(launch(kernel, [f"triton.cdiv(cols, {wide})"], arguments, warps, BM=tall, BN=wide))


def one_column(module: Module, segment: Segment, *, block: int = 1024, warps: int = 4) -> None:
    """One column a program: neighbours in a block are a whole row apart in memory."""
    start, fold, along, _ = _FOLDS[segment.core.fn]
    place = Place(flat="i", column="n", column_mask=None)
    code = (
        Code()
        .add("n = tl.program_id(0)", "acc = " + filled("(BLOCK,)", start))
        .loop("start in range(0, rows, BLOCK)")
    )
    code.add("m = start + tl.arange(0, BLOCK)", "mask = m < rows", "i = m * cols + n")
    _block(code, segment, place, start)
    code.add(fold.format(v=_element(segment))).close().add(f"v = {along.format(v='acc')}")
    _value(code, segment)
    code.maps(segment.after, Place(flat="n", column="n", mask=None, column_mask=None)).add(
        "tl.store(out_ptr + n, v)"
    )
    kernel = module.kernel(_name(segment), _parameters(segment, "BLOCK"), code)
    module.bind("rows, cols", segment.source, segment.in_shape).allocate(segment, "(cols,)")
    module.run(
        launch(
            kernel,
            ["cols"],
            [segment.source, *segment.values, segment.target, "rows", "cols"],
            warps,
            BLOCK=block,
        )
    )


def atomic(
    module: Module, segment: Segment, *, tall: int = 32, wide: int = 128, chunk: int = 256, warps: int = 4
) -> None:
    """Rows split among programs, each of which adds its part to the result atomically."""
    fn, rest = segment.core.fn, segment.after
    code = _chunk_code(segment)
    code.add(("tl.atomic_max" if fn == "amax" else "tl.atomic_add") + "(out_ptr + n, v, mask=n < cols)")
    if fn == "mean":
        rest = (Scalar(op="div", value=segment.in_shape[0]), *rest)
    target = f"{segment.target}_sum" if rest else segment.target
    how = (
        'torch.full({shape}, float("-inf"), device={x}.device)'
        if fn == "amax"
        else "torch.zeros({shape}, device={x}.device)"
    )
    kernel = module.kernel(_name(segment), _parameters(segment, "CHUNK", "BM", "BN"), code)
    module.bind("rows, cols", segment.source, segment.in_shape)
    module.run(f"{target} = {how.format(shape='(cols,)', x=segment.source)}")
    grid = [f"triton.cdiv(cols, {wide})", f"triton.cdiv(rows, {chunk})"]
    arguments = [segment.source, *segment.values, target, "rows", "cols"]
    module.run(launch(kernel, grid, arguments, warps, CHUNK=chunk, BM=tall, BN=wide))
    if rest:
        shape = segment.out_shape
        flat(
            module,
            dataclasses.replace(
                segment, before=rest, core=None, after=(), in_shape=shape, widths=shape, source=target
            ),
        )


def two_stage(
    module: Module, segment: Segment, *, tall: int = 32, wide: int = 128, chunk: int = 256, warps: int = 4
) -> None:
    """Rows split among programs, whose parts a second kernel brings together."""
    first = _chunk_code(segment).add("tl.store(part_ptr + tl.program_id(1) * cols + n, v, mask=n < cols)")
    name = _name(segment).replace("kernel", "part_kernel")
    parameters = [p.replace("out_ptr", "part_ptr") for p in _parameters(segment, "CHUNK", "BM", "BN")]
    part = module.kernel(name, parameters, first)
    start, _, along, _ = _FOLDS[segment.core.fn]
    other = f'float("{start}")' if start == "-inf" else start
    second = Code().add("n = tl.program_id(0) * BN + tl.arange(0, BN)", "m = tl.arange(0, BM)")
    second.add("mask = (m[:, None] < parts) & (n[None, :] < cols)")
    second.add(
        f"v = {load('part', 'm[:, None] * cols + n[None, :]', 'mask', other)}", f"v = {along.format(v='v')}"
    )
    _value(second, segment)
    second.maps(segment.after, _COLUMN).add("tl.store(out_ptr + n, v, mask=n < cols)")
    after = [f"{stage.name}_ptr" for stage in segment.after if hasattr(stage, "name")]
    sizes = ["parts", "rows", "cols"] if "rows" in "\n".join(second.lines) else ["parts", "cols"]
    bring = module.kernel(
        _name(segment),
        ["part_ptr", *after, "out_ptr", *sizes, "BM: tl.constexpr", "BN: tl.constexpr"],
        second,
    )
    module.bind("rows, cols", segment.source, segment.in_shape)
    module.bind_one("parts", f"triton.cdiv(rows, {chunk})", -(-segment.in_shape[0] // chunk))
    module.run(f"part = torch.empty((parts, cols), device={segment.source}.device)").allocate(
        segment, "(cols,)"
    )
    arguments = [segment.source, *segment.values, "part", "rows", "cols"]
    module.run(
        launch(part, [f"triton.cdiv(cols, {wide})", "parts"], arguments, warps, CHUNK=chunk, BM=tall, BN=wide)
    )
    arguments = [
        "part",
        *(segment.expressions[a.removesuffix("_ptr")] for a in after),
        segment.target,
        *sizes,
    ]
    module.run(
        launch(bring, ["triton.cdiv(cols, 64)"], arguments, 4, BM="triton.next_power_of_2(parts)", BN=64)
    )


def _chunk_code(segment: Segment) -> Code:
    code = Code().add("n = tl.program_id(0) * BN + tl.arange(0, BN)", "first = tl.program_id(1) * CHUNK")
    return _accumulate(code, segment, "first", "first + CHUNK")


def _accumulate(code: Code, segment: Segment, low: str, high: str) -> Code:
    """Set `v` to the folded columns `n` over rows low to high."""
    start, fold, along, _ = _FOLDS[segment.core.fn]
    code.add("acc = " + filled("(BM, BN)", start)).loop(f"start in range({low}, {high}, BM)")
    code.add(
        "m = start + tl.arange(0, BM)",
        "mask = (m[:, None] < rows) & (n[None, :] < cols)",
        "i = m[:, None] * cols + n[None, :]",
    )
    _block(code, segment, _BLOCK_PLACE, start)
    return code.add(fold.format(v=_element(segment))).close().add(f"v = {along.format(v='acc')}")


def _block(code: Code, segment: Segment, place: Place, start: str) -> None:
    neutral = start if start == "0.0" else f'float("{start}")'
    code.add(f"v = {load('x', 'i', 'mask', None if segment.before else neutral)}").maps(segment.before, place)
    if segment.before:
        code.add(f"v = tl.where(mask, v, {neutral})")


def _value(code: Code, segment: Segment) -> None:
    value = _FOLDS[segment.core.fn][3]
    if value != "v":
        code.add(f"v = {value}")


def _element(segment: Segment) -> str:
    return "v * v" if segment.core.fn == "l2" else "v"


def _name(segment: Segment) -> str:
    assert isinstance(segment.core, ColReduce)
    return f"column_{segment.core.fn}_kernel"


def _parameters(segment: Segment, *constants: str) -> list[str]:
    return [
        "x_ptr",
        *segment.pointers,
        "out_ptr",
        "rows",
        "cols",
        *(f"{name}: tl.constexpr" for name in constants),
    ]


def _few_parts(segment: Segment) -> bool:
    """Whether one block holds the parts of a column."""
    return segment.in_shape[0] <= 128 * 128


def _adds_up(segment: Segment) -> bool:
    """Whether parts can be added into the result itself."""
    return segment.core.fn != "l2"


COLUMNS: tuple[Schedule, ...] = (
    schedule(sweep, "good", "tiled", wide=32),
    schedule(two_stage, "good", "tiled two_stage", fits=_few_parts),
    schedule(sweep, "good", "tiled many_warps", tall=64, wide=32, warps=8),
    schedule(atomic, "good", "tiled atomic", fits=_adds_up),
    schedule(two_stage, "good", "tiled two_stage", wide=64, chunk=128, fits=_few_parts),
    schedule(atomic, "good", "tiled atomic", wide=64, chunk=128, fits=_adds_up),
    schedule(one_column, "slow", "strided_access"),
    schedule(sweep, "slow", "small_block", tall=1, wide=256),
    schedule(sweep, "slow", "tiled small_block few_warps", tall=16, wide=16, warps=1),
)
