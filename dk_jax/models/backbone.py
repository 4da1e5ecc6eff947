"""The decoder-only transformer of all three agents, from token ids to logits.

One declaration serves Llama (SmolLM2) and Qwen3: pre-norm blocks of grouped-query attention with rotary
embeddings and a gated SiLU MLP. The modules are declared once in Flax NNX and split once; from then on
parameters are a plain nested dict of arrays, which crosses `jax.jit` in 0.1 ms where a module would take 10:

    params = {"embed": {"table"}, "layers": {"attention_norm", "attention", "mlp_norm", "mlp"}, "final_norm",
              ["unembed"], ["heads"]}                     every leaf under "layers" carries a leading axis L

`hidden_states` takes whole sequences through the scanned layers: training. Generation takes chunks and single tokens through the same
blocks, unrolled (`unstack_for_decode`), against caches of its own (dk_jax.generation.programs).

Not here: sampling, sharding, packed sequences.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from dk_jax.models.attention import causal_attention
from dk_jax.models.config import BackboneConfig
from dk_jax.models.heads import AgentHeads
from dk_jax.models.layers import Linear, RMSNorm, Table, rope_angles, rotate

Params = dict[str, Any]


JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Projections of the same input that generation takes as one product, its outputs side by side."""


def joins(cfg: BackboneConfig, name: str) -> bool:
    """Whether a product of `JOINED` takes the place of its parts in generation: not where one of them has a LoRA branch."""
    return not (cfg.lora_rank and set(JOINED[name]) & set(cfg.lora_targets))


class OfProducts(NamedTuple):
    """Attention that does itself what lies between the joined product of queries, keys and values and the output's product.

    `look(products, scale, eps, rope) -> (mixed, kept)`: all heads side by side [B, T, N+2K, H], and the norms' scale [N+K, H] or None.
    """

    look: Callable[..., tuple[Array, Any]]


class Attention(nnx.Module):
    """The four projections around attention, with Qwen3's norms on query and key heads and, on some, shifted keys. `joined`: see `JOINED`."""

    def __init__(self, cfg: BackboneConfig, rngs: nnx.Rngs, joined: bool = False):
        self.sizes = (cfg.n_heads, cfg.n_kv_heads, cfg.n_kv_heads)
        self.joined = joined and joins(cfg, "qkv")
        if self.joined:
            self.qkv = Linear(cfg, "qkv", cfg.d_model, sum(self.sizes) * cfg.head_dim, rngs)
        else:
            self.q, self.k, self.v = (
                Linear(cfg, name, cfg.d_model, n * cfg.head_dim, rngs) for name, n in zip(JOINED["qkv"], self.sizes, strict=True)
            )
        self.o = Linear(cfg, "o", cfg.n_heads * cfg.head_dim, cfg.d_model, rngs, scale=(2 * cfg.n_layers) ** -0.5)
        self.normed = cfg.family == "qwen3"
        if self.normed and self.joined:
            self.qk_norm = RMSNorm(cfg, sum(self.sizes[:2]), cfg.head_dim)
        elif self.normed:
            self.q_norm = RMSNorm(cfg, cfg.head_dim)
            self.k_norm = RMSNorm(cfg, cfg.head_dim)
        self.head_dim = cfg.head_dim
        self.own = cfg.n_kv_heads - cfg.shifted_kv_heads

    def __call__(self, x, rope, attend, next_rope=None):
        """`next_rope`: angles of the positions after the tokens', for shifted keys that are to be the next token's each."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        if isinstance(attend, OfProducts):
            scale, eps = (self.qk_norm.scale[...], self.qk_norm.eps) if self.normed else (None, 0.0)
            mixed, kept = attend.look(self.qkv(x).reshape(heads), scale, eps, rope)
            return self.o(mixed.reshape(*x.shape[:-1], -1)), kept
        if self.joined:
            n, both = self.sizes[0], sum(self.sizes[:2])
            of_all = self.qkv(x).reshape(heads)
            qk, v = of_all[..., :both, :], of_all[..., both:, :]
            qk = self.qk_norm(qk) if self.normed else qk
            q, k = qk[..., :n, :], qk[..., n:, :]
        else:
            q, k, v = (project(x).reshape(heads) for project in (self.q, self.k, self.v))
            if self.normed:
                q, k = self.q_norm(q), self.k_norm(k)
        own, shifted = k[:, :, : self.own], k[:, :, self.own :]
        if next_rope is None:
            shifted = jnp.pad(shifted, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
            k = rotate(jnp.concatenate([own, shifted], axis=2), *rope)
        else:
            k = jnp.concatenate([rotate(own, *rope), rotate(shifted, *next_rope)], axis=2)
        mixed, kept = attend(rotate(q, *rope), k, v)
        return self.o(mixed.reshape(*x.shape[:-1], -1)), kept


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)). `joined`: see `JOINED`."""

    def __init__(self, cfg: BackboneConfig, rngs: nnx.Rngs, joined: bool = False):
        self.joined = joined and joins(cfg, "gate_up")
        if self.joined:
            self.gate_up = Linear(cfg, "gate_up", cfg.d_model, 2 * cfg.d_ff, rngs)
        else:
            self.gate, self.up = (Linear(cfg, name, cfg.d_model, cfg.d_ff, rngs) for name in JOINED["gate_up"])
        self.down = Linear(cfg, "down", cfg.d_ff, cfg.d_model, rngs, scale=(2 * cfg.n_layers) ** -0.5)

    def __call__(self, x):
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1) if self.joined else (self.gate(x), self.up(x))
        return self.down(nnx.silu(gate) * up)


