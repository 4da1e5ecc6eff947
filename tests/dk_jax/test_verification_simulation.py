"""The simulation of verifications: its draws have the moments they are said to have, and it decides as the rules themselves do."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from dk_jax.skills.verification import PaperRule, SequentialTest
from scripts.bench import simulated_skills as simulated
from scripts.bench import verification as bench
from scripts.bench.simulated_skills import Noise, SkillKind, decide_many, draw, paper_accepts

USELESS = SkillKind(name="useless", ratio=1.0, task=0.0)
RANKS = SequentialTest(alpha=0.05, looks=(8, 16), statistic="ranks")


def draws(noise, kind, n, pairs=16, seed=0):
    return draw(noise, kind, n, pairs, np.random.default_rng(seed))


def speedups(logs):
    return [None if math.isnan(x) else math.exp(x) for x in logs]


def test_samples_have_the_stated_deviation_and_most_lie_near_a_mode():
    noise = Noise(sample=0.4, failures=0.0)
    x = noise.samples(np.random.default_rng(0), (200_000,))
    assert x.mean() == pytest.approx(0.0, abs=0.005) and x.std() == pytest.approx(0.4, rel=0.02)
    mode = noise.mode + 0.4 / math.sqrt(1 + 16 * 0.15 * 1.85) * np.random.default_rng(1).standard_normal(200_000)
    near = np.abs(x - noise.mode) < 0.2
    assert near.mean() > 0.6 and np.mean(x < -3 * 0.4) > 0.01 > np.mean(x > 3 * 0.4)
    assert np.quantile(x, 0.99) == pytest.approx(np.quantile(mode, 0.99), abs=0.03)


def test_the_clock_errs_by_its_deviation_with_outliers():
    noise = Noise(sample=0.1, failures=0.0, timing=0.02, outlier_share=0.05, outlier=0.2)
    x = noise.clock(np.random.default_rng(0), (200_000,))
    assert x.std() == pytest.approx(math.sqrt(0.95 * 0.02**2 + 0.05 * 0.2**2), rel=0.02)
    assert np.mean(np.abs(x) > 0.1) == pytest.approx(0.05 * math.erfc(0.5 / math.sqrt(2)), rel=0.1)


def test_effects_failures_and_spread_over_tasks_are_those_asked_for():
    noise = Noise(sample=0.2, failures=0.3)
    found = draws(noise, SkillKind(name="x", ratio=1.3, task=0.15), 2000, 64)
    gain = found.treated - found.control
    by_task = np.stack([np.nanmean(gain[:, found.task == k], axis=1) for k in (0, 1)])
    assert np.nanmean(by_task) == pytest.approx(math.log(1.3), abs=0.01)
    own = np.nanvar(gain[:, ::2], axis=1, ddof=1) / (~np.isnan(gain[:, ::2])).sum(1)  # what 32 pairs leave of their noise
    assert math.sqrt(np.nanvar(by_task[0]) - np.nanmean(own)) == pytest.approx(0.15, rel=0.1)
    for arm in (found.control, found.treated):
        assert np.isnan(arm).mean() == pytest.approx(0.3, abs=0.01)
    within = found.control[:, ::2] - np.nanmean(found.control[:, ::2], axis=1, keepdims=True)
    assert np.sqrt(np.nansum(within**2) / np.sum(~np.isnan(within))) == pytest.approx(math.hypot(0.2, 0.025), rel=0.04)


def test_a_triggers_first_turn_was_bad_luck_and_a_new_turn_is_not():
    noise = Noise(sample=0.3, failures=0.0)
    found = draws(noise, USELESS, 3000)
    usual = np.nanmean(found.control[:, ::2], axis=1)
    assert np.mean(found.first - usual) < -0.3
    assert np.mean(found.greedy - usual) == pytest.approx(0.0, abs=0.02)
    assert np.mean(found.greedy_mode - usual) == pytest.approx(noise.mode, abs=0.01)
    failing = draws(dataclasses.replace(noise, failures=0.4), USELESS, 1000)
    assert np.isnan(failing.first).mean() > 0.6 and not np.isnan(failing.greedy_mode).any()


def test_where_nothing_varies_no_task_triggers():
    with pytest.raises(ValueError, match="triggered a summary"):
        draws(Noise(sample=0.001, failures=0.0, timing=0.001, outlier_share=0.0), USELESS, 50)


@pytest.mark.parametrize(
    "test",
    [
        SequentialTest(),
        SequentialTest(alpha=0.05, looks=(6, 12, 18), mixed_ratio=1.1, spend_power=2.0, min_ratio=1.05, bar=1.5),
        RANKS,
        SequentialTest(alpha=0.1, looks=(5, 12, 18), statistic="ranks", min_ratio=1.1, fail_speedup=0.7, futility=1.0),
    ],
    ids=lambda test: f"{test.statistic}, {test.looks[-1]} pairs",
)
@pytest.mark.parametrize("failures", [0.0, 0.4])
def test_many_decisions_are_those_of_the_test_itself(test, failures):
    found = draws(Noise(sample=0.3, failures=failures), SkillKind(name="x", ratio=1.3), 60, 18)
    # ties, and arms of failures alone
    control, treated = np.round(found.control, 1), np.round(found.treated, 1)
    control[:3], treated[1:5] = np.nan, np.nan
    accepted, pairs = decide_many(test, control, treated, found.task)
    names = [f"task{k}" for k in found.task]
    for i in range(len(control)):
        for look in test.looks:
            decision = test.decide(speedups(control[i, :look]), speedups(treated[i, :look]), names[:look])
            if decision.status != "continue":
                break
        assert (decision.status == "accept", decision.n) == (accepted[i], pairs[i])
    assert 0 < accepted.sum() < len(accepted)


def test_the_published_rule_decides_for_many_as_for_one():
    found = draws(Noise(sample=0.3, failures=0.3), SkillKind(name="x", ratio=1.1), 200)
    one = [PaperRule().decide(*speedups(pair)).status == "accept" for pair in zip(found.first, found.greedy, strict=True)]
    assert paper_accepts(PaperRule(), found.first, found.greedy).tolist() == one and 0 < sum(one) < 200


@pytest.mark.parametrize(("sample", "failures"), [(0.1, 0.0), (0.3, 0.2), (0.8, 0.4)])
def test_useless_skills_pass_at_most_at_the_error_rate_and_far_more_by_the_published_rule(sample, failures):
    n = 800
    found = draws(Noise(sample=sample, failures=failures), USELESS, n)
    for statistic in ("differences", "ranks"):
        accepted, _ = decide_many(dataclasses.replace(RANKS, statistic=statistic), found.control, found.treated, found.task)
        assert accepted.mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / n)
    assert paper_accepts(PaperRule(), found.first, found.greedy).mean() > 0.3
    assert paper_accepts(PaperRule(), found.first, found.greedy_mode).mean() > 0.3


def test_ranks_find_more_of_what_helps_and_accept_nothing_that_harms():
    noise = Noise(sample=0.3, failures=0.4)
    better, worse = (draws(noise, SkillKind(name="x", ratio=ratio), 400) for ratio in (1.5, 0.8))
    shares = {}
    for statistic in ("differences", "ranks"):
        test = dataclasses.replace(RANKS, statistic=statistic)
        shares[statistic] = decide_many(test, better.control, better.treated, better.task)[0].mean()
        assert decide_many(test, worse.control, worse.treated, worse.task)[0].mean() < 0.02
    assert shares["ranks"] > shares["differences"] + 0.15


def test_the_intervals_are_exact_binomial_ones():
    assert bench.binomial(0, 10) == {"accepted": 0.0, "low": 0.0, "high": 0.3085, "n": 10}
    assert bench.binomial(10, 10)["low"] == 0.6915 and bench.binomial(10, 10)["high"] == 1.0
    assert (bench.binomial(5, 10)["low"], bench.binomial(5, 10)["high"]) == (0.1871, 0.8129)


def test_the_result_is_the_same_for_the_same_seed_and_says_what_it_cost(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "NOISES", [Noise(sample=0.1, failures=0.0)])
    monkeypatch.setattr(bench, "EFFECTS", (1.0, 1.2))
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    results = []
    for name in ("a.json", "b.json"):
        bench.main(["--out", str(tmp_path / name), "--verifications", "20", "--seed", "3"])
        results.append(json.loads((tmp_path / name).read_text()))
    assert all(results[0][key] == results[1][key] for key in ("rows", "search", "tasks", "curve", "affordable", "pooled_useless"))
    rows = {(r["skill"], r["rule"]): r for r in results[0]["rows"]}
    assert rows["+50 %", "ranks"]["accepted"] == 1.0 and rows["+50 %", "ranks"]["rollouts_median"] == 32
    assert rows["-20 %", "ranks"] | {"accepted": 0.0, "rollouts_90": 32} == rows["-20 %", "ranks"]
    assert rows["useless", "paper"]["rollouts_median"] == 1
    [differences, ranks] = results[0]["affordable"]
    assert differences["statistic"] == "differences" and ranks["least_budget"] == 16 and ranks["by_budget"]["128"]["n"] == 30
    assert results[0]["measured"]["first_turns"] is None and len(results[0]["measured"]["verifications"]) == 5
    assert not (tmp_path / "a.png").exists()


def test_first_turns_of_a_run_are_measured_within_their_tasks(tmp_path):
    def turns(task, *logs):
        verdicts = [{"outcome": "build_failed", "speedup": 0.0} if x is None else {"outcome": "ok", "speedup": math.exp(x)} for x in logs]
        return [{"task": task, "turns": [{"verdict": v}, {"verdict": {"outcome": "ok", "speedup": 99.0}}]} for v in verdicts]

    rows = turns("a", 1.0, 1.2, 1.4, 1.6, None) + turns("b", -1.0, -1.0, -1.2, -0.8, None)
    folder = tmp_path / "run" / "rollouts"
    folder.mkdir(parents=True)
    for phase in ("eval_sft", "eval_rl"):
        (folder / f"{phase}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = bench.first_turns([tmp_path / "run"], 0)["eval_rl"]
    assert (found["turns"], found["failed"], found["base_mean"]) == (10, 0.2, 0.15)
    assert found["sample_sd"] == pytest.approx(math.sqrt((0.2 + 0.08) / 6), abs=1e-3)
    with pytest.raises(SystemExit, match="finished runs"):
        bench.first_turns([tmp_path / "none"], 0)


def test_pairs_of_failures_say_nothing():
    failed, task = np.full((2, 4), np.nan), np.arange(4) % 2
    for statistic in ("differences", "ranks"):
        assert not simulated.evidence(dataclasses.replace(RANKS, statistic=statistic), failed, failed, task).any()
