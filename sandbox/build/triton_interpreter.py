"""Triton's interpreter: what it can judge honestly on a machine without a GPU, and how it is switched on.

Triton decides when it is imported whether `@triton.jit` interprets or compiles, so this and ahead-of-time compilation
(`sandbox.build.triton`) never work in one process. Interpreted kernels run on CPU tensors, for correctness only; a candidate that
the interpreter would compute wrongly (bfloat16) or cannot run at all is refused, not judged wrong.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable


class InterpreterLimit(RuntimeError):
    """Triton's interpreter cannot judge this launch; the text says why and where it can be judged."""


def _dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _mentions(source: str) -> Iterable[str]:
    """Dotted names that the code (not its comments or strings) uses or imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            yield _dotted(node)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def interpreter_problem(source: str, dtype: str = "float32") -> str | None:
    """Why Triton's interpreter cannot judge a candidate honestly, or None if it can.

    Args:
        source: The candidate's module.
        dtype: The task's floating-point type.

    Returns:
        One sentence for the feedback. A module that does not parse gives None: loading it gives the better
        error.
    """
    elsewhere = "; judge it on a machine with an NVIDIA GPU (device 'cuda:0')"
    if dtype == "bfloat16":
        return (
            "Triton's interpreter computes bfloat16 wrongly, so a bfloat16 task cannot be judged on this CPU"
            + elsewhere
        )
    try:
        names = set(_mentions(source))
    except (SyntaxError, ValueError):
        return None
    if any(name in ("tl.bfloat16", "triton.language.bfloat16") for name in names):
        return "the kernel uses tl.bfloat16, which Triton's interpreter computes wrongly" + elsewhere
    if any("libdevice" in name.split(".") for name in names):
        return "the kernel uses libdevice, whose functions return nothing in Triton's interpreter" + elsewhere
    if any(name.endswith(("testing.do_bench", "driver.active")) for name in names):
        return (
            "the module measures on a GPU at run time (do_bench, driver.active), and there is none here"
            + elsewhere
        )
    return None


def interpreter_missing() -> str | None:
    """Why this machine cannot interpret Triton at all, or None if it can. For `doctor` and the
    capabilities."""
    from importlib import metadata

    try:
        triton_version = tuple(int(part) for part in metadata.version("triton").split(".")[:2])
        numpy_version = tuple(int(part) for part in metadata.version("numpy").split(".")[:2])
    except metadata.PackageNotFoundError as error:
        return f"package {error.name} is not installed: pip install triton 'numpy<2.4'"
    if triton_version <= (3, 6) and numpy_version >= (2, 4):
        return "triton 3.6 interprets loops wrongly with numpy 2.4 and later: pip install 'numpy<2.4'"
    return None


def prepare_interpreter() -> None:
    """Makes Triton interpret kernels in this process. Call before anything imports triton.

    An autotuner tries its first configuration only (all compute the same; there is nothing to time here), and
    a launch with a bfloat16 tensor raises `InterpreterLimit` instead of computing nonsense.

    Raises:
        RuntimeError: If triton was imported before without the interpreter.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import triton
    from triton.runtime import autotuner, interpreter

    if not isinstance(triton.language.sum, interpreter.InterpretedFunction):
        raise RuntimeError(
            "triton was imported before its interpreter was asked for: import it after prepare_interpreter"
        )
    run_all = autotuner.Autotuner.run

    def run_first(self, *args, **kwargs):
        self.configs = self.configs[:1]
        return run_all(self, *args, **kwargs)

    launch = interpreter.GridExecutor.__call__

    def checked_launch(self, *args, **kwargs):
        for value in (*args, *kwargs.values()):
            if getattr(value, "dtype", None) is torch.bfloat16:
                raise InterpreterLimit(
                    f"kernel {self.fn.__name__} is launched on a bfloat16 tensor, which Triton's interpreter "
                    "computes wrongly; judge it on a machine with an NVIDIA GPU"
                )
        return launch(self, *args, **kwargs)

    autotuner.Autotuner.run = run_first
    interpreter.GridExecutor.__call__ = checked_launch
