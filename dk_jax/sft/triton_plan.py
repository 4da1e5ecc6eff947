"""A pipeline cut into segments, each of which one kernel computes: fused or separate kernels.

A segment is at most one stage that is not elementwise, with elementwise stages before and after it. Segments
read and write whole tensors, which have the names that they have in forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dk_jax.tasks.spec import (
    Branch,
    ColReduce,
    Cumsum,
    Linear,
    Matmul,
    OpSpec,
    RowNorm,
    RowReduce,
    Shape,
    Stage,
    Tensor,
    Transpose,
    Vector,
    Window,
    is_map,
)

SegmentKind = Literal["map", "reduce", "norm", "column", "matmul", "transpose", "window", "scan"]

_KINDS: dict[type, SegmentKind] = {
    RowNorm: "norm",
    RowReduce: "reduce",
    ColReduce: "column",
    Linear: "matmul",
    Matmul: "matmul",
    Transpose: "transpose",
    Window: "window",
    Cumsum: "scan",
}


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive stages that one kernel computes.

    Attributes:
      before: elementwise stages and windows ahead of `core`; all stages of a `map` or `window` segment.
      core: the stage that is neither elementwise nor a window, or None.
      after: elementwise stages on the result of `core`.
      in_shape: of `source`.
      widths: columns of the input of each window in `before`, then of the result of `before`.
      out_shape: of `target`.
      source: name in forward of what is read.
      target: name in forward of what is written.
      expressions: text in forward of each operand, by the operand's name.
    """

    before: tuple[Stage, ...]
    core: Stage | None
    after: tuple[Stage, ...]
    in_shape: Shape
    widths: tuple[int, ...]
    out_shape: Shape
    source: str
    target: str
    expressions: Mapping[str, str]

    @property
    def kind(self) -> SegmentKind:
        """What sort of kernel it takes."""
        if self.core is not None:
            return _KINDS[type(self.core)]
        return "window" if any(isinstance(stage, Window) for stage in self.before) else "map"

    @property
    def mid_shape(self) -> Shape:
        """Shape of the result of `before`."""
        return (*self.in_shape[:-1], self.widths[-1])

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of what the kernel reads besides x and a matrix product's weights, by first use."""
        stages = [*self.before, *self.after]
        found = [
            stage.name
            for stage in stages
            if isinstance(stage, Vector | Tensor | Window) and stage.name is not None
        ]
        return tuple(dict.fromkeys(found))

    @property
    def pointers(self) -> list[str]:
        """Kernel parameters for `operands`."""
        return [f"{name}_ptr" for name in self.operands]

    @property
    def values(self) -> list[str]:
        """Launch arguments for `operands`."""
        return [self.expressions[name] for name in self.operands]


def plan(spec: OpSpec, *, fuse: bool = True, windows: bool = False) -> list[Segment]:
    """Segments of a pipeline in the order in which they run; the last one's target is `out`.

    Args:
      spec: the pipeline.
      fuse: elementwise stages join the stage before them (or after, at the start); else every stage, and a
        linear layer's bias, is a segment of its own.
      windows: windows, too, are fused into the row reduction or normalisation that follows them.
    """
    return _Planner(spec, fuse, windows).segments


def after_stage(stage: Stage, shape: Shape) -> Shape:
    """Shape of a stage's result."""
    return shape if is_map(stage) else OpSpec(rows=shape[0], cols=shape[1], stages=(stage,)).out_shape


@dataclass
class _Chunk:
    before: list[Stage] = field(default_factory=list)
    core: Stage | None = None
    after: list[Stage] = field(default_factory=list)


class _Planner:
    def __init__(self, spec: OpSpec, fuse: bool, windows: bool):
        self._fuse, self._windows = fuse, windows
        self._expressions = {a.name: a.name for a in spec.arguments if not a.parameter}
        self._temporaries = 0
        self.segments: list[Segment] = []
        self._line(spec.stages, "x", (spec.rows, spec.cols), "out")

    def _line(self, stages: tuple[Stage, ...], source: str, shape: Shape, target: str) -> None:
        chunks = self._cut(stages)
        for index, chunk in enumerate(chunks):
            if isinstance(chunk, Branch):
                if chunk.stages:
                    self._line(chunk.stages, source, shape, chunk.name)
                self._expressions[chunk.name] = chunk.name if chunk.stages else source
                continue
            name = target if index == len(chunks) - 1 else f"t{self._temporaries}"
            self._temporaries += name != target
            self._add(chunk, source, shape, name)
            source, shape = name, self.segments[-1].out_shape

    def _add(self, chunk: _Chunk, source: str, shape: Shape, target: str) -> None:
        widths, running = [], shape
        for stage in chunk.before:
            if isinstance(stage, Window):
                widths.append(running[-1])
            running = after_stage(stage, running)
        widths.append(running[-1])
        out_shape = running if chunk.core is None else after_stage(chunk.core, running)
        self.segments.append(
            Segment(
                before=tuple(chunk.before),
                core=chunk.core,
                after=tuple(chunk.after),
                in_shape=shape,
                widths=tuple(widths),
                out_shape=out_shape,
                source=source,
                target=target,
                expressions=dict(self._expressions),
            )
        )

    def _cut(self, stages: tuple[Stage, ...]) -> list[_Chunk | Branch]:
        chunks: list[_Chunk | Branch] = []
        for stage in self._lowered(stages):
            last = chunks[-1] if chunks else None
            if isinstance(stage, Branch):
                chunks.append(stage)
            elif not isinstance(last, _Chunk) or not self._joins(last, stage):
                last = _Chunk()
                chunks.append(last)
            if isinstance(last, _Chunk) and not isinstance(stage, Branch):
                self._place(last, stage)
        return chunks

    def _joins(self, chunk: _Chunk, stage: Stage) -> bool:
        if not self._fuse or chunk.core is not None:
            return self._fuse and is_map(stage)
        if any(isinstance(earlier, Window) for earlier in chunk.before):
            return is_map(stage) or (self._windows and isinstance(stage, RowReduce | RowNorm | Window))
        return True

    @staticmethod
    def _place(chunk: _Chunk, stage: Stage) -> None:
        if is_map(stage):
            (chunk.before if chunk.core is None else chunk.after).append(stage)
        elif isinstance(stage, Window):
            chunk.before.append(stage)
        else:
            chunk.core = stage

    def _lowered(self, stages: tuple[Stage, ...]) -> list[Stage]:
        """Stages with a linear layer's bias as a stage of its own."""
        found: list[Stage] = []
        for stage in stages:
            found.append(stage)
            if isinstance(stage, Linear):
                self._expressions[f"{stage.name}_weight"] = f"self.{stage.name}.weight"
                if stage.bias:
                    self._expressions[f"{stage.name}_bias"] = f"self.{stage.name}.bias"
                    found.append(Vector(op="add", name=f"{stage.name}_bias"))
        return found
