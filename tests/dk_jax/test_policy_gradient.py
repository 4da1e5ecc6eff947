"""The proof by enumeration: in a world so small that all that can happen is listed, the expected update is the exact policy gradient.

A task has k selections, the null scheme, n rollouts a scheme of two turns, and s summaries of the rollout that earned them. Every agent
has a table of logits. The left side of each equation goes through the functions of dk_jax.rl (or through `credit.assign`), over all
outcomes of a step with their probabilities, verification's included. The right side knows nothing of groups, baselines or sequences: it
is the derivative of the expected reward of one sample, written down from the tables.
"""

from __future__ import annotations

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dk_jax.models.config import AGENTS
from dk_jax.rl.advantages import policy_advantages, selection_advantages, summary_advantages, token_advantages
from dk_jax.rl.losses import aggregate, clipped_policy_loss, sequence_weights
from dk_jax.rl.returns import discounted_returns
from dk_jax.rl.rewards import PolicyReward, selection_rewards, summary_rewards, summary_trigger

SELECTION, POLICY, SUMMARY = (AGENTS.index(name) for name in ("selection", "policy", "summary"))
WEIGHTS, SCALE, PENALTY, CAP = (0.3, 1.0, 0.5), 7.0, 0.25, 2.5
TURN_OF = np.array([0, 1, 1])  # a rollout: one token in its first turn, two in its second
MESSAGES = np.array(list(itertools.product(range(2), repeat=3)))  # the eight rollouts
CONTEXTS, MALFORMED = 3, 2  # prompts without a skill (0), with one, with the other; a selection's token 2 can't be read
SKILL_OF = np.array([1, 2, 0])  # the context that each selection token leads to


def tables(seed: int = 0) -> dict[str, np.ndarray]:
    """What the judge says of every turn of every rollout, and verification of every skill."""
    rng = np.random.default_rng(seed)
    return dict(
        speedup=rng.choice([0.5, 0.9, 1.3, 2.0, 3.1], (CONTEXTS, 8, 2)),
        correct=rng.random((CONTEXTS, 8, 2)) < 0.8,
        accepted=rng.uniform(0.2, 0.8, (CONTEXTS, 8, 3)),  # probability that a skill, proposed in that situation, is accepted
        effect=rng.choice([1.3, 1.8, 2.4, 4.0], (CONTEXTS, 8, 3)),
    )


