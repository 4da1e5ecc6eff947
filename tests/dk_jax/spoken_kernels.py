"""A speaker that says what the test computes from its prompt, and a sandbox's client that believes what kernels say of their speed."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

from dk_jax.rollout.judge import Journal, SandboxJudge
from dk_jax.rollout.trajectory import Trajectory, Turn
from sandbox.protocol import EvaluationResult, Options, Reward, Span, Timing, VerificationArm, VerificationResult
from tests.end_to_end.scripted import Killed

_SPEED = re.compile(r"// ([0-9.]+) times")


def kernel(speed: float, note: str = "") -> str:
    """A compact message whose kernel is so many times as fast as eager; 0 is a wrong one."""
    return f"void kernel() {{}} // {speed:g} times {note}".rstrip()


class SayingSpeaker:
    """Has what episodes need of dk_jax.rollout.speaker.Speaker.

    Args:
        say: the message, from the trajectory, the prompt and the seed.
        room: characters that a prompt may have.

    Attributes:
        asked: agent, task and prompt of every message, in order. calls: how many were asked for together.
    """

    def __init__(self, say: Callable[[Trajectory, str, int], str], *, room: int = 1_000_000):
        self.say, self.room = say, room
        self.codec = SimpleNamespace(encode=lambda text: text.split())
        self.asked: list[tuple[str, str, str]] = []
        self.seeds: list[int] = []
        self.calls: list[int] = []

    def fits(self, prompt: str, max_new: int) -> bool:
        return len(prompt) <= self.room

    def speak(self, trajectories, prompts, seeds, *, max_new, keep=False, fresh=False):
        self.calls.append(len(trajectories))
        self.seeds += seeds
        for trajectory, prompt, seed in zip(trajectories, prompts, seeds, strict=True):
            self.asked.append((trajectory.agent, trajectory.task, prompt))
            trajectory.turns.append(Turn(text=self.say(trajectory, prompt, seed), stop="eos"))
        return [True] * len(trajectories)


class BelievingClient:
    """Judges kernels by what they say. Raises Killed instead of the `kill_at`-th verdict.

    Attributes:
        judged: (task, source) of every candidate, those of verifications too. verified: verifications.
    """

    def __init__(self, kill_at: int | None = None):
        self.judged: list[tuple[str, str]] = []
        self.verified = 0
        self.kill_at = kill_at

    def abort(self):
        """Nothing is ever waited for."""

    def _judge(self, task, candidate) -> EvaluationResult:
        if len(self.judged) == self.kill_at:
            raise Killed
        self.judged.append((task.name, candidate.source))
        said = _SPEED.search(candidate.source)
        if said is None or float(said[1]) == 0:
            return EvaluationResult(id="x", state="done", stage="built", outcome="incorrect", feedback="incorrect max err 1.0")
        speed = float(said[1])
        span = Span(median_ms=1.0, low_ms=0.99, high_ms=1.01, samples=5)
        timing = Timing(
            candidate=span, baselines={"eager": span}, speedup=speed, speedup_low=0.99 * speed, speedup_high=1.01 * speed, noisy=False,
            bound_by="wall",
        )  # fmt: skip
        return EvaluationResult(id="x", state="done", stage="timed", outcome="ok", timing=timing, feedback="ok", reward=Reward(total=1 + speed))

    def evaluate(self, task, candidates, options=None, client_key=None, on_result=None):
        found = []
        for i, candidate in enumerate(candidates):
            found.append(self._judge(task, candidate))
            on_result(i, found[-1])
        return found

    def verify(self, arms, options=None, client_key=None):
        self.verified += 1
        return VerificationResult(
            id="v",
            state="done",
            arms=[
                VerificationArm(control=[self._judge(a.task, c) for c in a.control], treated=[self._judge(a.task, c) for c in a.treated])
                for a in arms
            ],
        )


def believing_judge(client: BelievingClient, journal: Journal | None = None) -> SandboxJudge:
    return SandboxJudge(
        client=client, device="cpu", language="cpp", form="kernel", options=Options(), verify_options=Options(), journal=journal, max_parallel=1
    )
