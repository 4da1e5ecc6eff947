"""Generation and the update on eight devices: the tokens, log-probs and parameters of one device, each device with its share.

Eight devices are emulated by a process of its own, which is this file run as a script: it writes what it measured as JSON.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dk_jax.generation.engine import Engine, make_programs
from dk_jax.generation.requests import Drawing, Request
from dk_jax.generation.sampler import SamplerConfig, make_sampler
from dk_jax.generation.sizes import EngineConfig
from dk_jax.models import BackboneConfig, build_backbone
from dk_jax.models.lora import partition, trainable_mask
from dk_jax.models.sharding import make_mesh, mesh_of, on_mesh, param_shardings
from dk_jax.train.batch import Row, microbatches
from dk_jax.train.update import LossConfig, Updater, for_sampling, make_optimizer
from tests.dk_jax.emulated import on_eight_devices

CFG = BackboneConfig(
    family="qwen3", vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=48, tie_embeddings=False,
    init_std=0.15, head_rank=3, lora_rank=2, lora_alpha=2.0,
)  # fmt: skip
SIZES = EngineConfig(
    eos_id=1, rows=4, max_length_tokens=48, block=4, chunks=(8,), prefill_tokens=16, cache_step=16, attention="heads", refill_share=4
)
FUSED = {"fused": "interpreted", "heads": ""}


def _params():
    static, params = build_backbone(CFG, jax.random.key(0))
    rng = np.random.default_rng(0)
    return static, jax.tree.map(lambda x: x if np.any(x) else jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype), params)


def _requests():
    """Ten samples on four rows: equal prompts, prompts of several chunks, conversations that are kept."""
    prompts = [[5, 9, 3], [5, 9, 3], list(range(2, 22)), [7], [5, 9, 3], list(range(2, 22)), [8, 8], [30, 31, 32, 33, 34], [9], [11, 12]]
    return [
        Request(tokens=prompt, agent=n % 3, key=n, max_new_tokens=6 + n, drawing=Drawing(temperature=1.0, top_k=20), keep=n < 2)
        for n, prompt in enumerate(prompts)
    ]


def _sampled(static, params, mesh, attention="heads"):
    config = dataclasses.replace(SIZES, attention=attention)
    programs = make_programs(static, config, mesh)
    if attention == "fused":
        programs.kv = dataclasses.replace(programs.kv, interpret=True)
    engine = Engine(static, config, programs)
    samples = engine.run(params, _requests())
    kept = samples[0].conversation
    samples += engine.run(params, [Request(tokens=[4, 4], agent=0, conversation=kept, key=99, max_new_tokens=5, drawing=Drawing(temperature=0.0))])
    cache = engine._cache[0][0]
    return {
        "tokens": [sample.tokens for sample in samples], "stops": [sample.stop for sample in samples],
        "logps": [sample.logp_model.tolist() for sample in samples], "counts": dataclasses.asdict(engine.counts),
        "cache_share": cache.addressable_data(0).nbytes / cache.nbytes,
    }  # fmt: skip


def _rows():
    rng = np.random.default_rng(1)
    return [
        Row(tokens=rng.integers(2, 64, n).tolist(), loss=[0.0] * 3 + [1.0] * (n - 3), advantage=rng.normal(size=n).tolist(),
            old_logp=(-4 + 0.1 * rng.normal(size=n)).tolist(), agent=n % 3, weight=0.2)
        for n in (6, 9, 11, 14, 15, 7, 12, 10)
    ]  # fmt: skip


def _updated(static, params, mesh, kind, train="full"):
    """Gradient, parameters after two updates, metrics, and the largest share of an optimiser's matrix that a device holds."""
    optimizer = make_optimizer(lr=1e-3, warmup=1, steps=10, weight_decay=0.1, clip_norm=1.0, decay=False, kind=kind)
    updater = Updater(static, optimizer, LossConfig(kind="policy"), mesh=mesh)
    params = jax.tree.map(lambda leaf: leaf.copy(), params)
    trainable, frozen = partition(params, trainable_mask(static, params, train))
    state, batches = updater.start(trainable), microbatches(_rows(), size=8, step=16)
    gradient, _ = updater.gradient(trainable, frozen, batches)
    for _ in range(2):
        trainable, state, metrics = updater.update(trainable, frozen, state, batches)
    matrices = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 3 and leaf.size > 1000]
    share = max(leaf.addressable_data(0).nbytes / leaf.nbytes for leaf in matrices) if matrices else None
    return gradient, trainable, metrics, share


def _where_felt(values, gradient):
    """Adam steps by a gradient's sign and size over its own size: where it is next to nothing, rounding is all there is."""
    return np.where(np.abs(gradient) > 1e-3, values, 0)


