"""Triton kernels for row reductions and row normalisations: rows in registers, or loops over a row."""

from __future__ import annotations

from collections.abc import Sequence

from dk_jax.sft.triton_ops import Code, Module, Place, filled, load
from dk_jax.sft.triton_plan import Segment
from dk_jax.sft.triton_recipes import ACCUMULATORS, NORMS, REDUCTIONS, Recipe
from dk_jax.sft.triton_schedules import Schedule, launch, schedule
from dk_jax.tasks.spec import RowNorm, RowReduce

_REGISTER_LIMIT = 16384  # longest row that is kept in registers

_ROW = Place(flat="row", column="row", mask=None, column_mask=None)
ELEMENT = Place(flat="i", column="j")
TILE = Place(flat="i", column="j", column_mask="j < cols", spread="[None, :]")


def whole_row(module: Module, segment: Segment, *, warps: int = 4) -> None:
    """One row a program, in registers."""
    code = Code().add("row = tl.program_id(0)", "j = tl.arange(0, BLOCK)", f"mask = j < {length(segment)}")
    read_row(code, segment, _recipe(segment).neutral)
    code.add(*_filled_in(_recipe(segment).whole, segment, "axis=0"))
    finish_row(code, segment)
    launch_rows(module, segment, code, ["rows"], warps, BLOCK=f"triton.next_power_of_2({length(segment)})")


def many_rows(module: Module, segment: Segment, *, height: int = 4, warps: int = 8) -> None:
    """Several rows a program, as a two-dimensional block."""
    code = Code()
    read_tile(code, segment, _recipe(segment).neutral)
    code.add(*_filled_in(_recipe(segment).whole, segment, "axis=1, keep_dims=True"))
    if segment.kind == "reduce":
        code.add("i = row[:, None]", "mask = i < rows").maps(segment.after, Place(flat="i", column="i"))
    else:
        code.maps(segment.after, TILE)
    code.add("tl.store(out_ptr + i, v, mask=mask)")
    launch_tiles(module, segment, code, height, warps)


def looped(
    module: Module, segment: Segment, *, block: int = 1024, warps: int = 4, online: bool = False
) -> None:
    """One row a program, in one or more loops over blocks of it."""
    recipe = _recipe(segment)
    code = Code().add("row = tl.program_id(0)")
    for sweep in recipe.online if online else recipe.sweeps:
        code.add(*sweep.init)
        open_row(code, segment)
        read_row(code, segment, recipe.neutral)
        code.add(*sweep.fold).close().add(*_filled_in(sweep.after, segment))
    if segment.kind == "norm":
        open_row(code, segment)
        read_row(code, segment, None)
    code.add(*_filled_in((f"v = {recipe.apply}",), segment))
    finish_row(code, segment)
    launch_rows(module, segment, code, ["rows"], warps, BLOCK=block)


def accumulated(module: Module, segment: Segment, *, block: int = 1024, warps: int = 4) -> None:
    """One row a program, in a loop with a block-wide accumulator that is folded at the end."""
    start, fold, value = ACCUMULATORS[segment.core.fn]
    code = Code().add("row = tl.program_id(0)")
    code.add(f"acc = {filled('(BLOCK,)', start)}")
    open_row(code, segment)
    read_row(code, segment, _recipe(segment).neutral)
    code.add(fold).close().add(*_filled_in((f"v = {value}",), segment))
    finish_row(code, segment)
    launch_rows(module, segment, code, ["rows"], warps, BLOCK=block)


def _recipe(segment: Segment) -> Recipe:
    assert isinstance(segment.core, RowNorm | RowReduce)
    return (NORMS if isinstance(segment.core, RowNorm) else REDUCTIONS)[segment.core.fn]


def length(segment: Segment) -> str:
    """Name of the length of the row that is reduced: `cols`, or `width` after windows."""
    return "cols" if len(segment.widths) == 1 else "width"


def _filled_in(lines: tuple[str, ...], segment: Segment, axis: str = "") -> list[str]:
    return [line.format(n=length(segment), axis=axis) for line in lines]


def open_row(code: Code, segment: Segment) -> None:
    """Open a loop over blocks of a row."""
    code.loop(f"start in range(0, {length(segment)}, BLOCK)")
    code.add("j = start + tl.arange(0, BLOCK)", f"mask = j < {length(segment)}")


