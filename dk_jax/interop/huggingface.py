"""Hugging Face checkpoints (config.json, safetensors) of Llama and Qwen3, to our parameters and back.

A round trip gives byte-equal tensors: the only operations are transposes, stacking, and the cast to
param_dtype, which is exact when it widens. Not covered: attention biases, scaled RoPE and sliding windows,
which are refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

from dk_jax.models.backbone import Backbone, Params
from dk_jax.models.config import BackboneConfig

# name inside a Hugging Face layer -> (path inside our layer, whether the matrix is stored [out, in])
_LAYER_TENSORS = {
    "input_layernorm.weight": (("attention_norm", "scale"), False),
    "self_attn.q_proj.weight": (("attention", "q", "kernel"), True),
    "self_attn.k_proj.weight": (("attention", "k", "kernel"), True),
    "self_attn.v_proj.weight": (("attention", "v", "kernel"), True),
    "self_attn.o_proj.weight": (("attention", "o", "kernel"), True),
    "post_attention_layernorm.weight": (("mlp_norm", "scale"), False),
    "mlp.gate_proj.weight": (("mlp", "gate", "kernel"), True),
    "mlp.up_proj.weight": (("mlp", "up", "kernel"), True),
    "mlp.down_proj.weight": (("mlp", "down", "kernel"), True),
}
_QWEN3_TENSORS = {
    "self_attn.q_norm.weight": (("attention", "q_norm", "scale"), False),
    "self_attn.k_norm.weight": (("attention", "k_norm", "scale"), False),
}
_EMBEDDING, _NORM, _UNEMBEDDING = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_MAX_SHARD_BYTES = 4 << 30


def config_from_hf(hf: Mapping[str, Any], **overrides) -> BackboneConfig:
    """Reads a Hugging Face config.json (transformers 4 or 5) into a BackboneConfig.

    Args:
      hf: the decoded JSON.
      **overrides: further BackboneConfig fields (compute_dtype, lora_rank, ...).

    Raises:
      ValueError: for a model that this backbone would compute wrongly, naming the field.
    """
    family = hf.get("model_type")
    if family not in ("llama", "qwen3"):
        raise ValueError(f"config.json: model_type is {family!r}; supported are 'llama' and 'qwen3'")
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    refused = {
        "attention_bias": hf.get("attention_bias", False),
        "mlp_bias": hf.get("mlp_bias", False),
        "use_sliding_window": hf.get("use_sliding_window", False),
        "rope_type": rope.get("rope_type", rope.get("type", "default")) != "default",
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
    }
    for field, used in refused.items():
        if used:
            raise ValueError(f"config.json: {field} is set to a kind that this backbone does not implement")
    d_model, n_heads = hf["hidden_size"], hf["num_attention_heads"]
    return BackboneConfig(
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
        **overrides,
    )


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


def params_from_state_dict(
    cfg: BackboneConfig, tensors: Mapping[str, np.ndarray], key: jax.Array | None = None
) -> Params:
    """Our parameter tree from tensors under their Hugging Face names.

    Args:
      cfg: the network; tensors are cast to its param_dtype.
      tensors: name -> array, every tensor that the network needs and no other.
      key: draws what a checkpoint does not hold (agent heads, LoRA); `jax.random.key(0)` by default.

    Raises:
      ValueError: naming a tensor that is missing, has a wrong shape, or is not understood.
    """
    dtype = jnp.dtype(cfg.param_dtype)
    used: set[str] = set()

    def take(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in tensors:
            raise ValueError(f"checkpoint: tensor {name!r} is missing (expected shape {shape})")
        used.add(name)
        array = np.asarray(tensors[name])
        if array.shape != shape:
            raise ValueError(f"checkpoint: tensor {name!r} has shape {array.shape}, the config says {shape}")
        return array.astype(dtype)

    params: Params = {}
    shapes = _shapes(cfg)
    for name, (path, transposed) in _layer_tensors(cfg).items():
        shape = shapes[path]
        stacked = np.empty((cfg.n_layers, *shape), dtype)
        for i in range(cfg.n_layers):
            array = take(f"model.layers.{i}.{name}", shape[::-1] if transposed else shape)
            stacked[i] = array.T if transposed else array
        _put(params, ("layers", *path), jnp.asarray(stacked))
    _put(params, ("embed", "table"), jnp.asarray(take(_EMBEDDING, (cfg.vocab_size, cfg.d_model))))
    _put(params, ("final_norm", "scale"), jnp.asarray(take(_NORM, (cfg.d_model,))))
    if not cfg.tie_embeddings:
        _put(params, ("unembed", "table"), jnp.asarray(take(_UNEMBEDDING, (cfg.vocab_size, cfg.d_model))))
    elif _UNEMBEDDING in tensors:
        used.add(_UNEMBEDDING)
        if not np.array_equal(np.asarray(tensors[_UNEMBEDDING]), np.asarray(tensors[_EMBEDDING])):
            raise ValueError(
                f"checkpoint: {_UNEMBEDDING!r} differs from {_EMBEDDING!r} but the config ties them; "
                "set tie_embeddings=False"
            )
    unknown = sorted(name for name in set(tensors) - used if not name.endswith("rotary_emb.inv_freq"))
    if unknown:
        raise ValueError(f"checkpoint: {len(unknown)} tensors are not understood, e.g. {unknown[:3]}")
    return add_own_parts(cfg, params, jax.random.key(0) if key is None else key)


def add_own_parts(cfg: BackboneConfig, params: Params, key: jax.Array) -> Params:
    """Adds freshly drawn agent heads and LoRA, which no checkpoint holds, to imported parameters."""
    if not (cfg.head_rank or cfg.lora_rank):
        return params

    def draw(key):
        flat = nnx.to_pure_dict(nnx.state(Backbone(cfg, nnx.Rngs(key)), nnx.Param))
        return [
            (path, leaf)
            for path, leaf in _walk(flat)
            if path[0] == "heads" or path[-1] in ("lora_a", "lora_b")
        ]

    paths = [path for path, _ in jax.eval_shape(lambda key: dict(draw(key)), key).items()]
    leaves = jax.jit(lambda key: [leaf for _, leaf in draw(key)])(key)
    for path, leaf in zip(paths, leaves, strict=True):
        _put(params, path, leaf)
    return params


def state_dict_from_params(
    cfg: BackboneConfig, params: Params, dtype: str | None = None, drop_heads: bool = False
) -> dict[str, np.ndarray]:
    """Tensors under their Hugging Face names.

    Args:
      cfg, params: the network; LoRA must have been folded in with `merge_lora`.
      dtype: "float32" or "bfloat16" to cast to; default param_dtype.
      drop_heads: leave trained agent heads behind, which the format has no place for.

    Raises:
      ValueError: if LoRA or trained agent heads would be lost.
    """
    if cfg.lora_rank:
        raise ValueError(
            "export: LoRA branches have no place in this format; fold them in with merge_lora first"
        )
    if cfg.head_rank and not drop_heads and np.any(np.asarray(params["heads"]["up"])):
        raise ValueError(
            "export: trained agent heads have no place in this format; pass drop_heads=True to lose them"
        )
    dtype = jnp.dtype(dtype or cfg.param_dtype)

    def give(array) -> np.ndarray:
        return np.ascontiguousarray(np.asarray(array).astype(dtype))

    tensors = {_EMBEDDING: give(params["embed"]["table"]), _NORM: give(params["final_norm"]["scale"])}
    if not cfg.tie_embeddings:
        tensors[_UNEMBEDDING] = give(params["unembed"]["table"])
    for name, (path, transposed) in _layer_tensors(cfg).items():
        node = params["layers"]
        for part in path:
            node = node[part]
        for i, array in enumerate(np.asarray(node)):
            tensors[f"model.layers.{i}.{name}"] = give(array.T if transposed else array)
    return tensors


def load(directory: str | Path, **overrides) -> tuple[BackboneConfig, Params]:
    """Loads a local checkpoint directory (config.json, *.safetensors).

    Args:
      directory: as `save_pretrained` or a hub snapshot leaves it.
      **overrides: BackboneConfig fields to set (compute_dtype, param_dtype, head_rank, lora_rank, ...).
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"{directory} has no config.json; give the directory of a Hugging Face checkpoint"
        )
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{directory} has no *.safetensors; convert the checkpoint to safetensors first"
        )
    cfg = config_from_hf(json.loads((directory / "config.json").read_text()), **overrides)
    tensors = {}
    for file in files:
        with safe_open(file, framework="numpy") as reader:
            tensors.update({name: reader.get_tensor(name) for name in reader.keys()})  # noqa: SIM118
    return cfg, params_from_state_dict(cfg, tensors)


