"""The backbone: a decoder-only transformer with agent heads and LoRA, and the log-probs of tokens."""

from dk_jax.models.backbone import (
    Params,
    Static,
    abstract_backbone,
    build_backbone,
    hidden_states,
    logits,
)
from dk_jax.models.config import AGENTS, BackboneConfig
from dk_jax.models.log_probs import TokenLogProbs, token_log_probs
from dk_jax.models.lora import combine, merge_lora, partition, trainable_mask

__all__ = [
    "AGENTS",
    "BackboneConfig",
    "Params",
    "Static",
    "TokenLogProbs",
    "abstract_backbone",
    "build_backbone",
    "combine",
    "hidden_states",
    "logits",
    "merge_lora",
    "partition",
    "token_log_probs",
    "trainable_mask",
]
