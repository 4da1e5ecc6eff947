"""Advantages over explicit groups: leave-one-out (DESIGN 3.4), and the two estimators that it is compared with.

    "leave_one_out"   A[i,t] = G[i,t] - mean_{j != i} G[j,t]           unbiased: the baseline knows nothing of i
    "group_mean"      A[i,t] = G[i,t] - mean_j G[j,t]                  itself included: (1 - 1/N) times that
    "all_turns"       A[i,t] = (G[i,t] - mean) / std over all (j, u)   every turn of every trajectory of the group

Groups are named by ids, never by position, so rollouts of different tasks or turns can't mix. Under the first two a member that has
nobody to be compared with has advantage 0: nothing to learn.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

ESTIMATORS = ("leave_one_out", "group_mean", "all_turns")
_LEAST_STD = 1e-6  # equal members may differ by rounding, which must not become an advantage of 1


def leave_one_out(
    values: Float[Array, " M"], group_ids: Int[Array, " M"], valid: Bool[Array, " M"] | None = None
) -> Float[Array, " M"]:
    """A[i] = x[i] - mean of x[j] over the other members j of i's group.

    Args:
        values: what is compared (returns or rewards).
        group_ids: any integers; equal ids form a group. They need be neither dense nor sorted.
        valid: members that exist. Others get 0 and are in nobody's baseline. All by default.

    Source: REINFORCE leave-one-out (arXiv 2402.14740, "RLOO"); per turn, TRLOO of Dr.Kernel (arXiv 2602.05885).
    """
    if valid is None:
        valid = jnp.ones(values.shape, bool)
    others = (group_ids[:, None] == group_ids[None, :]) & valid[None, :] & ~jnp.eye(len(values), dtype=bool)
    count = jnp.sum(others, axis=1)
    baseline = jnp.sum(jnp.where(others, values[None, :], 0.0), axis=1) / jnp.maximum(count, 1)
    return jnp.where(valid & (count > 0), values - baseline, 0.0)


def group_mean(
    values: Float[Array, " M"], group_ids: Int[Array, " M"], valid: Bool[Array, " M"] | None = None
) -> Float[Array, " M"]:
    """A[i] = x[i] - mean of x[j] over all members j of i's group, i itself among them.

    It is `leave_one_out` times (1 - 1/N), N the members of the group: a gradient that is too small, the more so the smaller the group.

    Args:
        values, group_ids, valid: as for `leave_one_out`.

    Source: the baseline of GRPO (arXiv 2402.03300, section 4.1.2, outcome supervision); its division is `over_group_std`.
    """
    if valid is None:
        valid = jnp.ones(values.shape, bool)
    members = (group_ids[:, None] == group_ids[None, :]) & valid[None, :]
    count = jnp.maximum(jnp.sum(members, axis=1), 1)
    return jnp.where(valid, values - jnp.sum(jnp.where(members, values[None, :], 0.0), axis=1) / count, 0.0)


def all_turns(
    returns: Float[Array, "R U"], mask: Bool[Array, "R U"], group_ids: Int[Array, " R"], *, floor: float = _LEAST_STD
) -> Float[Array, "R U"]:
    """A[i,t] = (G[i,t] - mean) / std, mean and population deviation over all turns of all trajectories of i's group.

    Turns are compared with turns of other indices too, so a later turn, whose return holds less, starts lower: with gamma below 1 that
    matters little, at gamma 1 it is a bias against refinement.

    Args:
        returns: `discounted_returns` of R trajectories.
        mask: turns that took place; others get 0 and count nowhere.
        group_ids: the task of each trajectory.
        floor: least deviation to divide by (> 0).

    Source: Kevin (arXiv 2507.11948), rewards normalised over all turns of a task's trajectories.
    """
    same = group_ids[:, None] == group_ids[None, :]
    inside = same[:, :, None] & mask[None, :, :]
    count = jnp.maximum(jnp.sum(inside, axis=(1, 2)), 1)
    mean = jnp.sum(jnp.where(inside, returns[None], 0.0), axis=(1, 2)) / count
    square = jnp.where(inside, jnp.square(returns[None] - mean[:, None, None]), 0.0)
    std = jnp.sqrt(jnp.sum(square, axis=(1, 2)) / count)
    return jnp.where(mask, (returns - mean[:, None]) / jnp.maximum(std, floor)[:, None], 0.0)


def policy_advantages(
    returns: Float[Array, "R U"],
    mask: Bool[Array, "R U"],
    group_ids: Int[Array, " R"],
    *,
    estimator: str = "leave_one_out",
    floor: float = _LEAST_STD,
) -> Float[Array, "R U"]:
    """Advantages per task and turn, over all (k+1)*n rollouts of the task: daVinci-kernel (arXiv 2606.16497), DESIGN 3.4.

    Args:
        returns: `discounted_returns` of R rollouts.
        mask: turns that took place; a turn is compared with the same turn of the others that reached it ("all_turns": with all).
        group_ids: the task of each rollout.
        estimator: one of ESTIMATORS.
        floor: of `all_turns`.

    Raises:
        ValueError: an unknown estimator.
    """
    if estimator == "all_turns":
        return all_turns(returns, mask, group_ids, floor=floor)
    per_turn = jax.vmap(_baseline(estimator), in_axes=(1, None, 1), out_axes=1)
    return per_turn(returns, group_ids, mask)


def over_group_std(
    advantages: Float[Array, "R U"],
    returns: Float[Array, "R U"],
    mask: Bool[Array, "R U"],
    group_ids: Int[Array, " R"],
    *,
    floor: float,
) -> Float[Array, "R U"]:
    """Advantages over the standard deviation of their group's returns at that turn, so that each group moves the policy alike.

    Args:
        advantages: `policy_advantages` of the same returns.
        returns, mask, group_ids: as there.
        floor: least deviation to divide by (> 0): members that differ by less, as by the noise of a clock, stay small.

    Source: GRPO (arXiv 2402.03300, eq. 3 with its outcome reward), there without a floor.
    """
    # Sums rather than matrix products: accelerators multiply matrices in lower precision by default.
    inside = (group_ids[:, None] == group_ids[None, :])[:, :, None] & mask[None, :, :]
    count = jnp.maximum(jnp.sum(inside, axis=1), 1)
    mean = jnp.sum(jnp.where(inside, returns[None], 0.0), axis=1) / count
    variance = jnp.sum(jnp.where(inside, jnp.square(returns[None] - mean[:, None, :]), 0.0), axis=1) / count
    return advantages / jnp.maximum(jnp.sqrt(variance), floor)


def selection_advantages(
    rewards: Float[Array, " S"],
    group_ids: Int[Array, " S"],
    is_null: Bool[Array, " S"],
    *,
    estimator: str = "leave_one_out",
    floor: float = _LEAST_STD,
) -> Float[Array, " S"]:
    """Advantages over the k+1 schemes of a task: daVinci-kernel (arXiv 2606.16497), DESIGN 3.4.

    The null scheme is in the others' baseline, but nobody sampled it: its own advantage is 0. Equal sets of skills that were drawn twice
    stay two members: pooling them would let a baseline depend on the action.

    Args:
        rewards: of `selection_rewards`.
        group_ids: the task of each scheme.
        is_null: the null schemes.
        estimator, floor: as for `policy_advantages`; a scheme is a trajectory of one turn.
    """
    return jnp.where(is_null, 0.0, _of_one_turn(rewards, group_ids, estimator, floor))


def summary_advantages(
    rewards: Float[Array, " M"], group_ids: Int[Array, " M"], *, estimator: str = "leave_one_out", floor: float = _LEAST_STD
) -> Float[Array, " M"]:
    """Advantages over the s summaries of one trigger; `group_ids` names the trigger of each.

    Args:
        rewards: of `summary_rewards`.
        estimator, floor: as for `policy_advantages`; a summary is a trajectory of one turn.

    Source: daVinci-kernel (arXiv 2606.16497), DESIGN 3.4.
    """
    return _of_one_turn(rewards, group_ids, estimator, floor)


def token_advantages(advantages: Float[Array, "B U"], turn_index: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Gives each token the advantage of the turn that sampled it: A[i,s] = A[i, turn(s)].

    Args:
        advantages: one value per trajectory and turn.
        turn_index: turn of each token; -1 for prompt, feedback and padding, which get 0.

    Returns:
        Advantages of the tokens as they stand in the sequence; log-probs of `tokens[:, 1:]` go with `[:, 1:]`
        of this. A turn index of U or more is a caller's error and gives NaN, never a neighbour's advantage.

    Source: turn-level credit of Dr.Kernel (arXiv 2602.05885).
    """
    sampled = turn_index >= 0
    picked = jnp.take_along_axis(
        advantages, jnp.where(sampled, turn_index, 0), axis=1, mode="fill", fill_value=jnp.nan
    )
    return jnp.where(sampled, picked, 0.0)


def _baseline(estimator: str):
    if estimator not in ESTIMATORS:
        raise ValueError(f"the estimator of advantages is {estimator!r}: use one of {', '.join(ESTIMATORS)}")
    return group_mean if estimator == "group_mean" else leave_one_out


def _of_one_turn(rewards: Float[Array, " M"], group_ids: Int[Array, " M"], estimator: str, floor: float) -> Float[Array, " M"]:
    if estimator == "all_turns":
        return all_turns(rewards[:, None], jnp.ones((len(rewards), 1), bool), group_ids, floor=floor)[:, 0]
    return _baseline(estimator)(rewards, group_ids)
