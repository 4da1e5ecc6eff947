"""Triton kernels for chains of elementwise operations: how many elements a program takes, in what layout."""

from __future__ import annotations

import math

from dk_jax.sft.triton_ops import Code, Module, Place, load
from dk_jax.sft.triton_plan import Segment
from dk_jax.sft.triton_schedules import Schedule, launch, schedule
from dk_jax.tasks.spec import Vector


def flat(module: Module, segment: Segment, *, block: int = 1024, warps: int = 4) -> None:
    """A block of consecutive elements a program; a one-per-column operand is indexed with a modulus."""
    columns = len(segment.in_shape) == 2 and any(isinstance(stage, Vector) for stage in segment.before)
    code = Code().add(
        "i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "mask = i < n", f"v = {load('x', 'i', 'mask')}"
    )
    code.maps(segment.before, Place(flat="i", column="i % cols" if columns else "i"))
    code.add("tl.store(out_ptr + i, v, mask=mask)")
    sizes = ["n", "cols"] if columns else ["n"]
    name = module.kernel(
        "map_kernel", ["x_ptr", *segment.pointers, "out_ptr", *sizes, "BLOCK: tl.constexpr"], code
    )
    module.allocate(segment, "").bind_one("n", f"{segment.source}.numel()", _elements(segment))
    if columns:
        module.bind("rows, cols", segment.source, segment.in_shape)
    arguments = [segment.source, *segment.values, segment.target, *sizes]
    module.run(launch(name, [f"triton.cdiv(n, {block})"], arguments, warps, BLOCK=block))


def row_blocks(module: Module, segment: Segment, *, block: int = 1024, warps: int = 4) -> None:
    """A two-dimensional grid: a block of one row a program."""
    code = Code().add(
        "row = tl.program_id(0)", "j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)", "mask = j < cols"
    )
    code.add("i = row * cols + j", f"v = {load('x', 'i', 'mask')}").maps(
        segment.before, Place(flat="i", column="j")
    )
    code.add("tl.store(out_ptr + i, v, mask=mask)")
    name = module.kernel(
        "map_kernel", ["x_ptr", *segment.pointers, "out_ptr", "cols", "BLOCK: tl.constexpr"], code
    )
    module.allocate(segment, "").bind("rows, cols", segment.source, segment.in_shape)
    arguments = [segment.source, *segment.values, segment.target, "cols"]
    module.run(launch(name, ["rows", f"triton.cdiv(cols, {block})"], arguments, warps, BLOCK=block))


def row_loop(module: Module, segment: Segment, *, block: int = 512, warps: int = 4) -> None:
    """A row a program, in a loop over blocks of it."""
    code = Code().add("row = tl.program_id(0)").loop("start in range(0, cols, BLOCK)")
    code.add(
        "j = start + tl.arange(0, BLOCK)",
        "mask = j < cols",
        "i = row * cols + j",
        f"v = {load('x', 'i', 'mask')}",
    )
    code.maps(segment.before, Place(flat="i", column="j")).add("tl.store(out_ptr + i, v, mask=mask)")
    name = module.kernel(
        "map_kernel", ["x_ptr", *segment.pointers, "out_ptr", "cols", "BLOCK: tl.constexpr"], code
    )
    module.allocate(segment, "").bind("rows, cols", segment.source, segment.in_shape)
    module.run(
        launch(name, ["rows"], [segment.source, *segment.values, segment.target, "cols"], warps, BLOCK=block)
    )


def column_blocks(module: Module, segment: Segment, *, block: int = 256, warps: int = 4) -> None:
    """A block of one column a program: neighbours in a block are a whole row apart in memory."""
    code = Code().add(
        "j = tl.program_id(0)", "row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)", "mask = row < rows"
    )
    code.add("i = row * cols + j", f"v = {load('x', 'i', 'mask')}")
    code.maps(segment.before, Place(flat="i", column="j", column_mask=None)).add(
        "tl.store(out_ptr + i, v, mask=mask)"
    )
    name = module.kernel(
        "map_kernel", ["x_ptr", *segment.pointers, "out_ptr", "rows", "cols", "BLOCK: tl.constexpr"], code
    )
    module.allocate(segment, "").bind("rows, cols", segment.source, segment.in_shape)
    arguments = [segment.source, *segment.values, segment.target, "rows", "cols"]
    module.run(launch(name, ["cols", f"triton.cdiv(rows, {block})"], arguments, warps, BLOCK=block))


def _elements(segment: Segment) -> int:
    return math.prod(segment.in_shape)


def _matrix(segment: Segment) -> bool:
    return len(segment.in_shape) == 2


MAPS: tuple[Schedule, ...] = (
    schedule(flat, "good", "large_block"),
    schedule(row_blocks, "good", "row_program large_block", fits=_matrix),
    schedule(flat, "good", "large_block many_warps", block=4096, warps=8),
    schedule(flat, "good", block=256),
    schedule(row_loop, "good", "row_program looped_row", fits=_matrix),
    schedule(flat, "good", "large_block many_warps", block=2048, warps=8),
    schedule(flat, "slow", "small_block few_warps", block=64, warps=1),
    schedule(row_blocks, "slow", "row_program small_block", block=128, fits=_matrix),
    schedule(column_blocks, "slow", "strided_access", fits=_matrix),
)
