"""The sizes that programs of generation are compiled for, and the memory that they take."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from dk_jax.generation.kv_cache import Attention, KVCache
from dk_jax.models.config import BackboneConfig
from dk_jax.models.sharding import row_share


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is made for.

    Attributes:
      eos_id: the token that ends a sample; it is part of the sample.
      stops: further token sequences that end one; they are part of it too.
      rows: samples decoded at once (B); an engine makes it what its device does well (`dk_jax.generation.implementation.least_rows`).
      max_length_tokens: most tokens of prompts and samples of a row together (slots of its cache).
      block: decode steps between two looks from the host.
      chunks: sizes, ascending, in which prompts are fed; a piece of a prompt takes the smallest that holds it, or the largest.
      prefill_tokens: about how many tokens are fed at once, so many prompts or a quarter, a sixteenth, ... of them as there are to be
        fed; bounds the memory of attention scores.
      cache_step: the cache grows in steps of this many slots; 0 makes all of them at once. Growing compiles anew for each size, and
        pays where attention reads all slots (all but "fused" and "cudnn").
      refill_share: while requests wait, a block ends early once one in so many rows has finished.
      attention: see `dk_jax.generation.kv_cache`; "auto" is what is fastest here (`dk_jax.generation.implementation`).
    """

    eos_id: int
    stops: tuple[tuple[int, ...], ...] = ()
    rows: int = 64
    max_length_tokens: int = 4096
    block: int = 32
    chunks: tuple[int, ...] = (128, 256, 512)
    prefill_tokens: int = 16_384
    cache_step: int = 256
    refill_share: int = 8
    attention: Attention | Literal["auto"] = "auto"

    def __post_init__(self):
        for name, least in (
            ("rows", 1), ("max_length_tokens", 1), ("block", 1), ("prefill_tokens", 1), ("cache_step", 0), ("refill_share", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"EngineConfig.{name} is {getattr(self, name)}; it must be at least {least}")
        if not self.chunks or self.chunks[0] < 1 or list(self.chunks) != sorted(set(self.chunks)):
            raise ValueError(f"EngineConfig.chunks is {self.chunks}; give ascending sizes of at least 1")
        if not all(self.stops):
            raise ValueError("EngineConfig.stops holds an empty sequence, which would end every sample at once")

    @property
    def all_slots(self) -> int:
        """Of a row at most. A sample's last token is never fed, so there is room for keys that lie one ahead."""
        return self.max_length_tokens

    @property
    def first_slots(self) -> int:
        """Of a row at the start."""
        return self.slots(1)

    def slots(self, tokens: int) -> int:
        """Slots of a row that is to hold so many tokens."""
        if not self.cache_step:
            return self.all_slots
        return min(-(-tokens // self.cache_step) * self.cache_step, self.all_slots)

    def chunk(self, tokens: int) -> int:
        """Size of the next chunk where so many tokens are left."""
        return next((size for size in self.chunks if size >= tokens), self.chunks[-1])

    def window(self, end: int) -> int:
        """A bound of positions below `end`, one of few: the largest chunk size times a power of two."""
        size = next((size for size in self.chunks if size >= end), self.chunks[-1])
        while size < end:
            size *= 2
        return min(size, self.all_slots)

    def width(self, chunk: int, prompts: int | None = None) -> int:
        """Prompts that are fed together in chunks of this size, where so many (by default any number) are to be fed."""
        width = most = max(1, min(self.rows, self.prefill_tokens // chunk))
        while prompts is not None and width // 4 >= prompts:
            width //= 4
        return max(1, min(width, most))

    @property
    def copy_width(self) -> int:
        """Rows that are copied together."""
        return min(self.rows, 16)

    def budget(self, cfg: BackboneConfig, kv: KVCache) -> Budget:
        """The memory of an engine's largest arrays on each device."""
        chunk = self.chunks[-1]
        width = self.width(chunk)
        share, fsdp, tensor = (1, 1, 1) if kv.mesh is None else (row_share(kv.mesh), kv.mesh.shape["fsdp"], kv.mesh.shape["tensor"])
        scores = width * cfg.n_heads // tensor * chunk * self.window(self.all_slots)
        return Budget(
            weights=count_weights(cfg) * cfg.dtype.itemsize // (fsdp * tensor),
            cache=kv.bytes(self.rows, self.all_slots) // (share * tensor),
            logits=4 * 4 * (self.rows // share) * cfg.vocab_size // tensor,
            prefill=width * chunk * (4 * 2 * cfg.d_model + cfg.dtype.itemsize * 3 * cfg.d_ff // tensor) + 2 * 4 * scores,
        )


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bytes of weights in the compute type, of keys and values, of logits and what is made of them, and of a chunk on its way."""

    weights: int
    cache: int
    logits: int
    prefill: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + max(self.logits, self.prefill)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {getattr(self, name) / 2**30:.2f}" for name in ("weights", "cache", "logits", "prefill"))
        return f"generation needs about {self.total / 2**30:.2f} GiB: {parts}"

    def check(self, device: Any) -> Budget:
        """Itself, if the device has so much memory (or does not say what it has).

        Raises:
          ValueError: it has less.
        """
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        if limit and self.total > limit:
            raise ValueError(f"{self}; {device} has {limit / 2**30:.2f} GiB. Use fewer rows or a smaller max_length_tokens")
        return self


def count_weights(cfg: BackboneConfig) -> int:
    """Numbers in the matrices of a backbone."""
    attention = cfg.d_model * cfg.head_dim * 2 * (cfg.n_heads + cfg.n_kv_heads)
    layer = attention + 3 * cfg.d_model * cfg.d_ff + cfg.lora_rank * (4 * cfg.d_model + 3 * cfg.d_ff)
    return cfg.n_layers * layer + cfg.vocab_size * cfg.d_model * (1 if cfg.tie_embeddings else 2)
