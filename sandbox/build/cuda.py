"""`load_inline` served with a cache: the source unchanged, the compiler run once for what it sees.

Runs inside the candidate runner, around the module's own call of `torch.utils.cpp_extension.load_inline`. The
patch computes the key and the directories, records which kernels the library defines, and leaves the
compiling to the original function.

Key: sources, functions, flags, toolchain and GPU arch; neither the Python around them nor the extension's
name, which is replaced by the key unless the source spells it out (a literal PYBIND11_MODULE, TORCH_LIBRARY).
Each build has a private directory, so no two jobs meet over a `main.cpp` or a lock; a finished library is
published by one rename.

Left out: a compile jail of its own. The library is built by the process that will load it, so whoever can
write the cache directory can file bytes under a key; the cache belongs to one user.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.jail.device import BuildError
from sandbox.verdict.coverage import OwnKernel

_UNSEEN_BY_COMPILER = frozenset({"name", "build_directory", "verbose", "keep_intermediates", "use_pch"})
_ERROR_LINE = re.compile(
    r"(?:\berror\b\s*[:#]|fatal error|undefined reference|: error|ptxas fatal)", re.IGNORECASE
)
_SPELLED_NAME = re.compile(r"PYBIND11_MODULE\s*\(\s*(?!TORCH_EXTENSION_NAME\b)\w+|\bTORCH_LIBRARY")


@dataclass(kw_only=True)
class BuildRecord:
    """One call of `load_inline`: its key, how long it took (seconds), whether the cache served it, and its
    kernels."""

    key: str
    name: str
    seconds: float = 0.0
    cached: bool = False
    error: str = ""
    kernels: tuple[OwnKernel, ...] = ()


@dataclass(kw_only=True)
class BuildLog:
    """All builds of one runner, in the order in which the module asked for them."""

    records: list[BuildRecord] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Time spent building, to be booked as build, not as load."""
        return sum(record.seconds for record in self.records)

    @property
    def error(self) -> str:
        """The first build failure, or an empty string."""
        return next((record.error for record in self.records if record.error), "")

    @property
    def kernels(self) -> tuple[OwnKernel, ...]:
        """The kernels of every library that was built."""
        return tuple(kernel for record in self.records for kernel in record.kernels)


def refusal(device: str) -> str | None:
    """Why a device cannot judge CUDA sources, or None if it can."""
    if device.startswith("cuda"):
        return None
    return (
        f"language 'cuda' needs an NVIDIA GPU, but the task's device is {device!r}: "
        "set device to 'cuda:0' on a machine with a GPU, or language 'cpp' (timed) or 'triton' (checked only)"
    )


@functools.cache
def toolchain() -> str:
    """Names everything that compiles a CUDA extension: Python ABI, torch, C++ compiler, nvcc."""
    import sysconfig

    import torch
    from torch.utils import cpp_extension

    def version(command: list[str]) -> str:
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=30, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return f"{command[0]} missing"

    compiler = version([cpp_extension.get_cxx_compiler(), "--version"]).splitlines()[0]
    home = cpp_extension.CUDA_HOME
    nvcc = (
        version([os.path.join(home, "bin", "nvcc"), "--version"]).splitlines()[-1]
        if home
        else "no CUDA toolkit"
    )
    return "\n".join([str(sysconfig.get_config_var("SOABI")), torch.__version__, compiler, nvcc])


