"""Returns of a rollout's turns."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def discounted_returns(
    rewards: Float[Array, "R U"], mask: Bool[Array, "R U"], gamma: float = 1.0
) -> Float[Array, "R U"]:
    """G[i,t] = sum over u >= t of gamma^(u-t) * r[i,u].

    Args:
        rewards: reward of each of U turns of R rollouts.
        mask: turns that took place. Others neither add to a return nor have one (0).
        gamma: discount per turn, in [0, 1].

    Raises:
        ValueError: gamma outside [0, 1].

    Source: Kevin (arXiv 2507.11948, "sum" with gamma 0.4); with gamma 1 daVinci-kernel (arXiv 2606.16497) and Dr.Kernel.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma is {gamma}; a discount per turn lies in [0, 1]")
    turns = jnp.arange(rewards.shape[1])
    ahead = turns[None, :] - turns[:, None]
    weight = jnp.where(ahead >= 0, jnp.power(gamma, jnp.maximum(ahead, 0)), 0.0)
    earned = jnp.where(mask, rewards, 0.0)
    # A sum rather than a matrix product: accelerators multiply matrices in lower precision by default.
    returns = jnp.sum(earned[:, None, :] * weight[None, :, :], axis=-1)
    return jnp.where(mask, returns, 0.0)
