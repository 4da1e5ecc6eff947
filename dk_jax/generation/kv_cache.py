"""Keys and values of the rows of a batch: how they lie in memory, how they are written, and how queries look at them.

Every row has slots of its own, slot = position. A layer's pair of arrays lies in one of two ways:

    "columns"   keys [B, K, H, S], values [B, K, S, H]    both products of attention are plain ones over the last two axes: CPU
    "rows"      keys and values [B, S, K, H]              a token's are one piece of memory, as fused kernels want them: accelerators

Writes to a slot at or beyond S are dropped, which is how padding and finished rows are kept out. The model's shifted heads (the last
ones, see `BackboneConfig.shifted_kv_heads`) have their keys one slot ahead.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dk_jax.models.attention import MASKED
from dk_jax.models.config import BackboneConfig
from dk_jax.models.layers import product_precision

Pair = tuple[Array, Array]
Layout = Literal["columns", "rows"]
DecodeAttention = Literal["xla", "cudnn"]


@dataclasses.dataclass(frozen=True)
class KVCache:
    """What is done with a layer's pair. `attention` is the implementation for single tokens; "cudnn" needs bfloat16 and "rows"."""

    cfg: BackboneConfig
    layout: Layout
    attention: DecodeAttention = "xla"

    def __post_init__(self):
        if self.attention == "cudnn" and (self.layout != "rows" or self.cfg.compute_dtype != "bfloat16"):
            raise ValueError(f"attention 'cudnn' needs layout 'rows' and bfloat16; got {self.layout!r} and {self.cfg.compute_dtype}")

    def bytes(self, rows: int, slots: int) -> int:
        """Of all layers together."""
        cfg = self.cfg
        return 2 * cfg.n_layers * rows * slots * cfg.n_kv_heads * cfg.head_dim * cfg.dtype.itemsize

    def zeros(self, rows: int, slots: int, device=None) -> list[Pair]:
        """Empty pairs of all layers."""
        cfg = self.cfg
        shapes = {
            "columns": ((rows, cfg.n_kv_heads, cfg.head_dim, slots), (rows, cfg.n_kv_heads, slots, cfg.head_dim)),
            "rows": ((rows, slots, cfg.n_kv_heads, cfg.head_dim),) * 2,
        }[self.layout]
        return [tuple(jnp.zeros(shape, cfg.dtype, device=device) for shape in shapes) for _ in range(cfg.n_layers)]

    def slots(self, pair: Pair) -> int:
        """S."""
        return pair[0].shape[-1 if self.layout == "columns" else 1]

    def write(
        self, pair: Pair, k: Float[Array, "b T K H"], v: Float[Array, "b T K H"], rows: Int[Array, " b"], slots: Int[Array, "b T"]
    ) -> Pair:
        """Puts T tokens of each of b rows into the given slots."""
        keys, values = pair
        own, rows = self.cfg.n_kv_heads - self.cfg.shifted_kv_heads, rows[:, None]
        for part, ahead in ((slice(0, own), 0), (slice(own, None), 1)):
            if k[:, :, part].shape[2]:
                if self.layout == "columns":
                    keys = keys.at[rows, part, :, slots + ahead].set(k[:, :, part], mode="drop")
                else:
                    keys = keys.at[rows, slots + ahead, part].set(k[:, :, part], mode="drop")
        if self.layout == "columns":
            return keys, values.at[rows, :, slots].set(v, mode="drop")
        return keys, values.at[rows, slots].set(v, mode="drop")

    def attend(self, q: Float[Array, "B 1 N H"], pair: Pair, positions: Int[Array, " B"]) -> Float[Array, "B 1 N H"]:
        """Each row's single query looks at its slots up to its position."""
        if self.attention == "cudnn":
            lengths = (positions + 1).astype(jnp.int32)
            ones = jnp.ones_like(lengths)
            return jax.nn.dot_product_attention(
                q, *pair, query_seq_lengths=ones, key_value_seq_lengths=lengths, implementation="cudnn"
            )  # fmt: skip
        b, _, n, h = q.shape
        # Without an axis for the one query: with it XLA's CPU backend takes twice as long.
        grouped = q.reshape(b, self.cfg.n_kv_heads, -1, h)
        to_scores, to_values = {
            "columns": ("bkgh,bkhs->bkgs", "bkgs,bksh->bkgh"),
            "rows": ("bkgh,bskh->bkgs", "bkgs,bskh->bkgh"),
        }[self.layout]
        precision = product_precision(q.dtype)
        scores = jnp.einsum(to_scores, grouped, pair[0], precision=precision, preferred_element_type=jnp.float32)
        weights = _weights(scores * h**-0.5, (jnp.arange(scores.shape[-1]) <= positions[:, None])[:, None, None], q.dtype)
        return jnp.einsum(to_values, weights, pair[1], precision=precision).reshape(b, 1, n, h)

    def attend_chunk(
        self, q: Float[Array, "b T N H"], pair: Pair, rows: Int[Array, " b"], positions: Int[Array, "b T"], window: int
    ) -> Float[Array, "b T N H"]:
        """Queries of some rows look at their slots up to each one's position; `window` bounds all positions."""
        keys, values = pair
        if self.layout == "columns":
            near = keys[..., :window][rows], values[:, :, :window][rows]
        else:
            near = keys[:, :window][rows], values[:, :window][rows]
        return self._look(q, near, positions)

    def copy(self, pair: Pair, source: Int[Array, " n"], target: Int[Array, " n"], window: int) -> Pair:
        """Copies the first `window` slots of rows to other rows; a target beyond B takes nothing."""
        keys, values = pair
        if self.layout == "columns":
            keys = keys.at[target, :, :, :window].set(keys[source, :, :, :window], mode="drop")
            return keys, values.at[target, :, :window].set(values[source, :, :window], mode="drop")
        keys = keys.at[target, :window].set(keys[source, :window], mode="drop")
        return keys, values.at[target, :window].set(values[source, :window], mode="drop")

    def grow(self, pair: Pair, slots: int) -> Pair:
        """The same with more slots."""
        more = slots - self.slots(pair)
        where = (3, 2) if self.layout == "columns" else (1, 1)
        return tuple(
            jnp.pad(array, [(0, more if axis == at else 0) for axis in range(4)]) for array, at in zip(pair, where, strict=True)
        )

    def _look(self, q, pair: Pair, positions: Int[Array, "b T"]):
        b, t, n, h = q.shape
        kv = self.cfg.n_kv_heads
        precision = product_precision(q.dtype)
        to_scores, to_values = {
            "columns": ("btkgh,bkhs->bkgts", "bkgts,bksh->btkgh"),
            "rows": ("btkgh,bskh->bkgts", "bkgts,bskh->btkgh"),
        }[self.layout]
        grouped = q.reshape(b, t, kv, n // kv, h)
        scores = jnp.einsum(to_scores, grouped, pair[0], precision=precision, preferred_element_type=jnp.float32)
        weights = _weights(scores * h**-0.5, (jnp.arange(scores.shape[-1]) <= positions[..., None])[:, None, None], q.dtype)
        return jnp.einsum(to_values, weights, pair[1], precision=precision).reshape(b, t, n, h)


def _weights(scores, seen, dtype):
    return jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1).astype(dtype)