def read_row(code: Code, segment: Segment, neutral: str | None) -> None:
    """Set `i` and `v`; columns that do not exist hold `neutral`."""
    if len(segment.widths) == 1 or segment.kind != "reduce":
        code.add(f"i = row * {length(segment)} + j")
    if segment.before:
        code.value(segment, ELEMENT)
        if neutral is not None:
            code.add(f"v = tl.where(mask, v, {neutral})")
    else:
        code.add(f"v = {load('x', 'i', 'mask', neutral)}")


def finish_row(code: Code, segment: Segment) -> None:
    """Stages after, and the store."""
    if segment.kind == "reduce":
        code.maps(segment.after, _ROW).add("tl.store(out_ptr + row, v)")
    else:
        code.maps(segment.after, ELEMENT).add("tl.store(out_ptr + i, v, mask=mask)")


def read_tile(code: Code, segment: Segment, neutral: str) -> None:
    """Set `row`, `j`, `mask`, `i` and `v` of a block of rows; columns that do not exist hold `neutral`."""
    code.add("row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)", "j = tl.arange(0, BLOCK)")
    code.add("mask = (row[:, None] < rows) & (j[None, :] < cols)", "i = row[:, None] * cols + j[None, :]")
    code.add(f"v = {load('x', 'i', 'mask', None if segment.before else neutral)}").maps(segment.before, TILE)
    if segment.before:
        code.add(f"v = tl.where(mask, v, {neutral})")


def launch_tiles(module: Module, segment: Segment, code: Code, height: int, warps: int) -> None:
    """Add and launch a kernel with `height` rows a program."""
    constants = {"ROWS": height, "BLOCK": "triton.next_power_of_2(cols)"}
    launch_rows(module, segment, code, [f"triton.cdiv(rows, {height})"], warps, ["rows", "cols"], **constants)


def launch_rows(
    module: Module,
    segment: Segment,
    code: Code,
    grid: list[str],
    warps: int,
    sizes: Sequence[str] = ("cols",),
    **constants: int | str,
) -> None:
    """Add a kernel that takes `sizes` (and the width after windows, if there are any), and launch it."""
    if length(segment) == "width":
        sizes = [*sizes, "width"]
    name = "cumsum" if segment.kind == "scan" else segment.core.fn
    declared = [f"{key}: tl.constexpr" for key in constants]
    kernel = module.kernel(f"{name}_kernel", ["x_ptr", *segment.pointers, "out_ptr", *sizes, *declared], code)
    module.bind("rows, cols", segment.source, segment.in_shape)
    if length(segment) == "width":
        module.bind_one("width", str(segment.widths[-1]), segment.widths[-1])
    module.allocate(segment, "(rows,)" if segment.kind == "reduce" else f"(rows, {length(segment)})")
    arguments = [segment.source, *segment.values, segment.target, *sizes]
    module.run(launch(kernel, grid, arguments, warps, **constants))


def short(segment: Segment) -> bool:
    """Whether a row fits in registers."""
    return segment.widths[-1] <= _REGISTER_LIMIT


def in_tile(segment: Segment) -> bool:
    """Whether several rows fit in registers."""
    return segment.widths[-1] <= 4096 and len(segment.widths) == 1


def _has_accumulator(segment: Segment) -> bool:
    return segment.core.fn in ACCUMULATORS


def _has_online(segment: Segment) -> bool:
    return bool(_recipe(segment).online)


ROWS: tuple[Schedule, ...] = (
    schedule(whole_row, "good", "row_in_registers", fits=short),
    schedule(looped, "good", "looped_row"),
    schedule(whole_row, "good", "row_in_registers many_warps", warps=8, fits=short),
    schedule(many_rows, "good", "row_in_registers many_rows many_warps", height=2, fits=in_tile),
    schedule(accumulated, "good", "looped_row block_accumulator", fits=_has_accumulator),
    schedule(looped, "good", "looped_row online", online=True, fits=_has_online),
    schedule(
        looped, "good", "looped_row online many_warps", block=2048, warps=8, online=True, fits=_has_online
    ),
    schedule(many_rows, "good", "row_in_registers many_rows many_warps", height=4, fits=in_tile),
    schedule(looped, "slow", "looped_row small_block few_warps", block=128, warps=1),
    schedule(whole_row, "slow", "row_in_registers few_warps", warps=1, fits=short),
    schedule(
        accumulated,
        "slow",
        "looped_row block_accumulator small_block few_warps",
        block=128,
        warps=1,
        fits=_has_accumulator,
    ),
)
