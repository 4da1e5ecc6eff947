"""An NVIDIA GPU as a runner's device: clocks, copies, the profiler, the candidate's own kernels.

Nothing here touches CUDA before `connect` or `setup`, so a runner forked from a zygote has its context to itself.

Stream. Everything runs on the thread's own default stream, PyTorch's work because that is made its current stream,
kernels that extensions launch without a word about streams because they are compiled so (`sandbox.build.cuda`). Unlike
the legacy default stream it can be captured, and the legacy stream still waits for it and it for the legacy stream.

Clock of a block. Each call is bracketed by two events on that stream. Before it, lines of the L2 cache that
were set to persist are made ordinary ones, twice as much memory as the cache holds is read, which evicts what the last
call left and leaves nothing that would have to be written back before the next one's lines fit in, and a pause
as long as the host needs to launch a call lets the host run ahead, so that what lies between the events is the
device's work and not Python's. Two things escape these events: work on other streams, and work of the host that the
pause hides. The oracle's clock is there for them: with `flush=False` the calls run back to back without a pause, and
the span is the larger of the events around all of them and the host's clock from one full synchronisation to the next.

Numerics. Checks run with TF32 off, on both sides; timing and profiling run with PyTorch's defaults, on both
sides.

Memory. PyTorch's allocator is held to the stated share of the card; what an extension allocates by itself is
seen only from outside (`sandbox.jail.nvml.process_bytes`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.jail import nvml
from sandbox.jail.cuda_trace import busy_ms, trace_events
from sandbox.jail.device import Block, KernelSample
from sandbox.jail.recording import CaptureFailed, record
from sandbox.verdict.coverage import DeviceEvent, OwnKernel

MEMORY_SHARE = 0.4
"""Share of the card that one runner may take, unless SANDBOX_GPU_MEMORY_SHARE says otherwise."""

SHARE_VARIABLE = "SANDBOX_GPU_MEMORY_SHARE"
SEED_VARIABLE = "SANDBOX_TRITON_SEED"
"""Names a directory with what Triton would otherwise build in every process (see `preload_cuda`)."""
CLOCKS_AGREE = 1.02
"""Up to this ratio the two clocks of a block say the same."""
MAX_PAUSE_MS = 1.0
"""A call whose launches take the host longer than this is bound by the host, and its time says so."""
PAUSE_MARGIN = 1.3
HOST_SAMPLE_CALLS = 16
CYCLES_PER_MS = 2e6
"""Of a GPU at 2 GHz; where the clock is lower the pause is longer, which does no harm."""
_MIN_FLUSH_BYTES = 64 << 20
_PER_THREAD_STREAM = 2
"""CUDA's handle of the calling thread's default stream (`cudaStreamPerThread`)."""
_NOT_SUPPORTED = 801
"""The driver's answer where a GPU (or a part of one) has no lines that persist."""


@dataclass(frozen=True, kw_only=True)
class CudaBlock(Block):
    """A block with both clocks. `bound_by` names the one that rules the span: "device" (events) or "host".

    With flushed calls `wall_ms` also holds flushes and pauses, and the events rule.
    """

    event_ms: float
    wall_ms: float
    bound_by: str


def memory_share() -> float:
    """Share of the card that one runner may take (0 to 1)."""
    return float(os.environ.get(SHARE_VARIABLE) or MEMORY_SHARE)


def physical_index(name: str) -> int:
    """The driver's number of the GPU that CUDA calls `name` ("cuda:N") in this environment.

    Raises:
        RuntimeError: If CUDA_VISIBLE_DEVICES does not hold such a GPU, or names it by UUID.
    """
    ordinal = int(name.partition(":")[2])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return ordinal
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if ordinal >= len(entries) or not entries[ordinal].isdigit():
        raise RuntimeError(
            f"{name} is not among CUDA_VISIBLE_DEVICES={visible!r}; name GPUs there by their numbers"
        )
    return int(entries[ordinal])


def _event_pair() -> tuple[Any, Any]:
    import torch

    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _device_profiler() -> Any:
    """A profiler of device work alone.

    Not `torch.profiler.profile`: that asks `hasattr(torch, "_inductor")`, which imports all of Inductor, 5 s in every process.
    """
    from torch.autograd import profiler

    return profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True)


