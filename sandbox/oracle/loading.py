"""From sources to runners: the zygotes of an oracle, references, and candidates built and loaded."""

from __future__ import annotations

import logging
import os
import secrets
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sandbox.build import BuildFailed, BuildUnavailable
from sandbox.build.artifacts import ArtifactStore, sealed_copy
from sandbox.build.cpp import build_kernel
from sandbox.build.launcher import build_launcher
from sandbox.build.roads import ExtensionBuilder, allowed_roads
from sandbox.build.triton import CompileReport
from sandbox.jail import counted
from sandbox.jail.arena import ArenaError
from sandbox.jail.carrier import ArenaCarrier
from sandbox.jail.faults import JailError, JailReply, JailTimeout, ZygoteLost
from sandbox.jail.jailed import Runner
from sandbox.jail.limits import Limits
from sandbox.jail.plan import Level
from sandbox.jail.spawn import Zygote
from sandbox.jail.tensors import pack
from sandbox.oracle.builds import Builds, device_arch, excess_of
from sandbox.oracle.card import CardFacts
from sandbox.oracle.draft import Draft, Job
from sandbox.oracle.failures import Failure, blamed_on_candidate
from sandbox.oracle.gpu import compile_for, device_watch, runner_environment
from sandbox.oracle.reference import Reference, TaskRejected
from sandbox.oracle.room import crowded
from sandbox.oracle.spares import Spares, Wanted, connections
from sandbox.oracle.turns import Turns
from sandbox.profile.ncu import OUTPUT_BYTES, arguments, find_ncu, installation
from sandbox.verdict import feedback

log = logging.getLogger("sandbox.oracle")
MAX_ARENA_BYTES, ARENA_SLACK_BYTES = 8 << 30, 1 << 20
ARENA_CALLS, USUAL_PART_BYTES, LEAST_PART_BYTES = 64, 256 << 20, 24 << 20
ARENA_S = 60.0
NCU_MEMORY_BYTES = 8 << 30
"""Of the host's, that Nsight Compute may take beside what it profiles: it puts what a kernel writes aside to run it again."""
COMPILE_SLOT = 1001
"""Slot of the inputs on which kernels are compiled ahead of time."""
ZYGOTE_MODULES = {
    "programs": [],
    "plain": ["torch"],
    "triton": ["torch", "triton"],
    "interpreter": ["torch", "triton"],
    "gpu": ["torch", "sandbox.jail.preload_cuda"],
}


