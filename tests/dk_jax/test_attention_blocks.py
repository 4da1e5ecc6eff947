"""Attention in blocks of queries is attention: the same values and gradients whatever the size of a block."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dk_jax.models import attention


@pytest.mark.parametrize(("length", "scores"), [(40, 1), (37, 640), (37, 10**9)])
def test_blocks_change_neither_values_nor_gradients(monkeypatch, length, scores):
    monkeypatch.setattr(attention, "BLOCK_SCORES", scores)
    keys = jax.random.split(jax.random.key(0), 4)
    q, weight = (jax.random.normal(key, (2, length, 4, 8)) for key in keys[:2])
    k, v = (jax.random.normal(key, (2, length, 2, 8)) for key in keys[2:])
    lengths = np.array([length, length - 3])

    def run(implementation):
        def loss(q, k, v):
            mixed = attention.causal_attention(q, k, v, lengths, implementation)
            return (mixed * weight).sum(), mixed

        grads, mixed = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
        return [mixed, *grads]

    for found, wanted in zip(run("blocks"), run("xla"), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