def tidy(t: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A first turn's verdict depends on its own token alone."""
    first = (MESSAGES[:, 0] * 4)[None, :, None]
    for name in ("speedup", "correct"):
        t[name][:, :, :1] = np.take_along_axis(t[name][:, :, :1], np.broadcast_to(first, (CONTEXTS, 8, 1)), axis=1)
    return t


WORLD = tidy(tables())
REWARD = np.where(WORLD["correct"], 0.5 + 0.5 * np.minimum(WORLD["speedup"], 3.0), 0.0)  # [context, rollout, turn]


def parameters(seed: int = 1) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return dict(
        policy=jnp.asarray(rng.normal(size=(CONTEXTS, 7, 2))),  # 7 prefixes of a rollout: "", 0, 1, 00, 01, 10, 11
        selection=jnp.asarray(rng.normal(size=(3,))),
        summary=jnp.asarray(rng.normal(size=(CONTEXTS, 8, 3))),
    )


def rollout_logp(policy: jax.Array, context, message) -> jax.Array:
    """Log-probs [..., 3] of the tokens of rollouts `message` (an index of MESSAGES) in `context`."""
    tokens = jnp.asarray(MESSAGES)[message]
    prefix = jnp.stack([0 * tokens[..., 0], 1 + tokens[..., 0], 3 + 2 * tokens[..., 0] + tokens[..., 1]], axis=-1)
    return jax.nn.log_softmax(policy)[context[..., None], prefix, tokens]


# --- the exact gradient ---------------------------------------------------------------------------------------------


def rollout_probabilities(policy):
    """[context, rollout]."""
    at = jnp.broadcast_to(jnp.arange(CONTEXTS)[:, None], (CONTEXTS, 8))
    return jnp.exp(rollout_logp(policy, at, jnp.broadcast_to(jnp.arange(8), (CONTEXTS, 8))).sum(-1))


def triggering(k: int, n: int, params) -> np.ndarray:
    """Probability [context, rollout] that the step's trigger is that rollout in that context: its first one that improved."""
    p, choice = np.asarray(rollout_probabilities(params["policy"])), np.asarray(jax.nn.softmax(params["selection"]))
    judged = np.where(WORLD["correct"], WORLD["speedup"], 0.0)
    improved = (judged.max(-1) >= 1.2 * judged[..., 0]) & (judged.max(-1) >= 1.2)
    out = np.zeros((CONTEXTS, 8))
    for choices in itertools.product(range(3), repeat=k):
        before = np.prod(choice[list(choices)])
        for context in [c for c in (*SKILL_OF[list(choices)], 0) for _ in range(n)]:
            out[context] += before * p[context] * improved[context]
            before *= (p[context] * ~improved[context]).sum()
    return out


def exact_gradient(k: int, n: int, params, gamma: float) -> dict[str, np.ndarray]:
    """Derivative of the expected reward of one sample of each agent, times its weight over the scale."""
    choice = jax.nn.softmax(params["selection"])
    shares = jnp.zeros(CONTEXTS).at[jnp.asarray(SKILL_OF)].add(choice * k / (k + 1)).at[0].add(1 / (k + 1))

    def from_turn(policy, turn):
        worth = sum(gamma ** (u - turn) * REWARD[..., u] for u in range(turn, 2))
        return (shares[:, None] * rollout_probabilities(policy) * worth).sum()

    # A turn's tokens are credited with what follows; where gamma is 1, that is the derivative of the whole.
    first, second = (jax.grad(from_turn)(params["policy"], turn) for turn in (0, 1))
    policy = jnp.concatenate([first[:, :1], second[:, 1:]], axis=1)
    best = (rollout_probabilities(params["policy"]) * REWARD.max(-1)).sum(-1)
    worth = jnp.where(jnp.arange(3) == MALFORMED, -PENALTY, best[SKILL_OF])
    selection = jax.grad(lambda logits: (jax.nn.softmax(logits) * worth).sum())(params["selection"])
    earned = np.where(np.arange(3) == MALFORMED, -PENALTY, WORLD["accepted"] * np.minimum(WORLD["effect"], CAP))
    when = triggering(k, n, params)[..., None]
    summary = jax.grad(lambda logits: (when * jax.nn.softmax(logits) * earned).sum())(params["summary"])
    gradients = dict(policy=policy, selection=selection, summary=summary)
    return {name: np.asarray(g) * WEIGHTS[AGENTS.index(name)] / SCALE for name, g in gradients.items()}


def test_at_gamma_one_the_credit_of_what_follows_is_the_derivative_of_the_whole_return():
    with jax.enable_x64(True):
        params = parameters()
        whole = jax.grad(lambda p: (rollout_probabilities(p) * REWARD.sum(-1)).sum())(params["policy"])
        second = jax.grad(lambda p: (rollout_probabilities(p) * REWARD[..., 1]).sum())(params["policy"])
        np.testing.assert_allclose(whole[:, 1:], second[:, 1:], atol=1e-12)


# --- the expected update, through dk_jax.rl -------------------------------------------------------------------------


def outcomes(k: int, n: int, s: int) -> tuple[np.ndarray, ...]:
    """All that can happen in a step: selections [O, k], rollouts [O, (k+1) n], summaries [O, s], verdicts on them [O, s]."""
    sizes = [3] * k + [8] * ((k + 1) * n) + [3] * s + [2] * s
    flat = np.stack(np.unravel_index(np.arange(np.prod(sizes)), sizes), axis=-1)
    return tuple(np.split(flat, np.cumsum([k, (k + 1) * n, s]), axis=1))


def step_loss(params, choices, rollouts, told, verdicts, *, n: int, gamma: float, estimator: str):
    """(loss, probability) of one step."""
    k, s, N = len(choices), len(told), len(rollouts)
    contexts = jnp.repeat(jnp.append(jnp.asarray(SKILL_OF)[choices], 0), n)
    taken = jnp.ones((N, 2), bool)

    speedup, correct = jnp.asarray(WORLD["speedup"])[contexts, rollouts], jnp.asarray(WORLD["correct"])[contexts, rollouts]
    rewards = PolicyReward(w_correct=0.5, w_speed=0.5, w_coverage=0.0, speedup_cap=3.0)(correct, speedup, 0.0)
    returns = discounted_returns(rewards, taken, gamma)
    policy = token_advantages(
        policy_advantages(returns, taken, jnp.zeros(N, int), estimator=estimator), jnp.broadcast_to(TURN_OF, (N, 3))
    )

    malformed, is_null = jnp.append(choices == MALFORMED, False), jnp.arange(k + 1) == k
    scheme = selection_rewards(rewards.reshape(k + 1, n, 2), taken.reshape(k + 1, n, 2), malformed, format_penalty=PENALTY)
    selection = selection_advantages(scheme, jnp.zeros(k + 1, int), is_null, estimator=estimator)[:k]

    earned = summary_trigger(speedup, correct, taken, alpha=1.2, beta=1.2)
    trigger = jnp.argmax(earned)
    at = contexts[trigger], rollouts[trigger]
    chance = jnp.asarray(WORLD["accepted"])[at][told]
    effects, readable = jnp.asarray(WORLD["effect"])[at][told], told != MALFORMED
    value = summary_rewards(effects[:, None], (verdicts == 1)[:, None] & readable[:, None], ~readable, cap=CAP, format_penalty=PENALTY)
    summary = summary_advantages(value, jnp.zeros(s, int), estimator=estimator)

    logp = jnp.concatenate(
        [
            jnp.pad(jax.nn.log_softmax(params["selection"])[choices][:, None], ((0, 0), (0, 2))),
            rollout_logp(params["policy"], contexts, rollouts),
            jnp.pad(jax.nn.log_softmax(params["summary"][at])[told][:, None], ((0, 0), (0, 2))),
        ]
    )
    advantages = jnp.concatenate([jnp.tile(selection[:, None], 3), policy, jnp.tile(summary[:, None], 3)])
    one = jnp.array([1, 0, 0])
    mask = jnp.concatenate([jnp.tile(one, (k, 1)), jnp.ones((N, 3), int), jnp.tile(one, (s, 1))])
    agents = jnp.array([SELECTION] * k + [POLICY] * N + [SUMMARY] * s)
    counted = jnp.concatenate([jnp.ones(k + N, bool), jnp.broadcast_to(earned.any(), (s,))])
    token_loss, _ = clipped_policy_loss(logp, jax.lax.stop_gradient(logp), advantages, mask)
    loss = aggregate(token_loss, mask, sequence_weights(agents, counted, weights=WEIGHTS, scale=SCALE))

    judged = jnp.log(jnp.where(verdicts == 1, chance, 1.0 - chance)).sum()
    return loss, jnp.exp(jnp.where(mask != 0, logp, 0.0).sum() + judged)


@cache
def expected_update(k: int, n: int, s: int, gamma: float, estimator: str) -> dict[str, np.ndarray]:
    """Minus the gradient of the joint loss, over all outcomes."""

    @jax.jit
    @jax.grad
    def gradient(params, happens):  # an argument: of a constant XLA would work out all that follows while it compiles
        loss, p = jax.vmap(lambda *o: step_loss(params, *o, n=n, gamma=gamma, estimator=estimator))(*happens)
        return (jax.lax.stop_gradient(p) * loss).sum()

    return {name: -np.asarray(g) for name, g in gradient(parameters(), outcomes(k, n, s)).items()}


SHAPES = [(1, 1, 2), (2, 1, 1), (1, 2, 1)]


@pytest.mark.parametrize(("k", "n", "s"), SHAPES)
@pytest.mark.parametrize("gamma", [1.0, 0.4])
def test_the_expected_update_of_each_agent_is_the_exact_policy_gradient(k, n, s, gamma):
    with jax.enable_x64(True):
        want, got = exact_gradient(k, n, parameters(), gamma), expected_update(k, n, s, gamma, "leave_one_out")
    for agent in ("policy", "selection", "summary"):
        if agent == "summary" and s == 1:
            assert not got[agent].any(), "one summary has nothing to be compared with"
            continue
        assert np.abs(want[agent]).max() > 1e-3
        np.testing.assert_allclose(got[agent], want[agent], rtol=1e-5, atol=1e-9, err_msg=agent)


@pytest.mark.parametrize(("k", "n", "s"), SHAPES)
def test_a_mean_that_includes_the_sample_itself_shrinks_it_by_one_over_the_group_size(k, n, s):
    with jax.enable_x64(True):
        want, got = exact_gradient(k, n, parameters(), 1.0), expected_update(k, n, s, 1.0, "group_mean")
    for agent, size in (("policy", (k + 1) * n), ("selection", k + 1), ("summary", s)):
        np.testing.assert_allclose(got[agent], (1 - 1 / size) * want[agent], rtol=1e-5, atol=1e-9, err_msg=agent)


def test_division_by_the_deviation_of_all_turns_leaves_no_multiple_of_the_gradient():
    with jax.enable_x64(True):
        want, got = exact_gradient(1, 1, parameters(), 1.0)["policy"], expected_update(1, 1, 2, 1.0, "all_turns")["policy"]
    cosine = (want * got).sum() / np.linalg.norm(want) / np.linalg.norm(got)
    assert 0.5 < cosine < 0.999


def test_the_probabilities_of_all_outcomes_add_up_to_one():
    with jax.enable_x64(True):
        happens = outcomes(1, 1, 2)
        chance = jax.vmap(lambda *o: step_loss(parameters(), *o, n=1, gamma=1.0, estimator="leave_one_out")[1])
        p = jax.jit(chance)(*happens)
        assert float(p.sum()) == pytest.approx(1.0, abs=1e-12)
