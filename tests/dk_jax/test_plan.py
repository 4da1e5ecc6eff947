"""A plan's numbers against the truth: arrays that are there, programs that run, and XLA's own counts."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from configs.davinci_14b import get_config as davinci_14b
from configs.demo import get_config as demo
from dk_jax.models import token_log_probs
from dk_jax.models.presets import parameter_count
from dk_jax.models.sharding import build_sharded
from dk_jax.plan.counting import bytes_per_device, collective_bytes, product_flops
from dk_jax.plan.estimate import beside, make_plan
from dk_jax.plan.hardware import DEVICES, USABLE, Device
from dk_jax.plan.mesh import parse_mesh
from dk_jax.plan.programs import batch_shapes, compile_gradient, make_step, microbatch_flops, parts_of
from dk_jax.plan.table import as_data, report
from dk_jax.train.batch import Row, microbatches
from dk_jax.train.setup import ConfigError
from tests.dk_jax.emulated import ROOT, on_eight_devices

SIZES = dict(data=2, fsdp=2, tensor=2)
ONE = dict(data=1, fsdp=1, tensor=1)
TINY = Device(
    name="tiny", memory_bytes=0.0, flops_per_s=1e12, bytes_per_s=1e11, link_bytes_per_s=1e10, network_bytes_per_s=1e9, host_devices=8
)


def config(**model):
    c = demo()
    c.model.update(dict(d_model=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=96, remat="full", shifted_kv_heads=0) | model)
    c.codec.vocab_size, c.rl.only = 512, ()
    c.rollout.update(dict(max_context_tokens=4096, max_rows=8, tasks=4, checked_tasks=0))
    return c


def measured() -> dict:
    """What real arrays and programs take on eight devices, beside the plan's numbers."""
    cfg = config()
    step = make_step(cfg, SIZES)
    _, params = build_sharded(step.config, jax.random.key(0), step.mesh)
    updater = step.updater
    state = updater.start(params)

    def on_first(tree):
        return sum(s.data.nbytes for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards if s.device == jax.devices()[0])

    rows = [Row(tokens=[1] * 64, loss=[0.0, *[1.0] * 63], advantage=[1.0] * 64, old_logp=[-6.0] * 64, agent=1, weight=0.1)] * 8
    batches = microbatches(rows, size=8, step=64)
    nothing = jax.tree.map(lambda leaf: None, params)
    gradient, _ = updater.gradient(params, nothing, batches)
    plan_batch = batch_shapes(step, 8, 64)
    found = {
        "real": {"parameters": on_first(params), "optimiser": on_first(state), "gradient": on_first(gradient)},
        "planned": parts_of(step),
        "batch": {name: [list(value.shape), str(value.dtype)] for name, value in batches[0].items()},
        "planned_batch": {name: [list(value.shape), str(value.dtype)] for name, value in plan_batch.items()},
        "whole": 4 * parameter_count(step.config),
    }
    held = sum(found["planned"].values())
    # Devices with room for a short row, a long one, several long ones, and for nothing.
    temporary = {n: compile_gradient(step, 4, n).temporary_bytes for n in (1024, 4096)}
    wanted = [held / 2, held + 1.02 * temporary[1024], held + 1.02 * temporary[4096], held + 4 * temporary[4096]]
    plan = make_plan(step, [dataclasses.replace(TINY, memory_bytes=memory / USABLE) for memory in wanted])
    found["plan"] = as_data(plan)
    found["report"] = report(plan)
    found["next"] = compile_gradient(step, 4, 2048).temporary_bytes + held
    found["wanted"] = wanted

    whole = jax.sharding.NamedSharding(step.mesh, jax.sharding.PartitionSpec())
    cut = jax.sharding.NamedSharding(step.mesh, jax.sharding.PartitionSpec(None, ("data", "fsdp", "tensor")))
    gathered = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda i, s: s + jax.lax.with_sharding_constraint(x * s[0, 0], whole), jnp.zeros((64, 64))))
    sent = collective_bytes(gathered.lower(jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=cut)).compile().as_text())
    found["sent"] = [[*key, size] for key, size in sent.items()]

    tokens, ones = jnp.zeros((4, 4096), jnp.int32), jnp.ones(4, jnp.int32)

    def loops() -> list[int]:
        traced = jax.make_jaxpr(partial(token_log_probs, step.model.static))(step.model.trainable, tokens, ones, ones)
        own = [inner for equation in traced.eqns for inner in (equation, *getattr(equation.params.get("call_jaxpr"), "eqns", ()))]
        return [equation.params["length"] for equation in own if equation.primitive.name == "scan"]

    found["chunks"] = [loops()]
    with jax.set_mesh(step.mesh):
        found["chunks"].append(loops())
    return found


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    return on_eight_devices(__file__, tmp_path_factory.mktemp("plan"))


