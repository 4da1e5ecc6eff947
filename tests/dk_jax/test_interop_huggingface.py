"""Hugging Face checkpoints: same logits in float32, and byte-equal tensors after a round trip."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dk_jax.interop import huggingface
from dk_jax.interop.tensor_files import INDEX
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


def _hf_model(family: str, tied: bool, dtype=None, **changes):
    torch.manual_seed(0)
    if family == "llama":
        config = transformers.LlamaConfig(**{**COMMON, "tie_word_embeddings": tied, "rope_theta": 50_000.0, **changes})
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Qwen3Config(**{**COMMON, "head_dim": 16, "tie_word_embeddings": tied, "rope_theta": 1e6, **changes})
        model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # the default of ones would hide a norm that is not applied
                parameter.uniform_(0.5, 1.5)
    return model.to(dtype or torch.float32).eval()


@functools.partial(jax.jit, static_argnums=0)
def _logits(static, params, tokens, lengths, agents):
    return logits(static, params, hidden_states(static, params, tokens, lengths), agents)


@pytest.mark.parametrize(
    ("family", "tied", "changes"),
    [
        ("llama", True, {}),
        ("llama", False, {}),
        ("qwen3", True, {}),
        ("qwen3", False, {}),
        ("llama", True, {"num_key_value_heads": 6, "rms_norm_eps": 1e-3}),  # a key/value head a query head, as SmolLM2-1.7B
        ("llama", False, {"num_key_value_heads": 1, "head_dim": 12}),  # one for all, and N x H apart from D
        ("qwen3", True, {"num_key_value_heads": 3, "head_dim": 4, "num_hidden_layers": 1}),
        ("qwen3", False, {"num_attention_heads": 12, "head_dim": 32, "rope_theta": 1e4}),
    ],
)
def test_logits_equal_those_of_transformers(family, tied, changes, tmp_path):
    """Rows of several lengths, each compared with transformers given that row alone."""
    model = _hf_model(family, tied, **changes)
    model.save_pretrained(tmp_path)
    cfg, params = huggingface.load(tmp_path, head_rank=2, lora_rank=2)
    static, shapes = abstract_backbone(cfg)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)

    lengths = [40, 17, 1]
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (3, 40))
    got = np.asarray(_logits(static, params, jnp.asarray(tokens), jnp.asarray(lengths), jnp.arange(3)))
    for row, length in enumerate(lengths):
        with torch.no_grad():
            expected = model(torch.tensor(tokens[row : row + 1, :length])).logits[0].numpy()
        assert np.std(expected) > 0.3
        assert np.max(np.abs(expected - got[row, :length])) <= 1e-4


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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_transformers_loads_what_we_save_in_shards(family, tied, tmp_path):
    """There and back through several files each way: what transformers wrote, what we write, and the network in between."""
    model = _hf_model(family, tied)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    cfg, params = huggingface.load(tmp_path / "theirs")
    huggingface.save(tmp_path / "ours", cfg, params, max_shard_bytes=50_000)
    files = sorted(path.name for path in (tmp_path / "ours").iterdir())
    n = len(files) - 2
    assert n > 3 and files == ["config.json", *(f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)), INDEX]

    tensors = [
        {name: array for path in (tmp_path / side).glob("*.safetensors") for name, array in load_file(path).items()}
        for side in ("theirs", "ours")
    ]
    assert tensors[0].keys() == tensors[1].keys()
    for name, array in tensors[0].items():
        assert array.dtype == tensors[1][name].dtype and array.tobytes() == tensors[1][name].tobytes(), name

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, again(tokens).logits)


def test_a_tied_checkpoint_may_hold_its_unembedding_if_it_is_the_embedding(tmp_path):
    """As published Qwen3-0.6B does."""
    static, params = build_backbone(huggingface.config_from_hf(HF_LLAMA), jax.random.key(0))
    tensors = huggingface.state_dict_from_params(static.cfg, params)
    double = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    jax.tree.map(np.testing.assert_array_equal, huggingface.params_from_state_dict(static.cfg, double), params)
    double["lm_head.weight"] = double["lm_head.weight"].copy()
    double["lm_head.weight"][-1, -1] += 1
    with pytest.raises(ValueError, match="lm_head.* differs .* tie_embeddings=False"):
        huggingface.params_from_state_dict(static.cfg, double)
    (tmp_path / "config.json").write_text(json.dumps(HF_LLAMA))
    save_file(double, tmp_path / "model.safetensors")
    cfg, untied = huggingface.load(tmp_path, tie_embeddings=False)
    assert not cfg.tie_embeddings
    np.testing.assert_array_equal(untied["unembed"]["table"], double["lm_head.weight"])


def test_what_is_not_the_network_s_comes_along_if_asked(tmp_path):
    static, params = build_backbone(huggingface.config_from_hf(HF_LLAMA), jax.random.key(0))
    (tmp_path / "theirs").mkdir()
    for name in ("generation_config.json", "tokenizer.json", "README.md"):
        (tmp_path / "theirs" / name).write_text(json.dumps({"eos_token_id": 7, "of": name}))
    huggingface.save(tmp_path / "ours", static.cfg, params, companions_from=tmp_path / "theirs")
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {
        "config.json", "model.safetensors", "generation_config.json", "tokenizer.json",
    }  # fmt: skip
    assert json.loads((tmp_path / "ours" / "tokenizer.json").read_text())["of"] == "tokenizer.json"


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

    def test_shifted_heads_are_not_dropped_in_silence(self, tmp_path):
        static, params = self._exported(shifted_kv_heads=1)
        with pytest.raises(ValueError, match="shifted_kv_heads=1"):
            huggingface.save(tmp_path / "export", static.cfg, params)
        assert not (tmp_path / "export").exists()

    def test_an_export_over_another_one(self, tmp_path):
        static, params = self._exported()
        huggingface.save(tmp_path, static.cfg, params)
        before = (tmp_path / "model.safetensors").read_bytes()
        with pytest.raises(FileExistsError, match="already holds .*model.safetensors"):
            huggingface.save(tmp_path, static.cfg, params, max_shard_bytes=50_000)
        assert (tmp_path / "model.safetensors").read_bytes() == before

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
            ({"attention_bias": True}, "attention_bias"),
            ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type"),
            ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
            ({"hidden_size": None, "rms_norm_eps": None}, "hidden_size, rms_norm_eps missing"),
        ],
    )
    def test_a_network_we_do_not_implement(self, change, message):
        with pytest.raises(ValueError, match=rf"config\.json: {message}"):
            huggingface.config_from_hf({**HF_LLAMA, **change})


HF_LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    **{k: v for k, v in COMMON.items() if k != "initializer_range"},
    "head_dim": 8,
}
