"""Verification: who writes what in which arm, what becomes of it, and what never gets there."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import pytest

from configs.demo import get_config as demo
from dk_jax.agents.text import TaskView
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict
from dk_jax.rollout.verify import Call, Verifier
from dk_jax.skills.library import SkillLibrary
from dk_jax.skills.record import Skill, SkillDraft
from dk_jax.skills.verification import SequentialTest
from sandbox.protocol import (
    Candidate,
    EvaluationResult,
    SequentialRuleSpec,
    TaskSpec,
    VerificationArm,
    VerificationRequest,
    VerificationResult,
    VerificationTask,
)
from sandbox.verification import Asked, decided
from tests.dk_jax.fake_sandbox import result as timed_result

CONFIG = SimpleNamespace(style="compact", max_policy_tokens=20)
TASKS = {name: SimpleNamespace(name=name) for name in ("trigger", "sibling")}


def draft(name: str, idea: str = "threads over rows") -> SkillDraft:
    return SkillDraft(
        name=name, description=f"About {idea[:40]}", scope="general", tags=("omp", "rows", "cpu"),
        content=f"Motivation: slow loops\nKey Idea: {idea}\nExample: for (long {name} = 0; {name} < n; ++{name}) {{ out[{name}] = x[{name}]; }}",
    )  # fmt: skip


def view(task) -> TaskView:
    return TaskView(name=task.name, level=1, reference="", compact=f"task {task.name}", language="cpp", form="kernel", signature="")


class Speaker:
    """Writes "with" or "without" a skill in the prompt; messages of `cut` tasks are cut short."""

    def __init__(self, room=10_000, cut=()):
        self.codec = SimpleNamespace(encode=lambda text: text.split())
        self.room, self.cut, self.seeds = room, cut, []

    def fits(self, prompt, max_new):
        return len(prompt) + max_new <= self.room

    def speak(self, trajectories, prompts, seeds, *, max_new, keep=False, fresh=False):
        self.seeds += seeds
        for trajectory, prompt in zip(trajectories, prompts, strict=True):
            stop = "length" if trajectory.task in self.cut else "eos"
            trajectory.turns.append(Turn(text="with" if "skills:" in prompt else "without", stop=stop))
        return [True] * len(trajectories)


class Judge:
    """Kernels with the skill are three times as fast; a blank one does not build."""

    def __init__(self):
        self.arms = []

    def verify(self, arms, *, phase):
        self.arms += [(phase, arm.task.name, arm.control, arm.treated) for arm in arms]
        return [([self._verdict(s) for s in arm.control], [self._verdict(s) for s in arm.treated]) for arm in arms]

    @staticmethod
    def _verdict(source):
        ok = source in ("with", "without")
        return Verdict(
            outcome="ok" if ok else "build_failed", stage="timed" if ok else "queued", reward=0.0, noisy=False, coverage=1.0,
            speedup={"with": 3.0, "without": 1.0}.get(source, 0.0), feedback="",
        )  # fmt: skip


VERIFIER = Verifier(
    rule=SequentialTest(min_ratio=1.0, alpha=0.1, looks=(4, 8), bar=1.2, fail_speedup=0.25), pairs_per_look=2, max_verifications=4,
    siblings=lambda task: [TASKS["sibling"]] if task.name == "trigger" else [], device="cpu", language="cpp",
)  # fmt: skip


def verified(speaker, drafts, judge=None):
    trajectory = Trajectory(agent="summary", task="trigger", group="g", turns=[Turn(text="", stop="eos")])
    calls = [Call(trajectory=trajectory, trigger=trajectory, drafts=list(drafts))]
    return VERIFIER.verify(speaker, judge or Judge(), calls, TASKS, [], config=CONFIG, views=view, seed=1, step=2)


def test_a_skill_that_helps_is_proved_on_its_task_and_a_sibling():
    speaker, judge = Speaker(), Judge()
    [found] = verified(speaker, [draft("rows")], judge)
    assert found.accepted and found.effect == pytest.approx(3.0) and found.tasks == ("trigger", "sibling")
    assert {(name, control, treated) for _, name, control, treated in judge.arms} == {
        (name, ("without",) * 2, ("with",) * 2) for name in TASKS
    }
    assert len(set(speaker.seeds)) == len(speaker.seeds), "every candidate is a draw of its own"


def test_the_rule_is_told_each_pairs_task():
    class Rule(SequentialTest):
        asked = []

        def decide(self, control, treated, tasks=None):
            self.asked.append((len(control), list(tasks)))
            return super().decide(control, treated, tasks)

    rule = Rule(looks=(4, 8), alpha=0.01, statistic="ranks")
    verifier = dataclasses.replace(VERIFIER, rule=rule)
    trajectory = Trajectory(agent="summary", task="trigger", group="g", turns=[Turn(text="", stop="eos")])
    calls = [Call(trajectory=trajectory, trigger=trajectory, drafts=[draft("rows")])]
    [proposal] = verifier.verify(Speaker(), Judge(), calls, TASKS, [], config=CONFIG, views=view, seed=1, step=2)
    look = ["trigger", "trigger", "sibling", "sibling"]
    assert rule.asked == [(4, look), (8, look + look)]
    assert proposal.accepted and proposal.decision.n == 8


class Sandbox(Judge):
    """Judges with speeds and failures that depend on chance, and keeps the results of each look."""

    def __init__(self, seed, gain):
        super().__init__()
        self.rng, self.gain, self.looks = random.Random(seed), gain, []

    def verify(self, arms, *, phase):
        self.looks.append([VerificationArm(control=self._side(arm.control), treated=self._side(arm.treated)) for arm in arms])
        return [tuple([Verdict.from_result(one) for one in side] for side in (arm.control, arm.treated)) for arm in self.looks[-1]]

    def _side(self, sources):
        return [self._result(self.gain if source == "with" else 1.0) for source in sources]

    def _result(self, gain):
        if self.rng.random() < 0.2:
            return EvaluationResult(id="x", state="done", stage="built", outcome="incorrect")
        found = timed_result(gain * self.rng.lognormvariate(0.0, 0.3))
        return found.model_copy(update={"speed_rewarded": self.rng.random() > 0.1})


def decided_by_the_sandbox(rule, looks):
    """What the sandbox answers, look by look, to requests that have the same candidates judged."""
    fields = {f.name: getattr(rule, f.name) for f in dataclasses.fields(SequentialTest)}
    task, candidate, answers, earlier = TaskSpec(reference=""), Candidate(source="", language="cpp"), [], []
    for arms in looks:
        made = [VerificationTask(task=task, control=[candidate] * len(arm.control), treated=[candidate] * len(arm.treated)) for arm in arms]
        request = VerificationRequest(arms=made, rule=SequentialRuleSpec(**fields), earlier=earlier)
        answers.append(decided(VerificationResult(id="v", state="done", arms=arms), Asked.of(request)))
        earlier = answers[-1].samples
    return [answer.decision for answer in answers]


@pytest.mark.parametrize("statistic", ["differences", "ranks"])
def test_the_sandbox_decides_on_the_same_verdicts_as_the_learner(statistic):
    class Rule(SequentialTest):
        said = []

        def decide(self, control, treated, tasks=None):
            self.said.append(super().decide(control, treated, tasks))
            return self.said[-1]

    # 16 pairs: beyond those whose signs are enumerated, where the order of the pairs matters.
    verifier = dataclasses.replace(VERIFIER, rule=Rule(looks=(8, 16), alpha=0.1, bar=0.5, statistic=statistic), pairs_per_look=4)
    trajectory = Trajectory(agent="summary", task="trigger", group="g", turns=[Turn(text="", stop="eos")])
    outcomes = set()
    for seed in range(8):
        judge, verifier.rule.said[:] = Sandbox(seed, gain=(1.0, 1.6)[seed % 2]), []
        calls = [Call(trajectory=trajectory, trigger=trajectory, drafts=[draft("rows")])]
        [proposal] = verifier.verify(Speaker(), judge, calls, TASKS, [], config=CONFIG, views=view, seed=1, step=2)
        found = decided_by_the_sandbox(verifier.rule, judge.looks)
        assert [decision.model_dump() for decision in found] == [dataclasses.asdict(decision) for decision in verifier.rule.said]
        assert found[-1].status == proposal.decision.status
        outcomes.add((proposal.decision.status, len(judge.looks)))
    assert {status for status, _ in outcomes} == {"accept", "reject"} and {looks for _, looks in outcomes} == {1, 2}


def test_a_recipe_sets_the_rule():
    cfg = demo()
    assert Verifier.from_config(cfg, siblings=list).rule == SequentialTest()
    cfg.skills.update(dict(statistic="ranks", error_rate=0.05, pairs_per_look=8, looks=4))
    assert Verifier.from_config(cfg, siblings=list).rule == SequentialTest(alpha=0.05, looks=(16, 32, 48, 64), statistic="ranks")
    cfg.skills.statistic = "means"
    with pytest.raises(ValueError, match="'differences' or 'ranks'"):
        Verifier.from_config(cfg, siblings=list)


def test_a_message_that_was_cut_short_holds_no_kernel():
    judge = Judge()
    [found] = verified(Speaker(cut=("trigger", "sibling")), [draft("rows")], judge)
    assert not found.accepted
    assert {source for _, _, control, treated in judge.arms for source in (*control, *treated)} == {" "}


def test_a_skill_whose_prompt_has_no_room_is_refused_alone():
    long = draft("long", idea="x" * 300)
    refused, found = verified(Speaker(room=400), [long, draft("rows")])
    assert refused.problems == ["a task's prompt with it does not fit into the context"] and refused.decision is None
    assert found.accepted


class Unmoved(Judge):
    """Kernels with the skill are no faster."""

    @staticmethod
    def _verdict(source):
        return Judge._verdict("without")


def test_what_a_skill_of_the_step_before_has_overtaken_is_recorded_and_does_not_enter(tmp_path):
    """Proposals of a step that did not see the library as it is now, as with rl.staleness=1."""
    name, text, other = draft("rows"), draft("columns", idea="blocks of columns"), draft("planes", idea="one plane at a time")
    proposals = verified(Speaker(), [name, text, other])
    [refuted] = verified(Speaker(), [draft("rows", idea="threads over tiles")], Unmoved())
    assert [p.accepted for p in (*proposals, refuted)] == [True, True, True, False]
    with SkillLibrary(tmp_path / "library.sqlite") as library:
        for come in (draft("rows", idea="something else"), dataclasses.replace(text, name="blocks")):
            library.activate(library.propose(come))
        library.commit(1)
        before = library.active()
        assert VERIFIER.stage(library, [*proposals, refuted], step=2) == 2
        library.commit(2)
        assert library.active() == [*before, library.get("planes")] and library.get("rows") == before[0]
        rejected: list[Skill] = library.skills("rejected")
    assert [(skill.name, skill.evidence[0].decision) for skill in rejected] == [("rows", "accept"), ("columns", "accept"), ("rows", "reject")]
    reasons = [skill.evidence[0].reason for skill in rejected]
    assert "a skill named 'rows' has come in the step before" in reasons[0] and "skill 'blocks', which has come" in reasons[1]


def test_proposals_that_nothing_has_overtaken_enter_as_they_were_proved(tmp_path):
    proposals = verified(Speaker(), [draft("rows"), draft("columns", idea="blocks of columns")])
    with SkillLibrary(tmp_path / "library.sqlite") as library:
        assert VERIFIER.stage(library, proposals, step=0) == 0
        library.commit(0)
        assert [skill.name for skill in library.active()] == ["rows", "columns"]
