"""How one token is chosen from logits, and what probability that choice had."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

PRNG = "threefry2x32"


def choose_tokens(
    logits: Float[Array, "B V"],
    keys: UInt32[Array, "B 2"],
    step: Int[Array, ""],
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
    nucleus: bool,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Samples one token a row by adding Gumbel noise and taking the largest.

    Each row draws from its own key folded with the step, so its choice depends on its own logits alone.

    Args:
      logits: float32.
      keys: threefry key data of each row.
      step: index of this token within the sample.
      temperature: divides the logits; 0 takes the most likely token.
      top_p: nucleus mass (Holtzman et al. 2020, arXiv:1904.09751), used where `nucleus` is set.
      nucleus: static switch, so that plain sampling never sorts the vocabulary.

    Returns:
      Tokens, their log-prob under the distribution they were drawn from (0 when greedy), and their log-prob
      under the raw model at temperature 1. Neither temperature nor top_p touches the latter.
    """
    greedy = temperature <= 0
    log_p = jax.nn.log_softmax(logits, axis=-1)
    drawn_from = jax.nn.log_softmax(logits / jnp.where(greedy, 1.0, temperature), axis=-1)
    if nucleus:
        drawn_from = keep_nucleus(drawn_from, top_p)

    def noise(key):
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl=PRNG), step)
        return jax.random.gumbel(key, logits.shape[-1:], jnp.float32)

    scores = jnp.where(greedy, logits, drawn_from + jax.vmap(noise)(keys))
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)

    def of_chosen(table):
        return jnp.take_along_axis(table, tokens[:, None], axis=-1)[:, 0]

    return tokens, jnp.where(greedy, 0.0, of_chosen(drawn_from)), of_chosen(log_p)


def keep_nucleus(log_p: Float[Array, "B V"], top_p: Float[Array, ""]) -> Float[Array, "B V"]:
    """Renormalised log-probs of the smallest set of most likely tokens whose mass reaches top_p, else -inf.

    Tokens tied with the least likely member are kept with it.
    """
    descending = -jnp.sort(-log_p, axis=-1)
    mass = jnp.exp(descending)
    before = jnp.cumsum(mass, axis=-1) - mass
    kept = jnp.maximum(jnp.sum(before < top_p, axis=-1, keepdims=True), 1)
    threshold = jnp.take_along_axis(descending, kept - 1, axis=-1)
    return jax.nn.log_softmax(jnp.where(log_p >= threshold, log_p, -jnp.inf), axis=-1)
