"""Triton text of a spec's elementwise stages, and the builder of a candidate module, which every kernel
generator shares.

A reference line becomes one statement on the running value `v` (after a line that loads its operand), in the
same order and with the same constants, so that a small model can translate line by line whatever the
composition. What a generator chooses is the schedule.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dk_jax.sft.triton_plan import Segment
from dk_jax.tasks.ops import number
from dk_jax.tasks.spec import Linear, Scalar, Shape, Stage, Tensor, Unary, Vector, Window, walk
from dk_jax.tasks.task import Task

# Only what Triton has without libdevice, so that the interpreter runs it too.
UNARY: dict[str, str] = {
    "relu": "tl.maximum({v}, 0.0)",
    "leaky_relu": "tl.where({v} > 0.0, {v}, {a} * {v})",
    "elu": "tl.where({v} > 0.0, {v}, tl.exp({v}) - 1.0)",
    "clamp": "tl.minimum(tl.maximum({v}, {a}), {b})",
    "abs": "tl.abs({v})",
    "square": "{v} * {v}",
    "neg": "-{v}",
    "sqrt": "tl.sqrt({v})",
    "exp": "tl.exp({v})",
    "log1p": "tl.log(1.0 + {v})",
    "sin": "tl.sin({v})",
    "cos": "tl.cos({v})",
    "sigmoid": "tl.sigmoid({v})",
    "tanh": "2.0 * tl.sigmoid(2.0 * {v}) - 1.0",
    "silu": "{v} * tl.sigmoid({v})",
    "gelu": "0.5 * {v} * (1.0 + tl.erf({v} * 0.70710678))",
    "gelu_tanh": "{v} * tl.sigmoid(1.59576912 * ({v} + 0.044715 * {v} * {v} * {v}))",
    "softplus": "tl.maximum({v}, 0.0) + tl.log(1.0 + tl.exp(-tl.abs({v})))",
    "softsign": "{v} / (1.0 + tl.abs({v}))",
    "logsigmoid": "tl.minimum({v}, 0.0) - tl.log(1.0 + tl.exp(-tl.abs({v})))",
    "mish": "{v} * (1.0 - 2.0 / (1.0 + (1.0 + tl.exp({v})) * (1.0 + tl.exp({v}))))",
    "hardsigmoid": "tl.minimum(tl.maximum({v} + 3.0, 0.0), 6.0) / 6.0",
    "hardswish": "{v} * tl.minimum(tl.maximum({v} + 3.0, 0.0), 6.0) / 6.0",
}

_BINARY: dict[str, str] = {
    "add": "{v} + {y}",
    "sub": "{v} - {y}",
    "mul": "{v} * {y}",
    "div": "{v} / {y}",
    "rsub": "{y} - {v}",
    "maximum": "tl.maximum({v}, {y})",
}

# The reference writes these as bare text, so precedence around an operand must be the same here.
_TEXT_IN_REFERENCE = frozenset(("square", "neg"))
_COMPOUND = re.compile(r"^(?!tl\.)|^tl\.\w+\([^()]*\).")

# Names that kernels use for themselves; an operand of that name is loaded into NAME_value.
_TAKEN = frozenset("x v m n k i j c t a b s q u d w row rows cols mask acc out start tl".split())


@dataclass(frozen=True, kw_only=True)
class Place:
    """How the current block of elements is addressed.

    Attributes:
      flat: offsets of the elements in a contiguous tensor of their shape.
      column: their column indices, for one-per-column operands.
      mask: which of them exist, or None if all do.
      column_mask: the same for `column`.
      spread: what shapes a loaded one-per-column operand like the block, e.g. "[None, :]".
    """

    flat: str
    column: str
    mask: str | None = "mask"
    column_mask: str | None = "mask"
    spread: str = ""


class Code:
    """Lines of a kernel's body under construction."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._depth = 1

    def add(self, *lines: str) -> Code:
        """Append lines at the present depth."""
        self.lines += ["    " * self._depth + line for line in lines]
        return self

    def loop(self, head: str) -> Code:
        """Open a loop: `for head:`."""
        self.add(f"for {head}:")
        self._depth += 1
        return self

    def close(self, levels: int = 1) -> Code:
        """Close loops."""
        self._depth -= levels
        return self

    def maps(self, stages: Iterable[Stage], place: Place) -> Code:
        """Elementwise stages on the running value `v`."""
        for stage in stages:
            self.add(*_statements(stage, place))
        return self

    def value(
        self, segment: Segment, place: Place, *, row: str = "row", row_mask: str = "", unroll: bool = True
    ) -> Code:
        """Set `v` to what `segment.before` makes of x at `place`: a load, then maps and windows.

        Args:
          segment: what is computed; its `before` may hold windows.
          place: of a one-dimensional block in the result of `before`.
          row: row index of the block's elements.
          row_mask: what a load indexed by `row` alone needs, e.g. ", mask=mask" where `row` is a block.
          unroll: whether loops over a window are unrolled.
        """

        def compute(stages: Sequence[Stage], place: Place, depth: int) -> None:
            at = max((index for index, stage in enumerate(stages) if isinstance(stage, Window)), default=None)
            if at is None:
                self.add(f"v = {load('x', place.flat, place.mask)}").maps(stages, place)
                return
            window, level = stages[at], sum(isinstance(stage, Window) for stage in stages[:at])
            assert isinstance(window, Window)
            u, t, c = (f"{name}{depth or ''}" for name in "utc")
            width = segment.widths[level] if level else "cols"
            column = place.column if window.stride == 1 else f"{place.column} * {window.stride}"
            self.add(f"{u} = {filled('(BLOCK,)', '-inf' if window.fn == 'max' else '0.0')}")
            self.loop(f"{t} in {'tl.static_range' if unroll else 'range'}({window.size})")
            self.add(f"{c} = {column} + {t}")
            inner = dataclasses.replace(place, flat=f"{row} * {width} + {c}", column=c)
            compute(stages[:at], inner, depth + 1)
            if window.fn == "conv":
                self.add(f"w = {load(window.name, f'{row} * {window.size} + {t}', None)[:-1]}{row_mask})")
                self.add(f"{u} += w * v")
            else:
                self.add(f"{u} += v" if window.fn == "avg" else f"{u} = tl.maximum({u}, v)")
            self.close().add(f"v = {u} / {window.size}.0" if window.fn == "avg" else f"v = {u}")
            self.maps(stages[at + 1 :], place)

        compute(segment.before, place, 0)
        return self


