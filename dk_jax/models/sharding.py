"""How parameters, batches and caches are spread over devices: logical axes of every array, and rules from those to mesh axes.

The mesh has three axes:

    data      rows of the batch; parameters are copies of each other
    fsdp      rows of the batch, and parameters cut along the residual width D (Rajbhandari et al. 2020, arXiv:1910.02054)
    tensor    heads, feed-forward width and vocabulary (Shoeybi et al. 2019, arXiv:1909.08053)

Heads are whole: an axis of N * H numbers is cut between heads only. XLA's partitioner does the rest: the functions of the
backbone run unchanged on arrays that are placed so, and give the same numbers up to rounding.

    mesh = make_mesh(data=1, fsdp=4, tensor=2)
    cfg, params = huggingface.load(directory, mesh=mesh)
    with jax.set_mesh(mesh):                    # keeps rows on their devices (layers.on_own_rows): less work, the same numbers
        scored = jax.jit(token_log_probs, static_argnums=0)(static, params, **shard_batch(mesh, batch))

The shardings are of global arrays, so one process or many (`jax.distributed`) makes no difference here. Not here: pipelines,
sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dk_jax.models.backbone import Backbone, Params, Static, abstract_backbone
from dk_jax.models.config import BackboneConfig

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
"""The mesh axes over which rows of a batch are spread."""

RULES: Mapping[str, str | None] = {
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "layers": None,
    "norm": None,
    "agents": None,
    "rank": None,
}
"""Logical axis -> mesh axis, or None for whole on every device."""

_PROJECTIONS = {
    "q": ("embed", "heads"),
    "k": ("embed", "kv_heads"),
    "v": ("embed", "kv_heads"),
    "o": ("heads", "embed"),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
}
_ENDS = {
    ("embed", "table"): ("vocab", "embed"),
    ("unembed", "table"): ("vocab", "embed"),
    ("final_norm", "scale"): ("norm",),
    ("heads", "down"): ("agents", "embed", "rank"),
    ("heads", "up"): ("agents", "rank", "embed"),
}


def logical_axes(path: Sequence[str]) -> tuple[str, ...]:
    """Names of the axes of the parameter at a path of the tree, e.g. ("layers", "mlp", "up", "kernel").

    Raises:
      ValueError: for a parameter that this table does not know; a new one has to be entered here.
    """
    path = tuple(path)
    if path in _ENDS:
        return _ENDS[path]
    if path[0] == "layers":
        *_, owner, leaf = path
        if leaf == "scale":
            return ("layers", "norm")
        if owner in _PROJECTIONS:
            n_in, n_out = _PROJECTIONS[owner]
            found = {"kernel": (n_in, n_out), "lora_a": (n_in, "rank"), "lora_b": ("rank", n_out)}.get(leaf)
            if found:
                return ("layers", *found)
    raise ValueError(f"sharding: no logical axes are known for the parameter {'/'.join(path)}; enter it in logical_axes")


def make_mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of data x fsdp x tensor devices.

    Args:
      data, fsdp, tensor: devices along each axis.
      devices: as many as their product; default all devices of all processes.

    Raises:
      ValueError: if the product is not the number of devices.
    """
    sizes = (data, fsdp, tensor)
    devices = list(jax.devices() if devices is None else devices)
    if min(sizes) < 1 or data * fsdp * tensor != len(devices):
        raise ValueError(
            f"make_mesh: data={data} x fsdp={fsdp} x tensor={tensor} has to be the number of devices, {len(devices)}, "
            "and each at least 1"
        )
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh over whose devices a tree's arrays are spread; None if they are on one device."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh.size > 1:
            return leaf.sharding.mesh
    return None


def row_share(mesh: Mesh | None) -> int:
    """How many parts the rows of a batch are spread over."""
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def check_mesh(cfg: BackboneConfig, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> None:
    """Refuses a mesh that does not divide the network.

    Raises:
      ValueError: naming every mesh axis, field and number that do not fit, or a rule for a mesh axis that is not there.
    """
    fields = {
        "embed": "d_model", "heads": "n_heads", "kv_heads": "n_kv_heads", "mlp": "d_ff", "vocab": "vocab_size", "layers": "n_layers",
    }  # fmt: skip
    if rules.keys() != RULES.keys():
        raise ValueError(f"sharding: the rules are about {sorted(rules)}; each of {sorted(RULES)} needs one, and no other")
    problems = []
    for logical, axis in rules.items():
        if axis is None:
            continue
        if axis not in mesh.shape:
            raise ValueError(f"sharding: a rule puts {logical!r} on mesh axis {axis!r}; the mesh has {tuple(mesh.shape)}")
        if logical not in fields:
            raise ValueError(f"sharding: {logical!r} is whole on every device; the rule that puts it on {axis!r} has to be None")
        field = fields[logical]
        if getattr(cfg, field) % mesh.shape[axis]:
            problems.append(f"{axis}={mesh.shape[axis]} does not divide {field}={getattr(cfg, field)} (logical axis {logical!r})")
    if problems:
        raise ValueError(f"sharding: {'; '.join(problems)}. Choose a mesh whose axes divide these numbers")


def param_shardings(static: Static, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> Params:
    """A tree like the parameters of NamedShardings; agent heads and LoRA included.

    Raises:
      ValueError: as `check_mesh`.
    """
    check_mesh(static.cfg, mesh, rules)

    def sharding(path, _):
        names = logical_axes([entry.key for entry in path])
        return NamedSharding(mesh, PartitionSpec(*(rules[name] for name in names)))

    return jax.tree_util.tree_map_with_path(sharding, abstract_backbone(static.cfg)[1])


def build_sharded(cfg: BackboneConfig, key: jax.Array, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> tuple[Static, Params]:
    """`build_backbone`, each device drawing only its own part of the parameters."""
    static, _ = abstract_backbone(cfg)
    shardings = param_shardings(static, mesh, rules)
    draw = jax.jit(lambda key: nnx.to_pure_dict(nnx.state(Backbone(cfg, nnx.Rngs(key)), nnx.Param)), out_shardings=shardings)
    return static, draw(key)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays whose leading axis is rows: tokens, lengths, agents, masks."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def shard_batch(mesh: Mesh, batch: Any) -> Any:
    """Spreads a tree of arrays with leading rows over the mesh.

    Raises:
      ValueError: if the rows can't be spread evenly.
    """
    share = row_share(mesh)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.shape[0] % share:
            raise ValueError(
                f"shard_batch: data={mesh.shape['data']} x fsdp={mesh.shape['fsdp']} does not divide the {leaf.shape[0]} rows of "
                f"{jax.tree_util.keystr(path) or 'the batch'}"
            )
    return on_mesh(batch, batch_sharding(mesh))


def on_mesh(tree: Any, shardings: Any) -> Any:
    """Places host arrays that every process holds alike; `shardings` is one sharding, or a tree of them like `tree`.

    Each process sends its own devices their slices, so the mesh may span processes (`jax.distributed`).
    """
    whole = jax.tree.map(lambda _: shardings, tree) if isinstance(shardings, NamedSharding) else shardings

    def place(leaf, sharding: NamedSharding):
        if sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, tree, whole)
