"""C++ kernels for pooling and convolution along rows, and for running sums."""

from __future__ import annotations

from dk_jax.sft.cpp_ops import Access, Code, Variant, spec_of, statements, variant
from dk_jax.tasks.spec import Window
from dk_jax.tasks.task import Task

_INIT = {"avg": "0.0f", "max": "-1e30f", "conv": "0.0f"}
_UNROLLED_LINES = 16  # more than a small model should have to write
_OUT = Access(column="j", flat="o + j")
_SCHEDULES: tuple[tuple[str | None, str | None, str, tuple[str, ...]], ...] = (
    (None, None, "slow", ()),
    (None, "simd", "good", ("simd",)),
    ("parallel for", None, "slow", ("parallel",)),
    ("parallel for", "simd", "good", ("parallel", "simd")),
)


def window_variants(task: Task) -> list[Variant]:
    """Good and slow kernels of a task of kind `window`."""
    pre, window, post = spec_of(task).split()
    found = [_window_loop(task, *schedule) for schedule in _SCHEDULES]
    if window.size * (2 + len(pre)) <= _UNROLLED_LINES:
        found += [_window_unrolled(task, *schedule) for schedule in _SCHEDULES]
    if pre and window.size <= _UNROLLED_LINES // 2:
        found += [_window_buffer(task, *schedule) for schedule in _SCHEDULES[1:]]
    if post:
        found += [_window_separate(task, *schedule) for schedule in (_SCHEDULES[0], _SCHEDULES[3])]
    return found


def _fused(task: Task) -> str | None:
    return "fused" if len(spec_of(task).stages) > 1 else None


def _fold(window: Window, value: str, k: str, s: str = "s") -> str:
    if window.fn == "max":
        return f"{s} = fmaxf({s}, {value});"
    weight = f" * {window.name}[i * {window.size} + {k}]" if window.fn == "conv" else ""
    return f"{s} += {value}{weight};"


def _at(window: Window, k: str) -> str:
    column = "j" if window.stride == 1 else f"j * {window.stride}"
    return column if k == "0" else f"{column} + {k}"


def _result(window: Window) -> str:
    return f"s / {window.size}.0f" if window.fn == "avg" else "s"


def _start(task: Task, outer: str | None) -> Code:
    return Code(task).loop("i", "x_d0", outer).add("long r = i * x_d1;", "long o = i * out_d1;")


def _window_loop(
    task: Task, outer: str | None, inner: str | None, intent: str, techniques: tuple[str, ...]
) -> Variant:
    """The window as an inner loop."""
    pre, window, post = spec_of(task).split()
    code = (
        _start(task, outer)
        .loop("j", "out_d1", inner)
        .add(f"float s = {_INIT[window.fn]};")
        .loop("k", str(window.size))
    )
    code.add(
        f"long c = {_at(window, 'k')};",
        "float v = x[r + c];",
        *statements(pre, Access(column="c", flat="r + c")),
    )
    code.add(_fold(window, "v", "k")).close().add(f"float v = {_result(window)};")
    return variant(code.add(*statements(post, _OUT), "out[o + j] = v;"), intent, _fused(task), *techniques)


def _window_unrolled(
    task: Task, outer: str | None, inner: str | None, intent: str, techniques: tuple[str, ...]
) -> Variant:
    """One statement for each place of the window."""
    pre, window, post = spec_of(task).split()
    code = (
        _start(task, outer)
        .loop("j", "out_d1", inner)
        .add(f"float s = {_INIT[window.fn]};", "float v = 0.0f;")
    )
    for k in range(window.size):
        at = _at(window, str(k))
        code.add(
            f"v = x[r + {at}];",
            *statements(pre, Access(column=at, flat=f"r + {at}")),
            _fold(window, "v", str(k)),
        )
    code.add(f"v = {_result(window)};", *statements(post, _OUT), "out[o + j] = v;")
    return variant(code, intent, "unrolled", _fused(task), *techniques)


def _window_buffer(
    task: Task, outer: str | None, inner: str | None, intent: str, techniques: tuple[str, ...]
) -> Variant:
    """The maps before the window are computed once for a row, into a buffer."""
    pre, window, post = spec_of(task).split()
    code = _start(task, outer).add("float t[x_d1];").loop("j", "x_d1", inner).add("float v = x[r + j];")
    code.add(*statements(pre, Access(column="j", flat="r + j")), "t[j] = v;").close()
    code.loop("j", "out_d1", inner).add(f"float s = {_INIT[window.fn]};")
    code.add(
        *(_fold(window, f"t[{_at(window, str(k))}]", str(k)) for k in range(window.size)),
        f"float v = {_result(window)};",
    )
    return variant(
        code.add(*statements(post, _OUT), "out[o + j] = v;"), intent, "cached_row", "unrolled", *techniques
    )