def load(name: str, offset: str, mask: str | None, other: str | None = None) -> str:
    """Text of a load of operand `name`."""
    rest = (f", mask={mask}" if mask else "") + (f", other={other}" if mask and other else "")
    return f"tl.load({name}_ptr + {offset}{rest})"


def filled(shape: str, value: str) -> str:
    """Text of a float32 block filled with "0.0", "inf" or "-inf"."""
    if value == "0.0":
        return f"tl.zeros({shape}, dtype=tl.float32)"
    return f'tl.full({shape}, float("{value}"), dtype=tl.float32)'


def _statements(stage: Stage, place: Place) -> list[str]:
    if isinstance(stage, Unary):
        return [f"v = {_unary(stage.fn, 'v', stage.constants)}"]
    if isinstance(stage, Scalar):
        return [f"v = {_BINARY[stage.op].format(v='v', y=number(stage.value))}"]
    assert isinstance(stage, Vector | Tensor)
    name = f"{stage.name}_value" if stage.name in _TAKEN else stage.name
    if isinstance(stage, Vector):
        found = load(stage.name, place.column, place.column_mask) + place.spread
        return [f"{name} = {found}", f"v = {_BINARY[stage.op].format(v='v', y=name)}"]
    operand = name
    if stage.fn is not None:
        operand = _unary(stage.fn, name)
        if stage.fn not in _TEXT_IN_REFERENCE:
            operand = f"({operand})" if _COMPOUND.search(operand) else operand
    elif stage.factor is not None:
        operand = f"{number(stage.factor)} * {name}"
    return [
        f"{name} = {load(stage.name, place.flat, place.mask)}",
        f"v = {_BINARY[stage.op].format(v='v', y=operand)}",
    ]


def _unary(fn: str, v: str, constants: tuple[float, ...] = ()) -> str:
    return UNARY[fn].format(v=v, **dict(zip("ab", map(number, constants), strict=False)))


class Module:
    """A candidate module under construction: kernels, and the lines of forward that launch them."""

    def __init__(self, task: Task):
        assert task.spec is not None
        self._task = task
        self._kernels: dict[str, str] = {}
        self._forward: list[str] = []
        self._sizes: dict[str, int] = {}

    def kernel(self, name: str, parameters: Iterable[str], code: Code) -> str:
        """Add a kernel and return its name, made unique by a number; an equal kernel is not added twice."""
        text = f"({', '.join(parameters)}):\n" + "\n".join(code.lines)
        for known, other in self._kernels.items():
            if other == text:
                return known
        taken = sum(known.rstrip("0123456789") == name for known in self._kernels)
        unique = f"{name}{taken + 1}" if taken else name
        self._kernels[unique] = text
        return unique

    def bind(self, names: str, tensor: str, shape: Shape) -> Module:
        """Give `tensor`'s sizes names, unless they have these values already."""
        sizes = dict(zip(names.split(", "), shape, strict=True))
        if any(self._sizes.get(name) != size for name, size in sizes.items()):
            self._sizes |= sizes
            self.run(f"{names}{',' if len(sizes) == 1 else ''} = {tensor}.shape")
        return self

    def bind_one(self, name: str, text: str, size: int) -> Module:
        """Give one size a name, unless it has this value already."""
        if self._sizes.get(name) != size:
            self._sizes[name] = size
            self.run(f"{name} = {text}")
        return self

    def run(self, *lines: str) -> Module:
        """Append lines to forward."""
        self._forward += lines
        return self

    def allocate(self, segment: Segment, shape: str, how: str = "torch.empty") -> Module:
        """Allocate a segment's result; `shape` is its text."""
        if segment.in_shape == segment.out_shape and how == "torch.empty":
            return self.run(f"{segment.target} = torch.empty_like({segment.source})")
        return self.run(f"{segment.target} = {how}({shape}, device={segment.source}.device)")

    def text(self, result: str = "out") -> str:
        """The module's source."""
        spec = self._task.spec
        lines = ["import torch", "import torch.nn as nn"]
        lines += ["import torch.nn.functional as F"] * any("F." in line for line in self._forward)
        lines += ["import triton", "import triton.language as tl"]
        for name, kernel in self._kernels.items():
            lines += ["", "", "@triton.jit", f"def {name}{kernel}"]
        lines += [
            "",
            "",
            "class ModelNew(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
        ]
        for step in walk(spec):
            if isinstance(stage := step.stage, Linear):
                bias = "" if stage.bias else ", bias=False"
                lines.append(f"        self.{stage.name} = nn.Linear({step.before[1]}, {stage.width}{bias})")
        arguments = ", ".join(argument.name for argument in spec.arguments if not argument.parameter)
        lines += ["", f"    def forward(self, {arguments}):"]
        lines += [f"        {line}" for line in self._forward]
        return "\n".join([*lines, f"        return {result}", ""])
