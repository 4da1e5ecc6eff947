"""The lean torch/extension.h that the fast road compiles against, precompiled once for a set of flags.

It stands first on the include path under the name of PyTorch's own header, so sources build unchanged. It
holds torch/types.h and the binding of `binding.h`, but neither the C++ frontend (torch::nn, optim, jit) nor
pybind11:
these cost ten seconds in every build even precompiled. A source that needs them takes the plain road;
`beyond` tells whether it does.

Under the store's `extension-headers`, published whole by one rename:

    <key>/torch/extension.h, sandbox_binding.h, and extension.h.gch where it could be precompiled
    names-<key>: the names that only PyTorch's whole header declares; mentioned-<key>: all its words
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox.build.artifacts import ArtifactStore, published_whole
from sandbox.build.flags import header_flags
from sandbox.build.locks import build_lock
from sandbox.build.logs import first_errors
from sandbox.build.toolchain import Toolchain, extension_standard
from sandbox.jail.faults import JailMemory, JailTimeout
from sandbox.jail.limits import Limits
from sandbox.jail.spawn import Zygote

BINDING = Path(__file__).with_name("binding.h")
LEAN_HEADER = """#pragma once
#include <Python.h>
#include <torch/types.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <mutex>
#include <numeric>
#include <queue>
#include <random>
#include <sstream>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <torch/sandbox_binding.h>
"""
BASE_FLAGS = ("-fPIC", f"-std={extension_standard()}", "-DTORCH_API_INCLUDE_EXTENSION_H")
PREPARE_S = 300.0
"""For the one-time steps, which are nobody's build."""
MEMORY_BYTES = 6 << 30
FILE_BYTES = 2 << 30
MAX_PRECOMPILED = 6
"""Sets of flags whose header is kept; each takes about 450 MB."""
MAX_NEW = 2
"""Sets of flags whose header one object precompiles: a candidate with many sets pays for the rest itself."""
_SYMBOL = ["constexpr", "Symbol"]
_SYMBOL_SCOPES = {"attr", "prim", "aten", "onnx"}
"""Namespaces of thousands of symbols, called `n` or `weight`, that take the namespace's name to get at."""
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|[A-Za-z_]\w*|[{}();]')


@dataclass(frozen=True)
class Failed:
    """Why a one-time step failed. `passing`: for want of time or memory, so that it may succeed another time."""

    why: str
    passing: bool


