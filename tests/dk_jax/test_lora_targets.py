"""LoRA on chosen projections: where its arrays are, what trains, and that folding it in changes nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dk_jax.interop import huggingface
from dk_jax.models import BackboneConfig, abstract_backbone, build_backbone, hidden_states, logits, merge_lora, partition, trainable_mask
from dk_jax.models.config import PROJECTIONS

CFG = BackboneConfig(
    family="qwen3", vocab_size=61, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=48, tie_embeddings=False,
    init_std=0.15, lora_rank=3, lora_alpha=6.0,
)  # fmt: skip
SETS = [("q", "v"), ("o", "gate", "down"), PROJECTIONS]


def _trained(cfg):
    """A backbone whose LoRA does something."""
    static, params = build_backbone(cfg, jax.random.key(0))
    rng = np.random.default_rng(0)
    return static, jax.tree.map(lambda x: x if np.any(x) else jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype), params)


@functools.partial(jax.jit, static_argnums=0)
def _computed(static, params, tokens):
    return logits(static, params, hidden_states(static, params, tokens, jnp.array([9, 6])), jnp.array([0, 1]))


def _logits(static, params):
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, static.cfg.vocab_size)
    return _computed(static, params, tokens)


def _adapted(tree):
    return {path[-2].key for path, _ in jax.tree_util.tree_leaves_with_path(tree) if path[-1].key in ("lora_a", "lora_b")}


@pytest.mark.parametrize("targets", SETS, ids="+".join)
def test_lora_is_on_the_chosen_projections_alone(targets):
    static, params = abstract_backbone(dataclasses.replace(CFG, lora_targets=targets))
    assert _adapted(params) == set(targets)
    trainable, frozen = partition(params, trainable_mask(static, params, "lora"))
    assert len(jax.tree.leaves(trainable)) == 2 * len(targets) and _adapted(trainable) == set(targets)
    assert not _adapted(frozen)


@pytest.mark.parametrize("targets", SETS, ids="+".join)
def test_the_merged_export_has_the_logits_of_the_unmerged_network(targets, tmp_path):
    static, params = _trained(dataclasses.replace(CFG, lora_targets=targets))
    merged, folded = merge_lora(static, params)
    huggingface.save(tmp_path, merged.cfg, folded)
    cfg, loaded = huggingface.load(tmp_path, init_std=CFG.init_std)
    assert cfg == dataclasses.replace(CFG, lora_rank=0, lora_alpha=cfg.lora_alpha, norm_eps=cfg.norm_eps) and not _adapted(loaded)
    expected = _logits(static, params)
    assert np.max(np.abs(expected - _logits(abstract_backbone(cfg)[0], loaded))) <= 1e-5
    assert np.max(np.abs(expected - _logits(merged, _without_lora(params)))) > 1e-2


def _without_lora(params):
    """The parameters with their LoRA thrown away, as it would be if a merge forgot it."""

    def bare(node):
        return {name: bare(child) if isinstance(child, dict) else child for name, child in node.items() if not name.startswith("lora_")}

    return bare(params)


def test_the_default_is_all_seven():
    """As it was before there was a choice, so configurations and checkpoints of earlier runs stay valid."""
    cfg = dataclasses.replace(CFG, lora_targets=BackboneConfig.lora_targets)
    assert cfg == CFG and cfg.lora_targets == ("q", "k", "v", "o", "gate", "up", "down")
    assert _adapted(abstract_backbone(CFG)[1]) == set(cfg.lora_targets)


def test_without_a_rank_the_targets_say_nothing():
    bare = build_backbone(dataclasses.replace(CFG, lora_rank=0), jax.random.key(0))[1]
    same = build_backbone(dataclasses.replace(CFG, lora_rank=0, lora_targets=("q",)), jax.random.key(0))[1]
    jax.tree.map(np.testing.assert_array_equal, bare, same)


def test_order_and_kind_of_sequence_make_no_difference():
    cfg = dataclasses.replace(CFG, lora_targets=["down", "q"])
    assert cfg == dataclasses.replace(CFG, lora_targets=("q", "down")) and hash(cfg) == hash(dataclasses.replace(cfg))
    assert cfg.lora_targets == ("q", "down")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q", "q_proj"), "no projection is called 'q_proj'; choose out of .*'gate'"),
        (("q", "q"), "twice"),
        ((), r"lora_rank=3 with lora_targets=\(\)"),
        ("gate", "the string 'gate'"),
    ],
)
def test_impossible_targets_are_refused(targets, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CFG, lora_targets=targets)