def _window_separate(
    task: Task, outer: str | None, inner: str | None, intent: str, techniques: tuple[str, ...]
) -> Variant:
    """The maps after the window as a pass of their own."""
    pre, window, post = spec_of(task).split()
    code = (
        _start(task, outer)
        .loop("j", "out_d1", inner)
        .add(f"float s = {_INIT[window.fn]};")
        .loop("k", str(window.size))
    )
    code.add(
        f"long c = {_at(window, 'k')};",
        "float v = x[r + c];",
        *statements(pre, Access(column="c", flat="r + c")),
    )
    code.add(_fold(window, "v", "k")).close().add(f"out[o + j] = {_result(window)};").close(2)
    code.loop("i", "x_d0", outer).add("long o = i * out_d1;").loop("j", "out_d1", inner).add(
        "float v = out[o + j];"
    )
    return variant(
        code.add(*statements(post, _OUT), "out[o + j] = v;"), "slow", "separate_passes", *techniques
    )


def scan_variants(task: Task) -> list[Variant]:
    """Good and slow kernels of a task of kind `scan`."""
    pre, _, post = spec_of(task).split()
    found = [
        _scan(task, None, "slow"),
        _scan(task, "parallel for", "good", "parallel"),
        _scan(task, "parallel for schedule(dynamic)", "good", "parallel", "dynamic_schedule"),
        _scan_clause(task, None, "good", "simd"),
        _scan_clause(task, "parallel for", "good", "parallel", "simd"),
        _scan_from_start(task, None),
        _scan_from_start(task, "parallel for"),
    ]
    if pre or post:
        found += [_scan_phases(task, True), _scan_phases(task, False), _scan_separate(task)]
    return found


_ROW = Access(column="j", flat="r + j")


def _scan_start(task: Task, outer: str | None) -> Code:
    return Code(task).loop("i", "x_d0", outer).add("long r = i * x_d1;")


def _scan(task: Task, outer: str | None, intent: str, *techniques: str) -> Variant:
    pre, _, post = spec_of(task).split()
    code = (
        _scan_start(task, outer)
        .add("float s = 0.0f;")
        .loop("j", "x_d1")
        .add("float v = x[r + j];", *statements(pre, _ROW))
    )
    code.add("s += v;", "v = s;", *statements(post, _ROW), "out[r + j] = v;")
    return variant(code, intent, _fused(task), *techniques)


def _scan_clause(task: Task, outer: str | None, intent: str, *techniques: str) -> Variant:
    """OpenMP's inclusive scan, which vectorises the running sum."""
    pre, _, post = spec_of(task).split()
    code = _scan_start(task, outer).add("float s = 0.0f;").loop("j", "x_d1", "simd reduction(inscan, +:s)")
    code.add("float v = x[r + j];", *statements(pre, _ROW), "s += v;").pragma("scan inclusive(s)")
    code.add("float u = s;", *statements(post, _ROW, "u"), "out[r + j] = u;")
    return variant(code, intent, _fused(task), "simd_scan", *techniques)


def _scan_from_start(task: Task, outer: str | None) -> Variant:
    """Every element sums its row from the start again."""
    pre, _, post = spec_of(task).split()
    code = (
        _scan_start(task, outer)
        .loop("j", "x_d1")
        .add("float s = 0.0f;")
        .loop("k", "j + 1")
        .add("float v = x[r + k];")
    )
    code.add(*statements(pre, Access(column="k", flat="r + k")), "s += v;").close()
    code.add("float v = s;", *statements(post, _ROW), "out[r + j] = v;")
    return variant(code, "slow", "recomputed", "parallel" if outer else None)


def _scan_phases(task: Task, parallel: bool) -> Variant:
    """Row by row: maps on all lanes, the serial sum, maps on all lanes."""
    pre, _, post = spec_of(task).split()
    code = _scan_start(task, "parallel for" if parallel else None)
    if pre:
        code.loop("j", "x_d1", "simd").add(
            "float v = x[r + j];", *statements(pre, _ROW), "out[r + j] = v;"
        ).close()
    code.add("float s = 0.0f;").loop("j", "x_d1").add(
        f"s += {'out' if pre else 'x'}[r + j];", "out[r + j] = s;"
    ).close()
    if post:
        code.loop("j", "x_d1", "simd").add(
            "float v = out[r + j];", *statements(post, _ROW), "out[r + j] = v;"
        ).close()
    return variant(code, "good", "cached_row", "simd", "parallel" if parallel else None)


def _scan_separate(task: Task) -> Variant:
    pre, _, post = spec_of(task).split()
    code = Code(task)
    if pre:
        code.loop("i", "x_d0").add("long r = i * x_d1;").loop("j", "x_d1")
        code.add("float v = x[r + j];", *statements(pre, _ROW), "out[r + j] = v;").close(2)
    code.loop("i", "x_d0").add("long r = i * x_d1;", "float s = 0.0f;").loop("j", "x_d1")
    code.add(f"s += {'out' if pre else 'x'}[r + j];", "out[r + j] = s;").close(2)
    if post:
        code.loop("i", "x_d0").add("long r = i * x_d1;").loop("j", "x_d1")
        code.add("float v = out[r + j];", *statements(post, _ROW), "out[r + j] = v;").close(2)
    return variant(code, "slow", "separate_passes")
