"""Is a skill worth having? Rules that decide from candidates written with it (treated) and without it (control); see DESIGN 4.4.

`SequentialTest` compares pairs (control, treated) of one task each, pooled over tasks. A pair's evidence is

    d = log speedup(treated) - log speedup(control) - log min_ratio     both correct
    d = +log mixed_ratio or -log mixed_ratio                            only the treated, only the control
    d = 0                                                               neither is

Under the null hypothesis the skill changes nothing but speeds, and those by no more than min_ratio. Treated and control are drawn and
judged alike, so their labels could as well be swapped: given the sizes |d|, every pattern of signs is equally likely (or leans to the
control), and the p-value is the share of the 2^n patterns whose sum is at least the observed one. That is exact for any distribution
of speedups, ties and failures included. Failures could enter d at the floor of `fail_speedup`, but one such pair would drown what
five others say of speeds. They do enter the effect that is reported, and a skill whose effect, failures at the floor, is not above
min_ratio is not accepted.

The test looks after each of `looks` pairs and may stop. The error rate alpha is spent over the looks in proportion to
(n_k / n_last)^spend_power, jointly: at look k the patterns that earlier looks accepted are counted together with those at least as
extreme as the observed one now, and the test passes when this share is at most alpha * (n_k / n_last)^spend_power. So the chance that a
useless skill passes at any look is at most alpha, and what a coarse early look can't spend is left to later ones. Stopping early for
futility, the floor and the bar (the best treated candidate must reach `bar` times eager) only lower that chance.

With `statistic="ranks"` a candidate counts by its rank among the correct candidates of its task so far, both arms' together:
(number slower - number faster) / m of m, between -1 and 1; a failed one counts as the lower quartile, -1/2; and d is the
difference of a pair's two scores. Their sum is a rank sum stratified by task (as in van Elteren 1960). Swapping a pair's
labels leaves the ranks as they are, so the test is exact in the same way. A candidate far slower than the others can't drown them,
and a pair with one failure still tells how fast the other candidate was. Of skills that gain 20 % it finds 0.78 within 64 pairs at
alpha 0.05, s=0.3 and f=0.4, where the differences find 0.40, or 0.56 with mixed_ratio 1.1 (scripts/bench/verification.py, whose
samples have a heavy tail).

Both hold for the tasks that the pairs are of. A skill that gains on these two and loses elsewhere passes more often; min_ratio above 1
is what keeps small gains of that kind out.

Share accepted when the skill makes correct kernels 2x faster (1.5x in brackets), by simulation with log-speedups of standard deviation
s within an arm and a share f of failures in both arms; one look at n pairs, min_ratio 1 (4 pairs can't show 0.05; looks at 4 and 8
pairs accept as many as one at 8, sooner):

    alpha  n   s=0.3 f=0    s=0.3 f=0.2  s=0.3 f=0.4  s=0.6 f=0    s=0.6 f=0.2
    0.05   6   0.96 (0.61)  0.43 (0.25)  0.13 (0.08)  0.50 (0.24)  0.23 (0.12)
    0.05   8   0.99 (0.77)  0.66 (0.40)  0.28 (0.16)  0.64 (0.31)  0.36 (0.18)
    0.1    4   0.83 (0.48)  0.35 (0.24)  0.13 (0.11)  0.40 (0.22)  0.21 (0.14)
    0.1    6   0.99 (0.78)  0.65 (0.43)  0.30 (0.21)  0.69 (0.39)  0.41 (0.25)
    0.1    8   1.00 (0.89)  0.81 (0.58)  0.46 (0.32)  0.81 (0.48)  0.57 (0.32)

`decided` applies a rule to a verification that the sandbox has judged; who judges elsewhere asks the rules themselves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np

from sandbox.protocol import (
    EXACT_PAIRS,
    ArmSamples,
    PairedSpeedups,
    VerificationArm,
    VerificationDecision,
    VerificationRequest,
    VerificationResult,
    cannot_show,
)

# Rank score of a failed candidate; a correct one's is between -1 and 1.
FAILED_RANK = -0.5
# Outcomes that say nothing of a candidate.
_NO_VERDICT = ("infra_error", "cancelled")
_SIDES = ("control", "treated")


class VerdictView(Protocol):
    """The part of a verdict that counts here."""

    outcome: str
    earned_speedup: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What a rule says.

    Attributes:
        status: "accept", "reject", or "continue" (more pairs are needed).
        effect: speedup ratio, with the skill over without (geometric mean over pairs); 1 without any pair.
        low, high: its 95 % interval (Student's t on the log-differences), None below two pairs.
        p: p-value at the last look, counting earlier looks; None where the rule has none or no look was reached.
        spent: error rate that p was held against, or None. n: pairs that the decision rests on.
        best: highest speedup over eager of a correct treated candidate, 0 if none was correct.
        reason: the decision in words.
    """

    status: Literal["accept", "reject", "continue"]
    effect: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    spent: float | None = None
    n: int
    best: float
    reason: str


