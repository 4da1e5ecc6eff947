"""Proof of proposed skills by execution: the policy with the skill against the policy without it (DESIGN 4.4).

For each proposal the policy writes first turns with and without the skill, for the trigger's task and a sibling of it. Both
arms go to the sandbox in one verification, interleaved on one device; after each look the sequential test accepts, rejects or
asks for more pairs. All proposals of a step are sampled together. `verification=paper` is the published rule: one greedy turn.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from ml_collections import ConfigDict

from dk_jax.agents import policy
from dk_jax.rollout.judge import Arms, Judge
from dk_jax.rollout.trajectory import Trajectory, Verdict, derive_seed
from dk_jax.skills.library import SkillLibrary
from dk_jax.skills.record import Evidence, Provenance, Skill, SkillDraft, validate_draft
from dk_jax.skills.sameness import same_as
from dk_jax.skills.verification import Decision, PaperRule, SequentialTest, speedup_of
from dk_jax.tasks.task import Task

log = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class Proposal:
    """A skill that a summary proposed, and what became of it.

    Attributes:
        call: the summary's trajectory. trigger: the rollout that earned it.
        draft: the proposed text.
        problems: why it was refused before any execution; empty if it was verified.
        decision: the verdict of verification, or None.
        tasks: names of the tasks it was tried on.
        twin: the earlier proposal of this step that says the same; that one's verdict is this one's too.
        untried: refused only for what other proposals of the step took (room, a name), so that nothing is known of it.
        candidates, tokens: judged for it, of both arms; sampled for them.
    """

    call: Trajectory
    trigger: Trajectory
    draft: SkillDraft
    problems: list[str] = dataclasses.field(default_factory=list)
    decision: Decision | None = None
    tasks: tuple[str, ...] = ()
    twin: Proposal | None = None
    untried: bool = False
    candidates: int = 0
    tokens: int = 0

    @property
    def accepted(self) -> bool:
        """Whether this very proposal entered the library."""
        return self.decision is not None and self.decision.status == "accept"

    @property
    def verdict(self) -> Decision | None:
        """What verification says of it: its own decision, or that on its twin. Equal actions get equal credit."""
        return self.decision if self.twin is None else self.twin.decision

    @property
    def effect(self) -> float:
        """Speedup ratio with the skill over without; 1 where nothing was measured."""
        return self.verdict.effect if self.verdict is not None else 1.0


@dataclasses.dataclass(kw_only=True)
class Call:
    """One summary message: its trajectory, the rollout it tells of, and the drafts read from it."""

    trajectory: Trajectory
    trigger: Trajectory
    drafts: list[SkillDraft]


@dataclasses.dataclass(kw_only=True)
class Verifier:
    """How proposals are screened and proved.

    Attributes:
        rule: the acceptance rule.
        pairs_per_look: pairs of candidates a task added at each look (paired rule).
        max_verifications: proposals proved in a step; the others are refused for lack of room and may come again.
        siblings: other training tasks of a task's family.
        device, language: recorded with the evidence.
    """

    rule: SequentialTest | PaperRule
    pairs_per_look: int
    max_verifications: int
    siblings: Callable[[Task], Sequence[Task]]
    device: str
    language: str

    @classmethod
    def from_config(cls, cfg: ConfigDict, siblings: Callable[[Task], Sequence[Task]]) -> Verifier:
        c = cfg.skills
        if c.verification == "paired":
            rule = SequentialTest(
                min_ratio=c.min_ratio,
                alpha=c.error_rate,
                looks=tuple(2 * c.pairs_per_look * (i + 1) for i in range(c.looks)),
                bar=c.bar,
                fail_speedup=c.fail_speedup,
                statistic=c.statistic,
            )
        elif c.verification == "paper":
            rule = PaperRule()
        else:
            raise ValueError(f"skills.verification is {c.verification!r}: use 'paired' or 'paper'")
        return cls(
            rule=rule,
            pairs_per_look=c.pairs_per_look,
            max_verifications=c.max_verifications,
            siblings=siblings,
            device=cfg.sandbox.device,
            language=cfg.sandbox.language,
        )

    def screen(self, calls: Sequence[Call], active: Sequence[Skill], count_tokens: Callable[[str], int]) -> list[Proposal]:
        """One proposal a draft, in the order of `calls`; those with problems are refused here.

        Refused are drafts of bad form, with the name of an active skill or of an earlier proposal of the step, that say what one
        of these says already (dk_jax.skills.sameness), and those beyond `max_verifications`.
        """
        names = {skill.name for skill in active}
        proposals: list[Proposal] = []
        new: list[Proposal] = []  # admitted, or untried
        for call in calls:
            for draft in call.drafts:
                problems = validate_draft(draft, count_tokens=count_tokens)
                if draft.name in names:
                    problems.append(f"a skill named {draft.name!r} is there already")
                if (same := same_as(draft, active)) is not None:
                    problems.append(f"skill {same.name!r} says the same already")
                proposal = Proposal(call=call.trajectory, trigger=call.trigger, draft=draft, problems=problems)
                proposals.append(proposal)
                if problems:
                    continue
                if (other := same_as(draft, [p.draft for p in new])) is not None:
                    proposal.twin = next(p for p in new if p.draft is other)
                    proposal.untried = proposal.twin.untried
                    problems.append(f"proposal {other.name!r} of this step says the same")
                    continue
                if draft.name in {p.draft.name for p in new}:
                    problems.append(f"another proposal of this step is named {draft.name!r}")
                if sum(not p.problems for p in new) == self.max_verifications:
                    problems.append(f"only {self.max_verifications} proposals are verified in a step")
                proposal.untried = bool(problems)
                new.append(proposal)
        return proposals

    def verify(
        self,
        speaker: Any,
        judge: Judge,
        calls: Sequence[Call],
        tasks: dict[str, Task],
        active: Sequence[Skill],
        *,
        config: Any,
        views: Callable[[Task], Any],
        seed: int,
        step: int,
    ) -> list[Proposal]:
        """Screens and proves all proposals of a step.

        Args:
            speaker: the policy of this step. judge: the sandbox.
            tasks: the step's tasks by name. views: what the prompts say of a task.
            config: RolloutConfig (style and token limits).
        """
        proposals = self.screen(calls, active, lambda text: len(speaker.codec.encode(text)))
        for p in proposals:
            trigger = tasks[p.trigger.task]
            tried = (trigger, *self.siblings(trigger)[:1])
            prompts = [policy.render_first(views(task), [Skill.from_draft(p.draft)], style=config.style) for task in tried if not p.problems]
            if not all(speaker.fits(prompt, config.max_policy_tokens) for prompt in prompts):
                p.problems.append("a task's prompt with it does not fit into the context")
            if not p.problems:
                p.tasks = tuple(task.name for task in tried)
        open_ = [p for p in proposals if not p.problems]
        known = {t.name: t for name in {p.trigger.task for p in open_} for t in (tasks[name], *self.siblings(tasks[name])[:1])}
        if isinstance(self.rule, PaperRule):
            self._paper(speaker, judge, open_, known, config=config, views=views, step=step)
            return proposals
        scores: dict[int, tuple[list[Verdict], list[Verdict]]] = {i: ([], []) for i in range(len(open_))}
        pair_tasks: dict[int, list[str]] = {i: [] for i in scores}
        for look in range(len(self.rule.looks)):
            pending = [i for i, p in enumerate(open_) if p.decision is None or p.decision.status == "continue"]
            arms = self._arms(speaker, [open_[i] for i in pending], known, config=config, views=views, seed=seed, step=step, look=look)
            for i, own in zip(pending, arms, strict=True):
                for arm, (control, treated) in zip(own, judge.verify(own, phase=f"rl/{step}/verify/{i}/look{look}"), strict=True):
                    scores[i][0].extend(control)
                    scores[i][1].extend(treated)
                    pair_tasks[i].extend([arm.task.name] * len(control))
                control, treated = ([speedup_of(v) for v in side] for side in scores[i])
                open_[i].decision = self.rule.decide(control, treated, pair_tasks[i])
        return proposals

    def _speak(self, speaker, rows: Sequence[tuple[Task, list[Skill], int]], *, config, views) -> list[tuple[str, int]]:
        """First turns of the policy with their tokens; what can't be read as a kernel is sent on as it is and will not build. A message
        that was cut short holds no kernel, as in a rollout."""
        trajectories = [Trajectory(agent="policy", task=task.name, group="verification") for task, _, _ in rows]
        prompts = [policy.render_first(views(task), skills, style=config.style) for task, skills, _ in rows]
        speaker.speak(trajectories, prompts, [seed for _, _, seed in rows], max_new=config.max_policy_tokens)
        out = []
        for trajectory in trajectories:
            turn = trajectory.turns[-1]
            whole = turn.stop == "eos"
            text = policy.parse(turn.text, style=config.style).source or turn.text or " " if whole else " "
            out.append((text, sum(at >= 0 for at in trajectory.turn_index)))
        return out

    def _arms(self, speaker, proposals, known, *, config, views, seed, step, look) -> list[list[Arms]]:
        rows = []
        for p in proposals:
            skill = Skill.from_draft(p.draft)
            for name in p.tasks:
                # A family of one task: both halves of the pairs come from it.
                pairs = self.pairs_per_look * (2 // len(p.tasks))
                for arm, skills in (("control", []), ("treated", [skill])):
                    for i in range(pairs):
                        rows.append((known[name], skills, derive_seed(seed, "verify", step, p.draft.name, name, arm, look, i)))
        spoken = iter(self._speak(speaker, rows, config=config, views=views))
        out = []
        for p in proposals:
            pairs = self.pairs_per_look * (2 // len(p.tasks))
            own = []
            for name in p.tasks:
                messages = [next(spoken) for _ in range(2 * pairs)]
                p.candidates += len(messages)
                p.tokens += sum(tokens for _, tokens in messages)
                texts = tuple(text for text, _ in messages)
                own.append(Arms(task=known[name], control=texts[:pairs], treated=texts[pairs:]))
            out.append(own)
        return out

    def _paper(self, speaker, judge, proposals, known, *, config, views, step) -> None:
        rows = [(known[p.trigger.task], [Skill.from_draft(p.draft)], 0) for p in proposals]
        if not rows:
            return
        spoken = self._speak(dataclasses.replace(speaker, temperature=0.0), rows, config=config, views=views)
        for i, (p, (text, tokens)) in enumerate(zip(proposals, spoken, strict=True)):
            p.tasks, p.candidates, p.tokens = (p.trigger.task,), 2, tokens
            first = p.trigger.turns[0]
            arm = Arms(task=known[p.trigger.task], control=(first.source or " ",), treated=(text,))
            [(control, treated)] = judge.verify([arm], phase=f"rl/{step}/verify/{i}")
            p.decision = self.rule.decide(speedup_of(control[0]), speedup_of(treated[0]))

    def stage(self, library: SkillLibrary, proposals: Sequence[Proposal], *, step: int) -> int:
        """Stages accepted and rejected proposals, with their evidence, for the commit of `step`.

        With rl.staleness=1 the step before has committed skills that `screen` did not know of. A proposal with the name of one, or an
        accepted one that says the same, is recorded as rejected, its evidence being what it is.

        Returns:
            How many accepted proposals were rejected for that.
        """
        overtaken = 0
        for p in proposals:
            if p.decision is None:
                continue
            d = p.decision
            first, best = p.trigger.turns[0], p.trigger.best
            provenance = Provenance(
                task=p.trigger.task,
                step=step,
                rollouts=(p.call.group,),
                code_before=first.source or "",
                code_after=best.source if best is not None else "",
            )
            evidence = Evidence(
                step=step,
                tasks=p.tasks,
                device=self.device,
                rule="paper" if isinstance(self.rule, PaperRule) else "sequential",
                decision="accept" if p.accepted else "reject",
                effect=d.effect,
                low=d.low,
                high=d.high,
                p=d.p,
                n=d.n,
                reason=d.reason,
            )
            if problem := _overtaken(library, p):
                overtaken += p.accepted
                evidence = dataclasses.replace(evidence, reason=f"{d.reason}; {problem}")
                library.add(
                    Skill.from_draft(p.draft, status="rejected", provenance=provenance, evidence=(evidence,), language=self.language)
                )
                continue
            skill_id = library.propose(p.draft, provenance=provenance, language=self.language)
            library.record_evidence(skill_id, evidence)
            if p.accepted:
                library.activate(skill_id)
            else:
                library.reject(skill_id, d.reason)
        return overtaken


def _overtaken(library: SkillLibrary, proposal: Proposal) -> str:
    """Why a proposal that was verified may not enter the library as it has become meanwhile, or ""."""
    name = proposal.draft.name
    if name in library.staged:
        return f"a skill named {name!r} has come in the step before"
    same = same_as(proposal.draft, library.staged.active()) if proposal.accepted else None
    return f"skill {same.name!r}, which has come in the step before, says the same" if same is not None else ""
