"""A sandbox client that judges as the test says, and a judge on it."""

import threading

from dk_jax.rollout.judge import Journal, Request, SandboxJudge
from dk_jax.tasks.task import Task
from sandbox.client import SandboxUnavailable
from sandbox.protocol import (
    EvaluationResult,
    Options,
    Reward,
    Span,
    Timing,
    VerificationArm,
    VerificationResult,
)


def make_task(name: str) -> Task:
    return Task(name=name, level=1, family="f", split="train", reference=f"# {name}\n", dtype="float32")


A, B = make_task("a"), make_task("b")
SPAN = Span(median_ms=1.0, low_ms=1.0, high_ms=1.0, samples=10)


def result(speedup: float) -> EvaluationResult:
    timing = Timing(candidate=SPAN, baselines={"eager": SPAN}, speedup=speedup, noisy=False, bound_by="jail")
    return EvaluationResult(
        id="x", state="done", outcome="ok", stage="timed", timing=timing, reward=Reward(total=speedup)
    )  # fmt: skip


class FakeClient:
    """Judges as the sandbox would: each candidate anew, with a speedup that tells when it was judged.

    Attributes:
        asked: (task, source) of every candidate sent for evaluation, in order.
        verified: the arms of every verification.
        dies_after: results that still arrive before the connection is lost, or None.
    """

    def __init__(self, dies_after: int | None = None):
        self.asked: list[tuple[str, str]] = []
        self.calls: list[tuple] = []
        self.verified: list[list] = []
        self.dies_after = dies_after
        self._lock = threading.Lock()
        self._judged = 0

    def _judge(self) -> EvaluationResult:
        with self._lock:
            if self.dies_after is not None and self._judged >= self.dies_after:
                raise SandboxUnavailable("nobody answers")
            self._judged += 1
            return result(float(self._judged))

    def evaluate(self, task, candidates, options=None, client_key=None, on_result=None):
        with self._lock:
            self.calls.append((task, list(candidates), options))
            self.asked += [(task.name, c.source) for c in candidates]
        results = []
        for i, _ in enumerate(candidates):
            results.append(self._judge())
            on_result(i, results[-1])
        return results

    def verify(self, arms, options=None, client_key=None):
        self.verified.append(list(arms))
        judged = [
            VerificationArm(
                control=[self._judge() for _ in a.control], treated=[self._judge() for _ in a.treated]
            )
            for a in arms
        ]
        return VerificationResult(id="v", state="done", arms=judged)


def make_judge(client: FakeClient, journal: Journal | None = None, **fields) -> SandboxJudge:
    values = dict(
        device="cpu",
        language="cpp",
        form="kernel",
        options=Options(),
        verify_options=Options(),
        max_parallel=1,
    )
    return SandboxJudge(client=client, journal=journal, **(values | fields))


def requests(*pairs: tuple[Task, str]) -> list[Request]:
    return [Request(task=task, source=source) for task, source in pairs]
