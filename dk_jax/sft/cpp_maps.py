"""C++ kernels for chains of elementwise operations: how many passes, in what order, on how many lanes and
threads."""

from __future__ import annotations

from dk_jax.sft.cpp_ops import Access, Code, Variant, spec_of, statements, uses_columns, variant
from dk_jax.tasks.spec import OpSpec, Vector
from dk_jax.tasks.task import Task

_BLOCK = 1024


def map_variants(task: Task) -> list[Variant]:
    """Good and slow kernels of a task of kind `map`."""
    spec = spec_of(task)
    found = [
        _flat(task, None, "slow"),
        _flat(task, "simd", "good", "simd"),
        _flat(task, "parallel for", "slow", "parallel"),
        _flat(task, "parallel for simd", "good", "parallel", "simd"),
        _rows(task, None, None, "slow"),
        _rows(task, None, "simd", "good", "simd"),
        _rows(task, "parallel for", None, "slow", "parallel"),
        _rows(task, "parallel for", "simd", "good", "parallel", "simd"),
        _rows(task, "parallel for schedule(dynamic)", "simd", "good", "parallel", "simd", "dynamic_schedule"),
        _columns_outside(task),
    ]
    if spec.rows * spec.cols % _BLOCK == 0:
        found.append(_blocks(task, "simd", "good", "parallel", "simd", "blocked"))
        found.append(_blocks(task, None, "slow", "parallel", "blocked"))
    if len(spec.stages) > 1:
        found += [
            _separate(task, None, "slow"),
            _separate(task, "simd", "slow", "simd"),
            _separate(task, "parallel for simd", "slow", "parallel", "simd"),
        ]
    return found


def _fused(spec: OpSpec) -> str | None:
    return "fused" if len(spec.stages) > 1 else None


def _flat_access(spec: OpSpec) -> Access:
    vectors = [stage.name for stage in spec.stages if isinstance(stage, Vector)]
    return Access(column=f"i % {vectors[0]}_n" if vectors else "", flat="i")


def _flat(task: Task, pragma: str | None, intent: str, *techniques: str) -> Variant:
    spec = spec_of(task)
    code = Code(task).loop("i", "out_n", pragma).add("float v = x[i];")
    code.add(*statements(spec.stages, _flat_access(spec)), "out[i] = v;")
    return variant(code, intent, _fused(spec), *techniques)


def _rows(task: Task, outer: str | None, inner: str | None, intent: str, *techniques: str) -> Variant:
    spec = spec_of(task)
    code = (
        Code(task)
        .loop("i", "x_d0", outer)
        .add("long r = i * x_d1;")
        .loop("j", "x_d1", inner)
        .add("float v = x[r + j];")
    )
    code.add(*statements(spec.stages, Access(column="j", flat="r + j")), "out[r + j] = v;")
    return variant(code, intent, _fused(spec), "row_loop", *techniques)


def _columns_outside(task: Task) -> Variant:
    spec = spec_of(task)
    code = Code(task).loop("j", "x_d1").loop("i", "x_d0").add("long k = i * x_d1 + j;", "float v = x[k];")
    code.add(*statements(spec.stages, Access(column="j", flat="k")), "out[k] = v;")
    return variant(code, "slow", _fused(spec), "strided_access")


def _blocks(task: Task, inner: str | None, intent: str, *techniques: str) -> Variant:
    spec = spec_of(task)
    code = (
        Code(task)
        .loop("b", "out_n", "parallel for", step=_BLOCK)
        .loop("i", f"b + {_BLOCK}", inner, start="b")
    )
    code.add("float v = x[i];", *statements(spec.stages, _flat_access(spec)), "out[i] = v;")
    return variant(code, intent, _fused(spec), *techniques)


def _separate(task: Task, pragma: str | None, intent: str, *techniques: str) -> Variant:
    """Up to three passes that share the steps."""
    spec = spec_of(task)
    code = Code(task)
    columns = uses_columns(spec.stages)
    size = -(-len(spec.stages) // min(3, len(spec.stages)))
    for start in range(0, len(spec.stages), size):
        source = "out" if start else "x"
        stages = spec.stages[start : start + size]
        if columns:
            inner = "simd" if pragma and "simd" in pragma else None
            outer = "parallel for" if pragma and "parallel" in pragma else None
            code.loop("i", "x_d0", outer).loop("j", "x_d1", inner)
            code.add("long k = i * x_d1 + j;", f"float v = {source}[k];")
            code.add(*statements(stages, Access(column="j", flat="k")), "out[k] = v;").close(2)
        else:
            code.loop("i", "out_n", pragma).add(f"float v = {source}[i];")
            code.add(*statements(stages, Access(column="", flat="i")), "out[i] = v;").close()
    return variant(code, intent, "separate_passes", *techniques)
