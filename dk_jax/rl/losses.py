"""The clipped policy loss per token, and how tokens of three agents become one number.

    ratio   rho = exp(logp - old_logp)
    token   l = -min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A);  for A < 0 at most -dual_clip * A
    agent   L_a = mean over the agent's sequences of (sum of l over the sequence's sampled tokens) / scale
    joint   L = sum over agents of weight_a * L_a

Asymmetric clipping is from DAPO (arXiv 2503.14476), dual clipping from arXiv 1912.09729. No KL term, no
entropy term.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

# exp(20) is far beyond every clip range; past it a float32 ratio would overflow and turn the gradient into
# NaN.
_MAX_LOG_RATIO = 20.0


def clipped_policy_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Shaped[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
) -> tuple[Float[Array, "B T"], dict[str, Float[Array, "B T"]]]:
    """Loss of each token, differentiable in `logp`, and what to watch, token by token.

    Args:
        logp: log-probability of each token under the parameters being trained.
        old_logp: the same under the policy that sampled it; a constant.
        advantages: of each token (see `token_advantages`).
        mask: sampled tokens (bool, or numbers of which 0 means no). The others have loss and statistics 0 and
            no gradient, whatever they hold.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound on the loss of a token with negative advantage, as a multiple of |A|; > 1, or None
            for no bound.

    Returns:
        The loss, and statistics without gradient: `clip_fraction` (1 where clipping cuts the gradient off),
            `kl`
        (estimate of KL(old || new) in nats, (rho - 1) - log rho) and `ratio`.

    Raises:
        ValueError: a clip range that makes no sense.
    """
    if not (0.0 <= clip_low < 1.0 and clip_high >= 0.0):
        raise ValueError(f"clip_low={clip_low} must lie in [0, 1) and clip_high={clip_high} must be >= 0")
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip={dual_clip} must be > 1 (or None to switch it off)")
    mask = mask != 0
    # Both `where`s matter: padding may hold -inf or NaN, which must reach neither the value nor the gradient.
    delta = jnp.where(mask, logp, 0.0) - jnp.where(mask, old_logp, 0.0)
    ratio = jnp.exp(jnp.clip(delta, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages)
    clipped = jnp.where(advantages > 0, ratio > 1.0 + clip_high, (advantages < 0) & (ratio < 1.0 - clip_low))
    if dual_clip is not None:
        gain = jnp.where(advantages < 0, jnp.maximum(gain, dual_clip * advantages), gain)
        clipped |= (advantages < 0) & (ratio > dual_clip)
    watched = {"clip_fraction": clipped.astype(ratio.dtype), "kl": ratio - 1.0 - delta, "ratio": ratio}
    return jnp.where(mask, -gain, 0.0), {
        name: jax.lax.stop_gradient(jnp.where(mask, value, 0.0)) for name, value in watched.items()
    }


def sequence_weights(
    agents: Int[Array, " B"], counted: Bool[Array, " B"], *, weights: Sequence[float], scale: float = 1000.0
) -> Float[Array, " B"]:
    """The factor of each sequence's token sum in the joint loss.

    It is the weight of its agent / (number of the agent's sequences * scale).

    Computed over a whole step once, it makes the loss a plain sum over sequences: micro-batches and devices
        just add up.

    Args:
        agents: agent id of each sequence, an index into `weights`.
        counted: sequences that take part; padding rows and dropped groups do not and get factor 0.
        weights: weight of each agent's loss, e.g. (0.3, 1.0, 0.5) for (selection, policy, summary).
        scale: constant divisor (daVinci: 1000).
    """
    member = (agents[:, None] == jnp.arange(len(weights))[None, :]) & counted[:, None]
    per_agent = jnp.asarray(weights, jnp.float32) / (jnp.maximum(jnp.sum(member, axis=0), 1) * scale)
    return jnp.sum(jnp.where(member, per_agent[None, :], 0.0), axis=1)


def aggregate(
    token_loss: Float[Array, "B T"], mask: Shaped[Array, "B T"], weights: Float[Array, " B"]
) -> Float[Array, ""]:
    """Sum over tokens of each sequence, weighted by `sequence_weights`, summed over sequences."""
    return jnp.sum(jnp.sum(jnp.where(mask != 0, token_loss, 0.0), axis=1) * weights)


def joint_loss(
    token_loss: Float[Array, "B T"],
    mask: Shaped[Array, "B T"],
    agents: Int[Array, " B"],
    counted: Bool[Array, " B"],
    *,
    weights: Sequence[float],
    scale: float = 1000.0,
) -> tuple[Float[Array, ""], Float[Array, " A"]]:
    """The joint loss and each agent's own (unweighted) mean, for a step that fits in one batch.

    Args and shapes are those of `aggregate` and `sequence_weights`. An agent without sequences has loss 0.
    """
    total = aggregate(token_loss, mask, sequence_weights(agents, counted, weights=weights, scale=scale))
    own = sequence_weights(agents, counted, weights=(1.0,) * len(weights), scale=scale)
    per_sequence = jnp.sum(jnp.where(mask != 0, token_loss, 0.0), axis=1) * own
    member = agents[:, None] == jnp.arange(len(weights))[None, :]
    return total, jnp.sum(jnp.where(member, per_sequence[:, None], 0.0), axis=0)
