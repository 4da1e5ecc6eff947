"""Where each of our parameters lies in a Hugging Face checkpoint, and whether a checkpoint holds what a network needs.

Checks work on names, shapes and types alone, so a wrong checkpoint is refused before any tensor is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dk_jax.models.backbone import Params, abstract_backbone
from dk_jax.models.config import BackboneConfig
from dk_jax.models.sharding import logical_axes

# name inside a Hugging Face layer -> (path inside our layer, whether the matrix is stored [out, in])
_LAYER = {
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
_QWEN3 = {
    "self_attn.q_norm.weight": (("attention", "q_norm", "scale"), False),
    "self_attn.k_norm.weight": (("attention", "k_norm", "scale"), False),
}
EMBEDDING, NORM, UNEMBEDDING = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_IGNORED = "rotary_emb.inv_freq"  # older checkpoints keep the rotary frequencies, which follow from the config
_TYPES = ("float64", "float32", "float16", "bfloat16")
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Stored:
    """One of our parameters in a checkpoint.

    Attributes:
      path: in our tree.
      names: the tensors it is made of: one a layer, stacked along the leading axis, or a single one.
      stacked: whether there is that leading axis.
      transposed: whether a tensor is stored [out, in], ours being [in, out].
      shape: of one tensor, as stored.
      axes: logical names of that shape's axes.
    """

    path: tuple[str, ...]
    names: tuple[str, ...]
    stacked: bool
    transposed: bool
    shape: tuple[int, ...]
    axes: tuple[str, ...]


def stored_parameters(cfg: BackboneConfig) -> list[Stored]:
    """Every parameter that a checkpoint of this network holds; agent heads and LoRA are in none."""
    tree = abstract_backbone(dataclasses.replace(cfg, head_rank=0, lora_rank=0))[1]

    def entry(path: tuple[str, ...], names: tuple[str, ...], stacked: bool, transposed: bool) -> Stored:
        step = -1 if transposed else 1
        shape, axes = leaf_at(tree, path).shape[stacked:][::step], logical_axes(path)[stacked:][::step]
        return Stored(path, names, stacked, transposed, shape, axes)

    entries = [entry(("embed", "table"), (EMBEDDING,), False, False), entry(("final_norm", "scale"), (NORM,), False, False)]
    if not cfg.tie_embeddings:
        entries.append(entry(("unembed", "table"), (UNEMBEDDING,), False, False))
    for name, (path, transposed) in (_LAYER | (_QWEN3 if cfg.family == "qwen3" else {})).items():
        names = tuple(f"model.layers.{i}.{name}" for i in range(cfg.n_layers))
        entries.append(entry(("layers", *path), names, True, transposed))
    return entries


def check_tensors(
    cfg: BackboneConfig, shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, str], where: str = "checkpoint"
) -> None:
    """Whether a checkpoint holds every tensor that the network needs, in its shape, and no other.

    A tied network may come with its unembedding all the same (published Qwen3 does); see `placing.check_tied`.

    Args:
      cfg: the network.
      shapes, types: of every tensor that is there, by name; types as numpy names them.
      where: what to call the checkpoint in the message.

    Raises:
      ValueError: one for everything that is wrong, naming tensors, axes and numbers.
    """
    problems, known = [], set()
    for entry in stored_parameters(cfg):
        for name in entry.names:
            known.add(name)
            problems += _problems(name, entry.shape, entry.axes, shapes, types)
    if cfg.tie_embeddings and UNEMBEDDING in shapes:
        known.add(UNEMBEDDING)
        problems += _problems(UNEMBEDDING, (cfg.vocab_size, cfg.d_model), ("vocab", "embed"), shapes, types)
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    problems = problems[:_SHOWN] + more
    unknown = sorted(name for name in shapes.keys() - known if not name.endswith(_IGNORED))
    if unknown:  # often what is missing, under another name
        problems.append(f"{len(unknown)} tensors are not understood, e.g. {unknown[:3]}")
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}")


def _problems(name: str, shape: tuple[int, ...], axes: tuple[str, ...], shapes, types) -> list[str]:
    if name not in shapes:
        return [f"tensor {name!r} is missing (expected shape {shape})"]
    found = tuple(shapes[name])
    if len(found) != len(shape):
        return [f"tensor {name!r} has shape {found}, the config says {shape}"]
    wrong = [f"axis {i} ({axes[i]}) is {found[i]}, not {shape[i]}" for i in range(len(shape)) if found[i] != shape[i]]
    if wrong:
        return [f"tensor {name!r} has shape {found}, the config says {shape}: {', '.join(wrong)}"]
    if types[name] not in _TYPES:
        return [f"tensor {name!r} is of type {types[name]}; only {', '.join(_TYPES)} are read (no quantised weights)"]
    return []


def leaf_at(tree: Params, path: tuple[str, ...]):
    """The leaf at a path of nested dicts."""
    for name in path:
        tree = tree[name]
    return tree


def put_leaf(tree: Params, path: tuple[str, ...], leaf) -> None:
    """Sets the leaf at a path of nested dicts, making dicts on the way."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = leaf
