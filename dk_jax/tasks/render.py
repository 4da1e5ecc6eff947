"""Spec -> reference source in KernelBench form: a `Model`, `get_inputs` and `get_init_inputs`, one operation
a line."""

from __future__ import annotations

from dk_jax.tasks.ops import DRAWS, torch_text
from dk_jax.tasks.spec import Branch, Linear, OpSpec, Stage, walk


def render_reference(spec: OpSpec, title: str) -> str:
    """KernelBench source of a spec.

    Args:
      spec: what to compute.
      title: one line for the model's docstring.
    """
    body = forward_lines(spec)
    inputs = [argument for argument in spec.arguments if not argument.parameter]
    layers = []
    for step in walk(spec):
        if isinstance(step.stage, Linear):
            bias = "" if step.stage.bias else ", bias=False"
            layers.append(f"self.{step.stage.name} = nn.Linear({step.before[1]}, {step.stage.width}{bias})")
    names = ", ".join(argument.name for argument in inputs)
    lines = ["import torch", "import torch.nn as nn"]
    if any("F." in line for line in body):
        lines.append("import torch.nn.functional as F")
    lines += [
        "",
        "",
        "class Model(nn.Module):",
        f'    """{title}"""',
        "",
        "    def __init__(self):",
        "        super().__init__()",
    ]
    lines += [f"        {layer}" for layer in layers]
    lines += ["", f"    def forward(self, {names}):"]
    lines += [f"        {line}" for line in body] + ["        return x"]
    lines += ["", "", "def get_inputs():"]
    for argument in inputs:
        shape = ", ".join(map(str, argument.shape))
        lines.append(f"    {argument.name} = {DRAWS[argument.draw].format(shape=shape)}")
    lines += [f"    return [{names}]", "", "", "def get_init_inputs():", "    return []", ""]
    return "\n".join(lines)


def forward_lines(spec: OpSpec) -> list[str]:
    """The statements of forward before its `return x`."""
    return _lines(spec.stages, "x")


def _lines(stages: tuple[Stage, ...], variable: str) -> list[str]:
    lines: list[str] = []
    for stage in stages:
        if isinstance(stage, Branch):
            first, *rest = stage.stages or (None,)
            lines.append(
                f"{stage.name} = {variable}"
                if first is None
                else f"{stage.name} = {torch_text(first, variable)}"
            )
            lines += _lines(tuple(rest), stage.name)
        else:
            lines.append(f"{variable} = {torch_text(stage, variable)}")
    return lines