def save(
    directory: str | Path,
    cfg: BackboneConfig,
    params: Params,
    dtype: str | None = None,
    drop_heads: bool = False,
) -> None:
    """Writes config.json and safetensors that transformers loads; arguments as `state_dict_from_params`."""
    directory = Path(directory)
    tensors = state_dict_from_params(cfg, params, dtype, drop_heads)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_to_hf(cfg, dtype), indent=2) + "\n")
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, array in tensors.items():
        if size and size + array.nbytes > _MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": sum(a.nbytes for a in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _layer_tensors(cfg: BackboneConfig):
    return _LAYER_TENSORS | (_QWEN3_TENSORS if cfg.family == "qwen3" else {})


def _shapes(cfg: BackboneConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Shape of every imported array of one layer, by its path."""
    bare = dataclasses.replace(cfg, head_rank=0, lora_rank=0, n_layers=1)
    state = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Backbone(bare, nnx.Rngs(0))), nnx.Param))
    return {path: leaf.shape[1:] for path, leaf in _walk(state["layers"])}


def _walk(tree: Params, path: tuple[str, ...] = ()):
    for name, child in tree.items():
        if isinstance(child, dict):
            yield from _walk(child, (*path, name))
        else:
            yield (*path, name), child


def _put(tree: Params, path: tuple[str, ...], leaf) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = leaf
