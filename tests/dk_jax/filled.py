"""Backbones for tests, without a zero that would hide a part of them."""

import jax
import jax.numpy as jnp
import numpy as np

from dk_jax.models import abstract_backbone


def filled_backbone(cfg):
    """(static, params) of a backbone whose every array matters and whose distributions are far from uniform."""
    static, shapes = abstract_backbone(cfg)
    rng = np.random.default_rng(0)
    return static, jax.tree.map(lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), shapes)
