"""C++ kernels for pipelines of several row-wise stages: layers, norms, attention, with branches.

Two layouts. Row buffers: each row goes through all stages at once, its intermediate values in small local
arrays. Staged: every stage sweeps the whole matrix and leaves a whole matrix. Stages that mix rows (column
reductions, transposes) are
not written here.
"""

from __future__ import annotations

from dataclasses import dataclass

from dk_jax.sft.cpp_matmul import bias_of, rows_of_weight, weight_of
from dk_jax.sft.cpp_ops import Access, Code, Variant, spec_of, statements, variant
from dk_jax.sft.cpp_rows import NORMS, REDUCTIONS, Recipe
from dk_jax.tasks.spec import (
    Branch,
    Cumsum,
    Linear,
    MapStage,
    Matmul,
    RowNorm,
    RowReduce,
    Stage,
    Window,
    is_map,
    walk,
)
from dk_jax.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class _Layout:
    intent: str
    techniques: tuple[str, ...]
    outer: str | None = None
    inner: str | None = None
    staged: bool = False
    packed: bool = False


_SLOW, _GOOD = "slow", "good"
_LAYOUTS = (
    _Layout(intent=_SLOW, techniques=("row_buffer",)),
    _Layout(intent=_GOOD, techniques=("row_buffer", "simd"), inner="simd"),
    _Layout(intent=_SLOW, techniques=("row_buffer", "parallel"), outer="parallel for"),
    _Layout(intent=_GOOD, techniques=("row_buffer", "parallel", "simd"), outer="parallel for", inner="simd"),
    _Layout(intent=_GOOD, techniques=("row_buffer", "packed", "simd"), inner="simd", packed=True),
    _Layout(
        intent=_GOOD,
        techniques=("row_buffer", "packed", "parallel", "simd"),
        outer="parallel for",
        inner="simd",
        packed=True,
    ),
    _Layout(intent=_SLOW, techniques=("separate_passes",), staged=True),
    _Layout(intent=_SLOW, techniques=("separate_passes", "simd"), inner="simd", staged=True),
    _Layout(
        intent=_GOOD,
        techniques=("separate_passes", "parallel", "simd"),
        outer="parallel for",
        inner="simd",
        staged=True,
    ),
)


def block_variants(task: Task) -> list[Variant]:
    """Good and slow kernels of a pipeline of row-wise stages.

    Raises:
      ValueError: the pipeline has a stage that mixes rows.
    """
    return [_Emitter(task, layout).kernel() for layout in _LAYOUTS]


@dataclass(frozen=True)
class _Place:
    """Where a value lives: an array, the text of a row's length, and whether it holds all rows or one."""

    name: str
    width: str
    whole: bool

    def at(self, j: str) -> str:
        return f"{self.name}[i * {self.width} + {j}]" if self.whole else f"{self.name}[{j}]"