class Block(nnx.Module):
    """One layer. `attend(q, k, v) -> (mixed, kept)` decides what queries see and what is kept for later; or an `OfProducts`, if joined."""

    def __init__(self, cfg: BackboneConfig, rngs: nnx.Rngs, joined: bool = False):
        self.attention_norm = RMSNorm(cfg, cfg.d_model)
        self.attention = Attention(cfg, rngs, joined)
        self.mlp_norm = RMSNorm(cfg, cfg.d_model)
        self.mlp = MLP(cfg, rngs, joined)

    def __call__(self, x, rope, attend, next_rope=None):
        mixed, kept = self.attention(self.attention_norm(x), rope, attend, next_rope)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), kept


class Ends(nnx.Module):
    """What stands before and after the layers: embedding, final norm, agent heads, unembedding."""

    def __init__(self, cfg: BackboneConfig, rngs: nnx.Rngs):
        self.embed = Table(cfg, rngs)
        self.final_norm = RMSNorm(cfg, cfg.d_model)
        if not cfg.tie_embeddings:
            self.unembed = Table(cfg, rngs)
        if cfg.head_rank:
            self.heads = AgentHeads(cfg, rngs)


class Backbone(Ends):
    """The whole: the ends, and L blocks whose parameters are stacked along a leading axis."""

    def __init__(self, cfg: BackboneConfig, rngs: nnx.Rngs):
        super().__init__(cfg, rngs)

        @nnx.split_rngs(splits=cfg.n_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(cfg, rngs)

        self.layers = stacked(rngs)


@dataclasses.dataclass(frozen=True)
class Static:
    """Everything about a backbone that is not an array; hashable, hence a static argument of `jax.jit`.

    The graph definitions follow from the configuration, which alone decides equality and hash.
    """

    cfg: BackboneConfig
    ends_graph: nnx.GraphDef = dataclasses.field(compare=False, repr=False)
    layer_graph: nnx.GraphDef = dataclasses.field(compare=False, repr=False)
    joined_graph: nnx.GraphDef = dataclasses.field(compare=False, repr=False)

    def ends(self, params: Params) -> Ends:
        """The modules around the layers, holding these parameters."""
        return nnx.merge(self.ends_graph, {name: part for name, part in params.items() if name != "layers"})

    def layer(self, layer_params: Params, joined: bool = False) -> Block:
        """One block, holding one layer's parameters (no leading axis); `joined`: as `unstack_for_decode` has joined them."""
        return nnx.merge(self.joined_graph if joined else self.layer_graph, layer_params)


def abstract_backbone(cfg: BackboneConfig) -> tuple[Static, Params]:
    """The static part, and the parameter tree as shapes and dtypes without any array."""
    static, shapes = _abstract(cfg)
    return static, jax.tree.map(lambda shape: shape, shapes)  # a tree of its own


@functools.lru_cache(maxsize=64)
def _abstract(cfg: BackboneConfig) -> tuple[Static, Params]:
    model = nnx.eval_shape(lambda: Backbone(cfg, nnx.Rngs(0)))
    ends_graph, _ = nnx.split(nnx.eval_shape(lambda: Ends(cfg, nnx.Rngs(0))))
    layer_graph, _ = nnx.split(model.layers)
    joined_graph, _ = nnx.split(nnx.eval_shape(lambda: Block(cfg, nnx.Rngs(0), joined=True)))
    return Static(cfg, ends_graph, layer_graph, joined_graph), nnx.to_pure_dict(nnx.state(model))


def build_backbone(cfg: BackboneConfig, key: Array) -> tuple[Static, Params]:
    """Declares the backbone and draws its parameters.

    Weights are normal with standard deviation `init_std`, those writing to the residual stream divided by sqrt(2 L)
    (Radford et al. 2019); agent heads and LoRA start as the identity.

    Args:
      cfg: shapes and arithmetic.
      key: a PRNG key of `jax.random.key`.

    Returns:
      The static part and the parameters, a nested dict of arrays.
    """
    static, _ = abstract_backbone(cfg)
    return static, _drawing(cfg)(key)


@functools.lru_cache(maxsize=8)
def _drawing(cfg: BackboneConfig) -> Callable[[Array], Params]:
    """The compiled program that draws a backbone's parameters."""
    return jax.jit(lambda key: nnx.to_pure_dict(nnx.state(Backbone(cfg, nnx.Rngs(key)), nnx.Param)))


def hidden_states(
    static: Static, params: Params, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> Float[Array, "B T D"]:
    """Final hidden states (after the last norm, before any agent head) of right-padded rows.

    Args:
      static, params: as `build_backbone` gives them.
      tokens: token ids; what stands beyond a row's length has no influence on what stands before it.
      lengths: real tokens of each row; padding is known by position alone, never by token id.

    Returns:
      Hidden states in the compute dtype, zero beyond each row's length.
    """
    cfg = static.cfg
    b, t = tokens.shape
    ends = static.ends(params)
    rope = rope_angles(cfg, jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t)))

    def attend(q, k, v):
        mixed = causal_attention(q, k, v, lengths, cfg.attention)
        return mixed if cfg.attention == "cudnn" else checkpoint_name(mixed, _MIXED), None

    def layer(x, layer_params):
        return static.layer(layer_params)(x, rope, attend)

    if cfg.remat != "none":
        layer = jax.checkpoint(layer, prevent_cse=False, policy=_KEPT[cfg.remat])  # inside a scan CSE cannot undo the recomputation
    x, _ = jax.lax.scan(layer, ends.embed.embed(tokens), params["layers"])
    real = jnp.arange(t)[None, :] < lengths[:, None]
    return jnp.where(real[..., None], ends.final_norm(x), 0)


