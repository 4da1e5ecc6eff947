"""Executes a task's or a candidate's source in a runner, and tells exceptions as a kind and a bounded text."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
import types
from typing import Any

import torch

from sandbox.jail.device import BuildError
from sandbox.jail.kernel_call import GuardError

MAX_MESSAGE_CHARS = 4000
CUDA_ADVICE = (
    "Search for `cuda",
    "CUDA kernel errors might be asynchronously reported",
    "For debugging consider passing",
    "Compile with `TORCH_USE_CUDA_DSA`",
    "Device-side assertion tracking was not enabled",
)
TRITON_COMPILE_ERRORS = (
    "CompilationError",
    "CompileTimeAssertionFailure",
    "UnsupportedLanguageConstruct",
    "PTXASError",
)


class RunnerError(RuntimeError):
    """A failure with a kind that the oracle turns into an outcome."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def seed_torch(seed: int, device: str) -> None:
    """Seeds PyTorch's generators for work on `device`.

    On a CPU only that of the CPU: `torch.manual_seed` also keeps one seeding for each kind of GPU that may yet start, with
    the text of the stack each time, which takes milliseconds.
    """
    if device == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def execute_source(source: str, name: str, *, kind: str) -> dict[str, Any]:
    """Executes Python source as module `name` from a private file, where `inspect` and Triton find its text.

    Raises:
      RunnerError: of `kind`, with the error and its line.
      BuildError: as raised by the source.
    """
    path = os.path.join(os.getcwd(), f"{name}.py")
    with open(path, "w") as file:
        file.write(source)
    linecache.checkcache(path)
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except (BuildError, MemoryError):
        raise
    except BaseException as error:  # noqa: B036
        if _is_build_failure(error):
            raise BuildError(_build_log(error)) from error
        if is_out_of_memory(error):
            raise
        raise RunnerError(kind, _with_line(error, path)) from error
    return module.__dict__


def describe_error(error: BaseException, *, stage: str) -> dict[str, str]:
    """Kind and bounded text of an exception raised while carrying out `stage`."""
    if isinstance(error, RunnerError):
        kind, message = error.kind, str(error)
    elif isinstance(error, BuildError) or _is_build_failure(error):
        kind, message = "build_failed", str(error) if isinstance(error, BuildError) else _build_log(error)
    elif isinstance(error, GuardError):
        kind, message = "runtime_error", str(error)
    elif is_out_of_memory(error):
        kind, message = "out_of_memory", f"{type(error).__name__}: {text_of(error)}"
    else:
        kind = "load_failed" if stage.startswith("load") else "runtime_error"
        message = _with_line(error, None)
    return {"kind": kind, "message": _without_advice(_safe(message))[:MAX_MESSAGE_CHARS]}


def _without_advice(text: str) -> str:
    """Without the lines that PyTorch adds to every CUDA error, which say how to debug and not what went wrong."""
    return "\n".join(line for line in text.splitlines() if not line.startswith(CUDA_ADVICE))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that host or device memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = _safe(text_of(error)).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text or "bad_alloc" in text
    )


def _is_build_failure(error: BaseException) -> bool:
    return type(error).__module__.startswith("triton.") and type(error).__name__ in TRITON_COMPILE_ERRORS


def _build_log(error: BaseException) -> str:
    from sandbox.build.triton import error_text

    return error_text(error)


def _with_line(error: BaseException, path: str | None) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(os.getcwd())]
    where = f" (line {own[-1].lineno}: {(own[-1].line or '')[:120]})" if own else ""
    if isinstance(error, SyntaxError) and error.filename == path:
        where = f" (line {error.lineno}: {(error.text or '').strip()[:120]})"
        return f"SyntaxError: {error.msg}{where}"
    return f"{type(error).__name__}: {_safe(text_of(error))}{where}"


def text_of(error: BaseException) -> str:
    """What an exception says; whoever wrote its class may have made that fail."""
    try:
        return str(error)
    except BaseException:  # noqa: B036
        return "(an exception that cannot be told)"


def _safe(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
