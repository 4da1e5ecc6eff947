"""Calls of the selection and the summary agent on held-out tasks: what is asked, how it is scored, and how it is shown."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from scipy.stats import binomtest

from dk_jax.evaluation.agents_section import agents_table
from dk_jax.evaluation.calls import Share, ideas
from dk_jax.evaluation.report import write_report
from dk_jax.evaluation.table import final_table
from dk_jax.rollout.trajectory import load_trajectories
from dk_jax.sft.judged import load_kernels
from dk_jax.sft.skill_topics import skill_catalogue
from dk_jax.train.setup import ConfigError
from tests.end_to_end.scripted import ScriptedClient, ScriptedRun, tiny_config


@pytest.mark.parametrize(("hits", "of"), [(0, 12), (7, 12), (12, 12), (950, 1000)])
def test_the_interval_is_wilsons(hits, of):
    low, high = Share(hits=hits, of=of).interval
    wanted = binomtest(hits, of).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((wanted.low, wanted.high), abs=1e-6)


def test_nothing_asked_says_nothing():
    assert Share(hits=0, of=0).plain() == {"hits": 0, "of": 0, "share": 0.0, "low": 0.0, "high": 1.0}


def test_ideas_are_counted_once_however_they_are_named():
    topics = skill_catalogue()
    one, other = topics[0].phrasings[0], topics[1].phrasings[0]
    again = dataclasses.replace(one, name="another_name")
    found = ideas([one, again, other, one])
    assert (found["drafts"], found["distinct"], found["largest"]) == (4, 2, 0.75)
    assert found["effective"] == pytest.approx(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))
    assert ideas([]) == {"drafts": 0, "distinct": 0, "effective": 0.0, "largest": 0.0}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A run's folder with the untrained model's evaluation in it, its scores, and how many candidates were judged for it."""
    workdir = tmp_path_factory.mktemp("calls")
    cfg = tiny_config()
    cfg.evaluation.update(dict(call_samples=5, max_tasks=6))
    run = ScriptedRun(cfg, workdir, ScriptedClient())
    try:
        scores = run.evaluate("eval_untrained", run.model.trainable, step=0)
        judged = run.client.judged
        assert run.evaluate("eval_untrained", run.model.trainable, step=0) == json.loads(json.dumps(scores)) and run.client.judged == judged
        held_out = {task.name for task in run.tasks.held_out}
    finally:
        run.close()
    return workdir, scores, held_out


def test_both_agents_are_asked_on_held_out_tasks_alone_and_what_they_say_is_counted(evaluated):
    workdir, scores, held_out = evaluated
    said = load_trajectories(workdir / "rollouts" / "eval_untrained_calls.jsonl")
    kernels = load_kernels(workdir / "corpus_held_out.jsonl")
    assert {t.task for t in said} <= held_out and {k.task for k in kernels} <= held_out
    for agent, found in scores["calls"].items():
        own = [t for t in said if t.agent == agent]
        wrong = [t for t in own if t.turns[-1].error]
        assert found["parsed"]["of"] == len(own) > 0 and found["parsed"]["hits"] == len(own) - len(wrong)
        assert sum(found["errors"].values()) == len(wrong)
    selections = [t for t in said if t.agent == "selection"]
    assert len(selections) == 5 * 6 and all(t.shown for t in selections)
    broken = [t for t in selections if t.turns[-1].text == "{broken"]
    assert [t for t in selections if t.turns[-1].error] == broken and broken, "one in ten scripted selections is broken"
    chosen = sum(len(t.skills) for t in selections)
    assert scores["calls"]["selection"]["fitting"]["of"] <= chosen
    assert scores["calls"]["summary"]["usable"]["share"] == 1.0, "the scripted skills obey all rules"
    assert scores["calls"]["summary"]["ideas"]["drafts"] == scores["calls"]["summary"]["usable"]["hits"]
    groups = {t.group for t in said if t.agent == "summary"}
    assert len([t for t in said if t.agent == "summary"]) == 5 * len(groups) and len(groups) <= 2 * 6


def test_report_and_table_show_them_beside_the_first_turns(evaluated):
    workdir, scores, _ = evaluated
    page = write_report(workdir).read_text(encoding="utf-8")
    parsed = scores["calls"]["selection"]["parsed"]
    assert "Selection: call can be used" in page and f"({parsed['of']}; {100 * parsed['low']:.0f} – {100 * parsed['high']:.0f})" in page
    assert "is not JSON" in page, "what was wrong is told"
    paths = {"report": "r"}
    skills = dict(proposed=0, verified=0, active=0)
    lines = final_table({"untrained": scores, "before": scores, "after": scores, "skills": skills, "paths": paths}).splitlines()
    line = next(line for line in lines if line.startswith("selection calls that parse"))
    assert line.split()[4::2] == [f"{100 * parsed['share']:.1f}"] * 3
    assert not any("calls" in line for line in final_table(
        {"untrained": None, "before": scores | {"calls": {}}, "after": scores | {"calls": {}}, "skills": skills, "paths": paths}
    ).splitlines())  # fmt: skip


def test_a_share_without_messages_and_markup_in_errors_are_shown_as_such():
    turn = dict(compiled=0.5, correct=0.25, fast={"1.0": 0.0})
    empty = Share(hits=0, of=0).plain()
    calls = {"selection": {"parsed": Share(hits=1, of=2).plain(), "fitting": empty, "errors": {"skill '<b>' was not on offer": 1}}}
    page = agents_table({"untrained": None, "after the cold start": {"turns": [turn], "calls": calls}})
    assert "&lt;b&gt;" in page and "<b>" not in page and "untrained" not in page and "fits" not in page.split("</table>")[0]


@pytest.mark.parametrize("key", ["call_samples", "call_lessons"])
def test_less_than_no_calls_are_refused(tmp_path, key):
    cfg = tiny_config()
    cfg.evaluation[key] = -1
    with pytest.raises(ConfigError, match=rf"evaluation\.{key} is -1"):
        ScriptedRun(cfg, tmp_path, ScriptedClient())
