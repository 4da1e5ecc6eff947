"""Builds a bare C++ kernel with the host's compiler, in a jail of its own."""

from __future__ import annotations

import errno
import functools
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from sandbox.build import Artifact, BuildFailed, BuildUnavailable
from sandbox.build.artifacts import ArtifactStore
from sandbox.build.signature import INCLUDES, KernelSignature
from sandbox.jail.faults import JailMemory, JailTimeout
from sandbox.jail.limits import Limits
from sandbox.jail.spawn import Zygote

COMPILE_FLAGS = ("-std=c++17", "-O2", "-march=native", "-fopenmp", "-ffast-math", "-fPIC")
# No -ffast-math here: it would link crtfastmath, which changes the floating-point mode of the whole process.
LINK_FLAGS = (
    "-shared",
    "-fopenmp",
    "-Wl,--require-defined=kernel",
    "-Wl,-z,defs",
    "-Wl,--version-script=kernel.map",
)
QUICK_LINK = ("-fno-use-linker-plugin", "-nodefaultlibs")
QUICK_LIBRARIES = ("-lm", "-lgomp", "-lgcc", "-lc")
"""Without the C++ library, whose symbols take the linker as long as all else; what needs it is linked once more, with it."""
USES_LIBRARY = re.compile(r"std|gnu|GLIBCXX|include|##|%:|\\")
"""What a source contains that can get at the C++ library beyond C's own functions and their overloads."""
LEAN_PRELUDE = """\
#if __has_include(<bits/c++config.h>)
#include <bits/c++config.h>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#define _GLIBCXX_USE_STD_SPEC_FUNCS 0
#endif
"""
"""Leaves out the special functions in namespace std, whose templates GCC instantiates anew in every compilation, for a third of
its time."""
VERSION_SCRIPT = "{ global: kernel; local: *; };\n"
INSTALL_HINT = "install one: apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), or set CXX"
MAX_LOG_CHARS = 8000
COMPILER_MEMORY_BYTES = 2 << 30
COMPILER_FILE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """A C++ compiler found on this machine. `identity` is what a cache key must contain of it and of the
    CPU."""

    path: str
    version: str
    identity: str


@functools.cache
def find_compiler() -> Compiler:
    """The compiler named by CXX, else g++.

    Raises:
      BuildUnavailable: there is none, or it does not run; the text says how to get one.
    """
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise BuildUnavailable(f"no C++ compiler: {name!r} is not on the PATH; {INSTALL_HINT}")
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildUnavailable(f"the C++ compiler {path} does not run ({error}); {INSTALL_HINT}") from error
    version = run.stdout.splitlines()[0] if run.stdout else path
    return Compiler(path=path, version=version, identity=f"{path}\n{version}\n{cpu_identity()}")


def cpu_identity() -> str:
    """Model and instruction sets of the CPU: what -march=native depends on."""
    with open("/proc/cpuinfo") as file:
        lines = file.read().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if re.match(r"(model name|flags|Features|CPU part)\b", line))


def build_kernel(
    source: str,
    signature: KernelSignature,
    *,
    store: ArtifactStore,
    zygote: Zygote,
    scratch: Path,
    timeout_s: float,
) -> Artifact:
    """Compiles and links `source` behind the prelude of `signature`, or finds it built.

    Args:
      store: where the library is looked for and published.
      zygote: forks the compile jail.
      scratch: the jail's private directory is made here.
      timeout_s: for compiling and linking together.

    Raises:
      BuildFailed: the compiler or linker refused; the text is its output. Also when it ran out of memory.
      JailTimeout: it took longer than `timeout_s`.
      BuildUnavailable: no compiler, or no space on the disk.
    """
    start = time.monotonic()
    compiler = find_compiler()
    text = signature.prelude + source
    if not text.endswith("\n"):
        text += "\n"
    prelude = INCLUDES if USES_LIBRARY.search(text) else LEAN_PRELUDE + INCLUDES
    flags = (*COMPILE_FLAGS, *LINK_FLAGS, *QUICK_LINK, *QUICK_LIBRARIES)
    key = ArtifactStore.key("cpp kernel 2", prelude, text, *flags, compiler.identity)
    found = store.find(key)
    if found:
        return Artifact(path=found, key=key, cached=True, seconds=time.monotonic() - start)
    try:
        path = _build(prelude, text, key, compiler, store, zygote, scratch, timeout_s)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(store, scratch) from error
        raise
    return Artifact(path=path, key=key, cached=False, seconds=time.monotonic() - start)


