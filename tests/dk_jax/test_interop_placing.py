"""Loading onto many devices: each gets its own slice, every number is read once, and the host never holds more than a few parts.

Eight devices are emulated by a process of its own, which is this file run as a script: it writes what it measured as JSON.
"""

import json
import math
import sys
import tracemalloc
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from dk_jax.interop import huggingface, placing
from dk_jax.interop.tensor_files import TensorFiles
from dk_jax.interop.tensor_names import leaf_at, stored_parameters
from dk_jax.models import BackboneConfig, abstract_backbone, build_backbone
from dk_jax.models.sharding import make_mesh, param_shardings
from tests.dk_jax.emulated import on_eight_devices

ROOT = Path(__file__).parents[2]
CFG = BackboneConfig(
    family="qwen3", vocab_size=1024, d_model=256, n_layers=6, n_heads=8, n_kv_heads=2, head_dim=32, d_ff=1024, tie_embeddings=False
)
MESHES = {"1x4x2": (1, 4, 2), "2x2x2": (2, 2, 2), "8x1x1": (8, 1, 1), "one device": None}
SLACK_BYTES = 512 << 10
"""For Python's own objects; the smallest stack of projections is 1.5 MB, the model 25 MB."""


class Counted(TensorFiles):
    """Keeps a note of what is read."""

    reads: list[tuple[str, tuple[int, ...]]] = []

    def read(self, name, index):
        array = super().read(name, index)
        self.reads.append((name, array.shape))
        return array


def _unadoptable(shape, dtype):
    """np.empty off the alignment that JAX's CPU backend needs to take a buffer over as device memory: it copies, as a GPU would."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + 16
    return raw[start : start + size].view(dtype).reshape(shape)


def _case(directory: Path, sizes: tuple[int, int, int] | None, whole) -> dict:
    mesh = sizes and make_mesh(**dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
    shardings = mesh and param_shardings(abstract_backbone(CFG)[0], mesh)
    Counted.reads.clear()
    tracemalloc.start()
    cfg, params = huggingface.load(directory, mesh=mesh)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    expected = {}
    for entry in stored_parameters(cfg):
        shape = leaf_at(params, entry.path).shape
        part = leaf_at(shardings, entry.path).shard_shape(shape) if mesh else shape
        inner = part[1:] if entry.stacked else part
        expected |= dict.fromkeys(entry.names, inner[::-1] if entry.transposed else inner)
    equal = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), params, whole)
    return {
        "equal": all(jax.tree.leaves(equal)),
        "as_asked": mesh is None or jax.tree.map(lambda leaf: leaf.sharding, params) == shardings,
        "numbers_read": sum(math.prod(shape) for _, shape in Counted.reads),
        "slices_of_other_shape": [name for name, shape in Counted.reads if shape != expected[name]],
        "peak_bytes": peak,
        "promised_bytes": placing.peak_host_bytes(cfg, shardings),
        "numbers": sum(leaf.size for leaf in jax.tree.leaves(params)),
    }


def _main(out: Path) -> None:
    huggingface.TensorFiles = Counted
    placing.np = types.SimpleNamespace(**vars(np) | {"empty": _unadoptable})
    directory = out.parent / "checkpoint"
    whole = build_backbone(CFG, jax.random.key(1))[1]
    huggingface.save(directory, CFG, whole, max_shard_bytes=2 << 20)
    assert len(list(directory.glob("model-*.safetensors"))) > 5
    huggingface.load(directory, mesh=make_mesh(data=8))  # whatever is imported and traced for the first time
    measured = {name: _case(directory, sizes, whole) for name, sizes in MESHES.items()}

    own = dict(param_dtype="bfloat16", head_rank=2, lora_rank=2, lora_targets=("v", "down"), key=jax.random.key(7))
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    (cfg, sharded), (_, single) = (huggingface.load(directory, mesh=at, **own) for at in (mesh, None))
    wanted = param_shardings(abstract_backbone(cfg)[0], mesh)
    measured["own parts"] = {
        "as_asked": jax.tree.map(lambda leaf: leaf.sharding, sharded) == wanted,
        "types": sorted({str(leaf.dtype) for leaf in jax.tree.leaves(sharded["layers"]["attention"]["v"])}),
        "delta": max(
            float(np.max(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32))))
            for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(single), strict=True)
        ),
    }
    huggingface.save(out.parent / "again", CFG, huggingface.load(directory, mesh=mesh)[1], max_shard_bytes=2 << 20)
    measured["saved from the mesh"] = [
        path.name for path in sorted(directory.iterdir()) if (out.parent / "again" / path.name).read_bytes() != path.read_bytes()
    ]
    out.write_text(json.dumps(measured))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return on_eight_devices(__file__, tmp_path_factory.mktemp("placing"))


@pytest.mark.parametrize("mesh", MESHES)
class TestLoading:
    def test_gives_the_same_bytes_in_the_shardings_asked_for(self, measured, mesh):
        assert measured[mesh]["equal"] and measured[mesh]["as_asked"]

    def test_reads_each_device_s_slices_and_every_number_once(self, measured, mesh):
        assert measured[mesh]["slices_of_other_shape"] == []
        assert measured[mesh]["numbers_read"] == measured[mesh]["numbers"]

    def test_holds_no_more_on_the_host_than_it_promises(self, measured, mesh):
        assert measured[mesh]["peak_bytes"] <= measured[mesh]["promised_bytes"] + SLACK_BYTES


def test_the_host_holds_a_small_part_of_a_model_that_is_cut(measured):
    """Neither the model nor, of its largest stack, more than the devices' slices of it."""
    model_bytes, stack_bytes = 4 * measured["1x4x2"]["numbers"], 4 * CFG.n_layers * CFG.d_model * CFG.d_ff
    assert measured["1x4x2"]["peak_bytes"] < min(model_bytes / 10, stack_bytes / 2)
    assert measured["2x2x2"]["peak_bytes"] < min(model_bytes / 5, stack_bytes)


def test_heads_and_lora_are_drawn_in_their_shardings(measured):
    assert measured["own parts"]["as_asked"]
    assert measured["own parts"]["types"] == ["bfloat16", "float32"]
    assert measured["own parts"]["delta"] <= 1e-6


def test_an_export_from_sharded_parameters_is_byte_equal(measured):
    assert measured["saved from the mesh"] == []


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
