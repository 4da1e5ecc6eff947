"""Triton kernels for transposes and windows (pooling, depthwise convolution)."""

from __future__ import annotations

from dk_jax.sft.triton_ops import Code, Module, Place, load
from dk_jax.sft.triton_plan import Segment
from dk_jax.sft.triton_schedules import Schedule, launch, schedule
from dk_jax.tasks.spec import Window


def tiles(module: Module, segment: Segment, *, size: int = 32, warps: int = 4) -> None:
    """A square tile a program, turned on the chip: both reads and writes run along rows."""
    code = Code().add(
        "m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        "n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)",
    )
    code.add(
        "i = m[:, None] * cols + n[None, :]",
        "mask = (m[:, None] < rows) & (n[None, :] < cols)",
        f"v = {load('x', 'i', 'mask')}",
    )
    code.maps(segment.before, Place(flat="i", column="n", column_mask="n < cols", spread="[None, :]")).add(
        "v = tl.trans(v)"
    )
    code.add("i = n[:, None] * rows + m[None, :]", "mask = (n[:, None] < cols) & (m[None, :] < rows)")
    code.maps(segment.after, Place(flat="i", column="m", column_mask="m < rows", spread="[None, :]"))
    code.add("tl.store(out_ptr + i, v, mask=mask)")
    _transpose_launch(
        module, segment, code, [f"triton.cdiv(rows, {size})", f"triton.cdiv(cols, {size})"], warps, size
    )


def gather(module: Module, segment: Segment, *, block: int = 256, warps: int = 4) -> None:
    """A block of a row of the result a program: its reads are a whole row apart in memory."""
    code = Code().add(
        "n = tl.program_id(0)",
        "m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)",
        "mask = m < rows",
        "i = m * cols + n",
    )
    code.add(f"v = {load('x', 'i', 'mask')}").maps(
        segment.before, Place(flat="i", column="n", column_mask=None)
    )
    code.add("i = n * rows + m").maps(segment.after, Place(flat="i", column="m")).add(
        "tl.store(out_ptr + i, v, mask=mask)"
    )
    _transpose_launch(module, segment, code, ["cols", f"triton.cdiv(rows, {block})"], warps, block)


def scatter(module: Module, segment: Segment, *, block: int = 256, warps: int = 4) -> None:
    """A block of a row of x a program: its writes are a whole row apart in memory."""
    code = Code().add(
        "m = tl.program_id(0)",
        "n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)",
        "mask = n < cols",
        "i = m * cols + n",
    )
    code.add(f"v = {load('x', 'i', 'mask')}").maps(segment.before, Place(flat="i", column="n"))
    code.add("i = n * rows + m").maps(segment.after, Place(flat="i", column="m", column_mask=None))
    code.add("tl.store(out_ptr + i, v, mask=mask)")
    _transpose_launch(module, segment, code, ["rows", f"triton.cdiv(cols, {block})"], warps, block)


def window_rows(
    module: Module, segment: Segment, *, block: int = 1024, warps: int = 4, unroll: bool = True
) -> None:
    """A two-dimensional grid: a block of one row of the result a program."""
    code = Code().add(
        "row = tl.program_id(0)", "j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)", "mask = j < width"
    )
    code.value(segment, Place(flat="row * width + j", column="j"), row="row", unroll=unroll)
    code.add("tl.store(out_ptr + row * width + j, v, mask=mask)")
    _window_launch(
        module, segment, code, ["rows", f"triton.cdiv(width, {block})"], ["cols", "width"], block, warps
    )


def window_flat(
    module: Module, segment: Segment, *, block: int = 1024, warps: int = 4, unroll: bool = True
) -> None:
    """A block of consecutive elements of the result a program; rows and columns by division."""
    code = Code().add(
        "i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        "mask = i < n",
        "row = i // width",
        "j = i % width",
    )
    code.value(segment, Place(flat="i", column="j"), row="row", row_mask=", mask=mask", unroll=unroll)
    code.add("tl.store(out_ptr + i, v, mask=mask)")
    _window_launch(module, segment, code, [f"triton.cdiv(n, {block})"], ["n", "cols", "width"], block, warps)


