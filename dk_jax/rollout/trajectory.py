"""What a rollout leaves behind: verdicts, turns and token trajectories, all plain data that goes to JSON and back.

A trajectory is the unit of learning: one agent's token sequence with its sampled spans. Turns of different rollouts never
share a trajectory, so advantages can't mix across them (DESIGN 3.4).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STAGES = ("queued", "built", "loaded", "correct", "timed")
PROFILE_KERNELS = 3
PROFILE_NAME_CHARS = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The part of a sandbox result that the learner uses.

    Attributes:
        outcome: one of the sandbox's outcome classes, or "no_kernel" when the message held no candidate to judge.
        stage: furthest stage reached (see STAGES).
        reward: the sandbox's total reward, 0 when not correct.
        speedup: eager time / candidate time, no more than 1 where its interval holds 1; 0 when not correct or not timed.
        noisy: the speedup's interval straddles 1.
        coverage: share of device time in the candidate's own kernels, or None when not measured.
        feedback: short text for the next turn.
        cached: the sandbox had judged this candidate before.
        speed_rewarded: the speed counts; not where too little of the work is the candidate's own, or that is not known.
        profile: coverage, the heaviest kernels with their shares of device time, the share of the card's best and, where they were asked
            for, the hardware counters of the heaviest kernel, in a line that fits into a prompt; "" where no profiler ran.
        speedups: over each baseline that was timed, "eager" among them, credited as `speedup` is; {} when not correct or not timed.
        spread: standard deviation of the logarithm of `speedup` by its interval; 0 where that is not known or holds 1.
        findings: names of the integrity rules that fired.
    """

    outcome: str
    stage: str
    reward: float
    speedup: float
    noisy: bool
    coverage: float | None
    feedback: str
    cached: bool = False
    speed_rewarded: bool = True
    profile: str = ""
    speedups: dict[str, float] = dataclasses.field(default_factory=dict)
    spread: float = 0.0
    findings: tuple[str, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "findings", tuple(self.findings))  # from JSON it is a list

    @property
    def correct(self) -> bool:
        return self.outcome == "ok"

    @property
    def earned_speedup(self) -> float:
        """The speedup where it counts, else 0: what rewards, triggers and proofs of skills go by."""
        return self.speedup if self.correct and self.speed_rewarded else 0.0

    @property
    def profiled(self) -> str:
        """`profile`, or the coverage alone where that is all that was kept; "" if it was not measured either."""
        return self.profile or _coverage(self.coverage)

    @property
    def compiled(self) -> bool:
        return STAGES.index(self.stage) >= STAGES.index("built")

    @classmethod
    def from_result(cls, result: Any) -> Verdict:
        """Takes a sandbox.protocol.EvaluationResult; raises ValueError if it is not a finished verdict."""
        if result.state != "done" or result.outcome is None:
            raise ValueError(f"evaluation {result.id} has no verdict yet (state {result.state!r})")
        ok = result.outcome == "ok"
        return cls(
            outcome=result.outcome,
            stage=result.stage,
            reward=float(result.reward.total),
            speedup=float(result.timing.credited) if ok and result.timing is not None else 0.0,
            noisy=bool(result.timing.noisy) if result.timing is not None else False,
            coverage=result.coverage,
            feedback=result.feedback,
            cached=result.cached,
            speed_rewarded=result.speed_rewarded,
            profile=_profile(result),
            speedups=_speedups(result.timing) if ok and result.timing is not None else {},
            spread=_spread(result.timing) if ok and result.timing is not None else 0.0,
            findings=tuple(finding.rule for finding in result.integrity),
        )

    @classmethod
    def without_kernel(cls, reason: str, *, penalty: float = 0.0) -> Verdict:
        """The verdict on a message from which no candidate could be read."""
        return cls(
            outcome="no_kernel",
            stage="queued",
            reward=-penalty,
            speedup=0.0,
            noisy=False,
            coverage=None,
            feedback=f"no kernel found: {reason}",
        )


def _speedups(timing: Any) -> dict[str, float]:
    found = {"eager": timing.credited} | {name: timing.credited_against(name) for name in timing.baselines}
    return {name: float(speedup) for name, speedup in found.items() if speedup is not None}


def _spread(timing: Any) -> float:
    """Of a Timing; its interval is one of 95 %."""
    low, high = timing.speedup_low, timing.speedup_high
    if low is None or high is None or not 0 < low < high or low <= 1.0 <= high:
        return 0.0
    return (math.log(high) - math.log(low)) / (2 * 1.959964)


def _coverage(coverage: float | None) -> str:
    return "" if coverage is None else f"coverage {100 * coverage:.0f} %"


def _profile(result: Any) -> str:
    """Coverage and heaviest kernels of an EvaluationResult, e.g. "coverage 87 %; rows 87 % (own), at::native::reduce_kernel 13 % (not own);
    roofline 33 % (memory-bound)", and counters last, which are many. Kernels of one name are added up, and those below 1 % left out."""
    shares: dict[tuple[str, bool], float] = {}
    for kernel in result.kernels:
        key = (_kernel_name(kernel.name), kernel.own)
        shares[key] = shares.get(key, 0.0) + kernel.share
    heaviest = sorted(shares.items(), key=lambda item: -item[1])[:PROFILE_KERNELS]
    said = [f"{name} {100 * share:.0f} % ({'own' if own else 'not own'})" for (name, own), share in heaviest if share >= 0.01]
    return "; ".join(filter(None, [_coverage(result.coverage), ", ".join(said), _roofline(result.roofline), _counters(result.counters)]))


def _roofline(roofline: Any) -> str:
    if roofline is None:
        return ""
    bound = "" if roofline.bound == "unknown" else f" ({roofline.bound}-bound)"
    return f"roofline {100 * roofline.share:.0f} %{bound}"


