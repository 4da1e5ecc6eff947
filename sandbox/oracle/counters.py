"""Hardware counters of a candidate's kernels: one more call, in a process that Nsight Compute has started (`sandbox.jail.counted`).

Whether this host gives any is found out by counting a kernel of our own, once for a card, a driver and a start of the host; until then,
and where it gives none, nothing is judged that asks for them. What is counted is advice and changes no verdict.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch

from sandbox.jail.faults import JailError, ZygoteLost
from sandbox.jail.jailed import Runner
from sandbox.jail.plan import Level
from sandbox.jail.tensors import encode, pack
from sandbox.oracle.builds import Builds
from sandbox.oracle.card import CardFacts
from sandbox.oracle.draft import Draft, Job
from sandbox.oracle.failures import Failure
from sandbox.oracle.reference import Reference, TaskRejected
from sandbox.oracle.room import DeviceFull
from sandbox.profile.metrics import METRICS
from sandbox.profile.ncu import (
    ADVICE,
    MAX_LAUNCHES,
    NOT_ALLOWED,
    TOP_KERNELS,
    Launches,
    ReportError,
    complaint,
    counters_problem,
    find_ncu,
    function_name,
    read_report,
    unknown_metrics,
)
from sandbox.protocol import KernelCounters, KernelTime

TRY_S, TRY_MEMORY_BYTES = 120.0, 16 << 30
TRIED = """
import torch


class Tried(torch.nn.Module):
    def forward(self, x):
        return x + 1
"""
COUNT_SLOT = 1006
MAX_TEXT_CHARS = 400


class CountersUnavailable(RuntimeError):
    """This host gives no hardware counters; the text says why and what to do."""


class CountersFailed(RuntimeError):
    """A candidate's counters could not be had; the text says why."""


class Counting(Protocol):
    """What makes runners under Nsight Compute (`sandbox.oracle.loading.Loader`)."""

    card: CardFacts

    @property
    def level(self) -> Level: ...

    def counted_runner(self, device: str, memory_bytes: int, metrics: Sequence[str], kernels: Sequence[str] = (), *sources: str) -> Runner: ...

    def load(self, job: Job, reference: Reference, verdict: Draft, builds: Builds, *, make: Callable[[], Runner]) -> Runner: ...


class Counters:
    """Counts on the GPUs that one oracle judges on.

    Args:
      loader: makes the processes.
      alone: a device to itself: counting runs every kernel many times over.
    """

    def __init__(self, loader: Counting, alone: Callable[[str], AbstractContextManager[None]]):
        self._loader, self._alone = loader, alone
        self._metrics: dict[str, tuple[str, ...]] = {}
        self._problems: dict[str, str] = {}

    def check(self, device: str) -> tuple[str, ...]:
        """The counters that a device has.

        Raises:
          CountersUnavailable: none can be had; said again without another try until this process ends.
        """
        if device in self._problems:
            raise CountersUnavailable(self._problems[device])
        if device not in self._metrics:
            try:
                self._metrics[device] = self._found(device)
            except CountersUnavailable as error:
                self._problems[device] = str(error)
                raise
        return self._metrics[device]

    def _found(self, device: str) -> tuple[str, ...]:
        if device == "cpu":
            raise CountersUnavailable("hardware counters are a GPU's: ask for them on a task with device cuda:N")
        if problem := counters_problem(self._loader.level):
            raise CountersUnavailable(f"no hardware counters: {problem}")
        program = os.path.realpath(find_ncu() or "")
        what = ("counters 1", self._loader.level, program, str(os.stat(program).st_mtime_ns), *METRICS)
        facts = self._loader.card.found_once(device, what, lambda: {"metrics": try_out(self._loader, self._alone, device)})
        return tuple(name for name in METRICS if name in facts["metrics"])

    def count(self, job: Job, reference: Reference, kernels: Sequence[KernelTime]) -> list[KernelCounters]:
        """Counters of the heaviest kernels of one call, the heaviest first.

        Args:
          kernels: what a profile has shown of the call.

        Raises:
          CountersFailed. CountersUnavailable, ZygoteLost, Cancelled.
        """
        metrics, options = self.check(job.task.device), job.options
        # It may take as long for loading as for all: the profiler slows that too.
        patient = replace(job, options=options.model_copy(update={"load_s": options.ncu_s}))
        deadline = time.monotonic() + options.ncu_s
        sources = (job.candidate.source, job.task.reference)
        runner: Runner | None = None

        def left() -> float:
            return max(0.001, deadline - time.monotonic())

        def make() -> Runner:
            nonlocal runner
            runner = self._loader.counted_runner(job.task.device, options.memory_bytes, metrics, looked_at(kernels), *sources)
            return runner

        try:
            inputs = reference.inputs(secrets.randbits(40), COUNT_SLOT)
            builds = Builds(options.build_s)
            with self._loader.load(patient, reference, Draft(job), builds, make=make) as loaded:
                fields, buffers = loaded.carrier.give(inputs.tensors)
                loaded.call("set_inputs", left(), buffers, slot=0, args=inputs.args, **fields)
                with self._alone(job.task.device):
                    loaded.call("count", left(), slot=0)
                found = read_report(loaded.finish(left()))
        except ZygoteLost:
            raise
        except (JailError, Failure, TaskRejected, DeviceFull, ReportError) as error:
            said = complaint(runner.capture.text()) if runner is not None else ""
            raise CountersFailed("; ".join(dict.fromkeys(filter(None, (_line(error), said))))) from error
        return [reported(one, kernels) for one in found[:TOP_KERNELS]]


