"""Requests and results of verifications: is one way of writing kernels better than another, and by which rule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from sandbox.protocol.evaluations import (
    MAX_CANDIDATES,
    PROTOCOL_VERSION,
    Candidate,
    ClientKey,
    ClientName,
    EvaluationResult,
    Options,
    Priority,
    Reply,
    Request,
    State,
    TaskSpec,
)

MAX_PAIRS = 256
"""That a verification's rule may look at."""
MAX_LOOKS = 32
EXACT_PAIRS = 14
"""The signs of so many pairs are enumerated, and those of later ones drawn with a fixed seed."""
RULE_KINDS = ("sequential", "paper")

Factor = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]
Speedup = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]


class VerificationTask(Request):
    """One arm of a verification: the same task with and without the skill."""

    task: TaskSpec
    control: list[Candidate] = Field(min_length=1, max_length=MAX_CANDIDATES)
    treated: list[Candidate] = Field(min_length=1, max_length=MAX_CANDIDATES)


class SequentialRuleSpec(Request):
    """Decide by a paired sign-flip permutation test with alpha spending (`sandbox.verification`, which says how it works).

    Attributes:
      min_ratio: gain that must be exceeded, as a speedup ratio.
      alpha: chance of accepting what gains no more than that.
      looks: numbers of pairs, former requests' included, after which to look, ascending. They are to be fixed before the first
        request. None is one look at all pairs of a request that has no `earlier` ones.
      bar: speedup over eager that the best treated candidate must reach.
      fail_speedup: speedup that a failed candidate counts as in the effect.
      mixed_ratio: what a pair with one failure counts as in the test, as a speedup ratio in favour of the other candidate.
      futility: give up at a look whose own p-value exceeds this; 1 never gives up.
      spend_power: 1 spends alpha evenly over the pairs, more keeps it for later looks.
      statistic: what a pair's evidence is, "differences" of log-speedups or of "ranks" within an arm.
    """

    kind: Literal["sequential"] = "sequential"
    min_ratio: Factor = 1.0
    alpha: float = Field(default=0.1, gt=0, lt=1)
    looks: tuple[Annotated[int, Field(ge=1, le=MAX_PAIRS)], ...] | None = None
    bar: float = Field(default=1.2, ge=0, le=1000)
    fail_speedup: float = Field(default=0.25, ge=1e-6, le=1000)
    mixed_ratio: float = Field(default=1.4, ge=1, le=1000)
    futility: float = Field(default=0.5, ge=0, le=1)
    spend_power: float = Field(default=1.0, gt=0, le=100)
    statistic: Literal["differences", "ranks"] = "differences"

    @field_validator("looks")
    @classmethod
    def _looks_ascend_and_can_show_alpha(cls, looks: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
        if looks is None:
            return None
        if not 1 <= len(looks) <= MAX_LOOKS or list(looks) != sorted(set(looks)):
            text = "looks must be 1 to {most} ascending numbers of pairs, got {looks}"
            raise PydanticCustomError("looks_not_ascending", text, {"most": MAX_LOOKS, "looks": str(list(looks))})
        if problem := cannot_show(looks[-1], info.data.get("alpha", 1.0)):
            raise PydanticCustomError("too_few_pairs", "{problem}", {"problem": problem})
        return looks


class PaperRuleSpec(Request):
    """Decide as daVinci-kernel (arXiv 2606.16497) does: the treated candidate of a single pair is correct and fast enough. No error rate
    is controlled.

    Attributes:
      min_absolute: speedup over eager that it must reach.
      min_ratio: times the control's speedup that it must reach.
      fail_speedup: what a failed candidate counts as when the effect is computed.
    """

    kind: Literal["paper"] = "paper"
    min_absolute: float = Field(default=1.2, ge=0, le=1000)
    min_ratio: Factor = 1.2
    fail_speedup: float = Field(default=0.25, ge=1e-6, le=1000)


RuleSpec = Annotated[SequentialRuleSpec | PaperRuleSpec, Field(discriminator="kind")]


def cannot_show(pairs: int, alpha: float) -> str:
    """Why so many pairs can't show an error rate, whatever they are, or ""."""
    least = 2.0 ** -min(pairs, EXACT_PAIRS)
    advice = "Add pairs or raise alpha." if pairs < EXACT_PAIRS else "Raise alpha."
    return f"{pairs} pairs can't show an error rate of {alpha:g}: the smallest p-value is {least:.2g}. {advice}" if alpha < least else ""


class PairedSpeedups(Reply):
    """Of one look at one arm: speedups over eager of the pairs' candidates, None for one that failed or whose speed does not count."""

    control: list[Speedup | None] = Field(min_length=1)
    treated: list[Speedup | None] = Field(min_length=1)

    @field_validator("treated")
    @classmethod
    def _they_pair_up(cls, treated: list[float | None], info: ValidationInfo) -> list[float | None]:
        if len(treated) != len(control := info.data.get("control", treated)):
            raise _no_pairs(len(control), len(treated))
        return treated


def _no_pairs(control: int, treated: int) -> PydanticCustomError:
    return PydanticCustomError(
        "no_pairs", "{control} control and {treated} treated candidates do not form pairs", {"control": control, "treated": treated}
    )


class VerificationRequest(Request):
    """Paired arms judged interleaved (control, treated, control, ...) on one device. `client`, `priority`: as for evaluations,
    which come after verifications where neither says otherwise.

    Attributes:
      rule: decides, once all is judged, whether the treated candidates are better. Pair i of an arm is its i-th control and its i-th
        treated candidate.
      earlier: the pairs of former requests that the rule counts too: look by look, in the order in which they were asked for, those of
        each of the arms. A former answer's `samples` are that.
    """

    protocol_version: Literal[1] = PROTOCOL_VERSION
    client_key: ClientKey | None = None
    client: ClientName = ""
    priority: Priority = 1
    arms: list[VerificationTask] = Field(min_length=1, max_length=16)
    options: Options = Options()
    rule: RuleSpec | None = None
    earlier: list[list[PairedSpeedups]] = []

    @property
    def pairs(self) -> int:
        """That a rule would have: earlier ones and those to be judged."""
        return sum(len(arm.control) for arm in self.arms) + sum(len(arm.control) for look in self.earlier for arm in look)

    @model_validator(mode="after")
    def _the_rule_can_be_followed(self) -> VerificationRequest:
        problem = None
        if self.rule is not None:
            problem = self._unpaired() or (self._against_paper() if self.rule.kind == "paper" else self._against_sequential(self.rule))
        elif self.earlier:
            problem = ("earlier",), PydanticCustomError("no_rule", "earlier pairs are for a rule to count: send `rule` too, or leave them out")
        if problem is not None:
            where, error = problem
            # Raised so, the error names the field; one raised alone would name the whole request.
            raise ValidationError.from_exception_data("VerificationRequest", [InitErrorDetails(type=error, loc=where, input=None)])
        return self

    def _unpaired(self) -> _Problem | None:
        if self.options.timing == "none":
            return ("options", "timing"), PydanticCustomError("no_speeds", "a rule decides by speeds: timing must be 'quick' or 'full'")
        for number, arm in enumerate(self.arms):
            if len(arm.control) != len(arm.treated):
                return ("arms", number, "treated"), _no_pairs(len(arm.control), len(arm.treated))
        for number, look in enumerate(self.earlier):
            if len(look) != len(self.arms):
                text = "this look has {found} arms and the request {arms}: send the pairs of the same arms, in the same order"
                return ("earlier", number), PydanticCustomError("other_arms", text, {"found": len(look), "arms": len(self.arms)})
        return None

    def _against_paper(self) -> _Problem | None:
        if self.earlier:
            return ("earlier",), PydanticCustomError("paper_has_one_look", "rule 'paper' looks once: leave earlier pairs out")
        if self.pairs != 1:
            text = "rule 'paper' compares one control with one treated candidate of one arm, got {pairs} pairs"
            return ("arms",), PydanticCustomError("paper_has_one_pair", text, {"pairs": self.pairs})
        return None

    def _against_sequential(self, rule: SequentialRuleSpec) -> _Problem | None:
        if rule.looks is None and self.earlier:
            text = "looks must be given where there are earlier pairs, and be the same in each request of the test"
            return ("rule", "looks"), PydanticCustomError("looks_missing", text)
        if rule.looks is None and (problem := cannot_show(self.pairs, rule.alpha)):
            return ("rule", "alpha"), PydanticCustomError("too_few_pairs", "{problem}", {"problem": problem})
        if self.pairs > (most := rule.looks[-1] if rule.looks else MAX_PAIRS):
            text = "there are {pairs} pairs, earlier ones included, and the last look is after {most}: the others would not count"
            return ("rule", "looks"), PydanticCustomError("too_many_pairs", text, {"pairs": self.pairs, "most": most})
        return None


_Problem = tuple[tuple[str | int, ...], PydanticCustomError]
"""Where in a request, and what."""


class VerificationAccepted(Reply):
    id: str


class VerificationArm(Reply):
    control: list[EvaluationResult]
    treated: list[EvaluationResult]


class ArmSamples(PairedSpeedups):
    """One look's pairs of one arm, as the rule has counted them; None for pairs after those that the decision rests on.

    Attributes:
      differences: log speedup(treated) - log speedup(control), failures as `fail_speedup`. The effect is exp of their mean over all
        arms and looks.
      evidence: what a pair says for the treated side in the test, of which `p` is the p-value; None under rule "paper".
    """

    differences: list[float | None]
    evidence: list[float | None]


class VerificationDecision(Reply):
    """What the rule says.

    Attributes:
      status: "accept", "reject", or "continue": more pairs are needed, or the sandbox could not judge some of these.
      effect: speedup ratio, treated over control (geometric mean over pairs); 1 without any pair.
      low, high: its 95 % interval (Student's t on the log-differences), None below two pairs.
      p: p-value at the last look, counting earlier looks; None where the rule has none or no look was reached.
      spent: error rate that p was held against, or None.
      n: pairs that the decision rests on, in the order of `samples`: look by look, in each arm by arm.
      best: highest speedup over eager of a correct treated candidate among them, 0 if none was correct.
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


class VerificationResult(Reply):
    """Results in the order of the request; `state` is "done" when every evaluation is.

    Attributes:
      decision: of the request's rule; None without one, and until all is done.
      samples: what the decision rests on: earlier looks and this one, in each the arms. Where the sandbox could not judge some candidate
        this look is not among them: its pairs are not comparable, and are to be judged again.
    """

    id: str
    state: State
    arms: list[VerificationArm]
    decision: VerificationDecision | None = None
    samples: list[list[ArmSamples]] = []
