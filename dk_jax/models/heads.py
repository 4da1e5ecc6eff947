"""Agent heads: a low-rank residual on the final hidden state, before the unembedding that all agents share.

    h' = h + (h P[a]) Q[a]        P [A, D, R] random, Q [A, R, D] zero at the start

so every agent begins as the backbone itself. The head is picked per row: one batch mixes agents.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dk_jax.models.config import AGENTS, BackboneConfig
from dk_jax.models.layers import product_precision


class AgentHeads(nnx.Module):
    """The residuals of all agents, stacked; absent when the rank is 0 (one head for all)."""

    def __init__(self, cfg: BackboneConfig, rngs: nnx.Rngs):
        down = jax.random.normal(rngs.params(), (len(AGENTS), cfg.d_model, cfg.head_rank), jnp.float32)
        self.down = nnx.Param(down * cfg.d_model**-0.5)
        self.up = nnx.Param(jnp.zeros((len(AGENTS), cfg.head_rank, cfg.d_model), jnp.float32))

    def __call__(self, hidden: Float[Array, "B T D"], agents: Int[Array, " B"]) -> Float[Array, "B T D"]:
        precision = product_precision(hidden.dtype)
        down = self.down[...].astype(hidden.dtype)[agents]
        up = self.up[...].astype(hidden.dtype)[agents]
        low = jnp.einsum("btd,bdr->btr", hidden, down, precision=precision)
        return hidden + jnp.einsum("btr,brd->btd", low, up, precision=precision)
