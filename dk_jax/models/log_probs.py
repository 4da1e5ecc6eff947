"""Log-probabilities and entropies of given tokens, without ever holding the logits of a whole batch.

Full logits are the memory wall of training: 8 x 4096 positions of a 151,936-word vocabulary are 19.9 GB in
float32. Positions go through the unembedding in chunks under `jax.checkpoint`, so the backward pass
recomputes a chunk's logits instead of keeping them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from dk_jax.models.backbone import Params, Static, apply_heads, hidden_states, unembed

KEPT = ("log_sum", "entropy")
"""What the backward pass takes from the forward pass: two numbers a position, so that it looks at the logits it has made again once."""


class TokenLogProbs(NamedTuple):
    """Per position t, about token t+1 given tokens 0..t; float32 [B, T-1], zero where token t+1 is padding.

    Attributes:
      log_probs: log p(token t+1) in nats.
      entropies: entropy of the whole distribution at t in nats.
    """

    log_probs: Float[Array, "B T-1"]
    entropies: Float[Array, "B T-1"]


def token_log_probs(
    static: Static,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    agents: Int[Array, " B"],
    chunk: int = 1024,
    temperature: float = 1.0,
) -> TokenLogProbs:
    """Scores every token of right-padded rows under the head of each row's agent.

    Args:
      static, params: the backbone.
      tokens: token ids, T >= 2.
      lengths: real tokens of each row.
      agents: index into AGENTS of each row.
      chunk: about how many positions a device takes through the unembedding at once; the logits in
        memory are chunk x V float32. It changes memory and speed, not values beyond rounding. (Of a device, not of the batch:
        devices add up the unembedding's gradient after each chunk.)
      temperature: divides the logits, so that the policy scored is the one that was sampled from.

    Returns:
      Log-probs and entropies, differentiable in `params`.
    """
    b, t = tokens.shape
    if not temperature > 0:
        raise ValueError(f"token_log_probs: temperature is {temperature}; a distribution needs one above 0")
    if t < 2:
        raise ValueError(f"token_log_probs needs at least 2 positions a row to have a next token; got {t}")
    hidden = hidden_states(static, params, tokens, lengths)
    hidden = apply_heads(static, params, hidden, agents)[:, :-1]
    targets = tokens[:, 1:]

    width = min(max(chunk * _row_share(b) // b, 1), t - 1)
    n_chunks = -(-(t - 1) // width)
    padding = n_chunks * width - (t - 1)
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0))).reshape(b, n_chunks, width, -1).swapaxes(0, 1)
    targets = jnp.pad(targets, ((0, 0), (0, padding))).reshape(b, n_chunks, width).swapaxes(0, 1)

    def score(_, piece):
        return None, log_probs_and_entropies(unembed(static, params, piece[0]) / temperature, piece[1])

    keep = jax.checkpoint_policies.save_only_these_names(*KEPT)
    _, pieces = jax.lax.scan(jax.checkpoint(score, prevent_cse=False, policy=keep), None, (hidden, targets))
    real = jnp.arange(1, t)[None, :] < lengths[:, None]
    return TokenLogProbs(
        *(jnp.where(real, p.swapaxes(0, 1).reshape(b, n_chunks * width)[:, : t - 1], 0.0) for p in pieces)
    )


def _row_share(rows: int) -> int:
    """How many parts so many rows are spread over, under `jax.set_mesh` of a mesh of dk_jax.models.sharding."""
    mesh = jax.sharding.get_abstract_mesh()
    share = mesh.shape["data"] * mesh.shape["fsdp"] if {"data", "fsdp"} <= mesh.shape.keys() else 1
    return 1 if rows % share else share


@jax.custom_vjp
def log_probs_and_entropies(
    logits: Float[Array, "... V"], targets: Int[Array, " ..."]
) -> tuple[Float[Array, " ..."], Float[Array, " ..."]]:
    """log p(target) and entropy in nats of the distributions that float32 logits define.

    The logits are looked at twice and never written again: once for their maximum, once for all sums. The gradient is one more look,

        d log p(target) = [v = target] - p(v)          d entropy = -p(v) (log p(v) + entropy)

    where the general way would write several arrays of their size (zeros, one-hot gradients put into these, sums of both).
    """
    return _scored(logits, targets)[0]


def _scored(logits, targets):
    """(log-prob, entropy), and (maximum, log of the sum of exponentials of what lies below it) for the gradient."""
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    below = logits - largest[..., None]
    mass = jnp.exp(below)
    total = jnp.sum(mass, axis=-1)
    mean = jnp.sum(mass * below, axis=-1) / total
    chosen = jnp.sum(jnp.where(_is_target(logits, targets), below, 0.0), axis=-1)
    log_total = jnp.log(total)
    return (chosen - log_total, log_total - mean), (largest, log_total)


def _is_target(logits, targets):
    return jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]


def _score_forward(logits, targets):
    (chosen, entropy), (largest, log_total) = _scored(logits, targets)
    sums = (checkpoint_name(value, name) for value, name in zip((largest + log_total, entropy), KEPT, strict=True))
    return (chosen, entropy), (logits, targets, *sums)


def _score_backward(kept, cotangents):
    logits, targets, log_sum, entropy = kept
    of_chosen, of_entropy = cotangents
    log_p = logits - log_sum[..., None]
    of_p = of_chosen[..., None] + of_entropy[..., None] * (log_p + entropy[..., None])
    return jnp.where(_is_target(logits, targets), of_chosen[..., None], 0.0) - jnp.exp(log_p) * of_p, None


log_probs_and_entropies.defvjp(_score_forward, _score_backward)
