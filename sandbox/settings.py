"""What a server is started with, and what this machine lets it offer. Imports neither torch nor triton."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sandbox.build import BuildUnavailable
from sandbox.build.cpp import COMPILE_FLAGS, LINK_FLAGS, find_compiler
from sandbox.build.signature import RULE
from sandbox.build.toolchain import find_cuda, find_toolchain
from sandbox.build.triton_interpreter import interpreter_missing
from sandbox.jail.plan import Level
from sandbox.jail.probe import IsolationError, choose
from sandbox.logs import LogFormat
from sandbox.profile.ncu import counters_problem
from sandbox.protocol import (
    MAX_CANDIDATES,
    MAX_SOURCE_BYTES,
    Capabilities,
    CounterSupport,
    LanguageSupport,
)

DEFAULT_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dk_sandbox"
MAX_QUEUE = 4096
EXAMPLE = {
    "forward": "def forward(self, x, bias): return x + bias",
    "signature": 'extern "C" void kernel(const float* x, const float* bias, float* out)',
    "source": 'extern "C" void kernel(const float* x, const float* bias, float* out) {\n'
    "    for (long i = 0; i < out_n; ++i) out[i] = x[i] + bias[i % bias_n];\n}\n",
}


class SettingsError(ValueError):
    """A setting that cannot be served; the text says what to change."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one server.

    Attributes:
      devices: "cpu" and "cuda:N" that it judges on.
      workers: oracle processes, each with one evaluation at a time.
      threads: OpenMP threads of candidate and reference alike.
      cores: builds and other ordinary work that may run beside each other.
      cache: directory of built artifacts; it outlives the server.
      max_queue: evaluations that may wait.
      isolation: level at which untrusted code runs (see `sandbox.jail.confine`).
      drain_s: so long it finishes what it has when told to end.
      log_level, log_format: of its oracles' logs, as of its own.
    """

    devices: tuple[str, ...]
    workers: int
    threads: int
    cores: int
    isolation: Level
    cache: Path = DEFAULT_CACHE
    max_queue: int = MAX_QUEUE
    drain_s: float = 0.0
    log_level: str = "WARNING"
    log_format: LogFormat = "text"

    @property
    def device_share(self) -> float:
        """Part of a GPU's memory that is one worker's: any of them may judge on any GPU."""
        return 1.0 / self.workers


def make_settings(
    *,
    device: str = "auto",
    workers: int | None = None,
    threads: int | None = None,
    cache: str | None = None,
    max_queue: int = MAX_QUEUE,
    isolation: str | None = None,
    drain_s: float = 0.0,
    log_level: str = "WARNING",
    log_format: LogFormat = "text",
) -> Settings:
    """Settings with this machine's values for what is left out.

    Raises:
      SettingsError: a device that is not there, a number below 1, an isolation level that cannot be had, a negative `drain_s`.
    """
    if not 0 <= drain_s < float("inf"):
        raise SettingsError(f"--drain-s {drain_s:g}: must be a number of seconds, 0 to end at once")
    cores = len(os.sched_getaffinity(0))
    for name, value in (("workers", workers), ("threads", threads), ("max-queue", max_queue)):
        if value is not None and value < 1:
            raise SettingsError(f"--{name} {value}: must be at least 1")
    devices = find_devices(device)
    try:
        level = choose(isolation)
    except IsolationError as error:
        raise SettingsError(str(error)) from error
    return Settings(
        devices=devices,
        isolation=level,
        workers=workers or max(2, min(cores, 4 if devices == ("cpu",) else 12 * (len(devices) - 1))),
        threads=threads or min(cores, 16),
        cores=cores,
        cache=Path(cache).absolute() if cache else DEFAULT_CACHE,  # the compiler runs elsewhere
        max_queue=max_queue,
        drain_s=drain_s,
        log_level=log_level,
        log_format=log_format,
    )


def find_devices(name: str) -> tuple[str, ...]:
    """Devices that `name` stands for: "cpu", "cuda:N" (and the CPU beside it), or "auto" for all there are.

    Raises:
      SettingsError: no such GPU.
    """
    if name == "cpu":
        return ("cpu",)
    present = tuple(f"cuda:{number}" for number in range(count_gpus()))
    if name == "auto":
        return (*present, "cpu")
    if not (name.startswith("cuda:") and name[5:].isdigit()):
        raise SettingsError(f"--device {name}: use cpu, cuda:N or auto")
    if name not in present:
        found = ", ".join(present) or "no NVIDIA GPU"
        raise SettingsError(f"--device {name}: this machine has {found}; use --device cpu or one of these")
    return (name, "cpu")


def count_gpus() -> int:
    """Number of NVIDIA GPUs that the driver shows; 0 without a driver."""
    if not os.path.exists("/dev/nvidiactl"):
        return 0
    from sandbox.jail.nvml import NvmlError, gpus

    try:
        return len(gpus())
    except (NvmlError, OSError):
        return 0


def capabilities(settings: Settings) -> Capabilities:
    """What this server can judge, and why not where it cannot."""
    gpus = [device for device in settings.devices if device != "cpu"]
    return Capabilities(
        languages={"cpp": _cpp(settings), "triton": _triton(settings), "cuda": _cuda(gpus)},
        devices=list(settings.devices),
        counters=_counters(settings, gpus),
        limits={
            "max_source_bytes": MAX_SOURCE_BYTES,
            "max_candidates": MAX_CANDIDATES,
            "max_queue": settings.max_queue,
            "workers": settings.workers,
            "threads": settings.threads,
        },
        kernel_form={
            "cpp": {
                "rule": RULE,
                "flags": list(COMPILE_FLAGS),
                "link_flags": list(LINK_FLAGS),
                "example": EXAMPLE,
                "prelude": "constexpr long NAME_n, NAME_d0, ... for tensors; constexpr values for the rest",
            }
        },
    )


def _cpp(settings: Settings) -> LanguageSupport:
    problem = ""
    try:
        find_compiler()
    except BuildUnavailable as error:
        problem = str(error)
    return LanguageSupport(
        available=not problem, forms=["kernel", "module"], devices=["cpu"], timing=True, problem=problem
    )


def _triton(settings: Settings) -> LanguageSupport:
    on_gpu = any(device != "cpu" for device in settings.devices)
    if importlib.util.find_spec("triton") is None:
        problem = "triton is not installed: pip install triton"
    else:
        problem = "" if on_gpu else interpreter_missing() or ""
    return LanguageSupport(
        available=not problem, forms=["module"], devices=list(settings.devices), timing=on_gpu, problem=problem
    )


def _cuda(gpus: list[str]) -> LanguageSupport:
    problem = "" if gpus else "no NVIDIA GPU is served here; start the sandbox with --device cuda:0"
    try:
        if gpus:
            find_toolchain()
            find_cuda()
    except BuildUnavailable as error:
        problem = str(error)
    return LanguageSupport(available=not problem, forms=["module"], devices=gpus, timing=True, problem=problem)


def _counters(settings: Settings, gpus: list[str]) -> CounterSupport:
    problem = counters_problem(settings.isolation) if gpus else "no NVIDIA GPU is served here; hardware counters are a GPU's"
    return CounterSupport(available=not problem, problem=problem)


def make_scratch() -> Path:
    """A private directory for this server's processes; those that dead servers left behind are deleted."""
    import shutil

    base = Path(tempfile.gettempdir())
    for old in base.glob("dk_sandbox-*-*"):
        pid = old.name.split("-")[1]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}") and old.stat().st_uid == os.getuid():
            shutil.rmtree(old, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"dk_sandbox-{os.getpid()}-"))
    # Jails may pass through, to directories of their own whose names they know; they may not list it.
    scratch.chmod(0o711)
    return scratch
