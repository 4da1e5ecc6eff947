"""A model and a judge that follow a script, for strategies of dk_jax.search: both remember all that they were asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dk_jax.agents.text import fenced
from dk_jax.rollout.episode import RolloutConfig
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict, derive_seed
from dk_jax.skills.record import Skill
from dk_jax.tasks.builtin import builtin_suite

TASK = builtin_suite().get("softmax_wide")
OTHER = builtin_suite().get("affine_clamp_wide")
SKILL = Skill(name="wide_loads", description="Load four at once.", scope="general", tags=("loads",), content="Use float4.")
CONFIG = RolloutConfig(
    selections=0, rollouts=1, turns=1, summaries=0, style="chat", language="cuda", form="module", max_policy_tokens=1000,
    max_selection_tokens=1, max_summary_tokens=1, max_context_tokens=10**9,
)  # fmt: skip


def right(speedup: float, feedback: str = "correct", **fields) -> Verdict:
    values = dict(outcome="ok", stage="timed", reward=1.0 + speedup, speedup=speedup, noisy=False, coverage=None, feedback=feedback)
    return Verdict(**(values | fields))


def wrong(feedback: str, outcome: str = "incorrect") -> Verdict:
    return Verdict(outcome=outcome, stage="built", reward=0.0, speedup=0.0, noisy=False, coverage=None, feedback=feedback)


def message(source: str, said: str = "") -> str:
    return f"<think>a secret</think>\n{fenced(source, 'python')}\n{said}"


def seed_of(trajectory: Trajectory, turn: int) -> int:
    return derive_seed("test", trajectory.task, trajectory.member, turn)


class ScriptedSpeaker:
    """Has what strategies need of dk_jax.rollout.speaker.Speaker; a token is a character.

    Args:
        says: from trajectory, prompt and seed to a message, or to (message, stop). room: longest context.

    Attributes:
        calls: of each speak, the prompts.
    """

    def __init__(self, says: Callable[[Trajectory, str, int], str | tuple[str, str]], *, room: int = 10**9):
        self.says, self.room = says, room
        self.calls: list[list[str]] = []

    @property
    def prompts(self) -> list[str]:
        return [prompt for call in self.calls for prompt in call]

    def fits(self, prompt: str, max_new: int) -> bool:
        return len(prompt) + max_new <= self.room

    def speak(self, trajectories: Sequence[Trajectory], prompts, seeds, *, max_new, keep=False, fresh=False) -> list[bool]:
        assert fresh and not keep and len(set(seeds)) == len(seeds) and all(self.fits(prompt, max_new) for prompt in prompts)
        self.calls.append(list(prompts))
        for trajectory, prompt, seed in zip(trajectories, prompts, seeds, strict=True):
            said = self.says(trajectory, prompt, seed)
            text, stop = said if isinstance(said, tuple) else (said, "eos")
            trajectory.turns.append(Turn(text=text, stop=stop))
        return [True] * len(prompts)


class ScriptedJudge:
    """Judges by source. `calls`: of each evaluate, phase, sources and whether they were to be timed."""

    def __init__(self, verdict: Callable[[str], Verdict]):
        self.verdict = verdict
        self.calls: list[tuple[str, list[str], bool]] = []

    def evaluate(self, requests, *, phase, progress=None, timed=True, trusted=False) -> list[Verdict]:
        self.calls.append((phase, [request.source for request in requests], timed))
        if progress is not None:
            progress(len(requests))
        return [self.verdict(request.source) for request in requests]


def spend(strategy, speaker, judge, *, samples=1, turns, tasks=(TASK,), skills=(), config=CONFIG, **fields):
    """(trajectories, further calls) of a strategy's work on all samples of the tasks."""
    rows = [(task, Trajectory(agent="policy", task=task.name, group=task.name, member=m)) for task in tasks for m in range(samples)]
    further = strategy(
        speaker, judge, [t for _, t in rows], [task for task, _ in rows], [skills] * len(rows), config=config, seed_of=seed_of, phase="eval",
        turns=turns, **fields,
    )  # fmt: skip
    return [t for _, t in rows], list(further or ())