def extension_key(arguments: dict[str, Any], *, arch: str, tools: str) -> str:
    """The content address of one `load_inline` call.

    Args:
        arguments: All arguments of the call by name, defaults applied.
        arch: The GPU architecture compiled for, such as `sm_90`.
        tools: The result of `toolchain()`.

    Returns:
        64 hex digits, equal for calls that the compiler cannot tell apart.
    """
    seen = {name: value for name, value in arguments.items() if name not in _UNSEEN_BY_COMPILER}
    for name in ("cpp_sources", "cuda_sources", "sycl_sources"):
        value = seen.get(name) or []
        seen[name] = [value] if isinstance(value, str) else list(value)
    functions = seen.get("functions")
    if isinstance(functions, str):
        functions = [functions]
    seen["functions"] = {f: f for f in functions} if isinstance(functions, (list, tuple)) else functions
    if keeps_name(arguments):
        seen["name"] = arguments["name"]
    text = json.dumps([arch, tools, seen], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def keeps_name(arguments: dict[str, Any]) -> bool:
    """Whether the compiled code depends on the extension's name, so that it must be built under it."""
    if not arguments.get("functions"):
        return True
    sources = [arguments.get("cpp_sources") or "", arguments.get("cuda_sources") or ""]
    return any(_SPELLED_NAME.search(text) for s in sources for text in ([s] if isinstance(s, str) else s))


def first_errors(text: str, directories: Sequence[str] = (), limit: int = 1500) -> str:
    """Shortens the output of a failed ninja build to the compiler's first errors, each with two lines of
    context.

    Args:
        text: The whole message.
        directories: Paths to take out of it; they tell the reader nothing.
        limit: Most characters to return.
    """
    for directory in directories:
        text = text.replace(directory.rstrip("/") + "/", "")
    lines = [line for line in text.splitlines() if not line.startswith(("FAILED:", "[", "ninja:"))]
    kept: list[str] = []
    for number, line in enumerate(lines):
        if _ERROR_LINE.search(line):
            kept += [part for part in lines[number : number + 3] if part not in kept]
    picked = "\n".join(kept) if kept else "\n".join(lines[-12:])
    return picked[:limit]


def _demangle(name: str) -> str:
    library = ctypes.CDLL("libstdc++.so.6")
    library.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    pointer = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if not pointer or status.value != 0:
        return name
    try:
        return ctypes.string_at(pointer).decode(errors="replace")
    finally:
        libc = ctypes.CDLL(None)
        libc.free.argtypes = [ctypes.c_void_p]
        libc.free(pointer)


def _cuobjdump() -> str:
    """The disassembler's path: the toolkit's, else the one that Triton brings along."""
    if found := shutil.which("cuobjdump"):
        return found
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if bundled.exists():
        return str(bundled)
    raise FileNotFoundError("cuobjdump: install the CUDA toolkit's binary utilities, or the triton package")


def library_kernels(library: str | Path) -> tuple[OwnKernel, ...]:
    """The CUDA kernels in a shared library or cubin, read from its device code.

    Args:
        library: Path of the file.

    Returns:
        One entry for each kernel and architecture, under the demangled name that a profiler shows, with its
        registers. Empty for a library without device code.

    Raises:
        FileNotFoundError: If no cuobjdump can be found.
        RuntimeError: If cuobjdump fails for another reason than missing device code.
    """
    command = [_cuobjdump(), "-res-usage", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode and "does not contain device code" not in done.stdout + done.stderr:
        raise RuntimeError(f"cuobjdump could not read {library}: {(done.stderr or done.stdout)[-500:]}")
    pairs = re.findall(r"^ Function ([^\s:]+):\s*\n\s*REG:(\d+)", done.stdout, flags=re.MULTILINE)
    found = {
        OwnKernel(name=_demangle(name), origin="cuda", registers=int(registers)) for name, registers in pairs
    }
    return tuple(sorted(found, key=lambda kernel: (kernel.name, kernel.registers or 0)))


@dataclass(frozen=True, kw_only=True)
class ExtensionCache:
    """Built extensions by key.

    Attributes:
        root: The cache that outlives the runner; entries appear in it whole, by rename.
        private: This job's own directory, deleted with the job.
        arch: The GPU architecture to compile for, such as `sm_90`.
    """

    root: Path
    private: Path
    arch: str

    def find(self, key: str) -> Path | None:
        """The entry of a key, or None. An entry without its library counts as absent."""
        entry = self.root / key[:2] / key
        return entry if (entry / "meta.json").exists() and any(entry.glob("*.so")) else None

    def publish(self, key: str, library: Path, meta: dict[str, Any]) -> None:
        """Files a finished library under its key. Of two builders of one key the first stays; a full disk
        only costs the reuse."""
        target = self.root / key[:2] / key
        staged = None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            staged = Path(tempfile.mkdtemp(prefix=".staged-", dir=target.parent))
            shutil.copy2(library, staged / library.name)
            (staged / "meta.json").write_text(json.dumps(meta))
            os.rename(staged, target)
        except OSError:
            if staged is not None:
                shutil.rmtree(staged, ignore_errors=True)


def build_environment(cache: ExtensionCache, max_jobs: int) -> dict[str, str]:
    """Environment variables for a runner that may build extensions.

    Args:
        cache: The cache, for its private directory and arch.
        max_jobs: Compilers that may run at once.
    """
    digits = cache.arch.removeprefix("sm_").rstrip("af")
    return {
        "TORCH_EXTENSIONS_DIR": str(cache.private),
        "TORCH_CUDA_ARCH_LIST": f"{digits[:-1]}.{digits[-1]}",
        "MAX_JOBS": str(max(1, max_jobs)),
    }


def _kernels_to_json(kernels: Sequence[OwnKernel]) -> list[list]:
    return [[kernel.name, kernel.registers] for kernel in kernels]


def _kernels_from_json(rows: list[list]) -> tuple[OwnKernel, ...]:
    return tuple(OwnKernel(name=name, origin="cuda", registers=registers) for name, registers in rows)


def install(
    cache: ExtensionCache, tools: str | None = None, announce: Callable[[str], None] | None = None
) -> BuildLog:
    """Patches `torch.utils.cpp_extension.load_inline` in this process. Call before the candidate's module is
    loaded.

    Args:
        cache: Where builds go and come from.
        tools: The toolchain's name; asked of the compilers if None.
        announce: Called with the key when the compiler is about to start (not for what the cache holds).

    Returns:
        The log that later calls fill.

    Raises:
        FileNotFoundError: If no cuobjdump can be found.
    """
    from torch.utils import cpp_extension

    _cuobjdump()  # Without it no kernel could be told to be the candidate's own: fail before a long build.
    original, log = cpp_extension.load_inline, BuildLog()
    signature = inspect.signature(original)
    # Plain load_inline deletes precompiled headers inside site-packages on every call, which fails on a
    # read-only tree.
    cpp_extension.remove_extension_h_precompiler_headers = lambda: None

    @functools.wraps(original)
    def load_inline(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        key = extension_key(arguments, arch=cache.arch, tools=tools or toolchain())
        asked = str(arguments["name"])
        name = asked if keeps_name(arguments) else f"ext_{key[:24]}"
        record = BuildRecord(key=key, name=asked)
        log.records.append(record)
        start = time.monotonic()
        entry = cache.find(key)
        if entry is not None:
            meta = json.loads((entry / "meta.json").read_text())
            record.cached, record.kernels = True, _kernels_from_json(meta["kernels"])
            module = cpp_extension._import_module_from_library(
                meta["module"], str(entry), arguments["is_python_module"]
            )
            record.seconds = time.monotonic() - start
            return module
        if announce is not None:
            announce(key)
        directory = Path(tempfile.mkdtemp(prefix="build-", dir=cache.private))
        arguments |= {"name": name, "build_directory": str(directory), "use_pch": False, "verbose": False}
        for sources in ("cpp_sources", "cuda_sources"):
            # The original inserts its headers into the caller's list.
            if isinstance(arguments[sources], list):
                arguments[sources] = list(arguments[sources])
        try:
            module = original(**arguments)
        except Exception as error:
            text = first_errors(str(error), [str(directory), cpp_extension.CUDA_HOME or str(directory)])
            record.error = text or repr(error)
            raise BuildError(f"load_inline({asked!r}) failed to build:\n{record.error}") from None
        finally:
            record.seconds = time.monotonic() - start
        library = next(directory.glob("*.so"))
        record.kernels = library_kernels(library)
        meta = {"module": library.name.removesuffix(".so"), "kernels": _kernels_to_json(record.kernels)}
        cache.publish(key, library, meta | {"arch": cache.arch, "seconds": record.seconds})
        return module

    cpp_extension.load_inline = load_inline
    return log
