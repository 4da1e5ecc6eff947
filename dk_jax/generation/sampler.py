"""Batches of prompts in, samples out, in order: what a step of training asks for.

Rows are shared out to one engine a stream (`dk_jax.generation.engine`), equal prompts together. Engines and their caches are as large as
the smallest bucket of rows that serves. Nothing but compiled programs outlives a call, unless it is asked to `keep` its conversations:
then the engines stay until a call that does not.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from jax.sharding import Mesh

from dk_jax.generation.engine import Engine, make_programs
from dk_jax.generation.kv_cache import Attention
from dk_jax.generation.requests import Conversation, Drawing, Request, Sample
from dk_jax.generation.sizes import EngineConfig
from dk_jax.models.backbone import Params, Static
from dk_jax.models.sharding import row_share


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """What to sample, and the sizes that programs are compiled for.

    Attributes:
      eos_id, stops, max_length_tokens, block, chunks, prefill_tokens, cache_step, attention: see `EngineConfig`.
      max_new_tokens: most tokens a sample may have, what ends it included.
      temperature, top_k, top_p, min_p: see `dk_jax.generation.choice.Draw`.
      batch_buckets: row counts to compile for, ascending; more prompts than the last take turns.
      streams: engines at work at once, each in a thread of its own. More than 1 helps on a CPU only, where XLA runs most of a small
        model's operations on one thread.
    """

    eos_id: int
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stops: tuple[tuple[int, ...], ...] = ()
    max_length_tokens: int = 4096
    batch_buckets: tuple[int, ...] = (8, 32, 64)
    chunks: tuple[int, ...] = (128, 256, 512)
    block: int = 32
    cache_step: int = 256
    prefill_tokens: int = 16_384
    streams: int = 1
    attention: Attention | Literal["auto"] = "auto"

    def __post_init__(self):
        for name in ("max_new_tokens", "streams"):
            if getattr(self, name) < 1:
                raise ValueError(f"SamplerConfig.{name} is {getattr(self, name)}; it must be at least 1")
        sizes = self.batch_buckets
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"SamplerConfig.batch_buckets is {sizes}; give ascending sizes of at least 1")
        self.drawing()
        self.engine(sizes[-1])

    def drawing(self, temperature: float | None = None) -> Drawing:
        """How to draw, perhaps at another temperature."""
        given = self.temperature if temperature is None else temperature
        return Drawing(temperature=given, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    def engine(self, rows: int) -> EngineConfig:
        """Sizes of an engine with so many rows."""
        names = {field.name for field in dataclasses.fields(EngineConfig)} & {field.name for field in dataclasses.fields(self)}
        return EngineConfig(rows=rows, **{name: getattr(self, name) for name in names})


def make_sampler(static: Static, config: SamplerConfig, mesh: Mesh | None = None) -> Sampler:
    """A sampler for one backbone, whose parameters are on one device or spread over a mesh; keep it, since it owns the compiled programs.

    Raises:
      ValueError: several streams on a mesh, which shares the work out itself; a mesh that does not divide the network or the buckets.
    """
    return Sampler(static, config, mesh)


class Sampler:
    """Samples from a backbone. Parameters are an argument of `sample`, so training never recompiles."""

    def __init__(self, static: Static, config: SamplerConfig, mesh: Mesh | None = None):
        self.config, self._static = config, static
        if mesh is not None and mesh.size > 1 and config.streams > 1:
            raise ValueError(f"sampler: streams={config.streams} on a mesh of {mesh.size} devices; use streams=1")
        if odd := [size for size in config.batch_buckets if size % row_share(mesh)]:
            raise ValueError(f"sampler: batch_buckets {odd} can't be spread over {row_share(mesh)} parts of the mesh; use multiples")
        self._programs = make_programs(static, config.engine(config.batch_buckets[-1]), mesh)
        self._engines: list[Engine] = []

    def drawing(self, *, temperature: float, top_p: float = 1.0) -> Sampler:
        """A sampler that draws in this way and is otherwise this one: both use the same compiled programs."""
        other = copy.copy(self)
        other.config = dataclasses.replace(self.config, temperature=temperature, top_p=top_p)
        return other

    @property
    def compilations(self) -> int:
        """Programs compiled so far, with those of the samplers that share them; constant once every size in use has been seen."""
        return self._programs.compilations

    def sample(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        agents: Sequence[int],
        keys: Sequence[Any],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        *,
        conversations: Sequence[Conversation | None] | None = None,
        keep: bool = False,
    ) -> list[Sample]:
        """Continues every prompt once; for n samples of a prompt, repeat it with different keys.

        Args:
          params: the backbone's parameters.
          prompts: token ids of each row, at least one each. Equal prompts are fed to the cache once.
          agents: index into AGENTS of each row's head.
          keys: one a row: an integer seed, a `jax.random.key`, or its uint32[2] key data. A row's draw is a
            function of its key, not of its place.
          max_new_tokens, temperature: override the configuration for this call without recompiling.
          conversations: those that go on, of an earlier call that kept them; their prompts are what is appended.
          keep: give every sample a conversation, and keep the caches.

        Returns:
          One sample a prompt, in order.

        Raises:
          ValueError: for an empty prompt, an unknown agent or token id, or sequences of different lengths.
        """
        ongoing = conversations or [None] * len(prompts)
        if not len(prompts) == len(agents) == len(keys) == len(ongoing):
            raise ValueError(
                f"sample: {len(prompts)} prompts, {len(agents)} agents, {len(keys)} keys, {len(ongoing)} conversations; give one of each a row"
            )
        most = self.config.max_new_tokens if max_new_tokens is None else max_new_tokens
        drawing = self.config.drawing(temperature)
        requests = [
            Request(
                tokens=prompt, agent=int(agent), key=key, max_new_tokens=most, drawing=drawing, keep=keep, conversation=conversation
            )
            for prompt, agent, key, conversation in zip(prompts, agents, keys, ongoing, strict=True)
        ]  # fmt: skip
        samples: list[Sample | None] = [None] * len(prompts)

        def run(engine: Engine, places: list[int]) -> None:
            for place, sample in zip(places, engine.run(params, [requests[i] for i in places]), strict=True):
                samples[place] = sample

        try:
            parts = self._shares(requests)
            if len(parts) == 1:
                run(*parts[0])
            elif parts:
                with ThreadPoolExecutor(len(parts)) as pool:
                    list(pool.map(lambda part: run(*part), parts))
        except BaseException:
            self.rest()
            raise
        if not keep:
            self.rest()
        return samples

    def rest(self) -> None:
        """Gives all memory back; conversations that were kept are fed anew where they go on."""
        while self._engines:
            self._engines.pop().close()
        self._programs.forget_weights()

    def _shares(self, requests: Sequence[Request]) -> list[tuple[Engine, list[int]]]:
        """The places of each engine, longest prompts first: conversations go where they are kept, equal prompts stay together and go
        where there are fewest yet."""
        groups: dict[tuple, list[int]] = {}
        shares: list[list[int]] = [[] for _ in self._engines]
        for place, request in enumerate(requests):
            kept = request.conversation
            if kept is not None and kept.row is not None and kept.engine in self._engines:
                shares[self._engines.index(kept.engine)].append(place)
            else:
                history = (*kept.tokens, *request.tokens) if kept else tuple(request.tokens)
                groups.setdefault(history, []).append(place)
        if not self._engines:
            shares = [[] for _ in range(self.config.streams if len(requests) > self.config.batch_buckets[0] else 1)]
        for history in sorted(groups, key=lambda history: (-len(history), history)):
            min(shares, key=len).extend(groups[history])
        if not self._engines:
            shares = [share for share in shares if share]
            for share in shares:
                rows = next((size for size in self.config.batch_buckets if size >= len(share)), self.config.batch_buckets[-1])
                self._engines.append(Engine(self._static, self.config.engine(rows), self._programs))
        return [(engine, share) for engine, share in zip(self._engines, shares, strict=True) if share]