class _Emitter:
    """Writes one kernel in one layout."""

    def __init__(self, task: Task, layout: _Layout):
        self._task, self._layout = task, layout
        self._code = Code(task)
        self._saved: dict[str, _Place] = {}
        self._buffers = iter("abcdefgh")
        sweeps = [stage for stage in spec_of(task).stages if isinstance(stage, RowNorm | RowReduce | Cumsum)]
        self._scoped = (
            len(sweeps) > 1 and not layout.staged
        )  # s, m and q are declared more than once in a row
        self._after = {id(step.stage): step.after for step in walk(spec_of(task))}

    def kernel(self) -> Variant:
        spec, layout = spec_of(self._task), self._layout
        if layout.packed:
            self._pack()
        if not layout.staged:
            self._code.loop("i", "x_d0", layout.outer)
        self._pipeline(spec.stages, _Place("x", "x_d1", True), _Place("out", "out_d1", True))
        return variant(self._code, layout.intent, *layout.techniques)

    def _pack(self) -> None:
        """Transposed copies of the weights that are stored by output column."""
        for step in walk(spec_of(self._task)):
            if isinstance(step.stage, Linear | Matmul) and not rows_of_weight(step.stage):
                w = weight_of(step.stage)
                self._code.add(f"static float {w}_p[{w}_n];").loop("j", f"{w}_d0").loop("k", f"{w}_d1")
                self._code.add(f"{w}_p[k * {w}_d0 + j] = {w}[j * {w}_d1 + k];").close(2)

    def _pipeline(
        self, stages: tuple[Stage, ...], place: _Place, final: _Place | None, name: str | None = None
    ) -> _Place:
        """Write stages that start from `place`; the last group writes `final`, or else a buffer called
        `name`."""
        groups = _groups(stages)
        for index, (head, maps) in enumerate(groups):
            if isinstance(head, Branch):
                kept = self._pipeline(head.stages, place, None, head.name) if head.stages else place
                self._saved[head.name] = kept
                continue
            last = index == len(groups) - 1
            place = self._group(head, maps, place, final if last else None, name if last else None)
        return place

    def _group(
        self,
        head: Stage | None,
        maps: tuple[MapStage, ...],
        source: _Place,
        final: _Place | None,
        name: str | None,
    ) -> _Place:
        target = final or self._buffer(head, source, name)
        if self._layout.staged:
            self._code.loop("i", "x_d0", self._layout.outer)
        writer = {
            type(None): self._maps,
            Linear: self._product,
            Matmul: self._product,
            RowNorm: self._norm,
            RowReduce: self._reduction,
            Window: self._window,
            Cumsum: self._cumsum,
        }.get(type(head))
        if writer is None:
            raise ValueError(
                f"task {self._task.name!r}: no row-by-row kernel for a {type(head).__name__} stage in a block"
            )
        scoped = self._scoped and isinstance(head, RowNorm | RowReduce | Cumsum)
        if scoped:
            self._code.open("")
        writer(head, maps, source, target)
        if scoped:
            self._code.close()
        if self._layout.staged:
            self._code.close()
        return target

    def _buffer(self, head: Stage | None, source: _Place, name: str | None) -> _Place:
        """A new array for a group's result, or the source itself where that may be overwritten."""
        in_place = isinstance(head, RowNorm | Cumsum | None)
        if in_place and name is None and source.name != "x" and source not in self._saved.values():
            return source
        if isinstance(head, Linear | Matmul):
            width = f"{weight_of(head)}_d{1 if rows_of_weight(head) else 0}"
        else:
            width = str(self._after[id(head)][1]) if isinstance(head, Window) else source.width
        place = _Place(name or next(self._buffers), width, self._layout.staged)
        self._code.add(
            f"static float {place.name}[x_d0 * {width}];" if place.whole else f"float {place.name}[{width}];"
        )
        return place

    def _access(self, place: _Place, j: str = "j") -> Access:
        saved = {name: kept.at(j) for name, kept in self._saved.items()}
        return Access(column=j, flat=f"i * {place.width} + {j}", saved=saved)

    def _simd(self, clause: str = "") -> str | None:
        return f"{self._layout.inner} {clause}".rstrip() if self._layout.inner else None

    def _store(self, maps: tuple[MapStage, ...], target: _Place) -> None:
        self._code.add(*statements(maps, self._access(target)), f"{target.at('j')} = v;").close()

    def _maps(self, _: None, maps: tuple[MapStage, ...], source: _Place, target: _Place) -> None:
        self._code.loop("j", source.width, self._simd()).add(f"float v = {source.at('j')};")
        self._store(maps, target)

    def _product(
        self, head: Linear | Matmul, maps: tuple[MapStage, ...], source: _Place, target: _Place
    ) -> None:
        w, by_row = weight_of(head), rows_of_weight(head)
        length, width = (f"{w}_d0", f"{w}_d1") if by_row else (f"{w}_d1", f"{w}_d0")
        if not self._layout.inner or not (by_row or self._layout.packed):
            element = f"{w}[k * {width} + j]" if by_row else f"{w}[j * {length} + k]"
            self._code.loop("j", width).add("float s = 0.0f;").loop("k", length, self._simd("reduction(+:s)"))
            self._code.add(f"s += {source.at('k')} * {element};").close().add("float v = s;", *bias_of(head))
            self._store(maps, target)
            return
        rows = w if by_row else f"{w}_p"
        self._code.add(f"for (long j = 0; j < {width}; ++j) {target.at('j')} = 0.0f;")
        self._code.loop("k", length).add(f"float u = {source.at('k')};").loop("j", width, self._simd())
        self._code.add(f"{target.at('j')} += u * {rows}[k * {width} + j];").close(2)
        if maps or bias_of(head):
            self._code.loop("j", width, self._simd()).add(f"float v = {target.at('j')};", *bias_of(head))
            self._store(maps, target)

    def _sweeps(self, recipe: Recipe, source: _Place) -> None:
        for step in recipe.passes:
            self._code.add(f"float {step.name} = {step.init};")
            self._code.loop("j", source.width, self._simd(f"reduction({step.clause}:{step.name})"))
            self._code.add(f"float v = {source.at('j')};", step.fold()).close()
            self._code.add(*(line.format(n=source.width) for line in step.after))

    def _norm(self, head: RowNorm, maps: tuple[MapStage, ...], source: _Place, target: _Place) -> None:
        recipe = NORMS[head.fn]
        self._sweeps(recipe, source)
        self._code.add(*(line.format(n=source.width) for line in recipe.hoisted))
        self._code.loop("j", source.width, self._simd()).add(f"float v = {source.at('j')};")
        self._code.add(f"v = {recipe.result.format(n=source.width)};")
        self._store(maps, target)

    def _reduction(self, head: RowReduce, maps: tuple[MapStage, ...], source: _Place, _: _Place) -> None:
        recipe = REDUCTIONS[head.fn]
        self._sweeps(recipe, source)
        self._code.add(f"float v = {recipe.result.format(n=source.width)};")
        self._code.add(*statements(maps, Access(column="0", flat="i")), "out[i] = v;")

    def _window(self, head: Window, maps: tuple[MapStage, ...], source: _Place, target: _Place) -> None:
        at = "j" if head.stride == 1 else f"j * {head.stride}"
        width = target.width
        self._code.loop("j", width, self._simd()).add(
            f"float s = {'-1e30f' if head.fn == 'max' else '0.0f'};"
        )
        for k in range(head.size):
            value = source.at(f"{at} + {k}" if k else at)
            weight = f" * {head.name}[i * {head.size} + {k}]" if head.fn == "conv" else ""
            self._code.add(f"s = fmaxf(s, {value});" if head.fn == "max" else f"s += {value}{weight};")
        self._code.add(f"float v = s / {head.size}.0f;" if head.fn == "avg" else "float v = s;")
        self._store(maps, target)

    def _cumsum(self, _: Cumsum, maps: tuple[MapStage, ...], source: _Place, target: _Place) -> None:
        self._code.add("float s = 0.0f;").loop("j", source.width).add(
            f"float v = {source.at('j')};", "s += v;", "v = s;"
        )
        self._store(maps, target)


def _groups(stages: tuple[Stage, ...]) -> list[tuple[Stage | None, tuple[MapStage, ...]]]:
    """Each stage that is not a map with the maps that follow it; maps that come first, or after a branch,
    have no head."""
    groups: list[tuple[Stage | None, list[MapStage]]] = []
    for stage in stages:
        if not is_map(stage):
            groups.append((stage, []))
        elif groups and not isinstance(groups[-1][0], Branch):
            groups[-1][1].append(stage)
        else:
            groups.append((None, [stage]))
    return [(head, tuple(maps)) for head, maps in groups]