def test_bytes_of_parameters_optimiser_and_gradient_are_those_of_real_arrays(numbers):
    assert numbers["planned"] == numbers["real"]
    assert numbers["planned"]["parameters"] < numbers["whole"] / 2, "cut along fsdp and tensor"
    assert numbers["planned_batch"] == numbers["batch"]


def test_the_microbatch_that_is_said_to_fit_does_and_the_next_larger_does_not(numbers):
    none, short, full, many = numbers["plan"]["devices"]
    assert none["rows"] == 0 and none["update_s"] == 0
    assert (short["rows"], short["length"]) == (4, 1024) and numbers["next"] > numbers["wanted"][1]
    assert (full["rows"], full["length"]) == (4, 4096)
    assert many["length"] == 4096 and many["rows"] in (8, 12, 16)
    for device, room in zip((short, full, many), numbers["wanted"][1:], strict=True):
        assert device["training_bytes"] <= room and device["microbatches"] * device["rows"] * device["length"] >= 24 * 2 * 4096 / 2
        assert device["update_s"] > device["microbatch_s"] * device["microbatches"] > 0
    assert "4 x 1,024 tokens" in numbers["report"] and "none" in numbers["report"] and "data=2, fsdp=2, tensor=2" in numbers["report"]


def test_what_devices_send_is_read_from_a_compiled_program_with_its_loops(numbers):
    once = 4 * 64 * 64 * 7 // 8
    assert numbers["sent"] in ([["all-gather", 8, 5 * once]], [["all-gather", 8, once]]), "in each turn, or once before the loop"