_MIXED = "attention's mixed values"


def _of_attention(primitive, *_, **params) -> bool:
    """Whether attention gave it: its mixed values, and what cuDNN's backward pass takes of the softmax."""
    return primitive.name == "dot_product_attention_fwd_wrapper" or (primitive.name == "name" and params["name"] == _MIXED)


_KEPT = {
    "full": None,
    "attention": _of_attention,
    "products": jax.checkpoint_policies.save_from_both_policies(jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _of_attention),
}
"""By `BackboneConfig.remat`: what `jax.checkpoint` does not compute again."""


def unstack_for_decode(static: Static, params: Params, joined: bool = False) -> Params:
    """Parameters as generation wants them: "layers" a list of L dicts, weights in the compute dtype.

    Casting once a call rather than once a token halves the bytes that a bfloat16 step reads. LoRA stays a
    branch of its own: folded into bfloat16 weights, small updates would be rounded away.

    Args:
        joined: put the products of `JOINED` in the place of their parts, for `Static.layer` with the same. (XLA does that by itself,
            anew in every block of steps, and keeps both forms meanwhile.)
    """

    def cast(path, leaf):
        return leaf if path[-1].key == "scale" else leaf.astype(static.cfg.dtype)

    params = jax.tree_util.tree_map_with_path(cast, params)
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(static.cfg.n_layers)]
    if joined:
        layers = [
            {**layer, "attention": _join(static.cfg, "qkv", layer["attention"]), "mlp": _join(static.cfg, "gate_up", layer["mlp"])}
            for layer in layers
        ]
    return {**params, "layers": layers}


def _join(cfg: BackboneConfig, name: str, part: Params) -> Params:
    """A module's parameters with one matrix in the place of those it is joined from."""
    if not joins(cfg, name):
        return part
    kernel = jnp.concatenate([part[one]["kernel"] for one in JOINED[name]], axis=-1)
    rest = {key: value for key, value in part.items() if key not in JOINED[name]}
    if name == "qkv" and "q_norm" in rest:
        heads = {"q_norm": cfg.n_heads, "k_norm": cfg.n_kv_heads}
        rest["qk_norm"] = {"scale": jnp.concatenate([jnp.tile(rest.pop(norm)["scale"], (n, 1)) for norm, n in heads.items()])}
    return {**rest, name: {"kernel": kernel}}


def logits(
    static: Static, params: Params, hidden: Float[Array, "B T D"], agents: Int[Array, " B"]
) -> Float[Array, "B T V"]:
    """Float32 logits under each row's agent head. For long sequences use `token_log_probs`, which never holds
    them all at once."""
    return unembed(static, params, apply_heads(static, params, hidden, agents))


def apply_heads(
    static: Static, params: Params, hidden: Float[Array, "B T D"], agents: Int[Array, " B"]
) -> Float[Array, "B T D"]:
    """Adds each row's agent residual; the identity when head_rank is 0."""
    if not static.cfg.head_rank:
        return hidden
    return static.ends(params).heads(hidden, agents)


def unembedding(static: Static, params: Params) -> Float[Array, "V D"]:
    """The table that turns hidden states into logits: the embedding's own where the two are tied."""
    ends = static.ends(params)
    return (ends.embed if static.cfg.tie_embeddings else ends.unembed).table[...]


def unembed(static: Static, params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Float32 logits of hidden states that have been through `apply_heads`."""
    ends = static.ends(params)
    return (ends.embed if static.cfg.tie_embeddings else ends.unembed).logits(hidden)
