"""Triton on a machine without a GPU: whether kernels compile for one.

`AotDevice` stands in for a GPU: the candidate's forward runs once on CPU tensors with every launch replaced by the compilation
that this very launch would cause on the GPU, down to ptxas. So argument types, divisibility by 16, constexprs, num_warps and all
configurations of an autotuner are those of a real launch; nothing is guessed from text. What a kernel computes after that is not
looked at. It runs candidate code and belongs in a runner; where kernels are interpreted, see `sandbox.build.triton_interpreter`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sandbox.jail.device import CpuDevice

_SHARED_LIMIT_BYTES = {
    "sm_75": 64 << 10,
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_87": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_103": 227 << 10,
    "sm_120": 99 << 10,
}
"""Shared memory that one block may use, from the CUDA programming guide's table of compute capabilities."""


@dataclass(frozen=True, kw_only=True)
class KernelBuild:
    """One compiled specialisation of one kernel.

    Attributes:
        kernel: Name of the `@triton.jit` function.
        error: Empty if it compiled, else the compiler's message.
        tuning: Compiled as one of an autotuner's configurations, of which some may fail.
        seconds: Compile time.
    """

    kernel: str
    error: str = ""
    tuning: bool = False
    num_warps: int | None = None
    shared_bytes: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What ahead-of-time compilation found.

    Attributes:
        arch: Such as `sm_90`.
        builds: In the order of the launches.
        stopped: Why forward did not run to its end, or empty.
    """

    arch: str
    builds: tuple[KernelBuild, ...]
    stopped: str = ""

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that were launched."""
        return tuple(dict.fromkeys(build.kernel for build in self.builds))

    def error(self, kernel: str) -> str:
        """Why a kernel does not compile, or empty. An autotuned kernel compiles if any of its configurations
        does."""
        builds = [build for build in self.builds if build.kernel == kernel]
        failed = [build for build in builds if build.error and not build.tuning]
        if not failed and any(not build.error for build in builds):
            return ""
        return next((build.error for build in failed or builds if build.error), "")

    @property
    def compiles(self) -> bool | None:
        """True if every launched kernel compiles, False if one does not, None if no launch was reached."""
        return all(not self.error(kernel) for kernel in self.kernels) if self.builds else None

    def summary_parts(self) -> tuple[str, str]:
        """The finding in the judge's words, and the compiler's or candidate's text behind it, if any."""
        head = f"compiles for {self.arch}:"
        if self.compiles is None:
            return f"{head} unknown, no kernel was launched", self.stopped
        if self.compiles:
            count = len(self.kernels)
            partly = ", as far as forward ran" if self.stopped else ""
            return f"{head} yes ({count} kernel{'s' if count > 1 else ''}{partly})", self.stopped
        broken = next(kernel for kernel in self.kernels if self.error(kernel))
        return f"{head} no", f"kernel {broken}: {self.error(broken)}"

    def summary(self) -> str:
        """One line or more for a person: `compiles for sm_90: yes (2 kernels)`."""
        return ": ".join(filter(None, self.summary_parts()))[:1200]

    def to_json(self) -> dict[str, Any]:
        """Plain data for a frame."""
        return {
            "arch": self.arch,
            "stopped": self.stopped,
            "builds": [asdict(build) for build in self.builds],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> CompileReport:
        """Reads what `to_json` wrote."""
        builds = tuple(KernelBuild(**build) for build in data["builds"])
        return CompileReport(arch=data["arch"], stopped=data["stopped"], builds=builds)


def capability_of(arch: str) -> int:
    """The compute capability in an architecture's name: `sm_90` and `sm_90a` give 90.

    Raises:
        ValueError: If it is not of the form sm_NN.
    """
    digits = arch.removeprefix("sm_").rstrip("af")
    if not arch.startswith("sm_") or not digits.isdigit() or not 70 <= int(digits) <= 130:
        raise ValueError(f"unknown GPU architecture {arch!r}: write it like 'sm_90'")
    return int(digits)


def error_text(error: BaseException) -> str:
    """The compiler's words and the line they are about, without the excerpt that Triton puts before them."""
    inner = error
    while not getattr(inner, "error_message", None) and inner.__cause__ is not None:
        inner = inner.__cause__
    said, node, source = (getattr(inner, name, None) for name in ("error_message", "node", "src"))
    if said and source and hasattr(node, "lineno"):
        lines = source.splitlines()
        line = lines[node.lineno - 1].strip() if node.lineno <= len(lines) else ""
        return f"{type(inner).__name__}: {said} in line {node.lineno} of {lines[0].strip()[:80]}\n{line}"
    text = str(error).strip() or repr(error)
    return text if type(error).__name__ in text else f"{type(error).__name__}: {text}"


@dataclass
class AotDevice(CpuDevice):
    """A GPU that only compiles. Tensors live on the CPU; launches compile and do not run.

    Attributes:
        arch: What to compile for, such as `sm_90`.
    """

    arch: str = "sm_90"
    _builds: list[KernelBuild] = field(default_factory=list)
    _tuning: bool = False

    def refuse(self, source: str, dtype: str) -> str | None:
        """Compiling refuses nothing: what a GPU can run may be compiled."""
        return None

    def before_load(self) -> None:
        """Puts a driver for `arch` in place of the machine's. Call before the candidate's module is
        loaded."""
        os.environ.pop("TRITON_INTERPRET", None)
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton-", dir=os.environ.get("TMPDIR"))
        import torch
        import triton.compiler as front
        from triton.backends.compiler import GPUTarget
        from triton.backends.driver import DriverBase
        from triton.compiler import compiler
        from triton.runtime.driver import driver

        outer, target = self, GPUTarget("cuda", capability_of(self.arch), 32)

        class CompileOnlyDriver(DriverBase):
            @classmethod
            def is_active(cls) -> bool:
                return True

            def map_python_to_cpp_type(self, ty: str) -> str:
                return ty

            def get_current_target(self) -> GPUTarget:
                return target

            def get_active_torch_device(self) -> torch.device:
                return torch.device("cpu")

            def get_current_device(self) -> int:
                return 0

            def set_current_device(self, device: int) -> None:
                return

            def get_current_stream(self, device: int | None = None) -> int:
                return 0

            def get_benchmarker(self) -> Callable:
                def bench(
                    kernel_call: Callable, *, quantiles: Sequence[float] = (0.5,), **_: Any
                ) -> list[float]:
                    outer._tuning = True
                    try:
                        kernel_call()
                    finally:
                        outer._tuning = False
                    return [1.0] * len(quantiles)

                return bench

        driver.set_active(CompileOnlyDriver())
        compile_for_real = getattr(compiler.compile, "replaced", compiler.compile)

        def compile_and_record(src: Any, target: Any = None, options: Any = None, **kwargs: Any) -> Any:
            return self._compile(compile_for_real, src, target=target, options=options, **kwargs)

        compile_and_record.replaced = compile_for_real
        compiler.compile = front.compile = compile_and_record

    def _compile(self, compile_for_real: Callable[..., Any], src: Any, **kwargs: Any) -> Any:
        """Compiles one specialisation, records the outcome, returns a kernel whose launch does nothing."""
        start, shared, num_warps, problem = time.monotonic(), None, None, ""
        try:
            kernel = compile_for_real(src, **kwargs)
        except Exception as error:
            if self._tuning:
                self._record(src, start, error=error_text(error))
                raise
            kernel, problem = _FailedKernel(), error_text(error)
        else:
            shared, num_warps = kernel.metadata.shared, kernel.metadata.num_warps
            limit = _SHARED_LIMIT_BYTES.get(self.arch.rstrip("af"))
            if limit is not None and shared > limit:
                problem = f"needs {shared} bytes of shared memory, a block on {self.arch} may use {limit}"
            kernel.module, kernel.function, kernel._run = 0, 0, lambda *args, **kwargs: None
        self._record(src, start, error=problem, num_warps=num_warps, shared_bytes=shared)
        return kernel

    def _record(self, src: Any, start: float, **facts: Any) -> None:
        name = getattr(getattr(src, "fn", None), "__name__", "kernel")
        seconds = time.monotonic() - start
        self._builds.append(KernelBuild(kernel=name, tuning=self._tuning, seconds=seconds, **facts))

    def compile_report(self, call: Callable[..., Any], args: Sequence[Any]) -> CompileReport:
        """Runs `call(*args)` once, compiling instead of launching.

        Args:
            call: The candidate's model.
            args: Inputs on the CPU, with the shapes and types of the task.

        Returns:
            The report; an exception of the call ends up in `stopped`, not here.
        """
        stopped = ""
        try:
            call(*args)
        except Exception as error:
            stopped = error_text(error)
        return CompileReport(arch=self.arch, builds=tuple(self._builds), stopped=stopped)


class _FailedKernel:
    """Stands in for a kernel that did not compile, so that forward goes on to the kernels after it."""

    function = packed_metadata = None
    n_regs = n_spills = 0

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any, **kwargs: Any) -> None:
        return None


def aot_compile(
    source: str,
    arch: str = "sm_90",
    *,
    entry_point: str = "ModelNew",
    init: Sequence[Any] = (),
    args: Sequence[Any] = (),
) -> CompileReport:
    """Compiles every kernel that a candidate's forward would launch, for a GPU that need not be there.

    Executes the source in this process: for runners and tests only. Triton must not have been imported as
    interpreter.

    Args:
        source: The candidate's module.
        arch: Such as `sm_90`.
        entry_point: Name of its model class.
        init: Arguments of the constructor.
        args: Inputs of forward, on the CPU.

    Raises:
        ValueError: If `arch` is not a known form.
        Exception: Whatever the module or the constructor raises.
    """
    import importlib.util
    import linecache

    device = AotDevice(language="triton", arch=arch)
    capability_of(arch)
    device.before_load()
    with tempfile.TemporaryDirectory(prefix="aot-") as directory:
        path = os.path.join(directory, "candidate.py")
        with open(path, "w") as file:
            file.write(source)
        linecache.checkcache(path)
        spec = importlib.util.spec_from_file_location("candidate_aot", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return device.compile_report(getattr(module, entry_point)(*init), args)
