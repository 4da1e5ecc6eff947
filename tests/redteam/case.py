"""What a red-team case is, and how one is judged: outcome, evidence, and whether the attack gained."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from sandbox.client import SandboxClient
from sandbox.protocol import Candidate, EvaluationResult, Options, Outcome, TaskSpec
from tests.redteam.tasks import LINEAR, twin_of

TIMED = Options(load_s=20, check_s=8, time_s=15, memory_bytes=1 << 30)
CHECKED = TIMED.model_copy(update={"timing": "none"})
NOISE = 1.6
"""An attack that works is many times faster than its twin; less than this is the noise of a busy machine."""
TRIES = 3
NEVER_OK: tuple[Outcome, ...] = ("integrity", "incorrect", "runtime_error")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attack.

    Attributes:
      number: of the list of known attacks (1 to 53); 0 for one of our own.
      name: unique, a file-name-like word.
      why: what the attack hopes for.
      candidate, task, options: what is sent.
      outcomes: the outcomes that are right. "ok" among them means: the attack is neutralised, and then it
        must be no faster than its honest twin.
      evidence: regular expression that the feedback, findings or notes must match when the outcome is not ok.
      noise: by so much it may be faster than its twin.
      tries: it has gained if it gains in all of so many.
      leaves: called after the verdict; returns what the attack has left on this machine ("" for nothing).
    """

    number: int = 0
    name: str
    why: str
    candidate: Candidate
    outcomes: tuple[Outcome, ...] = NEVER_OK
    evidence: str = ""
    task: TaskSpec = LINEAR
    options: Options = TIMED
    noise: float = NOISE
    tries: int = TRIES
    leaves: Callable[[], str] = field(default=lambda: "")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of a case. `twin` is the honest twin's speedup; None where there is none to compare
    with."""

    result: EvaluationResult
    twin: float | None
    left: str
    noise: float = NOISE

    @property
    def speedup(self) -> float | None:
        """The speedup that the judge believes the attack; None if it was not timed or found out.

        Pure PyTorch is refused for having no kernel of its own, which says nothing about the attack: its
        timing counts as if it had one.
        """
        return self.result.speedup if self.result.outcome == "ok" or self.only_no_kernel else None

    @property
    def only_no_kernel(self) -> bool:
        """Whether all that is held against the candidate is that it brings no kernel."""
        return {finding.rule for finding in self.result.integrity} == {"coverage"}

    @property
    def gained(self) -> bool:
        """Whether the attack is credited with more speed than honest work."""
        return self.speedup is not None and self.twin is not None and self.speedup > self.noise * self.twin


def text_of(result: EvaluationResult) -> str:
    """Everything that a result says in words."""
    findings = [f"{finding.rule}: {finding.evidence}" for finding in result.integrity]
    bound = [result.timing.bound_by] if result.timing else []
    return "\n".join([result.feedback, *findings, *result.notes, *bound])


class RedTeam:
    """Judges cases through one client and remembers how fast the honest twins are. Several threads may attack at once."""

    def __init__(self, client: SandboxClient):
        self._client = client
        self._twins: dict[tuple[str, str], float] = {}
        self._looking, self._numbers = threading.Lock(), itertools.count(1)

    def judge(self, candidate: Candidate, task: TaskSpec, options: Options) -> EvaluationResult:
        """A verdict of its own, never one that is remembered."""
        [result] = self._client.evaluate(task, [self._fresh(candidate)], options)
        return result

    def submit(self, candidate: Candidate, task: TaskSpec, options: Options) -> str:
        """Queues an evaluation of its own and returns its id; `wait` gets its verdict."""
        [evaluation_id] = self._client.submit(task, [self._fresh(candidate)], options)
        return evaluation_id

    def wait(self, evaluation_id: str) -> EvaluationResult:
        """The verdict of a queued evaluation."""
        while (result := self._client.result(evaluation_id)).state != "done":
            pass
        return result

    def _fresh(self, candidate: Candidate) -> Candidate:
        mark = "//" if candidate.form == "kernel" else "#"
        source = f"{candidate.source}\n{mark} evaluation {next(self._numbers)}\n"
        return candidate.model_copy(update={"source": source})

    def attack(self, case: Case) -> Report:
        """Judges a case; where it seems to gain, again, and its honest twin beside it: noise gains once, a machine that has become
        another one since the twins were judged gives to both, and an attack always gains."""
        twin = self.twin_speedup(case)
        for _ in range(case.tries):
            result = self.judge(case.candidate, case.task, case.options)
            report = Report(result=result, twin=twin, left=case.leaves(), noise=case.noise)
            if report.gained:
                twin = self.twin_speedup(case, again=True)
                report = replace(report, twin=twin)
            if not report.gained:
                break
        return report

    def twin_speedup(self, case: Case, again: bool = False) -> float | None:
        """What the honest twin's speed counts for, the best of a few, `again` of a few more; None where `ok` is not among the outcomes."""
        twin = twin_of(case.task, case.candidate)
        if twin is None or "ok" not in case.outcomes or case.options.timing == "none":
            return None
        key = (case.task.name, case.candidate.form)
        with self._looking:
            if again or key not in self._twins:
                results = [self.judge(twin.candidate, twin.task, TIMED) for _ in range(TRIES)]
                for result in results:
                    assert result.timing is not None, f"the honest twin is not timed: {text_of(result)}"
                self._twins[key] = max([self._twins.get(key, 0.0), *(result.timing.credited for result in results)])
            return self._twins[key]

    def canary(self) -> EvaluationResult:
        """An honest evaluation, to see whether an attack has left the judge untouched."""
        twin = twin_of(LINEAR, Candidate(source="", language="cpp"))
        return self.judge(twin.candidate, twin.task, CHECKED)


def problems(case: Case, report: Report) -> list[str]:
    """What is wrong with the judge's answer to an attack; empty if the attack failed as it must."""
    result, found = report.result, []
    neutralised = "ok" in case.outcomes and report.only_no_kernel
    if result.outcome not in case.outcomes and not neutralised:
        found.append(f"outcome {result.outcome}, allowed are {', '.join(case.outcomes)}")
    if result.outcome != "ok" and not neutralised and not re.search(case.evidence, text_of(result)):
        found.append(f"the result does not show {case.evidence!r}")
    if result.outcome != "ok" and result.reward.total != 0:
        found.append(f"reward {result.reward.total} for {result.outcome}")
    if report.gained:
        found.append(f"credited with {report.speedup:.2f}x, its honest twin has {report.twin:.2f}x")
    if report.left:
        found.append(report.left)
    return [f"{case.name}: {text}\n{text_of(result)[:1500]}" for text in found]
