"""Log-probabilities and entropies of given tokens, without ever holding the logits of a whole batch.

Full logits are the memory wall of training: 8 x 4096 positions of a 151,936-word vocabulary are 19.9 GB in
float32. Positions go through the unembedding in chunks, and the backward pass makes a chunk's logits again
instead of keeping them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dk_jax.models.backbone import Params, Static, apply_heads, hidden_states, unembedding
from dk_jax.models.layers import product_precision


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

    pieces = chunked_log_probs(hidden, unembedding(static, params), targets, temperature)
    real = jnp.arange(1, t)[None, :] < lengths[:, None]
    return TokenLogProbs(
        *(jnp.where(real, p.swapaxes(0, 1).reshape(b, n_chunks * width)[:, : t - 1], 0.0) for p in pieces)
    )


def _row_share(rows: int) -> int:
    """How many parts so many rows are spread over, under `jax.set_mesh` of a mesh of dk_jax.models.sharding."""
    mesh = jax.sharding.get_abstract_mesh()
    share = mesh.shape["data"] * mesh.shape["fsdp"] if {"data", "fsdp"} <= mesh.shape.keys() else 1
    return 1 if rows % share else share


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def chunked_log_probs(
    hidden: Float[Array, "C B W D"], table: Float[Array, "V D"], targets: Int[Array, "C B W"], temperature: float
) -> tuple[Float[Array, "C B W"], Float[Array, "C B W"]]:
    """log p(target) and entropy in nats of softmax(hidden table^T / temperature), one of C chunks at a time; float32.

    Products take hidden's dtype and add up in float32; logits, probabilities and the sum of the table's gradient over the chunks are
    float32, the gradient of the logits enters its two products in hidden's dtype. A chunk's logits are looked at twice (for their maximum,
    and for all sums), its gradient is one more look,

        d log p(target) = [v = target] - p(v)          d entropy = -p(v) (log p(v) + entropy)

    where the general way would write several arrays of their size (zeros, one-hot gradients put into these, sums of both), would add up the
    table's gradient in its own dtype, and would cast the table for every chunk.
    """
    return _forward(hidden, table, targets, temperature)[0]


def _logits(hidden, weights, temperature):
    """Float32 [B W, V] of one chunk."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    precision = product_precision(hidden.dtype)
    return jnp.einsum("rd,vd->rv", rows, weights, precision=precision, preferred_element_type=jnp.float32) / temperature


def _is_target(logits, targets):
    return jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]


def _forward(hidden, table, targets, temperature):
    weights = table.astype(hidden.dtype)

    def score(_, piece):
        logits, wanted = _logits(piece[0], weights, temperature), piece[1].reshape(-1)
        largest = jnp.max(logits, axis=-1)
        below = logits - largest[..., None]
        mass = jnp.exp(below)
        total = jnp.sum(mass, axis=-1)
        mean = jnp.sum(mass * below, axis=-1) / total
        chosen = jnp.sum(jnp.where(_is_target(logits, wanted), below, 0.0), axis=-1)
        log_total = jnp.log(total)
        found = chosen - log_total, log_total - mean, largest + log_total
        return None, tuple(each.reshape(piece[1].shape) for each in found)

    _, (log_probs, entropies, log_sums) = jax.lax.scan(score, None, (hidden, targets))
    return (log_probs, entropies), (hidden, table, targets, entropies, log_sums)


def _backward(temperature, kept, cotangents):
    hidden, table, targets, entropies, log_sums = kept
    weights, precision = table.astype(hidden.dtype), product_precision(hidden.dtype)

    def gradient(of_table, piece):
        own, wanted, entropy, log_sum, of_chosen, of_entropy = piece
        wanted, entropy, log_sum, of_chosen, of_entropy = (x.reshape(-1, 1) for x in (wanted, entropy, log_sum, of_chosen, of_entropy))
        log_p = _logits(own, weights, temperature) - log_sum
        of_p = of_chosen + of_entropy * (log_p + entropy)
        of_logits = jnp.where(_is_target(log_p, wanted[:, 0]), of_chosen, 0.0) - jnp.exp(log_p) * of_p
        of_logits = (of_logits / temperature).astype(hidden.dtype)
        rows = own.reshape(-1, own.shape[-1])
        of_table += jnp.einsum("rv,rd->vd", of_logits, rows, precision=precision, preferred_element_type=jnp.float32)
        of_own = jnp.einsum("rv,vd->rd", of_logits, weights, precision=precision)
        return of_table, of_own.reshape(own.shape)

    pieces = (hidden, targets, entropies, log_sums, *cotangents)
    of_table, of_hidden = jax.lax.scan(gradient, jnp.zeros(table.shape, jnp.float32), pieces)
    return of_hidden, of_table.astype(table.dtype), None


chunked_log_probs.defvjp(_forward, _backward)
