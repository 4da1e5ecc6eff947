"""The clipped policy loss per token, and how tokens of three agents become one number.

    ratio   rho = exp(logp - old_logp)
    token   l = -min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A);  for A < 0 at most -dual_clip * A
    agent   L_a = sum of l over all of the agent's sampled tokens / divisor_a       (see `sequence_weights`)
    joint   L = sum over agents of weight_a * L_a

Clipping is from PPO (arXiv 1707.06347, eq. 7), its asymmetry from DAPO (arXiv 2503.14476), dual clipping from arXiv 1912.09729. No KL
term, no entropy term.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

AGGREGATES = ("sequence_sum", "token_mean", "constant_length")
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
    """l = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), at most -dual_clip A for A < 0; differentiable in `logp`.

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
        The loss, and statistics without gradient, token by token: `clip_fraction` (1 where clipping cuts the gradient off), `kl`
        (estimate of KL(old || new) in nats, (rho - 1) - log rho) and `ratio`. At a step's first epoch `ratio` and `kl` are the gap
        between trainer and sampler, and with rl.staleness=1 an update besides.

    Raises:
        ValueError: a clip range that makes no sense.

    Source: PPO (arXiv 1707.06347, eq. 7), clip-higher of DAPO (arXiv 2503.14476), dual clip (arXiv 1912.09729).
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
    agents: Int[Array, " B"],
    counted: Bool[Array, " B"],
    *,
    weights: Sequence[float],
    scale: float = 1000.0,
    kind: str = "sequence_sum",
    tokens: Int[Array, " B"] | None = None,
    sampled: Bool[Array, " B"] | None = None,
) -> Float[Array, " B"]:
    """The factor of each sequence's token sum in the joint loss: the weight of its agent over a divisor.

        "sequence_sum"      counted sequences of the agent * scale             daVinci-kernel (arXiv 2606.16497): scale 1000
        "token_mean"        tokens of the agent's counted sequences            DAPO (arXiv 2503.14476); `scale` is not used
        "constant_length"   sampled sequences of the agent * scale             Dr.GRPO (arXiv 2503.20783), Kevin (arXiv 2507.11948)

    Where all that was sampled counts, the last is the first. They differ where groups were dropped: "sequence_sum" shares an agent's
    weight out among what is left, so that a step in which little is left moves the policy as far as another, and a task's share in the
    expected gradient depends on how often the other tasks' groups stay; "constant_length" divides by the same number whatever was
    dropped, and its expectation is the policy gradient over the scale.

    Computed over a whole step once, the factors make the loss a plain sum over sequences: micro-batches and devices just add up.

    Args:
        agents: agent id of each sequence, an index into `weights`.
        counted: sequences that take part; padding rows and dropped groups do not and get factor 0.
        weights: weight of each agent's loss, e.g. (0.3, 1.0, 0.5) for (selection, policy, summary).
        scale: constant divisor: a length in tokens, such as the longest answer, or any other number.
        kind: one of AGGREGATES.
        tokens: tokens of each sequence that have a loss; "token_mean" needs them.
        sampled: sequences that were sampled, the counted ones and those dropped since; "constant_length" needs them.

    Raises:
        ValueError: an unknown kind, or one without what it needs.
    """
    if kind not in AGGREGATES:
        raise ValueError(f"the aggregate of token losses is {kind!r}: use one of {', '.join(AGGREGATES)}")
    if kind == "token_mean" and tokens is None or kind == "constant_length" and sampled is None:
        raise ValueError(f"{kind!r} needs {'tokens' if kind == 'token_mean' else 'sampled'}")
    own = agents[:, None] == jnp.arange(len(weights))[None, :]
    member = own & counted[:, None]
    if kind == "token_mean":
        divisor = jnp.maximum(jnp.sum(jnp.where(member, tokens[:, None], 0), axis=0), 1)
    elif kind == "constant_length":
        divisor = jnp.maximum(jnp.sum(own & sampled[:, None], axis=0), 1) * scale
    else:
        divisor = jnp.maximum(jnp.sum(member, axis=0), 1) * scale
    per_agent = jnp.asarray(weights, jnp.float32) / divisor
    return jnp.sum(jnp.where(member, per_agent[None, :], 0.0), axis=1)


def aggregate(
    token_loss: Float[Array, "B T"], mask: Shaped[Array, "B T"], weights: Float[Array, " B"]
) -> Float[Array, ""]:
    """L = sum over sequences of weight * sum over the sequence's tokens of l; the weights are those of `sequence_weights`."""
    return jnp.sum(jnp.sum(jnp.where(mask != 0, token_loss, 0.0), axis=1) * weights)


def joint_loss(
    token_loss: Float[Array, "B T"],
    mask: Shaped[Array, "B T"],
    agents: Int[Array, " B"],
    counted: Bool[Array, " B"],
    *,
    weights: Sequence[float],
    scale: float = 1000.0,
    kind: str = "sequence_sum",
    sampled: Bool[Array, " B"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, " A"]]:
    """L = sum_a weight_a * L_a and each agent's own L_a, for a step that fits in one batch.

    Args and shapes are those of `aggregate` and `sequence_weights`. An agent without sequences has loss 0.

    Source: daVinci-kernel (arXiv 2606.16497), L = L_policy + 0.3 L_selection + 0.5 L_summary.
    """
    how = dict(scale=scale, kind=kind, tokens=jnp.sum(mask != 0, axis=1), sampled=sampled)
    total = aggregate(token_loss, mask, sequence_weights(agents, counted, weights=weights, **how))
    own = sequence_weights(agents, counted, weights=(1.0,) * len(weights), **how)
    per_sequence = jnp.sum(jnp.where(mask != 0, token_loss, 0.0), axis=1) * own
    member = agents[:, None] == jnp.arange(len(weights))[None, :]
    return total, jnp.sum(jnp.where(member, per_sequence[:, None], 0.0), axis=0)
