"""Tensors of a checkpoint onto devices, part by part: each device is sent its own slice and nothing else.

For every parameter and every distinct part of it that a device of this process holds, the slices of the tensors that make up
the part are read, turned and cast into one host buffer, which goes to all devices that hold this part before the next is begun.
So the host holds, whatever the size of the model and the number of devices, at most the part in work, the one before it (JAX
lets go of a buffer only when it is next called) and one tensor's slice as it was read: `peak_host_bytes`. Files are mapped
into memory, so what is read of them the system may drop again. (`jax.make_array_from_callback` would keep the parts of all
devices until the last is there: a whole stack of layers on a host that holds all devices.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from dk_jax.interop.tensor_names import EMBEDDING, UNEMBEDDING, Stored, leaf_at, put_leaf, stored_parameters
from dk_jax.models.backbone import Backbone, Params, abstract_backbone
from dk_jax.models.config import BackboneConfig

_COMPARED_BYTES = 64 << 20


class Source(Protocol):
    """Tensors by name, read by slices."""

    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, str]

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """One slice of one tensor."""


class Arrays:
    """A Source over arrays that are in memory already."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self._tensors = {name: np.asarray(array) for name, array in tensors.items()}
        self.shapes = {name: array.shape for name, array in self._tensors.items()}
        self.types = {name: str(array.dtype) for name, array in self._tensors.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """One slice of one array, a view."""
        return self._tensors[name][index]


def place(cfg: BackboneConfig, source: Source, shardings: Params | None, key: jax.Array) -> Params:
    """The parameters of a network from tensors that `check_tensors` has passed.

    Args:
      cfg: the network; tensors are cast to its param_dtype.
      source: the tensors.
      shardings: a tree like the parameters (`sharding.param_shardings`), or None for the default device.
      key: draws what a checkpoint does not hold: agent heads and LoRA.

    Raises:
      ValueError: if the network is tied and the checkpoint holds another unembedding.
    """
    if cfg.tie_embeddings and UNEMBEDDING in source.shapes:
        check_tied(source)
    params: Params = {}
    for entry in stored_parameters(cfg):
        put_leaf(params, entry.path, _placed(cfg, entry, source, shardings and leaf_at(shardings, entry.path)))
    return add_own_parts(cfg, params, key, shardings)


def peak_host_bytes(cfg: BackboneConfig, shardings: Params | None) -> int:
    """What `place` holds on the host at most, in bytes, reading files of up to 4 bytes a number; on a CPU, the devices' own beside it."""
    size, most, widest = jnp.dtype(cfg.param_dtype).itemsize, 0, 0
    for entry in stored_parameters(cfg):
        shape = _whole_shape(entry)
        part = leaf_at(shardings, entry.path).shard_shape(shape) if shardings else shape
        most, widest = max(most, math.prod(part)), max(widest, math.prod(part[entry.stacked :]))
    return 2 * size * most + 4 * widest


def check_tied(source: Source) -> None:
    """Raises ValueError unless the unembedding is the embedding, compared a few rows at a time."""
    rows, width = source.shapes[EMBEDDING]
    step = max(_COMPARED_BYTES // (8 * width), 1)
    for start in range(0, rows, step):
        part = (slice(start, min(start + step, rows)), slice(None))
        if not np.array_equal(source.read(UNEMBEDDING, part), source.read(EMBEDDING, part)):
            raise ValueError(
                f"checkpoint: {UNEMBEDDING!r} differs from {EMBEDDING!r} but the config ties them; set tie_embeddings=False"
            )


def add_own_parts(cfg: BackboneConfig, params: Params, key: jax.Array, shardings: Params | None = None) -> Params:
    """Adds freshly drawn agent heads and LoRA, which no checkpoint holds, to imported parameters."""
    owned = [
        path
        for path in (tuple(entry.key for entry in path) for path, _ in jax.tree_util.tree_leaves_with_path(abstract_backbone(cfg)[1]))
        if path[0] == "heads" or path[-1] in ("lora_a", "lora_b")
    ]
    if not owned:
        return params

    def draw(key):
        drawn = nnx.to_pure_dict(nnx.state(Backbone(cfg, nnx.Rngs(key)), nnx.Param))
        return [leaf_at(drawn, path) for path in owned]

    leaves = jax.jit(draw, out_shardings=shardings and [leaf_at(shardings, path) for path in owned])(key)
    for path, leaf in zip(owned, leaves, strict=True):
        put_leaf(params, path, leaf)
    return params


def _placed(cfg: BackboneConfig, entry: Stored, source: Source, sharding: Sharding | None) -> jax.Array:
    shape, dtype = _whole_shape(entry), jnp.dtype(cfg.param_dtype)
    if sharding is None:
        return jax.block_until_ready(jax.device_put(_part(entry, source, (slice(None),) * len(shape), dtype)))
    holders: dict[tuple, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        holders.setdefault(tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True)), []).append(device)
    pieces = []
    for bounds, devices in holders.items():
        part = _part(entry, source, tuple(slice(*bound) for bound in bounds), dtype)
        # Waited for, so that the buffer is free again before the next part takes its own. (On a CPU it may be taken over as it is.)
        pieces += jax.block_until_ready([jax.device_put(part, device) for device in devices])
        del part
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def _part(entry: Stored, source: Source, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    """One part of a parameter: each layer's slice is read, turned and cast straight into its place."""
    inner = index[1:] if entry.stacked else index
    asked = inner[::-1] if entry.transposed else inner
    layers = entry.names[index[0]] if entry.stacked else entry.names
    shape = tuple(len(range(*part.indices(n))) for part, n in zip(index, _whole_shape(entry), strict=True))
    out = np.empty(shape, dtype)
    for i, name in enumerate(layers):
        read = source.read(name, asked)
        target = out[i] if entry.stacked else out
        target[...] = read.T if entry.transposed else read
        del read
    return out


def _whole_shape(entry: Stored) -> tuple[int, ...]:
    inner = entry.shape[::-1] if entry.transposed else entry.shape
    return (len(entry.names), *inner) if entry.stacked else inner
