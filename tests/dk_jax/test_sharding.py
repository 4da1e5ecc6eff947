"""The same numbers on eight devices as on one, whatever the mesh; each device holds its share; a mesh that does not fit is refused.

Eight devices are emulated by a process of its own, which is this file run as a script: it writes what it measured as JSON.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from dk_jax.models import BackboneConfig, abstract_backbone, build_backbone, hidden_states, logits, token_log_probs
from dk_jax.models.presets import PRESETS, parameter_count, preset
from dk_jax.models.sharding import (
    AXES,
    RULES,
    batch_sharding,
    build_sharded,
    check_mesh,
    logical_axes,
    make_mesh,
    param_shardings,
    shard_batch,
)
from tests.dk_jax.emulated import on_eight_devices

ROOT = Path(__file__).parents[2]
CFG = BackboneConfig(
    family="qwen3", vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, tie_embeddings=False,
    init_std=0.15, head_rank=3, lora_rank=2, lora_alpha=2.0,
)  # fmt: skip
TIED = dataclasses.replace(CFG, family="llama", tie_embeddings=True, shifted_kv_heads=1, head_rank=0, lora_rank=0)
CASES = {
    "8x1x1": (CFG, (8, 1, 1)),
    "1x8x1": (CFG, (1, 8, 1)),
    "1x1x2": (CFG, (1, 1, 2)),
    "2x2x2": (CFG, (2, 2, 2)),
    "tied 1x4x2": (TIED, (1, 4, 2)),
}
DRAWN = ("2x2x2", "tied 1x4x2")


def _scored(static, params, batch):
    """Logits, log-probs, and the gradient of a loss over them."""
    tokens, lengths, agents = batch["tokens"], batch["lengths"], batch["agents"]
    real = jnp.arange(1, tokens.shape[1])[None] < lengths[:, None]

    def loss(params):
        scored = token_log_probs(static, params, tokens, lengths, agents, chunk=32)
        return jnp.sum(scored.log_probs + 0.1 * scored.entropies) / jnp.sum(real), scored

    hidden = hidden_states(static, params, tokens, lengths)
    (_, scored), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return {"logits": logits(static, params, hidden, agents), "scored": scored, "gradient": gradient}


def _case(name: str, cfg: BackboneConfig, sizes: tuple[int, int, int]) -> dict:
    static, params = build_backbone(cfg, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x if np.any(x) else jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype), params)
    batch = {
        "tokens": rng.integers(0, cfg.vocab_size, (8, 13)).astype(np.int32),
        "lengths": np.full(8, 13, np.int32) - np.arange(8, dtype=np.int32) % 4,
        "agents": np.arange(8, dtype=np.int32) % 3,
    }
    expected = jax.jit(_scored, static_argnums=0)(static, params, batch)
    mesh = make_mesh(**dict(zip(AXES, sizes, strict=True)), devices=jax.devices()[: math.prod(sizes)])
    shardings = param_shardings(static, mesh)
    placed, rows = jax.device_put(params, shardings), shard_batch(mesh, batch)
    with jax.set_mesh(mesh):
        got = jax.jit(_scored, static_argnums=0)(static, placed, rows)
        hidden = jax.jit(hidden_states, static_argnums=0).lower(static, placed, rows["tokens"], rows["lengths"]).compile()
    alone = jax.jit(hidden_states, static_argnums=0).lower(static, params, batch["tokens"], batch["lengths"]).compile()
    drawn = unguided = None
    if name == "2x2x2":
        unguided = jax.jit(_scored, static_argnums=0)(static, placed, rows)
        unguided = max(_delta(unguided[part], expected[part]) for part in unguided)
    if name in DRAWN:
        drawn = build_sharded(cfg, jax.random.key(0), mesh)[1]
        fresh = build_backbone(cfg, jax.random.key(0))[1]
        drawn = {"delta": _delta(drawn, fresh), "as_asked": jax.tree.map(lambda leaf: leaf.sharding, drawn) == shardings}
    return {
        "devices": len(mesh.devices.flat),
        "delta": {part: _delta(got[part], expected[part]) for part in expected},
        "scale": {part: _delta(expected[part], jax.tree.map(np.zeros_like, expected[part])) for part in expected},
        "share": sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(placed)) / sum(x.nbytes for x in jax.tree.leaves(params)),
        "unguided_delta": unguided,
        "drawn": drawn,
        "work": hidden.cost_analysis()["flops"] / alone.cost_analysis()["flops"],
        "hidden_rows": hidden.output_shardings.shard_shape((8, 13, cfg.d_model))[0],
        "rows": len({str(index) for index in batch_sharding(mesh).devices_indices_map((8,)).values()}),
    }


def _delta(a, b) -> float:
    return max(float(np.max(np.abs(np.asarray(x) - np.asarray(y)))) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return on_eight_devices(__file__, tmp_path_factory.mktemp("sharding"))


@pytest.mark.parametrize("case", CASES)
class TestOnEmulatedDevices:
    def test_every_number_is_that_of_one_device(self, measured, case):
        found = measured[case]
        assert found["devices"] == math.prod(CASES[case][1])
        assert max(found["delta"].values()) <= 1e-5, found["delta"]
        assert min(found["scale"].values()) > 0.1, found["scale"]
        assert found["delta"].keys() == {"logits", "scored", "gradient"}

    def test_each_device_holds_its_share_of_parameters_and_rows(self, measured, case):
        data, fsdp, tensor = CASES[case][1]
        assert measured[case]["rows"] == data * fsdp
        assert measured[case]["hidden_rows"] == 8 // (data * fsdp)
        # Norms, and what has no axis to cut along, are whole on every device.
        assert 1 / (fsdp * tensor) <= measured[case]["share"] <= 1 / (fsdp * tensor) + 0.06

    def test_each_device_does_its_share_of_the_work(self, measured, case):
        """Floating-point operations of one device over those of one that does it all."""
        assert measured[case]["work"] <= 1.3 / measured[case]["devices"]


def test_set_mesh_is_about_the_work_and_not_the_numbers(measured):
    assert measured["2x2x2"]["unguided_delta"] <= 1e-5


@pytest.mark.parametrize("case", DRAWN)
def test_fresh_parameters_drawn_in_their_shardings_are_the_same(measured, case):
    assert measured[case]["drawn"]["as_asked"]
    assert measured[case]["drawn"]["delta"] <= 1e-6


class TestLogicalAxes:
    @pytest.mark.parametrize("cfg", [CFG, TIED, dataclasses.replace(CFG, lora_targets=("q", "down"))], ids=["all", "tied", "targets"])
    def test_every_axis_of_every_parameter_has_the_length_of_its_name(self, cfg):
        lengths = {
            "embed": cfg.d_model, "heads": cfg.n_heads * cfg.head_dim, "kv_heads": cfg.n_kv_heads * cfg.head_dim, "mlp": cfg.d_ff,
            "vocab": cfg.vocab_size, "layers": cfg.n_layers, "agents": 3,
        }  # fmt: skip
        leaves = jax.tree_util.tree_leaves_with_path(abstract_backbone(cfg)[1])
        assert len(leaves) > 10
        for path, leaf in leaves:
            names = logical_axes([entry.key for entry in path])
            assert len(names) == leaf.ndim
            assert all(lengths.get(name, n) == n for name, n in zip(names, leaf.shape, strict=True)), (path, names, leaf.shape)

    def test_an_unknown_parameter_is_not_copied_everywhere_in_silence(self):
        with pytest.raises(ValueError, match="layers/attention/q/bias"):
            logical_axes(("layers", "attention", "q", "bias"))

    def test_the_largest_model_on_64_devices(self):
        cfg = preset("qwen3-32b", param_dtype="bfloat16")
        static, shapes = abstract_backbone(cfg)
        shardings = param_shardings(static, AbstractMesh((1, 8, 8), AXES))
        parts = jax.tree.map(lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)), shapes, shardings)
        share = sum(jax.tree.leaves(parts)) / parameter_count(cfg)
        assert 1 / 64 <= share < 1.01 / 64


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "sizes", "message"),
        [
            ({}, (1, 1, 3), r"tensor=3 does not divide n_heads=64.*tensor=3 does not divide n_kv_heads=8"),
            ({}, (1, 1, 16), r"tensor=16 does not divide n_kv_heads=8"),
            ({}, (1, 3, 1), r"fsdp=3 does not divide d_model=5120"),
            ({"vocab_size": 151_935}, (1, 1, 8), r"tensor=8 does not divide vocab_size=151935"),
            ({"d_ff": 25_601}, (1, 1, 2), r"tensor=2 does not divide d_ff=25601 \(logical axis 'mlp'\)"),
        ],
    )
    def test_a_mesh_that_does_not_divide_the_model(self, changes, sizes, message):
        """A model of 66 GB: had memory been taken first, this would not return."""
        static, _ = abstract_backbone(preset("qwen3-32b", **changes))
        with pytest.raises(ValueError, match=message):
            param_shardings(static, AbstractMesh(sizes, AXES))

    def test_every_qwen3_goes_onto_a_node_of_eight(self):
        for name in PRESETS:
            for sizes in ((1, 1, 8), (1, 8, 1), (2, 2, 2)) if name.startswith("qwen3") else ():
                check_mesh(preset(name), AbstractMesh(sizes, AXES))

    @pytest.mark.parametrize(
        ("rules", "message"),
        [
            ({**RULES, "mlp": "expert"}, r"'mlp' on mesh axis 'expert'"),
            ({**RULES, "rank": "tensor"}, r"'rank' is whole"),
            ({"mlp": "tensor"}, r"each of .*'vocab'"),
        ],
    )
    def test_rules_that_mean_nothing(self, rules, message):
        with pytest.raises(ValueError, match=message):
            check_mesh(CFG, AbstractMesh((1, 1, 1), AXES), rules)

    def test_a_mesh_of_other_than_all_devices(self):
        n = jax.device_count()
        with pytest.raises(ValueError, match=rf"data={n + 1} x fsdp=1 x tensor=1 .* devices, {n}"):
            make_mesh(data=n + 1)
        with pytest.raises(ValueError, match="at least 1"):
            make_mesh(data=-1, fsdp=-1, tensor=n)

    def test_rows_that_do_not_divide(self):
        mesh = AbstractMesh((2, 2, 1), AXES)
        with pytest.raises(ValueError, match=r"data=2 x fsdp=2 does not divide the 6 rows of \['tokens'\]"):
            shard_batch(mesh, {"lengths": np.zeros(8), "tokens": np.zeros((6, 4))})


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps({name: _case(name, *case) for name, case in CASES.items()}))