def _delta(a, b) -> float:
    return max(float(np.max(np.abs(np.asarray(x) - np.asarray(y)))) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def _measure() -> dict:
    static, params = _params()
    found = {"one": _sampled(static, params, None), "refused": {}}
    meshes = {"2x2x2": make_mesh(data=2, fsdp=2, tensor=2), "4x1x2": make_mesh(data=4, tensor=2)}
    for name, mesh in meshes.items():
        placed = on_mesh(params, param_shardings(static, mesh))
        assert mesh_of(for_sampling(placed)) == mesh
        found[name] = _sampled(static, placed, mesh, "fused" if name == "4x1x2" else "heads")
    alone = make_mesh(data=1, devices=jax.devices()[:1])
    whole = NamedSharding(make_mesh(data=8), PartitionSpec())
    for kind, train, name in (("muon", "full", "2x2x2"), ("adamw", "lora", "4x1x2"), ("adamw", "full", "whole")):
        mesh = meshes.get(name)
        before, expected, told, _ = _updated(static, on_mesh(params, param_shardings(static, alone)), alone, kind, train)
        placed = on_mesh(params, whole) if mesh is None else on_mesh(params, param_shardings(static, mesh))
        gradient, got, said, share = _updated(static, placed, mesh, kind, train)
        found[f"{kind} {train}"] = {
            "gradient": _delta(gradient, before), "share": share,
            "delta": _delta(*(jax.tree.map(_where_felt, part, before) for part in (got, expected))),
            "moved": _delta(expected, partition(params, trainable_mask(static, params, train))[0]),
            "metrics": max(abs(told[key] - said[key]) for key in told),
        }  # fmt: skip
    mesh = meshes["2x2x2"]
    optimizer = make_optimizer(lr=1.0, warmup=1, steps=1, weight_decay=0.0, clip_norm=1.0, decay=False)
    wrong = {
        "params elsewhere": lambda: Engine(static, SIZES, make_programs(static, SIZES, mesh)).run(params, _requests()),
        "rows": lambda: Engine(static, dataclasses.replace(SIZES, rows=6), make_programs(static, SIZES, mesh)),
        "streams": lambda: Updater(static, optimizer, LossConfig(kind="nll"), 2, mesh),
        "sampler": lambda: make_sampler(static, SamplerConfig(eos_id=1, max_new_tokens=4, streams=2), mesh),
        "buckets": lambda: make_sampler(static, SamplerConfig(eos_id=1, max_new_tokens=4, batch_buckets=(6, 8)), mesh),
        "network": lambda: make_programs(dataclasses.replace(static, cfg=dataclasses.replace(CFG, n_heads=3, n_kv_heads=3)), SIZES, mesh),
    }
    for name, act in wrong.items():
        try:
            act()
        except ValueError as error:
            found["refused"][name] = str(error)
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return on_eight_devices(__file__, tmp_path_factory.mktemp("on_mesh"))


@pytest.mark.parametrize(("mesh", "share"), [("2x2x2", 1 / 8), ("4x1x2", 1 / 8)])
def test_samples_are_those_of_one_device(measured, mesh, share):
    """With refill, copied prompts, prompts of several chunks, a growing cache and a conversation that goes on; 4x1x2 with the fused kernel."""
    one, several = measured["one"], measured[mesh]
    assert several["tokens"] == one["tokens"] and several["stops"] == one["stops"] and several["counts"] == one["counts"]
    assert one["counts"]["copied"] >= 2 and len(one["tokens"]) == 11 and sum(map(len, one["tokens"])) > 50
    np.testing.assert_allclose(np.concatenate(several["logps"]), np.concatenate(one["logps"]), atol=2e-5)
    assert several["cache_share"] == share


@pytest.mark.parametrize(("case", "share"), [("muon full", 1 / 4), ("adamw lora", None), ("adamw full", 1)])
def test_an_update_is_that_of_one_device_and_its_state_is_spread(measured, case, share):
    """On 2x2x2, on 4x1x2, and without a mesh, where only rows are spread."""
    found = measured[case]
    assert found["gradient"] <= 1e-5 and found["delta"] <= 1e-5 and found["metrics"] <= 1e-4 and found["moved"] > 1e-3
    assert found["share"] == share


@pytest.mark.parametrize(
    ("what", "says"),
    [("params elsewhere", "lie on one device, these programs are for Mesh"), ("rows", "6 rows can't be spread over 4 parts"),
     ("streams", "streams=2 on a mesh of 8 devices"), ("sampler", "streams=2 on a mesh"), ("buckets", r"\[6\] can't be spread"),
     ("network", "tensor=2 does not divide n_heads=3")],
)  # fmt: skip
def test_what_does_not_fit_is_refused(measured, what, says):
    import re

    assert re.search(says, measured["refused"][what]), measured["refused"]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_measure()))