def speedup_of(verdict: VerdictView) -> float | None:
    """A verdict as the rules take it: the speedup, None for a failed candidate and one whose speed does not count, NaN where the judge
    itself failed."""
    if verdict.outcome in _NO_VERDICT:
        return math.nan
    return verdict.earned_speedup if verdict.earned_speedup > 0 else None


def score(speedup: float | None, *, fail_speedup: float) -> float:
    """Log-speedup of a candidate; failed ones (None), and those slower still, count as `fail_speedup`."""
    return math.log(fail_speedup if speedup is None else max(speedup, fail_speedup))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequentialTest:
    """Paired sign-flip permutation test with alpha spending; see the module's text.

    Attributes:
        min_ratio: gain that must be exceeded, as a speedup ratio.
        alpha: chance of accepting a skill that gains no more than that.
        looks: numbers of pairs after which to look, ascending.
        bar: speedup over eager that the best treated candidate must reach.
        fail_speedup: speedup that a failed candidate counts as in the effect.
        mixed_ratio: what a pair with one failure counts as in the test, as a speedup ratio in favour of the other one.
        futility: give up at a look whose own p-value exceeds this; 1 never gives up.
        spend_power: 1 spends alpha evenly over the pairs, more keeps it for later looks.
        statistic: what a pair's evidence is, "differences" of log-speedups or of "ranks" within a task.
    """

    min_ratio: float = 1.0
    alpha: float = 0.1
    looks: tuple[int, ...] = (4, 8)
    bar: float = 1.2
    fail_speedup: float = 0.25
    mixed_ratio: float = 1.4
    futility: float = 0.5
    spend_power: float = 1.0
    statistic: Literal["differences", "ranks"] = "differences"

    def __post_init__(self):
        if not self.looks or list(self.looks) != sorted(set(self.looks)) or self.looks[0] < 1:
            raise ValueError(f"looks must be ascending numbers of pairs, got {self.looks}")
        if not 0.0 < self.alpha < 1.0:
            raise ValueError(f"alpha is an error rate between 0 and 1, got {self.alpha}")
        if problem := cannot_show(self.looks[-1], self.alpha):
            raise ValueError(problem)
        for name in ("min_ratio", "fail_speedup"):
            if getattr(self, name) <= 0.0:
                raise ValueError(f"{name} is a speedup and must be positive, got {getattr(self, name)}")
        if self.mixed_ratio < 1.0:
            raise ValueError(f"mixed_ratio must be >= 1, or a failure would count for the skill; got {self.mixed_ratio}")
        if self.statistic not in ("differences", "ranks"):
            raise ValueError(f"statistic is {self.statistic!r}: use 'differences' or 'ranks'")

    def next_look(self, n: int) -> int | None:
        """Pairs needed in all for the look after n pairs, or None after the last."""
        return next((look for look in self.looks if look > n), None)

    def decide(self, control: Sequence[float | None], treated: Sequence[float | None], tasks: Sequence[str] | None = None) -> Decision:
        """Decides from all pairs so far; call again with more pairs appended while it says "continue".

        Args:
            control, treated: speedups over eager of the pairs' candidates in the order they were judged; pair i is of one task. None
                for a failed candidate. A pair with NaN (the judge failed) is left out.
            tasks: name of each pair's task, which ranks are taken within; None: all pairs are of one task.

        Raises:
            ValueError: arms, or tasks, of different lengths.
        """
        if len(control) != len(treated):
            raise ValueError(f"{len(control)} control and {len(treated)} treated candidates do not form pairs")
        tasks = [""] * len(control) if tasks is None else tasks
        if len(tasks) != len(control):
            raise ValueError(f"{len(tasks)} tasks are named for {len(control)} pairs")
        judged = [(c, t, k) for c, t, k in zip(control, treated, tasks, strict=True) if not (_is_nan(c) or _is_nan(t))]
        pairs, tasks = [(c, t) for c, t, _ in judged], [k for _, _, k in judged]
        gain = np.array([self._score(t) - self._score(c) for c, t in pairs])
        reached = [look for look in self.looks if look <= len(pairs)]
        if not reached:
            return self._decision("continue", gain, pairs, f"{len(pairs)} of {self.looks[0]} pairs are in")
        signs = sign_patterns(self.looks[-1])
        accepted = np.zeros(len(signs), bool)
        for look in reached:
            spent = self.alpha * (look / self.looks[-1]) ** self.spend_power
            evidence = self._evidence(pairs[:look], tasks[:look])
            # No product of BLAS: its threads would get into the way of what a server times meanwhile.
            sums = np.einsum("pn,n->p", signs[:, :look], evidence)
            # Equal sums may differ in their last bits; they count as equal.
            slack = 1e-9 * float(np.abs(evidence).sum())
            extreme = sums >= sums[0] - slack
            p = float(np.mean(accepted | extreme))
            accepted |= _most_extreme(np.where(accepted, -np.inf, sums), int(accepted.sum()), spent, slack)
            seen = self._decision("continue", gain[:look], pairs[:look], "", p=p, spent=spent)
            missing = self._missing(seen, passed=bool(accepted[0]))
            if not missing:
                reason = f"{seen.effect:.2f}x with the skill, p = {p:.3g} (allowed {spent:.3g})"
                return dataclasses.replace(seen, status="accept", reason=reason)
            if look == self.looks[-1]:
                return dataclasses.replace(seen, status="reject", reason=missing)
            if not accepted[0] and float(np.mean(extreme)) > self.futility:
                return dataclasses.replace(seen, status="reject", reason=f"{missing}; more pairs would not help")
        return self._decision("continue", gain, pairs, missing, p=p, spent=spent)

    def _missing(self, seen: Decision, *, passed: bool) -> str:
        """What an acceptance lacks, or ""."""
        if not passed:
            return f"a gain over {self.min_ratio:g}x is not shown: p = {seen.p:.3g} (allowed {seen.spent:.3g})"
        if seen.effect <= self.min_ratio:
            return f"failures outweigh the gain: {seen.effect:.2f}x when they count as {self.fail_speedup:g}x"
        if seen.best < self.bar:
            return f"the best treated candidate reaches {seen.best:.2f}x of eager; the bar is {self.bar:g}x"
        return ""

    def _score(self, speedup: float | None) -> float:
        return score(speedup, fail_speedup=self.fail_speedup)

    def evidence(self, control: Sequence[float | None], treated: Sequence[float | None], tasks: Sequence[str]) -> np.ndarray:
        """What each pair says for the skill in a look at exactly these, f64[pairs]. Arguments as of `decide`, without NaN."""
        return self._evidence(list(zip(control, treated, strict=True)), tasks)

    def _evidence(self, pairs: Sequence[tuple[float | None, float | None]], tasks: Sequence[str]) -> np.ndarray:
        if not pairs:
            return np.zeros(0)
        if self.statistic == "differences":
            return np.array([self._difference(c, t) for c, t in pairs])
        speeds = np.array([[math.nan if x is None else self._score(x) for x in arm] for arm in zip(*pairs, strict=True)])
        speeds[1] -= math.log(self.min_ratio)
        scores = np.full(speeds.shape, FAILED_RANK)
        for task in set(tasks):
            own = ~np.isnan(speeds) & np.array([name == task for name in tasks])
            scores[own] = _rank_scores(speeds[own])
        return scores[1] - scores[0]

    def _difference(self, control: float | None, treated: float | None) -> float:
        if control is not None and treated is not None:
            return self._score(treated) - self._score(control) - math.log(self.min_ratio)
        return math.log(self.mixed_ratio) * ((treated is not None) - (control is not None))

    def _decision(self, status, gain, pairs, reason, **facts) -> Decision:
        low, high = _interval(gain)
        return Decision(
            status=status,
            effect=math.exp(gain.mean()) if len(gain) else 1.0,
            low=low,
            high=high,
            n=len(gain),
            best=max((treated for _, treated in pairs if treated is not None), default=0.0),
            reason=reason,
            **facts,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperRule:
    """daVinci-kernel's rule: one greedy first turn with the skill, correct and fast enough. No error rate is controlled.

    Attributes:
        min_absolute: speedup over eager that it must reach.
        min_ratio: times the trigger's first turn that it must reach.
        fail_speedup: what a failed first turn counts as when the effect is computed.
    """

    min_absolute: float = 1.2
    min_ratio: float = 1.2
    fail_speedup: float = 0.25

    def decide(self, first: float | None, treated: float | None) -> Decision:
        """Decides from the trigger's first turn and the turn with the skill, both speedups over eager; None if failed."""
        if _is_nan(first) or _is_nan(treated):
            return Decision(status="reject", effect=1.0, n=0, best=0.0, reason="the judge gave no verdict")
        first, new = first or 0.0, treated or 0.0
        accept = new >= self.min_absolute and new >= self.min_ratio * first
        return Decision(
            status="accept" if accept else "reject",
            effect=max(new, self.fail_speedup) / max(first, self.fail_speedup),
            n=1,
            best=new,
            reason=f"{new:.2f}x of eager (at least {self.min_absolute:g}x) against {first:.2f}x at first (at least {self.min_ratio:g} times that)",
        )


def _most_extreme(sums: np.ndarray, before: int, spent: float, slack: float) -> np.ndarray:
    """The open patterns with the largest sums that fit into the share `spent`, ties together. `before` patterns are accepted already and
    count; their sums are -inf."""
    ordered = np.sort(sums)
    at_least_as_large = len(sums) - np.searchsorted(ordered, sums - slack, side="left")
    return np.isfinite(sums) & (before + at_least_as_large <= spent * len(sums) * (1 + 1e-12))


def _rank_scores(values: np.ndarray) -> np.ndarray:
    """Ranks scaled to lie between -1 and 1, with a mean of 0; equal values share theirs."""
    ordered = np.sort(values)
    return (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / max(len(values), 1) - 1.0


@lru_cache(maxsize=4)
def sign_patterns(n: int) -> np.ndarray:
    """Patterns of signs of n pairs, f64[patterns, n], the first one all +1.

    Every one; beyond 14 pairs every one of the first 14 once, each with one draw of the later signs, which is fixed. Looks at up to 14
    pairs are then those of an enumeration. Beyond, the test is exact over draws: a pattern drawn uniformly, and multiplied with all
    of them, gives again every first part once with independent later signs, and is any one of them with equal chance.
    """
    head = min(n, EXACT_PAIRS)
    bits = np.zeros((2**head, n), np.int64)
    bits[:, :head] = (np.arange(2**head)[:, None] >> np.arange(head)[None, :]) & 1
    bits[1:, head:] = np.random.default_rng(0).integers(0, 2, (2**head - 1, n - head))
    signs = 1.0 - 2.0 * bits
    signs.flags.writeable = False
    return signs


def _is_nan(speedup: float | None) -> bool:
    return speedup is not None and math.isnan(speedup)


def _interval(gain: np.ndarray, level: float = 0.95) -> tuple[float | None, float | None]:
    from scipy.special import stdtrit  # half a second, which a server's start does without

    if len(gain) < 2:
        return None, None
    half = float(stdtrit(len(gain) - 1, (1 + level) / 2)) * float(gain.std(ddof=1)) / math.sqrt(len(gain))
    return math.exp(gain.mean() - half), math.exp(gain.mean() + half)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request wants decided: its rule, and the pairs of its former looks, look by look and in each arm by arm."""

    rule: SequentialTest | PaperRule
    earlier: tuple[tuple[PairedSpeedups, ...], ...] = ()

    @classmethod
    def of(cls, request: VerificationRequest) -> Asked | None:
        """None for a request without a rule."""
        if request.rule is None:
            return None
        fields = request.rule.model_dump(exclude={"kind"})
        if request.rule.kind == "paper":
            return cls(rule=PaperRule(**fields))
        rule = SequentialTest(**{**fields, "looks": request.rule.looks or (request.pairs,)})
        return cls(rule=rule, earlier=tuple(tuple(look) for look in request.earlier))


def decided(result: VerificationResult, asked: Asked) -> VerificationResult:
    """A verification that is done, with what the rule decides and the samples that this rests on.

    Pairs count in the order of the looks, in each of the arms, in each of the candidates; a task is an arm, by its place. Where the judge
    itself failed on some candidate the decision is "continue" on the earlier looks alone, and says so: arms are only comparable
    when judged together.
    """
    looks = [*asked.earlier]
    if not (problem := _unjudged(result.arms)):
        looks.append(tuple(PairedSpeedups(**{side: [speedup_of(one) for one in getattr(arm, side)] for side in _SIDES}) for arm in result.arms))
    decision, facts = _decision(asked.rule, looks)
    if problem:
        decision = dataclasses.replace(decision, status="continue", reason=problem)
    facts, samples = iter(facts), []
    for look in looks:
        samples.append([])
        for arm in look:
            own = [next(facts, (None, None)) for _ in arm.control]
            samples[-1].append(ArmSamples(control=arm.control, treated=arm.treated, differences=[d for d, _ in own], evidence=[e for _, e in own]))
    return result.model_copy(update={"decision": VerificationDecision(**dataclasses.asdict(decision)), "samples": samples})


def _decision(rule: SequentialTest | PaperRule, looks: Sequence[Sequence[PairedSpeedups]]) -> tuple[Decision, list[tuple[float, float | None]]]:
    """The decision, and of each pair that it rests on the log-difference and the evidence."""
    control, treated = ([speedup for look in looks for arm in look for speedup in getattr(arm, side)] for side in _SIDES)
    tasks = [str(place) for look in looks for place, arm in enumerate(look) for _ in arm.control]
    if isinstance(rule, SequentialTest):
        decision = rule.decide(control, treated, tasks)
        evidence = rule.evidence(control[: decision.n], treated[: decision.n], tasks[: decision.n]).tolist()
    else:
        decision = rule.decide(control[0], treated[0]) if control else Decision(status="continue", effect=1.0, n=0, best=0.0, reason="")
        evidence = [None] * decision.n
    marks = ([score(speedup, fail_speedup=rule.fail_speedup) for speedup in side] for side in (control, treated))
    return decision, [(t - c, seen) for c, t, seen in zip(*marks, evidence, strict=False)]  # of the first n


def _unjudged(arms: Sequence[VerificationArm]) -> str:
    """What the judge owes, or ""."""
    found = [
        f"arms.{number}.{side}.{index}: {result.outcome}"
        for number, arm in enumerate(arms)
        for side in _SIDES
        for index, result in enumerate(getattr(arm, side))
        if result.outcome in _NO_VERDICT
    ]
    if not found:
        return ""
    judged = sum(len(arm.control) + len(arm.treated) for arm in arms)
    return f"{len(found)} of {judged} candidates were not judged ({found[0]}), so that this look's pairs don't count: have it verified again"
