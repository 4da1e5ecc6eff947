"""What this machine offers for judging kernels, and what it lacks. Changes nothing; imports neither torch
nor triton."""

from __future__ import annotations

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
from sandbox.build.toolchain import find_toolchain
from sandbox.jail import landlock, seccomp
from sandbox.jail.cgroup import Cgroups, NoCgroups
from sandbox.jail.plan import LEVELS
from sandbox.jail.probe import IsolationError, isolation, offered
from sandbox.profile.ncu import counters_problem, find_ncu


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report. `ok` None: neither good nor bad. `advice` says what to do when it is not."""

    name: str
    ok: bool | None
    detail: str
    advice: str = ""


def examine() -> list[Finding]:
    """Everything that `doctor` reports."""
    return list(_examine())


def report() -> str:
    """The report as text."""
    signs = {True: "ok     ", False: "MISSING", None: "-      "}
    lines = []
    for finding in examine():
        lines.append(f"{signs[finding.ok]}  {finding.name:<22} {finding.detail}")
        if finding.advice:
            lines.append(f"{'':<33}{finding.advice}")
    return "\n".join([*lines, "", *_isolation()])


def _isolation() -> Iterator[str]:
    try:
        offer = offered()
    except IsolationError as error:
        yield f"isolation level: unknown ({error})"
        return
    for name in LEVELS:
        problem = offer.problems[name]
        yield f"isolation {name:<9} {f'cannot be had: {problem}' if problem else 'can be had'}"
    try:
        level = isolation()
    except IsolationError as error:
        yield f"isolation level: a server does not start by itself: {error}"
        level = isolation("none")
    else:
        yield f"isolation level: {level.name} (the default here)"
    yield f"  in force: {', '.join(level.features)}"
    yield f"  lacking:  {', '.join(level.missing) or 'nothing'}"


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
    yield _extensions()
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


def _extensions() -> Finding:
    """What `load_inline` takes: the headers of PyTorch and Python."""
    try:
        fast = find_toolchain().fast_binding
    except BuildUnavailable as error:
        return Finding(name="extensions", ok=False, detail="load_inline cannot be served", advice=str(error))
    detail = "load_inline by the fast road" if fast else "load_inline by the plain road only: the fast one does not know this PyTorch"
    return Finding(name="extensions", ok=True if fast else None, detail=detail)


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
    yield _counters()


def _counters() -> Finding:
    """Whether profile="ncu" can be had at the level that a server takes by itself."""
    try:
        level = isolation().name
    except IsolationError:
        level = "none"
    problem = counters_problem(level)
    if not problem:
        return Finding(name="hardware counters", ok=True, detail=f"{find_ncu()}, at level {level} (whether they are permitted, the first use shows)")
    return Finding(name="hardware counters", ok=None, detail=f'not to be had at level {level}: profile="ncu" is refused', advice=problem)


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
    abi = landlock.abi()
    yield Finding(name="Landlock", ok=None, detail=f"ABI {abi}" if abi else "not offered by this kernel")
    filters = "offered" if seccomp.supported() else "not offered by this kernel, or for this processor"
    yield Finding(name="seccomp", ok=None, detail=filters)
    try:
        reason = offered().problems["strict"]
    except IsolationError as error:
        reason = str(error)
    detail = f"cannot be used: {reason}" if reason else "can be made"
    yield Finding(name="user namespaces", ok=None, detail=detail)
    try:
        detail = f"version {Cgroups.find().version}, writable"
    except NoCgroups as error:
        detail = f"no: {error}"
    yield Finding(name="control groups", ok=None, detail=detail)
    user = "root" if os.getuid() == 0 else f"uid {os.getuid()} (root could give each jail a user of its own)"
    yield Finding(name="user", ok=None, detail=user)
