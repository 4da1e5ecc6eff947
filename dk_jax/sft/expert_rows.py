"""Triton kernels for rows of unusual shapes: a few very long ones, split among programs, and very many short ones, in blocks."""

from __future__ import annotations

import dataclasses

from dk_jax.sft.triton_maps import flat
from dk_jax.sft.triton_ops import Code, Module, Place, filled, load
from dk_jax.sft.triton_plan import Segment
from dk_jax.sft.triton_recipes import ACCUMULATORS
from dk_jax.sft.triton_rows import many_rows, read_row
from dk_jax.sft.triton_schedules import Schedule, launch, schedule
from dk_jax.tasks.spec import RowReduce

# Function -> (neutral element, part of a chunk's accumulator, row's value from its parts).
_JOINS: dict[str, tuple[str, str, str]] = {
    "sum": ("0.0", "tl.sum(acc, axis=0)", "tl.sum(v, axis=0)"),
    "mean": ("0.0", "tl.sum(acc, axis=0)", "tl.sum(v, axis=0) / cols"),
    "amax": ('float("-inf")', "tl.max(acc, axis=0)", "tl.max(v, axis=0)"),
    "amin": ('float("inf")', "tl.min(acc, axis=0)", "tl.min(v, axis=0)"),
    "l2": ("0.0", "tl.sum(acc, axis=0)", "tl.sqrt(tl.sum(v, axis=0))"),
}
_SCALAR = Place(flat="row", column="row", mask=None, column_mask=None)


def two_stage_rows(module: Module, segment: Segment, *, chunk: int = 16384, block: int = 1024, warps: int = 4) -> None:
    """A chunk of a row a program; a second kernel brings a row's parts together."""
    fn = segment.core.fn
    neutral, part, whole = _JOINS[fn]
    first = _chunk(segment).add(f"tl.store(part_ptr + row * tl.num_programs(1) + tl.program_id(1), {part})")
    parts_kernel = module.kernel(f"{fn}_part_kernel", _parameters(segment, "part_ptr"), first)
    second = Code().add("row = tl.program_id(0)", "p = tl.arange(0, BLOCK)")
    second.add(f"v = {load('part', 'row * parts + p', 'p < parts', neutral)}", f"v = {whole}")
    second.maps(segment.after, _SCALAR).add("tl.store(out_ptr + row, v)")
    after = [stage.name for stage in segment.after if hasattr(stage, "name")]
    sizes = ["parts", "cols"] if "cols" in whole else ["parts"]
    row_kernel = module.kernel(
        f"{fn}_kernel", ["part_ptr", *(f"{name}_ptr" for name in after), "out_ptr", *sizes, "BLOCK: tl.constexpr"], second
    )
    module.bind("rows, cols", segment.source, segment.in_shape)
    module.bind_one("parts", f"triton.cdiv(cols, {chunk})", -(-segment.in_shape[1] // chunk))
    module.run(f"part = torch.empty((rows, parts), device={segment.source}.device)").allocate(segment, "(rows,)")
    arguments = [segment.source, *_values(segment), "part", "cols"]
    module.run(launch(parts_kernel, ["rows", "parts"], arguments, warps, CHUNK=chunk, BLOCK=block))
    arguments = ["part", *(segment.expressions[name] for name in after), segment.target, *sizes]
    module.run(launch(row_kernel, ["rows"], arguments, 4, BLOCK="triton.next_power_of_2(parts)"))


def atomic_rows(module: Module, segment: Segment, *, chunk: int = 16384, block: int = 1024, warps: int = 4) -> None:
    """A chunk of a row a program, each of which adds its part to the row's result atomically; stages after it in another kernel."""
    fn = segment.core.fn
    code = _chunk(segment).add(f"tl.atomic_{'max' if fn == 'amax' else 'add'}(out_ptr + row, {_JOINS[fn][1]})")
    kernel = module.kernel(f"{fn}_kernel", _parameters(segment, "out_ptr"), code)
    module.bind("rows, cols", segment.source, segment.in_shape)
    target = f"{segment.target}_{fn}" if segment.after else segment.target
    start = 'torch.full((rows,), float("-inf"), ' if fn == "amax" else "torch.zeros((rows,), "
    module.run(f"{target} = {start}device={segment.source}.device)")
    arguments = [segment.source, *_values(segment), target, "cols"]
    module.run(launch(kernel, ["rows", f"triton.cdiv(cols, {chunk})"], arguments, warps, CHUNK=chunk, BLOCK=block))
    if segment.after:
        shape = segment.out_shape
        rest = {"before": segment.after, "core": None, "after": (), "source": target}
        flat(module, dataclasses.replace(segment, in_shape=shape, widths=shape, **rest))


def _chunk(segment: Segment) -> Code:
    """Set `row`, and `acc` to the block-wide accumulator of a chunk of it."""
    fn = segment.core.fn
    start, fold, _ = ACCUMULATORS[fn]
    code = Code().add("row = tl.program_id(0)", "first = tl.program_id(1) * CHUNK", f"acc = {filled('(BLOCK,)', start)}")
    code.loop("start in range(first, first + CHUNK, BLOCK)").add("j = start + tl.arange(0, BLOCK)", "mask = j < cols")
    read_row(code, segment, _JOINS[fn][0])
    return code.add(fold).close()


def _before(segment: Segment) -> list[str]:
    """Names of what the stages before the reduction read."""
    return list(dict.fromkeys(stage.name for stage in segment.before if hasattr(stage, "name")))


def _values(segment: Segment) -> list[str]:
    return [segment.expressions[name] for name in _before(segment)]


def _parameters(segment: Segment, target: str) -> list[str]:
    return ["x_ptr", *(f"{name}_ptr" for name in _before(segment)), target, "cols", "CHUNK: tl.constexpr", "BLOCK: tl.constexpr"]


def _few_and_long(segment: Segment) -> bool:
    """Whether a program a row leaves most of a GPU without work."""
    reduced = isinstance(segment.core, RowReduce) and segment.core.fn in _JOINS
    return reduced and len(segment.widths) == 1 and segment.in_shape[0] <= 64 and segment.in_shape[1] >= 32768


def _adds_up(segment: Segment) -> bool:
    """Whether parts can be added into the result itself."""
    return _few_and_long(segment) and segment.core.fn in ("sum", "amax")


def _many_and_short(segment: Segment) -> bool:
    """Whether a program a row has almost nothing to do."""
    return len(segment.widths) == 1 and segment.widths[-1] <= 128 and segment.in_shape[0] >= 512


SPLIT_ROWS: tuple[Schedule, ...] = (
    schedule(two_stage_rows, "good", "looped_row block_accumulator two_stage many_warps", block=4096, warps=8, fits=_few_and_long),
    schedule(two_stage_rows, "good", "looped_row block_accumulator two_stage", fits=_few_and_long),
    schedule(atomic_rows, "good", "looped_row block_accumulator atomic", fits=_adds_up),
)

SHORT_ROWS: tuple[Schedule, ...] = (
    schedule(many_rows, "good", "row_in_registers many_rows large_block many_warps", height=64, warps=8, fits=_many_and_short),
    schedule(many_rows, "good", "row_in_registers many_rows large_block", height=32, warps=4, fits=_many_and_short),
)
