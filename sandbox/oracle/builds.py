"""Serves the extensions that a candidate asks for while it loads (`load_inline`), within bounds.

A request is untrusted data: it is parsed by `sandbox.build.extension`, built in a compile jail by
`sandbox.build.roads`, and answered with a sealed copy of the library. What the device code of the libraries
defines is the evidence of the candidate's own CUDA kernels.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandbox.build import BuildFailed, BuildUnavailable
from sandbox.build.artifacts import sealed_copy
from sandbox.build.extension import RequestRefused, parse_request, shown
from sandbox.build.launcher import MAX_SOURCE_CHARS
from sandbox.build.roads import BuiltExtension, ExtensionBuilder, RequesterGrew
from sandbox.jail import nvml
from sandbox.jail.device_cuda import physical_index
from sandbox.jail.faults import JailTimeout
from sandbox.jail.jailed import Runner
from sandbox.jail.processes import jail_bytes
from sandbox.oracle.draft import Draft
from sandbox.oracle.failures import Failure
from sandbox.protocol import Build
from sandbox.verdict.coverage import OwnKernel

MAX_REQUESTS = 16
MAX_LAUNCHERS, LAUNCHER_S = 64, 30.0
MAX_MESSAGE_CHARS = 3500

Answer = tuple[dict[str, Any], list[int]]
"""Header and descriptors of a reply to the runner."""


class Builds:
    """The extensions of one evaluation.

    Args:
      build_s: for all builds of the evaluation together.
    """

    def __init__(self, build_s: float):
        self._build_s = build_s
        self._make_builder: Callable[[], ExtensionBuilder] | None = None
        self._launcher: Callable[[str, float], Path] | None = None
        self._builder: ExtensionBuilder | None = None
        self._requests = self._launchers = 0
        self._closed = False
        self._taken_s = self._booked_s = 0.0
        self._built: list[BuiltExtension] = []
        self._notes: list[str] = []
        self._reports: list[Build] = []
        self.libraries: set[tuple[int, int]] = set()
        """(Device, inode) of the sealed libraries that were handed out, a bare kernel's among them: no file of the candidate's
        has the same."""

    @property
    def kernels(self) -> tuple[OwnKernel, ...]:
        """CUDA kernels in the libraries that were handed out."""
        return tuple(dict.fromkeys(kernel for built in self._built for kernel in built.kernels))

    def served_to(
        self, make_builder: Callable[[], ExtensionBuilder], launcher: Callable[[str, float], Path] | None = None
    ) -> Callable[[dict[str, Any]], Answer]:
        """The function that answers a runner.

        Args:
          make_builder: called at the first request for an extension.
          launcher: builds one of Triton's launchers from its source within so many seconds; none is served without.
        """
        self._make_builder, self._launcher = make_builder, launcher
        return self._serve

    def close(self) -> None:
        """Serves nothing from now on: what is timed has been built."""
        self._closed = True

    def _serve(self, message: dict[str, Any]) -> Answer:
        """Answers a runner's request; a refusal or a compiler's error is an answer too.

        Raises:
          Failure: the time for building is over, or the candidate's process grew too large meanwhile.
          BuildUnavailable, ZygoteLost, Cancelled: see there.
        """
        if message.get("request") == "launcher":
            return self._serve_launcher(message.get("source"))
        if message.get("request") != "extension":
            return {"error": "there is no such service"}, []
        if self._closed:
            return {"error": "extensions are built while the module loads and is checked, not later"}, []
        self._requests += 1
        if self._requests > MAX_REQUESTS:
            return {"error": f"a candidate may build {MAX_REQUESTS} extensions"}, []
        start, name = time.monotonic(), shown(message.get("name"))
        try:
            built = self._build(message)
        except (RequestRefused, BuildFailed, Failure) as error:
            self._notes.append(f"extension '{name}': not built")
            self._reports.append(Build(name=name, road=None, seconds=time.monotonic() - start))
            if isinstance(error, Failure):
                raise
            return {"error": str(error)[:MAX_MESSAGE_CHARS]}, []
        finally:
            self._taken_s += time.monotonic() - start
        self._built.append(built)
        how = "found in the cache, built" if built.cached else f"built in {built.seconds:.1f} s"
        slow = f" (the lean one cannot be used on this machine: {built.slow_for})" if built.slow_for else ""
        self._notes.append(f"extension '{name}': {how} by the {built.road} road{slow}")
        self._reports.append(Build(name=name, road=built.road, cached=built.cached, seconds=time.monotonic() - start))
        library = sealed_copy(built.path)
        self.book_library(library)
        return {"module": built.module}, [library]

    def _serve_launcher(self, source: Any) -> Answer:
        """Answers a request for one of Triton's launchers; where none can be built Triton does it itself. Raises ZygoteLost, Cancelled."""
        self._launchers += 1
        left_s = self._build_s - self._taken_s
        served = self._launcher is not None and not self._closed and self._launchers <= MAX_LAUNCHERS and left_s > 0
        if not served or not isinstance(source, str) or len(source) > MAX_SOURCE_CHARS:
            return {"error": "no launcher is built for this process now"}, []
        start = time.monotonic()
        try:
            library = sealed_copy(self._launcher(source, min(LAUNCHER_S, left_s)))
        except (BuildFailed, BuildUnavailable, JailTimeout) as error:
            return {"error": str(error)[:MAX_MESSAGE_CHARS]}, []
        finally:
            self._taken_s += time.monotonic() - start
        return {}, [library]

    def book_library(self, library: int) -> None:
        """Counts a sealed library (descriptor) that is handed to the candidate as its own."""
        status = os.fstat(library)
        self.libraries.add((status.st_dev, status.st_ino))

    def _build(self, message: dict[str, Any]) -> BuiltExtension:
        request = parse_request(message)
        if self._builder is None:
            assert self._make_builder is not None
            self._builder = self._make_builder()
        try:
            return self._builder.build(request, max(0.001, self._build_s - self._builder.spent_s))
        except JailTimeout as error:
            raise Failure(
                "timeout", f"building took too long, {self._build_s:g} s are allowed: {error}"
            ) from error
        except RequesterGrew as error:
            raise Failure("out_of_memory", f"while its extension was built the candidate {error}") from error

    def book(self, verdict: Draft, stage: str) -> None:
        """Books the time spent here since the last call as building instead of `stage`, and what there is to
        tell."""
        verdict.notes += self._notes
        verdict.builds += self._reports
        self._notes, self._reports = [], []
        spent_s = self._taken_s - self._booked_s
        if spent_s:
            self._booked_s = self._taken_s
            verdict.stage_s["build"] = round(verdict.stage_s.get("build", 0.0) + spent_s, 6)
            verdict.stage_s[stage] = round(max(0.0, verdict.stage_s.get(stage, 0.0) - spent_s), 6)


def excess_of(runner: Runner) -> str | None:
    """What a runner takes too much of, while nobody waits for it and so nobody watches it; None if
    nothing."""
    used_bytes = jail_bytes(runner.pid, runner.memory_bytes)
    if used_bytes > runner.memory_bytes:
        return f"used {used_bytes >> 20} MiB, {runner.memory_bytes >> 20} MiB are allowed"
    return runner.watch(runner.pid) if runner.watch else None


def device_arch(device: str) -> str | None:
    """The architecture of a task's GPU, such as `sm_90`, or None for the CPU."""
    return None if device == "cpu" else nvml.gpu(physical_index(device)).arch
