"""What a runner needs from the device it runs on, and the CPU's way of doing it.

The runner (`sandbox.jail.runner`) knows tasks and candidates; a `Device` knows clocks, copies and
profilers. One object lives in one runner process and is used by one thread. The calls come in this order:

    device = make_device("cuda:0", language="triton")   # touches no accelerator
    device.before_load()                                # environment and import hooks for the candidate's
    module ... the module of the candidate (or the reference) is executed, `load_inline` and all ...
    device.setup()                                      # first touch of the accelerator
    to_device / synchronize / time_block / profile / memory_info, in any order

A failed build inside the module raises `BuildError` (see `sandbox.jail.extensions`); the runner reports it as
`build_failed`. `torch` is imported inside functions: the module itself may be imported by trusted code for
its types.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from sandbox.jail.pages import settled_copy

if TYPE_CHECKING:
    from sandbox.verdict.coverage import OwnKernel


class BuildError(RuntimeError):
    """A compiler refused the candidate; the text is the compiler's."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of back-to-back calls as the runner's own clock saw it.

    Attributes:
      span_ms: device-wide time of all calls together, in milliseconds, without the cost of flushing caches.
      kept: what the call with index `keep` returned, or None.
      host_ms: median time that the host took to issue a call, where the device works on its own meanwhile; else None.
    """

    span_ms: float
    kept: Any = None
    host_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class KernelSample:
    """One kernel (all its equal launches in one call) as a profiler saw it; `ms` is device time.

    Attributes:
      kind: "kernel", or "memcpy" and "memset": device time, but nobody's kernel.
      block_threads, registers: of each launch, where the profiler knows; they tell kernels of one name apart.
    """

    name: str
    ms: float
    launches: int = 1
    kind: str = "kernel"
    block_threads: int | None = None
    registers: int | None = None


class NoPool:
    """Memory as the device's allocator takes it everywhere else (beside `sandbox.jail.arena_pool.ArenaPool`)."""

    def holds(self, tensor: Any) -> bool:
        """Whether a tensor's memory lies in the pool."""
        return False

    def renew(self) -> None:
        """Frees what earlier recordings have made in it, which must be gone."""


class Device(Protocol):
    """Operations that differ between a CPU and a GPU. See the module docstring for the order of calls."""

    name: str
    """"cpu" or "cuda:N": also what `torch.device` accepts."""
    honest_clock: bool
    """False where a measured time says nothing about the kernel (Triton's interpreter)."""

    busy_ms: float
    """Time in which the device was busy during the call that was profiled last, on any stream."""

    refused: str
    """Why the last `record` gave None."""

    def refuse(self, source: str, dtype: str) -> str | None:
        """Why this device would judge a candidate's module wrongly, or None if it can judge it."""

    def before_load(self) -> None:
        """Prepares environment variables and import hooks; must not touch the accelerator."""

    def setup(self) -> None:
        """Opens the device. Raises RuntimeError with the reason when it is not there."""

    def connect(self) -> None:
        """Opens the device before anything is loaded, without using it. Raises as `setup`."""

    def warm_up(self) -> None:
        """Does once what is slow at its first use. Raises as `setup`."""

    def to_device(self, tensor: Any) -> Any:
        """A fresh, contiguous copy of a host tensor on the device (a new allocation each time)."""

    def to_host(self, tensor: Any) -> Any:
        """A contiguous host copy of a device tensor, after all queued work."""

    def synchronize(self) -> None:
        """Waits for all streams."""

    def time_block(
        self,
        call: Callable[..., Any],
        n_calls: int,
        fresh_inputs: Callable[[int], Sequence[Any]],
        *,
        keep: int | None = None,
        flush: bool = True,
    ) -> Block:
        """Runs `call(*fresh_inputs(i))` for i in 0..n_calls-1 and returns the span of all calls.

        Args:
          call: the model, or the wrapper of a bare kernel.
          n_calls: number of calls; 0 measures the cost of an empty block.
          fresh_inputs: arguments of call i; evaluated outside the timed span.
          keep: index of a call whose outputs come back in `Block.kept`.
          flush: clear the device's caches before each call (a GPU's L2); False gives truly back-to-back
            calls, which is what the oracle needs to take the slope of its own clock.
        """

    def open_pool(self, area: Any) -> Any:
        """A pool (see `sandbox.jail.arena_pool`) from which memory can be taken: an area of the device's, or where that can't
        be done the device's usual memory."""

    def taking_from(self, pool: Any) -> contextlib.AbstractContextManager[None]:
        """Tensors that are made meanwhile lie in the pool."""

    def record(self, work: Callable[[], None], pool: Any = None) -> Callable[[], None] | None:
        """Records what `work` does on the device, for replays that the host launches at once; None where that can't be
        done, for this device or this work. What it makes lies in the pool, which takes one recording at a time."""

    def start_profiler(self) -> None:
        """Does what the first `profile` of a process would spend seconds on, without using the device."""

    def profile(self, call: Callable[..., Any], args: Sequence[Any]) -> list[KernelSample]:
        """Kernels of one call, longest first. Empty where the device has no profiler; raises when it
        fails."""

    def marked(self, call: Callable[..., Any], args: Sequence[Any]) -> None:
        """One call between the marks by which a profiler around this process knows what to look at."""

    def own_kernels(self) -> list[OwnKernel]:
        """The kernels that the candidate's own code has defined so far, as far as the device can tell."""

    def trim(self) -> None:
        """Gives memory back that is only kept in case it is needed again."""

    def memory_info(self) -> dict[str, int]:
        """`peak_bytes` used by this process on the device, and `total_bytes` of the device where known."""


