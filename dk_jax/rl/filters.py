"""What is left out of an update: probabilities that disagree, lazy kernels, groups that say nothing.

Filters only mark; the caller masks and counts. Random numbers come in as arguments, so that a step can be
replayed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class MismatchFilter(NamedTuple):
    """Which trajectories to keep, each one's geometric mean of train over sampler probability, and which one token has vetoed."""

    keep: Bool[Array, " B"]
    mean_ratio: Float[Array, " B"]
    vetoed: Bool[Array, " B"]


def mismatch_rejection(
    train_logp: Float[Array, "B T"],
    sampler_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: float = 0.999,
    high: float = 1.001,
    token_veto: float = 1e-4,
) -> MismatchFilter:
    """Keeps a trajectory where low <= (prod_t p_train / p_sampler)^(1/T) <= high and no token's ratio is below the veto.

    The others were drawn from another policy than the one that is trained: their gradient belongs to neither.

    Args:
        train_logp, sampler_logp: log-probs of the sampled tokens under trainer and sampler, same parameters.
        mask: sampled tokens. A trajectory without any is kept.
        low, high: bounds on the geometric mean, over a trajectory's tokens, of train / sampler probability.
        token_veto: one token whose ratio lies below this rejects its trajectory; 0 switches the veto off.

    Source: Dr.Kernel (arXiv 2602.05885), mismatch rejection sampling. NaN anywhere in a trajectory rejects it, without a veto.
    """
    delta = jnp.where(mask, train_logp, 0.0) - jnp.where(mask, sampler_logp, 0.0)
    mean_ratio = jnp.exp(jnp.sum(delta, axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1))
    vetoed = jnp.any(delta < jnp.log(token_veto), axis=1)
    return MismatchFilter(keep=(mean_ratio >= low) & (mean_ratio <= high) & ~vetoed, mean_ratio=mean_ratio, vetoed=vetoed)


def profiling_rejection(
    coverage: Float[Array, "*S"],
    correct: Bool[Array, "*S"],
    uniform: Float[Array, "*S"],
    *,
    threshold: float = 0.3,
    width: float = 0.1,
) -> Bool[Array, "*S"]:
    """Keeps a correct turn with probability clip((PR - threshold) / width, 0, 1), and every incorrect one.

    Args:
        coverage: PR, the candidate's own share of device time, in [0, 1].
        correct: turns that were correct.
        uniform: one random number in [0, 1) for each turn.

    Source: Dr.Kernel (arXiv 2602.05885), profiling-based rejection sampling: kernels that leave the work to the framework are thinned
    out.
    """
    probability = jnp.clip((coverage - threshold) / width, 0.0, 1.0)
    return ~correct | (uniform < probability)


class GroupFilter(NamedTuple):
    """Which members to keep, how many groups were dropped, and how many there were."""

    keep: Bool[Array, " M"]
    dropped: Int[Array, ""]
    groups: Int[Array, ""]


def degenerate_groups(
    values: Float[Array, " M *U"],
    group_ids: Int[Array, " M"],
    valid: Bool[Array, " M *U"] | None = None,
    *,
    min_std: float = 1e-3,
) -> GroupFilter:
    """Drops groups whose values do not differ.

    They have no gradient, yet would weigh in the mean over sequences.

    Args:
        values: rewards [M], or returns [M, U] of U turns; then a group goes only if its members differ at no
            turn.
        group_ids: any integers; equal ids form a group.
        valid: values that exist, of the shape of `values`; all by default. Members without any are in no
            group and not kept.
        min_std: population standard deviation below which a group says nothing. A group of one never says
            anything.

    Source: daVinci-kernel (arXiv 2606.16497), groups of return std < 1e-3; dynamic sampling of DAPO (arXiv 2503.14476).
    """
    if valid is None:
        valid = jnp.ones(values.shape, bool)
    if values.ndim == 1:
        values, valid = values[:, None], valid[:, None]
    exists = jnp.any(valid, axis=1)
    same = (group_ids[:, None] == group_ids[None, :]) & exists[:, None] & exists[None, :]
    inside = same[:, :, None] & valid[None, :, :]
    count = jnp.maximum(jnp.sum(inside, axis=1), 1)
    mean = jnp.sum(jnp.where(inside, values[None], 0.0), axis=1) / count
    square = jnp.where(inside, jnp.square(values[None] - mean[:, None, :]), 0.0)
    std = jnp.sqrt(jnp.sum(square, axis=1) / count)
    keep = exists & (jnp.max(std, axis=1) >= min_std)
    # Every group is counted at its first member.
    first = exists & (jnp.argmax(same, axis=1) == jnp.arange(len(group_ids)))
    return GroupFilter(keep=keep, dropped=jnp.sum(first & ~keep), groups=jnp.sum(first))
