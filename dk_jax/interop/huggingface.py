"""Hugging Face checkpoints (config.json, safetensors) of Llama and Qwen3, to our parameters and back.

A round trip gives byte-equal tensors: the only operations are transposes, stacking, and the cast to
param_dtype, which is exact when it widens. A checkpoint that does not fit is refused by its config and its headers, before any
tensor is read. Not covered: attention biases, scaled RoPE and sliding windows, which are refused.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dk_jax.interop.placing import Arrays, place
from dk_jax.interop.tensor_files import TensorFiles, check_free, write_tensors
from dk_jax.interop.tensor_names import Stored, check_tensors, leaf_at, stored_parameters
from dk_jax.models.backbone import Params, abstract_backbone
from dk_jax.models.config import BackboneConfig
from dk_jax.models.sharding import RULES, param_shardings

MAX_SHARD_BYTES = 4 << 30
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip
"""Files that make a checkpoint usable elsewhere and are none of the network's business."""


class Vocabulary(Protocol):
    """What `check_vocabulary` asks of a codec."""

    vocab_size: int


def config_from_hf(hf: Mapping[str, Any], **overrides) -> BackboneConfig:
    """Reads a Hugging Face config.json (transformers 4 or 5) into a BackboneConfig.

    Args:
      hf: the decoded JSON.
      **overrides: BackboneConfig fields to set, whatever the JSON says (compute_dtype, lora_rank, tie_embeddings, ...).

    Raises:
      ValueError: for a model that this backbone would compute wrongly, or a number that is not there, naming the field.
    """
    family = hf.get("model_type")
    if family not in ("llama", "qwen3"):
        raise ValueError(f"config.json: model_type is {family!r}; supported are 'llama' and 'qwen3'")
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    refused = {
        "attention_bias": hf.get("attention_bias", False),
        "mlp_bias": hf.get("mlp_bias", False),
        "use_sliding_window": hf.get("use_sliding_window", False),
        "layer_types": set(hf.get("layer_types") or ()) - {"full_attention"},
        "rope_type": rope.get("rope_type", rope.get("type", "default")) != "default",
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
    }
    for field, used in refused.items():
        if used:
            raise ValueError(f"config.json: {field} is set to a kind that this backbone does not implement")
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rms_norm_eps")
    missing = [field for field in needed if hf.get(field) is None]
    if missing:
        raise ValueError(f"config.json: {', '.join(missing)} missing; without it the network is not known")
    d_model, n_heads = hf["hidden_size"], hf["num_attention_heads"]
    fields = dict(
        family=family,
        vocab_size=hf["vocab_size"],
        d_model=d_model,
        n_layers=hf["num_hidden_layers"],
        n_heads=n_heads,
        n_kv_heads=hf.get("num_key_value_heads") or n_heads,
        head_dim=hf.get("head_dim") or d_model // n_heads,
        d_ff=hf["intermediate_size"],
        rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0),
        norm_eps=hf["rms_norm_eps"],
        tie_embeddings=hf.get("tie_word_embeddings", False),
    )
    return BackboneConfig(**(fields | overrides))


def config_to_hf(cfg: BackboneConfig, dtype: str | None = None) -> dict[str, Any]:
    """The config.json that makes transformers build the same network."""
    return {
        "architectures": ["LlamaForCausalLM" if cfg.family == "llama" else "Qwen3ForCausalLM"],
        "model_type": cfg.family,
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.d_ff,
        "rope_theta": cfg.rope_theta,
        "rms_norm_eps": cfg.norm_eps,
        "tie_word_embeddings": cfg.tie_embeddings,
        "hidden_act": "silu",
        "torch_dtype": dtype or cfg.param_dtype,
    }


def check_vocabulary(cfg: BackboneConfig, codec: Vocabulary) -> None:
    """Whether the network has a row for every token. It may have more: published tables are padded.

    Raises:
      ValueError: naming both numbers.
    """
    if codec.vocab_size > cfg.vocab_size:
        raise ValueError(
            f"the tokenizer has {codec.vocab_size} tokens and the network's table {cfg.vocab_size} rows (vocab_size); "
            f"ids from {cfg.vocab_size} on have none. They are not of the same model"
        )


