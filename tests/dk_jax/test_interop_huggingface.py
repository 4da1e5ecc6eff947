"""Hugging Face checkpoints: same logits in float32, and byte-equal tensors after a round trip."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dk_jax.interop import huggingface
from dk_jax.models import abstract_backbone, build_backbone, hidden_states, logits, merge_lora

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def _hf_model(family: str, tied: bool, dtype=None):
    torch.manual_seed(0)
    if family == "llama":
        config = transformers.LlamaConfig(**COMMON, tie_word_embeddings=tied, rope_theta=50_000.0)
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=tied, rope_theta=1e6)
        model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # the default of ones would hide a norm that is not applied
                parameter.uniform_(0.5, 1.5)
    return model.to(dtype or torch.float32).eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_equal_those_of_transformers(family, tied, tmp_path):
    model = _hf_model(family, tied)
    model.save_pretrained(tmp_path)
    cfg, params = huggingface.load(tmp_path, head_rank=2, lora_rank=2)
    static, shapes = abstract_backbone(cfg)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)

    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 40))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    hidden = hidden_states(static, params, jnp.asarray(tokens), jnp.array([40, 40]))
    got = logits(static, params, hidden, jnp.array([0, 1]))
    assert np.std(expected) > 0.3
    assert np.max(np.abs(expected - np.asarray(got))) <= 1e-4


@pytest.mark.parametrize(
    ("family", "tied", "dtype"), [("llama", True, "bfloat16"), ("qwen3", False, "float32")]
)
def test_a_round_trip_is_byte_equal(family, tied, dtype, tmp_path):
    _hf_model(family, tied, getattr(torch, dtype)).save_pretrained(tmp_path / "theirs")
    cfg, params = huggingface.load(tmp_path / "theirs")
    huggingface.save(tmp_path / "ours", cfg, params, dtype=dtype)

    from safetensors.torch import load_file

    theirs, ours = (load_file(tmp_path / d / "model.safetensors") for d in ("theirs", "ours"))
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(tensor.view(torch.uint8), ours[name].view(torch.uint8)), name


def test_transformers_loads_what_we_save(tmp_path):
    model = _hf_model("qwen3", True)
    model.save_pretrained(tmp_path / "theirs")
    cfg, params = huggingface.load(tmp_path / "theirs")
    huggingface.save(tmp_path / "ours", cfg, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, again(tokens).logits)


class TestRefusals:
    def _exported(self, **fields):
        cfg = dataclasses.replace(huggingface.config_from_hf(HF_LLAMA), **fields)
        static, params = build_backbone(cfg, jax.random.key(0))
        return static, params

    def test_lora_is_not_dropped_in_silence(self):
        static, params = self._exported(lora_rank=2)
        with pytest.raises(ValueError, match="merge_lora"):
            huggingface.state_dict_from_params(static.cfg, params)
        static, params = merge_lora(static, params)
        huggingface.state_dict_from_params(static.cfg, params)

    def test_trained_heads_are_not_dropped_in_silence(self):
        static, params = self._exported(head_rank=2)
        huggingface.state_dict_from_params(static.cfg, params)
        params["heads"]["up"] = params["heads"]["up"] + 1
        with pytest.raises(ValueError, match="drop_heads"):
            huggingface.state_dict_from_params(static.cfg, params)
        huggingface.state_dict_from_params(static.cfg, params, drop_heads=True)

    @pytest.mark.parametrize(
        "change",
        [{"model_type": "gpt2"}, {"attention_bias": True}, {"rope_scaling": {"rope_type": "llama3"}}],
    )
    def test_a_network_we_do_not_implement(self, change):
        with pytest.raises(ValueError, match=r"config\.json"):
            huggingface.config_from_hf({**HF_LLAMA, **change})

    def test_missing_misshapen_and_unknown_tensors(self):
        static, params = self._exported()
        tensors = huggingface.state_dict_from_params(static.cfg, params)
        name = "model.layers.0.mlp.up_proj.weight"
        with pytest.raises(ValueError, match="up_proj.*missing"):
            huggingface.params_from_state_dict(static.cfg, {k: v for k, v in tensors.items() if k != name})
        with pytest.raises(ValueError, match="up_proj.*shape"):
            huggingface.params_from_state_dict(static.cfg, {**tensors, name: tensors[name].T})
        with pytest.raises(ValueError, match="not understood"):
            huggingface.params_from_state_dict(static.cfg, {**tensors, "extra": tensors[name]})

    def test_a_directory_without_a_checkpoint(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            huggingface.load(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(HF_LLAMA))
        with pytest.raises(FileNotFoundError, match="safetensors"):
            huggingface.load(tmp_path)


HF_LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    **{k: v for k, v in COMMON.items() if k != "initializer_range"},
    "head_dim": 8,
}
