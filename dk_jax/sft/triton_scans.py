"""Triton kernels for running sums along rows: rows in registers, a loop with a carry, or a row a lane."""

from __future__ import annotations

from dk_jax.sft.triton_ops import Code, Module, Place, load
from dk_jax.sft.triton_plan import Segment
from dk_jax.sft.triton_rows import (
    ELEMENT,
    TILE,
    finish_row,
    in_tile,
    launch_rows,
    launch_tiles,
    length,
    open_row,
    read_row,
    read_tile,
    short,
)
from dk_jax.sft.triton_schedules import Schedule, schedule


def scan_row(module: Module, segment: Segment, *, warps: int = 4) -> None:
    """Running sum of a row in registers."""
    code = Code().add("row = tl.program_id(0)", "j = tl.arange(0, BLOCK)", f"mask = j < {length(segment)}")
    read_row(code, segment, "0.0")
    code.add("v = tl.cumsum(v, axis=0)")
    finish_row(code, segment)
    launch_rows(module, segment, code, ["rows"], warps, BLOCK=f"triton.next_power_of_2({length(segment)})")


def scan_many(module: Module, segment: Segment, *, height: int = 4, warps: int = 8) -> None:
    """Running sums of several rows at once."""
    code = Code()
    read_tile(code, segment, "0.0")
    code.add("v = tl.cumsum(v, axis=1)").maps(segment.after, TILE).add("tl.store(out_ptr + i, v, mask=mask)")
    launch_tiles(module, segment, code, height, warps)


def scan_looped(module: Module, segment: Segment, *, block: int = 1024, warps: int = 4) -> None:
    """Running sum in a loop that carries the sum of what came before."""
    code = Code().add("row = tl.program_id(0)", "carry = 0.0")
    open_row(code, segment)
    read_row(code, segment, "0.0")
    code.add("s = tl.sum(v, axis=0)", "v = tl.cumsum(v, axis=0) + carry", "carry += s")
    code.maps(segment.after, ELEMENT).add("tl.store(out_ptr + i, v, mask=mask)")
    launch_rows(module, segment, code, ["rows"], warps, BLOCK=block)


def scan_serial(module: Module, segment: Segment, *, block: int = 64, warps: int = 2) -> None:
    """A row a lane, column by column: lanes are a whole row apart in memory."""
    code = Code().add(
        "row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        "mask = row < rows",
        "acc = tl.zeros((BLOCK,), dtype=tl.float32)",
    )
    place = Place(flat="i", column="j", column_mask=None)
    code.loop("j in range(0, cols)").add("i = row * cols + j", f"v = {load('x', 'i', 'mask')}")
    code.maps(segment.before, place)
    code.add("acc += v", "v = acc").maps(segment.after, place).add("tl.store(out_ptr + i, v, mask=mask)")
    launch_rows(module, segment, code, [f"triton.cdiv(rows, {block})"], warps, ["rows", "cols"], BLOCK=block)


SCANS: tuple[Schedule, ...] = (
    schedule(scan_row, "good", "row_in_registers", fits=short),
    schedule(scan_row, "good", "row_in_registers many_warps", warps=8, fits=short),
    schedule(scan_many, "good", "row_in_registers many_rows many_warps", height=2, fits=in_tile),
    schedule(scan_looped, "good", "looped_row carry"),
    schedule(scan_looped, "slow", "looped_row carry small_block few_warps", block=128, warps=1),
    schedule(scan_serial, "slow", "strided_access"),
)
