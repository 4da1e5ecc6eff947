"""What trains: masks for full and LoRA training, and folding LoRA into the weights.

LoRA (Hu et al. 2021, arXiv:2106.09685) sits on the projections that `BackboneConfig.lora_targets` names, in every layer; its
arrays live in the parameter tree beside the kernel they belong to, under "lora_a" and "lora_b".
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from dk_jax.models.backbone import Params, Static, abstract_backbone
from dk_jax.models.config import PROJECTIONS
from dk_jax.models.layers import product_precision


def trainable_mask(static: Static, params: Params, mode: Literal["full", "lora"]) -> Params:
    """A tree like `params` of bools: True where the optimiser may write.

    "full" trains everything; "lora" trains LoRA branches and agent heads. Raises ValueError if "lora" would
    train nothing, or an unknown mode is given.
    """
    if mode == "full":
        return jax.tree.map(lambda _: True, params)
    if mode != "lora":
        raise ValueError(f"trainable_mask: mode is {mode!r}; choose 'full' or 'lora'")
    if not static.cfg.lora_rank:
        raise ValueError("trainable_mask: mode 'lora' with lora_rank=0; set BackboneConfig.lora_rank")

    def trains(path, _):
        names = [entry.key for entry in path]
        return names[0] == "heads" or names[-1] in ("lora_a", "lora_b")

    return jax.tree_util.tree_map_with_path(trains, params)


def partition(params: Params, mask: Params) -> tuple[Params, Params]:
    """(trainable, frozen): two trees like `params`, with None where the other one holds the array.

    Differentiate with respect to the first alone, and the frozen weights cost neither gradients nor optimiser
    state; `combine` puts them together inside the loss.
    """
    trainable = jax.tree.map(lambda leaf, trains: leaf if trains else None, params, mask)
    frozen = jax.tree.map(lambda leaf, trains: None if trains else leaf, params, mask)
    return trainable, frozen


def combine(trainable: Params, frozen: Params) -> Params:
    """The inverse of `partition`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, trainable, frozen, is_leaf=lambda leaf: leaf is None
    )


def merge_lora(static: Static, params: Params) -> tuple[Static, Params]:
    """Folds every LoRA branch into its kernel: W + lora_alpha / r * A B, computed in float32.

    Returns:
      The backbone without LoRA that computes the same function, up to rounding to param_dtype.
    """
    cfg = static.cfg
    if not cfg.lora_rank:
        return static, params
    scale = cfg.lora_alpha / cfg.lora_rank

    def fold(node):
        if "lora_a" in node:
            a, b = (node[name].astype(jnp.float32) for name in ("lora_a", "lora_b"))
            update = scale * jnp.matmul(a, b, precision=product_precision(a.dtype))
            return {"kernel": (node["kernel"].astype(jnp.float32) + update).astype(node["kernel"].dtype)}
        return {name: fold(child) if isinstance(child, dict) else child for name, child in node.items()}

    merged_static, _ = abstract_backbone(dataclasses.replace(cfg, lora_rank=0, lora_targets=PROJECTIONS))
    return merged_static, fold(params)
