"""What the broker asks of an oracle, and the result in the making."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sandbox.protocol import (
    Build,
    Candidate,
    EvaluationResult,
    Finding,
    KernelCounters,
    KernelTime,
    Options,
    Outcome,
    Reward,
    Roofline,
    Stage,
    TaskFacts,
    TaskSpec,
    Timing,
    Trial,
)
from sandbox.verdict.reward import reward


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the broker hands to an oracle."""

    id: str
    task: TaskSpec
    candidate: Candidate
    options: Options


@dataclass
class Draft:
    """The result in the making."""

    job: Job
    stage: Stage = "queued"
    trials: list[Trial] = field(default_factory=list)
    timing: Timing | None = None
    coverage: float | None = None
    speed_rewarded: bool = True
    kernels: list[KernelTime] = field(default_factory=list)
    counters: list[KernelCounters] = field(default_factory=list)
    roofline: Roofline | None = None
    builds: list[Build] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stage_s: dict[str, float] = field(default_factory=dict)
    kernel_signature: str | None = None
    admission: TaskFacts | None = None
    untimed: str = ""
    compiled: str = ""

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.stage_s[name] = round(self.stage_s.get(name, 0.0) + time.monotonic() - start, 6)

    def result(self, outcome: Outcome, text: str, *, transient: bool = False) -> EvaluationResult:
        options = self.job.options
        earned = (
            reward(
                options.reward,
                correct=outcome == "ok",
                coverage=self.coverage,
                speedup=self.timing.credited if self.timing and self.speed_rewarded else None,
                compile_speedup=self.timing.credited_against("torch.compile") if self.timing else None,
                blamed=outcome not in ("task_rejected", "cancelled"),
            )
            if outcome != "infra_error" and not options.examine
            else Reward()
        )
        return EvaluationResult(
            id=self.job.id,
            state="done",
            stage=self.stage,
            outcome=outcome,
            language=self.job.candidate.language,
            trials=self.trials,
            timing=self.timing,
            coverage=self.coverage,
            kernels=self.kernels,
            counters=self.counters,
            roofline=self.roofline,
            builds=self.builds,
            integrity=self.findings,
            reward=earned,
            speed_rewarded=self.speed_rewarded,
            feedback="\n".join(filter(None, (text, self.compiled))),
            notes=self.notes,
            kernel_signature=self.kernel_signature,
            stage_s=self.stage_s,
            attempts=1,
            admission=self.admission,
            transient=transient,
        )
