"""Leave-one-out advantages over explicit groups (DESIGN 3.4).

A member is compared with the mean of the *others* of its group: including itself would shrink the gradient by
(1 - 1/N) (Dr.Kernel, arXiv 2602.05885). Groups are named by ids, never by position, so rollouts of different
tasks or turns can't mix. A group of one has advantage 0: nothing to compare with, nothing to learn.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def leave_one_out(
    values: Float[Array, " M"], group_ids: Int[Array, " M"], valid: Bool[Array, " M"] | None = None
) -> Float[Array, " M"]:
    """A[i] = x[i] - mean of x[j] over the other members j of i's group.

    Args:
        values: what is compared (returns or rewards).
        group_ids: any integers; equal ids form a group. They need be neither dense nor sorted.
        valid: members that exist. Others get 0 and are in nobody's baseline. All by default.
    """
    if valid is None:
        valid = jnp.ones(values.shape, bool)
    others = (group_ids[:, None] == group_ids[None, :]) & valid[None, :] & ~jnp.eye(len(values), dtype=bool)
    count = jnp.sum(others, axis=1)
    baseline = jnp.sum(jnp.where(others, values[None, :], 0.0), axis=1) / jnp.maximum(count, 1)
    return jnp.where(valid & (count > 0), values - baseline, 0.0)


def policy_advantages(
    returns: Float[Array, "R U"], mask: Bool[Array, "R U"], group_ids: Int[Array, " R"]
) -> Float[Array, "R U"]:
    """Leave-one-out per task and turn, over all (k+1)*n rollouts of the task.

    Args:
        returns: `discounted_returns` of R rollouts.
        mask: turns that took place; a turn is compared with the same turn of the others that reached it.
        group_ids: the task of each rollout.
    """
    per_turn = jax.vmap(leave_one_out, in_axes=(1, None, 1), out_axes=1)
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
    same = (group_ids[:, None] == group_ids[None, :]).astype(returns.dtype)
    count = jnp.maximum(same @ mask.astype(returns.dtype), 1.0)
    mean = same @ jnp.where(mask, returns, 0.0) / count
    variance = same @ jnp.where(mask, (returns - mean) ** 2, 0.0) / count
    return advantages / jnp.maximum(jnp.sqrt(variance), floor)


def selection_advantages(
    rewards: Float[Array, " S"], group_ids: Int[Array, " S"], is_null: Bool[Array, " S"]
) -> Float[Array, " S"]:
    """Leave-one-out over the k+1 schemes of a task.

    The null scheme is in the others' baseline, but nobody sampled it: its own advantage is 0.
    """
    return jnp.where(is_null, 0.0, leave_one_out(rewards, group_ids))


def summary_advantages(rewards: Float[Array, " M"], group_ids: Int[Array, " M"]) -> Float[Array, " M"]:
    """Leave-one-out over the s summaries of one trigger; `group_ids` names the trigger of each."""
    return leave_one_out(rewards, group_ids)


def token_advantages(advantages: Float[Array, "B U"], turn_index: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Gives each token the advantage of the turn that sampled it.

    Args:
        advantages: one value per trajectory and turn.
        turn_index: turn of each token; -1 for prompt, feedback and padding, which get 0.

    Returns:
        Advantages of the tokens as they stand in the sequence; log-probs of `tokens[:, 1:]` go with `[:, 1:]`
        of this. A turn index of U or more is a caller's error and gives NaN, never a neighbour's advantage.
    """
    sampled = turn_index >= 0
    picked = jnp.take_along_axis(
        advantages, jnp.where(sampled, turn_index, 0), axis=1, mode="fill", fill_value=jnp.nan
    )
    return jnp.where(sampled, picked, 0.0)
