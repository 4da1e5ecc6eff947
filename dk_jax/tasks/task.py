"""A task and a suite of them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dk_jax.tasks.spec import OpSpec, Shape

Split = Literal["train", "held_out"]
Size = Literal["small", "light", "cpu", "gpu"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something to make fast.

    Attributes:
      name: unique in its suite.
      level: 1 a single operator, 2 a fused chain, 3 a small block or model.
      family: tasks of one family differ in sizes, constants or activation only.
      split: `train`, or `held_out` for evaluation; a family is never in both, but for the learnable tasks' (dk_jax.tasks.learnable).
      reference: KernelBench source.
      dtype: element type of the inputs.
      size: what the sizes are meant for: "small" to be checked in an interpreter, "light" to be checked on a CPU (numbers like those
        of "cpu", an eighth of the elements), "cpu" and "gpu" to be timed there.
      spec: what the reference computes, symbolically; None for a task read from a file.
    """

    name: str
    level: int
    family: str
    split: Split
    reference: str
    dtype: str = "float32"
    size: Size = "cpu"
    spec: OpSpec | None = None

    @property
    def arguments(self) -> tuple[tuple[str, Shape], ...]:
        """(name, shape) of each tensor of the C signature: forward's arguments, then parameters; empty
        without a spec."""
        return () if self.spec is None else tuple((a.name, a.shape) for a in self.spec.arguments)

    @property
    def cpp_signature(self) -> str:
        """Head of the C++ function that a bare kernel must define.

        Raises:
          ValueError: the task has no spec, so only the sandbox, which runs it, knows its tensors.
        """
        if self.spec is None:
            raise ValueError(
                f"task {self.name!r} was read from a file and has no spec: evaluate a candidate with "
                "form='kernel' and read kernel_signature from the result, or write a module"
            )
        arguments = ", ".join(f"const float* {argument.name}" for argument in self.spec.arguments)
        return f'extern "C" void kernel({arguments}, float* out)'

    @cached_property
    def compact(self) -> str:
        """The task in few tokens for a small model: shapes, forward's statements without prefixes, and the C
        signature. Statements stand as the comments that quote them in the cold start's kernels (`sft.cpp_ops`)."""
        if self.spec is None:
            return "\n".join(self.statements)
        shapes = "; ".join(" ".join([name, *map(str, shape)]) for name, shape in self.arguments)
        lines = [f"// {number}: {line}" for number, line in enumerate(self.statements, 1)]
        return "\n".join([shapes, *lines, self.cpp_signature])

    @cached_property
    def statements(self) -> tuple[str, ...]:
        """Forward's statements, one a line, without the prefixes of modules."""
        return tuple(re.sub(r"\b(?:self|torch|F|nn)\.", "", line) for line in _forward_statements(self))


@dataclass(frozen=True)
class Suite:
    """An ordered collection of tasks with unique names.

    Raises:
      ValueError: two tasks share a name, or a family is in both splits.
    """

    tasks: tuple[Task, ...]

    def __post_init__(self):
        names = [task.name for task in self.tasks]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"suite has several tasks named {', '.join(duplicates)}: names must be unique")
        if both := {task.family for task in self.train} & {task.family for task in self.held_out}:
            raise ValueError(f"families {sorted(both)} are in both splits: a family belongs to one")

    def __iter__(self):
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def train(self) -> tuple[Task, ...]:
        """Tasks to learn from."""
        return tuple(task for task in self.tasks if task.split == "train")

    @property
    def held_out(self) -> tuple[Task, ...]:
        """Tasks for evaluation only."""
        return tuple(task for task in self.tasks if task.split == "held_out")

    @property
    def families(self) -> tuple[str, ...]:
        """Names of the families, in order of appearance."""
        return tuple(dict.fromkeys(task.family for task in self.tasks))

    def by_family(self, family: str) -> tuple[Task, ...]:
        """Tasks of one family.

        Raises:
          KeyError: there is no such family.
        """
        found = tuple(task for task in self.tasks if task.family == family)
        if not found:
            raise KeyError(f"no family {family!r}; there are {', '.join(self.families)}")
        return found

    def get(self, name: str) -> Task:
        """The task of that name.

        Raises:
          KeyError: there is none.
        """
        for task in self.tasks:
            if task.name == name:
                return task
        raise KeyError(
            f"no task {name!r} among the suite's {len(self.tasks)}; names are those of Suite.tasks"
        )

    def siblings(self, task: Task) -> tuple[Task, ...]:
        """The other tasks of a task's family, in suite order."""
        return tuple(other for other in self.tasks if other.family == task.family and other.name != task.name)


def _forward_statements(task: Task) -> list[str]:
    """Statements of Model.forward, one a line, without docstring and without a bare `return x`."""
    for node in ast.walk(ast.parse(task.reference)):
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if len(body) > 1 and isinstance(body[-1], ast.Return) and isinstance(body[-1].value, ast.Name):
                body = body[:-1]
            return [line for statement in body for line in ast.unparse(statement).splitlines()]
    raise ValueError(
        f"task {task.name!r} has no forward method: its reference must define class Model with forward"
    )
