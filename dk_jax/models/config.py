"""Static description of a backbone: every number that fixes its shapes and its arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp

AGENTS = ("selection", "policy", "summary")
"""Names of the agents; an agent's id is its index here."""

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
"""Names of a layer's projections, all of which LoRA can sit on."""

Family = Literal["llama", "qwen3"]
Precision = Literal["float32", "bfloat16"]
Remat = Literal["none", "products", "attention", "full"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Shapes and arithmetic of a decoder-only transformer.

    Attributes:
      family: "llama" (SmolLM2, Llama) or "qwen3" (adds an RMSNorm on every query and key head).
      vocab_size: V, rows of the embedding table (may exceed the tokenizer's).
      d_model: D, width of the residual stream.
      n_layers: L.
      n_heads: N, query heads.
      n_kv_heads: K, key/value heads; divides N.
      head_dim: H, even; Qwen3 sets it apart from D / N.
      d_ff: F, width of the gated MLP.
      rope_theta: base of the rotary frequencies.
      norm_eps: epsilon of every RMSNorm.
      tie_embeddings: whether the unembedding is the embedding table.
      compute_dtype: type in which weights and activations enter a product. Norms, softmax, RoPE, the residual
        stream and logits are always float32, and float32 products are never rounded to TF32.
      param_dtype: type in which parameters are stored.
      head_rank: R, rank of the agents' residuals on the final hidden state; 0 shares one head.
      shifted_kv_heads: key/value heads, the last ones, whose keys are those of the token before ("smeared keys", Elhage et
        al. 2021, at full strength). A query then finds what followed an earlier token like itself within one layer, which
        small models from scratch otherwise need millions of tokens to learn. 0 for published weights.
      init_std: standard deviation of fresh weights.
      lora_rank: rank of the LoRA branch of every projection in lora_targets; 0 for none.
      lora_alpha: the LoRA branch is scaled by lora_alpha / lora_rank.
      lora_targets: which of PROJECTIONS have a LoRA branch, in any order; kept in the order of PROJECTIONS.
      remat: what of each layer's activations the backward pass computes again instead of keeping them: "none"; "products": all but what
        products with weights give, and attention's kernel; "attention": all but what attention's kernel gives; "full": everything but
        the layer's input. In this order memory falls and time rises. (True means "full", False "none".)
      attention: for training: "xla"; "cudnn" (NVIDIA only, bfloat16 only); or "blocks", for long rows where there is no cuDNN.
    """

    family: Family
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    compute_dtype: Precision = "float32"
    param_dtype: Precision = "float32"
    head_rank: int = 0
    shifted_kv_heads: int = 0
    init_std: float = 0.02
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = PROJECTIONS
    remat: Remat | bool = "none"
    attention: Literal["xla", "cudnn", "blocks"] = "xla"

    def __post_init__(self):
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"BackboneConfig.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("head_rank", "lora_rank"):
            if getattr(self, name) < 0:
                raise ValueError(f"BackboneConfig.{name} is {getattr(self, name)}; it must not be negative")
        object.__setattr__(self, "remat", {True: "full", False: "none"}.get(self.remat, self.remat))
        if self.remat not in get_args(Remat):
            raise ValueError(f"BackboneConfig.remat is {self.remat!r}; there are {', '.join(get_args(Remat))}")
        self._order_lora_targets()
        choices = {
            "family": ("llama", "qwen3"),
            "compute_dtype": ("float32", "bfloat16"),
            "param_dtype": ("float32", "bfloat16"),
            "attention": ("xla", "cudnn", "blocks"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"BackboneConfig.{name} is {getattr(self, name)!r}; choose one of {allowed}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}")
        if not 0 <= self.shifted_kv_heads <= self.n_kv_heads:
            raise ValueError(
                f"shifted_kv_heads={self.shifted_kv_heads} must lie between 0 and n_kv_heads={self.n_kv_heads}"
            )
        if self.init_std <= 0:
            raise ValueError(f"init_std is {self.init_std}; it must be positive")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings rotate pairs")
        if self.attention == "cudnn" and (
            self.compute_dtype != "bfloat16" or self.head_dim % 8 or self.head_dim > 256
        ):
            raise ValueError(
                "attention='cudnn' needs compute_dtype='bfloat16' and a head_dim that is a multiple of 8, at "
                f"most 256; got {self.compute_dtype}, head_dim={self.head_dim}. Use attention='xla'."
            )

    def _order_lora_targets(self):
        named = self.lora_targets
        if isinstance(named, str):
            raise ValueError(f"lora_targets is the string {named!r}; give a tuple of names out of {PROJECTIONS}")
        unknown = [name for name in named if name not in PROJECTIONS]
        if unknown:
            raise ValueError(f"lora_targets={tuple(named)}: no projection is called {unknown[0]!r}; choose out of {PROJECTIONS}")
        if len(set(named)) != len(named):
            raise ValueError(f"lora_targets={tuple(named)} names a projection twice")
        if self.lora_rank and not named:
            raise ValueError(f"lora_rank={self.lora_rank} with lora_targets=(); name at least one of {PROJECTIONS}, or set lora_rank=0")
        object.__setattr__(self, "lora_targets", tuple(name for name in PROJECTIONS if name in named))

    @property
    def dtype(self):
        """Compute dtype as a numpy type."""
        return jnp.dtype(self.compute_dtype)
