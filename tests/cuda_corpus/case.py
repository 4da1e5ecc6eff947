"""The form of a case, and what saves typing where a task or a module is of the plainest kind."""

from dataclasses import dataclass
from textwrap import indent
from typing import Literal

Meant = Literal["ok", "build_failed", "incorrect", "runtime_error"]


@dataclass(frozen=True, kw_only=True)
class CorpusCase:
    """One candidate and its task.

    Attributes:
      name: unique, an identifier.
      task: source of a module in KernelBench form (`Model`, `get_inputs`, `get_init_inputs`).
      candidate: source of a module that builds a CUDA extension with `load_inline` and defines `ModelNew`.
      meant: the outcome that the candidate must have.
      dtype: "float32", "float16" or "bfloat16"; floating-point inputs and parameters are cast to it.
      features: words for what its host code and its kernels use, such as "dispatch", "cub", "wmma", "accessor", "stream",
        "pybind" or "aten". "cuda_context" marks sources that include <ATen/cuda/CUDAContext.h>, which wants the headers of
        cuBLAS, cuSPARSE and cuSOLVER as well.
    """

    name: str
    task: str
    candidate: str
    meant: Meant = "ok"
    dtype: str = "float32"
    features: tuple[str, ...] = ()


def stateless_task(forward: str, inputs: str, args: str = "x", before: str = "") -> str:
    """A task without parameters.

    Args:
      forward: the expression that `Model` returns.
      inputs: the elements of the list that `get_inputs` returns.
      args: the arguments of `forward`.
      before: lines of the module between its imports and `Model`.
    """
    return f"""import torch
import torch.nn as nn
import torch.nn.functional as F

{before}
class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, {args}):
        return {forward}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""


def plain_module(
    *, name: str, cuda_source: str, cpp_source: str, functions: str, forward: str, args: str = "x", options: str = ""
) -> str:
    """A candidate whose Python is nothing but boilerplate.

    Args:
      name: of the extension.
      functions: names separated by blanks.
      forward: the expression that `ModelNew` returns, or the whole body of its `forward`; the extension is called `ext`.
      args: the arguments of `forward`.
      options: further arguments of `load_inline`.
    """
    more = f"    {options},\n" if options else ""
    body = forward.strip() if "return " in forward else f"return {forward}"
    return (
        "import torch\nimport torch.nn as nn\nfrom torch.utils.cpp_extension import load_inline\n\n"
        f'cuda_source = r"""\n{cuda_source.strip()}\n"""\n\n'
        f'cpp_source = r"""\n{cpp_source.strip()}\n"""\n\n'
        f'ext = load_inline(\n    name="{name}",\n    cpp_sources=cpp_source,\n    cuda_sources=cuda_source,\n'
        f"    functions={functions.split()!r},\n{more})\n\n\n"
        "class ModelNew(nn.Module):\n    def __init__(self):\n        super().__init__()\n\n"
        f"    def forward(self, {args}):\n{indent(body, ' ' * 8)}\n"
    )
