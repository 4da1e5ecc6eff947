"""What is left out of an update, against loops."""

import math

import jax
import numpy as np
import pytest

from dk_jax.rl.filters import degenerate_groups, mismatch_rejection, profiling_rejection


def mismatch_by_loops(train, sampler, mask, low, high, veto):
    keep = []
    for b in range(len(train)):
        deltas = [train[b, t] - sampler[b, t] for t in range(train.shape[1]) if mask[b, t]]
        mean = math.exp(sum(deltas) / len(deltas)) if deltas else 1.0
        keep.append(low <= mean <= high and all(math.exp(d) >= veto for d in deltas))
    return keep


def degenerate_by_loops(values, groups, valid, min_std):
    exists = valid.any(axis=1)
    keep, dropped, names = np.zeros(len(values), bool), 0, sorted(set(groups[exists].tolist()))
    for name in names:
        rows = [i for i in range(len(values)) if groups[i] == name and exists[i]]
        spread = 0.0
        for t in range(values.shape[1]):
            there = [values[i, t] for i in rows if valid[i, t]]
            spread = max(spread, float(np.std(there)) if there else 0.0)
        if spread >= min_std:
            keep[rows] = True
        else:
            dropped += 1
    return keep, dropped, len(names)


def test_mismatch_rejection_equals_loops():
    rng = np.random.default_rng(0)
    sampler = rng.normal(-1, 0.3, (60, 8)).astype(np.float32)
    train = sampler + rng.normal(0, 0.002, (60, 8)).astype(np.float32)
    train[5, 2] -= 12.0
    mask = rng.random((60, 8)) < 0.5
    mask[7] = False
    got = mismatch_rejection(train, sampler, mask, low=0.999, high=1.001, token_veto=1e-4)
    want = mismatch_by_loops(train, sampler, mask, 0.999, 1.001, 1e-4)
    np.testing.assert_array_equal(got.keep, want)
    assert 10 < sum(want) < 60, "the case must have both kept and rejected trajectories"
    np.testing.assert_array_equal(got.vetoed, [b == 5 and mask[5, 2] for b in range(60)])
    assert mask[5, 2], "the case must have a veto"


def test_one_impossible_token_rejects_a_trajectory_whose_mean_is_fine():
    train, sampler = np.array([[-10.0, -1.0]]), np.array([[-1.0, -10.0]])
    mask = np.ones((1, 2), bool)
    got = mismatch_rejection(train, sampler, mask, low=0.999, high=1.001, token_veto=1e-4)
    np.testing.assert_allclose(got.mean_ratio, [1.0])
    assert got.keep[0], "exp(-9) is 1.2e-4, above the veto"
    got = mismatch_rejection(train, sampler, mask, low=0.999, high=1.001, token_veto=2e-4)
    assert not got.keep[0]


def test_a_trajectory_with_nan_is_rejected_and_one_without_tokens_kept():
    train = np.array([[np.nan, 0.0], [np.nan, 0.0]])
    got = mismatch_rejection(train, np.zeros((2, 2)), np.array([[True, True], [False, False]]))
    np.testing.assert_array_equal(got.keep, [False, True])
    assert not np.asarray(got.vetoed).any(), "no token was found impossible"


def test_bounds_of_zero_and_infinity_switch_the_mismatch_filter_off():
    train = np.array([[-500.0, -3.0]])
    got = mismatch_rejection(
        train, np.zeros((1, 2)), np.ones((1, 2), bool), low=0.0, high=math.inf, token_veto=0.0
    )
    assert got.keep[0]


@pytest.mark.parametrize(
    ("coverage", "correct", "uniform", "keep"),
    [
        (0.29, True, 0.0, False),  # lazy kernels never stay
        (0.35, True, 0.49, True),
        (0.35, True, 0.51, False),
        (0.40, True, 0.999, True),  # from threshold + width on they always do
        (0.00, False, 0.999, True),  # incorrect turns are not touched
    ],
)
def test_profiling_rejection_thins_out_correct_turns_by_coverage(coverage, correct, uniform, keep):
    got = profiling_rejection(np.array([coverage]), np.array([correct]), np.array([uniform]))
    assert bool(got[0]) is keep


def test_degenerate_groups_equal_loops():
    rng = np.random.default_rng(1)
    values = rng.normal(size=(40, 3)).astype(np.float32)
    groups = rng.integers(0, 12, 40)
    valid = rng.random((40, 3)) < 0.7
    for name in (2, 5, 7):
        values[groups == name] = 1.25
    want_keep, want_dropped, want_groups = degenerate_by_loops(values, groups, valid, 1e-3)
    got = jax.jit(degenerate_groups)(values, groups, valid)
    np.testing.assert_array_equal(got.keep, want_keep)
    assert (int(got.dropped), int(got.groups)) == (want_dropped, want_groups)
    assert want_dropped >= 3


def test_a_group_goes_only_when_nothing_differs():
    values = np.array([1.0, 1.0005, 2.0, 2.1, 7.0])
    got = degenerate_groups(values, np.array([1, 1, 2, 2, 3]), min_std=1e-3)
    np.testing.assert_array_equal(got.keep, [False, False, True, True, False])
    assert (int(got.dropped), int(got.groups)) == (2, 3)


def test_a_group_that_differs_at_one_turn_stays_whole():
    got = degenerate_groups(np.array([[1.0, 3.0], [1.0, 4.0]]), np.array([0, 0]))
    np.testing.assert_array_equal(got.keep, [True, True])
