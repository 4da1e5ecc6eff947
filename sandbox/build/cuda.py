"""CUDA's part of building an extension: nvcc's command line, and which kernels are in a library.

The kernels are read from the device code by the disassembler, in a jail like the compiler's: they are the
evidence that coverage is taken against (`sandbox.verdict.coverage`).
"""

from __future__ import annotations

import ctypes
import functools
import re
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sandbox.build import BuildUnavailable
from sandbox.build.artifacts import read_regular_file
from sandbox.build.toolchain import Cuda, cuda_links, extension_standard, triton_file
from sandbox.jail.limits import Limits
from sandbox.jail.spawn import Zygote
from sandbox.verdict.coverage import OwnKernel

NVCC_FLAGS = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
    "-DTORCH_API_INCLUDE_EXTENSION_H",
)
"""What PyTorch compiles CUDA extensions with."""
DISASSEMBLER_S = 60.0
DISASSEMBLER_MEMORY_BYTES = 2 << 30
LISTING_BYTES = 16 << 20
MAX_KERNELS = 5000


def refusal(device: str) -> str | None:
    """Why a device cannot judge CUDA sources, or None if it can."""
    if device.startswith("cuda"):
        return None
    return (
        f"language 'cuda' needs an NVIDIA GPU, but the task's device is {device!r}: "
        "set device to 'cuda:0' on a machine with a GPU, or language 'cpp' (timed) or 'triton' (checked only)"
    )


def _names_a_stream(flags: Sequence[str]) -> bool:
    return any("default-stream" in flag for flag in flags)


def host_flags(flags: Sequence[str]) -> list[str]:
    """For C++ files beside CUDA ones that are compiled with `flags`: the same default stream (see `compile_command`)."""
    return [] if _names_a_stream(flags) else ["-DCUDA_API_PER_THREAD_DEFAULT_STREAM=1"]


def compile_command(cuda: Cuda, arch: str, host_compiler: str, flags: Sequence[str]) -> list[str]:
    """nvcc with everything but includes and files. A candidate that names an architecture itself gets that
    one.

    Launches without a stream go to the thread's own default stream, on which a runner does all its work
    (`sandbox.jail.device_cuda`): so they can be captured.
    """
    command = [cuda.nvcc, *NVCC_FLAGS, "-ccbin", host_compiler]
    if not _names_a_stream(flags):
        command.append("--default-stream=per-thread")
    if not any("arch" in flag or "gencode" in flag for flag in flags):
        command.append(f"-gencode=arch=compute_{arch.removeprefix('sm_')},code={arch}")
    command += ["-Xcompiler", "-fPIC", *flags]
    if not any(flag.lstrip("-").startswith("std=") for flag in flags):
        command.append(f"-std={extension_standard()}")
    return command


def link_flags(cuda: Cuda) -> list[str]:
    """The CUDA runtime."""
    return cuda_links(cuda)


@functools.cache
def find_cuobjdump() -> str:
    """The disassembler's path: the toolkit's, else the one that Triton brings along.

    Raises:
      BuildUnavailable: there is none, so no kernel could be told to be the candidate's own.
    """
    if found := shutil.which("cuobjdump"):
        return found
    if bundled := triton_file("bin", "cuobjdump"):
        return str(bundled)
    raise BuildUnavailable("no cuobjdump: install the CUDA toolkit's binary utilities, or the triton package")


def kernels_in(library: Path, zygote: Zygote, scratch: Path) -> tuple[OwnKernel, ...]:
    """The CUDA kernels in a shared library or cubin, read from its device code.

    Returns:
      One entry for each kernel and architecture, under the demangled name that a profiler shows, with its
      registers. Empty for a library without device code.

    Raises:
      BuildUnavailable: no disassembler, or it fails for another reason than missing device code.
    """
    program = find_cuobjdump()
    directory = Path(tempfile.mkdtemp(prefix="kernels-", dir=scratch))
    shutil.copyfile(library, directory / "library.so")
    script = f"{shlex.join([program, '-res-usage', 'library.so'])} >listing 2>&1"
    limits = Limits(memory_bytes=DISASSEMBLER_MEMORY_BYTES, file_bytes=LISTING_BYTES)
    readable = [Path(program).resolve().parent.parent]
    with zygote.execute(
        ["/bin/sh", "-c", script], limits, DISASSEMBLER_MEMORY_BYTES, directory, readable=readable
    ) as process:
        end = process.wait(DISASSEMBLER_S)
        listing = read_regular_file(directory / "listing", LISTING_BYTES).decode("utf-8", "replace")
    if (end.code or end.signal) and "does not contain device code" not in listing:
        raise BuildUnavailable(f"cuobjdump could not read the library: {listing[-500:]}")
    return parse_listing(listing)


def parse_listing(listing: str) -> tuple[OwnKernel, ...]:
    """The kernels in what `cuobjdump -res-usage` prints."""
    pairs = re.findall(r"^ Function ([^\s:]+):\s*\n\s*REG:(\d+)", listing, flags=re.MULTILINE)[:MAX_KERNELS]
    found = {
        OwnKernel(name=_demangle(name), origin="cuda", registers=int(registers)) for name, registers in pairs
    }
    return tuple(sorted(found, key=lambda kernel: (kernel.name, kernel.registers or 0)))


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
