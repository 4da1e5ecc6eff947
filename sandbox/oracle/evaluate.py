"""One evaluation from source to verdict: reference, build, load, trials, timing, late checks.

    judge = Judge(...)
    result = judge.evaluate(job)         # always a result; only ZygoteLost and Cancelled leave as exceptions

The order of a trial matters: inputs come from the reference's runner, the candidate's outputs are taken in first, and only then is the
reference run for the expected values. After the timing the outputs of one timed call are checked, and the candidate
is run once more on inputs that were changed in place in the buffers it already knows.
"""

from __future__ import annotations

import fcntl
import logging
import os
import random
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sandbox.build import BuildFailed, BuildUnavailable
from sandbox.build.artifacts import ArtifactStore
from sandbox.build.cpp import build_kernel
from sandbox.jail.limits import Limits
from sandbox.jail.spawn import JailDied, JailMemory, JailReply, JailTimeout, Runner, Zygote, ZygoteLost
from sandbox.jail.tensors import pack
from sandbox.oracle.admission import admission_problem
from sandbox.oracle.clock import PLANS, Side, measure
from sandbox.oracle.reference import Inputs, Outputs, Reference, References, TaskRejected, overwrite, read_outputs
from sandbox.protocol import (
    Candidate,
    EvaluationResult,
    Finding,
    KernelTime,
    Options,
    Outcome,
    Reward,
    Stage,
    TaskSpec,
    Timing,
    Trial,
)
from sandbox.verdict import feedback
from sandbox.verdict.correctness import Tolerance, compare
from sandbox.verdict.reward import reward

log = logging.getLogger(__name__)
TIMED_SLOTS = 3
MANY_BYTES = 256 << 20
"""Inputs larger than this are held once, not once a slot."""


class Cancelled(Exception):
    """The broker no longer wants this evaluation."""


