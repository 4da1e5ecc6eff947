"""What results come to: the best of k, comparisons of two evaluations, and what their tables say."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dk_jax.evaluation import scaling as ways
from dk_jax.evaluation.harness import compared, settings_of
from dk_jax.evaluation.results import Result, compare, summarise
from dk_jax.evaluation.results_table import comparison_table, table
from dk_jax.evaluation.scaling import Shape, at_equal_budget, budgets, scaling
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict
from tests.dk_jax.test_harness import FEW, TASKS, KnowingClient, cfg, plan_of, scripted, value, work  # noqa: F401


def sample(task: str, member: int, *speedups: float | None, level: int = 1) -> Result:
    """A sample whose turns have these speedups; None is a wrong kernel."""
    turns = [
        Turn(
            text="t", stop="eos", source=f"{task} {member} {i}",
            verdict=Verdict(
                outcome="incorrect" if s is None else "ok", stage="loaded" if s is None else "timed", reward=0.0, speedup=s or 0.0,
                noisy=False, coverage=None, feedback="", speedups={} if s is None else {"eager": s},
            ),
        )
        for i, s in enumerate(speedups)
    ]  # fmt: skip
    return Result(trajectory=Trajectory(agent="policy", task=task, group=task, member=member, turns=turns), level=level, family="f", split="held_out")


def test_best_of_k_by_hand():
    own = [sample("a", 0, None, 2.0), sample("a", 1, 1.5, 0.5), sample("b", 0, None, None), sample("b", 1, 0.5, None)]
    rows = {(r["way"], r["candidates"]): r for r in scaling(own, "eager", Shape(samples=2, turns=2), seed=0, resamples=FEW)}
    assert set(rows) == {("serial", 1), ("serial", 2), ("parallel", 1), ("parallel", 2), ("both", 2), ("both", 4)}

    def numbers(*key):
        return tuple(rows[key][name]["value"] for name in ("correct", "fast_1", "geomean"))

    assert numbers("serial", 1) == numbers("parallel", 1) == pytest.approx((2 / 4, 1 / 4, math.sqrt(1.5 * 0.5)))
    assert numbers("serial", 2) == numbers("both", 2) == pytest.approx((3 / 4, 2 / 4, (2.0 * 1.5 * 0.5) ** (1 / 3)))
    assert numbers("parallel", 2) == pytest.approx((1.0, 1 / 2, math.sqrt(1.5 * 0.5)))
    assert numbers("both", 4) == pytest.approx((1.0, 1 / 2, math.sqrt(2.0 * 0.5)))


def test_ways_are_compared_at_equal_budgets_with_what_they_take():
    own = [sample("a", m, *speeds) for m, speeds in enumerate([(None, 2.0, 2.5, None), (1.5, 0.5, None, 3.0), (0.5, 0.5, 0.5, 0.5)])]
    own = [dataclasses.replace(r, calls=(1, 2, 2, 2), tokens=(10, 30, 30, 30)) for r in own]
    groups = budgets(own, "eager", Shape(samples=3, turns=4), seed=0, resamples=FEW)
    found = {rows[0]["candidates"]: {row["way"]: row for row in rows} for rows in groups}
    assert {k: {w: (r["samples"], r["turns"]) for w, r in rows.items()} for k, rows in found.items()} == {
        2: {"serial": (1, 2), "parallel": (2, 1)}, 4: {"serial": (1, 4), "both": (2, 2)},
    }  # fmt: skip
    assert found[2]["serial"]["fast_1"]["value"] == pytest.approx(2 / 3) == found[2]["parallel"]["fast_1"]["value"]
    assert found[4]["both"]["fast_1"]["value"] == 1.0 and found[4]["serial"]["geomean"]["value"] == pytest.approx((2.5 * 3.0 * 0.5) ** (1 / 3))
    taken = {(k, w): (r["calls"], r["tokens"]) for k, rows in found.items() for w, r in rows.items()}
    assert taken == {(2, "serial"): (3, 40), (2, "parallel"): (2, 20), (4, "serial"): (7, 100), (4, "both"): (6, 80)}
    assert budgets(own, "eager", Shape(samples=3, turns=1), seed=0) == budgets(own, "eager", Shape(samples=1, turns=4), seed=0) == []


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 90), st.booleans())
def test_every_way_is_within_the_evaluation_and_spends_the_budget(samples, turns, budget, adaptive):
    shape = Shape(samples=samples, turns=turns, adaptive=adaptive)
    for way in shape.ways(budget):
        assert way.candidates == budget and way.samples <= samples and way.turns <= turns
        assert {"serial": way.samples == 1, "parallel": way.turns == 1, "both": min(way.samples, way.turns) > 1, "whole": way == shape.whole}[way.way]
    splits = [t for t in range(1, turns + 1) if budget % t == 0 and budget // t <= samples]
    assert adaptive or bool(shape.ways(budget)) == bool(splits)


def test_two_evaluations_are_compared_at_an_equal_budget():
    serial = [sample(task, 0, 0.5, 1.0, 1.0, speed) for task, speed in (("a", 3.0), ("b", 2.0), ("c", 1.0))]
    parallel = [sample(task, m, speed) for task in "abd" for m, speed in enumerate((0.5, 1.0, 1.5, None, 1.0, 1.0, 1.0, 1.0))]
    shapes = (Shape(samples=1, turns=4), Shape(samples=8, turns=1))
    found = at_equal_budget(serial, parallel, ["eager"], shapes, seed=0, resamples=FEW)
    assert found["candidates"] == 4 and found["own"] == {"samples": 1, "turns": 4, "calls": 4.0, "tokens": None}
    assert (found["other"]["samples"], found["other"]["turns"], found["other"]["calls"]) == (4, 1, 4.0)
    assert found["differences"]["eager"]["fast_1"]["value"] == pytest.approx(1 - 1 / 2), "half of all choices of 4 of the 8 have the fast one"
    assert "best of 4 candidates: here samples x turns are 1 x 4 (4.0 calls a task), there 4 x 1" in comparison_table(
        compare(serial, parallel, ["eager"], seed=0, resamples=FEW) | {"equal_budget": found}, "parallel"
    )
    larger = (Shape(samples=1, turns=4), Shape(samples=4, turns=3, adaptive=True))
    assert at_equal_budget(serial, parallel, ["eager"], larger, seed=0) is None, "some of a search's samples are no smaller search"
    assert at_equal_budget(serial[2:], parallel, ["eager"], shapes, seed=0) is None, "no task is in both"


def test_a_result_comes_back_from_its_line_with_its_further_calls():
    call = Trajectory(agent="policy", task="a", group="a/judge", tokens=[1], turn_index=[0], logp_sample=[0.0], turns=[Turn(text="no", stop="eos")])
    own = dataclasses.replace(sample("a", 0, 2.0), calls=(2,), tokens=(9,), further=(call,), cost=0.5)
    back = Result.from_dict(json.loads(json.dumps(own.to_dict())))
    assert back == dataclasses.replace(own, further=(dataclasses.replace(call, tokens=[], turn_index=[], logp_sample=[]),))
    old = {key: part for key, part in own.to_dict().items() if key not in ("calls", "tokens", "further")}
    assert Result.from_dict(old) == dataclasses.replace(own, calls=(), tokens=(), further=())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.none(), st.just(0.0), st.floats(0.1, 10.0)), min_size=1, max_size=6), st.data())
def test_the_expected_best_of_k_is_the_mean_over_all_choices(values, data):
    k = data.draw(st.integers(1, len(values)))
    bests = [ways._best([values[i] for i in chosen]) for chosen in itertools.combinations(range(len(values)), k)]
    n = len(bests)
    wanted = (
        sum(b is not None for b in bests) / n, sum((b or 0) > 1 for b in bests) / n, sum((b or 0) > 0 for b in bests) / n,
        sum(math.log(b) for b in bests if b) / n,
    )  # fmt: skip
    assert ways._expected(values, k) == pytest.approx(wanted)


def test_a_baseline_that_was_not_timed_and_speed_that_is_not_owed_to_the_kernel_are_told(cfg):  # noqa: F811
    own = [sample("a", 0, 2.0), sample("b", 0, 3.0), sample("c", 0)]
    foreign = dataclasses.replace(own[1].trajectory.turns[0].verdict, speed_rewarded=False)
    own[1].trajectory.turns[0].verdict = foreign
    told = {**settings_of(cfg, plan_of(cfg, samples=1), policy={"policy": "p"}, split="all", library={}), "tasks": {n: "" for n in "abc"}, "turns": 1}
    found = summarise(own, told, resamples=FEW)
    assert (value(found, "fast", "0"), value(found, "fast", "1")) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert value(found, "fast", "1", baseline="torch.compile") == 0.0 and found["not_timed_against"] == {"torch.compile": 1}
    assert found["speed_not_counted"] == 1 and found["missing"]["reasons"] == {"no turn": 1}
    text = table(found)
    assert "not timed against torch.compile: 1 kernels" in text and "speed not counted: 1 correct kernels" in text
    assert "best of k, over" not in text and "best turn" not in text, "nothing to show of one candidate a task"
    verdict = dataclasses.replace(foreign, outcome="task_rejected", feedback="too slow")
    own[2].trajectory.turns.append(Turn(text="", stop="eos", source="x", verdict=verdict))
    rejected = summarise(own, told, resamples=FEW)
    assert rejected["tasks_refused"] == {"c": "too slow"} and "refused by the sandbox: c: too slow" in table(rejected)
    mixed = summarise(own, told, sessions=[{"seconds": 1.0, "machine": {"processor": p, "gpu": "none"}} for p in "xy"], resamples=FEW)
    assert mixed["wall_s"] == 2.0 and "MIXED" in table(mixed)


def test_two_evaluations_are_compared_over_the_tasks_of_both(cfg, tmp_path):  # noqa: F811
    work(cfg, tmp_path / "expert", scripted("expert"), KnowingClient())
    work(cfg, tmp_path / "naive", scripted("naive"), KnowingClient(), plan=plan_of(cfg, tasks=TASKS[1:]))
    found = compared(tmp_path / "expert", tmp_path / "naive", resamples=FEW)
    assert (found["tasks"], found["only_own"], found["only_other"]) == (4, 1, 0)
    gain = found["differences"]["last_turn"]["eager"]
    assert (gain["Fast_1"]["value"], gain["Fast_0"]["value"], gain["geomean"]["value"]) == (1.0, 0.0, pytest.approx(1.5))
    assert gain["Fast_1"]["low"] == 1.0 and gain["mean"]["low"] > 1.3
    text = comparison_table(found, "naive")
    assert "over the 4 tasks in both (here alone 1" in text and "+100.0 (+100.0 to +100.0)" in text
    assert f"differs: tasks: now with {TASKS[0].name}" in text
