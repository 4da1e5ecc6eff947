"""Returns, rewards and leave-one-out advantages against loops that follow the equations letter by letter."""

import jax
import numpy as np
import pytest

from dk_jax.rl.advantages import (
    leave_one_out,
    over_group_std,
    policy_advantages,
    selection_advantages,
    summary_advantages,
    token_advantages,
)
from dk_jax.rl.returns import discounted_returns
from dk_jax.rl.rewards import PolicyReward, selection_rewards, summary_rewards, summary_trigger


def returns_by_loops(rewards, mask, gamma):
    R, U = rewards.shape
    out = np.zeros((R, U))
    for i in range(R):
        for t in range(U):
            if mask[i, t]:
                for u in range(t, U):
                    if mask[i, u]:
                        out[i, t] += gamma ** (u - t) * rewards[i, u]
    return out


def leave_one_out_by_loops(values, groups, valid):
    out = np.zeros(len(values))
    for i in range(len(values)):
        others = [values[j] for j in range(len(values)) if j != i and groups[j] == groups[i] and valid[j]]
        if valid[i] and others:
            out[i] = values[i] - sum(others) / len(others)
    return out


def test_each_group_moves_the_policy_alike_whatever_its_returns_scale():
    rng = np.random.default_rng(1)
    groups = np.array([0, 1, 0, 1, 0, 1, 0, 2])
    returns = rng.normal(size=(8, 2)).astype(np.float32)
    mask = rng.random((8, 2)) < 0.8
    returns[groups == 1] *= 100.0
    advantages = np.asarray(policy_advantages(returns, mask, groups))
    found = np.asarray(over_group_std(advantages, returns, mask, groups, floor=0.25))
    for i in range(8):
        for t in range(2):
            own = [returns[j, t] for j in range(8) if groups[j] == groups[i] and mask[j, t]]
            deviation = max(np.std(own), 0.25) if own else 0.25
            assert found[i, t] == pytest.approx(advantages[i, t] / deviation, rel=1e-4, abs=1e-6)
    assert not found[~mask].any() and not found[groups == 2].any()


def test_differences_as_small_as_noise_stay_small():
    returns = np.array([[1.0], [1.01], [0.99]], np.float32)
    mask, groups = np.ones((3, 1), bool), np.zeros(3, np.int32)
    advantages = np.asarray(policy_advantages(returns, mask, groups))
    found = np.asarray(over_group_std(advantages, returns, mask, groups, floor=0.25))
    assert np.abs(found).max() < 0.07


@pytest.mark.parametrize("gamma", [1.0, 0.4, 0.0])
def test_returns_discount_later_turns_only(gamma):
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(7, 4)).astype(np.float32)
    mask = rng.random((7, 4)) < 0.7
    np.testing.assert_allclose(
        discounted_returns(rewards, mask, gamma), returns_by_loops(rewards, mask, gamma), atol=1e-6
    )


def test_a_turn_that_did_not_happen_has_no_return_and_adds_none():
    got = discounted_returns(np.array([[1.0, 2.0, np.nan]]), np.array([[True, True, False]]), 0.5)
    np.testing.assert_allclose(got, [[2.0, 2.0, 0.0]])


def test_a_discount_above_one_is_refused():
    with pytest.raises(ValueError, match="gamma is 1.5"):
        discounted_returns(np.ones((1, 1)), np.ones((1, 1), bool), 1.5)


def test_leave_one_out_equals_loops_for_scattered_ids():
    rng = np.random.default_rng(1)
    values = rng.normal(size=40).astype(np.float32)
    groups = rng.choice([-3, 0, 17, 900, 901], size=40)
    valid = rng.random(40) < 0.8
    np.testing.assert_allclose(
        leave_one_out(values, groups, valid), leave_one_out_by_loops(values, groups, valid), atol=1e-6
    )


def test_a_group_of_one_has_advantage_zero():
    np.testing.assert_array_equal(leave_one_out(np.array([5.0, 1.0, 3.0]), np.array([7, 8, 8])), [0, -2, 2])
    np.testing.assert_array_equal(
        leave_one_out(np.array([5.0, 1.0]), np.array([7, 7]), np.array([True, False])), [0, 0]
    )


def test_an_invalid_value_reaches_nobody():
    got = leave_one_out(np.array([1.0, np.nan, 3.0]), np.zeros(3, int), np.array([True, False, True]))
    np.testing.assert_array_equal(got, [-2, 0, 2])