class Failure(Exception):
    """The evaluation ends here with `outcome`."""

    def __init__(self, outcome: Outcome, text: str, finding: Finding | None = None):
        super().__init__(text)
        self.outcome, self.text, self.finding = outcome, text, finding


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the broker hands to an oracle."""

    id: str
    task: TaskSpec
    candidate: Candidate
    options: Options


class Gate:
    """Who may use a resource ("cpu", "cuda:0") when: `shared` for ordinary work, `exclusive` for timing.

    The broker decides; this base class lets everything pass, as is right where there is one evaluation at a time.
    """

    @contextmanager
    def shared(self, resource: str) -> Iterator[None]:
        yield

    @contextmanager
    def exclusive(self, resource: str) -> Iterator[None]:
        yield


@dataclass
class _Verdict:
    """The result in the making."""

    job: Job
    stage: Stage = "queued"
    trials: list[Trial] = field(default_factory=list)
    timing: Timing | None = None
    coverage: float | None = None
    speed_rewarded: bool = True
    kernels: list[KernelTime] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stage_s: dict[str, float] = field(default_factory=dict)
    kernel_signature: str | None = None
    untimed: str = ""

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.stage_s[name] = round(self.stage_s.get(name, 0.0) + time.monotonic() - start, 6)

    def result(self, outcome: Outcome, text: str) -> EvaluationResult:
        options = self.job.options
        earned = reward(
            options.reward, correct=outcome == "ok", coverage=self.coverage,
            speedup=self.timing.speedup if self.timing and self.speed_rewarded else None,
        ) if outcome != "infra_error" else Reward()  # fmt: skip
        return EvaluationResult(
            id=self.job.id, state="done", stage=self.stage, outcome=outcome, language=self.job.candidate.language,
            trials=self.trials, timing=self.timing, coverage=self.coverage, kernels=self.kernels,
            integrity=self.findings, reward=earned, feedback=text, notes=self.notes,
            kernel_signature=self.kernel_signature, stage_s=self.stage_s, attempts=1,
        )  # fmt: skip


class Judge:
    """Evaluates candidates one after another; holds the zygotes and the warm references.

    Args:
      scratch: private directories of runners and builds are made here.
      store: built libraries.
      threads: OpenMP threads of every runner, the same for candidate and reference.
      interrupt: see `Zygote`; its function raises Cancelled.
      gate: access to the devices.
      on_stage: told of each stage reached.
      warm_references: how many references are kept running.
    """

    def __init__(
        self, *, scratch: Path, store: ArtifactStore, threads: int, gate: Gate | None = None,
        interrupt: tuple[int, Callable[[], None]] | None = None, on_stage: Callable[[str, Stage], None] | None = None,
        warm_references: int = 6,
    ):  # fmt: skip
        self._scratch, self._store, self._threads = scratch, store, threads
        self._gate = gate or Gate()
        self._interrupt = interrupt
        self._on_stage = on_stage or (lambda _id, _stage: None)
        self._zygotes: dict[str, Zygote] = {}
        self._references = References(warm_references)

    def start(self) -> None:
        """Starts what every evaluation needs, so that the first one does not pay for it."""
        self._zygote("plain")

    def close(self) -> None:
        """Ends all runners and zygotes."""
        self._references.close()
        for zygote in self._zygotes.values():
            zygote.close()
        self._zygotes.clear()

    def evaluate(self, job: Job) -> EvaluationResult:
        """The verdict on one candidate.

        Raises:
          Cancelled: on the broker's order. ZygoteLost: this oracle must be replaced.
        """
        verdict = _Verdict(job)
        try:
            self._evaluate(job, verdict)
        except Failure as failure:
            if failure.finding:
                verdict.findings.append(failure.finding)
            return verdict.result(failure.outcome, failure.text)
        except TaskRejected as error:
            return verdict.result("task_rejected", feedback.failed("the task is not usable", str(error)))
        except BuildUnavailable as error:
            return verdict.result("infra_error", str(error))
        except OSError as error:
            return verdict.result("infra_error", f"the judge's own input or output failed: {error}")
        return verdict.result("ok", feedback.correct(verdict.timing, verdict.coverage, verdict.untimed))

    def _evaluate(self, job: Job, verdict: _Verdict) -> None:
        device, options = job.task.device, job.options
        with self._gate.shared("cpu" if job.candidate.form == "kernel" else device):
            with verdict.measured("reference"):
                reference = self._reference(job)
            try:
                if options.admit:
                    with verdict.measured("admission"):
                        problem = admission_problem(reference, secrets.randbits(40))
                    if problem:
                        raise TaskRejected(problem)
                candidate = self._load(job, reference, verdict)
            except Failure:
                raise
            except BaseException:
                self._references.discard(reference)
                raise
            try:
                self._reached(verdict, "loaded")
                trial = _Trials(job, reference, candidate, verdict)
                with verdict.measured("check"):
                    trial.run()
                self._reached(verdict, "correct")
            except BaseException as error:
                self._end(candidate, reference, error)
                raise
        failed: BaseException | None = None
        try:
            self._time(job, reference, candidate, trial, verdict)
        except BaseException as error:
            failed = error
            raise
        finally:
            self._end(candidate, reference, failed)

    def _end(self, candidate: Runner, reference: Reference, error: BaseException | None) -> None:
        """Closes the candidate; a reference that may be in the middle of an order goes too."""
        if error is not None and not isinstance(error, Failure):
            self._references.discard(reference)
        candidate.close()

    def _reached(self, verdict: _Verdict, stage: Stage) -> None:
        verdict.stage = stage
        self._on_stage(verdict.job.id, stage)

    def _zygote(self, flavour: str) -> Zygote:
        """Zygotes differ in what they have imported: Triton decides at import whether it interprets."""
        if flavour not in self._zygotes:
            modules = {"plain": ["torch"], "triton": ["torch", "triton"], "interpreter": ["torch", "triton"]}[flavour]
            environment = {"TRITON_INTERPRET": "1"} if flavour == "interpreter" else {}
            self._zygotes[flavour] = Zygote(
                modules=modules, threads=self._threads, directory=self._scratch, environment=environment,
                interrupt=self._interrupt,
            )  # fmt: skip
        return self._zygotes[flavour]

    def _limits(self, job: Job) -> Limits:
        on_cpu = job.task.device == "cpu"
        return Limits(memory_bytes=job.options.memory_bytes if on_cpu else None, open_files=256 if on_cpu else 4096)

    def _reference(self, job: Job) -> Reference:
        options = job.options

        def make() -> Reference:
            runner = self._zygote("plain").runner(self._limits(job), options.memory_bytes, env=self._env(job))
            return Reference(
                job.task, runner, seed=secrets.randbits(40), load_s=options.load_s, check_s=options.check_s
            )

        return self._references.get(job.task, make)

    def _env(self, job: Job) -> dict[str, str]:
        return {} if job.task.device == "cpu" else {"SANDBOX_CACHE": str(self._store.root)}

    def _load(self, job: Job, reference: Reference, verdict: _Verdict) -> Runner:
        candidate, options = job.candidate, job.options
        if candidate.form == "kernel":
            if reference.signature is None:
                raise TaskRejected(f"the task has no bare kernel form: {reference.signature_error}")
            verdict.kernel_signature = reference.signature.declaration
            with verdict.measured("build"):
                library = self._build_kernel(job, reference)
            self._reached(verdict, "built")
            try:
                with verdict.measured("load"):
                    runner = self._zygote("plain").runner(self._limits(job), options.memory_bytes, files=[library])
            finally:
                os.close(library)
            entries, buffers = pack(reference.state)
            order = {
                "command": "load_kernel", "timeout_s": options.load_s, "device": job.task.device,
                "dtype": job.task.dtype, "outputs": reference.outputs, "is_tuple": reference.is_tuple,
            }  # fmt: skip
        else:
            with verdict.measured("load"):
                zygote = self._zygote(_flavour(job))
                runner = zygote.runner(self._limits(job), options.memory_bytes, env=self._env(job))
            entries, buffers = pack(reference.init_tensors)
            # The module builds while it loads.
            order = {
                "command": "load_module", "timeout_s": options.load_s + options.build_s, "source": candidate.source,
                "entry_point": candidate.entry_point, "dtype": job.task.dtype, "device": job.task.device,
                "language": candidate.language, "seed": reference.seed, "init": reference.init,
            }  # fmt: skip
        try:
            blamed = blamed_on_candidate(runner, "loading", order["timeout_s"], options.memory_bytes)
            with verdict.measured("load"), blamed:
                reply = runner.call(buffers=buffers, tensors=entries, **order).header
        except BaseException:
            runner.close()
            raise
        if not reply.get("honest_clock", False):
            verdict.untimed = "speed is not measured in Triton's interpreter"
        return runner

    def _build_kernel(self, job: Job, reference: Reference) -> int:
        """Builds and opens the library; returns a descriptor of a sealed copy that no one can change."""
        try:
            artifact = build_kernel(
                job.candidate.source, reference.signature, store=self._store, zygote=self._zygote("plain"),
                scratch=self._scratch, timeout_s=job.options.build_s,
            )  # fmt: skip
        except BuildFailed as error:
            raise Failure("build_failed", feedback.build_failed(str(error))) from error
        except JailTimeout as error:
            raise Failure("timeout", f"building took too long: {error}") from error
        return sealed_copy(artifact.path)

    def _time(self, job: Job, reference: Reference, candidate: Runner, trial: _Trials, verdict: _Verdict) -> None:
        options = job.options
        if job.candidate.language == "cpp" and job.task.device == "cpu":
            verdict.coverage = 1.0
        if options.timing == "none" or verdict.untimed:
            verdict.untimed = verdict.untimed or "speed was not measured"
            return
        waited = time.monotonic()
        with self._gate.exclusive(job.task.device):
            verdict.stage_s["gate"] = round(time.monotonic() - waited, 6)
            deadline = time.monotonic() + options.time_s

            def left() -> float:
                return max(0.001, deadline - time.monotonic())

            with verdict.measured("time"):
                sides = {
                    name: Side(order=reference.order, slots=trial.slots, deadline=left, which=name)
                    for name in options.baselines
                }
                with blamed_on_candidate(candidate, "timing", options.time_s, options.memory_bytes):
                    side = Side(order=candidate.call, slots=trial.slots, deadline=left)
                    verdict.timing = measure(
                        side, sides, PLANS[options.timing], random.Random(secrets.randbits(64)),
                        use_slope=job.task.device != "cpu",
                    )  # fmt: skip
                trial.check_kept(side.slots[side.kept % len(side.slots)])
                trial.check_changed_inputs()
            # Still alone: the end of a process would disturb the next measurement.
            candidate.close()
        self._reached(verdict, "timed")


class _Trials:
    """The correctness checks of one evaluation, before and after timing."""

    def __init__(self, job: Job, reference: Reference, candidate: Runner, verdict: _Verdict):
        self._job, self._reference, self._candidate, self._verdict = job, reference, candidate, verdict
        self._tolerance = Tolerance(atol=job.task.atol, rtol=job.task.rtol)
        self._inputs: dict[int, Inputs] = {}
        self._expected: dict[int, Outputs] = {}
        self._seed = secrets.randbits(40)

    @property
    def slots(self) -> list[int]:
        """Input slots that hold checked inputs."""
        return sorted(self._inputs)

    def run(self) -> None:
        """All trials on fresh inputs. Raises Failure at the first that fails."""
        options = self._job.options
        deadline = time.monotonic() + options.check_s
        n_slots = TIMED_SLOTS
        for number in range(options.correctness_trials):
            slot = number % n_slots
            inputs = self._reference.inputs(secrets.randbits(40), slot)
            if inputs.bytes > MANY_BYTES:
                n_slots = 1
            entries, buffers = pack(inputs.tensors)
            with self._blamed("running", options.check_s):
                self._candidate.call(
                    "set_inputs", max(0.001, deadline - time.monotonic()), buffers, slot=slot, args=inputs.args,
                    tensors=entries,
                )  # fmt: skip
                got = self._call("run", max(0.001, deadline - time.monotonic()), slot=slot, seed=self._seed, check=True)
            expected = self._reference.run(slot, self._seed)
            trial = self._judge(expected, got)
            self._verdict.trials.append(trial)
            if not trial.ok:
                raise Failure("incorrect", feedback.incorrect(trial.reason, number, options.correctness_trials))
            self._inputs[slot], self._expected[slot] = inputs, expected

    def check_kept(self, slot: int) -> None:
        """Checks the outputs of one timed call, chosen by the oracle. Raises Failure."""
        with self._blamed("timing", self._job.options.check_s):
            got = self._call("kept", self._job.options.check_s)
        trial = compare(self._expected[slot].tensors, got.tensors, self._tolerance)
        if not trial.ok and not self._reference.changes:
            self._fail_late("a timed call returned something else than the checked calls", trial, got, slot)

    def check_changed_inputs(self) -> None:
        """Changes a row of each input in place, in both runners, and compares once more. Raises Failure."""
        if self._reference.changes:
            return
        rng = random.Random(secrets.randbits(64))
        slot = self.slots[0]
        with self._blamed("running", self._job.options.check_s):
            for number, tensor in enumerate(self._inputs[slot].tensors):
                if tensor.dim() == 0 or tensor.shape[0] < 2 or tensor.numel() == 0:
                    continue
                # A row takes the place of another: whatever made the values valid holds for the copy too.
                source, target = rng.sample(range(tensor.shape[0]), 2)
                rows = tensor[source : source + 1]
                self._reference.overwrite(slot, number, target, rows)
                overwrite(self._candidate, self._job.options.check_s, slot, number, target, rows)
            got = self._call("run", self._job.options.check_s, slot=slot, seed=self._seed, check=False)
        expected = self._reference.run(slot, self._seed)
        trial = compare(expected.tensors, got.tensors, self._tolerance)
        if not trial.ok:
            self._fail_late("after its inputs changed in place the candidate is wrong", trial, got, slot)

    def _fail_late(self, what: str, trial: Trial, got: Outputs, slot: int) -> None:
        """A wrong result after timing is a replayed one if it equals what another call had to return."""
        self._verdict.timing = None
        for known, expected in self._expected.items():
            if compare(expected.tensors, got.tensors, self._tolerance).ok:
                evidence = f"{what}: it equals the output of an earlier call (input set {known})"
                raise Failure("integrity", f"replayed output: {evidence}", Finding(rule="replayed_output", evidence=evidence))
        self._verdict.trials.append(trial)
        raise Failure("incorrect", f"wrong result: {what}: {trial.reason}")

    def _judge(self, expected: Outputs, got: Outputs) -> Trial:
        trial = compare(expected.tensors, got.tensors, self._tolerance)
        if not trial.ok:
            return trial
        changed = got.changed - self._reference.changes
        if changed:
            return Trial(ok=False, reason=f"it changes its input {min(changed)}, the reference does not")
        aliased = got.aliased - self._reference.aliases
        if aliased:
            return Trial(ok=False, reason=f"it returns its input {min(aliased)} instead of a new tensor")
        return trial

    def _call(self, command: str, timeout_s: float, **order) -> Outputs:
        limit = self._reference.max_output_bytes
        message = self._candidate.call(command, timeout_s, max_bytes=limit, reply_bytes=limit + (1 << 20), **order)
        if message.header.get("too_large"):
            shapes = str(message.header.get("shapes"))[:200]
            raise Failure("incorrect", feedback.failed("wrong result: the outputs are far too large, shapes", shapes))
        try:
            return read_outputs(message)
        except (ValueError, TypeError, AttributeError) as error:
            raise Failure("runtime_error", f"the process sent a malformed reply ({error})") from error

    def _blamed(self, doing: str, limit_s: float):
        return blamed_on_candidate(self._candidate, doing, limit_s, self._job.options.memory_bytes)


@contextmanager
def blamed_on_candidate(runner: Runner, doing: str, limit_s: float, memory_bytes: int) -> Iterator[None]:
    """Turns what goes wrong with the candidate's process into a `Failure` with the right outcome."""
    try:
        yield
    except ZygoteLost:
        raise
    except JailTimeout as error:
        raise Failure("timeout", f"{doing} the candidate took longer than {limit_s:g} s") from error
    except JailMemory as error:
        raise Failure("out_of_memory", f"{doing} the candidate {error}") from error
    except JailReply as error:
        raise _reply_failure(error, doing) from error
    except JailDied as error:
        raise _death_failure(error, doing, memory_bytes) from error