def disk_full(store: ArtifactStore, scratch: Path) -> BuildUnavailable:
    """The error for a build that ran out of disk."""
    return BuildUnavailable(
        f"no space left for building (private files in {scratch}, artifacts in {store.root}); "
        "free some, or start the sandbox with --cache and TMPDIR on a larger disk"
    )


def _build(
    prelude: str,
    text: str,
    key: str,
    compiler: Compiler,
    store: ArtifactStore,
    zygote: Zygote,
    scratch: Path,
    timeout_s: float,
) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="build-", dir=scratch))
    try:
        (directory / "kernel.cpp").write_text(text, encoding="utf-8", errors="surrogatepass")
        (directory / "kernel.map").write_text(VERSION_SCRIPT)
        header = _prelude_header(prelude, store, compiler)
        command = [
            compiler.path,
            *COMPILE_FLAGS,
            "-include",
            str(header),
            "-c",
            "kernel.cpp",
            "-o",
            "kernel.o",
        ]
        to = ["-o", "kernel.so"]
        quick_link = [compiler.path, *LINK_FLAGS, *QUICK_LINK, "kernel.o", *QUICK_LIBRARIES, *to]
        link = [compiler.path, *LINK_FLAGS, "kernel.o", "-lm", *to]
        script = f"{shlex.join(command)} && {{ {shlex.join(quick_link)} 2>/dev/null || {shlex.join(link)}; }}"
        limits = Limits(memory_bytes=COMPILER_MEMORY_BYTES, file_bytes=COMPILER_FILE_BYTES)
        argv, shown = ["/bin/sh", "-c", script], [header.parent]
        with zygote.execute(argv, limits, COMPILER_MEMORY_BYTES, directory, readable=shown) as process:
            try:
                end = process.wait(timeout_s)
            except JailTimeout:
                raise JailTimeout(f"the compiler was still busy after {timeout_s:g} s") from None
            except JailMemory as error:
                raise BuildFailed(f"the compiler {error}") from error
            log = process.capture.text()
            if end.code == 0 and end.signal == 0:
                return store.publish(key, directory / "kernel.so")
            if "No space left on device" in log:
                raise disk_full(store, scratch)
            raise BuildFailed(_tidy(log, directory, header) or f"the compiler {end} without a message")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _prelude_header(prelude: str, store: ArtifactStore, compiler: Compiler) -> Path:
    """The header with `prelude`'s includes; beside it a precompiled form, which saves half of a small
    build.

    The compiler takes the precompiled form when it fits and reads the header otherwise, so nothing depends
    on it.
    """
    key = ArtifactStore.key("prelude header 2", prelude, *COMPILE_FLAGS, compiler.identity)
    directory = store.root / "headers" / key
    header = directory / "prelude.h"
    if not header.exists():
        directory.parent.mkdir(exist_ok=True, mode=0o700)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=directory.parent))
        temporary.chmod(0o755)  # compile jails have users of their own
        (temporary / "prelude.h").write_text(prelude)
        command = [compiler.path, *COMPILE_FLAGS, "-x", "c++-header", "prelude.h", "-o", "prelude.h.gch"]
        subprocess.run(command, cwd=temporary, capture_output=True, timeout=60, check=False)
        for path in temporary.iterdir():
            path.chmod(0o644)
        try:
            os.rename(temporary, directory)
        except OSError:
            # Another worker was faster.
            shutil.rmtree(temporary, ignore_errors=True)
    return header


def _tidy(log: str, directory: Path, header: Path) -> str:
    """Compiler output without paths of this machine."""
    log = log.replace(f"{directory}/", "").replace(str(header), "<prelude>")
    log = re.sub(r"/\S*/(ld|as|cc1plus|collect2)\b", r"\1", log)
    return log.strip()[:MAX_LOG_CHARS]
