"""The machine and the versions that a report was made with. Starts no accelerator."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "tokenizers",
    "torch",
    "triton",
    "pydantic",
)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, "not installed" where they are not."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def host() -> dict[str, str]:
    """Processor, cores that this process may use, memory, system, C++ compiler, and GPUs."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or "unknown",
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": _memory(),
        "compiler": _first_line("c++", "--version") or "none",
        "gpu": _first_line("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
        or "none",
    }


def _memory() -> str:
    kib = _field(Path("/proc/meminfo"), "MemTotal").split(" ")[0]
    return f"{int(kib) / 2**20:.1f} GiB" if kib.isdigit() else "unknown"


def _field(path: Path, name: str) -> str:
    """The first `name: value` of a /proc file, or ""."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _first_line(program: str, *arguments: str) -> str:
    """The first line that a program prints, or "" where there is no such program or it fails."""
    if shutil.which(program) is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else ""
