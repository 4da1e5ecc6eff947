"""C++ text of a spec's elementwise stages and the pieces that every kernel generator shares.

A reference line becomes one statement on the running value `v`, in the same order and with the same
constants, so that a small model can translate line by line whatever the composition. Above each such statement
stands its reference line with its number, // 2: x = x * scale, in every pass that computes it: a reader sees
what it is, and a model that first writes the line off the task has only to translate what it has just written.
What a generator chooses is the schedule around those statements.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dk_jax.tasks.ops import number
from dk_jax.tasks.spec import MapStage, OpSpec, Scalar, Stage, Tensor, Unary, Vector
from dk_jax.tasks.task import Task

UNARY: dict[str, str] = {
    "relu": "{v} > 0.0f ? {v} : 0.0f",
    "leaky_relu": "{v} > 0.0f ? {v} : {a} * {v}",
    "elu": "{v} > 0.0f ? {v} : expf({v}) - 1.0f",
    "clamp": "fminf(fmaxf({v}, {a}), {b})",
    "abs": "fabsf({v})",
    "square": "{v} * {v}",
    "neg": "-{v}",
    "sqrt": "sqrtf({v})",
    "exp": "expf({v})",
    "log1p": "logf(1.0f + {v})",
    "sin": "sinf({v})",
    "cos": "cosf({v})",
    "sigmoid": "1.0f / (1.0f + expf(-{v}))",
    "tanh": "tanhf({v})",
    "silu": "{v} / (1.0f + expf(-{v}))",
    "gelu": "0.5f * {v} * (1.0f + erff({v} * 0.70710678f))",
    "gelu_tanh": "0.5f * {v} * (1.0f + tanhf(0.79788456f * ({v} + 0.044715f * {v} * {v} * {v})))",
    "softplus": "logf(1.0f + expf({v}))",
    "softsign": "{v} / (1.0f + fabsf({v}))",
    "logsigmoid": "-logf(1.0f + expf(-{v}))",
    "mish": "{v} * tanhf(logf(1.0f + expf({v})))",
    "hardsigmoid": "fminf(fmaxf({v} + 3.0f, 0.0f), 6.0f) / 6.0f",
    "hardswish": "{v} * fminf(fmaxf({v} + 3.0f, 0.0f), 6.0f) / 6.0f",
}

_BINARY: dict[str, str] = {
    "add": "{v} + {y}",
    "sub": "{v} - {y}",
    "mul": "{v} * {y}",
    "div": "{v} / {y}",
    "rsub": "{y} - {v}",
    "maximum": "fmaxf({v}, {y})",
}


_MARKED = re.compile(r"^( *)/\*(\d+)\*/ ", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to write a task's kernel.

    Attributes:
      source: C++ source in the bare kernel form.
      techniques: keys of `cpp_kernels.TECHNIQUES`.
      intent: what the generator means it to be; only the sandbox says what it is.
    """

    source: str
    techniques: frozenset[str]
    intent: str


@dataclass(frozen=True, kw_only=True)
class Access:
    """How the current element is addressed.

    Attributes:
      column: index text of the element's column, for one-per-column operands.
      flat: index text of the element in a contiguous tensor of its shape.
      saved: text of each branch's value at this element, by the branch's name.
    """

    column: str
    flat: str
    saved: Mapping[str, str] = field(default_factory=dict)


def constant(value: float) -> str:
    """A float literal, e.g. 0.5f."""
    return number(value) + "f"


def mark(stage: Stage) -> str:
    """The number of the reference line that a statement belongs to, for `quoting`."""
    return f"/*{stage.line}*/ "


def quoting(source: str, lines: Sequence[str]) -> str:
    """The source with each mark made a comment above the statement that quotes its reference line (`lines`, the first is 1)."""
    return _MARKED.sub(lambda m: f"{m[1]}// {m[2]}: {lines[int(m[2]) - 1]}\n{m[1]}", source)


def statements(stages: Iterable[MapStage], access: Access, v: str = "v") -> list[str]:
    """One marked C++ statement a stage on the running value `v`."""
    return [f"{mark(stage)}{v} = {_value(stage, access, v)};" for stage in stages]


def uses_columns(stages: Iterable[MapStage]) -> bool:
    """Whether any stage reads a one-per-column operand."""
    return any(isinstance(stage, Vector) for stage in stages)


def _value(stage: MapStage, access: Access, v: str) -> str:
    if isinstance(stage, Unary):
        return UNARY[stage.fn].format(v=v, **dict(zip("ab", map(constant, stage.constants), strict=False)))
    if isinstance(stage, Scalar):
        return _BINARY[stage.op].format(v=v, y=constant(stage.value))
    if isinstance(stage, Vector):
        return _BINARY[stage.op].format(v=v, y=f"{stage.name}[{access.column}]")
    assert isinstance(stage, Tensor)
    element = access.saved.get(stage.name, f"{stage.name}[{access.flat}]")
    if stage.fn is not None:
        element = f"({UNARY[stage.fn].format(v=element)})"
    elif stage.factor is not None:
        element = f"{constant(stage.factor)} * {element}"
    return _BINARY[stage.op].format(v=v, y=element)


class Code:
    """Lines of a kernel under construction, two spaces a level, pragmas at the margin."""

    def __init__(self, task: Task):
        self._lines: list[str] = []
        self._depth = 0
        self.open(task.cpp_signature)

    def add(self, *lines: str) -> Code:
        """Append lines at the present depth."""
        self._lines += ["  " * self._depth + line for line in lines]
        return self

    def pragma(self, text: str | None) -> Code:
        """Append `#pragma omp text` if there is a text."""
        if text:
            self._lines.append(f"#pragma omp {text}")
        return self

    def open(self, head: str) -> Code:
        """Open a block; without a head it is a scope."""
        self.add(f"{head} {{".lstrip())
        self._depth += 1
        return self

    def loop(
        self, index: str, bound: str, pragma: str | None = None, step: int = 1, start: str = "0"
    ) -> Code:
        """Open a counted loop under an optional pragma."""
        advance = f"++{index}" if step == 1 else f"{index} += {step}"
        return self.pragma(pragma).open(f"for (long {index} = {start}; {index} < {bound}; {advance})")

    def close(self, levels: int = 1) -> Code:
        """Close blocks."""
        for _ in range(levels):
            self._depth -= 1
            self.add("}")
        return self

    def text(self) -> str:
        """The source, with whatever is still open closed."""
        self.close(self._depth)
        return "\n".join(self._lines) + "\n"


def variant(code: Code, intent: str, *techniques: str | None) -> Variant:
    """Finish a kernel; None among the techniques is dropped."""
    return Variant(source=code.text(), techniques=frozenset(t for t in techniques if t), intent=intent)


def spec_of(task: Task) -> OpSpec:
    """The task's spec.

    Raises:
      ValueError: it has none.
    """
    if task.spec is None:
        raise ValueError(
            f"task {task.name!r} has no spec to write kernels from; built-in and generated tasks have one"
        )
    return task.spec


Generator = Callable[[Task], list[Variant]]
