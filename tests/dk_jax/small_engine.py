"""A small backbone, engines for it, and what holds their samples against the trainer's log-probs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dk_jax.generation import Engine, EngineConfig, Request
from dk_jax.generation.engine import make_programs
from dk_jax.models import BackboneConfig, token_log_probs
from tests.dk_jax.filled import filled_backbone

EOS = 2
CFG = BackboneConfig(
    family="qwen3", vocab_size=61, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, head_rank=3, shifted_kv_heads=1
)
SIZES = EngineConfig(eos_id=EOS, rows=4, max_length_tokens=96, block=4, chunks=(8, 16), cache_step=32, prefill_tokens=32)


@functools.cache
def backbone(cfg=CFG):
    return filled_backbone(cfg)


@functools.cache
def programs(config=SIZES, cfg=CFG):
    return make_programs(backbone(cfg)[0], config)


def engine(config=SIZES, cfg=CFG):
    return Engine(backbone(cfg)[0], config, programs(config, cfg))


def prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, CFG.vocab_size, n).tolist() for n in lengths]


def requests(some, agents=None, new=12, first_key=100, **more):
    agents = agents or [i % 3 for i in range(len(some))]
    return [
        Request(tokens=prompt, agent=agent, key=first_key + i, max_new_tokens=new, **more)
        for i, (prompt, agent) in enumerate(zip(some, agents, strict=True))
    ]


@functools.partial(jax.jit, static_argnums=0)
def scored(static, params, tokens, lengths, agents):
    return token_log_probs(static, params, tokens, lengths, agents).log_probs


def agrees(history, sample, agent, cfg=CFG):
    """Whether the log-probs are those of the training forward pass on the same tokens."""
    static, params = backbone(cfg)
    row = [*history, *sample.tokens]
    table = scored(static, params, jnp.asarray([row + [0] * (96 - len(row))]), jnp.asarray([len(row)]), jnp.asarray([agent]))
    np.testing.assert_allclose(sample.logp_model, np.asarray(table)[0, len(history) - 1 : len(row) - 1], atol=1e-4)
    return len(sample.tokens)


def same(a, b):
    assert a.tokens == b.tokens and a.stop == b.stop
    np.testing.assert_array_equal(a.logp_sample, b.logp_sample)
    np.testing.assert_array_equal(a.logp_model, b.logp_model)
