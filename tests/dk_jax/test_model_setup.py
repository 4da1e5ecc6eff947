"""Where a run's weights come from, and what they are held against before memory is taken."""

from __future__ import annotations

import dataclasses
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from configs.demo import get_config as demo
from dk_jax.interop import huggingface
from dk_jax.models import BackboneConfig, build_backbone
from dk_jax.models import presets as known
from dk_jax.models.sharding import AXES
from dk_jax.train import model as models
from dk_jax.train.checks import check_config
from dk_jax.train.setup import ConfigError
from dk_jax.train.workdir import remember_config, remember_weights

CFG = BackboneConfig(
    family="qwen3", vocab_size=300, d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=24, rope_theta=1e6, norm_eps=1e-6,
    tie_embeddings=True,
)  # fmt: skip
CODEC = SimpleNamespace(vocab_size=290)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    static, params = build_backbone(CFG, jax.random.key(3))
    huggingface.save(directory, CFG, params)
    return directory, params


def recipe(init, source="", **changes):
    cfg = demo()
    cfg.model.update(dict(init=init, source=str(source), head_rank=2, **changes))
    return cfg


def test_a_checkpoint_is_loaded_and_what_the_recipe_adds_is_drawn(checkpoint):
    directory, params = checkpoint
    model = models.make_model(recipe("huggingface", directory, train="lora", lora_rank=2, lora_targets=("q", "v")), CODEC)
    np.testing.assert_array_equal(model.frozen["embed"]["table"], params["embed"]["table"])
    np.testing.assert_array_equal(model.frozen["layers"]["mlp"]["up"]["kernel"], params["layers"]["mlp"]["up"]["kernel"])
    adapted = {"/".join(e.key for e in path[:-1]) for path, _ in jax.tree_util.tree_leaves_with_path(model.trainable)}
    assert adapted == {"heads", "layers/attention/q", "layers/attention/v"}
    assert model.config.head_rank == 2 and model.mesh.size == 1


def test_a_published_models_checkpoint_is_the_one_that_was_named(checkpoint, monkeypatch):
    directory, params = checkpoint
    monkeypatch.setitem(known.PRESETS, "tiny", CFG)
    monkeypatch.setitem(known.PRESETS, "other", dataclasses.replace(CFG, rope_theta=5e6, d_ff=32))
    model = models.make_model(recipe("tiny", directory), CODEC)
    np.testing.assert_array_equal(model.trainable["embed"]["table"], params["embed"]["table"])
    drawn = models.make_model(recipe("tiny", "random"), CODEC)
    assert np.any(np.asarray(drawn.trainable["embed"]["table"]) != params["embed"]["table"])
    with pytest.raises(ConfigError, match="is no other: it differs in d_ff, rope_theta"):
        models.make_model(recipe("other", directory), CODEC)


@pytest.mark.parametrize(
    ("init", "source", "says"),
    [("qwen3-8b", "", "needs its weights: --config.model.source=DIRECTORY"), ("huggingface", "", "has no config.json"),
     ("qwen3-8b", "/nowhere", "'/nowhere' has no config.json")],
)  # fmt: skip
def test_weights_that_are_not_there_are_asked_for(init, source, says):
    cfg = recipe(init, source)
    check_config(cfg)  # the recipe itself is sound
    with pytest.raises(ConfigError, match=says):
        models.check_source(cfg.model)


def test_unknown_models_and_codecs_are_named():
    with pytest.raises(ConfigError, match="model.init is 'qwen9': use 'scratch', 'smollm2', 'huggingface' or one of qwen3-0.6b"):
        check_config(recipe("qwen9"))
    cfg = recipe("scratch")
    cfg.codec.kind = "model"
    with pytest.raises(ConfigError, match="'model' where the weights bring a tokenizer"):
        check_config(cfg)


def test_a_network_with_fewer_rows_than_the_codec_has_tokens_is_refused(checkpoint):
    with pytest.raises(ValueError, match="301 tokens and the network's table 300 rows"):
        models.make_model(recipe("huggingface", checkpoint[0]), SimpleNamespace(vocab_size=301))


@pytest.mark.parametrize(
    ("mesh", "says"),
    [(dict(data=2, fsdp=1, tensor=1), "needs 2 devices, JAX has 1: cpu"), (dict(data=0, fsdp=1, tensor=4), "needs 4 devices, JAX has 1"),
     (dict(data=1, fsdp=0, tensor=1), "fsdp and tensor must be at least 1")],
)  # fmt: skip
def test_meshes_that_this_machine_does_not_have(mesh, says):
    cfg = demo()
    cfg.learner.mesh.update(mesh)
    with pytest.raises(ConfigError, match=says):
        models.make_mesh_of(cfg)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({}, "rollout.max_rows=36 rows can't be spread"), ({"rollout.max_rows": 40}, "sft.microbatch=4 rows"),
     ({"rollout.max_rows": 40, "sft.microbatch": 16}, "learner.streams=2 with 16 devices: use 1")],
)  # fmt: skip
def test_rows_and_streams_fit_the_mesh(changes, says):
    cfg = demo()
    cfg.sft.microbatch = 4
    for key, value in changes.items():
        group, name = key.split(".")
        cfg[group][name] = value
    with pytest.raises(ConfigError, match=says):
        models.check_rows(cfg, AbstractMesh((4, 2, 2), AXES))


def test_a_run_goes_on_with_the_checkpoint_it_began_with(checkpoint, tmp_path):
    directory, params = checkpoint
    cfg = recipe("huggingface", directory)
    remember_weights(cfg, tmp_path)
    moved = shutil.copytree(directory, tmp_path / "moved")
    remember_weights(recipe("huggingface", moved), tmp_path)
    other = tmp_path / "other"
    huggingface.save(other, CFG, jax.tree.map(lambda leaf: leaf * 1.001, params))
    with pytest.raises(ConfigError, match="was started with the weights of .* but .*other holds others"):
        remember_weights(recipe("huggingface", other), tmp_path)


def test_a_run_may_go_on_with_other_devices(tmp_path):
    cfg = demo()
    remember_config(cfg, tmp_path)
    cfg.learner.mesh.update(dict(data=1, fsdp=4, tensor=2))
    remember_config(cfg, tmp_path)


@pytest.mark.parametrize(
    ("asked", "platform", "arithmetic", "head_dim", "gets"),
    [
        ("auto", "gpu", "bfloat16", 64, "cudnn"),
        ("auto", "gpu", "float32", 64, "xla"),  # cuDNN's kernel is for bfloat16
        ("auto", "gpu", "bfloat16", 12, "xla"),  # and for heads of a multiple of 8
        ("auto", "cpu", "bfloat16", 64, "xla"),
        ("auto", "tpu", "bfloat16", 64, "xla"),
        ("blocks", "gpu", "bfloat16", 64, "blocks"),
    ],
)
def test_attention_in_training_is_what_platform_and_model_allow_where_the_recipe_leaves_it_open(asked, platform, arithmetic, head_dim, gets):
    cfg = recipe("scratch", attention=asked, compute_dtype=arithmetic, head_dim=head_dim)
    assert models.scratch_config(cfg.model, 300, platform).attention == gets
    if platform == "cpu":
        assert models.scratch_config(cfg.model, 300).attention == gets


def test_an_attention_that_there_is_not_is_named():
    with pytest.raises(ValueError, match="attention is 'flash'; choose one of"):
        models.scratch_config(recipe("scratch", attention="flash").model, 300)
    with pytest.raises(ValueError, match="attention='cudnn' needs compute_dtype='bfloat16'"):
        models.scratch_config(recipe("scratch", attention="cudnn").model, 300)
