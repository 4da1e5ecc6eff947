"""A symbolic description of a task: what to compute, and nothing about how.

An `OpSpec` is a pipeline. The running value starts as the argument `x` of shape [rows, cols]; each stage
replaces it, and what is left at the end is the result. `Branch` sets the running value aside under a name (a
residual, a gate), and a later `Tensor` stage reads it back. Three renderers work from it: the PyTorch
reference (`tasks.render`), C++ kernels (`sft.cpp_kernels`) and Triton modules.

    stage           running value            operands                            reference line
    Unary           any -> same                                                  x = torch.relu(x)
    Scalar          any -> same                                                  x = x * 2.0
    Vector          [.., C] -> same          NAME [C], one value a column        x = x + bias
    Tensor          [R, C] -> same           NAME [R, C], or a branch's name     x = x * torch.sigmoid(gate)
    RowNorm         [R, C] -> [R, C]                                             x = torch.softmax(x, dim=-1)
    RowReduce       [R, C] -> [R]                                                x = x.sum(dim=-1)
    ColReduce       [R, C] -> [C]                                                x = x.sum(dim=0)
    Linear          [R, C] -> [R, width]     parameters NAME.weight, NAME.bias   x = self.fc(x)
    Matmul          [R, C] -> [R, width]     NAME [C, width] or [width, C]       x = x @ w
    Transpose       [R, C] -> [C, R]                                             x = x.t().contiguous()
    Window          [R, C] -> [R, C']        conv: NAME [R, 1, size]             x = F.max_pool1d(x, 4)
    Cumsum          [R, C] -> [R, C]                                             x = torch.cumsum(x, dim=-1)
    Branch          unchanged                what its own stages name            r = x

An OpSpec numbers its stages: `stage.line` is the number of its line in the reference's forward, from 1.

Everything is float32 and contiguous. What the names of functions mean numerically is said once, in
`tasks.ops`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

Shape = tuple[int, ...]
Kind = Literal["map", "reduce", "norm", "column", "matmul", "transpose", "window", "scan", "block"]
Binary = Literal["add", "sub", "mul", "div", "rsub", "maximum"]
Draw = Literal["normal", "shifted", "uniform", "positive", "small", "wide"]  # see tasks.ops.DRAWS


@dataclass(frozen=True, kw_only=True)
class Unary:
    """x = fn(x), elementwise; `constants` are the function's own numbers (slope of a leaky ReLU, bounds of a
    clamp)."""

    fn: str
    constants: tuple[float, ...] = ()
    line: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """x = x op value; `rsub` is value - x."""

    op: Binary
    value: float
    line: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Vector:
    """x = x op NAME[column]; NAME is an argument of shape [columns]."""

    op: Binary
    name: str
    draw: Draw = "normal"
    line: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """x = x op fn(NAME) (or x op factor * NAME); NAME is a branch, or else an argument of the running value's
    shape.

    Attributes:
      fn: unary function applied to the operand, or None.
      factor: constant that multiplies the operand, or None. At most one of `fn` and `factor` is set.
    """

    op: Binary
    name: str
    fn: str | None = None
    factor: float | None = None
    draw: Draw = "normal"
    line: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class RowNorm:
    """x = fn(x) row by row, shape kept: softmax, log_softmax, layer_norm, rms_norm, l2_normalize,
    l1_normalize, center, max_shift."""

    fn: str
    line: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class RowReduce:
    """x = fn(x) over each row: sum, mean, amax, amin, l2, var (biased), logsumexp."""

    fn: str
    line: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class ColReduce:
    """x = fn(x) over each column: sum, mean, amax, l2."""

    fn: str
    line: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """x = nn.Linear(columns, width)(x); parameters NAME.weight [width, columns] and, with `bias`, NAME.bias
    [width]."""

    name: str
    width: int
    bias: bool = True
    line: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """x = x @ NAME with NAME [columns, width]; `transposed`: x @ NAME.t() with NAME [width, columns]."""

    name: str
    width: int
    transposed: bool = False
    draw: Draw = "normal"
    line: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Transpose:
    """x = x.t(), made contiguous."""

    line: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Window:
    """A window of `size` along each row. avg, max: `stride` 1 or `size`, no padding; conv: row i convolved
    with NAME[i, 0, :], stride 1."""

    fn: Literal["avg", "max", "conv"]
    size: int
    stride: int = 1
    name: str | None = None
    line: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Cumsum:
    """x = running sum along each row."""

    line: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Branch:
    """NAME = stages(x); the running value stays what it was."""

    name: str
    stages: tuple[Stage, ...] = ()
    line: int = field(default=0, compare=False, repr=False)


MapStage = Unary | Scalar | Vector | Tensor
Stage = (
    Unary
    | Scalar
    | Vector
    | Tensor
    | RowNorm
    | RowReduce
    | ColReduce
    | Linear
    | Matmul
    | Transpose
    | Window
    | Cumsum
    | Branch
)

_KINDS: dict[type, Kind] = {
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
class Argument:
    """One tensor that a kernel receives.

    Attributes:
      name: C identifier; for a parameter the dots of its PyTorch name are underscores.
      shape: sizes, outermost first.
      parameter: True for what nn.Module owns, False for an argument of forward.
      draw: how get_inputs draws it (parameters keep PyTorch's own initialisation).
    """

    name: str
    shape: Shape
    parameter: bool = False
    draw: Draw = "normal"


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """A pipeline of stages over x [rows, cols].

    Raises:
      ValueError: a stage does not fit the shape it meets, or a name is used twice.
    """

    rows: int
    cols: int
    stages: tuple[Stage, ...]
    draw: Draw = "normal"

    def __post_init__(self):
        if not self.stages:
            raise ValueError("OpSpec.stages is empty: give at least one stage")
        object.__setattr__(self, "stages", _numbered(self.stages, 1))
        names = [argument.name for argument in self.arguments]
        if len(set(names)) != len(names):
            raise ValueError(f"OpSpec names an operand twice ({names}): give each operand a name of its own")

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Tensors of the C signature in its order: forward's arguments by first use, then parameters by
        definition."""
        found = [Argument(name="x", shape=(self.rows, self.cols), draw=self.draw)]
        found += [argument for step in walk(self) for argument in step.operands]
        return tuple(a for a in found if not a.parameter) + tuple(a for a in found if a.parameter)

    @property
    def out_shape(self) -> Shape:
        """Shape of the result."""
        *_, last = walk(self)
        return last.after

    @property
    def kind(self) -> Kind:
        """`map` if every stage is elementwise, the kind of the only other stage if there is one, else
        `block`."""
        others = [stage for stage in self.stages if not is_map(stage)]
        if not others:
            return "map"
        return _KINDS.get(type(others[0]), "block") if len(others) == 1 else "block"

    @property
    def structure(self) -> tuple:
        """What is composed with what: hashable, free of sizes, constants and names. Equal structures are the
        same task in another size."""
        return tuple(_stage_structure(stage, _branch_names(self.stages)) for stage in self.stages)

    def split(self) -> tuple[tuple[MapStage, ...], Stage, tuple[MapStage, ...]]:
        """(maps before, the one stage that is not a map, maps after); for any kind but `map` and `block`.

        Raises:
          ValueError: the pipeline has no such stage, or more than one.
        """
        at = [index for index, stage in enumerate(self.stages) if not is_map(stage)]
        if len(at) != 1:
            raise ValueError(
                f"split() needs exactly one stage that is not a map; this pipeline has {len(at)}"
            )
        return self.stages[: at[0]], self.stages[at[0]], self.stages[at[0] + 1 :]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One stage met while walking a pipeline: the variable it writes, shapes before and after, and the
    arguments it brings in.

    `branch` is the name of the branch that the stage belongs to, or None on the main line.
    """

    stage: Stage
    before: Shape
    after: Shape
    operands: tuple[Argument, ...]
    branch: str | None = None


def is_map(stage: Stage) -> bool:
    """Whether a stage is elementwise in the running value."""
    return isinstance(stage, Unary | Scalar | Vector | Tensor)


def walk(spec: OpSpec) -> Iterator[Step]:
    """Steps of a pipeline in the order in which they execute; a Branch comes before the stages inside it.

    Raises:
      ValueError: a stage does not fit the shape it meets.
    """
    yield from _walk(spec.stages, (spec.rows, spec.cols), set(), None)


def _numbered(stages: tuple[Stage, ...], line: int) -> tuple[Stage, ...]:
    """The stages with their lines; a branch's first stage shares the branch's line."""
    out: list[Stage] = []
    for stage in stages:
        if isinstance(stage, Branch):
            stage = replace(stage, stages=_numbered(stage.stages, line))
        out.append(replace(stage, line=line))
        line += max(1, len(stage.stages)) if isinstance(stage, Branch) else 1
    return tuple(out)


def _walk(stages: tuple[Stage, ...], shape: Shape, known: set[str], branch: str | None) -> Iterator[Step]:
    for stage in stages:
        if isinstance(stage, Branch):
            yield Step(stage=stage, before=shape, after=shape, operands=(), branch=branch)
            yield from _walk(stage.stages, shape, known, stage.name)
            known.add(stage.name)
            continue
        operands, after = _effect(stage, shape, known)
        yield Step(stage=stage, before=shape, after=after, operands=operands, branch=branch)
        shape = after


def _effect(stage: Stage, shape: Shape, known: set[str]) -> tuple[tuple[Argument, ...], Shape]:
    """Arguments that a stage brings in, and the shape that it leaves."""
    if isinstance(stage, Unary | Scalar):
        return (), shape
    if isinstance(stage, Vector):
        return (Argument(name=stage.name, shape=shape[-1:], draw=stage.draw),), shape
    if isinstance(stage, Tensor):
        if stage.fn is not None and stage.factor is not None:
            raise ValueError(f"Tensor({stage.name!r}) has both fn and factor: give one")
        argument = Argument(name=stage.name, shape=shape, draw=stage.draw)
        return () if stage.name in known else (argument,), shape
    if len(shape) != 2:
        raise ValueError(f"{type(stage).__name__} needs a value of two dimensions, but meets {shape}")
    rows, cols = shape
    if isinstance(stage, RowNorm | Cumsum):
        return (), shape
    if isinstance(stage, RowReduce):
        return (), (rows,)
    if isinstance(stage, ColReduce):
        return (), (cols,)
    if isinstance(stage, Transpose):
        return (), (cols, rows)
    if isinstance(stage, Linear):
        weight = Argument(name=f"{stage.name}_weight", shape=(stage.width, cols), parameter=True)
        bias = Argument(name=f"{stage.name}_bias", shape=(stage.width,), parameter=True)
        return (weight, bias) if stage.bias else (weight,), (rows, stage.width)
    if isinstance(stage, Matmul):
        sizes = (stage.width, cols) if stage.transposed else (cols, stage.width)
        return (Argument(name=stage.name, shape=sizes, draw=stage.draw),), (rows, stage.width)
    assert isinstance(stage, Window)
    if stage.fn == "conv":
        if stage.name is None or stage.stride != 1:
            raise ValueError("Window(fn='conv') needs a name for its weights, and stride 1")
        return (Argument(name=stage.name, shape=(rows, 1, stage.size)),), (rows, cols - stage.size + 1)
    return (), (rows, (cols - stage.size) // stage.stride + 1)


def _branch_names(stages: tuple[Stage, ...]) -> frozenset[str]:
    return frozenset(stage.name for stage in stages if isinstance(stage, Branch))


def _stage_structure(stage: Stage, branches: frozenset[str]) -> tuple:
    if isinstance(stage, Unary):
        return ("unary", stage.fn)
    if isinstance(stage, Scalar):
        return ("scalar", stage.op)
    if isinstance(stage, Vector):
        return ("vector", stage.op)
    if isinstance(stage, Tensor):
        return (
            "branch" if stage.name in branches else "tensor",
            stage.op,
            stage.fn,
            stage.factor is not None,
        )
    if isinstance(stage, RowNorm | RowReduce | ColReduce):
        return (type(stage).__name__, stage.fn)
    if isinstance(stage, Linear):
        return ("Linear", stage.bias)
    if isinstance(stage, Matmul):
        return ("Matmul", stage.transposed)
    if isinstance(stage, Window):
        return ("Window", stage.fn, stage.stride == 1)
    if isinstance(stage, Branch):
        return ("Branch", *(_stage_structure(inner, branches) for inner in stage.stages))
    return (type(stage).__name__,)
