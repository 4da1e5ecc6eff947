"""Named configurations of published models, by the numbers of their config.json.

Shapes only: weights come from dk_jax.interop. Qwen3 is Yang et al. 2025 (arXiv:2505.09388), the first release; of the later ones
Qwen3-4B-Instruct-2507 differs in rope_theta (5e6), so load that from its own config.json. SmolLM2 is Allal et al. 2025
(arXiv:2502.02737), base and instruct alike.
"""

from __future__ import annotations

import dataclasses
import math

import jax

from dk_jax.models.backbone import abstract_backbone
from dk_jax.models.config import BackboneConfig


def _qwen3(d_model: int, d_ff: int, n_layers: int, n_heads: int, tied: bool) -> BackboneConfig:
    return BackboneConfig(
        family="qwen3",
        vocab_size=151_936,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=128,
        d_ff=d_ff,
        rope_theta=1e6,
        norm_eps=1e-6,
        tie_embeddings=tied,
    )


def _smollm2(d_model: int, d_ff: int, n_layers: int, n_heads: int, n_kv_heads: int, rope_theta: float) -> BackboneConfig:
    return BackboneConfig(
        family="llama",
        vocab_size=49_152,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=64,
        d_ff=d_ff,
        rope_theta=rope_theta,
        norm_eps=1e-5,
        tie_embeddings=True,
    )


PRESETS = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
    "smollm2-135m": _smollm2(576, 1536, 30, 9, 3, rope_theta=1e5),
    "smollm2-360m": _smollm2(960, 2560, 32, 15, 5, rope_theta=1e5),
    "smollm2-1.7b": _smollm2(2048, 8192, 24, 32, 32, rope_theta=1.3e5),
}
"""Configuration by name; parameters and products in float32, no agent heads, no LoRA."""


def preset(name: str, **overrides) -> BackboneConfig:
    """The configuration of a published model.

    Args:
      name: a key of PRESETS.
      **overrides: BackboneConfig fields to set (compute_dtype, lora_rank, vocab_size, ...).

    Raises:
      ValueError: for an unknown name, listing the known ones.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset is called {name!r}; there are {', '.join(PRESETS)}")
    return dataclasses.replace(PRESETS[name], **overrides)


def parameter_count(cfg: BackboneConfig) -> int:
    """How many numbers the parameters are, agent heads and LoRA included, by shapes alone: no array is made."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_backbone(cfg)[1]))
