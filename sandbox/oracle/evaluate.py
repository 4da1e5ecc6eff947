"""One evaluation from source to verdict: reference, build, load, trials, timing, late checks.

    judge = Judge(...)
    result = judge.evaluate(job)         # always a result; only ZygoteLost and Cancelled leave as exceptions

The order of a trial matters: inputs come from the reference's runner, the candidate's outputs are taken in
first, and only then is the reference run for the expected values. After the timing the outputs of one
timed call are checked, and the candidate is run once more on inputs that were changed in place in the
buffers it already knows.
"""

from __future__ import annotations

import random
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from sandbox.affinity import WARM_TASKS
from sandbox.build import BuildUnavailable
from sandbox.build.artifacts import ArtifactStore
from sandbox.build.cpp import disk_full
from sandbox.jail.jailed import Runner
from sandbox.jail.nvml import NvmlError
from sandbox.jail.plan import Level
from sandbox.oracle.admission import Examination, admission_problem
from sandbox.oracle.builds import Builds
from sandbox.oracle.clock import GPU_PLANS, PLANS, Side, measure
from sandbox.oracle.counters import Counters, CountersFailed, CountersUnavailable
from sandbox.oracle.draft import Draft, Job
from sandbox.oracle.failures import Failure, blamed_on_candidate
from sandbox.oracle.gpu import measure_coverage, raise_to_launch, raise_to_profile
from sandbox.oracle.idle import BaselineWatch
from sandbox.oracle.loading import Loader
from sandbox.oracle.own_time import check_own_code, own_time_of, rule
from sandbox.oracle.reference import Reference, References, TaskRejected
from sandbox.oracle.room import DeviceFull, crowded, keep_to_part, lost, make_room
from sandbox.oracle.steady import HANDING_OVER, Placement, steady
from sandbox.oracle.trials import Trials
from sandbox.oracle.turns import Turns
from sandbox.oracle.work import find_work, nearness
from sandbox.oracle.yardstick import Yardstick
from sandbox.protocol import EvaluationResult, Finding, KernelTime, Stage, Timing
from sandbox.verdict import feedback
from sandbox.verdict.coverage import judge_coverage

FULL_DISK_BYTES = 1 << 20
"""With less than this left on the disk a failure says nothing about the candidate."""


class Gate:
    """Who may use a resource ("cpu", "cuda:0") when: `shared` for ordinary work (`finishing` what was timed), `exclusive` for timing.

    The broker decides; this base class lets everything pass, as is right where there is one evaluation at
    a time.
    """

    @contextmanager
    def shared(self, resource: str, finishing: bool = False) -> Iterator[None]:
        yield

    @contextmanager
    def exclusive(self, resource: str) -> Iterator[None]:
        yield


