"""Rewards of the three agents against loops over random cases, and against the sandbox, which computes the policy's."""

import math

import jax
import numpy as np
import pytest

from dk_jax.rl.rewards import MilestoneReward, PolicyReward, selection_rewards, summary_rewards, summary_trigger
from sandbox.protocol import RewardSpec
from sandbox.verdict.reward import reward

SEEDS = range(5)


def turns(seed, shape=(40,)):
    """(correct, speedup, coverage, speedup over torch.compile) of random turns; wrong ones hold NaN."""
    rng = np.random.default_rng(seed)
    correct = rng.random(shape) < 0.7
    speedup, compiled = rng.choice([0.3, 1.0, 1.04, 1.06, 2.0, 9.0], shape), rng.choice([0.5, 1.04, 1.2, 3.0], shape)
    hidden = ~correct & (rng.random(shape) < 0.5)
    return correct, np.where(hidden, np.nan, speedup), np.where(hidden, np.nan, rng.random(shape)), np.where(hidden, np.nan, compiled)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_learner_and_the_sandbox_give_a_turn_the_same_reward(seed):
    correct, speedup, coverage, _ = turns(seed)
    weights = dict(w_correct=0.3, w_speed=0.7, w_coverage=0.4, speedup_cap=2.5)
    got = np.asarray(PolicyReward(**weights)(correct, speedup, coverage))
    for i in range(len(correct)):
        by_hand = 0.3 + 0.7 * min(speedup[i], 2.5) + 0.4 * coverage[i] if correct[i] else 0.0
        assert got[i] == pytest.approx(by_hand, rel=1e-6)
        judged = reward(RewardSpec(**weights), correct=bool(correct[i]), speedup=speedup[i], coverage=coverage[i])
        assert judged.total == pytest.approx(by_hand)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_learner_and_the_sandbox_agree_on_milestones(seed):
    correct, speedup, _, compiled = turns(seed)
    got = np.asarray(MilestoneReward()(correct, speedup, compiled))
    for i in range(len(correct)):
        by_hand = -1.0
        if correct[i]:
            by_hand = 1.0
            if speedup[i] > 1.05:
                by_hand = 3.0 if compiled[i] > 1.05 else 2.0
        judged = reward(
            RewardSpec(kind="milestones"), correct=bool(correct[i]), speedup=speedup[i], coverage=None, compile_speedup=compiled[i]
        )
        assert got[i] == by_hand == judged.total
    assert set(got) == {-1.0, 1.0, 2.0, 3.0}


def test_a_speed_that_was_not_measured_is_no_milestone():
    nothing = np.array([math.nan, math.nan, 2.0])
    np.testing.assert_array_equal(MilestoneReward()(np.array([True, False, True]), nothing, np.full(3, math.nan)), [1, -1, 2])


def selection_by_loops(rewards, mask, malformed, penalty, worst):
    out = []
    for s in range(len(rewards)):
        best = []
        for i in range(rewards.shape[1]):
            taken = [rewards[s, i, t] for t in range(rewards.shape[2]) if mask[s, i, t]]
            best.append(max(taken) if taken else 0.0)
        out.append(worst - penalty if malformed[s] else sum(best) / len(best))
    return out


@pytest.mark.parametrize("worst", [0.0, -1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_selection_rewards_equal_loops(seed, worst):
    rng = np.random.default_rng(seed)
    rewards, mask = rng.normal(size=(7, 3, 4)).astype(np.float32), rng.random((7, 3, 4)) < 0.6
    malformed = rng.random(7) < 0.3
    got = jax.jit(selection_rewards, static_argnames=("format_penalty", "worst"))(rewards, mask, malformed, format_penalty=0.2, worst=worst)
    np.testing.assert_allclose(got, selection_by_loops(rewards, mask, malformed, 0.2, worst), rtol=1e-5, atol=1e-6)


def test_a_broken_call_is_worth_less_than_a_scheme_that_only_fails():
    failed = np.full((2, 2, 1), -1.0)
    got = selection_rewards(failed, np.ones((2, 2, 1), bool), np.array([False, True]), format_penalty=0.1, worst=-1.0)
    assert got[1] < got[0]


def trigger_by_loops(speedup, correct, mask, alpha, beta):
    out = []
    for i in range(len(speedup)):
        judged = [speedup[i, t] if correct[i, t] and mask[i, t] else 0.0 for t in range(speedup.shape[1])]
        out.append(max(judged) >= alpha * judged[0] and max(judged) >= beta)
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_the_summary_trigger_equals_loops(seed):
    rng = np.random.default_rng(seed)
    speedup, correct = rng.choice([0.5, 1.0, 1.3, 2.0], (40, 3)), rng.random((40, 3)) < 0.7
    mask = np.cumprod(rng.random((40, 3)) < 0.9, axis=1).astype(bool)
    speedup[~correct] = np.nan
    got = summary_trigger(speedup, correct, mask, alpha=1.25, beta=1.1)
    want = trigger_by_loops(speedup, correct, mask, 1.25, 1.1)
    np.testing.assert_array_equal(got, want)
    assert 0 < sum(want) < 40


def summary_by_loops(effects, accepted, malformed, cap, penalty):
    out = []
    for m in range(len(effects)):
        best = [min(effects[m, j], cap) for j in range(effects.shape[1]) if accepted[m, j]]
        out.append(-penalty if malformed[m] else max([0.0, *best]))
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_summary_rewards_equal_loops(seed):
    rng = np.random.default_rng(seed)
    effects, accepted = rng.uniform(0.5, 9.0, (30, 2)).astype(np.float32), rng.random((30, 2)) < 0.4
    malformed = rng.random(30) < 0.2
    got = summary_rewards(effects, accepted, malformed, cap=6.0, format_penalty=0.3)
    np.testing.assert_allclose(got, summary_by_loops(effects, accepted, malformed, 6.0, 0.3), rtol=1e-6)
