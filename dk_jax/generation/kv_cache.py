"""Keys and values of the rows of a batch: how they lie in memory, how they are written, and how queries look at them.

Every row has slots of its own, slot = position. What a single query does with them is done in one of several ways, each with the memory
layout that it wants:

    "columns"   keys [B, K, H, S], values [B, K, S, H]   XLA; both products are plain ones over the last two axes: fastest on a CPU
    "heads"     keys and values [B, K, S, H]             XLA
    "fused"     as "heads"                               our kernels (`dk_jax.models.decode_attention`): read what a row has, NVIDIA only
    "cudnn"     keys and values [B, S, K, H]             cuDNN's kernel: NVIDIA and bfloat16 only

The first chunk of a prompt sees nothing but itself: it may be attended in as in training (`KVCache.prompts`), without all scores in memory
and without a look at the cache. Later chunks look at the cache by XLA in any case.

Writes to a slot at or beyond S are dropped, which is how padding and finished rows are kept out. The model's shifted heads (the last
ones, see `BackboneConfig.shifted_kv_heads`) have their keys one slot ahead.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from dk_jax.generation.row_copy import copied_rows
from dk_jax.models.attention import causal_attention, masked_softmax
from dk_jax.models.backbone import joins
from dk_jax.models.config import BackboneConfig
from dk_jax.models.decode_attention import fused_attention, fused_step
from dk_jax.models.first_chunk import fused_first
from dk_jax.models.layers import product_precision
from dk_jax.models.sharding import ROWS

Pair = tuple[Array, Array]
Attention = Literal["columns", "heads", "fused", "cudnn"]
# axes of keys and of values, from (B, K, S, H); where S stands in either
_AXES = {"columns": ((0, 1, 3, 2), (0, 1, 2, 3)), "heads": ((0, 1, 2, 3),) * 2, "fused": ((0, 1, 2, 3),) * 2, "cudnn": ((0, 2, 1, 3),) * 2}
_LETTERS = "bksh"


@dataclasses.dataclass(frozen=True)
class KVCache:
    """What is done with a layer's pair. `prompts`: how first chunks are attended in, "xla" (like later ones), "blocks" or "cudnn" (as
    `dk_jax.models.attention` has them; no shifted heads). `interpret` has the fused kernel run anywhere, slowly. `mesh`: devices that rows
    and key/value heads are spread over (`dk_jax.models.sharding`), if they are more than one.

    Raises:
      ValueError: an implementation that cannot do this model.
    """

    cfg: BackboneConfig
    attention: Attention
    interpret: bool = False
    mesh: Mesh | None = None
    prompts: Literal["xla", "blocks", "cudnn"] = "xla"

    def __post_init__(self):
        if self.prompts not in ("xla", "blocks", "cudnn"):
            raise ValueError(f"prompts is {self.prompts!r}; choose 'xla', 'blocks' or 'cudnn'")
        if self.prompts != "xla" and (self.cfg.shifted_kv_heads or self.mesh is not None):
            raise ValueError(f"prompts {self.prompts!r} needs a model without shifted heads, and a single device")
        if self.prompts == "cudnn" and self.cfg.compute_dtype != "bfloat16":
            raise ValueError(f"prompts 'cudnn' needs bfloat16; compute_dtype is {self.cfg.compute_dtype}")
        if self.attention not in get_args(Attention):
            raise ValueError(f"attention is {self.attention!r}; choose one of {get_args(Attention)}")
        if self.attention == "cudnn" and self.cfg.compute_dtype != "bfloat16":
            raise ValueError(f"attention 'cudnn' needs bfloat16; compute_dtype is {self.cfg.compute_dtype}")
        if self.attention == "fused" and (self.cfg.head_dim < 16 or self.cfg.head_dim & (self.cfg.head_dim - 1)):
            raise ValueError(f"attention 'fused' needs a head_dim that is a power of two of at least 16; it is {self.cfg.head_dim}")

    @property
    def sharding(self) -> NamedSharding | None:
        """Of keys and of values: rows as a batch's, key/value heads as their projections'."""
        if self.mesh is None:
            return None
        axes = [ROWS if axis == 0 else "tensor" if axis == 1 else None for axis in _AXES[self.attention][0]]
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def bytes(self, rows: int, slots: int) -> int:
        """Of all layers together."""
        cfg = self.cfg
        return 2 * cfg.n_layers * rows * slots * cfg.n_kv_heads * cfg.head_dim * cfg.dtype.itemsize

    def zeros(self, rows: int, slots: int, device=None) -> list[Pair]:
        """Empty pairs of all layers, on the device or spread over the mesh."""
        cfg, device = self.cfg, self.sharding or device
        sizes = (rows, cfg.n_kv_heads, slots, cfg.head_dim)
        shapes = [tuple(sizes[axis] for axis in axes) for axes in _AXES[self.attention]]
        return [tuple(jnp.zeros(shape, cfg.dtype, device=device) for shape in shapes) for _ in range(cfg.n_layers)]

    def slots(self, pair: Pair) -> int:
        """S."""
        return pair[0].shape[_AXES[self.attention][0].index(2)]

    def write(
        self, pair: Pair, k: Float[Array, "b T K H"], v: Float[Array, "b T K H"], rows: Int[Array, " b"], slots: Int[Array, "b T"]
    ) -> Pair:
        """Puts T tokens of each of b rows into the given slots."""
        keys, values = pair
        own = self.cfg.n_kv_heads - self.cfg.shifted_kv_heads
        for heads, ahead in ((slice(0, own), 0), (slice(own, None), 1)):
            if k[:, :, heads].shape[2]:
                keys = self._put(0, keys, k[:, :, heads], rows, heads, slots + ahead)
        return keys, self._put(1, values, v, rows, slice(None), slots)

    def write_first(self, pair: Pair, k: Float[Array, "b T K H"], v: Float[Array, "b T K H"], rows: Int[Array, " b"]) -> Pair:
        """Puts T tokens of each of b rows into these rows' first slots, padding too: nobody looks at a slot beyond a row's end before it
        is written. A row at a time is one piece of memory for each head, where `write` finds the place of every token."""
        held = min(k.shape[1], self.slots(pair))

        def put(which: int, array: Array, new: Array) -> Array:
            laid = new[:, :held].swapaxes(1, 2).transpose(_AXES[self.attention][which])
            return array.at[(rows, *self._first(which, held))].set(laid, mode="drop")

        return put(0, pair[0], k), put(1, pair[1], v)

    def attend(self, q: Float[Array, "B 1 N H"], pair: Pair, positions: Int[Array, " B"]) -> Float[Array, "B 1 N H"]:
        """Each row's single query looks at its slots up to its position."""
        b, _, n, h = q.shape
        if self.attention == "cudnn":
            lengths = (positions + 1).astype(jnp.int32)
            ones = jnp.ones_like(lengths)
            return jax.nn.dot_product_attention(
                q, *pair, query_seq_lengths=ones, key_value_seq_lengths=lengths, implementation="cudnn"
            )  # fmt: skip
        if self.attention == "fused":
            return self._fused()(q[:, 0], *pair, positions + 1)[:, None]
        # Without an axis for the one query: with it XLA's CPU backend takes twice as long.
        return self._look(q.reshape(b, self.cfg.n_kv_heads, -1, h), pair, positions, "bkgh", "bkgs").reshape(b, 1, n, h)

    @property
    def takes_products(self) -> bool:
        """Whether `step` can be had: the fused kernel, on a device of its own, for a model with nothing between product and attention but
        norms and RoPE."""
        return self.attention == "fused" and self._plain

    @property
    def takes_first_products(self) -> bool:
        """Whether `first_step` can be had: as `takes_products`, for whatever layout our kernels write, where prompts are attended in as in
        training."""
        return self.attention in ("fused", "cudnn") and self.prompts != "xla" and self._plain

    @property
    def _plain(self) -> bool:
        power = self.cfg.head_dim >= 32 and not self.cfg.head_dim & (self.cfg.head_dim - 1)
        return self.mesh is None and power and not self.cfg.shifted_kv_heads and joins(self.cfg, "qkv")

    def step(
        self, products: Float[Array, "B 1 N+2K H"], scale: Float[Array, "N+K H"] | None, eps: float, rope: Pair, pair: Pair,
        positions: Int[Array, " B"], slots: Int[Array, " B"],
    ) -> tuple[Float[Array, "B 1 N H"], Pair]:  # fmt: skip
        """`write` and `attend` of a token a row, from the raw product of its queries, keys and values on; see `fused_step`."""
        angles = tuple(each[:, 0, 0] for each in rope)
        mixed, pair = fused_step(products[:, 0], scale, angles, *pair, positions, slots, eps=eps, interpret=self.interpret)
        return mixed[:, None], pair

    def first_step(
        self, products: Float[Array, "b T N+2K H"], scale: Float[Array, "N+K H"] | None, eps: float, rope: Pair, pair: Pair,
        rows: Int[Array, " b"], counts: Int[Array, " b"],
    ) -> tuple[Float[Array, "b T N H"], Pair]:  # fmt: skip
        """`write_first` and `attend_first`, from the raw product of queries, keys and values on; see `fused_first`."""
        angles = tuple(each[0, :, 0] for each in rope)  # all rows begin at position 0
        heads_first = self.attention == "fused"
        q, k, v, pair = fused_first(products, scale, angles, *pair, rows, eps=eps, heads_first=heads_first, interpret=self.interpret)
        return self.attend_first(q, k, v, counts), pair

    def _fused(self) -> Callable[..., Array]:
        """The kernel; on a mesh every device works on its own rows and heads."""
        kernel = functools.partial(fused_attention, interpret=self.interpret)
        if self.mesh is None:
            return kernel
        own = PartitionSpec(ROWS, "tensor")
        return jax.shard_map(kernel, mesh=self.mesh, in_specs=(own, own, own, PartitionSpec(ROWS)), out_specs=own, check_vma=False)

    def attend_chunk(
        self, q: Float[Array, "b T N H"], pair: Pair, rows: Int[Array, " b"], positions: Int[Array, "b T"], window: int
    ) -> Float[Array, "b T N H"]:
        """Queries of some rows look at their slots up to each one's position; `window` bounds all positions."""
        b, t, n, h = q.shape
        near = tuple(self._beginning(which, array, window)[rows] for which, array in enumerate(pair))
        return self._look(q.reshape(b, t, self.cfg.n_kv_heads, -1, h), near, positions, "btkgh", "bkgts").reshape(b, t, n, h)

    def attend_first(
        self, q: Float[Array, "b T N H"], k: Float[Array, "b T K H"], v: Float[Array, "b T K H"], counts: Int[Array, " b"]
    ) -> Float[Array, "b T N H"]:
        """Queries of rows whose first `counts` tokens these are look at each other."""
        return causal_attention(q, k, v, counts, self.prompts)

    def copy(self, pair: Pair, source: Int[Array, ""], target: Int[Array, ""], window: int) -> Pair:
        """Copies the first `window` slots of a row to another one."""

        def moved(which: int, array: Array) -> Array:
            rest = (0,) * (array.ndim - 1)
            sizes = [1 if axis == 0 else window if axis == 2 else array.shape[i] for i, axis in enumerate(_AXES[self.attention][which])]
            return jax.lax.dynamic_update_slice(array, jax.lax.dynamic_slice(array, (source, *rest), sizes), (target, *rest))

        return tuple(moved(which, array) for which, array in enumerate(pair))

    @property
    def copies_together(self) -> bool:
        """Whether `copy_together` can be had: where the platform has our kernels."""
        return self.attention in ("fused", "cudnn") and self.mesh is None

    def copy_together(self, pair: Pair, source: Int[Array, " n"], target: Int[Array, " n"], count: Int[Array, ""], window: int) -> Pair:
        """Copies the first `window` slots of several rows, the first `count` of them, by a kernel."""

        def moved(which: int, array: Array) -> Array:
            at = _AXES[self.attention][which].index(2)
            flat = array.reshape(array.shape[0], math.prod(array.shape[1:at]), -1)
            width = window * math.prod(array.shape[at + 1 :])
            return copied_rows(flat, source, target, count, width, interpret=self.interpret).reshape(array.shape)

        return tuple(moved(which, array) for which, array in enumerate(pair))

    def copy_spread(self, pair: Pair, source: Int[Array, " n"], target: Int[Array, " n"], window: int) -> Pair:
        """The same for several rows at once, whose devices each look for their own; a target beyond B takes nothing."""
        return tuple(
            array.at[(target, *self._first(which, window))].set(self._beginning(which, array, window)[source], mode="drop")
            for which, array in enumerate(pair)
        )

    def grow(self, pair: Pair, slots: int) -> Pair:
        """The same with more slots."""
        more = slots - self.slots(pair)
        return tuple(
            jnp.pad(array, [(0, more if axis == 2 else 0) for axis in axes])
            for array, axes in zip(pair, _AXES[self.attention], strict=True)
        )

    def _first(self, which: int, window: int) -> tuple[slice, ...]:
        """Index of the first slots, behind that of rows."""
        return tuple(slice(window) if axis == 2 else slice(None) for axis in _AXES[self.attention][which][1:])

    def _beginning(self, which: int, array: Array, window: int) -> Array:
        return array[(slice(None), *self._first(which, window))]

    def _put(self, which: int, array: Array, new: Float[Array, "b T k H"], rows, heads: slice, slots) -> Array:
        index = {0: rows[:, None], 1: heads, 2: slots, 3: slice(None)}
        axes = _AXES[self.attention][which]
        # Indexed by rows and slots, with the other axes as they come: [b, T, k, H] for every layout.
        return array.at[tuple(index[axis] for axis in axes)].set(new, mode="drop")

    def _look(self, q: Array, pair: Pair, positions: Array, queries: str, scores_as: str) -> Array:
        """Attention by XLA; `queries` and `scores_as` name the axes of q and of its scores."""
        keys, values = ("".join(_LETTERS[axis] for axis in axes) for axes in _AXES[self.attention])
        precision = product_precision(q.dtype)
        scores = jnp.einsum(f"{queries},{keys}->{scores_as}", q, pair[0], precision=precision, preferred_element_type=jnp.float32)
        seen = jnp.arange(scores.shape[-1]) <= positions[..., None]
        weights = masked_softmax(scores * q.shape[-1] ** -0.5, seen[:, None, None]).astype(q.dtype)
        return jnp.einsum(f"{scores_as},{values}->{queries}", weights, pair[1], precision=precision)