@dataclass
class CudaDevice:
    """One GPU, for one runner. See `sandbox.jail.device.Device` for the order of calls."""

    name: str
    language: str
    honest_clock: bool = True
    _triton: list[OwnKernel] = field(default_factory=list)
    _driver: Any = None
    _flush: Any = None
    _flushed: Any = None
    busy_ms: float = 0.0
    refused: str = ""
    _pause_ms: float = MAX_PAUSE_MS / 4
    _cycles_per_ms: float = CYCLES_PER_MS
    _defaults: tuple[bool, bool] = (False, True)
    _watching: bool = False

    def refuse(self, source: str, dtype: str) -> str | None:
        """A GPU judges everything."""
        return None

    def before_load(self) -> None:
        """Gives Triton's compiler private directories and, for its kernels, a watch. Does not touch CUDA, which may be open already (`connect`).

        Raises:
            RuntimeError: The driver is missing, or the GPU is not visible.
        """
        private = Path(os.environ.get("TMPDIR") or os.getcwd())
        os.environ.pop("TRITON_INTERPRET", None)
        for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"):
            directory = private / variable.lower()
            seed = os.environ.get(SEED_VARIABLE) if variable == "TRITON_CACHE_DIR" else None
            if seed and not directory.exists():
                shutil.copytree(seed, directory)
            directory.mkdir(exist_ok=True)
            os.environ[variable] = str(directory)
        nvml.gpu(physical_index(self.name))
        if self.language == "triton":
            self._watch_triton(private)

    def setup(self) -> None:
        """Opens the device if it is not open, and takes what the loaded code says of TF32 as what timing runs with.

        Raises:
            RuntimeError: The GPU cannot be opened; the text says why.
        """
        import torch

        self.open()
        self._take_stream()  # the loaded code may have taken another
        if "triton" in sys.modules:
            self._watch_triton(Path(os.environ.get("TMPDIR") or os.getcwd()))
        self._defaults = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
        self._set_tf32(False, False)

    def connect(self) -> None:
        """Opens the CUDA context, once: most of a new process's work, and none of the device's (scripts/bench/context_noise.py).

        Raises:
            RuntimeError: The GPU cannot be opened; the text says why.
        """
        import torch

        if self._driver is not None:
            return
        if not torch.cuda.is_available():
            raise RuntimeError(f"{self.name}: PyTorch sees no GPU (driver missing, or a CPU build of torch)")
        self._take_stream()
        self._driver = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # Triton's launchers look for it there
        self.synchronize()

    def _take_stream(self) -> None:
        import torch

        torch.cuda.set_device(torch.device(self.name))
        torch.cuda.set_stream(torch.cuda.ExternalStream(_PER_THREAD_STREAM, device=torch.device(self.name)))
        torch.cuda.set_per_process_memory_fraction(memory_share())

    def open(self) -> None:
        """Connects, and makes what clears the caches, once. Raises as `connect`."""
        import torch

        self.connect()
        if self._flush is not None:
            return
        properties = torch.cuda.get_device_properties(torch.device(self.name))
        size_bytes = max(2 * properties.L2_cache_size, _MIN_FLUSH_BYTES)
        self._cycles_per_ms = (
            float(properties.clock_rate) if hasattr(properties, "clock_rate") else CYCLES_PER_MS
        )
        self._flushed = torch.empty((), dtype=torch.float32, device=self.name)
        self._flush = torch.zeros(size_bytes // 4, dtype=torch.float32, device=self.name)

    def warm_up(self) -> None:
        """Does once what every evaluation does, before there is anything to load: code of the driver's, of PyTorch's and of
        Triton's is loaded at its first use. Raises as `connect`."""
        import torch

        self.open()
        one = torch.arange(8, dtype=torch.float32, device=self.name)
        torch.equal(one, one.clone())
        torch.equal(one.view(torch.int64), one.clone().view(torch.int64))
        float((torch.nan_to_num(one.to(torch.float64)) - one.to(torch.float64)).abs().max())
        self._clear_caches()
        torch.cuda._sleep(1)
        for event in _event_pair():
            event.record()
        if "triton" in sys.modules:
            from triton.runtime import driver

            driver.active.get_current_device()
        self.synchronize()

    def to_device(self, tensor: Any) -> Any:
        """A contiguous copy of a host tensor in memory of its own."""
        import torch

        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.name)
        return copy.copy_(tensor)

    def to_host(self, tensor: Any) -> Any:
        """A contiguous host copy, after all streams have finished."""
        self.synchronize()
        return tensor.detach().contiguous().cpu()

    def synchronize(self) -> None:
        """Waits for every stream of the device; an earlier illegal access surfaces here."""
        import torch

        torch.cuda.synchronize(self.name)

    def time_block(
        self,
        call: Callable[..., Any],
        n_calls: int,
        fresh_inputs: Callable[[int], Sequence[Any]],
        *,
        keep: int | None = None,
        flush: bool = True,
    ) -> CudaBlock:
        """Times `n_calls` calls; see the module's docstring for the clocks, the flush and the pause."""
        arguments = [fresh_inputs(index) for index in range(n_calls)]
        with self._default_precision():
            if flush:
                return self._cold_calls(call, arguments, keep)
            return self._back_to_back(call, arguments, keep)

    def open_pool(self, area: Any) -> Any:
        """An `ArenaPool` in the area."""
        from sandbox.jail.arena_pool import ArenaPool

        return ArenaPool(area)

    def taking_from(self, pool: Any) -> contextlib.AbstractContextManager[None]:
        """Tensors that are made meanwhile lie in the pool."""
        import torch

        return torch.cuda.use_mem_pool(pool.pool)

    def record(self, work: Callable[[], None], pool: Any = None) -> Callable[[], None] | None:
        """A CUDA graph of the work, which must have been done once before; None where it may not be captured (it waits
        for the device, or uses a stream of its own that it does not join); then `refused` says why. What it makes lies
        in the pool, in which earlier recordings must be gone."""
        import torch

        self.refused = ""
        self.synchronize()
        if pool:
            pool.renew()
        try:
            return record(work, pool.pool.id if pool else torch.cuda.graph_pool_handle(), torch.device(self.name))
        except CaptureFailed as error:
            self.refused = str(error)
            self.synchronize()
            return None

    def start_profiler(self) -> None:
        """Loads CUPTI and attaches it to this process."""
        with _device_profiler():
            pass

    def profile(self, call: Callable[..., Any], args: Sequence[Any]) -> list[KernelSample]:
        """Device work of one call by CUPTI, one sample for each kind of launch, longest first; may be empty.

        The caches are cleared before, as for timed calls. Later launches of this process are slower: profile after
        timing.
        """
        with self._default_precision():
            call(*args)
            self._clear_caches()
            self.synchronize()
            with _device_profiler() as session:
                call(*args)
                self.synchronize()
        path = Path(os.environ.get("TMPDIR") or os.getcwd()) / "profile.json"
        session.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
        path.unlink()
        events, self.busy_ms = trace_events(trace), busy_ms(trace)
        groups: dict[DeviceEvent, list[float]] = {}
        for event in events:
            key = DeviceEvent(
                name=event.name,
                ms=0.0,
                kind=event.kind,
                block_threads=event.block_threads,
                registers=event.registers,
            )
            groups.setdefault(key, []).append(event.ms)
        samples = [
            KernelSample(
                name=key.name,
                ms=sum(ms),
                launches=len(ms),
                kind=key.kind,
                block_threads=key.block_threads,
                registers=key.registers,
            )
            for key, ms in groups.items()
        ]
        return sorted(samples, key=lambda sample: sample.ms, reverse=True)

    def marked(self, call: Callable[..., Any], args: Sequence[Any]) -> None:
        """One call between `cudaProfilerStart` and `cudaProfilerStop`, with the precision of timed calls, after one that compiles and tunes."""
        import torch

        with self._default_precision():
            call(*args)
            self.synchronize()
            torch.cuda.profiler.start()
            try:
                call(*args)
                self.synchronize()
            finally:
                torch.cuda.profiler.stop()

    def own_kernels(self) -> list[OwnKernel]:
        """What Triton compiled from the candidate's file. Kernels of extensions are known to the oracle, which built
        them."""
        return list(dict.fromkeys(self._triton))

    def trim(self) -> None:
        """Empties PyTorch's allocator: other processes need the card's memory."""
        import torch

        torch.cuda.empty_cache()

    def memory_info(self) -> dict[str, int]:
        """Peak of PyTorch's allocator and the card's total, in bytes."""
        import torch

        return {
            "peak_bytes": torch.cuda.max_memory_reserved(self.name),
            "total_bytes": torch.cuda.get_device_properties(self.name).total_memory,
        }

    def _watch_triton(self, private: Path) -> None:
        """Records each kernel that Triton loads from a function defined in the job's own files."""
        if self._watching:
            return
        self._watching = True
        from triton.compiler import compiler

        generated = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "\0")
        load = compiler.CompiledKernel._init_handles

        def load_and_record(kernel: Any) -> None:
            fresh = kernel.module is None
            load(kernel)
            if not fresh:  # asked at every launch
                return
            function = getattr(getattr(kernel.src, "fn", None), "fn", None)
            path = os.path.realpath(function.__code__.co_filename) if function is not None else ""
            ours = path.startswith(os.path.realpath(private) + os.sep) and not path.startswith(
                os.path.realpath(generated)
            )
            if ours:
                self._triton.append(
                    OwnKernel(
                        name=kernel.name,
                        origin="triton",
                        block_threads=kernel.metadata.num_warps * kernel.metadata.target.warp_size,
                        registers=kernel.n_regs,
                    )
                )

        compiler.CompiledKernel._init_handles = load_and_record

    def _cold_calls(
        self, call: Callable[..., Any], arguments: Sequence[Sequence[Any]], keep: int | None
    ) -> CudaBlock:
        import torch

        kept, cycles = None, int(self._pause_ms * self._cycles_per_ms)
        host_ns: list[int] = []
        pairs = [_event_pair() for _ in arguments]
        stream = torch.cuda.current_stream(self.name)
        self.synchronize()
        start_ns = ahead_ns = time.perf_counter_ns()
        for index, (args, pair) in enumerate(zip(arguments, pairs, strict=True)):
            self._clear_caches()
            if cycles:
                torch.cuda._sleep(cycles)
            pair[0].record(stream)
            issued_ns = time.perf_counter_ns()
            out = call(*args)
            host_ns.append(time.perf_counter_ns() - issued_ns)
            pair[1].record(stream)
            if index == keep:
                kept = out
            if index < HOST_SAMPLE_CALLS:
                ahead_ns = time.perf_counter_ns()
        self.synchronize()
        wall_ms = (time.perf_counter_ns() - start_ns) / 1e6
        if arguments:
            # Only the first calls: later ones may wait for room in the driver's queue, which is not the
            # host's work.
            host_ms = (ahead_ns - start_ns) / 1e6 / min(len(arguments), HOST_SAMPLE_CALLS)
            self._pause_ms = min(PAUSE_MARGIN * host_ms, MAX_PAUSE_MS)
        event_ms = sum(first.elapsed_time(last) for first, last in pairs)
        host_ms = statistics.median(host_ns) / 1e6 if host_ns else None
        return CudaBlock(span_ms=event_ms, kept=kept, host_ms=host_ms, event_ms=event_ms, wall_ms=wall_ms, bound_by="device")

    def _clear_caches(self) -> None:
        """Lines of the L2 cache that persist become ordinary ones, and all are replaced."""
        import torch

        code = self._driver.cuCtxResetPersistingL2Cache()
        if code not in (0, _NOT_SUPPORTED):
            raise RuntimeError(f"persisting lines of the L2 cache can't be reset: the driver answers {code}")
        torch.sum(self._flush, dim=0, out=self._flushed)

    def _back_to_back(
        self, call: Callable[..., Any], arguments: Sequence[Sequence[Any]], keep: int | None
    ) -> CudaBlock:
        import torch

        kept, (first, last) = None, _event_pair()
        stream = torch.cuda.current_stream(self.name)
        self.synchronize()
        start_ns = time.perf_counter_ns()
        first.record(stream)
        for index, args in enumerate(arguments):
            out = call(*args)
            if index == keep:
                kept = out
        last.record(stream)
        self.synchronize()
        wall_ms = (time.perf_counter_ns() - start_ns) / 1e6
        event_ms = first.elapsed_time(last)
        bound_by = "host" if wall_ms > CLOCKS_AGREE * event_ms else "device"
        return CudaBlock(
            span_ms=max(event_ms, wall_ms), kept=kept, event_ms=event_ms, wall_ms=wall_ms, bound_by=bound_by
        )

    @staticmethod
    def _set_tf32(matmul: bool, cudnn: bool) -> None:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.backends.cudnn.allow_tf32 = cudnn

    @contextlib.contextmanager
    def _default_precision(self) -> Iterator[None]:
        self._set_tf32(*self._defaults)
        try:
            yield
        finally:
            self._set_tf32(False, False)