def load(
    directory: str | Path,
    *,
    mesh: Mesh | None = None,
    rules: Mapping[str, str | None] = RULES,
    key: jax.Array | None = None,
    **overrides,
) -> tuple[BackboneConfig, Params]:
    """Loads a local checkpoint directory (config.json, *.safetensors), tensor by tensor.

    With a mesh, every device is sent its own slice alone: a model larger than a device's memory, or than the host's, loads.
    For what the host holds meanwhile see dk_jax.interop.placing.

    Args:
      directory: as `save_pretrained` or a hub snapshot leaves it.
      mesh: of `sharding.make_mesh`; None puts everything on the default device.
      rules: logical axes to mesh axes.
      key: draws agent heads and LoRA; `jax.random.key(0)` by default.
      **overrides: BackboneConfig fields to set (compute_dtype, param_dtype, head_rank, lora_rank, ...).

    Raises:
      FileNotFoundError: for a directory without a checkpoint, or without one of its shards.
      ValueError: for a checkpoint, a mesh or overrides that do not fit together, before any tensor is read.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(f"{directory} has no config.json; give the directory of a Hugging Face checkpoint")
    cfg = config_from_hf(json.loads((directory / "config.json").read_text(encoding="utf-8")), **overrides)
    shardings = None if mesh is None else param_shardings(abstract_backbone(cfg)[0], mesh, rules)
    files = TensorFiles(directory)
    check_tensors(cfg, files.shapes, files.types, f"checkpoint {directory}")
    return cfg, place(cfg, files, shardings, jax.random.key(0) if key is None else key)


def params_from_state_dict(cfg: BackboneConfig, tensors: Mapping[str, np.ndarray], key: jax.Array | None = None) -> Params:
    """Our parameter tree, on the default device, from tensors under their Hugging Face names.

    Args:
      cfg: the network; tensors are cast to its param_dtype.
      tensors: name -> array, every tensor that the network needs and no other.
      key: draws what a checkpoint does not hold (agent heads, LoRA); `jax.random.key(0)` by default.

    Raises:
      ValueError: naming tensors that are missing, have a wrong shape, or are not understood.
    """
    source = Arrays(tensors)
    check_tensors(cfg, source.shapes, source.types)
    return place(cfg, source, None, jax.random.key(0) if key is None else key)


def state_dict_from_params(
    cfg: BackboneConfig, params: Params, dtype: str | None = None, drop_heads: bool = False
) -> dict[str, np.ndarray]:
    """Tensors under their Hugging Face names.

    Args:
      cfg, params: the network; LoRA must have been folded in with `merge_lora`.
      dtype: "float32" or "bfloat16" to cast to; default param_dtype.
      drop_heads: leave trained agent heads behind, which the format has no place for.

    Raises:
      ValueError: if LoRA, trained agent heads or shifted heads would be lost.
    """
    _check_exportable(cfg, params, drop_heads)
    return {name: _exported(params, entry, layer, dtype or cfg.param_dtype) for name, entry, layer in _tensors(cfg)}


def save(
    directory: str | Path,
    cfg: BackboneConfig,
    params: Params,
    dtype: str | None = None,
    drop_heads: bool = False,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    companions_from: str | Path | None = None,
) -> None:
    """Writes config.json and safetensors that transformers loads; in host memory is one file's worth at a time.

    Args:
      directory: without safetensors; made if it is not there.
      cfg, params, dtype, drop_heads: as `state_dict_from_params`. Parameters may be sharded over devices of this process.
      max_shard_bytes: of one file; more than one get an index.
      companions_from: a directory whose tokenizer and generation_config.json (COMPANIONS) are copied, as far as there.

    Raises:
      ValueError: if something of the network would be lost.
      FileExistsError: if the directory holds safetensors already.
    """
    directory, dtype = Path(directory), dtype or cfg.param_dtype
    _check_exportable(cfg, params, drop_heads)
    check_free(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_to_hf(cfg, dtype), indent=2) + "\n", encoding="utf-8")
    for name in COMPANIONS if companions_from else ():
        if (Path(companions_from) / name).is_file():
            shutil.copyfile(Path(companions_from) / name, directory / name)
    tensors = {name: (entry, layer) for name, entry, layer in _tensors(cfg)}
    sizes = {name: math.prod(entry.shape) * jnp.dtype(dtype).itemsize for name, (entry, _) in tensors.items()}
    write_tensors(directory, sizes, lambda name: _exported(params, *tensors[name], dtype), max_shard_bytes)


def _check_exportable(cfg: BackboneConfig, params: Params, drop_heads: bool) -> None:
    if cfg.lora_rank:
        raise ValueError("export: LoRA branches have no place in this format; fold them in with merge_lora first")
    if cfg.shifted_kv_heads:
        raise ValueError(f"export: shifted_kv_heads={cfg.shifted_kv_heads} have no place in this format; transformers would not shift")
    if cfg.head_rank and not drop_heads and np.any(np.asarray(params["heads"]["up"])):
        raise ValueError("export: trained agent heads have no place in this format; pass drop_heads=True to lose them")


def _tensors(cfg: BackboneConfig) -> Iterator[tuple[str, Stored, int | None]]:
    """Name, parameter and layer (None for what has no layers) of every tensor, layer by layer."""
    entries = stored_parameters(cfg)
    yield from ((entry.names[0], entry, None) for entry in entries if not entry.stacked)
    for layer in range(cfg.n_layers):
        yield from ((entry.names[layer], entry, layer) for entry in entries if entry.stacked)


def _exported(params: Params, entry: Stored, layer: int | None, dtype: str) -> np.ndarray:
    leaf = leaf_at(params, entry.path)
    array = np.asarray(leaf if layer is None else leaf[layer]).astype(jnp.dtype(dtype))
    return np.ascontiguousarray(array.T if entry.transposed else array)
