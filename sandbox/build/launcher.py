"""Builds the launchers that Triton asks for: C libraries between Python and the driver, one for each signature of a kernel.

The source comes from a candidate's process, so it is compiled in a compile jail and kept by its content: whoever gets a library
from the store has sent the same text.
"""

from __future__ import annotations

import errno
import shlex
import shutil
import sysconfig
import tempfile
from pathlib import Path

from sandbox.build import BuildFailed, BuildUnavailable
from sandbox.build.artifacts import ArtifactStore
from sandbox.build.cpp import disk_full, find_compiler
from sandbox.build.logs import first_errors
from sandbox.build.toolchain import triton_file
from sandbox.jail.faults import JailMemory
from sandbox.jail.limits import Limits
from sandbox.jail.spawn import Zygote

MAX_SOURCE_CHARS = 256 << 10
FLAGS = ("-x", "c", "-O3", "-shared", "-fPIC", "-w")
"""As Triton compiles them."""
MEMORY_BYTES, FILE_BYTES = 1 << 30, 1 << 20


def build_launcher(source: str, *, store: ArtifactStore, zygote: Zygote, scratch: Path, timeout_s: float) -> tuple[Path, bool]:
    """The library's path in the store, and whether it was there.

    The driver is not linked: a runner has loaded it for all to see (`CudaDevice.open`).

    Raises:
      BuildFailed: the compiler refused, or ran out of memory. JailTimeout: it took longer than `timeout_s`.
      BuildUnavailable: no compiler, no Triton, or no space on the disk.
    """
    compiler, include = find_compiler(), [Path(sysconfig.get_paths()["include"]), _driver_headers()]
    key = ArtifactStore.key("triton launcher 1", source, *FLAGS, compiler.identity, *map(str, include))
    if found := store.find(key):
        return found, True
    directory = Path(tempfile.mkdtemp(prefix="build-", dir=scratch))
    try:
        (directory / "launcher.c").write_text(source, encoding="utf-8", errors="surrogatepass")
        flags = [word for path in include for word in ("-isystem", str(path))]
        command = [compiler.path, *FLAGS, *flags, "-fdiagnostics-color=never", "launcher.c", "-o", "launcher.so"]
        limits = Limits(memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES)
        argv = ["/bin/sh", "-c", f"exec {shlex.join(command)}"]
        with zygote.execute(argv, limits, MEMORY_BYTES, directory, readable=include) as process:
            try:
                end = process.wait(timeout_s)
            except JailMemory as error:
                raise BuildFailed(f"the compiler {error}") from error
            log = process.capture.text()
            if end.code == 0 and end.signal == 0:
                path = store.publish(key, directory / "launcher.so")
                store.prune_now_and_then(key)
                return path, False
        if "No space left on device" in log:
            raise disk_full(store, scratch)
        raise BuildFailed(first_errors(log) or f"the compiler {end} without a message")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(store, scratch) from error
        raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _driver_headers() -> Path:
    """Where Triton keeps cuda.h. Raises BuildUnavailable."""
    if headers := triton_file("include"):
        return headers
    raise BuildUnavailable("Triton's copy of cuda.h is missing: install the triton package")