@dataclass
class CpuDevice:
    """The host's processor: real time for C++, correctness only for Triton's interpreter."""

    language: str
    name: str = "cpu"
    honest_clock: bool = field(init=False)
    busy_ms: float = 0.0
    refused: str = "calls on a CPU are not recorded"

    def __post_init__(self) -> None:
        self.honest_clock = self.language != "triton"

    def refuse(self, source: str, dtype: str) -> str | None:
        if self.language != "triton":
            return None
        from sandbox.build.triton_interpreter import interpreter_problem

        return interpreter_problem(source, dtype)

    def before_load(self) -> None:
        if self.language == "triton":
            from sandbox.build.triton_interpreter import prepare_interpreter

            prepare_interpreter()

    def setup(self) -> None:
        return

    def connect(self) -> None:
        return

    def warm_up(self) -> None:
        return

    def to_device(self, tensor: Any) -> Any:
        return settled_copy(tensor)

    def to_host(self, tensor: Any) -> Any:
        return tensor.detach().contiguous()

    def synchronize(self) -> None:
        return

    def time_block(
        self,
        call: Callable[..., Any],
        n_calls: int,
        fresh_inputs: Callable[[int], Sequence[Any]],
        *,
        keep: int | None = None,
        flush: bool = True,
    ) -> Block:
        arguments = [fresh_inputs(index) for index in range(n_calls)]
        kept = None
        start_ns = time.perf_counter_ns()
        for index, args in enumerate(arguments):
            out = call(*args)
            if index == keep:
                kept = out
        span_ns = time.perf_counter_ns() - start_ns
        return Block(span_ms=span_ns / 1e6, kept=kept)

    def open_pool(self, area: Any) -> Any:
        return NoPool()

    def taking_from(self, pool: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record(self, work: Callable[[], None], pool: Any = None) -> Callable[[], None] | None:
        return None

    def start_profiler(self) -> None:
        pass

    def profile(self, call: Callable[..., Any], args: Sequence[Any]) -> list[KernelSample]:
        return []

    def marked(self, call: Callable[..., Any], args: Sequence[Any]) -> None:
        call(*args)

    def own_kernels(self) -> list[OwnKernel]:
        return []

    def trim(self) -> None:
        return

    def memory_info(self) -> dict[str, int]:
        import resource

        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "peak_bytes": peak_bytes,
            "total_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        }


def make_device(name: str, *, language: str) -> Device:
    """The device called `name`, set up for candidates of `language`.

    Args:
      name: "cpu", "cuda:N", or "aot:sm_NN": a GPU that need not be there and only compiles.
      language: of the candidate.

    Raises:
      ValueError: another name.
    """
    if name == "cpu":
        return CpuDevice(language=language)
    if name.startswith("cuda:") and name[5:].isdigit():
        from sandbox.jail.device_cuda import CudaDevice

        return CudaDevice(name=name, language=language)
    if name.startswith("aot:"):
        from sandbox.build.triton import AotDevice

        return AotDevice(language=language, arch=name[4:])
    raise ValueError(f"unknown device {name!r}: use 'cpu' or 'cuda:N'")
