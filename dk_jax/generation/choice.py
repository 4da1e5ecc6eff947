"""How one token is chosen from logits, and what probability that choice had."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

PRNG = "threefry2x32"


class Draw(NamedTuple):
    """How each row draws; what is off changes nothing.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draws among so many most likely tokens; 0 is off.
      top_p: then among the fewest of these that hold this share of their mass (nucleus, Holtzman et al. 2020, arXiv:1904.09751); 1 is off.
      min_p: then among those at least this likely relative to the most likely one (Nguyen et al. 2024, arXiv:2407.01082); 0 is off.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]


def choose_tokens(
    logits: Float[Array, "B V"], keys: UInt32[Array, "B 2"], steps: Int[Array, " B"], draw: Draw, filtered: bool
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Samples one token a row by adding Gumbel noise and taking the largest.

    Each row draws from its own key folded with its step, so its choice depends on its own logits alone.

    Args:
      logits: float32.
      keys: threefry key data of each row.
      steps: index of this token within each row's sample.
      draw: how each row draws.
      filtered: static switch; without it top_k, top_p and min_p are not looked at.

    Returns:
      Tokens, their log-prob under the distribution they were drawn from (0 when greedy), and their log-prob
      under the raw model at temperature 1, which nothing in `draw` touches.
    """
    greedy = draw.temperature <= 0
    log_p = jax.nn.log_softmax(logits, axis=-1)
    drawn_from = jax.nn.log_softmax(logits / jnp.where(greedy, 1.0, draw.temperature)[:, None], axis=-1)
    if filtered:
        left = jax.nn.log_softmax(jnp.where(likely(drawn_from, draw), drawn_from, -jnp.inf), axis=-1)
        filters = (draw.top_k > 0) | (draw.top_p < 1) | (draw.min_p > 0)
        drawn_from = jnp.where(filters[:, None], left, drawn_from)  # or a neighbour that filters would change bits of one that does not

    def noise(key, step):
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl=PRNG), step)
        return jax.random.gumbel(key, logits.shape[-1:], jnp.float32)

    scores = jnp.where(greedy[:, None], logits, drawn_from + jax.vmap(noise)(keys, steps))
    tokens = jnp.argmax(scores, axis=-1).astype(jnp.int32)

    def of_chosen(table):
        return jnp.take_along_axis(table, tokens[:, None], axis=-1)[:, 0]

    return tokens, jnp.where(greedy, 0.0, of_chosen(drawn_from)), of_chosen(log_p)


def likely(log_p: Float[Array, "B V"], draw: Draw) -> Bool[Array, "B V"]:
    """Which tokens top_k, top_p and min_p leave, in this order. Tokens tied with the least likely one that stays, stay.

    The thresholds are found by bisection over the 2^32 values of a float32, 32 looks at the table: exact, and without sorting a
    vocabulary of 150,000 for every token.
    """
    ranks = _rank(log_p)
    mass = jnp.exp(log_p)

    def lowest(reaches) -> Int[Array, "B 1"]:
        """The highest rank r for which what lies at or above r `reaches` what is asked."""
        low, high = jnp.full((len(log_p), 1), _LOWEST, jnp.int32), jnp.max(ranks, axis=-1, keepdims=True)

        def halve(_, bounds):
            low, high = bounds
            middle = high - (high - low) // 2
            enough = reaches(ranks >= middle)
            return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

        return jax.lax.fori_loop(0, 32, halve, (low, high))[0]

    def held(above):
        return jnp.sum(jnp.where(above, mass, 0.0), axis=-1, keepdims=True)

    top_k, top_p, min_p = (value[:, None] for value in draw[1:])
    first = ranks >= jnp.where(top_k > 0, lowest(lambda above: jnp.sum(above, axis=-1, keepdims=True) >= top_k), _LOWEST)
    wanted = top_p * held(first)
    second = ranks >= jnp.where(top_p < 1, lowest(lambda above: held(above & first) >= wanted), _LOWEST)
    third = log_p >= jnp.max(log_p, axis=-1, keepdims=True) + jnp.log(min_p)
    return first & second & third


_LOWEST = -2139095041
"""Rank of minus infinity."""


def _rank(values: Float[Array, "B V"]) -> Int[Array, "B V"]:
    """Whole numbers in the order of the float32 values: what their bits say, turned around below zero."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
