"""C++ kernels for column reductions and transposes, where the order of the loops decides."""

from __future__ import annotations

from dk_jax.sft.cpp_ops import Access, Code, Variant, mark, spec_of, statements, variant
from dk_jax.tasks.spec import ColReduce, MapStage
from dk_jax.tasks.task import Task

_TILE = 16
_STRIP = 64

_INIT = {"sum": "0.0f", "mean": "0.0f", "l2": "0.0f", "amax": "-1e30f"}
_FOLD = {"sum": "{s} += v;", "mean": "{s} += v;", "l2": "{s} += v * v;", "amax": "{s} = fmaxf({s}, v);"}
_RESULT = {"sum": "{s}", "mean": "{s} / x_d0", "l2": "sqrtf({s})", "amax": "{s}"}


def column_variants(task: Task) -> list[Variant]:
    """Good and slow kernels of a task of kind `column`."""
    found = [
        _column_by_column(task, None, "slow", "strided_access"),
        _column_by_column(task, "parallel for", "slow", "parallel", "strided_access"),
        _row_by_row(task, False, "slow", "loop_interchange"),
        _row_by_row(task, True, "good", "loop_interchange", "simd"),
        _reduction_clause(task),
    ]
    if spec_of(task).cols % _STRIP == 0:
        found += [
            _strips(task, "parallel for", True, "good", "parallel", "simd"),
            _strips(task, None, True, "good", "simd"),
            _strips(task, "parallel for", False, "slow", "parallel"),
        ]
    if spec_of(task).split()[0]:
        found += [_columns_separate(task, False), _columns_separate(task, True)]
    return found


def _fused(task: Task) -> str | None:
    return "fused" if len(spec_of(task).stages) > 1 else None


def _load(code: Code, pre: tuple[MapStage, ...]) -> Code:
    return code.add("float v = x[r + j];", *statements(pre, Access(column="j", flat="r + j")))


def _fold(reduction: ColReduce, s: str) -> str:
    return mark(reduction) + _FOLD[reduction.fn].format(s=s)


def _finish(code: Code, reduction: ColReduce, post: tuple[MapStage, ...], s: str, j: str = "j") -> Code:
    return code.add(
        f"{mark(reduction)}float v = {_RESULT[reduction.fn].format(s=s)};",
        *statements(post, Access(column=j, flat=j)),
        f"out[{j}] = v;",
    )


def _column_by_column(task: Task, outer: str | None, intent: str, *techniques: str) -> Variant:
    pre, reduction, post = spec_of(task).split()
    fn = reduction.fn
    code = (
        Code(task)
        .loop("j", "x_d1", outer)
        .add(f"float s = {_INIT[fn]};")
        .loop("i", "x_d0")
        .add("long r = i * x_d1;")
    )
    _load(code, pre).add(_fold(reduction, "s")).close()
    return variant(_finish(code, reduction, post, "s"), intent, _fused(task), *techniques)


def _row_by_row(task: Task, simd: bool, intent: str, *techniques: str) -> Variant:
    pre, reduction, post = spec_of(task).split()
    fn, inner = reduction.fn, "simd" if simd else None
    code = (
        Code(task)
        .add(f"for (long j = 0; j < x_d1; ++j) out[j] = {_INIT[fn]};")
        .loop("i", "x_d0")
        .add("long r = i * x_d1;")
    )
    _load(code.loop("j", "x_d1", inner), pre).add(_fold(reduction, "out[j]")).close(2)
    if _RESULT[fn] != "{s}" or post:
        _finish(code.loop("j", "x_d1", inner), reduction, post, "out[j]")
    return variant(code, intent, _fused(task), *techniques)


def _reduction_clause(task: Task) -> Variant:
    """Rows over threads, each thread with an array of accumulators of its own."""
    pre, reduction, post = spec_of(task).split()
    fn = reduction.fn
    clause = "max" if fn == "amax" else "+"
    code = Code(task).add("float t[x_d1];", f"for (long j = 0; j < x_d1; ++j) t[j] = {_INIT[fn]};")
    code.loop("i", "x_d0", f"parallel for reduction({clause}:t[:x_d1])").add("long r = i * x_d1;").loop(
        "j", "x_d1", "simd"
    )
    _load(code, pre).add(_fold(reduction, "t[j]")).close(2).loop("j", "x_d1")
    return variant(
        _finish(code, reduction, post, "t[j]"),
        "good",
        _fused(task),
        "parallel",
        "simd",
        "loop_interchange",
        "thread_private",
    )


def _strips(task: Task, outer: str | None, simd: bool, intent: str, *techniques: str) -> Variant:
    """A strip of columns at a time, its accumulators in registers or the first cache."""
    pre, reduction, post = spec_of(task).split()
    fn, inner = reduction.fn, "simd" if simd else None
    code = Code(task).loop("b", "x_d1", outer, step=_STRIP)
    code.add(f"float t[{_STRIP}];", f"for (long k = 0; k < {_STRIP}; ++k) t[k] = {_INIT[fn]};")
    code.loop("i", "x_d0").add("long r = i * x_d1;").loop("k", str(_STRIP), inner).add("long j = b + k;")
    _load(code, pre).add(_fold(reduction, "t[k]")).close(2).loop("k", str(_STRIP)).add("long j = b + k;")
    return variant(
        _finish(code, reduction, post, "t[k]"), intent, _fused(task), "loop_interchange", "blocked", *techniques
    )


