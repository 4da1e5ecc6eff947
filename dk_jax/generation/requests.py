"""What is asked of an engine and what it answers: requests, ways of drawing, samples, and conversations that go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

if TYPE_CHECKING:
    from dk_jax.generation.engine import Engine

Stop = Literal["eos", "stop", "length", "cache_full"]


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One sampled continuation.

    Attributes:
      tokens: the new tokens, the one or those that ended it included.
      logp_sample: float32 log-prob in nats of each under the distribution it was drawn from; 0 when greedy.
      logp_model: float32 log-prob in nats of each under the raw model; equals `token_log_probs`.
      stop: "eos"; "stop", one of the configured sequences; "length", its limit reached; or "cache_full", max_length_tokens
        reached (a prompt that already has that many gives an empty sample).
      conversation: to go on from, where that was asked for.
    """

    tokens: list[int]
    logp_sample: np.ndarray
    logp_model: np.ndarray
    stop: Stop
    conversation: Conversation | None = None


@dataclasses.dataclass(eq=False)
class Conversation:
    """Tokens of prompts and answers so far, and the row (of which engine) that holds their keys and values, if one does."""

    tokens: list[int]
    agent: int
    row: int | None = None
    engine: Engine | None = None
    going_on: bool = False
    """Whether a turn of it waits or is being sampled."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """How one request draws; see `dk_jax.generation.choice.Draw`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        for name, good in (
            ("temperature", self.temperature >= 0), ("top_k", self.top_k >= 0), ("top_p", 0 < self.top_p <= 1),
            ("min_p", 0 <= self.min_p <= 1),
        ):  # fmt: skip
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)}; top_p must be in (0, 1], min_p in [0, 1], the others not negative")

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One sample that is wanted.

    Attributes:
      tokens: the prompt; of a conversation that goes on, what is appended to it. At least one token.
      agent: index into AGENTS; of a conversation its own.
      key: an integer seed, a `jax.random.key`, or its uint32[2] key data.
      max_new_tokens: most tokens of the sample.
      drawing: how to draw.
      keep: give the sample a conversation, and keep its row as long as nobody else needs it.
      conversation: to go on from.
    """

    tokens: Sequence[int]
    agent: int
    key: Any
    max_new_tokens: int
    drawing: Drawing = Drawing()
    keep: bool = False
    conversation: Conversation | None = None


def key_data(key: Any) -> np.ndarray:
    """uint32[2] threefry key data; an integer seed gives its two halves (below 2^32 that is `jax.random.key(seed)`)."""
    if isinstance(key, int | np.integer):
        seed = int(key)
        return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
    if jax.dtypes.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    data = np.asarray(key)
    if data.shape != (2,) or data.dtype != np.uint32:
        raise ValueError(f"generation: a key must be an int seed or uint32[2] key data; got {data.dtype}{data.shape}")
    return data