def test_advantages_do_not_change_when_members_are_shuffled_with_their_ids():
    rng = np.random.default_rng(2)
    values, groups = rng.normal(size=24).astype(np.float32), rng.integers(0, 4, 24)
    order = rng.permutation(24)
    np.testing.assert_allclose(
        leave_one_out(values[order], groups[order]),
        np.asarray(leave_one_out(values, groups))[order],
        atol=1e-6,
    )


def test_policy_advantages_compare_the_same_turn_of_the_same_task():
    rng = np.random.default_rng(3)
    returns = rng.normal(size=(12, 3)).astype(np.float32)
    mask = rng.random((12, 3)) < 0.75
    tasks = np.repeat([4, 9], 6)
    want = np.stack([leave_one_out_by_loops(returns[:, t], tasks, mask[:, t]) for t in range(3)], axis=1)
    np.testing.assert_allclose(jax.jit(policy_advantages)(returns, mask, tasks), want, atol=1e-6)


def test_the_null_scheme_is_a_baseline_and_is_not_trained():
    rewards = np.array([1.0, 3.0, 5.0, 2.0])
    got = selection_advantages(rewards, np.array([0, 0, 0, 1]), np.array([False, False, True, False]))
    np.testing.assert_allclose(got, [1 - 4, 3 - 3, 0, 0])


def test_summaries_are_compared_within_their_trigger():
    np.testing.assert_allclose(summary_advantages(np.array([2.0, 0.0, 9.0]), np.array([1, 1, 2])), [2, -2, 0])


def test_each_token_gets_the_advantage_of_its_own_turn():
    advantages = np.array([[1.0, -2.0], [7.0, 8.0]])
    turn_index = np.array([[-1, 0, 0, -1, 1], [-1, 1, -1, -1, -1]])
    np.testing.assert_array_equal(
        token_advantages(advantages, turn_index), [[0, 1, 1, 0, -2], [0, 8, 0, 0, 0]]
    )


def test_token_advantages_equal_loops():
    rng = np.random.default_rng(5)
    advantages, turn_index = rng.normal(size=(6, 3)).astype(np.float32), rng.integers(-1, 3, (6, 9))
    want = [[advantages[b, turn] if turn >= 0 else 0.0 for turn in row] for b, row in enumerate(turn_index)]
    np.testing.assert_array_equal(token_advantages(advantages, turn_index), np.array(want, np.float32))


def test_a_turn_without_an_advantage_gives_nan_and_not_a_neighbours():
    assert np.isnan(token_advantages(np.array([[1.0, 2.0]]), np.array([[2]])))[0, 0]


def test_policy_reward_follows_the_equation():
    rule = PolicyReward(w_correct=0.5, w_speed=0.5, w_coverage=0.5, speedup_cap=6.0)
    correct = np.array([True, True, False])
    got = rule(correct, np.array([2.0, 80.0, np.nan]), np.array([0.4, 1.0, np.nan]))
    np.testing.assert_allclose(got, [0.5 + 1.0 + 0.2, 0.5 + 3.0 + 0.5, 0.0], rtol=1e-6)


def test_selection_reward_is_the_mean_over_rollouts_of_the_best_turn():
    rewards = np.array([[[1.0, 4.0], [2.0, 0.0]], [[9.0, 9.0], [9.0, 9.0]], [[-1.0, 5.0], [3.0, 3.0]]])
    mask = np.array([[[1, 1], [1, 1]], [[1, 1], [1, 1]], [[1, 0], [0, 0]]], bool)
    got = selection_rewards(rewards, mask, np.array([False, True, False]), format_penalty=0.25)
    np.testing.assert_allclose(got, [3.0, -0.25, -0.5])


def test_a_summary_is_due_when_the_best_turn_beats_the_first_and_the_bar():
    speedup = np.array([[1.0, 1.3], [2.0, 2.3], [0.2, 1.1], [5.0, 1.3], [1.0, 9.0]])
    correct = np.array([[1, 1], [1, 1], [1, 1], [0, 1], [1, 0]], bool)
    got = summary_trigger(speedup, correct, np.ones((5, 2), bool), alpha=1.2, beta=1.2)
    np.testing.assert_array_equal(got, [True, False, False, True, False])


def test_summary_reward_is_the_capped_effect_of_the_best_accepted_skill():
    effects = np.array([[1.5, 3.0], [50.0, 1.0], [4.0, 4.0], [9.0, 9.0]])
    accepted = np.array([[1, 0], [1, 1], [0, 0], [1, 1]], bool)
    malformed = np.array([False, False, False, True])
    got = summary_rewards(effects, accepted, malformed, cap=6.0, format_penalty=0.1)
    np.testing.assert_allclose(got, [1.5, 6.0, 0.0, -0.1], rtol=1e-6)
