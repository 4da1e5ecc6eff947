"""Batched sampling: prompts in, tokens with their log-probs and stop reasons out.

    sort the rows by prompt, cut them into batches of at most max_batch, and for each batch (`streams` of them at a time)
      1. prefill every distinct prompt once, without its last token, and copy the caches to its rows
      2. feed each row's last token, choose the next one, feed it, ... in jitted blocks of steps that leave
         early once every row has finished; caches are donated from block to block

Cache slots are not positions. Prompts lie left-aligned in slots [0, base), new tokens of all rows share slots
base, base + 1, ...; a row sees its own prompt and the shared tail, and RoPE gets true positions:

    base = 8, prompts of 4 and 7 tokens, second new token being chosen
    slot      0 1 2 3 4 5 6 7 8 9
    row 0     p p p . . . . . q n        p: prompt but its last token, q: that token, n: first new token
    row 1     p p p p p p . . q n        .: never seen

Every array has a bucketed size, so few programs are compiled; `Sampler.compilations` counts them. Within one
set of sizes a row's outcome depends on its own prompt, agent and key alone.

Not here: refilling finished rows within a batch, caches kept over turns, several devices.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from dk_jax.generation.choice import choose_tokens
from dk_jax.models.backbone import Cache, Params, Static, decode_step, logits, prefill, unstack_for_decode
from dk_jax.models.config import AGENTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """What to sample, and the sizes that programs are compiled for.

    Attributes:
      eos_id: the token that ends a sample; it is part of the sample.
      max_new_tokens: most tokens a sample may have, `eos_id` included.
      temperature: 0 is greedy.
      top_p: nucleus mass; 1 samples from the whole distribution.
      max_length_tokens: most tokens of prompt and sample together; a row that reaches it stops with
        "cache_full".
      batch_buckets: row counts to compile for, ascending; the last is the largest batch.
      prompt_buckets: prompt lengths to compile for, ascending; longer prompts get max_length_tokens.
      block: decode steps between two looks from the host at whether all rows have finished.
      cache_step: caches grow in multiples of this many slots; fewer, larger steps compile less and read more.
      prefill_tokens: about how many tokens are prefilled at once; bounds the memory of attention scores.
      streams: batches decoded at once, each by a thread of its own, for which rows are cut into at least as many batches of like
        size. More than 1 helps on a CPU only, where XLA runs most of a small model's operations on one thread.
    """

    eos_id: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    max_length_tokens: int = 4096
    batch_buckets: tuple[int, ...] = (8, 32, 64)
    prompt_buckets: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    block: int = 32
    cache_step: int = 256
    prefill_tokens: int = 16_384
    streams: int = 1

    def __post_init__(self):
        for name in ("max_new_tokens", "max_length_tokens", "block", "cache_step", "prefill_tokens", "streams"):
            if getattr(self, name) < 1:
                raise ValueError(f"SamplerConfig.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("batch_buckets", "prompt_buckets"):
            sizes = getattr(self, name)
            if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"SamplerConfig.{name} is {sizes}; give ascending sizes of at least 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplerConfig.top_p is {self.top_p}; it must be in (0, 1]")
        if self.temperature < 0:
            raise ValueError(f"SamplerConfig.temperature is {self.temperature}; it must not be negative")


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One sampled continuation.

    Attributes:
      tokens: the new tokens, the final `eos_id` included.
      logp_sample: float32 log-prob in nats of each under the distribution it was drawn from; 0 when greedy.
      logp_model: float32 log-prob in nats of each under the raw model; equals `token_log_probs`.
      stop: "eos"; "length", max_new_tokens reached; or "cache_full", max_length_tokens reached (a prompt that
        already has that many gives an empty sample).
    """

    tokens: list[int]
    logp_sample: np.ndarray
    logp_model: np.ndarray
    stop: Literal["eos", "length", "cache_full"]


class _Rows(NamedTuple):
    """What decode carries for each row; `step` counts the tokens chosen so far, alike for all."""

    token: Int[Array, " B"]
    lengths: Int[Array, " B"]
    limits: Int[Array, " B"]
    agents: Int[Array, " B"]
    keys: UInt32[Array, "B 2"]
    done: Bool[Array, " B"]
    step: Int[Array, ""]


def make_sampler(static: Static, config: SamplerConfig) -> Sampler:
    """A sampler for one backbone; keep it, since it owns the compiled programs."""
    return Sampler(static, config)


