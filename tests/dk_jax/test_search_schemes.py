"""Selection search at test time: which schemes a task has, and that the best of them get what is left of the budget, all of it."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.demo import get_config
from dk_jax.evaluation import harness
from dk_jax.evaluation.harness import Plan, VerdictJournal, evaluate, remember_settings, settings_of, summary_of
from dk_jax.evaluation.policies import Policy
from dk_jax.evaluation.results import RESULTS, ResultsFile
from dk_jax.evaluation.results_table import table
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict
from dk_jax.search import strategy
from dk_jax.search.schemes import Rounds, Scheme, distinct, origin
from dk_jax.skills.record import Skill
from dk_jax.tasks.builtin import builtin_suite
from dk_jax.train import setup
from dk_jax.train.checks import check_config
from dk_jax.train.setup import ConfigError
from tests.dk_jax.spoken_kernels import BelievingClient, SayingSpeaker, believing_judge, kernel
from tests.end_to_end.scripted import Killed

TASKS = tuple(builtin_suite("cpu").held_out[:3])
FEW = 20
SKILLS = tuple(
    Skill(name=name, description=f"about {name}", scope="general", tags=("a", "b", "c"), content=f"Key Idea: {name}")
    for name in ("good", "bad", "none")
)


def search(**numbers):
    block = dict(name="schemes", window=2, latest=False, selections=4, bm25=False, first_turns=1, eta=2)
    return strategy.make(block | numbers)


def test_schemes_of_the_same_skills_are_one_with_the_calls_of_all():
    calls = [Trajectory(agent="selection", task="t", group="t", scheme=i) for i in range(4)]
    chosen = [Scheme(index=4)] + [Scheme(index=i, skills=s, calls=(calls[i],)) for i, s in enumerate([("a",), (), ("b", "a"), ("a", "b")])]
    found = distinct(chosen)
    assert [(s.index, s.skills) for s in found] == [(4, ()), (0, ("a",)), (2, ("b", "a"))]
    assert [s.calls for s in found] == [(calls[1],), (calls[0],), (calls[2], calls[3])]
    assert [origin(i, 4) for i in (0, 3, 4, 5)] == ["chosen", "chosen", "null", "bm25"]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 6), st.integers(1, 7), st.integers(1, 3), st.integers(2, 4), st.integers(0, 99))
def test_the_budget_is_spent_whole_and_the_last_scheme_has_the_most(schemes, more, turns, first, eta, seed):
    samples = [Trajectory(agent="policy", task="t", group="t", scheme=i % schemes, member=i) for i in range(schemes + more)]
    rounds = Rounds(search(first_turns=first, eta=eta).spend, samples, turns)
    told, luck = 0, random.Random(seed)
    while rounds.allot():
        for t in samples:
            while len(t.turns) < rounds.until[id(t)]:
                reward = luck.choice([0.0, 1.0, 2.0])
                verdict = Verdict(outcome="ok", stage="timed", reward=reward, speedup=reward, noisy=False, coverage=None, feedback="")
                t.turns.append(Turn(text="", stop="eos", source="s", verdict=verdict))
                t.rewards.append(reward)
        told += 1
        assert told <= 7
    assert sum(len(t.turns) for t in samples) == len(samples) * turns
    assert len(rounds.going) == 1 and min(len(t.turns) for t in samples) >= min(first, turns)
    last = [len(t.turns) for t in samples if t.scheme == rounds.going[0]]
    assert max(last) == max(len(t.turns) for t in samples) and max(last) - min(last) <= told


def test_a_sample_that_gets_no_answer_has_no_more_turns_and_the_others_have_its_share():
    samples = [Trajectory(agent="policy", task="t", group="t", scheme=i // 2, member=i, rewards=[float(i // 2)]) for i in range(4)]
    rounds = Rounds(search().spend, samples, 3)
    assert rounds.allot() and set(rounds.until.values()) == {1}
    for t in samples[:3]:
        t.turns.append(Turn(text="", stop="eos"))
    assert rounds.allot() and rounds.until == {id(t): n for t, n in zip(samples, (1, 1, 10, 0), strict=True)}
    samples[2].turns += [Turn(text="", stop="eos")] * 9
    assert not rounds.allot()


# --- in an evaluation -----------------------------------------------------------------------------------------------------------------


def say(t, prompt, seed):
    """Choices in turn; kernels that are as fast as the skill in the prompt lets them be, and a little faster each time."""
    if t.agent == "selection":
        return {0: '{"select": ["good"]}', 1: '{"select": ["bad", "good"]}', 2: "{broken", 3: '{"select": ["good"]}'}[t.scheme]
    best = 3.0 if "Key Idea: good" in prompt and "Key Idea: bad" not in prompt else 1.2 if "Key Idea" not in prompt else 0.6
    return kernel(best + len(t.turns) / 10, f"seed {seed % 1000}")


def work(folder, speaker, client, *, numbers=None, tasks=TASKS, samples=6, turns=3):
    cfg = get_config()
    config = dataclasses.replace(setup.rollout_config(cfg), headers=3)
    plan = Plan(tasks=tasks, samples=samples, turns=turns, chunk=2, seed=0, config=config, skills=SKILLS, search=search(**numbers or {}))
    folder.mkdir(exist_ok=True)
    remember_settings(folder, settings_of(cfg, plan, policy={"policy": "test"}, split="held_out", library={}))
    journal = VerdictJournal(folder / harness.VERDICTS)
    try:
        return evaluate(Policy(speaker=speaker, greedy=speaker), believing_judge(client, journal), plan, ResultsFile(folder / RESULTS))
    finally:
        journal.close()


def results_of(folder):
    return ResultsFile(folder / RESULTS, read_only=True).results


def test_the_best_scheme_gets_what_is_left_and_its_share_is_told(tmp_path):
    speaker = SayingSpeaker(say)
    assert not work(tmp_path / "e", speaker, BelievingClient())
    found = results_of(tmp_path / "e")
    own = [found[TASKS[0].name, m] for m in range(6)]
    assert [(r.trajectory.scheme, r.trajectory.skills) for r in own[:3]] == [(4, ()), (0, ("good",)), (1, ("bad", "good"))]
    assert [r.trajectory.scheme for r in own[3:]] == [4, 0, 1], "samples are dealt out in turn"
    # 18 candidates: six first turns, six more for the two better schemes (four samples), six more for the best one (two samples)
    assert [len(r.trajectory.turns) for r in own] == [2, 6, 1, 2, 6, 1] and sum(len(r.trajectory.turns) for r in found.values()) == 3 * 18
    assert [len(r.further) for r in own] == [1, 2, 1, 0, 0, 0] and own[0].further[0].turns[0].error, "who chose nothing counts with the null scheme"
    assert [r.calls[0] for r in own] == [2, 3, 2, 1, 1, 1] and set(own[1].calls[1:]) == {1}
    selections = [seed for (agent, *_), seed in zip(speaker.asked, speaker.seeds, strict=True) if agent == "selection"]
    assert len(set(selections)) == len(selections) == 12
    summary = summary_of(tmp_path / "e", resamples=FEW)
    groups = summary["schemes"]["eager"]
    assert list(groups) == ["null", "chosen"] and groups["null"]["samples"] == 6 and groups["chosen"]["samples"] == 12
    assert (groups["null"]["first_turn"]["geomean"]["value"], groups["null"]["went_on"]) == (pytest.approx(1.2), 6)
    assert groups["chosen"]["first_turn"]["fast"]["1"]["value"] == 0.5 and groups["chosen"]["best_turn"]["fast"]["1.5"]["value"] == 0.5
    ways = {row["way"]: row for row in summary["scaling"]["eager"]}
    assert set(ways) == {"parallel", "whole"} and ways["whole"]["candidates"] == 18 and ways["whole"]["geomean"]["value"] == pytest.approx(3.5)
    assert ways["whole"]["calls"] == 18 + 4 and summary["calls"] == {"messages": 3 * 22, "further": 12}
    text = table(summary)
    for words in ("by scheme, over eager", "of which went on", "first turn, Fast_1", "messages: 66, of which 12 are no candidates"):
        assert words in text
    assert json.loads(json.dumps(summary, allow_nan=False))


def test_what_retrieval_finds_is_a_scheme_where_it_is_asked_for(tmp_path):
    work(tmp_path / "e", SayingSpeaker(say), BelievingClient(), numbers=dict(bm25=True, selections=1), tasks=TASKS[:1])
    schemes = Counter((t.scheme, t.skills) for t in (r.trajectory for r in results_of(tmp_path / "e").values()))
    assert {index for index, _ in schemes} == {0, 1, 2} and all(schemes[1, ()] == n for n in schemes.values())
    assert {len(skills) for index, skills in schemes if index == 2} == {2}, "as many as a prompt may have"
    assert "bm25" in summary_of(tmp_path / "e", resamples=FEW)["schemes"]["eager"]


@pytest.mark.parametrize("kill_at", [3, 9, 20, 40])
def test_killed_in_any_round_the_same_command_ends_the_same(tmp_path, kill_at):
    work(tmp_path / "whole", SayingSpeaker(say), whole := BelievingClient())
    with pytest.raises(Killed):
        work(tmp_path / "killed", SayingSpeaker(say), first := BelievingClient(kill_at))
    work(tmp_path / "killed", SayingSpeaker(say), second := BelievingClient())
    assert first.judged + second.judged == whole.judged

    def plain(folder):
        return [r.to_dict() for _, r in sorted(results_of(folder).items())]

    assert plain(tmp_path / "killed") == plain(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(samples=4), "has up to 5 schemes a task: evaluation.samples=4 are too few"),
        (dict(turns=1), "evaluation.turns=1 must be more than evaluation.search.first_turns"),
        (dict(inject=False), "is for skills: evaluation.inject=False and skills.use=True must both be True"),
        ({"search.selections": 0}, "evaluation.search.selections is 0: give a whole number of at least 1"),
        ({"search.eta": 1}, "evaluation.search.eta is 1: give a whole number of at least 2"),
        ({"search.name": "turns", "search.grow": True, "turns": 1}, "evaluation.turns must be at least 2 (it is 1)"),
        ({"search.name": "turns", "search.grow": True, "inject": False}, "evaluation.search.grow=True is for skills"),
        ({"search.name": "best"}, "evaluation.search.name is 'best'"),
    ],
)
def test_recipes_that_can_not_work_are_refused(changes, said):
    c = get_config()
    c.evaluation.search.update(dict(name="schemes", selections=4))
    check_config(c)
    c.evaluation.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_config(c)
