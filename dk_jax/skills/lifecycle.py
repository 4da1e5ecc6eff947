"""What becomes of a skill once it is in the library: what it does decides (DESIGN 4.5).

Each use of a skill measures an effect: the mean log-speedup of the rollouts that had it less that of the same task's rollouts without any
skill. Effects are noisy, and age: the policy learns what a skill says, or outgrows it. So a skill's effect theta has a posterior,

    theta, sigma^2 ~ normal-inverse-gamma      effect_i | theta, sigma^2 ~ N(theta, sigma^2)      theta | effects ~ Student's t

(conjugate; Gelman et al. 2013, Bayesian Data Analysis, section 3.3), where an effect of n steps ago counts 2^(-n / half_life_steps) times,
and its verification as a few effects at the time of its proposal. From it follow, at the end of each step,

    active -> dormant     it is unlikely to help (P(theta > log `least_gain`) < `dormant_below`), or is shown again and again and never selected,
                          or is the least promising of more than `most_active`: the upper end of its posterior's interval is the lowest, so
                          what is hardly known is not the first to go
    dormant -> active     after a rest, which doubles each time: the policy that it did not help has changed meanwhile, so what was
                          measured before counts a quarter
    dormant -> retired    after `most_rests` rests
    active -> retired     another active skill shows the same code (dk_jax.skills.likeness): the one of the lesser posterior mean is absorbed,
                          its uses count for the other one from then on

Every change is an event of the library's log with its reason, committed with the step that it belongs to, and undone with it
(`SkillLibrary.rollback_to`); a retired skill can be revived by hand. Where nothing is certain, nothing happens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from scipy.special import stdtr, stdtrit

from dk_jax.skills.library import LoggedEvent, SkillLibrary
from dk_jax.skills.likeness import Alike
from dk_jax.skills.record import Skill, Status
from dk_jax.skills.view import LibraryView

AFTER_REST = 0.25
"""What uses before a rest count after it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LifecycleRules:
    """When a skill's status changes; see the module's text.

    Attributes:
      half_life_steps: training steps after which a measurement counts half.
      prior_effects: how many effects of zero the prior is worth.
      prior_sigma: standard deviation of an effect (of log-speedups) before any is measured.
      verification_weight: what a verification's pair is worth, as a share of an effect (what passed a test looks better than it is), ...
      verification_most: ... and all of them together at most.
      least_effects: measured effects, aged, below which a skill is left alone.
      least_gain: speedup ratio from which a skill helps: what does nothing takes room in prompts.
      dormant_below: probability of helping below which it rests.
      ignored_after: times shown, aged, without ever being selected, after which it rests; 0 never.
      most_active: active skills beyond which the least promising rest; 0 for any number.
      rest_steps: training steps of the first rest; each further one is twice as long.
      most_rests: rests after which a skill that would rest again is retired.
      alike: likeness of two skills' examples from which they are one idea; above 1 nothing is merged.

    Raises:
      ValueError: a number out of its range, named.
    """

    half_life_steps: float = 100.0
    prior_effects: float = 2.0
    prior_sigma: float = 0.4
    verification_weight: float = 0.25
    verification_most: float = 4.0
    least_effects: float = 4.0
    least_gain: float = 1.03
    dormant_below: float = 0.2
    ignored_after: float = 40.0
    most_active: int = 64
    rest_steps: int = 50
    most_rests: int = 2
    alike: float = 0.75

    def __post_init__(self):
        for name in ("half_life_steps", "prior_effects", "prior_sigma", "least_effects", "least_gain", "rest_steps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"skills.lifecycle.{name} is {getattr(self, name)}; it must be above 0")
        for name in ("verification_weight", "verification_most", "ignored_after", "most_active", "most_rests", "alike"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"skills.lifecycle.{name} is {getattr(self, name)}; it must not be negative")
        if not 0 <= self.dormant_below < 1:
            raise ValueError(f"skills.lifecycle.dormant_below is a probability below 1, got {self.dormant_below}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recent:
    """A skill's uses, each counting by its age at `step`: times shown and selected, effects, and sums of the effects and their squares."""

    step: int = 0
    shown: float = 0.0
    selected: float = 0.0
    effects: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def at(self, step: int, half_life_steps: float) -> Recent:
        """The same, looked at later."""
        return dataclasses.replace(self.times(2.0 ** (-(step - self.step) / half_life_steps)), step=step)

    def times(self, share: float) -> Recent:
        """With each use counting for that share of itself."""
        return Recent(step=self.step, **{name: share * getattr(self, name) for name in ("shown", "selected", "effects", "total", "squares")})

    def plus(self, shown: float, selected: float, log_effects: Sequence[float]) -> Recent:
        """With uses of now counted in."""
        return Recent(
            step=self.step, shown=self.shown + shown, selected=self.selected + selected, effects=self.effects + len(log_effects),
            total=self.total + sum(log_effects), squares=self.squares + sum(e * e for e in log_effects),
        )  # fmt: skip

    def together(self, other: Recent) -> Recent:
        """Of two skills that are one from now on; both looked at in the same step."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in ("shown", "selected", "effects", "total", "squares")}
        return Recent(step=self.step, **sums)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Posterior:
    """What is known of a skill's effect.

    Attributes:
      mean, low, high: of the log-speedup, with its central 95 % interval.
      helps: probability that it is above log `least_gain`.
      effects: measured effects that it rests on, aged; the prior and verifications not among them.
    """

    mean: float
    low: float
    high: float
    helps: float
    effects: float


def posterior(skill: Skill, recent: Recent, rules: LifecycleRules) -> Posterior:
    """Of the skill's effect at `recent.step`."""
    before = rules.prior_effects
    pairs, weighted = 0.0, 0.0
    for evidence in skill.evidence:
        if evidence.effect > 0:
            worth = rules.verification_weight * evidence.n * 2.0 ** (-max(0, recent.step - evidence.step) / rules.half_life_steps)
            pairs, weighted = pairs + worth, weighted + worth * math.log(evidence.effect)
    if pairs > rules.verification_most:
        pairs, weighted = rules.verification_most, weighted * rules.verification_most / pairs
    start = weighted / (before + pairs)
    n, mean = recent.effects, recent.total / recent.effects if recent.effects else 0.0
    kappa, shape = before + pairs + n, 1.0 + (pairs + n) / 2
    spread = max(0.0, recent.squares - n * mean * mean)
    scale = rules.prior_sigma**2 * (1.0 + pairs / 2) + 0.5 * spread + 0.5 * (before + pairs) * n * (mean - start) ** 2 / kappa
    centre = ((before + pairs) * start + n * mean) / kappa
    width = math.sqrt(scale / (shape * kappa))
    half = float(stdtrit(2 * shape, 0.975)) * width
    helps = float(stdtr(2 * shape, (centre - math.log(rules.least_gain)) / width))
    return Posterior(mean=centre, low=centre - half, high=centre + half, helps=helps, effects=n)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A skill's new status and why; `into`: id of the skill that absorbs it, if one does."""

    skill_id: str
    name: str
    status: Status
    reason: str
    into: str = ""


@dataclasses.dataclass
class _Past:
    """What the log says of one skill: its uses, and when it last came to rest or back, how often it rested."""

    recent: Recent = Recent()
    rests: int = 0
    since: int = 0


class Lifecycle:
    """Follows a library's log and says what is to change; one for a library's life in a process.

    Args:
      rules: see there.
    """

    def __init__(self, rules: LifecycleRules):
        self.rules = rules
        self._past: dict[str, _Past] = {}
        self._seen = 0
        self._alike = Alike(rules.alike)

    def review(self, library: SkillLibrary, step: int) -> list[Change]:
        """Stages what follows from all that is committed and staged, and returns it; to be called before `library.commit(step)`.

        Raises:
          LibraryError: the library can't be read.
        """
        self._catch_up(library)
        now = {skill_id: dataclasses.replace(past) for skill_id, past in self._past.items()}
        for event in library.staged_events:
            _take(now, LoggedEvent(seq=0, step=step, event=event, time_s=0.0, undone=False), self.rules.half_life_steps)
        recents = {skill.id: self._recent(now, skill.id, step) for skill in library.staged.skills("active", "dormant")}
        changes = self._merges(library.staged, recents)
        gone = {change.skill_id for change in changes}
        for skill in library.staged.skills("active", "dormant"):
            if skill.id not in gone:
                changes += self._fate(skill, recents[skill.id], now.get(skill.id, _Past()), step)
        gone |= {change.skill_id for change in changes}
        changes += self._crowded_out([skill for skill in library.staged.active() if skill.id not in gone], recents, now)
        for change in changes:
            if change.into:
                library.absorb(change.into, change.skill_id, change.reason)
            else:
                library.set_status(change.skill_id, change.status, change.reason)
        return changes

    def posteriors(self, library: SkillLibrary, step: int) -> dict[str, Posterior]:
        """Of all active and dormant skills as committed, by name."""
        self._catch_up(library)
        skills = library.current.skills("active", "dormant")
        return {skill.name: posterior(skill, self._recent(self._past, skill.id, step), self.rules) for skill in skills}

    def _recent(self, past: dict[str, _Past], skill_id: str, step: int) -> Recent:
        return past.get(skill_id, _Past()).recent.at(step, self.rules.half_life_steps)

    def _catch_up(self, library: SkillLibrary) -> None:
        """Reads what was committed since; all of it anew after a rollback."""
        found = library.history(after=self._seen)
        if any(logged.event.kind == "rollback" for logged in found):
            self._past, found = {}, library.history()
        for logged in found:
            if not logged.undone:
                _take(self._past, logged, self.rules.half_life_steps)
            self._seen = max(self._seen, logged.seq)

    def _fate(self, skill: Skill, recent: Recent, past: _Past, step: int) -> Iterable[Change]:
        """What becomes of one skill now: nothing, mostly."""
        rules = self.rules
        if skill.status == "dormant":
            if step - past.since >= rules.rest_steps * 2 ** (past.rests - 1):
                yield self._change(skill, "active", f"it has rested for {step - past.since} steps and gets another chance")
            return
        known = posterior(skill, recent, rules)
        if known.effects >= rules.least_effects and known.helps < rules.dormant_below:
            why = f"it helps with probability {known.helps:.2f}: {math.exp(known.mean):.3f}x over {known.effects:.1f} uses"
        elif rules.ignored_after and recent.shown >= rules.ignored_after and recent.selected < 0.5:
            why = f"it was shown {recent.shown:.0f} times and not selected"
        else:
            return
        yield from self._rest(skill, past, why)

    def _rest(self, skill: Skill, past: _Past, why: str) -> Iterable[Change]:
        """An active skill rests, or is retired if it has rested often enough: by way of rest, which every retirement of this kind goes."""
        yield self._change(skill, "dormant", why)
        if past.rests >= self.rules.most_rests:
            yield self._change(skill, "retired", f"{why}, after {past.rests} rests")

    def _crowded_out(self, active: list[Skill], recents: dict[str, Recent], past: dict[str, _Past]) -> list[Change]:
        """The least promising of those that are active and stay so but for this; of equals the younger."""
        too_many = len(active) - self.rules.most_active
        if not self.rules.most_active or too_many <= 0:
            return []
        known = {skill.id: posterior(skill, recents[skill.id], self.rules) for skill in active}
        least = sorted(reversed(active), key=lambda skill: known[skill.id].high)[:too_many]
        changes: list[Change] = []
        for skill in least:
            why = f"{len(active)} skills are active, and no more than {math.exp(known[skill.id].high):.3f}x can be hoped for of this one"
            changes += self._rest(skill, past.get(skill.id, _Past()), why)
        return changes

    @staticmethod
    def _change(skill: Skill, status: Literal["active", "dormant", "retired"], reason: str) -> Change:
        return Change(skill_id=skill.id, name=skill.name, status=status, reason=reason)

    def _merges(self, view: LibraryView, recents: dict[str, Recent]) -> list[Change]:
        """Active skills that show the code of another, which absorbs them: the better one, or the older of equals."""
        if self.rules.alike > 1:
            return []
        active = view.active()
        near = {skill.id: self._alike.to(skill) for skill in active}
        if not any(near.values()):
            return []
        means = {skill.id: posterior(skill, recents[skill.id], self.rules).mean for skill in active}
        ranked = sorted(active, key=lambda skill: -means[skill.id])  # stable: older first among equals
        kept: list[Skill] = []
        changes: list[Change] = []
        for skill in ranked:
            same = next((one for one in kept if one.id in near[skill.id] or skill.id in near[one.id]), None)
            if same is None:
                kept.append(skill)
                continue
            degree = near[skill.id].get(same.id) or near[same.id][skill.id]
            reason = f"it shows the code of {same.name} ({degree:.2f} alike), which does no worse"
            changes.append(Change(skill_id=skill.id, name=skill.name, status="retired", reason=reason, into=same.id))
        return changes


def _take(past: dict[str, _Past], logged: LoggedEvent, half_life_steps: float) -> None:
    """Counts one event into what is known of its skill."""
    event, step = logged.event, logged.step
    if event.kind not in ("usage", "status", "absorbed"):
        return
    of = past.setdefault(event.skill, _Past())
    if event.kind == "usage":
        data = event.data
        of.recent = of.recent.at(step, half_life_steps).plus(data["shown"], data["selected"], data["log_effects"])
    elif event.kind == "absorbed":
        other = past.get(event.data["of"], _Past())
        of.recent = of.recent.at(step, half_life_steps).together(other.recent.at(step, half_life_steps))
    elif event.data["status"] == "dormant":
        of.rests, of.since = of.rests + 1, step
    elif event.data["status"] == "active" and of.rests:
        of.recent, of.since = of.recent.at(step, half_life_steps).times(AFTER_REST), step
