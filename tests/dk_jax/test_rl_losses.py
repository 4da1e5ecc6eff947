"""The clipped loss, its aggregation over three agents, and its gradients, against plain loops."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dk_jax.rl.losses import aggregate, clipped_policy_loss, joint_loss, sequence_weights

WEIGHTS = (0.3, 1.0, 0.5)


def token_loss_by_hand(logp, old, advantage, low, high, dual):
    ratio = math.exp(logp - old)
    gain = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        gain = max(gain, dual * advantage)
    return -gain


def random_batch(seed, B=6, T=9):
    rng = np.random.default_rng(seed)
    old = rng.normal(-1.0, 0.5, (B, T)).astype(np.float32)
    logp = (old + rng.normal(0, 0.6, (B, T))).astype(np.float32)
    return logp, old, rng.normal(size=(B, T)).astype(np.float32), rng.random((B, T)) < 0.6


@pytest.mark.parametrize("dual", [3.0, 1.5, None])
def test_loss_equals_the_equation_token_by_token(dual):
    logp, old, advantage, mask = random_batch(0)
    got, _ = clipped_policy_loss(logp, old, advantage, mask, clip_low=0.2, clip_high=0.28, dual_clip=dual)
    want = [
        [
            token_loss_by_hand(logp[b, t], old[b, t], advantage[b, t], 0.2, 0.28, dual) if mask[b, t] else 0
            for t in range(9)
        ]
        for b in range(6)
    ]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.0, 2.0, -2.0),  # on policy: -ratio * A
        (1.27, 1.0, -1.27),  # inside the upper bound
        (1.29, 1.0, 0.0),  # beyond it: no further push up
        (0.5, 1.0, -0.5),  # low ratio, good token: still pulled up
        (0.79, -1.0, 0.0),  # beyond the lower bound: no further push down
        (0.81, -1.0, 0.81),
        (2.9, -1.0, 2.9),  # bad token that became likelier is pushed down ...
        (3.1, -1.0, 0.0),  # ... until dual clip holds it
    ],
)
def test_gradient_is_cut_off_exactly_outside_the_clip_range(ratio, advantage, gradient):
    def loss(logp):
        token, info = clipped_policy_loss(
            logp, jnp.zeros((1, 1)), jnp.full((1, 1), advantage), jnp.ones((1, 1), bool)
        )
        return token.sum(), info["clip_fraction"].sum()

    got, clipped = jax.grad(loss, has_aux=True)(jnp.full((1, 1), math.log(ratio)))
    np.testing.assert_allclose(got[0, 0], gradient, rtol=1e-5, atol=1e-7)
    assert clipped == (gradient == 0.0)


def test_gradient_equals_finite_differences():
    logp, old, advantage, mask = random_batch(1, B=2, T=4)
    with jax.enable_x64(True):
        logp, old, advantage = (np.asarray(a, np.float64) for a in (logp, old, advantage))

        def total(x):
            return clipped_policy_loss(x, old, advantage, mask)[0].sum()

        got = np.asarray(jax.grad(total)(logp))
        for index in np.ndindex(*logp.shape):
            step = np.zeros_like(logp)
            step[index] = 1e-6
            numeric = (total(logp + step) - total(logp - step)) / 2e-6
            np.testing.assert_allclose(got[index], numeric, atol=1e-6)


def test_padding_may_hold_anything_without_touching_value_or_gradient():
    mask = np.array([[True, False, False, False]])
    logp = jnp.array([[-1.0, -jnp.inf, jnp.nan, 900.0]])

    def total(x):
        return clipped_policy_loss(x, jnp.zeros((1, 4)), jnp.array([[1.0, jnp.nan, 1.0, -1.0]]), mask)[
            0
        ].sum()

    value, gradient = jax.value_and_grad(total)(logp)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all() and np.count_nonzero(gradient) == 1


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_float32_gives_a_finite_gradient(advantage):
    def total(x):
        token, _ = clipped_policy_loss(
            x, jnp.full((1, 2), -200.0), jnp.full((1, 2), advantage), jnp.ones((1, 2), bool)
        )
        return token.sum()

    value, gradient = jax.value_and_grad(total)(jnp.array([[-0.1, -400.0]]))
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_mask_of_numbers_equals_mask_of_booleans():
    logp, old, advantage, mask = random_batch(2)
    by_bool, _ = clipped_policy_loss(logp, old, advantage, mask)
    by_float, _ = clipped_policy_loss(logp, old, advantage, mask.astype(np.float32))
    np.testing.assert_array_equal(by_bool, by_float)


def test_statistics_say_how_far_the_policy_has_moved():
    mask = np.array([[True, True, False]])
    logp, old = np.log([[0.5, 0.25, 0.9]]), np.log([[0.5, 0.5, 0.1]])
    _, info = clipped_policy_loss(logp, old, np.array([[1.0, -1.0, 1.0]]), mask)
    np.testing.assert_allclose(info["ratio"], [[1, 0.5, 0]], rtol=1e-6)
    np.testing.assert_allclose(info["kl"], [[0, 0.5 - 1 - math.log(0.5), 0]], rtol=1e-5)
    np.testing.assert_array_equal(info["clip_fraction"], [[0, 1, 0]])


@pytest.mark.parametrize("bad", [{"clip_low": 1.0}, {"clip_high": -0.1}, {"dual_clip": 1.0}])
def test_a_clip_range_that_makes_no_sense_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        clipped_policy_loss(*random_batch(0), **bad)


def joint_by_loops(token_loss, mask, agents, counted, scale):
    total, own = 0.0, []
    for agent, weight in enumerate(WEIGHTS):
        rows = [b for b in range(len(agents)) if agents[b] == agent and counted[b]]
        sums = [sum(token_loss[b, t] for t in range(token_loss.shape[1]) if mask[b, t]) for b in rows]
        own.append(sum(sums) / len(sums) / scale if sums else 0.0)
        total += weight * own[-1]
    return total, own


def test_joint_loss_takes_each_agents_mean_over_its_own_sequences():
    rng = np.random.default_rng(4)
    token_loss, mask = rng.normal(size=(10, 5)).astype(np.float32), rng.random((10, 5)) < 0.7
    agents = np.array([1, 1, 1, 0, 1, 2, 1, 0, 1, 1])
    counted = rng.random(10) < 0.8
    total, own = joint_loss(token_loss, mask, agents, counted, weights=WEIGHTS, scale=10.0)
    want_total, want_own = joint_by_loops(token_loss, mask, agents, counted, 10.0)
    np.testing.assert_allclose(total, want_total, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(own, want_own, rtol=1e-5, atol=1e-7)


def test_an_agent_without_sequences_costs_nothing():
    total, own = joint_loss(
        np.ones((2, 3)), np.ones((2, 3), bool), np.array([1, 1]), np.ones(2, bool), weights=WEIGHTS, scale=1.0
    )
    np.testing.assert_allclose(own, [0, 3, 0])
    np.testing.assert_allclose(total, 3)


def test_a_long_answer_weighs_by_its_tokens_and_is_not_averaged_over_them():
    mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0]], bool)
    total, _ = joint_loss(
        np.ones((2, 4)), mask, np.array([1, 1]), np.ones(2, bool), weights=WEIGHTS, scale=1.0
    )
    np.testing.assert_allclose(total, 2.5)


def test_microbatches_add_up_to_the_whole_step():
    rng = np.random.default_rng(5)
    token_loss, mask = rng.normal(size=(9, 4)).astype(np.float32), np.ones((9, 4), bool)
    agents, counted = rng.integers(0, 3, 9), np.arange(9) != 3
    weights = sequence_weights(agents, counted, weights=WEIGHTS, scale=7.0)
    parts = sum(aggregate(token_loss[i : i + 3], mask[i : i + 3], weights[i : i + 3]) for i in (0, 3, 6))
    whole, _ = joint_loss(token_loss, mask, agents, counted, weights=WEIGHTS, scale=7.0)
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
    assert weights[3] == 0


@pytest.mark.parametrize("kind", ["token_mean", "constant_length"])
def test_joint_loss_by_other_aggregates_equals_loops(kind):
    rng = np.random.default_rng(6)
    token_loss, mask = rng.normal(size=(10, 5)).astype(np.float32), rng.random((10, 5)) < 0.7
    agents, counted, sampled = rng.integers(0, 3, 10), rng.random(10) < 0.6, np.arange(10) != 4
    counted &= sampled
    total, own = joint_loss(token_loss, mask, agents, counted, weights=WEIGHTS, scale=10.0, kind=kind, sampled=sampled)
    want = []
    for agent in range(3):
        rows = [b for b in range(10) if agents[b] == agent and counted[b]]
        summed = sum(token_loss[b, t] for b in rows for t in range(5) if mask[b, t])
        tokens = sum(int(mask[b].sum()) for b in rows)
        divisor = tokens if kind == "token_mean" else 10.0 * sum(agents[b] == agent and sampled[b] for b in range(10))
        want.append(summed / divisor if rows else 0.0)
    np.testing.assert_allclose(own, want, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(total, np.dot(WEIGHTS, want), rtol=1e-5, atol=1e-7)
