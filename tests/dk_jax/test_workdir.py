"""What may change when a run is resumed: where and how long, and not what is computed."""

from __future__ import annotations

import json

import pytest

from configs.demo import get_config as demo
from configs.smollm2_triton import get_config as smollm2
from dk_jax.train.setup import ConfigError
from dk_jax.train.workdir import remember_config, remember_weights


def test_a_run_is_resumed_with_its_own_config_only(tmp_path):
    cfg = demo()
    remember_config(cfg, tmp_path)
    remember_config(cfg, tmp_path)
    cfg.rl.lr = 1.0
    with pytest.raises(ConfigError, match=r"rl\.lr: 0\.\d+ -> 1\.0\)\. Use that config, or another --workdir"):
        remember_config(cfg, tmp_path)


@pytest.mark.parametrize("decay", [False, True])
def test_more_steps_may_be_asked_for_where_no_schedule_depends_on_their_number(tmp_path, decay):
    cfg = demo()
    cfg.rl.decay = decay
    remember_config(cfg, tmp_path)
    cfg.rl.steps += 10
    cfg.sandbox.workers += 1
    if decay:
        with pytest.raises(ConfigError, match="rl.steps"):
            remember_config(cfg, tmp_path)
    else:
        remember_config(cfg, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("sandbox.device", "cuda:1", True),
        ("sandbox.device", "cpu", False),
        ("sandbox.isolation", "standard", True),
        ("sandbox.language", "cuda", False),
        ("sandbox.timing", "full", False),
        ("learner.memory_fraction", 0.3, True),
        ("learner.length_step", 512, False),
        ("model.compute_dtype", "float32", False),
    ],
)
def test_only_what_does_not_change_results_may_be_changed(tmp_path, key, value, allowed):
    cfg = smollm2()
    remember_config(cfg, tmp_path)
    group, name = key.split(".")
    cfg[group][name] = value
    if not allowed:
        with pytest.raises(ConfigError, match=f"{group}.{name}: .* -> {value}"):
            remember_config(cfg, tmp_path)
    else:
        remember_config(cfg, tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())[group][name] == value


@pytest.fixture
def weights(tmp_path):
    """A workdir, two files of equal and one of other content."""
    for name, content in (("a.gguf", b"one"), ("b.gguf", b"one"), ("c.gguf", b"two")):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "run").mkdir()
    return tmp_path


def from_file(path):
    cfg = smollm2()
    cfg.model.source = str(path)
    return cfg


def test_weights_may_lie_elsewhere_and_not_be_others(weights):
    workdir = weights / "run"
    for name in ("a.gguf", "a.gguf", "b.gguf"):
        cfg = from_file(weights / name)
        remember_config(cfg, workdir)
        remember_weights(cfg, workdir)
        (workdir / "codec").mkdir(exist_ok=True)
    cfg = from_file(weights / "c.gguf")
    remember_config(cfg, workdir)
    with pytest.raises(ConfigError, match=r"started with the weights of 'a\.gguf' .* but .*c\.gguf holds others .*Give that file"):
        remember_weights(cfg, workdir)


def test_a_file_whose_content_was_replaced_is_refused(weights):
    workdir = weights / "run"
    remember_weights(from_file(weights / "a.gguf"), workdir)
    (weights / "a.gguf").write_bytes(b"two")
    with pytest.raises(ConfigError, match="holds others"):
        remember_weights(from_file(weights / "a.gguf"), workdir)


def test_another_file_is_refused_where_a_run_that_loaded_weights_does_not_know_them(weights):
    workdir = weights / "run"
    remember_config(from_file(weights / "a.gguf"), workdir)
    (workdir / "codec").mkdir()
    with pytest.raises(ConfigError, match=r"model\.source"):
        remember_config(from_file(weights / "b.gguf"), workdir)


def test_a_model_from_scratch_has_no_weights_to_remember(tmp_path):
    remember_weights(demo(), tmp_path)
    assert not list(tmp_path.iterdir())
