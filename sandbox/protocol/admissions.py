"""Requests for what a server finds out about a task itself, and what that says of its use."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sandbox.protocol.base import Reply, Request
from sandbox.protocol.evaluations import (
    PROTOCOL_VERSION,
    Candidate,
    ClientKey,
    ClientName,
    EvaluationRequest,
    EvaluationResult,
    Options,
    Priority,
    TaskSpec,
)
from sandbox.protocol.facts import TaskFacts

LAUNCHES_ALONE = 2.0
"""A call that takes no longer than so many of the shortest launches is mostly launching: what a kernel can gain is within its noise."""
LIMITS = ("load_s", "check_s", "time_s", "memory_bytes")
"""Of evaluations, to which a task has to keep as well."""
MUCH_MEMORY, MUCH_TIME_S = 0.8, 60.0
"""Beyond such a share of the memory, and so many seconds, a judging is told as costly."""


class AdmissionRequest(Request):
    """A task to examine. It is answered with the id of an evaluation, whose result has `admission` and no verdict on anything; a task that
    can't be used ends as "task_rejected". Idempotent by `client_key`.

    Attributes:
      timing: "none" leaves times of calls out, and with them what they are held against.
      load_s, check_s, time_s, memory_bytes: as those of evaluations, which a task has to keep to as well.
    """

    protocol_version: Literal[1] = PROTOCOL_VERSION
    client_key: ClientKey | None = None
    client: ClientName = ""
    priority: Priority = 0
    task: TaskSpec
    timing: Literal["none", "quick"] = "quick"
    load_s: float = Field(default=30, gt=0, le=1800)
    check_s: float = Field(default=60, gt=0, le=1800)
    time_s: float = Field(default=60, gt=0, le=1800)
    memory_bytes: int = Field(default=4 << 30, ge=64 << 20, le=1 << 40)

    def as_evaluation(self) -> EvaluationRequest:
        """The evaluation that finds it out; its candidate is never looked at."""
        nobody = Candidate(source="", language="cpp" if self.task.device == "cpu" else "triton")
        return EvaluationRequest(
            client_key=self.client_key, client=self.client, priority=self.priority, task=self.task, candidates=[nobody],
            options=Options(examine=True, **{name: getattr(self, name) for name in ("timing", *LIMITS)}),
        )  # fmt: skip


def limits_of(options: Options) -> dict[str, float]:
    """LIMITS of evaluations with these options."""
    return {name: getattr(options, name) for name in LIMITS}


class Admission(Reply):
    """Whether a task is fit for training, and what else is known of it.

    Attributes:
      problem: why it can't be used at all (it fails by itself, its output is random, it needs more memory than there is, ...), or "".
      facts: None where there is a problem.
    """

    problem: str = ""
    facts: TaskFacts | None = None

    @classmethod
    def of(cls, result: EvaluationResult) -> Admission:
        """Of the evaluation that was asked for. Raises ValueError for one that ended without an answer."""
        if result.outcome == "task_rejected":
            return cls(problem=" ".join(result.feedback.replace("\n> ", "\n").split()))
        if result.admission is None:
            raise ValueError(f"the task could not be examined ({result.outcome}): {result.feedback}")
        return cls(facts=result.admission)

    @property
    def refusal(self) -> str:
        """Why it must not be trained on, or ""."""
        if self.facts is None:
            return self.problem
        found = self.facts.trivial
        return f"{' and '.join([', '.join(found[:-1]), found[-1]]) if found[1:] else found[0]} would pass as the answer" if found else ""

    @property
    def marks(self) -> tuple[str, ...]:
        """What is to be known of a task that is used all the same, each in words."""
        facts, found = self.facts, []
        if facts is None:
            return ()
        if facts.launch_ms is not None and facts.eager_ms is not None and facts.eager_ms <= LAUNCHES_ALONE * facts.launch_ms:
            found.append(f"launch overhead: eager takes {_us(facts.eager_ms)}, the shortest launch {_us(facts.launch_ms)}")
        elif facts.host_ms is not None and facts.eager_ms is not None and facts.host_ms > facts.eager_ms:
            found.append(f"bound by the host: it takes {_us(facts.host_ms)} to issue what the device does in {_us(facts.eager_ms)}")
        if facts.needed_bytes > MUCH_MEMORY * facts.total_bytes:
            found.append(f"memory: a judging needs {facts.needed_bytes / 1e9:.1f} of {facts.total_bytes / 1e9:.1f} GB")
        if facts.judging_s > MUCH_TIME_S:
            found.append(f"slow: a judging takes about {facts.judging_s:.0f} s")
        if not facts.repeats:
            found.append("not exact: two calls on the same inputs differ in their last bits")
        if facts.changes:
            found.append(f"changes its input {', '.join(map(str, facts.changes))}")
        if facts.aliases:
            found.append(f"returns memory of its input {', '.join(map(str, facts.aliases))}")
        return tuple(found)


def _us(ms: float) -> str:
    return f"{1000 * ms:.1f} us" if ms < 0.1 else f"{ms:.3g} ms"