def try_out(loader: Counting, alone: Callable[[str], AbstractContextManager[None]], device: str) -> list[str]:
    """Counts a kernel of our own; returns the counters that this card's Nsight Compute knows.

    Raises:
      CountersUnavailable. ZygoteLost, Cancelled.
    """
    metrics, output = list(METRICS), ""
    for _ in range(2):
        try:
            output = _counted_once(loader, alone, device, metrics)
            read_report(output)
        except ZygoteLost:
            raise
        except JailError as error:
            raise CountersUnavailable(f"no hardware counters: ncu was tried, and failed: {_line(error)}") from error
        except ReportError as error:
            unknown = unknown_metrics(output, metrics)
            if unknown and len(unknown) < len(metrics):
                metrics = [name for name in metrics if name not in unknown]
                continue
            advice = f": {ADVICE}" if NOT_ALLOWED in output else ""
            raise CountersUnavailable(f"no hardware counters: ncu was tried, and says: {error}{advice}") from error
        return metrics
    raise CountersUnavailable(f"no hardware counters: ncu was tried, and knows too few of them: {complaint(output)}")


def _counted_once(loader: Counting, alone: Callable[[str], AbstractContextManager[None]], device: str, metrics: Sequence[str]) -> str:
    tensors: list[torch.Tensor] = []
    args = encode([torch.ones(1 << 20)], tensors)
    nothing = {"dtype": "float32", "language": "cuda", "seed": 0, "init": [], "tensors": []}
    with loader.counted_runner(device, TRY_MEMORY_BYTES, metrics) as runner:
        try:
            runner.call("load_module", TRY_S, source=TRIED, entry_point="Tried", device=device, **nothing)
            entries, buffers = pack(tensors)
            runner.call("set_inputs", TRY_S, buffers, slot=0, args=args, tensors=entries)
            with alone(device):
                runner.call("count", TRY_S, slot=0)
            return runner.finish(TRY_S)
        except ZygoteLost:
            raise
        except JailError:
            runner.capture.drain()
            if complaint(said := runner.capture.text()):
                return said
            raise


def looked_at(kernels: Sequence[KernelTime]) -> list[str]:
    """Names of the functions that alone are counted: the heaviest, where a call launches more than can be; else none, which is all."""
    if sum(kernel.launches for kernel in kernels) <= MAX_LAUNCHES:
        return []
    heaviest = sorted(kernels, key=lambda kernel: kernel.ms, reverse=True)
    names = dict.fromkeys(name for kernel in heaviest if (name := function_name(kernel.name)).isidentifier() and name.isascii())
    return list(names)[:TOP_KERNELS]


def reported(one: Launches, kernels: Sequence[KernelTime]) -> KernelCounters:
    """One kernel's counters as a result has them; whose it is, the profile tells by its name."""
    owners = {kernel.own for kernel in kernels if function_name(kernel.name) == one.kernel}
    means = one.means
    return KernelCounters(
        kernel=one.kernel, own=owners.pop() if len(owners) == 1 else None, launches=one.launches, metrics=means,
        units={name: one.units.get(name, "") for name in means},
    )  # fmt: skip


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_TEXT_CHARS]