def _counters(kernels: Any) -> str:
    """Of the heaviest kernel of its own, else of the heaviest."""
    if not kernels:
        return ""
    shown = next((kernel for kernel in kernels if kernel.own), kernels[0])
    said = [f"{name} {value:.4g} {shown.units.get(name, '')}".rstrip() for name, value in shown.metrics.items()]
    return f"counters of {_kernel_name(shown.kernel)}: {', '.join(said)}"


def _kernel_name(name: str) -> str:
    """A demangled kernel name without template arguments and parameters, bounded; a candidate may call its kernels what it likes, so
    only characters of identifiers are let through."""
    bare = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    short = re.split(r"[<(]", bare, maxsplit=1)[0].strip() or bare
    return re.sub(r"[^\w:.~ -]", "?", short, flags=re.ASCII)[:PROFILE_NAME_CHARS]


@dataclasses.dataclass(kw_only=True)
class Turn:
    """One sampled message: its text, the candidate read from it, and the verdict (policy turns only); the form of its call (selection and
    summary, see dk_jax.agents.call_forms)."""

    text: str
    stop: str
    source: str | None = None
    error: str = ""
    verdict: Verdict | None = None
    reward: float = 0.0
    form: str = ""


@dataclasses.dataclass(kw_only=True)
class Trajectory:
    """One agent's token sequence.

    Attributes:
        agent: "selection", "policy" or "summary".
        task: name of the task.
        group: the baseline group; trajectories with equal (agent, group) are compared with one another.
        scheme: index of the selection scheme within the task (k = the null scheme), -1 for none.
        member: index within the scheme (policy) or the trigger (summary).
        tokens: the whole sequence, prompt and answers, as it was sampled; with `starts`, several sequences one after another.
        turn_index: for each token the turn that sampled it, or -1 for prompt and feedback tokens.
        logp_sample: log-probability of each sampled token under the distribution that it was drawn from (0 elsewhere).
        turns: texts and verdicts.
        rewards: reward of each turn.
        advantages: advantage of each turn (filled in by `dk_jax.train.credit`).
        skills: names of the skills in the prompt (policy, summary) or chosen (selection).
        shown: names of the skills on offer (selection).
        timed: whether its kernels were timed (policy); else its rewards are for correctness alone.
        starts: where in `tokens` each later sequence begins, for a policy whose every turn answers a prompt of its own; () where
            the conversation is one sequence.
    """

    agent: str
    task: str
    group: str
    scheme: int = -1
    member: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    turn_index: list[int] = dataclasses.field(default_factory=list)
    logp_sample: list[float] = dataclasses.field(default_factory=list)
    turns: list[Turn] = dataclasses.field(default_factory=list)
    rewards: list[float] = dataclasses.field(default_factory=list)
    advantages: list[float] = dataclasses.field(default_factory=list)
    skills: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    timed: bool = True
    starts: tuple[int, ...] = ()

    @property
    def sequences(self) -> list[slice]:
        """Where in `tokens` each of its sequences lies, in order; no token sees those of another."""
        return [slice(a, b) for a, b in itertools.pairwise((0, *self.starts, len(self.tokens)))]

    def start_sequence(self) -> None:
        """What is appended from here on does not go on from what is there."""
        if self.tokens:
            self.starts += (len(self.tokens),)

    def append_prompt(self, tokens: Iterable[int]) -> None:
        tokens = list(tokens)
        self.tokens += tokens
        self.turn_index += [-1] * len(tokens)
        self.logp_sample += [0.0] * len(tokens)

    def append_sample(self, tokens: Iterable[int], logp_sample: Iterable[float]) -> None:
        tokens, logp_sample = list(tokens), [float(p) for p in logp_sample]
        if len(tokens) != len(logp_sample):
            raise ValueError(f"{len(tokens)} sampled tokens but {len(logp_sample)} log-probs ({self.agent}, {self.task})")
        turn = len(self.turns)
        self.tokens += tokens
        self.turn_index += [turn] * len(tokens)
        self.logp_sample += logp_sample

    @property
    def verdicts(self) -> list[Verdict]:
        return [turn.verdict for turn in self.turns if turn.verdict is not None]

    @property
    def best(self) -> Turn | None:
        """The correct turn with the highest speedup that counts, or None."""
        correct = [t for t in self.turns if t.verdict is not None and t.verdict.correct]
        return max(correct, key=lambda t: t.verdict.earned_speedup) if correct else None

    def to_dict(self) -> dict[str, Any]:
        """Its fields, turns and verdicts as dicts; lists are its own, not copies: tokens are many."""
        turns = [dict(vars(turn), verdict=dict(vars(turn.verdict)) if turn.verdict is not None else None) for turn in self.turns]
        return dict(vars(self), turns=turns)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trajectory:
        data = dict(data)
        data["turns"] = [
            Turn(**{**turn, "verdict": Verdict(**turn["verdict"]) if turn["verdict"] else None}) for turn in data["turns"]
        ]
        for name in ("skills", "shown", "starts"):
            data[name] = tuple(data.get(name, ()))
        return cls(**data)


def save_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Writes one JSON line a trajectory, complete or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".part")
    with open(partial, "w", encoding="utf-8") as file:
        for trajectory in trajectories:
            file.write(json.dumps(trajectory.to_dict()) + "\n")
    partial.replace(path)


def load_trajectories(path: Path) -> list[Trajectory]:
    """Reads what `save_trajectories` wrote; a bad line is named with its number."""
    out = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                out.append(Trajectory.from_dict(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}:{number}: not a trajectory ({error}). Only whole files that a run wrote can be read."
                ) from error
    return out


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on the parts alone, the same on every machine and in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
