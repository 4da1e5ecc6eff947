"""Builds the extension of a `load_inline` call in a compile jail, by the fastest of three roads that can.

    lean   a small header of our own over a support library (`lean_road`): about 1 s
    fast   PyTorch's tensors, precompiled, and the binding of our own (`headers`, `binding.h`): about 4 s
    plain  PyTorch's whole header and pybind11, as `load_inline` itself would build: about 35 s

A source that asks for pybind11 or the C++ frontend by name takes the plain road at once, but for a PYBIND11_MODULE that only binds
functions: the lean road has that too. One that a road does not compile is tried on the next one, unless that would tell the compiler
nothing new: the errors lie in the candidate's own lines, and neither they nor its macros name what only the larger header declares, or
one of them is an error on every road. So all roads give one verdict.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from sandbox.build import BuildFailed, BuildUnavailable
from sandbox.build.artifacts import ArtifactStore
from sandbox.build.cpp import disk_full
from sandbox.build.cub import cub_parts, macro
from sandbox.build.cuda import compile_command, host_flags, kernels_in, link_flags, refusal
from sandbox.build.extension import CUDA_SUFFIXES, ExtensionRequest
from sandbox.build.headers import BASE_FLAGS, Headers
from sandbox.build.lean_road import LIBRARIES, LeanRoad, has_short_floats, hopeless, in_pytorchs_words, is_light, may_differ, missing_members
from sandbox.build.locks import build_lock
from sandbox.build.logs import first_errors
from sandbox.build.toolchain import Cuda, find_cuda, find_toolchain
from sandbox.jail.faults import JailMemory, JailTimeout
from sandbox.jail.limits import Limits
from sandbox.jail.spawn import Zygote
from sandbox.verdict.coverage import OwnKernel

Road = Literal["lean", "fast", "plain"]
CPP_MEMORY_BYTES = 4 << 30
CUDA_MEMORY_BYTES = 10 << 30
FILE_BYTES = 512 << 20
ROADS: tuple[Road, ...] = get_args(Road)
ROADS_VARIABLE = "SANDBOX_ROADS"
_IN_BINDING = re.compile(r"\S*sandbox_binding\.(h|cpp):\d+:\d+: error:")
_WHOLE_HEADER_MAY_HELP = re.compile(r"error:.*(incomplete type|no match for .operator)")
_QUOTED, _NAME, _MACRO = (
    re.compile(r"'([^']*)'"),
    re.compile(r"[A-Za-z_]\w*"),
    re.compile(r"\b[A-Z][A-Z0-9_]{3,}\b"),
)


def allowed_roads() -> tuple[Road, ...]:
    """Those that builds may take here, fastest first: all, unless the environment's SANDBOX_ROADS names some ("fast,plain").

    Raises:
      BuildUnavailable: it names others, or leaves out the plain one, which alone builds all that can be built.
    """
    said = os.environ.get(ROADS_VARIABLE)
    named = set(re.split(r"[,\s]+", said.strip())) if said else set(ROADS)
    if not named <= set(ROADS) or "plain" not in named:
        raise BuildUnavailable(f"{ROADS_VARIABLE}={said!r}: name some of {', '.join(ROADS)}, with plain among them")
    return tuple(road for road in ROADS if road in named)


@dataclass(frozen=True, kw_only=True)
class BuiltExtension:
    """A library ready to be loaded.

    Attributes:
      path: in the store.
      module: the name that it must be imported under.
      road: which road it was built by, now or when it was put into the store.
      kernels: CUDA kernels in its device code, as evidence of what is the candidate's own.
      seconds: of this build (0 for one that was there), without one-time steps and waiting for others.
    """

    path: Path
    key: str
    module: str
    road: Road
    cached: bool
    seconds: float
    kernels: tuple[OwnKernel, ...]
    slow_for: str = ""


@dataclass(frozen=True, kw_only=True)
class Way:
    """What the compilers of a road need.

    Attributes:
      fast: functions are bound by our own binding.
      include: the directory to look for headers in first.
      objects: to be linked as well.
      flags: for every compiler.
      stubs: a directory of libraries without symbols that are linked in the place of PyTorch's, those that are there.
      readable: directories in which these lie.
    """

    fast: bool
    readable: tuple[Path, ...] = ()
    include: Path | None = None
    objects: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()
    stubs: Path | None = None


class RequesterGrew(RuntimeError):
    """Whoever asked for the build took too much of something meanwhile; the text says of what."""


class ExtensionBuilder:
    """Builds into one store.

    Args:
      store: where libraries are looked for and published.
      zygote: forks the compile jails.
      scratch: their private directories are made here.
      arch: the GPU to compile for, such as `sm_90`, or None where CUDA sources are refused.
      pause: sleeps while another builder is at it; may raise to break off.
      excess: asked now and then while a compiler runs whether the process that asked for the build takes too
        much of something; a text ends the build.
      roads: that builds may take, the plain one among them.
    """

    def __init__(
        self,
        *,
        store: ArtifactStore,
        zygote: Zygote,
        scratch: Path,
        arch: str | None = None,
        pause: Callable[[float], None] = time.sleep,
        excess: Callable[[], str | None] = lambda: None,
        roads: tuple[Road, ...] = ROADS,
    ):
        self._store, self._zygote, self._scratch, self._arch = store, zygote, scratch, arch
        self._pause, self._excess = pause, excess
        self.spent_s = 0.0
        """Time that compilers have worked for the requests so far, failed ones too; without one-time steps
        and waiting for others."""
        self._toolchain = find_toolchain()
        self._headers = Headers(store, self._toolchain, scratch, pause)
        self._lean_road, self._allowed = LeanRoad(store, self._toolchain, scratch, pause, self._headers), roads

    def build(self, request: ExtensionRequest, timeout_s: float) -> BuiltExtension:
        """The library of a request, from the store or built now; identical requests are built once.

        Args:
          timeout_s: for the compilers and the linker together.

        Raises:
          BuildFailed: the compiler or linker refused, ran out of memory, or CUDA has no place here; the text
            says so.
          JailTimeout: it took longer than `timeout_s`.
          BuildUnavailable: a compiler is missing, or there is no space on the disk.
          RequesterGrew: as `excess` said.
        """
        cuda = self._cuda(request)
        key = self.key(request)
        found = self._find(key)
        if found is None:
            try:
                with build_lock(self._store.root / "locks" / key[:3], 2 * timeout_s, self._pause):
                    found = self._find(key) or self._build(request, key, cuda, timeout_s)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise disk_full(self._store, self._scratch) from error
                raise
        return found

    def key(self, request: ExtensionRequest) -> str:
        """The content address of a request on this machine."""
        cuda = self._cuda(request)
        tools = [self._toolchain.identity, self._headers.identity, self._lean_road.identity, *self._allowed]
        if cuda is not None:
            tools += [cuda.identity, str(self._arch)]
        return request.key("extension 1", *tools)

    def _cuda(self, request: ExtensionRequest) -> Cuda | None:
        if not request.with_cuda:
            return None
        if self._arch is None:
            raise BuildFailed(refusal("cpu") or "")
        return find_cuda()

    def _find(self, key: str) -> BuiltExtension | None:
        meta, path = self._store.find(ArtifactStore.key("meta", key)), self._store.find(key)
        if meta is None or path is None:
            return None
        facts = json.loads(meta.read_text())
        return BuiltExtension(
            path=path,
            key=key,
            module=facts["module"],
            road=facts["road"],
            cached=True,
            seconds=0.0,
            kernels=tuple(
                OwnKernel(name=name, origin="cuda", registers=registers)
                for name, registers in facts["kernels"]
            ),
        )

    def _build(
        self, request: ExtensionRequest, key: str, cuda: Cuda | None, timeout_s: float
    ) -> BuiltExtension:
        module, before_s = request.module_name(key), self.spent_s
        for road, light in self._attempts(request):
            left_s = max(0.001, timeout_s - (self.spent_s - before_s))
            try:
                # The one-time step is nobody's build.
                way = self._way(road, light, request, cuda)
                library = None if way is None else self._compile(request, module, key, way, cuda, left_s)
            except BuildFailed as error:
                if road == "plain" or not self._next_may_differ(road, light, request, str(error)):
                    raise BuildFailed(first_errors(in_pytorchs_words(str(error)))) from None
                continue
            if library is not None:
                break
        kernels = kernels_in(library, self._zygote, self._scratch) if cuda is not None else ()
        self._publish_meta(key, module, road, kernels)
        self._store.prune_now_and_then(key)
        return BuiltExtension(
            path=library,
            key=key,
            module=module,
            road=road,
            cached=False,
            seconds=self.spent_s - before_s,
            kernels=kernels,
            slow_for=self._lean_road.problem or "",
        )

    def _roads(self, request: ExtensionRequest) -> list[Road]:
        """Those to be tried, the last one in any case able to build what can be built."""
        if not self._toolchain.fast_binding:
            return ["plain"]
        without = {road for road, has in (("lean", self._lean_road.takes(request)), ("fast", not request.needs_plain_road)) if not has}
        return [road for road in self._allowed if road not in without]

    def _attempts(self, request: ExtensionRequest) -> list[tuple[Road, bool]]:
        """The roads, each with whether its light form is meant; the lean one's light form comes before its whole one: without what the
        source seems not to need of the header, of CUB, or of both."""
        light = [("lean", True)] if is_light(request) or cub_parts(request.text) else []
        return [attempt for road in self._roads(request) for attempt in ([*light, (road, False)] if road == "lean" else [(road, False)])]

    def _way(self, road: Road, light: bool, request: ExtensionRequest, cuda: Cuda | None) -> Way | None:
        """What a road's compilers need; None for a road that this installation of PyTorch does not have."""
        if road == "lean":
            lean = self._lean_road.prepare(cuda, self._zygote)
            if lean is None:
                return None
            parts = cub_parts(request.text) if light else ()
            few = light and is_light(request)
            said = {
                "LEAN_CUDA": cuda, "LEAN_LIGHT": few, "LEAN_SHORT": few and has_short_floats(request),
                "LEAN_BINDS": request.binds_in_cuda, "CUB_PARTS": parts,
            }  # fmt: skip
            flags = ("-DSANDBOX_LEAN", *(f"-DSANDBOX_{name}" for name, is_so in said.items() if is_so), *(f"-D{macro(part)}" for part in parts))
            return Way(
                fast=True, include=lean.include, objects=lean.objects, flags=flags, stubs=lean.stubs, readable=(lean.include.parent,)
            )  # fmt: skip
        if road == "fast":
            include = self._headers.lean(request.cflags, self._zygote)
            return Way(fast=True, include=include, readable=(include,))
        return Way(fast=False)

    def _next_may_differ(self, road: Road, light: bool, request: ExtensionRequest, log: str) -> bool:
        """Whether an error may be one of this attempt alone. Of the light form any may, but for a name that PyTorch has nowhere: what
        PyTorch's headers bring along of others' is used without a word."""
        if road != "lean":
            return self._plain_may_differ(request, log)
        if hopeless(request, log):
            return False
        missing = missing_members(request, log)
        return self._headers.mentioned(missing, self._zygote) if missing else light or may_differ(request, log)

    def _plain_may_differ(self, request: ExtensionRequest, log: str) -> bool:
        errors = [line for line in log.splitlines() if "error:" in line]
        # Where the first error lies decides: the others may follow from it. A function that is not there, and a
        # brace that is not closed, show up in the binding only.
        in_binding = bool(errors) and _IN_BINDING.match(errors[0])
        missing = bool(errors) and "was not declared in this scope" in errors[0]
        own = missing or "expected '}' at end of input" in log
        if in_binding and not own or _WHOLE_HEADER_MAY_HELP.search(log):
            return True
        names = set(_MACRO.findall(request.text))
        for line in errors:
            names.update(name for quoted in _QUOTED.findall(line) for name in _NAME.findall(quoted))
        return self._headers.beyond(names, self._zygote)

    def _publish_meta(self, key: str, module: str, road: Road, kernels: tuple[OwnKernel, ...]) -> None:
        facts = {"module": module, "road": road, "kernels": [[k.name, k.registers] for k in kernels]}
        with tempfile.NamedTemporaryFile("w", dir=self._scratch) as file:
            file.write(json.dumps(facts))
            file.flush()
            self._store.publish(ArtifactStore.key("meta", key), Path(file.name))

    def _compile(
        self,
        request: ExtensionRequest,
        module: str,
        key: str,
        way: Way,
        cuda: Cuda | None,
        timeout_s: float,
    ) -> Path:
        """Compiles and links; returns the published library."""
        start = time.monotonic()
        directory = Path(tempfile.mkdtemp(prefix="build-", dir=self._scratch))
        try:
            for name, text in request.units(module, fast=way.fast).items():
                (directory / name).write_text(text, encoding="utf-8", errors="surrogatepass")
            script = self._script(request, module, way, cuda)
            memory_bytes = CUDA_MEMORY_BYTES if cuda else CPP_MEMORY_BYTES
            limits = Limits(memory_bytes=memory_bytes, file_bytes=FILE_BYTES)
            readable = [self._toolchain.libraries.parent, *self._toolchain.includes]
            readable += [*way.readable]
            readable += [cuda.home] if cuda else []
            process = self._zygote.execute(
                ["/bin/sh", "-c", script], limits, memory_bytes, directory, readable=readable
            )
            with process:
                grown: list[str] = []
                process.watch = lambda _pid: self._requester_grew(grown)
                try:
                    end = process.wait(timeout_s)
                except JailTimeout:
                    raise JailTimeout(f"the compiler was still busy after {timeout_s:.3g} s") from None
                except JailMemory as error:
                    if grown:
                        raise RequesterGrew(grown[0]) from error
                    raise BuildFailed(f"the compiler {error}") from error
                log = process.capture.text()
                if end.code == 0 and end.signal == 0:
                    try:
                        return self._store.publish(key, directory / f"{module}.so")
                    except OSError as error:
                        if error.errno in (errno.ENOENT, errno.EINVAL, errno.ELOOP):
                            raise BuildFailed("the linker left no library") from error
                        raise
                if "No space left on device" in log:
                    raise BuildUnavailable(str(disk_full(self._store, self._scratch)))
                raise BuildFailed(log.strip() or f"the compiler {end} without a message")
        finally:
            self.spent_s += time.monotonic() - start
            shutil.rmtree(directory, ignore_errors=True)

    def _requester_grew(self, grown: list[str]) -> str | None:
        excess = self._excess()
        if excess:
            grown.append(excess)
        return excess

    def _script(self, request: ExtensionRequest, module: str, way: Way, cuda: Cuda | None) -> str:
        """Shell commands: all compilers at once, then the linker."""
        compiler = self._toolchain.compiler.path
        name = f"-DTORCH_EXTENSION_NAME={module}"
        includes = [*way.flags, *([f"-I{way.include}"] if way.include else [])]
        includes += self._headers.include_flags()
        if cuda:
            includes += ["-isystem", str(cuda.home / "include")]
        lines, waits, logs, objects = [], [], [], []
        for number, unit in enumerate(request.compiled):
            target = f"{unit}.o"
            objects.append(target)
            if unit.endswith(CUDA_SUFFIXES):
                assert cuda is not None and self._arch is not None
                flags = compile_command(cuda, self._arch, compiler, request.cuda_flags)
                command = [*flags, name, *includes, "-c", unit, "-o", target]
            else:
                stream = host_flags(request.cuda_flags) if cuda else []
                command = [compiler, name, *BASE_FLAGS, *stream, *includes, *request.cflags]
                command += ["-fmax-errors=20", "-fdiagnostics-color=never", "-c", unit, "-o", target]
            lines.append(f"{shlex.join(command)} >{number}.log 2>&1 & p{number}=$!")
            waits.append(f"wait $p{number} || failed=1")
            logs.append(f"{number}.log")
        libraries = self._toolchain.links(*(name for name in LIBRARIES if cuda or "cuda" not in name), stubs=way.stubs)
        link = [
            compiler,
            *objects,
            *map(str, way.objects),
            "-shared",
            *request.ldflags,
            *libraries,
            *(link_flags(cuda) if cuda else []),
        ]
        link += ["-o", f"{module}.so"]
        return "\n".join(
            [
                "failed=0",
                *lines,
                *waits,
                f"cat {' '.join(logs)}",
                '[ "$failed" = 0 ] || exit 1',
                f"exec {shlex.join(link)}",
            ]
        )