class Sampler:
    """Samples from a backbone. Parameters are an argument of `sample`, so training never recompiles."""

    def __init__(self, static: Static, config: SamplerConfig):
        self.config = config
        self._static = static
        self._compiled = [0]
        self._sizes_seen: set[tuple[int, ...]] = set()
        self._first_of_size = threading.Lock()
        self._unstack = self._jit(lambda params: unstack_for_decode(static, params))
        self._prefill = self._jit(lambda params, tokens, lengths: prefill(static, params, tokens, lengths)[1])
        self._place = self._jit(partial(_place, static.cfg.n_kv_heads - static.cfg.shifted_kv_heads), donate_argnums=0)
        self._grow = self._jit(_grow, static_argnums=1)
        self._decode = self._jit(self._decode_block, static_argnames="nucleus", donate_argnums=(1, 2))

    def drawing(self, *, temperature: float, top_p: float = 1.0) -> Sampler:
        """A sampler that draws in this way and is otherwise this one: both use the same compiled programs."""
        other = copy.copy(self)
        other.config = dataclasses.replace(self.config, temperature=temperature, top_p=top_p)
        return other

    @property
    def compilations(self) -> int:
        """Programs compiled so far, with those of the samplers that share them; constant once every bucket in use has been
        seen."""
        return self._compiled[0]

    def sample(
        self,
        params: Params,
        prompts: Sequence[Sequence[int]],
        agents: Sequence[int],
        keys: Sequence[Any],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> list[Sample]:
        """Continues every prompt once; for n samples of a prompt, repeat it with different keys.

        Args:
          params: the backbone's parameters.
          prompts: token ids of each row, at least one each. Equal prompts of a batch are prefilled once.
          agents: index into AGENTS of each row's head.
          keys: one a row: an integer seed, a `jax.random.key`, or its uint32[2] key data. A row's draw is a
            function of its key, not of its place.
          max_new_tokens, temperature: override the configuration for this call without recompiling.

        Returns:
          One sample a prompt, in order.

        Raises:
          ValueError: for an empty prompt, an unknown agent or token id, or sequences of different lengths.
        """
        max_new = self.config.max_new_tokens if max_new_tokens is None else max_new_tokens
        temperature = self.config.temperature if temperature is None else temperature
        self._check(prompts, agents, keys, max_new)
        if not prompts:
            return []
        key_data = np.stack([_key_data(key) for key in keys])
        decode_params = self._unstack(params)
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), tuple(prompts[i]), i))
        samples: list[Sample | None] = [None] * len(prompts)

        def run(rows: list[int]) -> None:
            batch = self._sample_batch(
                params,
                decode_params,
                [prompts[i] for i in rows],
                np.asarray([agents[i] for i in rows], np.int32),
                key_data[rows],
                max_new,
                temperature,
            )
            for i, sample in zip(rows, batch, strict=True):
                samples[i] = sample

        batches = self._cut(order)
        if self.config.streams == 1 or len(batches) == 1:
            for rows in batches:
                run(rows)
        else:
            with ThreadPoolExecutor(self.config.streams) as pool:
                # Longest prompts first: with them the last thread is busy for the shortest time alone.
                list(pool.map(run, reversed(batches)))
        return samples

    def _cut(self, order: list[int]) -> list[list[int]]:
        """The rows of each batch; what belongs together depends on their number alone."""
        largest, streams = self.config.batch_buckets[-1], self.config.streams
        if streams == 1:
            return [order[start : start + largest] for start in range(0, len(order), largest)]
        number = -(-len(order) // largest)
        if len(order) > self.config.batch_buckets[0]:
            number = min(_round_up(number, streams), len(order))
        cuts = [len(order) * i // number for i in range(number + 1)]
        return [order[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]

    def _sample_batch(
        self, params, decode_params, prompts, agents, keys, max_new, temperature
    ) -> list[Sample]:
        config = self.config
        n = len(prompts)
        size = _bucket(config.batch_buckets, n)
        lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        limits = np.minimum(max_new, config.max_length_tokens - lengths).astype(np.int32)
        fits = limits > 0
        base = _bucket((*config.prompt_buckets, config.max_length_tokens), int(max(lengths[fits], default=1)))

        def pad(values, fill=0):
            return np.concatenate([values, np.full((size - n, *values.shape[1:]), fill, values.dtype)])

        rows = _Rows(
            token=pad(np.asarray([prompt[-1] for prompt in prompts], np.int32)),
            lengths=pad(lengths, 1),
            limits=pad(limits),
            agents=pad(agents),
            keys=pad(keys),
            done=pad(~fits, True),
            step=np.int32(0),
        )
        # A program is compiled anew for arguments that no device was named for; what comes out of one has a device.
        device = next(iter(jax.tree.leaves(params)[0].devices()))
        cache = self._prefilled_cache(params, prompts, fits, size, base, device)
        done = rows.done
        rows = jax.device_put(rows, device)
        blocks = []
        while not done.all():
            step = len(blocks) * config.block
            slots = _round_up(base + step + config.block + 1, config.cache_step)
            if slots > cache[0][0].shape[-1]:
                cache = self._once(self._grow, size, cache[0][0].shape[-1], slots)(cache, slots)
            decode = self._once(self._decode, size, cache[0][0].shape[-1], config.top_p < 1)
            cache, rows, block = decode(
                decode_params,
                cache,
                rows,
                np.int32(base),
                np.float32(temperature),
                np.float32(config.top_p),
                nucleus=config.top_p < 1,
            )
            blocks.append(block)
            done = np.asarray(rows.done)
        return self._collect(blocks, limits, max_new)

    def _prefilled_cache(self, params, prompts, fits, size: int, base: int, device) -> Cache:
        """Prefills each distinct prompt without its last token, in pieces, and copies it to its rows."""
        cfg, config = self._static.cfg, self.config
        slots = _round_up(base + config.block + 1, config.cache_step)
        shape = (size, cfg.n_kv_heads, cfg.head_dim, slots)
        cache = [
            (jnp.zeros(shape, cfg.dtype, device=device), jnp.zeros((*shape[:2], *shape[:1:-1]), cfg.dtype, device=device))
            for _ in range(cfg.n_layers)
        ]
        prefixes = [tuple(prompt[:-1]) if fit else () for prompt, fit in zip(prompts, fits, strict=True)]
        distinct = sorted({prefix for prefix in prefixes if prefix}, key=lambda p: (len(p), p))
        affordable = [b for b in config.batch_buckets if b * base <= config.prefill_tokens]
        most = affordable[-1] if affordable else config.batch_buckets[0]
        for start in range(0, len(distinct), most):
            piece = distinct[start : start + most]
            where = {prefix: i for i, prefix in enumerate(piece)}
            width = _bucket(config.batch_buckets, len(piece))
            tokens = np.zeros((width, base), np.int32)
            lengths = np.zeros(width, np.int32)
            for i, prefix in enumerate(piece):
                tokens[i, : len(prefix)] = prefix
                lengths[i] = len(prefix)
            source = np.full(size, -1, np.int32)
            source[: len(prefixes)] = [where.get(prefix, -1) for prefix in prefixes]
            prefilled = self._once(self._prefill, width, base)(params, tokens, lengths)
            place = self._once(self._place, width, base, size, cache[0][0].shape[-1])
            cache = place(cache, prefilled, source, lengths, np.int32(base))
        return cache

    def _decode_block(self, params, cache, rows: _Rows, base, temperature, top_p, *, nucleus):
        """Up to `block` steps; returns cache, rows, and the block's tokens and log-probs [B, block]."""
        static, config = self._static, self.config
        b = rows.token.shape[0]
        slots = jnp.arange(cache[0][0].shape[-1])
        first = rows.step

        def step(carry):
            cache, rows, (tokens, logp_sample, logp_model) = carry
            slot = base + rows.step
            prompt = slots[None, :] < rows.lengths[:, None] - 1
            visible = prompt | ((slots >= base) & (slots <= slot))[None, :]
            positions = rows.lengths - 1 + rows.step
            hidden, cache = decode_step(static, params, rows.token, positions, cache, slot, visible)
            scores = logits(static, params, hidden, rows.agents)[:, 0]
            chosen, sampled_lp, model_lp = choose_tokens(
                scores, rows.keys, rows.step, temperature, top_p, nucleus
            )
            at = rows.step - first
            out = (
                tokens.at[:, at].set(chosen),
                logp_sample.at[:, at].set(sampled_lp),
                logp_model.at[:, at].set(model_lp),
            )
            done = rows.done | (chosen == config.eos_id) | (rows.step + 1 >= rows.limits)
            return cache, rows._replace(token=chosen, done=done, step=rows.step + 1), out

        def unfinished(carry):
            rows = carry[1]
            return (rows.step - first < config.block) & ~jnp.all(rows.done)

        empty = jnp.zeros((b, config.block), jnp.float32)
        out = (empty.astype(jnp.int32), empty, empty)
        return jax.lax.while_loop(unfinished, step, (cache, rows, out))

    def _collect(self, blocks, limits: np.ndarray, max_new: int) -> list[Sample]:
        columns = ([], [], []) if not blocks else zip(*jax.device_get(blocks), strict=True)
        tokens, logp_sample, logp_model = (
            np.concatenate(parts, axis=1) if parts else np.zeros((len(limits), 0), np.float32)
            for parts in columns
        )
        samples = []
        for row, limit in enumerate(limits):
            limit = max(int(limit), 0)
            ends = np.flatnonzero(tokens[row, :limit] == self.config.eos_id)
            n = int(ends[0]) + 1 if ends.size else limit
            stop = "eos" if ends.size else "length" if limit == max_new else "cache_full"
            samples.append(
                Sample(
                    tokens=tokens[row, :n].astype(int).tolist(),
                    logp_sample=logp_sample[row, :n].copy(),
                    logp_model=logp_model[row, :n].copy(),
                    stop=stop,
                )
            )
        return samples

    def _once(self, program: Callable, *sizes: int) -> Callable:
        """The program, which threads that need it for the same new sizes at the same time will not compile twice."""
        key = (id(program), *sizes)
        if key in self._sizes_seen:
            return program

        def first(*args, **kwargs):
            with self._first_of_size:
                out = program(*args, **kwargs)
                self._sizes_seen.add(key)
                return out

        return first

    def _jit(self, function, **options):
        def traced(*args, **kwargs):
            self._compiled[0] += 1  # runs once a compiled program: only while tracing
            return function(*args, **kwargs)

        return jax.jit(traced, **options)

    def _check(self, prompts, agents, keys, max_new: int) -> None:
        if not len(prompts) == len(agents) == len(keys):
            raise ValueError(
                f"sample: {len(prompts)} prompts, {len(agents)} agents, {len(keys)} keys; "
                "give one of each a row"
            )
        if max_new < 1:
            raise ValueError(f"sample: max_new_tokens is {max_new}; it must be at least 1")
        vocab_size = self._static.cfg.vocab_size
        for row, (prompt, agent) in enumerate(zip(prompts, agents, strict=True)):
            if not len(prompt):
                raise ValueError(
                    f"sample: prompt {row} is empty; it needs at least one token to continue from"
                )
            if min(prompt) < 0 or max(prompt) >= vocab_size:
                raise ValueError(f"sample: prompt {row} has a token id outside [0, {vocab_size})")
            if not 0 <= agent < len(AGENTS):
                raise ValueError(f"sample: agent {agent} of row {row} is not an index into {AGENTS}")


def _place(own: int, cache: Cache, prefilled, source: Int[Array, " B"], lengths, base) -> Cache:
    """Copies prefilled prompt `source[row]` into each row's first slots; -1 keeps what the row has.

    The shifted heads (those from `own` on) of slot `base`, where decoding starts, get the key that follows the prompt's end.
    """
    keys, values = prefilled
    mine = (source >= 0)[:, None, None, None]
    source = jnp.maximum(source, 0)
    placed = []
    for layer, (k, v) in enumerate(cache):
        width = keys.shape[-1]
        if own < k.shape[1]:
            ahead = jnp.take_along_axis(keys[layer][:, own:], lengths[:, None, None, None], axis=-1)[source]
            start = (0, own, 0, base)
            here = jax.lax.dynamic_slice(k, start, ahead.shape)
            k = jax.lax.dynamic_update_slice(k, jnp.where(mine, ahead, here), start)
        k = k.at[..., :width].set(jnp.where(mine, keys[layer][source], k[..., :width]))
        v = v.at[:, :, :width].set(jnp.where(mine, values[layer][source], v[:, :, :width]))
        placed.append((k, v))
    return placed


def _grow(cache: Cache, slots: int) -> Cache:
    more = slots - cache[0][0].shape[-1]
    return [
        (jnp.pad(k, ((0, 0), (0, 0), (0, 0), (0, more))), jnp.pad(v, ((0, 0), (0, 0), (0, more), (0, 0))))
        for k, v in cache
    ]


def _key_data(key) -> np.ndarray:
    """uint32[2] threefry key data; an integer seed gives that of `jax.random.key(seed)`."""
    if isinstance(key, int | np.integer):
        seed = int(key)
        return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
    if jnp.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    data = np.asarray(key)
    if data.shape != (2,) or data.dtype != np.uint32:
        raise ValueError(
            f"sample: a key must be an int seed or uint32[2] key data; got {data.dtype}{data.shape}"
        )
    return data


def _bucket(sizes: Sequence[int], n: int) -> int:
    return next(size for size in sizes if size >= n)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