class Judge:
    """Evaluates candidates one after another; holds the warm references.

    Args:
      scratch: private directories of runners and builds are made here.
      store: built libraries.
      threads: OpenMP threads of every runner, the same for candidate and reference.
      interrupt: see `Zygote`; its function raises Cancelled.
      gate: access to the devices.
      on_stage: told of each stage reached.
      warm_references: how many references are kept running.
      isolation: level of every jail; the best that this host offers if None.
      device_share: of a GPU's memory, what is this judge's (0 to 1).
    """

    def __init__(
        self,
        *,
        scratch: Path,
        store: ArtifactStore,
        threads: int,
        gate: Gate | None = None,
        interrupt: tuple[int, Callable[[], None]] | None = None,
        on_stage: Callable[[str, Stage], None] | None = None,
        warm_references: int = WARM_TASKS,
        isolation: Level | None = None,
        device_share: float = 1.0,
    ):
        self._scratch, self._store, self._device_share = scratch, store, device_share
        self._gate = gate or Gate()
        self._turns: dict[str, Turns] = {}
        self._loader = Loader(
            scratch=scratch,
            store=store,
            threads=threads,
            interrupt=interrupt,
            isolation=isolation,
            turns=self._turns_on,
        )
        self._on_stage = on_stage or (lambda _id, _stage: None)
        self._references = References(warm_references)
        self._yardstick = Yardstick()
        self._counters = Counters(self._loader, self._alone)
        self._new_task = False
        """Whether the last evaluation needed a reference that was not warm; the next one may too."""
        self._left: list[Callable[[], None]] = []
        """What is still to be done once the last evaluation's verdict is given."""

    def start(self, gpu: bool = False) -> None:
        """Starts what every evaluation needs (`gpu`: one on a GPU), so that the first one does not pay for it."""
        self._loader.start(gpu)

    def prepare(self, job: Job) -> None:
        """To be called when a verdict has been passed on: on a GPU has runners get ready for the next one, and ends what is left of its
        evaluation.

        Raises:
          ZygoteLost: this oracle must be replaced.
        """
        self._get_ready(job)
        self._tidy()

    def settle(self) -> None:
        """To be called where nothing waits to be judged: until the next evaluation's runners are ready. Raises ZygoteLost."""
        self._loader.settle_spares()

    def _get_ready(self, job: Job) -> None:
        """What comes next is likely to be of this kind. Nobody waits for it here."""
        if job.task.device != "cpu":
            self._loader.make_spare(job, reference=self._new_task)

    def _tidy(self) -> None:
        while self._left:
            self._left.pop(0)()

    def close(self) -> None:
        """Ends all runners and zygotes."""
        self._references.close()
        self._loader.close()

    def _turns_on(self, device: str) -> Turns | None:
        """How runners on a device take turns; None where an evaluation holds the device throughout."""
        if device == "cpu":
            return None
        if device not in self._turns:
            self._turns[device] = Turns(lambda finishing: self._gate.shared(device, finishing))
        return self._turns[device]

    def evaluate(self, job: Job) -> EvaluationResult:
        """The verdict on one candidate.

        Raises:
          Cancelled: on the broker's order. ZygoteLost: this oracle must be replaced.
        """
        verdict = Draft(job)
        self._new_task = False
        self._tidy()
        try:
            if job.options.examine:
                self._examine(job, verdict)
                return verdict.result("ok", "the task was examined")
            self._evaluate(job, verdict)
        except Failure as failure:
            if failure.outcome != "out_of_memory" and self._disk_is_full():
                # Whatever the candidate wrote is deleted by now: the space is missing for another reason.
                return verdict.result("infra_error", str(disk_full(self._store, self._scratch)))
            if why := lost(job.task.device):
                return verdict.result("infra_error", why)
            if failure.finding:
                verdict.findings.append(failure.finding)
            return verdict.result(failure.outcome, failure.text)
        except TaskRejected as error:
            if why := lost(job.task.device):
                return verdict.result("infra_error", why)
            self._tidy()  # what the candidate held is no other's
            if error.out_of_memory and (full := crowded(job.task.device)):
                self._references.close()  # in the middle of its work, too, a reference may find that others have filled the card
                return verdict.result("infra_error", full, transient=True)
            return verdict.result("task_rejected", feedback.failed("the task is not usable", str(error)))
        except NvmlError as error:
            return verdict.result("infra_error", lost(job.task.device) or f"the GPU's driver failed: {error}")
        except (BuildUnavailable, CountersUnavailable) as error:
            return verdict.result("infra_error", str(error))
        except DeviceFull as error:
            return verdict.result("infra_error", str(error), transient=True)
        except OSError as error:
            return verdict.result("infra_error", f"the judge's own input or output failed: {error}")
        return verdict.result("ok", feedback.correct(verdict.timing, verdict.coverage, verdict.untimed, verdict.roofline))

    def _disk_is_full(self) -> bool:
        return shutil.disk_usage(self._scratch).free < FULL_DISK_BYTES

    def _evaluate(self, job: Job, verdict: Draft) -> None:
        device, options = job.task.device, job.options
        if options.profile == "ncu":
            self._counters.check(device)
        throughout = nullcontext() if self._turns_on(device) else self._gate.shared(device)
        with throughout:
            with verdict.measured("reference"):
                reference = self._reference(job)
            try:
                if options.admit:
                    with verdict.measured("admission"):
                        problem = admission_problem(reference, secrets.randbits(40))
                    if problem:
                        raise TaskRejected(problem)
                self._loader.compile_ahead(job, reference, verdict)
                builds = Builds(options.build_s)
                candidate = self._loader.load(
                    job, reference, verdict, builds, on_built=lambda: self._reached(verdict, "built"), on_runner=lambda: self._get_ready(job)
                )  # fmt: skip
            except Failure:
                raise
            except BaseException:
                self._references.discard(reference)
                raise
            try:
                self._reached(verdict, "loaded")
                trial = Trials(job, reference, candidate, verdict)
                with verdict.measured("check"):
                    trial.run()
                    if options.audit and options.timing != "none" and not verdict.untimed:
                        trial.prepare_audit()
                        if device != "cpu":
                            trial.find_traffic()
                    if device != "cpu" and options.timing != "none" and not verdict.untimed:
                        find_work(reference, trial.slots[0], options.check_s)
                builds.book(verdict, "check")
                builds.close()
                self._reached(verdict, "correct")
            except BaseException as error:
                self._end(candidate, reference, error)
                raise
        failed: BaseException | None = None
        try:
            self._time(job, reference, candidate, trial, verdict, builds)
        except BaseException as error:
            failed = error
            raise
        finally:
            self._end(candidate, reference, failed)

    def _examine(self, job: Job, verdict: Draft) -> None:
        """What is to be known of the task, whatever its candidates. Raises TaskRejected."""
        device, options, turns = job.task.device, job.options, self._turns_on(job.task.device)
        began = time.monotonic()
        with nullcontext() if turns else self._gate.shared(device):
            with verdict.measured("reference"):
                reference = self._reference(job)
            examination = Examination(reference, known_s=time.monotonic() - began)
            try:
                with verdict.measured("admission"), turns.of("admission") if turns else nullcontext():
                    examination.look(secrets.randbits(40), options.check_s)
            except BaseException:
                self._references.discard(reference)
                raise
        try:
            if options.timing != "none":
                with self._alone(device), verdict.measured("time"):
                    if turns:
                        examination.find_floor(secrets.randbits(40), self._loader.card)
                    examination.clock(options.timing, options.time_s, self._loader.card.call_times(device).gap_ms)
            if turns:
                with turns.finishing():
                    reference.forget()
        except BaseException:
            self._references.discard(reference)
            raise
        verdict.admission = examination.facts

    def _reference(self, job: Job) -> Reference:
        """The job's reference, with room on the device for it and the candidate.

        Raises:
          TaskRejected. DeviceFull: others fill the device.
        """
        device = job.task.device
        try:
            reference = self._references.get(job.task, lambda: self._new_reference(job))
        except TaskRejected as error:
            if not error.out_of_memory or device == "cpu":
                raise
            self._references.close()
            try:
                return self._references.get(job.task, lambda: self._new_reference(job))
            except TaskRejected as again:
                full = crowded(device) if again.out_of_memory else None
                raise (DeviceFull(full) if full else again) from again
        make_room(device, lambda: self._give_up(keep=reference))
        return reference

    def _new_reference(self, job: Job) -> Reference:
        self._new_task = True
        make_room(job.task.device, self._give_up)
        keep_to_part(job.task.device, self._references.give_up, self._device_share)
        return self._loader.reference(job)

    def _end(self, candidate: Runner, reference: Reference, error: BaseException | None) -> None:
        """Closes the candidate; a reference that may be in the middle of an order goes too. On a GPU, where a process takes a tenth
        of a second to end, that is left for `prepare`."""
        broken_off = error is not None and not isinstance(error, Failure)
        if broken_off:
            self._references.discard(reference)

        def end() -> None:
            candidate.close()
            turns = self._turns_on(reference.task.device)
            if not broken_off and turns is not None:
                try:
                    with turns.finishing():
                        reference.forget()
                except TaskRejected:
                    self._references.discard(reference)

        if reference.task.device == "cpu":
            end()
        else:
            self._left.append(end)

    def _give_up(self, keep: Reference | None = None) -> bool:
        """Gives some of the device's memory back; False if there is nothing to give up."""
        return self._loader.give_up_spare() or self._references.give_up(keep)

    def _reached(self, verdict: Draft, stage: Stage) -> None:
        verdict.stage = stage
        self._on_stage(verdict.job.id, stage)

    def _cover(self, job: Job, candidate: Runner, slot: int, verdict: Draft, builds: Builds) -> None:
        """Takes the share of device time in the candidate's own kernels. Raises Failure if it has none to
        speak of."""
        with (
            verdict.measured("profile"),
            blamed_on_candidate(candidate, "profiling", job.options.time_s, job.options.memory_bytes),
        ):
            report = measure_coverage(candidate.call, slot, job.options.time_s, builds.kernels)
        verdict.coverage = report.coverage
        verdict.kernels = [KernelTime(name=k.name[:200], share=k.share, ms=k.ms, own=k.own, launches=k.launches) for k in report.kernels]
        ruling = judge_coverage(report.coverage, kernels=report.kernels)
        if verdict.timing:
            verdict.timing = raise_to_profile(verdict.timing, report.busy_ms)
        verdict.speed_rewarded = ruling.speed_rewarded
        verdict.notes += [note for note in (ruling.note, report.note) if note]
        if ruling.integrity:
            evidence = "; ".join(filter(None, (ruling.integrity, report.note)))
            raise Failure(
                "integrity",
                f"hardly any work is done by the candidate's own kernels: {evidence}",
                Finding(rule="coverage", evidence=evidence),
            )

    def _count(self, job: Job, reference: Reference, candidate: Runner, verdict: Draft) -> None:
        """Takes hardware counters, where they are asked for."""
        if job.options.profile != "ncu":
            return
        with verdict.measured("counters"):
            candidate.close()  # its memory on the device is needed
            try:
                verdict.counters = self._counters.count(job, reference, verdict.kernels)
            except CountersFailed as error:
                verdict.notes.append(f"no hardware counters: {error}")

    def _time(
        self,
        job: Job,
        reference: Reference,
        candidate: Runner,
        trial: Trials,
        verdict: Draft,
        builds: Builds,
    ) -> None:
        options = job.options
        if job.candidate.language == "cpp" and job.task.device == "cpu":
            verdict.coverage = 1.0
        on_gpu = job.task.device != "cpu"
        if options.timing == "none" or verdict.untimed:
            if on_gpu and options.profile:
                self._cover(job, candidate, trial.slots[0], verdict, builds)
                self._count(job, reference, candidate, verdict)
            verdict.untimed = verdict.untimed or "speed was not measured"
            return
        waited = time.monotonic()
        with self._alone(job.task.device):
            verdict.stage_s["gate"] = round(time.monotonic() - waited, 6)
            call_times = self._loader.card.call_times(job.task.device)
            deadline = time.monotonic() + options.time_s

            def left() -> float:
                return max(0.001, deadline - time.monotonic())

            with verdict.measured("time"), nullcontext([]) if on_gpu else steady() as cores, ExitStack() as placed:
                watch = BaselineWatch(reference.order, candidate.pid)
                theirs, ours = (placed.enter_context(Placement(pid, cores)) for pid in (candidate.pid, reference.runner.pid))
                usual = {"slots": trial.slots, "deadline": left, "flushed": on_gpu, "gap_ms": call_times.gap_ms}
                plan, rng = (GPU_PLANS if on_gpu else PLANS)[options.timing], random.Random(secrets.randbits(64))
                side: Side

                def timed() -> Timing:
                    nonlocal side
                    sides = {name: Side(order=watch, which=name, placement=ours, **usual) for name in options.baselines}
                    side = Side(order=candidate.call, placement=theirs, **usual)
                    use_slope, look = on_gpu and not trial.replays, lambda: self._yardstick.look(cores)
                    self._yardstick.begin()
                    for placement in (theirs, ours):
                        placement.held_up()
                    return measure(side, sides, plan, rng, use_slope=use_slope, before_pair=look)

                def slowdown() -> float:
                    held_up = max(placement.held_up() for placement in (theirs, ours))
                    return max(self._yardstick.slowdown(), held_up / HANDING_OVER)

                with blamed_on_candidate(candidate, "timing", options.time_s, options.memory_bytes):
                    verdict.timing = timed() if on_gpu else reference.calm.timed(timed, plan.tries, slowdown)
                try:
                    _check_rest(watch, verdict)
                except Failure:
                    reference.calm.take_back()  # what the reference took beside work is no measure
                    raise
                if not on_gpu:
                    with theirs.lifted():  # who looks needs a core too
                        own_time = own_time_of(job, side, candidate, builds)
                    self._check_late(trial, side)
                    if options.audit:
                        trial.audit(left, fewer=max(1.0, ours.workers / max(1, theirs.workers)))
                    check_own_code(job, candidate, builds, verdict)
                    rule(own_time, verdict, may_look=trial.memory_is_open)
                else:
                    bandwidth = self._loader.card.bandwidth(job.task.device)
                    if options.audit:
                        trial.audit(left, memory=bandwidth)
                        verdict.timing = raise_to_launch(verdict.timing, call_times.least_ms)
                        trial.check_floor(bandwidth)
            if not on_gpu:
                # Still alone: the end of a process would disturb the next measurement.
                candidate.close()
        if on_gpu:
            turns = self._turns_on(job.task.device)
            assert turns is not None
            with turns.finishing():
                with verdict.measured("late"), turns.of("late"):
                    self._check_late(trial, side)
                # Last, because a profiler slows every later launch of its process.
                self._cover(job, candidate, trial.slots[0], verdict, builds)
            verdict.roofline = nearness(reference.work, verdict.timing, bandwidth, job.task.device, job.task.dtype)
            self._count(job, reference, candidate, verdict)
        self._reached(verdict, "timed")

    @contextmanager
    def _alone(self, device: str) -> Iterator[None]:
        turns = self._turns_on(device)
        with self._gate.exclusive(device), turns.alone() if turns else nullcontext():
            yield

    @staticmethod
    def _check_late(trial: Trials, side: Side) -> None:
        """Outputs of a timed call, and a call on inputs changed in place. Raises Failure."""
        trial.check_kept(side.slots[side.kept % len(side.slots)])
        trial.check_changed_inputs()


def _check_rest(watch: BaselineWatch, verdict: Draft) -> None:
    """Raises Failure for a candidate that worked while its baseline was timed."""
    excess = watch.excess()
    if excess:
        verdict.timing = None
        raise Failure(
            "integrity",
            f"the candidate works while the baseline is timed: {excess}",
            Finding(rule="busy_while_baseline", evidence=excess),
        )
