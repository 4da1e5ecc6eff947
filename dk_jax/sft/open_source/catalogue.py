"""What open kernels compute: a catalogue that pairs launchers of packages with references in plain PyTorch.

A problem is a reference, written here, with sizes to check it in an interpreter ("small") and to time it on a GPU ("gpu"), and the
launchers of packages that solve it, each with the expression that calls it. Problems with several launchers show what makes one
faster than another. Kernels take and return float32 (indices and masks aside) and contiguous tensors.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable
from functools import cache

from dk_jax.tasks.task import Size, Task

PREFIX = "open_"
"""Of the names and families of these tasks: no task of the built-in suite and no generated one has it."""
SIZES: tuple[Size, ...] = ("small", "gpu")


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a package's launcher is called.

    Attributes:
        path: "module:function", or "module:Class.forward" of an autograd function.
      """

    path: str
    call: str

    @property
    def module(self) -> str:
        """The top module of its package."""
        return self.path.split(".")[0]

    @property
    def name(self) -> str:
        """What the kernel is called in tables: the package's top module and the launcher."""
        return f"{self.module}.{self.path.partition(':')[2]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A reference with its launchers.

    Attributes:
        name: unique; the task is `PREFIX` and this.
        title: what it computes, a line.
        inputs: (argument of forward, expression that draws it), of names of the sizes.
        parameters: (name, expression that draws it) of the model's parameters.
        forward: expression of the arguments and of `self.name`, or statements that end in a return.
        launches: of packages.
        small, gpu: size -> number.
    """

    name: str
    title: str
    inputs: tuple[tuple[str, str], ...]
    forward: str
    launches: tuple[Launch, ...]
    small: tuple[tuple[str, int], ...]
    gpu: tuple[tuple[str, int], ...]
    parameters: tuple[tuple[str, str], ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of forward's arguments."""
        return tuple(name for name, _ in self.inputs)

    @property
    def init_arguments(self) -> tuple[str, ...]:
        """Sizes that the parameters' shapes depend on: arguments of the constructor."""
        used = {n.id for _, draw in self.parameters for n in ast.walk(ast.parse(draw, mode="eval")) if isinstance(n, ast.Name)}
        return tuple(name for name, _ in self.small if name in used)

    @property
    def constructor(self) -> str:
        """Text of `__init__`, or empty for a model without parameters."""
        if not self.parameters:
            return ""
        lines = [f"def __init__({', '.join(('self', *self.init_arguments))}):", "    super().__init__()"]
        return "\n".join([*lines, *(f"    self.{name} = nn.Parameter({draw})" for name, draw in self.parameters)])

    def reference(self, size: Size) -> str:
        """KernelBench source.

        Raises:
            ValueError: there are no sizes of that name.
        """
        if size not in SIZES:
            raise ValueError(f"size is {size!r}: give one of {', '.join(SIZES)}")
        lines = ["import torch", "import torch.nn as nn"]
        if any("F." in text for text in (self.forward, *(draw for _, draw in self.inputs))):
            lines.append("import torch.nn.functional as F")
        lines += ["", *(f"{name} = {number}" for name, number in (self.small if size == "small" else self.gpu))]
        lines += ["", "", "class Model(nn.Module):", f'    """{self.title}"""', ""]
        if self.parameters:
            lines += [*(f"    {line}" for line in self.constructor.split("\n")), ""]
        lines += [f"    def forward({', '.join(('self', *self.arguments))}):"]
        lines += [*(f"        {line}" for line in body_of(self.forward).split("\n")), "", ""]
        lines += ["def get_inputs():", f"    return [{', '.join(draw for _, draw in self.inputs)}]", "", ""]
        lines += ["def get_init_inputs():", f"    return [{', '.join(self.init_arguments)}]"]
        return "\n".join(lines) + "\n"

    def task(self, size: Size) -> Task:
        """The task of these sizes; its family is its own, and it is for training."""
        name = PREFIX + self.name
        return Task(name=name, level=1, family=name, split="train", reference=self.reference(size), size=size)


def body_of(text: str) -> str:
    """Statements of an expression's value, or the statements that a text is already."""
    return text.strip("\n") if "return " in text else f"return {text}"


def problem(
    name: str,
    title: str,
    inputs: dict[str, str],
    forward: str,
    launches: Iterable[tuple[str, str]],
    *,
    small: dict[str, int],
    gpu: dict[str, int],
    parameters: dict[str, str] | None = None,
) -> Problem:
    """A problem, written shortly (see `Problem`)."""
    return Problem(
        name=name,
        title=title,
        inputs=tuple(inputs.items()),
        forward=forward,
        launches=tuple(Launch(path, call) for path, call in launches),
        small=tuple(small.items()),
        gpu=tuple(gpu.items()),
        parameters=tuple((parameters or {}).items()),
    )


@cache
def catalogue() -> tuple[Problem, ...]:
    """All problems.

    Raises:
        ValueError: two have one name.
    """
    from dk_jax.sft.open_source.catalogue_layers import layer_problems
    from dk_jax.sft.open_source.catalogue_losses import loss_problems
    from dk_jax.sft.open_source.catalogue_maps import map_problems
    from dk_jax.sft.open_source.catalogue_rows import row_problems

    problems = (*map_problems(), *row_problems(), *loss_problems(), *layer_problems())
    names = [p.name for p in problems]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"the catalogue has several problems named {', '.join(doubled)}")
    return problems
