"""Where an extension's headers and libraries are on this machine, and what identifies them in a cache key.

Found without importing torch: the trusted side that asks must not wake a GPU's driver.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from sandbox.build import BuildUnavailable
from sandbox.build.cpp import Compiler, find_compiler

_STANDARD = re.compile(r"['\"]-std=(c\+\+\d\d)['\"]")
_TENSOR_OBJECT = re.compile(r"struct THPVariable \{\s*PyObject_HEAD\s*(?://[^\n]*\n\s*)*at::Tensor cdata;")


@dataclass(frozen=True, kw_only=True)
class Cuda:
    """A CUDA toolkit. `identity` is its compiler's version."""

    home: Path
    nvcc: str
    identity: str


def triton_file(*parts: str) -> Path | None:
    """A file or directory that Triton's backend for NVIDIA brings along, or None where it does not."""
    spec = importlib.util.find_spec("triton")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        found = Path(root, "backends", "nvidia", *parts)
        if found.exists():
            return found
    return None


@functools.cache
def extension_standard() -> str:
    """The C++ standard in which the installed PyTorch compiles extensions, such as "c++17": the one that it names most often where it
    does so. Candidates are written for it, and nvcc takes a sixth to a third longer in the next one."""
    spec = importlib.util.find_spec("torch")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        source = Path(root, "utils", "cpp_extension.py")
        named = Counter(_STANDARD.findall(source.read_text())) if source.exists() else None
        if named:
            return named.most_common(1)[0][0]
    return "c++20"


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """What compiles and links an extension.

    Attributes:
      includes: PyTorch's and Python's include directories.
      libraries: the directory of PyTorch's shared libraries.
      identity: of compiler, CPU, PyTorch and Python; part of every key.
      fast_binding: whether `binding.h` knows this PyTorch's tensors.
    """

    compiler: Compiler
    includes: tuple[Path, ...]
    libraries: Path
    identity: str
    fast_binding: bool

    def links(self, *names: str, stubs: Path | None = None) -> list[str]:
        """Linker arguments for those of PyTorch's libraries that this build of it has.

        Args:
          stubs: a directory of libraries without symbols that stand for some of them. They are linked whether needed or not, as the
            linker cannot tell.
        """
        present = [name for name in names if (self.libraries / f"lib{name}.so").exists()]
        stubbed = [name for name in present if stubs and (stubs / f"lib{name}.so").exists()]
        words = ["-Wl,--push-state,--no-as-needed", f"-L{stubs}", *(f"-l{name}" for name in stubbed), "-Wl,--pop-state"] if stubbed else []
        return [*words, f"-L{self.libraries}", *(f"-l{name}" for name in present if name not in stubbed)]


@functools.cache
def find_toolchain() -> Toolchain:
    """The host's compiler with the headers of the installed PyTorch and of this Python.

    Raises:
      BuildUnavailable: no compiler, no PyTorch, or no Python headers; the text says what to install.
    """
    compiler = find_compiler()
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildUnavailable("torch is not installed: pip install torch")
    root = Path(spec.submodule_search_locations[0])
    include = root / "include"
    python = Path(sysconfig.get_path("include", scheme="posix_prefix"))
    if not (python / "Python.h").exists():
        raise BuildUnavailable(f"no Python.h in {python}: apt-get install python3-dev, or its like")
    variables = (root / "version.py").read_text()
    version = re.search(r"__version__ = '([^']*)'", variables)
    commit = re.search(r"git_version = '([^']*)'", variables)
    declared = include / "torch" / "csrc" / "autograd" / "python_variable.h"
    parts = [
        compiler.identity,
        version[1] if version else variables,
        commit[1] if commit else "",
        str(sysconfig.get_config_var("SOABI")),
        str(include),
        extension_standard(),
    ]
    return Toolchain(
        compiler=compiler,
        includes=(include, include / "torch" / "csrc" / "api" / "include", python),
        libraries=root / "lib",
        identity="\n".join(parts),
        fast_binding=declared.exists() and bool(_TENSOR_OBJECT.search(declared.read_text())),
    )


@functools.cache
def find_cuda() -> Cuda:
    """The CUDA toolkit named by CUDA_HOME or CUDA_PATH, else that of the nvcc on the PATH, else the usual
    place.

    Raises:
      BuildUnavailable: there is none; the text says what to install.
    """
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    guesses = [Path(named)] if named else []
    if on_path:
        guesses.append(Path(on_path).resolve().parent.parent)
    guesses.append(Path("/usr/local/cuda"))
    for home in guesses:
        nvcc = home / "bin" / "nvcc"
        if nvcc.exists() and (home / "include" / "cuda_runtime.h").exists():
            break
    else:
        raise BuildUnavailable("no CUDA toolkit: install one, or point CUDA_HOME to it")
    try:
        run = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildUnavailable(f"{nvcc} does not run: {error}") from error
    return Cuda(home=home, nvcc=str(nvcc), identity=run.stdout.strip().splitlines()[-1])


def cuda_links(cuda: Cuda) -> list[str]:
    """Linker arguments for the CUDA runtime."""
    directory = next(
        (cuda.home / name for name in ("lib64", "lib") if (cuda.home / name).is_dir()), cuda.home
    )
    return [f"-L{directory}", "-lcudart"]