def window_loop(module: Module, segment: Segment, *, block: int = 512, warps: int = 4) -> None:
    """A row a program, in a loop over blocks of the result."""
    code = Code().add("row = tl.program_id(0)").loop("start in range(0, width, BLOCK)")
    code.add("j = start + tl.arange(0, BLOCK)", "mask = j < width")
    code.value(segment, Place(flat="row * width + j", column="j"), row="row")
    code.add("tl.store(out_ptr + row * width + j, v, mask=mask)")
    _window_launch(module, segment, code, ["rows"], ["cols", "width"], block, warps)


def window_columns(module: Module, segment: Segment, *, block: int = 256, warps: int = 4) -> None:
    """A block of one column of the result a program: lanes are a whole row apart in memory."""
    code = Code().add(
        "j = tl.program_id(0)", "row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)", "mask = row < rows"
    )
    code.value(
        segment,
        Place(flat="row * width + j", column="j", column_mask=None),
        row="row",
        row_mask=", mask=mask",
    )
    code.add("tl.store(out_ptr + row * width + j, v, mask=mask)")
    _window_launch(
        module,
        segment,
        code,
        ["width", f"triton.cdiv(rows, {block})"],
        ["rows", "cols", "width"],
        block,
        warps,
    )


def _transpose_launch(
    module: Module, segment: Segment, code: Code, grid: list[str], warps: int, block: int
) -> None:
    kernel = module.kernel(
        "transpose_kernel",
        ["x_ptr", *segment.pointers, "out_ptr", "rows", "cols", "BLOCK: tl.constexpr"],
        code,
    )
    module.bind("rows, cols", segment.source, segment.in_shape).allocate(segment, "(cols, rows)")
    module.run(
        launch(
            kernel,
            grid,
            [segment.source, *segment.values, segment.target, "rows", "cols"],
            warps,
            BLOCK=block,
        )
    )


def _window_launch(
    module: Module, segment: Segment, code: Code, grid: list[str], sizes: list[str], block: int, warps: int
) -> None:
    windows = [stage for stage in segment.before if isinstance(stage, Window)]
    name = "conv_kernel" if windows[0].fn == "conv" else f"{windows[0].fn}_pool_kernel"
    kernel = module.kernel(name, ["x_ptr", *segment.pointers, "out_ptr", *sizes, "BLOCK: tl.constexpr"], code)
    module.bind("rows, cols", segment.source, segment.in_shape)
    width = segment.widths[-1]
    module.bind_one("width", _width_text(windows[0]) if len(windows) == 1 else str(width), width)
    module.allocate(segment, "(rows, width)")
    if "n" in sizes:
        module.bind_one("n", f"{segment.target}.numel()", segment.in_shape[0] * width)
    module.run(
        launch(kernel, grid, [segment.source, *segment.values, segment.target, *sizes], warps, BLOCK=block)
    )


def _width_text(window: Window) -> str:
    if window.stride == 1:
        return f"cols - {window.size - 1}"
    return (
        f"cols // {window.size}"
        if window.stride == window.size
        else f"(cols - {window.size}) // {window.stride} + 1"
    )


TRANSPOSES: tuple[Schedule, ...] = (
    schedule(tiles, "good", "tiled"),
    schedule(tiles, "good", "tiled large_tiles many_warps", size=64, warps=8),
    schedule(tiles, "good", "tiled large_tiles", size=64),
    schedule(tiles, "slow", "tiled small_tiles", size=16),
    schedule(gather, "slow", "strided_access"),
    schedule(scatter, "slow", "strided_access"),
)

WINDOWS: tuple[Schedule, ...] = (
    schedule(window_rows, "good", "row_program large_block unrolled"),
    schedule(window_flat, "good", "large_block unrolled"),
    schedule(window_rows, "good", "row_program large_block unrolled many_warps", block=2048, warps=8),
    schedule(window_loop, "good", "row_program looped_row unrolled"),
    schedule(window_rows, "good", "row_program large_block", unroll=False),
    schedule(window_flat, "slow", "small_block few_warps", block=64, warps=1, unroll=False),
    schedule(window_columns, "slow", "strided_access unrolled"),
)
