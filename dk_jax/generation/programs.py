"""The compiled programs of generation: a chunk of prompts into the cache, a block of decode steps, copies of rows.

All of them change the cache in place (its buffers are donated). `Programs.compilations` counts what was compiled; samplers that share
one object share its programs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from dk_jax.generation.choice import Draw, choose_tokens
from dk_jax.generation.kv_cache import KVCache, Pair
from dk_jax.models.backbone import OfProducts, Params, Static, logits, unstack_for_decode
from dk_jax.models.decode_products import fused_block, takes_kernels
from dk_jax.models.layers import rope_angles

Cache = list[Pair]


class Rows(NamedTuple):
    """What decode carries for each row of the batch.

    Attributes:
      token: the token to be fed next. position: where it stands in its sequence; so many are in the cache.
      step: tokens chosen so far in this sample. limit: most tokens of this sample.
      agent: index of its head. key: its threefry key data. draw: how it draws.
      recent: the last tokens chosen in this sample, newest last, -1 where there are none yet: what stop sequences are held against.
      done: whether it is at rest.
    """

    token: Int[Array, " B"]
    position: Int[Array, " B"]
    step: Int[Array, " B"]
    limit: Int[Array, " B"]
    agent: Int[Array, " B"]
    key: UInt32[Array, "B 2"]
    draw: Draw
    recent: Int[Array, "B M"]
    done: Bool[Array, " B"]


class Block(NamedTuple):
    """What a block of steps has chosen: for each row its first `count` columns."""

    tokens: Int[Array, "B block"]
    logp_sample: Float[Array, "B block"]
    logp_model: Float[Array, "B block"]
    count: Int[Array, " B"]


class Programs:
    """Compiled once for each set of sizes.

    Args:
      static: the backbone.
      kv: how its keys and values are kept, and on which mesh, if on several devices: what the host reads is then whole on each.
      eos_id: ends a sample.
      stops: further token sequences that end one.
      block: decode steps of a block.
      products: what does a decode step's products, "xla" or "kernels" (`dk_jax.models.decode_products`; see `takes_kernels`).

    Raises:
      ValueError: kernels for a model or a cache that they can't do.
    """

    def __init__(
        self, static: Static, kv: KVCache, *, eos_id: int, stops: tuple[tuple[int, ...], ...], block: int,
        products: Literal["xla", "kernels"] = "xla",
    ):  # fmt: skip
        if products not in ("xla", "kernels"):
            raise ValueError(f"products is {products!r}; choose 'xla' or 'kernels'")
        if products == "kernels" and not (kv.takes_products and takes_kernels(static.cfg)):
            raise ValueError("products 'kernels' needs attention 'fused' on one device, sizes that divide by 16, no shifted heads and no LoRA")
        self.products = products
        self._static, self.kv, self._eos_id, self._block = static, kv, eos_id, block
        self.memory = max(map(len, stops), default=1)
        self._stops = [jnp.asarray((*(-2,) * (self.memory - len(stop)), *stop), jnp.int32) for stop in stops]
        self.compilations = 0
        self._seen: set[tuple] = set()
        self._first_of_size = threading.Lock()
        self._weights_lock = threading.Lock()
        self._weights_of: Params | None = None
        self._weights: Params | None = None
        self.whole = None if kv.mesh is None else NamedSharding(kv.mesh, PartitionSpec())
        self._joined = kv.mesh is None  # joined, heads that belong on one device would be cut apart
        self._unstack = self._jit(lambda params: unstack_for_decode(static, params, self._joined))
        self._chunk = self._jit(self._feed_chunk, kv.sharding, donate_argnums=1, static_argnames=("window", "first"))
        self._copy = self._jit(self._copy_rows, kv.sharding, donate_argnums=0, static_argnames="window")
        self._grow = self._jit(lambda cache, slots: [kv.grow(pair, slots) for pair in cache], kv.sharding, static_argnums=1)
        outputs = None if kv.mesh is None else (kv.sharding, self.whole, self.whole)
        self._decode = self._jit(self._decode_block, outputs, donate_argnums=(1, 2), static_argnames="filtered")

    def weights(self, params: Params) -> Params:
        """Parameters in the form that the other programs take; made once for whoever uses the same ones next."""
        with self._weights_lock:
            if self._weights_of is not params:
                self._weights_of, self._weights = None, None
                self._weights = self._unstack(params)
                self._weights_of = params
            return self._weights

    def forget_weights(self) -> None:
        """Gives their memory back."""
        with self._weights_lock:
            self._weights_of, self._weights = None, None

    def feed(self, weights: Params, cache: Cache, rows, tokens, starts, counts, *, window: int) -> Cache:
        """Feeds up to C tokens of each of w rows to the cache.

        Args:
          rows: int32 [w], rows of the batch; one beyond B is nobody.
          tokens: int32 [w, C]. starts: int32 [w], NumPy's: positions of each row's first. counts: int32 [w], how many are real.
          window: bounds all positions.
        """
        first = self.kv.prompts != "xla" and window == tokens.shape[1] and not starts.any()
        sizes = ("feed", *tokens.shape, window, first, self._shape(cache))
        return self._once(sizes, self._chunk)(weights, cache, rows, tokens, starts, counts, window=window, first=first)

    def copy(self, cache: Cache, source, target, count, *, window: int) -> Cache:
        """Copies the first `window` slots of rows `source` to rows `target`, int32 [n] each, of which the first `count` (int32) are
        real."""
        return self._once(("copy", len(source), window, self._shape(cache)), self._copy)(cache, source, target, count, window=window)

    def grow(self, cache: Cache, slots: int) -> Cache:
        """The cache with more slots."""
        return self._once(("grow", slots, self._shape(cache)), self._grow)(cache, slots)

    def decode(self, weights: Params, cache: Cache, rows: Rows, enough, *, filtered: bool) -> tuple[Cache, Rows, Block]:
        """Up to a block of steps, until at least `enough` more rows are at rest (int32; rows that are all at rest always end it)."""
        return self._once(("decode", filtered, self._shape(cache)), self._decode)(weights, cache, rows, enough, filtered=filtered)

    @staticmethod
    def _shape(cache: Cache) -> tuple[int, ...]:
        return cache[0][0].shape

    @staticmethod
    def _rows_of(cache: Cache) -> int:
        return cache[0][0].shape[0]

    def _layers(self, weights: Params, cache: Cache, tokens, positions, attend, kernels: bool = False) -> tuple[Array, Cache]:
        """Through all layers; `attend(pair)` is what a block is to attend by, and keeps the pair with the tokens' keys and values.
        `kernels`: the blocks' products by ours."""
        static = self._static
        ends = static.ends(weights)
        x = ends.embed.embed(tokens)
        ropes = [rope_angles(static.cfg, positions + ahead) for ahead in (0, 1)]
        updated = []
        for layer, pair in zip(weights["layers"], cache, strict=True):
            block = static.layer(layer, self._joined)
            if kernels:
                x, pair = fused_block(block, x, ropes[0], attend(pair), interpret=self.kv.interpret)
            else:
                x, pair = block(x, ropes[0], attend(pair), ropes[1])
            updated.append(pair)
        return ends.final_norm(x), updated

    def _writing(self, rows, slots, look) -> Callable[[Pair], Callable]:
        """Attention that writes keys and values, then lets the queries `look` at them."""

        def with_pair(pair):
            def attend(q, k, v):
                written = self.kv.write(pair, k, v, rows, slots)
                return look(q, written), written

            return attend

        return with_pair

    def _feed_chunk(self, weights, cache, rows, tokens, starts, counts, *, window, first):
        at = jnp.arange(tokens.shape[1])
        positions = starts[:, None] + at
        if first and self.kv.takes_first_products:
            attend = lambda pair: OfProducts(lambda *of: self.kv.first_step(*of, pair, rows, counts))  # noqa: E731
        elif first:
            attend = lambda pair: lambda q, k, v: (self.kv.attend_first(q, k, v, counts), self.kv.write_first(pair, k, v, rows))  # noqa: E731
        else:
            slots = jnp.where(at < counts[:, None], positions, self.kv.slots(cache[0]) + 1)
            attend = self._writing(rows, slots, lambda q, pair: self.kv.attend_chunk(q, pair, rows, positions, window))
        return self._layers(weights, cache, tokens, positions, attend)[1]

    def _copy_rows(self, cache, source, target, count, *, window):
        if self.kv.mesh is not None:  # a slice of rows that lie on several devices would bring all of them to each
            target = jnp.where(jnp.arange(len(target)) < count, target, self._rows_of(cache))
            return [self.kv.copy_spread(pair, source, target, window) for pair in cache]
        if self.kv.copies_together:
            return [self.kv.copy_together(pair, source, target, count, window) for pair in cache]
        # One after the other: the source stays in the device's cache, and nothing is written but the targets.
        one = lambda i, cache: [self.kv.copy(pair, source[i], target[i], window) for pair in cache]  # noqa: E731
        return jax.lax.fori_loop(0, count, one, cache)

    def _decode_block(self, weights, cache, rows: Rows, enough, *, filtered):
        static, n_rows = self._static, rows.token.shape[0]
        everyone, beyond = jnp.arange(n_rows), self.kv.slots(cache[0]) + 1
        resting = jnp.sum(rows.done)

        def step(carry):
            number, cache, rows, block = carry
            slots = jnp.where(rows.done, beyond, rows.position)[:, None]
            if self.kv.takes_products:
                attend = lambda pair: OfProducts(lambda *of: self.kv.step(*of, pair, rows.position, slots[:, 0]))  # noqa: E731
            else:
                attend = self._writing(everyone, slots, lambda q, pair: self.kv.attend(q, pair, rows.position))
            kernels = self.products == "kernels"
            hidden, cache = self._layers(weights, cache, rows.token[:, None], rows.position[:, None], attend, kernels)
            scores = logits(static, weights, hidden, rows.agent)[:, 0]
            chosen, logp_sample, logp_model = choose_tokens(scores, rows.key, rows.step, rows.draw, filtered)
            block = Block(
                block.tokens.at[:, number].set(chosen),
                block.logp_sample.at[:, number].set(logp_sample),
                block.logp_model.at[:, number].set(logp_model),
                block.count + ~rows.done,
            )
            recent = jnp.concatenate([rows.recent[:, 1:], chosen[:, None]], axis=1)
            ends = (chosen == self._eos_id) | (rows.step + 1 >= rows.limit)
            for stop in self._stops:
                ends |= jnp.all((recent == stop) | (stop == -2), axis=1)
            rest = rows.done
            after = rows._replace(
                token=jnp.where(rest, rows.token, chosen), position=jnp.where(rest, rows.position, rows.position + 1),
                step=jnp.where(rest, rows.step, rows.step + 1), recent=jnp.where(rest[:, None], rows.recent, recent), done=rest | ends,
            )  # fmt: skip
            return number + 1, cache, after, block

        def goes_on(carry):
            number, _, rows, _ = carry
            done = jnp.sum(rows.done)
            return (number < self._block) & (done < n_rows) & (done - resting < enough)

        empty = jnp.zeros((n_rows, self._block), jnp.float32)
        block = Block(empty.astype(jnp.int32), empty, empty, jnp.zeros(n_rows, jnp.int32))
        _, cache, rows, block = jax.lax.while_loop(goes_on, step, (jnp.int32(0), cache, rows, block))
        return cache, rows, block

    def _once(self, sizes: tuple, program: Callable) -> Callable:
        """The program, which threads that need it for the same new sizes at the same time will not compile twice."""
        if sizes in self._seen:
            return program

        def first(*args, **kwargs):
            with self._first_of_size:
                out = program(*args, **kwargs)
                self._seen.add(sizes)
                return out

        return first

    def _jit(self, function, outputs=None, **options):
        """The compiled function; `outputs`: where its results go on a mesh."""

        def traced(*args, **kwargs):
            self.compilations += 1  # runs once a compiled program: only while tracing
            return function(*args, **kwargs)

        if self.kv.mesh is None:
            return jax.jit(traced, **options)
        program = jax.jit(traced, out_shardings=outputs, **options)

        def on_mesh(*args, **kwargs):
            with jax.set_mesh(self.kv.mesh):
                return program(*args, **kwargs)

        return on_mesh
