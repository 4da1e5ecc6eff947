"""Triton kernels for row reductions, row normalisations and running sums: a row in registers, several rows, or loops over a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dk_jax.sft.triton_ops import Code, Module, Place, filled, load
from dk_jax.sft.triton_plan import Segment
from dk_jax.sft.triton_schedules import Schedule, launch, schedule
from dk_jax.tasks.spec import RowNorm, RowReduce

_REGISTER_LIMIT = 16384  # longest row that is kept in registers


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One loop over a row: lines before it, in it (on the block `v`), and after it; {n} is the row's length."""

    init: tuple[str, ...]
    fold: tuple[str, ...]
    after: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a reduction or a normalisation is computed.

    Attributes:
      neutral: what stands in for columns that do not exist.
      whole: lines on a whole row `v`; {axis} is the arguments of a Triton reduction.
      sweeps: loops that collect what `apply` needs.
      apply: value of a normalised element, or of the reduction.
      online: sweeps that do the same in fewer passes, or empty.
    """

    neutral: str
    whole: tuple[str, ...]
    sweeps: tuple[Sweep, ...]
    apply: str
    online: tuple[Sweep, ...] = ()


_LOW, _HIGH = 'float("-inf")', 'float("inf")'
_MAX = Sweep(init=(f"m = {_LOW}",), fold=("m = tl.maximum(m, tl.max(v, axis=0))",))
_MIN = Sweep(init=(f"m = {_HIGH}",), fold=("m = tl.minimum(m, tl.min(v, axis=0))",))
_EXP = Sweep(init=("s = 0.0",), fold=("s += tl.sum(tl.exp(v - m), axis=0)",))
_ONLINE = Sweep(
    init=(f"m = {_LOW}", "s = 0.0"),
    fold=("new = tl.maximum(m, tl.max(v, axis=0))", "s = s * tl.exp(m - new) + tl.sum(tl.exp(v - new), axis=0)", "m = new"),
)


def _sum(value: str, *after: str) -> Sweep:
    return Sweep(init=("s = 0.0",), fold=(f"s += tl.sum({value}, axis=0)",), after=after)


_MOMENTS = Sweep(init=("s = 0.0", "q = 0.0"), fold=("s += tl.sum(v, axis=0)", "q += tl.sum(v * v, axis=0)"), after=("mean = s / {n}",))

NORMS: dict[str, Recipe] = {
    "softmax": Recipe(
        neutral=_LOW,
        whole=("v = tl.exp(v - tl.max(v, {axis}))", "v = v / tl.sum(v, {axis})"),
        sweeps=(_MAX, _EXP),
        apply="tl.exp(v - m) / s",
        online=(_ONLINE,),
    ),
    "log_softmax": Recipe(
        neutral=_LOW,
        whole=("v = v - tl.max(v, {axis})", "v = v - tl.log(tl.sum(tl.exp(v), {axis}))"),
        sweeps=(_MAX, _EXP),
        apply="v - m - tl.log(s)",
        online=(_ONLINE,),
    ),
    "layer_norm": Recipe(
        neutral="0.0",
        whole=(
            "mean = tl.sum(v, {axis}) / {n}",
            "v = tl.where(mask, v - mean, 0.0)",
            "var = tl.sum(v * v, {axis}) / {n}",
            "v = v * tl.rsqrt(var + 1e-5)",
        ),
        sweeps=(_sum("v", "mean = s / {n}"), Sweep(init=("q = 0.0",), fold=("d = tl.where(mask, v - mean, 0.0)", "q += tl.sum(d * d, axis=0)"))),
        apply="(v - mean) * tl.rsqrt(q / {n} + 1e-5)",
        online=(Sweep(init=_MOMENTS.init, fold=_MOMENTS.fold, after=("mean = s / {n}", "q = q - s * mean")),),
    ),
    "rms_norm": Recipe(
        neutral="0.0",
        whole=("ms = tl.sum(v * v, {axis}) / {n}", "v = v * tl.rsqrt(ms + 1e-5)"),
        sweeps=(_sum("v * v", "r = tl.rsqrt(s / {n} + 1e-5)"),),
        apply="v * r",
    ),
    "l2_normalize": Recipe(
        neutral="0.0",
        whole=("s = tl.sum(v * v, {axis})", "v = v / tl.maximum(tl.sqrt(s), 1e-12)"),
        sweeps=(_sum("v * v", "s = tl.maximum(tl.sqrt(s), 1e-12)"),),
        apply="v / s",
    ),
    "l1_normalize": Recipe(
        neutral="0.0",
        whole=("s = tl.sum(tl.abs(v), {axis})", "v = v / tl.maximum(s, 1e-12)"),
        sweeps=(_sum("tl.abs(v)", "s = tl.maximum(s, 1e-12)"),),
        apply="v / s",
    ),
    "center": Recipe(neutral="0.0", whole=("mean = tl.sum(v, {axis}) / {n}", "v = v - mean"), sweeps=(_sum("v", "mean = s / {n}"),), apply="v - mean"),
    "max_shift": Recipe(neutral=_LOW, whole=("v = v - tl.max(v, {axis})",), sweeps=(_MAX,), apply="v - m"),
}

REDUCTIONS: dict[str, Recipe] = {
    "sum": Recipe(neutral="0.0", whole=("v = tl.sum(v, {axis})",), sweeps=(_sum("v"),), apply="s"),
    "mean": Recipe(neutral="0.0", whole=("v = tl.sum(v, {axis}) / {n}",), sweeps=(_sum("v"),), apply="s / {n}"),
    "amax": Recipe(neutral=_LOW, whole=("v = tl.max(v, {axis})",), sweeps=(_MAX,), apply="m"),
    "amin": Recipe(neutral=_HIGH, whole=("v = tl.min(v, {axis})",), sweeps=(_MIN,), apply="m"),
    "l2": Recipe(neutral="0.0", whole=("v = tl.sqrt(tl.sum(v * v, {axis}))",), sweeps=(_sum("v * v"),), apply="tl.sqrt(s)"),
    "var": Recipe(
        neutral="0.0",
        whole=("mean = tl.sum(v, {axis}) / {n}", "v = tl.where(mask, v - mean, 0.0)", "v = tl.sum(v * v, {axis}) / {n}"),
        sweeps=(_MOMENTS,),
        apply="q / {n} - mean * mean",
    ),
    "logsumexp": Recipe(
        neutral=_LOW,
        whole=("m = tl.max(v, {axis})", "v = m + tl.log(tl.sum(tl.exp(v - m), {axis}))"),
        sweeps=(_MAX, _EXP),
        apply="m + tl.log(s)",
        online=(_ONLINE,),
    ),
}

# Block-wide accumulators, folded once after the loop: (start, fold, value); others than these use sweeps only.
_ACCUMULATORS: dict[str, tuple[str, str, str]] = {
    "sum": ("0.0", "acc += v", "tl.sum(acc, axis=0)"),
    "mean": ("0.0", "acc += v", "tl.sum(acc, axis=0) / {n}"),
    "amax": ("-inf", "acc = tl.maximum(acc, v)", "tl.max(acc, axis=0)"),
    "amin": ("inf", "acc = tl.minimum(acc, v)", "tl.min(acc, axis=0)"),
    "l2": ("0.0", "acc += v * v", "tl.sqrt(tl.sum(acc, axis=0))"),
}

_ROW = Place(flat="row", column="row", mask=None, column_mask=None)
_ELEMENT = Place(flat="i", column="j")


def whole_row(module: Module, segment: Segment, *, warps: int = 4) -> None:
    """One row a program, in registers."""
    code = Code().add("row = tl.program_id(0)", "j = tl.arange(0, BLOCK)", f"mask = j < {_length(segment)}")
    _read(code, segment, _recipe(segment).neutral)
    code.add(*_filled_in(_recipe(segment).whole, segment, "axis=0"))
    _finish(code, segment)
    _launch(module, segment, code, ["rows"], warps, BLOCK=f"triton.next_power_of_2({_length(segment)})")


def many_rows(module: Module, segment: Segment, *, rows: int = 4, warps: int = 8) -> None:
    """Several rows a program, as a two-dimensional block."""
    code = Code().add("row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)", "j = tl.arange(0, BLOCK)")
    code.add("mask = (row[:, None] < rows) & (j[None, :] < cols)", "i = row[:, None] * cols + j[None, :]")
    element = Place(flat="i", column="j", column_mask="j < cols", spread="[None, :]")
    neutral = _recipe(segment).neutral
    code.add(f"v = {load('x', 'i', 'mask', None if segment.before else neutral)}").maps(segment.before, element)
    if segment.before:
        code.add(f"v = tl.where(mask, v, {neutral})")
    code.add(*_filled_in(_recipe(segment).whole, segment, "axis=1, keep_dims=True"))
    if segment.kind == "reduce":
        code.add("i = row[:, None]", "mask = i < rows").maps(segment.after, Place(flat="i", column="i"))
    else:
        code.maps(segment.after, element)
    code.add("tl.store(out_ptr + i, v, mask=mask)")
    constants = {"ROWS": rows, "BLOCK": "triton.next_power_of_2(cols)"}
    _launch(module, segment, code, [f"triton.cdiv(rows, {rows})"], warps, sizes=["rows", "cols"], **constants)


def looped(module: Module, segment: Segment, *, block: int = 1024, warps: int = 4, online: bool = False) -> None:
    """One row a program, in one or more loops over blocks of it."""
    recipe = _recipe(segment)
    code = Code().add("row = tl.program_id(0)")
    for sweep in recipe.online if online else recipe.sweeps:
        code.add(*sweep.init)
        _open(code, segment)
        _read(code, segment, recipe.neutral)
        code.add(*sweep.fold).close().add(*_filled_in(sweep.after, segment))
    if segment.kind == "norm":
        _open(code, segment)
        _read(code, segment, None)
    code.add(*_filled_in((f"v = {recipe.apply}",), segment))
    _finish(code, segment)
    _launch(module, segment, code, ["rows"], warps, BLOCK=block)


def accumulated(module: Module, segment: Segment, *, block: int = 1024, warps: int = 4) -> None:
    """One row a program, in a loop with a block-wide accumulator that is folded at the end."""
    start, fold, value = _ACCUMULATORS[segment.core.fn]
    code = Code().add("row = tl.program_id(0)")
    code.add("acc = " + ("tl.zeros((BLOCK,), dtype=tl.float32)" if start == "0.0" else filled("(BLOCK,)", start)))
    _open(code, segment)
    _read(code, segment, _recipe(segment).neutral)
    code.add(fold).close().add(*_filled_in((f"v = {value}",), segment))
    _finish(code, segment)
    _launch(module, segment, code, ["rows"], warps, BLOCK=block)


def scan_row(module: Module, segment: Segment, *, warps: int = 4) -> None:
    """Running sum of a row in registers."""
    code = Code().add("row = tl.program_id(0)", "j = tl.arange(0, BLOCK)", f"mask = j < {_length(segment)}")
    _read(code, segment, "0.0")
    code.add("v = tl.cumsum(v, axis=0)")
    _finish(code, segment)
    _launch(module, segment, code, ["rows"], warps, BLOCK=f"triton.next_power_of_2({_length(segment)})")


def scan_many(module: Module, segment: Segment, *, rows: int = 4, warps: int = 8) -> None:
    """Running sums of several rows at once."""
    code = Code().add("row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)", "j = tl.arange(0, BLOCK)")
    code.add("mask = (row[:, None] < rows) & (j[None, :] < cols)", "i = row[:, None] * cols + j[None, :]")
    element = Place(flat="i", column="j", column_mask="j < cols", spread="[None, :]")
    code.add(f"v = {load('x', 'i', 'mask', None if segment.before else '0.0')}").maps(segment.before, element)
    code.add("v = tl.cumsum(v, axis=1)").maps(segment.after, element).add("tl.store(out_ptr + i, v, mask=mask)")
    constants = {"ROWS": rows, "BLOCK": "triton.next_power_of_2(cols)"}
    _launch(module, segment, code, [f"triton.cdiv(rows, {rows})"], warps, sizes=["rows", "cols"], **constants)


def scan_looped(module: Module, segment: Segment, *, block: int = 1024, warps: int = 4) -> None:
    """Running sum in a loop that carries the sum of what came before."""
    code = Code().add("row = tl.program_id(0)", "carry = 0.0")
    _open(code, segment)
    _read(code, segment, "0.0")
    code.add("s = tl.sum(v, axis=0)", "v = tl.cumsum(v, axis=0) + carry", "carry += s")
    code.maps(segment.after, _ELEMENT).add("tl.store(out_ptr + i, v, mask=mask)")
    _launch(module, segment, code, ["rows"], warps, BLOCK=block)


def scan_serial(module: Module, segment: Segment, *, block: int = 64, warps: int = 2) -> None:
    """A row a lane, column by column: lanes are a whole row apart in memory."""
    code = Code().add("row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "mask = row < rows", "acc = tl.zeros((BLOCK,), dtype=tl.float32)")
    place = Place(flat="i", column="j", column_mask=None)
    code.loop("j in range(0, cols)").add("i = row * cols + j", f"v = {load('x', 'i', 'mask')}").maps(segment.before, place)
    code.add("acc += v", "v = acc").maps(segment.after, place).add("tl.store(out_ptr + i, v, mask=mask)")
    _launch(module, segment, code, [f"triton.cdiv(rows, {block})"], warps, sizes=["rows", "cols"], BLOCK=block)


def _recipe(segment: Segment) -> Recipe:
    assert isinstance(segment.core, RowNorm | RowReduce)
    return (NORMS if isinstance(segment.core, RowNorm) else REDUCTIONS)[segment.core.fn]


def _length(segment: Segment) -> str:
    """Name of the length of the row that is reduced: `cols`, or `width` after windows."""
    return "cols" if len(segment.widths) == 1 else "width"


def _filled_in(lines: tuple[str, ...], segment: Segment, axis: str = "") -> list[str]:
    return [line.format(n=_length(segment), axis=axis) for line in lines]


def _open(code: Code, segment: Segment) -> None:
    code.loop(f"start in range(0, {_length(segment)}, BLOCK)").add("j = start + tl.arange(0, BLOCK)", f"mask = j < {_length(segment)}")


def _read(code: Code, segment: Segment, neutral: str | None) -> None:
    """Set `i` and `v`; columns that do not exist hold `neutral`."""
    if len(segment.widths) == 1 or segment.kind != "reduce":
        code.add(f"i = row * {_length(segment)} + j")
    if segment.before:
        code.value(segment, _ELEMENT, row="row")
        if neutral is not None:
            code.add(f"v = tl.where(mask, v, {neutral})")
    else:
        code.add(f"v = {load('x', 'i', 'mask', neutral)}")


def _finish(code: Code, segment: Segment) -> None:
    """Stages after, and the store."""
    if segment.kind == "reduce":
        code.maps(segment.after, _ROW).add("tl.store(out_ptr + row, v)")
    else:
        code.maps(segment.after, _ELEMENT).add("tl.store(out_ptr + i, v, mask=mask)")


def _launch(module: Module, segment: Segment, code: Code, grid: list[str], warps: int, sizes: list[str] | None = None, **constants: int | str) -> None:  # fmt: skip
    windows = len(segment.widths) > 1
    sizes = sizes or (["cols", "width"] if windows else ["cols"])
    name = "cumsum" if segment.kind == "scan" else segment.core.fn
    parameters = ["x_ptr", *segment.pointers, "out_ptr", *sizes, *(f"{key}: tl.constexpr" for key in constants)]
    kernel = module.kernel(f"{name}_kernel", parameters, code)
    module.bind("rows, cols", segment.source, segment.in_shape)
    if windows:
        module.bind_one("width", str(segment.widths[-1]), segment.widths[-1])
    module.allocate(segment, f"({', '.join(['rows', _length(segment)][: len(segment.out_shape)])}{',' * (len(segment.out_shape) == 1)})")
    module.run(launch(kernel, grid, [segment.source, *segment.values, segment.target, *sizes], warps, **constants))


def _short(segment: Segment) -> bool:
    return segment.widths[-1] <= _REGISTER_LIMIT


def _tile(segment: Segment) -> bool:
    return segment.widths[-1] <= 4096 and len(segment.widths) == 1


def _has_accumulator(segment: Segment) -> bool:
    return segment.core.fn in _ACCUMULATORS


def _has_online(segment: Segment) -> bool:
    return bool(_recipe(segment).online)


Write = Callable[[Module, Segment], None]

ROWS: tuple[Schedule, ...] = (
    schedule(whole_row, "good", "row_in_registers", fits=_short),
    schedule(looped, "good", "looped_row"),
    schedule(lambda m, s: whole_row(m, s, warps=8), "good", "row_in_registers", "many_warps", fits=_short),
    schedule(lambda m, s: many_rows(m, s, rows=2), "good", "row_in_registers", "many_rows", "many_warps", fits=_tile),
    schedule(accumulated, "good", "looped_row", "block_accumulator", fits=_has_accumulator),
    schedule(lambda m, s: looped(m, s, online=True), "good", "looped_row", "online", fits=_has_online),
    schedule(lambda m, s: looped(m, s, block=2048, warps=8, online=True), "good", "looped_row", "online", "many_warps", fits=_has_online),
    schedule(lambda m, s: many_rows(m, s, rows=4), "good", "row_in_registers", "many_rows", "many_warps", fits=_tile),
    schedule(lambda m, s: looped(m, s, block=128, warps=1), "slow", "looped_row", "small_block", "few_warps"),
    schedule(lambda m, s: whole_row(m, s, warps=1), "slow", "row_in_registers", "few_warps", fits=_short),
    schedule(lambda m, s: accumulated(m, s, block=128, warps=1), "slow", "looped_row", "block_accumulator", "small_block", "few_warps", fits=_has_accumulator),
)  # fmt: skip

SCANS: tuple[Schedule, ...] = (
    schedule(scan_row, "good", "row_in_registers", fits=_short),
    schedule(lambda m, s: scan_row(m, s, warps=8), "good", "row_in_registers", "many_warps", fits=_short),
    schedule(lambda m, s: scan_many(m, s, rows=2), "good", "row_in_registers", "many_rows", "many_warps", fits=_tile),
    schedule(scan_looped, "good", "looped_row", "carry"),
    schedule(lambda m, s: scan_looped(m, s, block=128, warps=1), "slow", "looped_row", "carry", "small_block", "few_warps"),
    schedule(scan_serial, "slow", "strided_access"),
)