class Loader:
    """Makes runners.

    Args:
      scratch: private directories of runners and builds are made here.
      store: built libraries.
      threads: OpenMP threads of every runner, the same for candidate and reference.
      interrupt: see `Zygote`; its function raises Cancelled.
      isolation: level of every jail; the best that this host offers if None.
      turns: how runners on a device take turns, None where they need none.
    """

    def __init__(
        self,
        *,
        scratch: Path,
        store: ArtifactStore,
        threads: int,
        interrupt: tuple[int, Callable[[], None]] | None,
        isolation: Level | None,
        turns: Callable[[str], Turns | None],
    ):
        self._scratch, self._store, self._threads = scratch, store, threads
        self._interrupt, self._isolation, self._turns = interrupt, isolation, turns
        self._zygotes: dict[str, Zygote] = {}
        self.card = CardFacts(store, scratch, lambda: self._zygote("gpu"))
        self._no_arenas = False
        self._spares = Spares(self._new_runner)

    def start(self, gpu: bool = False) -> None:
        """Starts what every evaluation needs (`gpu`: one on a GPU), so that the first one does not pay for it."""
        for flavour in ("plain", "programs", *(["gpu"] if gpu else [])):
            self._zygote(flavour)

    def close(self) -> None:
        """Ends all zygotes and what they have forked."""
        self._spares.forget()
        for zygote in self._zygotes.values():
            zygote.close()
        self._zygotes.clear()

    def _zygote(self, flavour: str) -> Zygote:
        """Zygotes differ in what they have imported: Triton decides at import whether it interprets."""
        if flavour not in self._zygotes:
            modules = ZYGOTE_MODULES[flavour]
            environment = {"TRITON_INTERPRET": "1"} if flavour == "interpreter" else {}
            self._zygotes[flavour] = Zygote(
                modules=modules,
                threads=self._threads,
                directory=self._scratch,
                environment=environment,
                interrupt=self._interrupt,
                level=self._isolation,
            )
        return self._zygotes[flavour]

    @staticmethod
    def _limits(device: str, memory_bytes: int) -> Limits:
        on_cpu = device == "cpu"
        return Limits(memory_bytes=memory_bytes if on_cpu else None, open_files=256 if on_cpu else 4096, gpu=not on_cpu)

    def reference(self, job: Job) -> Reference:
        """A new reference of the job's task, in a runner of its own."""
        options = job.options
        return Reference(
            job.task,
            self._runner(self._wanted_reference(job)),
            seed=secrets.randbits(40),
            load_s=options.load_s,
            check_s=options.check_s,
            share_memory=lambda runner, n_bytes: self._share_memory(runner, job.task.device, n_bytes, trusted=True),
        )

    def make_spare(self, job: Job, *, reference: bool = False) -> None:
        """Has a runner get ready for a candidate like that of `job`, and one for a `reference` like its own.

        Raises:
          ZygoteLost.
        """
        self._spares.prepare(self._wanted(job))
        if reference:
            self._spares.prepare(self._wanted_reference(job))

    def settle_spares(self) -> None:
        """Waits until the runners that get ready are. Raises ZygoteLost."""
        self._spares.settle()

    def give_up_spare(self) -> bool:
        """Ends a runner that is ready; False if there is none."""
        return self._spares.give_up()

    def _wanted(self, job: Job) -> Wanted:
        sources = (job.candidate.source, job.task.reference)
        return Wanted(_flavour(job), job.task.device, job.options.memory_bytes, self._env(job, *sources))

    def _wanted_reference(self, job: Job) -> Wanted:
        return Wanted("plain", job.task.device, job.options.memory_bytes, self._env(job, job.task.reference))

    def _runner(self, wanted: Wanted) -> Runner:
        """The runner that is ready, or a new one."""
        return self._spares.take(wanted) or self._new_runner(wanted)

    def _new_runner(self, wanted: Wanted) -> Runner:
        limits = self._limits(wanted.device, wanted.memory_bytes)
        runner = self._zygote(wanted.flavour).runner(limits, wanted.memory_bytes, env=wanted.environment)
        self._on_device(runner, wanted.device)
        return runner

    @property
    def level(self) -> Level:
        """Isolation of every jail."""
        return self._zygote("programs").level

    def counted_runner(self, device: str, memory_bytes: int, metrics: Sequence[str], kernels: Sequence[str] = (), *sources: str) -> Runner:
        """A runner that Nsight Compute starts, for whatever has these `sources` (see `sandbox.profile.ncu.arguments`).

        Raises:
          BuildUnavailable: the program is not there any more.
        """
        program = find_ncu()
        if program is None:
            raise BuildUnavailable("Nsight Compute's program ncu is not there any more: install it again")
        runner = self._zygote("programs").runner_under(
            counted.command(program, arguments(metrics, kernels)),
            self._limits(device, memory_bytes),
            memory_bytes + NCU_MEMORY_BYTES,
            env={} if device == "cpu" else runner_environment() | connections(*sources),
            readable=installation(program),
            kept_bytes=OUTPUT_BYTES,
        )
        self._on_device(runner, device)
        return runner

    def _on_device(self, runner: Runner, device: str) -> None:
        """What holds for a runner on a GPU."""
        if device != "cpu":
            runner.watch, runner.turns = device_watch(device), self._turns(device)
            runner.excuse = lambda supervisor: crowded(device, supervisor)

    def _share_memory(self, runner: Runner, device: str, n_bytes: int, *, trusted: bool) -> None:
        """Gives a runner on a GPU an arena for `n_bytes` each way; once this host refuses that, all goes through the host.

        Whether it does is for the driver or a runner of ours to say (`trusted`). Where the reference has an arena, a candidate
        that can't open its own has seen to that.

        Raises:
          JailError: the runner is gone, or a candidate's refuses.
        """
        if device == "cpu" or self._no_arenas or 4 * n_bytes > MAX_ARENA_BYTES:
            return
        # Room for several calls at once (`sandbox.oracle.fresh_gpu`), where they are not too large.
        part_bytes = max(n_bytes, min(ARENA_CALLS * n_bytes, USUAL_PART_BYTES), LEAST_PART_BYTES)
        try:
            carrier, fd = ArenaCarrier.create(torch.device(device).index, 4 * part_bytes + ARENA_SLACK_BYTES)
        except (ArenaError, RuntimeError) as error:
            self._refused(device, error)
            return
        try:
            runner.call("open_arena", ARENA_S, fds=[fd], bytes=carrier.bytes)
        except JailReply as error:
            carrier.close()
            if not trusted:
                raise
            self._refused(device, error)
        except BaseException:
            carrier.close()
            raise
        else:
            runner.carrier = carrier
        finally:
            os.close(fd)

    def _refused(self, device: str, error: Exception) -> None:
        self._no_arenas = True
        log.warning("tensors on %s go through the host, which is slower: %s", device, error)

    @staticmethod
    def _env(job: Job, *sources: str) -> dict[str, str]:
        return {} if job.task.device == "cpu" else runner_environment() | connections(*sources)

    def _builder(self, job: Job, runner: Runner) -> ExtensionBuilder:
        """Builds what the candidate in `runner` asks for."""
        return ExtensionBuilder(
            store=self._store,
            zygote=self._zygote("programs"),
            scratch=self._scratch,
            arch=device_arch(job.task.device),
            pause=self._pause,
            excess=lambda: excess_of(runner),
            roads=allowed_roads(),
        )

    def _pause(self, seconds: float) -> None:
        """Sleeps, unless the broker speaks."""
        if self._interrupt is None:
            time.sleep(seconds)
        elif select.select([self._interrupt[0]], [], [], seconds)[0]:
            self._interrupt[1]()

    def load(
        self,
        job: Job,
        reference: Reference,
        verdict: Draft,
        builds: Builds,
        *,
        on_built: Callable[[], None] = lambda: None,
        on_runner: Callable[[], None] = lambda: None,
        make: Callable[[], Runner] | None = None,
    ) -> Runner:
        """A runner that has loaded the candidate; `on_built` is called once a bare kernel's library is there, `on_runner` once a module's
        runner is, before it loads.

        Args:
          make: makes the runner of a module; one that is not the usual shares no memory of the device.

        Raises:
          Failure: it does not build or load. TaskRejected: the task has no bare kernel form.
        """
        candidate, options = job.candidate, job.options
        if candidate.form == "kernel":
            if reference.signature is None:
                raise TaskRejected(f"the task has no bare kernel form: {reference.signature_error}")
            verdict.kernel_signature = reference.signature.declaration
            with verdict.measured("build"):
                library = self._build_kernel(job, reference)
                builds.book_library(library)
            on_built()
            try:
                with verdict.measured("load"):
                    runner = self._zygote("plain").runner(
                        self._limits(job.task.device, options.memory_bytes), options.memory_bytes, files=[library]
                    )
            finally:
                os.close(library)
            entries, buffers = pack(reference.state)
            order = {
                "command": "load_kernel",
                "timeout_s": options.load_s,
                "device": job.task.device,
                "dtype": job.task.dtype,
                "outputs": reference.outputs,
                "is_tuple": reference.is_tuple,
            }
        else:
            with verdict.measured("load"):
                runner = make() if make else self._runner(self._wanted(job))
            try:
                on_runner()
            except BaseException:
                runner.close()
                raise
            launcher = None if job.task.device == "cpu" else self._build_launcher
            runner.serve = builds.served_to(lambda: self._builder(job, runner), launcher)
            entries, buffers = pack(reference.init_tensors)
            order = {
                "command": "load_module",
                "timeout_s": options.load_s,
                "source": candidate.source,
                "entry_point": candidate.entry_point,
                "dtype": job.task.dtype,
                "device": job.task.device,
                "language": candidate.language,
                "seed": reference.seed,
                "init": reference.init,
            }
        try:
            blamed = blamed_on_candidate(runner, "loading", order["timeout_s"], options.memory_bytes)
            with verdict.measured("load"), blamed:
                reply = runner.call(buffers=buffers, tensors=entries, **order).header
                if make is None:
                    self._share_memory(runner, job.task.device, reference.traffic_bytes, trusted=False)
        except BaseException:
            runner.close()
            raise
        finally:
            builds.book(verdict, "load")
        if not reply.get("honest_clock", False):
            verdict.untimed = "speed is not measured in Triton's interpreter"
        return runner

    def compile_ahead(self, job: Job, reference: Reference, verdict: Draft) -> None:
        """Notes whether the candidate's Triton kernels compile for `target_arch`, in a runner of its own."""
        candidate, options = job.candidate, job.options
        if options.target_arch is None or candidate.language != "triton":
            return
        inputs = reference.inputs(secrets.randbits(40), COMPILE_SLOT)
        limits = Limits(memory_bytes=options.memory_bytes)
        with (
            verdict.measured("compile"),
            self._zygote("triton").runner(limits, options.memory_bytes) as runner,
        ):
            entries, buffers = pack(reference.init_tensors)
            try:
                runner.call(
                    "load_module",
                    options.load_s,
                    buffers,
                    source=candidate.source,
                    entry_point=candidate.entry_point,
                    dtype=job.task.dtype,
                    device=f"aot:{options.target_arch}",
                    language="triton",
                    seed=reference.seed,
                    init=reference.init,
                    tensors=entries,
                )
                fields, buffers = runner.carrier.give(inputs.tensors)
                runner.call("set_inputs", options.load_s, buffers, slot=0, args=inputs.args, **fields)
            except ZygoteLost:
                raise
            except JailError as error:
                report = CompileReport(arch=options.target_arch, builds=(), stopped=str(error)[:500])
            else:
                report = compile_for(runner.call, 0, options.build_s, options.target_arch)
        verdict.compiled = feedback.failed(*report.summary_parts())
        verdict.notes.append(verdict.compiled)

    def _build_launcher(self, source: str, timeout_s: float) -> Path:
        """One of Triton's launchers. Raises as `build_launcher`."""
        zygote = self._zygote("programs")
        return build_launcher(source, store=self._store, zygote=zygote, scratch=self._scratch, timeout_s=timeout_s)[0]

    def _build_kernel(self, job: Job, reference: Reference) -> int:
        """Builds and opens the library; returns a descriptor of a sealed copy that no one can change."""
        try:
            artifact = build_kernel(
                job.candidate.source,
                reference.signature,
                store=self._store,
                zygote=self._zygote("programs"),
                scratch=self._scratch,
                timeout_s=job.options.build_s,
            )
        except BuildFailed as error:
            raise Failure("build_failed", feedback.build_failed(str(error))) from error
        except JailTimeout as error:
            raise Failure("timeout", f"building took too long: {error}") from error
        return sealed_copy(artifact.path)


def _flavour(job: Job) -> str:
    if job.task.device != "cpu":
        return "gpu"
    return "interpreter" if job.candidate.language == "triton" else "plain"