def test_log_probs_are_taken_in_as_few_chunks_on_a_mesh_as_each_device_needs(numbers):
    layers = 3
    assert numbers["chunks"] == [[layers, 4 * 4096 // 1024], [layers, 4096 // 1024]]


HLO = """HloModule m
%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %a = f32[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %a)
}
%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}
ENTRY %main (q: f32[8,4]) -> f32[8,4] {
  %w = (s32[], f32[8,4]{1,0}) while(%q), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %r = (bf16[10]{0}, f32[]) all-reduce(%u, %v), replica_groups=[1,8]<=[8], to_apply=%sum
  %o = f32[2,4]{1,0} reduce-scatter(%r), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum
  %p = f32[8]{0} all-gather-start(%o), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  %d = f32[8]{0} all-gather-done(%p)
  %m = f32[8]{0} all-reduce(%d), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, to_apply=%sum
  ROOT %c = f32[8]{0} collective-permute(%m), source_target_pairs={{0,1},{1,2},{2,0}}
}
"""


def test_traffic_of_a_program_is_that_of_rings_times_its_loops():
    assert collective_bytes(HLO) == {
        ("all-gather", 4): 3 * 128 * 3 // 4,
        ("all-gather", 5): 32 // 2,
        ("all-reduce", 8): 2 * (24 * 7 // 8),
        ("all-reduce", 5): 2 * (32 // 2),
        ("reduce-scatter", 4): 32 * 3,
        ("collective-permute", 3): 32,
    }


@pytest.mark.parametrize(
    ("groups", "devices", "extent"),
    [
        ("mesh['a'=2,'b'=4] {'b'}", 4, 4),
        ("mesh['a'=2,'b'=4] {'a'}", 2, 5),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", 4, 4),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", 2, 5),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a','c'}", 8, 8),
        ("mesh['a'=8,'b'=2] {'a':(1)4}", 4, 13),
        ("mesh['a'=8,'b'=2] {'a':(4)2}", 2, 3),
        ("[4,2]<=[2,4]T(1,0)", 2, 5),
        ("[2,4]<=[8]", 4, 4),
        ("{{0,4},{1,5}}", 2, 5),
    ],
)
def test_the_devices_that_a_collective_joins_are_read_however_they_are_written(groups, devices, extent):
    line = f"  %a = f32[100]{{0}} all-gather(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}"
    hlo = f"ENTRY %main (q: f32[8]) -> f32[8] {{\n{line}\n}}\n"
    assert collective_bytes(hlo) == {("all-gather", extent): 400 * (devices - 1) // devices}


def test_devices_that_can_not_be_read_are_no_zero():
    with pytest.raises(ValueError, match="it is not known how to read which devices this joins"):
        collective_bytes("ENTRY %main (q: f32[8]) -> f32[8] {\n  %a = f32[100]{0} all-gather(%x), replica_groups=new(8)\n}\n")


def test_flops_are_those_that_xla_counts_where_it_counts_loops():
    x, w = jnp.zeros((8, 16)), jnp.zeros((5, 16, 16))

    def scanned(x, w):
        return jax.lax.scan(jax.checkpoint(lambda x, w: (x @ w, None)), x, w)[0].sum()

    def unrolled(x, w):
        for i in range(5):
            x = x @ w[i]
        return x.sum()

    plain, batched = product_flops(jax.make_jaxpr(jax.value_and_grad(scanned, argnums=(0, 1)))(x, w))
    assert batched == 0 and plain == 3 * 5 * 2 * 8 * 16 * 16
    by_xla = jax.jit(unrolled).lower(x, w).compile().cost_analysis()["flops"]
    forward, _ = product_flops(jax.make_jaxpr(scanned)(x, w))
    assert forward <= by_xla <= forward + 8 * 16 + 8
    assert product_flops(jax.make_jaxpr(lambda a, b: jnp.einsum("bij,bjk->bik", a, b))(jnp.zeros((3, 4, 5)), jnp.zeros((3, 5, 6)))) == (0, 720)
    with pytest.raises(ValueError, match="loop of unknown length"):
        product_flops(jax.make_jaxpr(lambda x: jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ x, x))(jnp.eye(3)))


def test_a_models_flops_are_six_for_each_weight_and_token_and_attention():
    cfg = config(head_rank=0)
    cfg.learner.streams = 1
    step = make_step(cfg, ONE, devices=jax.devices()[:1])
    rows, length = 2, 256
    model, done = microbatch_flops(step, rows, length)
    c, tokens = step.config, rows * length
    layer = c.d_model * c.head_dim * 2 * (c.n_heads + c.n_kv_heads) + 3 * c.d_model * c.d_ff
    attention = 3.5 * c.n_layers * 4 * c.n_heads * c.head_dim * tokens * length / 2
    # Log-probs are of every token but the first, in chunks that may be filled up.
    wanted = 6 * tokens * c.n_layers * layer + 6 * rows * (length - 1) * c.vocab_size * c.d_model + attention
    assert wanted <= model <= 1.02 * wanted
    # The last product of a layer need not be recomputed: nothing in its backward pass wants the result.
    again = 2 * tokens * c.n_layers * (layer - c.d_ff * c.d_model) + attention / 3.5 + 2 * rows * (length - 1) * c.vocab_size * c.d_model
    assert model + again == pytest.approx(done, rel=1e-3)


def test_one_step_of_staleness_holds_the_sampling_parameters_and_what_the_sampler_keeps():
    step = make_step(_changed(max_context_tokens=64), ONE, devices=jax.devices()[:1])
    plan = make_plan(step, [dataclasses.replace(TINY, memory_bytes=1e9)])
    generation, parts, (fit,) = plan.generation, plan.parts, plan.fits
    assert parts == parts_of(step) | {"behind": parts["parameters"], "sampler": generation.weights + generation.cache}
    assert fit.training_bytes == sum(parts.values()) + max(fit.program.temporary_bytes, plan.update.temporary_bytes)
    learning = 2 * parts["parameters"] + parts["optimiser"] + parts["gradient"]
    assert fit.sampling_bytes == learning + generation.total
    row = generation.cache / plan.rows
    room = USABLE * 1e9 - learning - generation.weights - max(generation.logits, generation.prefill)
    assert fit.sampling_rows == int(room // row)
    assert "parameters that sample" in report(plan)
    fresh = make_step(_changed(context="kernels"), ONE, devices=jax.devices()[:1])
    assert beside(fresh, generation)["sampler"] == generation.weights, "no conversation goes on"


def _changed(**rollout):
    cfg = config()
    cfg.rl.staleness = 1
    cfg.rollout.update(rollout)
    return cfg


def test_nothing_is_allocated_for_the_largest_model():
    cfg = davinci_14b()
    gc.collect()  # what other tests left behind would go meanwhile
    before = len(jax.live_arrays())
    step = make_step(cfg, ONE, devices=jax.devices()[:1])
    parts = parts_of(step)
    assert len(jax.live_arrays()) == before
    assert parts["parameters"] == parts["gradient"] == 4 * parameter_count(step.config) and 2.0 <= parts["optimiser"] / parts["parameters"] < 2.001
    assert (step.attention, step.config.attention) == ("cudnn", "blocks")


def test_bytes_of_what_lies_on_one_device_are_all_its_bytes():
    assert bytes_per_device({"a": jnp.zeros((3, 4), jnp.bfloat16), "b": jnp.zeros(5, jnp.int32)}) == 24 + 20


@pytest.mark.parametrize("text", ["fsdp", "fsdp=0", "fsdp=x", "expert=2", "fsdp=2,fsdp=4"])
def test_a_mesh_that_can_not_be_read_is_named(text):
    with pytest.raises(ValueError, match="is no axis with its size; write data=1,fsdp=8,tensor=1"):
        parse_mesh(text)


def test_meshes_are_read_and_devices_that_join_more_of_them_use_the_network():
    assert parse_mesh("fsdp=8, tensor=2") == dict(data=1, fsdp=8, tensor=2) and parse_mesh("") == ONE
    h100 = DEVICES["h100"]
    assert h100.between_bytes_per_s(8) == h100.link_bytes_per_s > h100.between_bytes_per_s(16) == h100.network_bytes_per_s


def test_a_model_or_rows_that_the_mesh_does_not_divide_and_a_model_without_shapes_are_named():
    one = jax.devices()[:1]
    with pytest.raises(ConfigError, match="mesh data=1, fsdp=8, tensor=1: make_mesh: .* has to be the number of devices, 1"):
        make_step(config(), dict(data=1, fsdp=8, tensor=1), devices=one)
    cfg = config()
    cfg.model.init = "smollm2"
    with pytest.raises(ConfigError, match="model.init is 'smollm2', whose shapes are not known without its files"):
        make_step(cfg, ONE, devices=one)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=configs/davinci_13b.py"], "configs/davinci_13b.py"),
        (["--config=configs/davinci_14b.py", "--mesh=fsdp=7"], "fsdp=7 does not divide d_model=5120"),
        (["--config=configs/davinci_14b.py", "--config.model.init=qwen3-13b"], "model.init is 'qwen3-13b'"),
        (["--config=configs/davinci_14b.py", "--mesh=fsdp=8", "--config.rollout.max_rows=12"], "rollout.max_rows=12 rows can't be spread"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(arguments, message):
    done = subprocess.run(
        [sys.executable, "scripts/plan.py", *arguments], cwd=ROOT, env={**os.environ, "XLA_FLAGS": ""}, capture_output=True, text=True, timeout=120
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode in (1, 2) and len(said) == 1 and message in said[0] and "Traceback" not in done.stderr, done.stderr[-2000:]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measured()))