def _columns_separate(task: Task, fast: bool) -> Variant:
    pre, reduction, post = spec_of(task).split()
    fn, inner = reduction.fn, "simd" if fast else None
    code = (
        Code(task)
        .add("static float a[x_n];")
        .loop("i", "x_d0", "parallel for" if fast else None)
        .add("long r = i * x_d1;")
    )
    _load(code.loop("j", "x_d1", inner), pre).add("a[r + j] = v;").close(2)
    if fast:
        code.add(f"for (long j = 0; j < x_d1; ++j) out[j] = {_INIT[fn]};").loop("i", "x_d0").loop(
            "j", "x_d1", "simd"
        )
        code.add("float v = a[i * x_d1 + j];", _fold(reduction, "out[j]")).close(2).loop(
            "j", "x_d1", "simd"
        )
        _finish(code, reduction, post, "out[j]")
        return variant(code, "slow", "separate_passes", "parallel", "simd", "loop_interchange")
    code.loop("j", "x_d1").add(f"float s = {_INIT[fn]};").loop("i", "x_d0").add("float v = a[i * x_d1 + j];")
    code.add(_fold(reduction, "s")).close()
    return variant(_finish(code, reduction, post, "s"), "slow", "separate_passes", "strided_access")


def transpose_variants(task: Task) -> list[Variant]:
    """Good and slow kernels of a task of kind `transpose`."""
    spec = spec_of(task)
    found = [
        _read_order(task, None, None, "slow"),
        _read_order(task, "parallel for", None, "slow", "parallel"),
        _read_order(task, None, "simd", "slow", "simd"),
        _write_order(task, None, None, "slow"),
        _write_order(task, "parallel for", None, "slow", "parallel"),
        _write_order(task, "parallel for", "simd", "slow", "parallel", "simd"),
    ]
    if spec.rows % _STRIP == 0 and spec.cols % _STRIP == 0:
        for tile in (_TILE, _STRIP):
            found += [
                _tiles(task, tile, "parallel for", None, "good", "parallel"),
                _tiles(task, tile, "parallel for", "simd", "good", "parallel", "simd"),
                _tiles(
                    task, tile, "parallel for collapse(2)", "simd", "good", "parallel", "simd", "collapse"
                ),
                _tiles(task, tile, None, None, "slow"),
            ]
    pre, _, post = spec.split()
    if pre or post:
        found += [_transpose_separate(task, False), _transpose_separate(task, True)]
    return found


def _move(code: Code, task: Task) -> Code:
    """Element [i, j] of x to element [j, i] of out."""
    pre, _, post = spec_of(task).split()
    code.add("float v = x[i * x_d1 + j];", *statements(pre, Access(column="j", flat="i * x_d1 + j")))
    return code.add(*statements(post, Access(column="i", flat="j * x_d0 + i")), "out[j * x_d0 + i] = v;")


def _read_order(task: Task, outer: str | None, inner: str | None, intent: str, *techniques: str) -> Variant:
    code = Code(task).loop("i", "x_d0", outer).loop("j", "x_d1", inner)
    return variant(_move(code, task), intent, _fused(task), "strided_access", *techniques)


def _write_order(task: Task, outer: str | None, inner: str | None, intent: str, *techniques: str) -> Variant:
    code = Code(task).loop("j", "x_d1", outer).loop("i", "x_d0", inner)
    return variant(_move(code, task), intent, _fused(task), "strided_access", "loop_interchange", *techniques)


def _tiles(
    task: Task, tile: int, outer: str | None, inner: str | None, intent: str, *techniques: str
) -> Variant:
    code = Code(task).loop("a", "x_d0", outer, step=tile).loop("b", "x_d1", step=tile)
    code.loop("j", f"b + {tile}", start="b").loop("i", f"a + {tile}", inner, start="a")
    return variant(_move(code, task), intent, _fused(task), "blocked", *techniques)


def _transpose_separate(task: Task, fast: bool) -> Variant:
    pre, _, post = spec_of(task).split()
    outer, inner = ("parallel for", "simd") if fast else (None, None)
    code = Code(task)
    source = "x"
    if pre:
        source = "a"
        code.add("static float a[x_n];").loop("i", "x_d0", outer).add("long r = i * x_d1;")
        _load(code.loop("j", "x_d1", inner), pre).add("a[r + j] = v;").close(2)
    code.loop("j", "x_d1", outer).loop("i", "x_d0", inner).add(
        f"out[j * x_d0 + i] = {source}[i * x_d1 + j];"
    ).close(2)
    if post:
        code.loop("j", "x_d1", outer).loop("i", "x_d0", inner).add("float v = out[j * x_d0 + i];")
        code.add(*statements(post, Access(column="i", flat="j * x_d0 + i")), "out[j * x_d0 + i] = v;")
    return variant(code, "slow", "separate_passes", "strided_access", *(("parallel", "simd") if fast else ()))
