"""What a way to spend turns takes: messages that are no candidates are counted with the sample that they are for, and belong to it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dk_jax.evaluation import harness
from dk_jax.evaluation.harness import SettingsError, summary_of
from dk_jax.evaluation.policies import OUT_OF_BUDGET
from dk_jax.evaluation.results import RESULTS, ResultsFile
from dk_jax.evaluation.results_table import table
from dk_jax.evaluation.usage import Message, Usage, messages_of, tally
from dk_jax.rollout.episode import policy_turns
from dk_jax.rollout.trajectory import Trajectory, Turn
from dk_jax.search import cudaforge_judge, strategy
from tests.dk_jax.fake_endpoint import FakeEndpoint, chat
from tests.dk_jax.test_harness import FEW, TASKS, KnowingClient, ask, cfg, good_answer, plan_of, scripted, work  # noqa: F401


def test_a_judges_messages_are_no_candidates_and_count_in_calls_tokens_and_cost(cfg, tmp_path):  # noqa: F811
    def respond(body, number):
        prompt = body["messages"][0]["content"]
        if "You review" in prompt:
            return chat(cudaforge_judge.format({"issue": "wrong sums", "reason": "it adds twice", "fix": "add once"}), usage=(30, 7))
        return good_answer(body, number) if "add once" in prompt else chat("```cpp\nwrong\n```", usage=(50, 10))

    search = strategy.make({"name": "cudaforge", "card": "", "judge_tokens": 0})
    plan = plan_of(cfg, samples=1, turns=3, chunk=2, tasks=TASKS[:2], search=search)
    with FakeEndpoint(respond) as fake:
        assert ask(cfg, tmp_path / "e", fake, KnowingClient(), plan=plan, budget_tokens=900)[OUT_OF_BUDGET]
        begun = len(fake.asked)
        assert not ask(cfg, tmp_path / "e", fake, KnowingClient(), plan=plan) and 0 < begun < 10 == len(fake.asked)
    found = list(ResultsFile(tmp_path / "e" / RESULTS).results.values())
    assert [[v.outcome for v in r.trajectory.verdicts] for r in found] == [["integrity", "ok", "integrity"]] * 2
    assert [(r.calls, r.tokens, [len(t.turns) for t in r.further]) for r in found] == [((1, 2, 2), (60, 37 + 120, 37 + 60), [2])] * 2
    summary = summary_of(tmp_path / "e", resamples=FEW)
    assert summary["calls"] == {"messages": 10, "further": 4} and summary["candidates"]["turns"] == 6
    assert summary["tokens"] == {"prompt": 2 * (50 + 30 + 100 + 30 + 50), "answers": 2 * (10 + 7 + 20 + 7 + 10)}
    assert summary["cost"]["of_results"] == pytest.approx((520 + 2 * 108) / 1e6)
    serial = [row for row in summary["scaling"]["eager"] if row["way"] == "serial"]
    assert [(row["candidates"], row["calls"], row["tokens"]) for row in serial] == [(1, 1, 60), (2, 3, 217), (3, 5, 314)]
    assert "messages: 10, of which 4 are no candidates" in table(summary)


def test_a_sample_is_finished_only_with_its_further_calls(cfg, tmp_path):  # noqa: F811
    policy, open_ = scripted("expert"), []

    def spend(speaker, judge, trajectories, tasks, skills, **fields):
        policy_turns(speaker, judge, trajectories, tasks, skills, **fields)
        calls = [Trajectory(agent="policy", task=t.task, group="x", member=t.member, turns=[Turn(text="?", stop="eos")]) for t in trajectories]
        open_[:] = [(call, "unanswered") for call in calls if call.task == TASKS[0].name and call.member == 1]
        return calls

    policy.speaker.unfinished, policy.speaker.conversations, policy.speaker.conversation = open_, {}, lambda t: []
    plan = plan_of(cfg, tasks=TASKS[:2], search=strategy.Search(name="x", spend=spend))
    assert work(cfg, tmp_path / "e", policy, KnowingClient(), plan=plan) == {"unanswered": 1}
    found = ResultsFile(tmp_path / "e" / RESULTS).results
    assert (TASKS[0].name, 1) not in found and len(found) == 3 and all(r.calls == (1, 2) for r in found.values())


def test_an_evaluation_begun_before_there_were_ways_to_spend_turns_goes_on(cfg, tmp_path):  # noqa: F811
    work(cfg, tmp_path / "e", scripted("expert"), KnowingClient())
    path = tmp_path / "e" / harness.SETTINGS
    told = json.loads(path.read_text())
    assert told.pop("search") == {"name": "turns", "grow": False}
    path.write_text(json.dumps(told))
    assert not work(cfg, tmp_path / "e", scripted("expert"), client := KnowingClient()) and not client.judged
    block = {"name": "memory", "window": 4, "latest": False, "plain": 0}
    with pytest.raises(SettingsError, match="search.name: turns -> memory; search.plain: not there -> 0"):
        work(cfg, tmp_path / "e", scripted("expert"), client, plan=plan_of(cfg, search=strategy.make(block)))


def test_messages_are_counted_turn_by_turn():
    spoken = Trajectory(agent="policy", task="t", group="t", turns=[Turn(text="", stop="eos")] * 2)
    for turn, (prompt, answer) in enumerate(((5, 2), (3, 1))):
        spoken.append_prompt([1] * prompt)
        spoken.turn_index += [turn] * answer
    assert messages_of(spoken) == [Message(prompt=5, answer=2), Message(prompt=3, answer=1)]
    judged = [Message(prompt=10, answer=1, cost=0.5)] * 3
    usage = tally(messages_of(spoken), [("policy", judged), ("selection", [Message(prompt=4, answer=1)])])
    assert usage == Usage(prompt_tokens=42, answer_tokens=7, cost=1.5, calls=(2, 4), tokens=(12, 37))
    assert tally([], []) == Usage(calls=(0,), tokens=(0,)) and messages_of(dataclasses.replace(spoken, turn_index=[])) == [Message()] * 2
