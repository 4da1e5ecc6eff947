"""What holds of estimators, filters and losses whatever the numbers: order, shifts, duplicates, missing turns, groups of one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dk_jax.rl.advantages import (
    ESTIMATORS,
    all_turns,
    group_mean,
    leave_one_out,
    policy_advantages,
    selection_advantages,
    summary_advantages,
)
from dk_jax.rl.filters import degenerate_groups, mismatch_rejection, profiling_rejection
from dk_jax.rl.losses import clipped_policy_loss, sequence_weights
from dk_jax.rl.returns import discounted_returns
from dk_jax.rl.rewards import selection_rewards, summary_rewards

R, U = 8, 3
CLOSE = dict(rtol=1e-4, atol=1e-4)
some = settings(max_examples=40, deadline=None, derandomize=True)

# Compiled once a shape; only the numbers change.
_policy = jax.jit(policy_advantages, static_argnames=("estimator", "floor"))
_selection = jax.jit(selection_advantages, static_argnames=("estimator", "floor"))
_returns = jax.jit(discounted_returns, static_argnames="gamma")
_degenerate = jax.jit(degenerate_groups)
_mismatch = jax.jit(mismatch_rejection, static_argnames=("low", "high", "token_veto"))
_loss = jax.jit(clipped_policy_loss)
_weights = jax.jit(sequence_weights, static_argnames=("weights", "scale", "kind"))

numbers = st.integers(-40, 40).map(lambda n: n / 8)
shares = st.integers(0, 99).map(lambda n: n / 100)
values = arrays(np.float32, (R, U), elements=numbers)
masks = arrays(bool, (R, U))
groups = arrays(np.int32, (R,), elements=st.integers(0, 2))
orders = st.permutations(range(R)).map(np.array)
estimators = st.sampled_from(ESTIMATORS)


@some
@given(values, masks, groups, orders, estimators)
def test_the_order_of_rollouts_does_not_matter(returns, mask, ids, order, estimator):
    whole = np.asarray(_policy(returns, mask, ids, estimator=estimator, floor=0.1))
    np.testing.assert_allclose(_policy(returns[order], mask[order], ids[order], estimator=estimator, floor=0.1), whole[order], **CLOSE)


@some
@given(values, masks, groups, arrays(np.float32, (3,), elements=numbers), estimators)
def test_a_constant_added_to_a_groups_returns_changes_nothing(returns, mask, ids, shift, estimator):
    whole = _policy(returns, mask, ids, estimator=estimator, floor=0.1)
    np.testing.assert_allclose(_policy(returns + shift[ids][:, None], mask, ids, estimator=estimator, floor=0.1), whole, **CLOSE)


@some
@given(values, groups, arrays(np.float32, (3,), elements=numbers), st.sampled_from([0.0, 0.4, 1.0]))
def test_a_constant_added_to_a_groups_rewards_changes_no_advantage_where_all_turns_take_place(rewards, ids, shift, gamma):
    taken = np.ones((R, U), bool)
    plain = _policy(_returns(rewards, taken, gamma=gamma), taken, ids)
    shifted = _policy(_returns(rewards + shift[ids][:, None], taken, gamma=gamma), taken, ids)
    np.testing.assert_allclose(shifted, plain, **CLOSE)


@some
@given(values, masks, groups, estimators)
def test_other_groups_and_turns_that_did_not_take_place_do_not_matter(returns, mask, ids, estimator):
    whole = np.asarray(_policy(returns, mask, ids, estimator=estimator, floor=0.1))
    spoilt = np.where(mask, returns, np.nan)
    spoilt[ids == 2] = 99.0
    got = np.asarray(_policy(spoilt, mask, ids, estimator=estimator, floor=0.1))
    np.testing.assert_allclose(got[ids != 2], whole[ids != 2], **CLOSE)
    assert not whole[~mask].any()


@some
@given(values, masks, groups)
def test_advantages_of_a_group_add_up_to_nothing_and_its_own_mean_shrinks_them(returns, mask, ids):
    loo, own = (np.asarray(_policy(returns, mask, ids, estimator=name)) for name in ("leave_one_out", "group_mean"))
    for name in np.unique(ids):
        inside = ids == name
        np.testing.assert_allclose(loo[inside].sum(axis=0), 0.0, atol=1e-3)
        for t in range(U):
            size = mask[inside, t].sum()
            np.testing.assert_allclose(own[inside, t], loo[inside, t] * (1 - 1 / max(size, 1)), **CLOSE)


@some
@given(values, masks, groups, st.integers(4, 64).map(lambda n: n / 8))
def test_all_turns_does_not_see_the_scale_of_a_groups_returns(returns, mask, ids, scale):
    returns = returns.copy()
    got = np.asarray(all_turns(returns, mask, ids, floor=1e-6))
    for name in np.unique(ids):
        inside = (ids == name)[:, None] & mask
        if inside.any() and np.ptp(returns[inside]) > 0:
            assert got[inside].mean() == pytest.approx(0.0, abs=1e-4) and got[inside].std() == pytest.approx(1.0, rel=1e-3)
    np.testing.assert_allclose(all_turns(returns * np.float32(scale), mask, ids, floor=1e-6), got, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_groups_of_one_have_nothing_to_learn(estimator):
    alone, one = np.array([3.0, -2.0, 7.0]), np.array([1, 2, 3])
    assert not np.asarray(_policy(alone[:, None], np.ones((3, 1), bool), one, estimator=estimator)).any()
    assert not np.asarray(_selection(alone, one, np.zeros(3, bool), estimator=estimator)).any()
    assert not np.asarray(summary_advantages(alone, one, estimator=estimator)).any()


@some
@given(arrays(np.float32, (4,), elements=numbers), st.sampled_from(["leave_one_out", "group_mean"]))
def test_a_scheme_that_was_drawn_twice_is_two_members(rewards, estimator):
    rewards[1] = rewards[0]
    is_null = np.array([False, False, False, True])
    got = np.asarray(_selection(rewards, np.zeros(4, np.int32), is_null, estimator=estimator))
    assert got[0] == got[1] and got[3] == 0
    others = rewards[1:] if estimator == "leave_one_out" else rewards
    assert got[0] == pytest.approx(rewards[0] - others.mean(), abs=1e-4)


@pytest.mark.parametrize("wrong", [policy_advantages, selection_advantages, summary_advantages])
def test_an_unknown_estimator_is_named(wrong):
    one = np.ones(2)
    arguments = {policy_advantages: (one[:, None], one[:, None] > 0, one), selection_advantages: (one, one, one > 2)}
    with pytest.raises(ValueError, match="'gae'.*leave_one_out"):
        wrong(*arguments.get(wrong, (one, one)), estimator="gae")


@some
@given(values, masks, values)
def test_returns_are_linear_and_at_gamma_one_sums_of_what_is_left(rewards, mask, others):
    got = np.asarray(_returns(rewards, mask, gamma=1.0))
    left = np.cumsum(np.where(mask, rewards, 0.0)[:, ::-1], axis=1)[:, ::-1]
    np.testing.assert_allclose(got, np.where(mask, left, 0.0), **CLOSE)
    both = _returns(rewards + others, mask, gamma=0.4)
    np.testing.assert_allclose(both, np.asarray(_returns(rewards, mask, gamma=0.4)) + _returns(others, mask, gamma=0.4), **CLOSE)


@some
@given(values, masks, groups, orders, arrays(np.float32, (3,), elements=numbers))
def test_a_group_stays_or_goes_as_a_whole_whatever_its_order_and_level(returns, mask, ids, order, shift):
    found = _degenerate(returns, ids, mask)
    keep = np.asarray(found.keep)
    for name in np.unique(ids):
        assert len(set(keep[(ids == name) & mask.any(axis=1)])) <= 1
    np.testing.assert_array_equal(_degenerate(returns[order], ids[order], mask[order]).keep, keep[order])
    moved = _degenerate(returns + shift[ids][:, None], ids, mask)
    assert (int(moved.dropped), int(moved.groups)) == (int(found.dropped), int(found.groups))
    loo = np.asarray(_policy(returns, mask, ids))
    assert not loo[~keep & mask.any(axis=1)].any(), "what is dropped had no gradient"


@some
@given(arrays(np.float32, (R, U), elements=st.integers(-64, 0).map(lambda n: n / 8)), masks, values, st.permutations(range(U)))
def test_mismatch_sees_the_differences_of_sampled_tokens_alone(sampler, mask, gap, order):
    found = _mismatch(sampler + gap, sampler, mask, low=0.9, high=1.1, token_veto=0.1)
    again = _mismatch((sampler + gap)[:, order], sampler[:, order], mask[:, order], low=0.9, high=1.1, token_veto=0.1)
    np.testing.assert_array_equal(found.vetoed, again.vetoed)
    assert not (np.asarray(found.keep) & np.asarray(found.vetoed)).any()
    assert np.asarray(found.keep)[~mask.any(axis=1)].all()
    equal = _mismatch(sampler, sampler, mask, low=1.0, high=1.0, token_veto=0.99)
    assert np.asarray(equal.keep).all() and not np.asarray(equal.vetoed).any()


@some
@given(arrays(np.float32, (R,), elements=shares), arrays(np.float32, (R,), elements=shares))
def test_profiling_keeps_whom_it_keeps_at_less_coverage_and_every_wrong_turn(coverage, uniform):
    keep = np.asarray(profiling_rejection(coverage, np.ones(R, bool), uniform))
    want = [min(max((float(c) - 0.3) / 0.1, 0.0), 1.0) for c in coverage]
    for k, u, w in zip(keep, uniform, want, strict=True):
        if abs(u - w) > 1e-5:
            assert k == (u < w)
    more = np.asarray(profiling_rejection(np.minimum(coverage + 0.05, 1.0), np.ones(R, bool), uniform))
    assert (more >= keep).all()
    assert np.asarray(profiling_rejection(coverage, np.zeros(R, bool), uniform)).all()


@some
@given(values, values, masks)
def test_at_ratio_one_a_tokens_loss_is_minus_its_advantage_and_nothing_is_clipped(logp, advantage, mask):
    loss, seen = _loss(logp, logp, advantage, mask)
    np.testing.assert_allclose(loss, np.where(mask, -advantage, 0.0), **CLOSE)
    assert not np.asarray(seen["clip_fraction"]).any() and not np.asarray(seen["kl"]).any()
    gradient = jax.grad(lambda x: clipped_policy_loss(x, jnp.asarray(logp), advantage, mask)[0].sum())(jnp.asarray(logp))
    np.testing.assert_allclose(gradient, np.where(mask, -advantage, 0.0), **CLOSE)


@some
@given(values, values, values, masks)
def test_no_token_gains_more_than_the_clip_range_or_loses_more_than_the_dual_clip(logp, old, advantage, mask):
    loss = np.asarray(_loss(logp, old, advantage, mask)[0])
    size = np.abs(advantage)
    assert (-loss <= np.where(advantage > 0, 1.28 * size, -0.8 * size) + 1e-4)[mask].all()
    assert (loss <= np.where(advantage > 0, 0.0, 3.0 * size) + 1e-4)[mask].all()
    doubled = np.asarray(_loss(logp, old, 2 * advantage, mask)[0])
    np.testing.assert_allclose(doubled, 2 * loss, **CLOSE)


AGENT_WEIGHTS = (0.3, 1.0, 0.5)
lengths = arrays(np.int32, (R,), elements=st.integers(1, 30))


def weights_by_loops(agents, counted, tokens, sampled, kind, scale):
    out = []
    for i in range(len(agents)):
        own = [j for j in range(len(agents)) if agents[j] == agents[i]]
        divisor = {
            "sequence_sum": sum(counted[j] for j in own) * scale,
            "token_mean": sum(tokens[j] for j in own if counted[j]),
            "constant_length": sum(sampled[j] for j in own) * scale,
        }[kind]
        out.append(AGENT_WEIGHTS[agents[i]] / divisor if counted[i] else 0.0)
    return out


@some
@given(groups, arrays(bool, (R,)), arrays(bool, (R,)), lengths, st.sampled_from(["sequence_sum", "token_mean", "constant_length"]))
def test_weights_equal_loops_and_are_what_each_kind_says(agents, counted, more, tokens, kind):
    sampled = counted | more
    how = dict(weights=AGENT_WEIGHTS, scale=7.0, kind=kind, tokens=tokens, sampled=sampled)
    got = np.asarray(_weights(agents, counted, **how))
    np.testing.assert_allclose(got, weights_by_loops(agents, counted, tokens, sampled, kind, 7.0), rtol=1e-5)
    for agent, weight in enumerate(AGENT_WEIGHTS):
        own = (agents == agent) & counted
        if own.any() and kind == "token_mean":
            assert (got * tokens)[own].sum() == pytest.approx(weight, rel=1e-5)
        elif own.any():
            share = own.sum() / ((agents == agent) & sampled).sum() if kind == "constant_length" else 1.0
            assert got[own].sum() * 7.0 == pytest.approx(weight * share, rel=1e-5)


@some
@given(groups, lengths)
def test_where_nothing_was_dropped_a_constant_length_is_the_sequence_sum(agents, tokens):
    all_of_them = np.ones(R, bool)
    how = dict(weights=AGENT_WEIGHTS, scale=7.0, tokens=tokens, sampled=all_of_them)
    np.testing.assert_array_equal(
        _weights(agents, all_of_them, kind="constant_length", **how), _weights(agents, all_of_them, kind="sequence_sum", **how)
    )


def test_an_aggregate_is_named_and_has_what_it_needs():
    agents, counted = np.zeros(2, int), np.ones(2, bool)
    for kind, said in (("mean", "'mean'.*sequence_sum"), ("token_mean", "tokens"), ("constant_length", "sampled")):
        with pytest.raises(ValueError, match=said):
            sequence_weights(agents, counted, weights=AGENT_WEIGHTS, kind=kind)


@some
@given(arrays(np.float32, (R, 2, U), elements=numbers), arrays(bool, (R, 2, U)), arrays(bool, (R,)))
def test_a_schemes_rollouts_and_turns_have_no_order(rewards, mask, malformed):
    got = selection_rewards(rewards, mask, malformed, format_penalty=0.1)
    turned = selection_rewards(rewards[:, ::-1, ::-1], mask[:, ::-1, ::-1], malformed, format_penalty=0.1)
    np.testing.assert_allclose(turned, got, rtol=1e-6)


@some
@given(arrays(np.float32, (R, 2), elements=st.integers(0, 400).map(lambda n: n / 8)), arrays(bool, (R, 2)), arrays(bool, (R,)))
def test_a_summary_earns_no_more_than_the_cap_and_no_less_than_the_penalty(effects, accepted, malformed):
    got = np.asarray(summary_rewards(effects, accepted, malformed, cap=6.0, format_penalty=0.1))
    assert (got <= 6.0).all() and (got >= np.float32(-0.1)).all()
    np.testing.assert_array_equal(got, summary_rewards(effects[:, ::-1], accepted[:, ::-1], malformed, cap=6.0, format_penalty=0.1))
    better = np.asarray(summary_rewards(effects + 1, accepted, malformed, cap=6.0, format_penalty=0.1))
    assert (better >= got).all()


@some
@given(values, masks, groups)
def test_estimators_equal_loops(returns, mask, ids):
    for function in (leave_one_out, group_mean):
        got = np.asarray(function(returns[:, 0], ids, mask[:, 0]))
        for i in range(R):
            own = [returns[j, 0] for j in range(R) if ids[j] == ids[i] and mask[j, 0] and (function is group_mean or j != i)]
            want = returns[i, 0] - sum(own) / len(own) if mask[i, 0] and own else 0.0
            assert got[i] == pytest.approx(want, abs=1e-4)
    got = np.asarray(all_turns(returns, mask, ids, floor=0.1))
    for i in range(R):
        pool = [returns[j, u] for j in range(R) for u in range(U) if ids[j] == ids[i] and mask[j, u]]
        for t in range(U):
            want = (returns[i, t] - np.mean(pool)) / max(np.std(pool), 0.1) if mask[i, t] else 0.0
            assert got[i, t] == pytest.approx(want, rel=1e-3, abs=1e-3)