def _reply_failure(error: JailReply, doing: str) -> Failure:
    text = str(error)
    if error.kind == "build_failed":
        return Failure("build_failed", feedback.build_failed(text))
    if error.kind == "wrong_output":
        return Failure("incorrect", feedback.failed("wrong result", text))
    if error.kind == "out_of_memory":
        return Failure("out_of_memory", feedback.failed("out of memory", text))
    outcome = "load_failed" if error.kind == "load_failed" else "runtime_error"
    return Failure(outcome, feedback.failed(f"{doing} the candidate failed", text))


def _death_failure(error: JailDied, doing: str, memory_bytes: int) -> Failure:
    end, text = error.exit, str(error)
    memory = end.signal and end.peak_bytes > 0.75 * memory_bytes
    if memory or "bad_alloc" in error.output or "out of memory" in error.output.lower():
        return Failure("out_of_memory", f"{doing} the candidate ran out of memory ({memory_bytes >> 20} MiB allowed)")
    if end.signal == 11:
        text += " (segmentation fault: it reads or writes outside its arrays)"
    elif end.signal == 8:
        text += " (arithmetic error: an integer division by zero)"
    outcome = "load_failed" if doing == "loading" else "runtime_error"
    return Failure(outcome, feedback.failed(f"{doing} the candidate failed: {text}", error.output[-600:]))


def sealed_copy(path: Path) -> int:
    """Descriptor of an anonymous, sealed copy of a file: what a jail gets instead of a path into the store."""
    fd = os.memfd_create("kernel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(path, "rb") as source, open(fd, "wb", closefd=False) as target:
            shutil.copyfileobj(source, target)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _flavour(job: Job) -> str:
    if job.candidate.language != "triton":
        return "plain"
    return "interpreter" if job.task.device == "cpu" else "triton"
