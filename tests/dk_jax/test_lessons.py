"""Summary, selection and skill samples of the cold start: distinct, told as rollouts tell them, and about what kernels do."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from dk_jax.agents import selection, summary
from dk_jax.rollout.episode import RolloutConfig, summarise, task_view, triggers
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict
from dk_jax.sft.judged import JudgedKernel
from dk_jax.sft.lessons import improvements, lessons, speedup
from dk_jax.sft.samples import SampleConfig, make_samples
from dk_jax.sft.skill_topics import SkillTopic
from dk_jax.skills.record import SkillDraft
from dk_jax.tasks.builtin import builtin_suite

TASK = builtin_suite("cpu").tasks[0]
VIEW = task_view(TASK, language="triton", form="module")


def topic(name: str, phrasings: int = 2) -> SkillTopic:
    drafts = tuple(
        SkillDraft(
            name=f"{name}_{i}", description=f"do {name}", scope="general", tags=("a", "b", "c"),
            content=f"Motivation: {name} {i}.\nKey Idea: {name}.\nExample:\n{name}()",
        )
        for i in range(phrasings)
    )  # fmt: skip
    return SkillTopic(topic=name, techniques=frozenset({name}), phrasings=drafts)


TOPICS = [topic("fuse"), topic("tile"), topic("unroll"), topic("never")]


def kernel(source: str, speedup: float, *techniques: str, task: str = TASK.name) -> JudgedKernel:
    ok = speedup > 0
    verdict = Verdict(
        outcome="ok" if ok else "incorrect", stage="timed" if ok else "built", reward=float(ok), speedup=speedup, noisy=False,
        coverage=None, feedback="correct" if ok else "max err 1.0",
    )  # fmt: skip
    return JudgedKernel(task=task, source=source, techniques=techniques, intent="good" if ok else "wrong", verdict=verdict)


SLOW = kernel("slow", 0.9, "fuse")
FAST = kernel("fast", 2.0, "fuse", "tile", "unroll")
NEAR = kernel("near", 2.1, "fuse", "tile")
WRONG = kernel("wrong", 0.0, "fuse")
LAZY = kernel("lazy", 1.1)
ALL = [SLOW, FAST, NEAR, WRONG, LAZY]


def draw(kernels=ALL, count=1000, max_skills=2, seed=0):
    return lessons(kernels, TOPICS, count=count, min_gain=1.2, max_skills=max_skills, rng=np.random.default_rng(seed))


def test_pairs_are_those_that_trigger_a_summary_in_a_rollout():
    found = {(a.source, b.source) for a, b in improvements(ALL, 1.2)}
    for first in ALL:
        for best in ALL:
            if first is best:
                continue
            turns = [Turn(text="", stop="eos", source=k.source, verdict=k.verdict) for k in (first, best)]
            rollout = Trajectory(agent="policy", task=TASK.name, group=TASK.name, turns=turns)
            earned = bool(triggers([rollout], alpha=1.2, beta=1.2, limit=1))
            assert ((first.source, best.source) in found) == earned, (first.source, best.source)
    assert ("wrong", "fast") in found and ("wrong", "lazy") not in found and ("fast", "near") not in found


def test_no_lesson_comes_twice_and_all_there_are_can_be_had():
    # slow or lazy -> fast, near and wrong -> fast, near; topics beyond a correct first turn, all of the best after a wrong one.
    answers = 2 * (2 + 1 + 3 + 2 + 3 + 2)
    assert len(draw(max_skills=0)) == answers
    found = draw(max_skills=1)
    assert len(found) == answers * (1 + 6) == len({(x.first.source, x.best.source, x.draft, x.injected) for x in found})
    assert len(draw(count=30)) == 30
    assert draw(count=30) == draw(count=30) != draw(count=30, seed=1)
    assert draw([SLOW, LAZY]) == draw([WRONG]) == []


def test_lessons_name_what_the_best_kernel_does_and_no_skill_that_is_in_view():
    for lesson in draw():
        name = lesson.draft.name.rsplit("_", 1)[0]
        assert name in lesson.best.techniques
        if lesson.first.verdict.correct:
            assert name not in lesson.first.techniques
        in_view = [d.name.rsplit("_", 1)[0] for d in lesson.injected]
        assert name not in in_view and len(set(in_view)) == len(in_view) <= 2


def test_few_lessons_are_spread_over_topics_and_come_with_and_without_skills():
    for seed in range(5):
        found = draw(count=12, seed=seed)
        assert set(Counter(x.draft.name.rsplit("_", 1)[0] for x in found).values()) == {4}
    views = Counter(len(x.injected) for seed in range(20) for x in draw(count=12, seed=seed))
    assert 0.3 < views[0] / views.total() < 0.7 and views[2] > 0


def config(style: str, **changes) -> SampleConfig:
    numbers = dict(
        samples_per_task=8, untimed_samples=1, selection_samples=10, summary_samples=60, wrong_share=0.0, max_skills=2, headers=4
    )
    return SampleConfig(style=style, **(numbers | changes))


class Speaker:
    """Keeps the prompts and answers with nothing."""

    def __init__(self):
        self.prompts = []

    def fits(self, prompt, max_new):
        return True

    def speak(self, trajectories, prompts, seeds, *, max_new, keep=False, fresh=False):
        self.prompts += prompts
        for trajectory in trajectories:
            trajectory.turns.append(Turn(text="", stop="eos"))


PROFILED = [
    JudgedKernel(**{**vars(k), "verdict": dataclasses.replace(k.verdict, coverage=0.87, profile=f"coverage 87 %; {k.source}_kernel 87 % (own)")})
    for k in ALL
]  # as on a GPU


@pytest.mark.parametrize("kernels", [ALL, PROFILED], ids=["unprofiled", "profiled"])
@pytest.mark.parametrize("style", ["chat", "compact"])
def test_summary_prompts_are_those_of_a_rollout_with_the_same_turns(style, kernels):
    rollouts = RolloutConfig(
        selections=1, rollouts=1, turns=2, summaries=1, style=style, language="triton", form="module", max_policy_tokens=1,
        max_selection_tokens=1, max_summary_tokens=1, max_context_tokens=1,
    )  # fmt: skip
    skills = {d.name: d for t in TOPICS for d in t.phrasings}
    samples = [s for s in make_samples({TASK.name: VIEW}, kernels, TOPICS, config=config(style), seed=0) if s.agent == "summary"]
    assert len(samples) == len({s.turns for s in samples}) == 60
    found = lessons(kernels, TOPICS, count=1000, min_gain=1.2, max_skills=2, rng=np.random.default_rng(0))
    pairs = {(x.first.source, x.best.source): (x.first, x.best) for x in found}
    told = set()
    for sample in samples:
        [(prompt, answer, imitated)] = sample.turns
        [draft] = summary.parse(answer, style=style).drafts
        assert imitated and skills[draft.name] == draft
        names = [n for n in re.findall(r"(?m)^(?:### Skill )?(\w+_\d)\b", prompt) if n in skills]
        speaker = Speaker()
        for first, best in pairs.values():
            turns = [Turn(text=k.source, stop="eos", source=k.source, verdict=k.verdict) for k in (first, best)]
            trigger = Trajectory(agent="policy", task=TASK.name, group=TASK.name, turns=turns, skills=tuple(names))
            summarise(speaker, trigger, {TASK.name: TASK}, skills, config=rollouts, seed_of=lambda t, turn: 0)
        assert prompt in speaker.prompts
        assert prompt.count("coverage 87 %") == (2 if kernels is PROFILED else 0)
        told.add(list(pairs)[speaker.prompts.index(prompt)])
    assert ("wrong", "fast") in told and ("slow", "fast") in told and len(told) == len(pairs)
    assert speedup(WRONG) == 0.0


@pytest.mark.parametrize(("kept", "error"), [(0, "no skill of it may be verified: fuse_0: content has no section 'Example'; "), (1, "")])
def test_a_summary_that_proposes_only_what_is_refused_is_malformed_and_what_it_proposes_is_told(kept, error):
    drafts = [topic(name).phrasings[0] for name in ("fuse", "tile")]
    drafts = [draft if i < kept else dataclasses.replace(draft, content="Motivation: a\nKey Idea: b") for i, draft in enumerate(drafts)]
    rollouts = RolloutConfig(
        selections=1, rollouts=1, turns=2, summaries=1, style="chat", language="triton", form="module", max_policy_tokens=1,
        max_selection_tokens=1, max_summary_tokens=1, max_context_tokens=1,
    )  # fmt: skip
    speaker = Speaker()
    speaker.speak = lambda calls, *_, **__: [c.turns.append(Turn(text=summary.format(drafts, style="chat"), stop="eos")) for c in calls]
    speaker.codec = SimpleNamespace(encode=str.split)
    turns = [Turn(text=k.source, stop="eos", source=k.source, verdict=k.verdict) for k in (SLOW, FAST)]
    trigger = Trajectory(agent="policy", task=TASK.name, group=TASK.name, turns=turns)
    [call] = summarise(speaker, trigger, {TASK.name: TASK}, {}, config=rollouts, seed_of=lambda t, turn: 0)
    turn = call.trajectory.turns[-1]
    assert turn.error.startswith(error) and bool(turn.error) == bool(error) and turn.form == "json_in_tags"
    assert sorted(d.name for d in call.drafts) == ["fuse_0", "tile_0"], "verification lists them with their reasons"


def test_selection_samples_of_a_task_are_distinct():
    samples = [s for s in make_samples({TASK.name: VIEW}, ALL, TOPICS, config=config("chat"), seed=0) if s.agent == "selection"]
    assert len(samples) == len({s.turns[0][0] for s in samples}) == 10
    one = [topic("fuse", phrasings=1)]
    few = [s for s in make_samples({TASK.name: VIEW}, ALL, one, config=config("chat"), seed=0) if s.agent == "selection"]
    assert len(few) == 1


def test_what_fits_is_among_the_headers_of_most_selection_calls():
    many = [*TOPICS, *(topic(f"other_{n}") for n in range(40))]
    samples = make_samples({TASK.name: VIEW}, ALL, many, config=config("chat", selection_samples=40, headers=3), seed=0)
    names = [draft.name for one in many for draft in one.phrasings]
    chosen = [selection.parse(s.turns[0][1], names, style="chat") for s in samples if s.agent == "selection"]
    assert len(chosen) == 40 and 26 <= sum(bool(c.names) for c in chosen) <= 36


@pytest.mark.parametrize(("share", "wanted"), [(0.0, 0), (0.5, 4), (0.75, 6), (1.0, 8)])
def test_the_share_of_policy_samples_with_a_skill_is_the_configs(share, wanted):
    kernels = [FAST, NEAR, SLOW]
    samples = make_samples({TASK.name: VIEW}, kernels, TOPICS, config=config("chat", skill_share=share), seed=0)
    assert sum(s.kind == "policy_with_skill" for s in samples) == wanted
    untimed = [JudgedKernel(**{**vars(k), "verdict": Verdict(**{**vars(k.verdict), "speedup": 0.0})}) for k in kernels]
    changes = dict(untimed_samples=200, untimed_skill_share=share)
    samples = make_samples({TASK.name: VIEW}, untimed, TOPICS, config=config("chat", **changes), seed=0)
    assert np.mean([s.kind == "policy_with_skill" for s in samples]) == pytest.approx(share, abs=0.1)


def test_rare_techniques_are_shown_more_often_where_skills_are_balanced():
    kernels = [kernel(f"k{i}", 1.0, "fuse", task=f"t{i}") for i in range(30)] + [kernel("rare", 1.0, "fuse", "tile")]
    views = {f"t{i}": VIEW for i in range(30)} | {TASK.name: VIEW}

    def shown(balance: bool) -> float:
        changes = dict(samples_per_task=100, skill_share=1.0, max_skills=1, balance_skills=balance)
        samples = make_samples(views, kernels, TOPICS, config=config("chat", **changes), seed=0)
        own = [s.turns[0][0] for s in samples if s.agent == "policy" and "rare" in s.turns[0][1]]
        return np.mean(["### Skill tile" in prompt for prompt in own])

    assert shown(False) == pytest.approx(0.5, abs=0.15) and shown(True) > 0.9
