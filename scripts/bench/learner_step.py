"""The learner's own update of random weights, as learner.py and kernel_times.py time it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from dk_jax.models import build_backbone
from dk_jax.models.presets import PRESETS, parameter_count, preset
from dk_jax.train.batch import Row, microbatches
from dk_jax.train.update import LossConfig, Updater, make_optimizer


class LearnerStep:
    """Calling it makes one update of `rows` sequences of `tokens` tokens, policy loss on every token, and waits for it.

    Full training with AdamW, parameters and optimiser in float32, products in bfloat16 (on a GPU).
    """

    def __init__(self, *, model: str, rows: int, tokens: int, shrunk: bool = False, remat: str = "full") -> None:
        """
        Args:
          model: a preset's name, or Qwen3's 0.6b, 1.7b, ...
          remat: see `BackboneConfig`.
          shrunk: two small layers instead, to try the script.
        """
        how = {"compute_dtype": "bfloat16", "attention": "cudnn"} if jax.default_backend() == "gpu" else {}
        cfg = preset(model if model in PRESETS else f"qwen3-{model}", remat=remat, **how)
        if shrunk:
            cfg = dataclasses.replace(cfg, n_layers=2, d_model=64, d_ff=96, n_heads=4, n_kv_heads=2, head_dim=16, vocab_size=512)
        static, self.params = build_backbone(cfg, jax.random.key(0))
        optimizer = make_optimizer(lr=1e-6, warmup=1, steps=100, weight_decay=0.0, clip_norm=1.0, decay=False)
        self.updater = Updater(static, optimizer, LossConfig(kind="policy"))
        self.frozen = jax.tree.map(lambda leaf: None, self.params)
        self.state = self.updater.start(self.params)
        rng = np.random.default_rng(0)
        each, fresh = [1.0] * tokens, [-float(np.log(cfg.vocab_size))] * tokens
        some = [
            Row(tokens=rng.integers(0, cfg.vocab_size, tokens).tolist(), loss=each, advantage=each, old_logp=fresh, agent=1,
                weight=1.0 / (rows * tokens))
            for _ in range(rows)
        ]  # fmt: skip
        self.batches = microbatches(some, size=rows, step=min(tokens, 1024))
        self.parameters = parameter_count(cfg)
        self.model_flops = 6 * self.parameters * rows * tokens + 6 * cfg.n_layers * cfg.n_heads * cfg.head_dim * tokens * tokens * rows

    def __call__(self) -> dict:
        """The update's metrics."""
        self.params, self.state, metrics = self.updater.update(self.params, self.frozen, self.state, self.batches)
        jax.block_until_ready((self.params, self.state))
        return metrics
