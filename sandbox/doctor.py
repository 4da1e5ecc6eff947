"""What this machine offers for judging kernels, and what it lacks. Changes nothing; imports neither torch
nor triton."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from sandbox.build import BuildUnavailable
from sandbox.build.cpp import find_compiler

SYS_LANDLOCK_CREATE_RULESET = 444
PR_GET_SECCOMP = 21


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """The level in force, what it consists of, and what a stricter one would add."""

    name: str
    features: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report. `ok` None: neither good nor bad. `advice` says what to do when it is not."""

    name: str
    ok: bool | None
    detail: str
    advice: str = ""


def isolation() -> Isolation:
    """The isolation that runners of this version get."""
    features = [
        "process of its own",
        "private directory",
        "rlimits",
        "no_new_privs",
        "death with parent",
        "kill of the whole process tree",
        "memory watch",
        "deadlines",
        "sealed artifacts",
    ]
    if os.getuid() != 0:
        features.append("RLIMIT_NPROC")
    missing = ["user of its own", "network, mount and pid namespaces", "seccomp filter", "Landlock rules"]
    return Isolation(name="basic", features=tuple(features), missing=tuple(missing))


def examine() -> list[Finding]:
    """Everything that `doctor` reports."""
    return list(_examine())


def report() -> str:
    """The report as text."""
    level = isolation()
    signs = {True: "ok     ", False: "MISSING", None: "-      "}
    lines = []
    for finding in examine():
        lines.append(f"{signs[finding.ok]}  {finding.name:<22} {finding.detail}")
        if finding.advice:
            lines.append(f"{'':<33}{finding.advice}")
    lines += [
        "",
        f"isolation level: {level.name}",
        f"  in force: {', '.join(level.features)}",
        f"  lacking:  {', '.join(level.missing)}",
    ]
    return "\n".join(lines)


def _examine() -> Iterator[Finding]:
    yield Finding(
        name="system",
        ok=sys.platform == "linux",
        detail=f"{platform.system()} {platform.release()}",
        advice="" if sys.platform == "linux" else "the sandbox needs Linux",
    )
    yield Finding(name="python", ok=sys.version_info >= (3, 11), detail=platform.python_version())
    yield Finding(name="cores", ok=None, detail=str(len(os.sched_getaffinity(0))))
    for package, why in (("torch", "references"), ("triton", "triton candidates"), ("fastapi", "the server")):
        yield _package(package, why)
    yield _compiler()
    ninja = shutil.which("ninja")
    yield Finding(
        name="ninja",
        ok=None,
        detail=ninja or "absent: modules with load_inline cannot be built",
        advice="" if ninja else "pip install ninja, or apt-get install ninja-build",
    )
    yield from _gpus()
    yield _disk()
    yield from _kernel_features()


def _package(name: str, why: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(
            name=name, ok=False, detail=f"not installed; needed for {why}", advice=f"pip install {name}"
        )
    return Finding(name=name, ok=True, detail=importlib.metadata.version(name))


def _compiler() -> Finding:
    try:
        return Finding(name="C++ compiler", ok=True, detail=find_compiler().version)
    except BuildUnavailable as error:
        return Finding(
            name="C++ compiler", ok=False, detail="cpp candidates cannot be judged", advice=str(error)
        )


def _gpus() -> Iterator[Finding]:
    if not os.path.exists("/dev/nvidiactl"):
        yield Finding(
            name="NVIDIA GPU", ok=None, detail="none: triton runs in its interpreter, cuda not at all"
        )
        return
    from sandbox.jail.nvml import NvmlError, gpus

    try:
        for number, gpu in enumerate(gpus()):
            yield Finding(name=f"cuda:{number}", ok=True, detail=str(gpu))
    except (NvmlError, OSError) as error:
        yield Finding(
            name="NVIDIA GPU",
            ok=False,
            detail=f"the driver does not answer: {error}",
            advice="check that nvidia-smi works for this user",
        )
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    yield Finding(name="nvcc", ok=None, detail=nvcc or "absent: cuda candidates cannot be built")


def _disk() -> Finding:
    import tempfile

    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    enough = free_bytes > 1 << 30
    return Finding(
        name="temporary space",
        ok=enough,
        detail=f"{free_bytes / (1 << 30):.1f} GiB in {tempfile.gettempdir()}",
        advice="" if enough else "set TMPDIR to a larger disk",
    )


def _kernel_features() -> Iterator[Finding]:
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(SYS_LANDLOCK_CREATE_RULESET, None, 0, 1)
    yield Finding(name="Landlock", ok=None, detail=f"ABI {abi}" if abi > 0 else "not offered by this kernel")
    seccomp = libc.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) >= 0
    yield Finding(name="seccomp", ok=None, detail="offered" if seccomp else "not offered by this kernel")
    yield Finding(
        name="user namespaces", ok=None, detail="can be made" if _can_unshare() else "cannot be made"
    )
    yield Finding(name="cgroup", ok=None, detail=_cgroup())
    bubblewrap = shutil.which("bwrap")
    yield Finding(name="bubblewrap", ok=None, detail=bubblewrap or "absent (not needed)")
    user = "root" if os.getuid() == 0 else f"uid {os.getuid()}"
    yield Finding(name="user", ok=None, detail=user)


@functools.cache
def _can_unshare() -> bool:
    """Tries in a child of its own, so that nothing here changes."""
    import subprocess

    code = (
        "import os,sys; sys.exit(os.unshare(os.CLONE_NEWUSER))"
        if hasattr(os, "unshare")
        else ("import ctypes,sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000) != 0)")
    )
    return subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, timeout=20).returncode == 0


def _cgroup() -> str:
    root = "/sys/fs/cgroup"
    if os.path.exists(f"{root}/cgroup.controllers"):
        return "version 2, writable" if os.access(root, os.W_OK) else "version 2, read-only"
    if os.path.isdir(f"{root}/memory"):
        return "version 1, writable" if os.access(f"{root}/memory", os.W_OK) else "version 1, read-only"
    return "none"
