"""How one token is chosen from logits, and what probability that choice had."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

PRNG = "threefry2x32"
BLOCKS, WIDTH = 32, 128
"""Blocks of a group (fewer where the vocabulary has no more), tokens of a block."""


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
    """Samples one token a row by inverting the cumulated probability, in three stages: a group of blocks, a block of it, a token of that.

    Each stage draws with a number of its own among what the one before has left, so the whole has the resolution of three float32
    numbers, and of the vocabulary's tables no more is needed than each block's largest entry and mass: two looks at the logits, and no
    noise for every token. Each row draws from its own key folded with its step, so its choice depends on its own logits alone.

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
    temperature = jnp.where(greedy, 1.0, draw.temperature)[:, None]
    scaled = logits / temperature
    filters = (draw.top_k > 0) | (draw.top_p < 1) | (draw.min_p > 0)
    if filtered:
        stays = likely(jax.nn.log_softmax(scaled, axis=-1), draw)
        scaled = jnp.where(filters[:, None] & ~stays, -jnp.inf, scaled)

    tops = jnp.max(_in_blocks(logits), axis=-1)  # [B, G M]
    top = jnp.max(tops, axis=-1, keepdims=True)
    masses, raw_masses = _masses(scaled, top / temperature), _masses(logits, top)  # [B, G, M]; the most likely token always stays
    of_groups = jnp.sum(masses, axis=-1)
    blocks = masses.shape[-1]

    def numbers(key, step):
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key, impl=PRNG), step), (3,), jnp.float32)

    u = jax.vmap(numbers)(keys, steps)
    group = _drawn(of_groups, u[:, 0])
    in_group = jnp.take_along_axis(masses, group[:, None, None], axis=1)[:, 0]
    block = jnp.where(greedy, jnp.argmax(tops, axis=-1), group * blocks + _drawn(in_group, u[:, 1]))
    places = block[:, None] * WIDTH + jnp.arange(WIDTH)
    last = logits.shape[-1] - 1

    def scaled_at(places):
        if filtered:
            return jnp.take_along_axis(scaled, places, axis=-1)
        return jnp.take_along_axis(logits, places, axis=-1) / temperature  # of the table itself there is no need

    inside = jnp.where(places <= last, scaled_at(jnp.minimum(places, last)), -jnp.inf)
    within = jnp.where(greedy, jnp.argmax(inside, axis=-1), _drawn(jnp.exp(inside - top / temperature), u[:, 2]))
    tokens = jnp.minimum(block * WIDTH + within, last).astype(jnp.int32)[:, None]

    def log_p(chosen, top, masses):
        return (chosen - top)[:, 0] - jnp.log(jnp.sum(jnp.sum(masses, axis=-1), axis=-1))

    logp_model = log_p(jnp.take_along_axis(logits, tokens, axis=-1), top, raw_masses)
    changed = (draw.temperature != 1) | (filters if filtered else False)  # what is not, is the model's own, to the bit
    logp_sample = jnp.where(changed, log_p(scaled_at(tokens), top / temperature, masses), logp_model)
    return tokens[:, 0], jnp.where(greedy, 0.0, logp_sample), logp_model


def _in_blocks(table: Float[Array, "B V"]) -> Float[Array, "B C W"]:
    """A row's entries as blocks of `WIDTH`, the last one filled up with minus infinity."""
    rest = -table.shape[-1] % WIDTH
    filled = jnp.pad(table, ((0, 0), (0, rest)), constant_values=-jnp.inf) if rest else table
    return filled.reshape(len(table), -1, WIDTH)


def _masses(table: Float[Array, "B V"], top: Float[Array, "B 1"]) -> Float[Array, "B G M"]:
    """The sum of exp(entry - top) of each block, in groups of `BLOCKS`."""
    masses = jnp.sum(jnp.exp(_in_blocks(table) - top[..., None]), axis=-1)
    blocks = min(BLOCKS, masses.shape[-1])
    return jnp.pad(masses, ((0, 0), (0, -masses.shape[-1] % blocks))).reshape(len(table), -1, blocks)


def _drawn(masses: Float[Array, "B n"], u: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first place at which the cumulated masses exceed `u` (in [0, 1)) of them all: none that has no mass."""
    n = masses.shape[-1]
    upto = jnp.arange(n)[:, None] >= jnp.arange(n)
    cumulated = jnp.sum(jnp.where(upto, masses[:, None, :], 0.0), axis=-1)  # n is small: one kernel instead of a scan's several
    return jnp.minimum(jnp.sum(cumulated <= u[:, None] * cumulated[:, -1:], axis=-1), n - 1)


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