class Headers:
    """The directories of one store. Safe for several processes at once.

    Args:
      store: its `headers` directory is used.
      toolchain: of the builds to come.
      scratch: private directories of the compiler are made here.
      pause: see `build_lock`.
    """

    def __init__(
        self, store: ArtifactStore, toolchain: Toolchain, scratch: Path, pause: Callable[[float], None]
    ):
        self.root = store.root / "extension-headers"
        self._toolchain, self._scratch, self._pause = toolchain, scratch, pause
        self._new = 0

    @property
    def identity(self) -> str:
        """What a key must contain of the fast road's own text."""
        return ArtifactStore.key(LEAN_HEADER, BINDING.read_text(), *BASE_FLAGS)

    def include_flags(self) -> list[str]:
        """PyTorch's and Python's directories."""
        return [word for path in self._toolchain.includes for word in ("-isystem", str(path))]

    def lean(self, flags: Sequence[str], zygote: Zygote) -> Path:
        """The directory to put first on the include path for builds with `flags`.

        Precompiles the header at the first call for a set of flags, for `MAX_NEW` sets in the life of this
        object.
        Beyond that, and where it fails (the flags are wrong, or time or memory ran out), the header is there
        as text, and builds are slower.

        Raises:
          OSError: no space on the disk.
        """
        directory = self._directory(header_flags(flags))
        if not directory.exists() and self._new >= MAX_NEW:
            directory = self._directory(["text"])
        if not directory.exists():
            with build_lock(self.root / "locks" / directory.name, PREPARE_S, self._pause):
                if not directory.exists():
                    self._make(directory, header_flags(flags), zygote)
                    self._forget_old(directory)
        os.utime(directory)
        return directory

    def _directory(self, flags: Sequence[str]) -> Path:
        return self.root / ArtifactStore.key("lean header 1", self.identity, self._toolchain.identity, *flags)

    def beyond(self, names: set[str], zygote: Zygote) -> bool:
        """Whether one of `names` is declared by PyTorch's whole header and not by the lean one."""
        found = self._names("names", zygote)
        return found is None or not names.isdisjoint(found)

    def mentioned(self, names: set[str], zygote: Zygote) -> bool:
        """Whether PyTorch's whole header contains one of `names` anywhere."""
        found = self._names("mentioned", zygote)
        return found is None or not names.isdisjoint(found)

    def _names(self, which: str, zygote: Zygote) -> list[str] | None:
        """Of the two lists of names that are made from the headers once; None where they cannot be had."""
        key = ArtifactStore.key("names 3", self.identity, self._toolchain.identity)
        path = self.root / f"{which}-{key}"
        if not path.exists():
            with build_lock(self.root / "locks" / key, PREPARE_S, self._pause):
                if not path.exists():
                    found = self._find_names(zygote)
                    if found is None:
                        return None
                    for name, names in found.items():
                        self._publish_text(self.root / f"{name}-{key}", "\n".join(sorted(names)))
        return path.read_text().split()

    def _write_lean(self, directory: Path) -> None:
        (directory / "torch").mkdir()
        (directory / "torch" / "extension.h").write_text(LEAN_HEADER)
        self.write_binding(directory / "torch" / "sandbox_binding.h")

    @staticmethod
    def write_binding(path: Path) -> None:
        """The binding of functions to Python, which has a part in both lean roads."""
        shutil.copyfile(BINDING, path)

    def _make(self, directory: Path, flags: Sequence[str], zygote: Zygote) -> None:
        """Publishes the header under `directory`, precompiled for `flags` while there is an allowance for
        it."""
        command = [
            self._toolchain.compiler.path,
            *BASE_FLAGS,
            *flags,
            "-I.",
            *self.include_flags(),
            "-x",
            "c++-header",
            "torch/extension.h",
            "-o",
            "extension.h.gch",
        ]
        work = Path(tempfile.mkdtemp(prefix="header-", dir=self._scratch))
        try:
            self._write_lean(work)
            with published_whole(directory) as staged:
                self._write_lean(staged)
                precompiled = staged / "torch" / "extension.h.gch"
                if self._new < MAX_NEW:
                    self._new += 1
                    self.run(
                        shlex.join(command),
                        work,
                        zygote,
                        lambda: shutil.copyfile(work / precompiled.name, precompiled),
                    )
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def run(self, script: str, work: Path, zygote: Zygote, collect: Callable[[], object]) -> Failed | None:
        """Runs a script in a compile jail; calls `collect` while its files are there, if it succeeded. Returns why it did not.

        Raises:
          OSError: no space on the disk.
        """
        limits = Limits(memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES)
        with zygote.execute(["/bin/sh", "-c", script], limits, MEMORY_BYTES, work) as process:
            try:
                end = process.wait(PREPARE_S)
            except (JailTimeout, JailMemory) as error:
                return Failed(str(error), passing=True)
            said = process.capture.text()
            if "No space left on device" in said:
                raise OSError(28, "No space left on device")
            if end.code != 0 or end.signal != 0:
                return Failed(first_errors(said).strip() or str(end), passing=end.signal != 0)
            collect()
            return None

    def _find_names(self, zygote: Zygote) -> dict[str, set[str]] | None:
        """Names at namespace scope and macros of PyTorch's whole header less those of the lean one ("names"), and all words of
        the whole header ("mentioned"); None where they cannot be had."""
        base = shlex.join([self._toolchain.compiler.path, *BASE_FLAGS, *self.include_flags(), "-E"])
        whole, lean = "-x c++ whole.cpp", "-I. -x c++ lean.cpp"
        script = (
            f"{base} -P {whole} -o whole.txt & {base} -P {lean} -o lean.txt "
            f"&& {base} -dM {lean} -o lean.macros && {base} -dM {whole} -o whole.macros && wait $!"
        )
        work = Path(tempfile.mkdtemp(prefix="header-", dir=self._scratch))
        try:
            self._write_lean(work)
            (work / "whole.cpp").write_text("#include <torch/extension.h>\n")
            (work / "lean.cpp").write_text("#include <torch/extension.h>\n")
            found: list[set[str]] = []
            mentioned: set[str] = set()

            def collect() -> None:
                for which in ("whole", "lean"):
                    code = (work / f"{which}.txt").read_text(errors="replace")
                    macros = re.findall(
                        r"^#define (\w+)", (work / f"{which}.macros").read_text(), re.MULTILINE
                    )
                    found.append(names_at_namespace_scope(code) | set(macros))
                    mentioned.update(re.findall(r"[A-Za-z_]\w*", code), macros)

            failed = self.run(script, work, zygote, collect)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return {"names": (found[0] - found[1]) | _SYMBOL_SCOPES, "mentioned": mentioned} if failed is None else None

    def _publish_text(self, path: Path, text: str) -> None:
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=self.root)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)

    def _forget_old(self, newest: Path) -> None:
        """Deletes the least recently used directories beyond `MAX_PRECOMPILED`, and what dead builders
        left."""
        entries = []
        for path in self.root.iterdir():
            if path.is_dir() and path.name != "locks" and path != newest:
                entries.append((path.stat().st_mtime, path))
        entries.sort(reverse=True)
        for _, path in entries[MAX_PRECOMPILED - 1 :]:
            shutil.rmtree(path, ignore_errors=True)


def names_at_namespace_scope(text: str) -> set[str]:
    """Identifiers that preprocessed C++ mentions outside all bodies and parentheses.

    A superset of the names that it declares there, types' members and functions' parameters left out.
    Enumerators count.
    """
    names: set[str] = set()
    statement: list[str] = []
    closes: list[bool] = []
    hidden = parentheses = 0
    for token in _TOKEN.findall(text):
        if hidden:
            hidden += (token == "{") - (token == "}")
            continue
        if token == "(":
            parentheses += 1
        elif token == ")":
            parentheses -= parentheses > 0
        elif token == "{":
            opens_scope = not parentheses and (
                "namespace" in statement or "enum" in statement or statement[-1:] == ["extern"]
            )
            if opens_scope:
                closes.append(True)
            else:
                hidden = 1
            if not parentheses:
                names.update(statement)
                statement = []
        elif token in ";}":
            if statement[:-1] != _SYMBOL:
                names.update(statement)
            statement, parentheses = [], 0
            if token == "}" and closes:
                closes.pop()
        elif not parentheses and token[0] != '"':
            statement.append(token)
    return names
