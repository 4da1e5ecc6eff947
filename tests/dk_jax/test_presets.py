"""Named configurations: the published sizes, without taking memory, and the config.json they stand for."""

import jax
import pytest

from dk_jax.interop.huggingface import config_from_hf, config_to_hf
from dk_jax.models import abstract_backbone
from dk_jax.models.presets import PRESETS, parameter_count, preset

# As counted from the published weights, a tied unembedding once.
PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name):
    assert parameter_count(preset(name)) == PUBLISHED[name]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract_backbone(preset(name))[1]))


def test_every_preset_is_checked():
    assert PRESETS.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_its_config_json(name):
    assert config_from_hf(config_to_hf(preset(name))) == preset(name)


def test_overrides_and_the_parameters_they_add():
    cfg = preset("smollm2-135m", lora_rank=4, lora_targets=("q", "v"), head_rank=2)
    lora = 30 * 4 * ((576 + 576) + (576 + 192))
    assert parameter_count(cfg) == PUBLISHED["smollm2-135m"] + lora + 3 * 2 * 2 * 576


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="'qwen3-7b'; there are qwen3-0.6b, .*smollm2-1.7b"):
        preset("qwen3-7b")
    with pytest.raises(TypeError, match="lora_rang"):
        preset("qwen3-8b", lora_rang=4)
