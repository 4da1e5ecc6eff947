"""Which kernels a decode step and a training step are made of, and how long each takes on this device.

    python scripts/bench/kernel_times.py --out /tmp/kernels.json [--only decode,prefill,attention,…] [--models 0.6b] [--batch 64]

Random weights, bfloat16, as generation.py and learner.py time them. What is counted is the time on the device as its own profiler tells it
(CUPTI for NVIDIA), without what lies between two kernels; the wall time beside it holds both. CUDA graphs are switched off here, so that
every kernel is seen by its name; that makes the wall time of a decode step longer than it is in a run. `attention`: one layer's decode
attention (`fused_step`) in several cuts, rows half and all full, beside what the memory needs for the keys and values at --bytes-per-s.
`first`: what lies between product and attention for the first tokens of prompts (`fused_first`), likewise. `products`: a layer's four products
of --batch rows by our kernels in several cuts and by XLA, with what stands next to them, over weights that no cache holds.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from generation import NEW, PROMPT, Bench, requests, sizes  # noqa: E402
from learner_step import LearnerStep  # noqa: E402
from serving import provenance  # noqa: E402

from dk_jax.models import build_backbone  # noqa: E402
from dk_jax.models.decode_attention import fused_step  # noqa: E402
from dk_jax.models.decode_products import Cut, added, cut_of, gated, product  # noqa: E402
from dk_jax.models.first_chunk import fused_first  # noqa: E402
from dk_jax.models.layers import rope_angles  # noqa: E402

SECTIONS = ("decode", "prefill", "group", "train", "attention", "first", "products")
CUTS = ((32, 4, 4), (32, 4, 3), (32, 4, 5), (64, 4, 2), (64, 4, 3), (16, 4, 5), (16, 2, 6), (32, 2, 4), (64, 2, 2), (128, 8, 2))
"""Slots that a program looks at together, warps, stages."""
FIRST_CUTS = ((8, 4), (16, 4), (16, 2), (32, 4), (32, 8), (64, 8))
"""Tokens that a program works on, warps."""
FIRST_ROWS = 32
INNERS, WAYS = (64, 128), ((4, 3), (4, 4), (8, 4))
"""Inner places of a program's piece; warps, stages."""
BEYOND_CACHE = 256 << 20
MOST = 60


def kernels(work: Callable[[], object], steps: int) -> dict:
    """What the device does in `work`, microseconds a step.

    Args:
      work: waits for what it started.
      steps: how many steps it makes.
    """
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            start = time.perf_counter()
            work()
            wall = time.perf_counter() - start
        [found] = Path(directory).rglob("*.xplane.pb")
        us: collections.Counter[str] = collections.Counter()
        times: collections.Counter[str] = collections.Counter()
        lines: set[str] = set()
        for plane in jax.profiler.ProfileData.from_file(str(found)).planes:
            if not plane.name.startswith("/device:"):
                continue
            for line in plane.lines:
                lines.add(line.name)
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    us[event.name] += event.duration_ns / 1e3
                    times[event.name] += 1
    if not us:
        raise SystemExit(f"the profiler shows no kernel of {jax.devices()[0].device_kind} (lines: {sorted(lines)}); this script is for GPUs")
    rows = [{"kernel": name[:160], "us": each / steps, "times": times[name] / steps} for name, each in us.most_common(MOST)]
    return {"wall_us": 1e6 * wall / steps, "device_us": sum(us.values()) / steps, "kinds": len(us), "kernels": rows}


def decode(name: str, batch: int) -> dict:
    static, params = build_backbone(dataclasses.replace(sizes(name), compute_dtype="bfloat16", param_dtype="bfloat16"), jax.random.key(0))
    bench = Bench(name=name, static=static, params=params, bytes_per_s=1.0)
    engine, prompts = bench.engine(batch, PROMPT + NEW), bench.prompts([PROMPT] * batch)
    engine.run(params, requests(prompts, NEW))
    by = {"attention": engine.programs.kv.attention, "products": engine.programs.products}
    return {"batch": batch, **by, **kernels(lambda: engine.run(params, requests(prompts, NEW)), NEW)}


def prefill(name: str, batch: int) -> dict:
    static, params = build_backbone(dataclasses.replace(sizes(name), compute_dtype="bfloat16", param_dtype="bfloat16"), jax.random.key(0))
    bench = Bench(name=name, static=static, params=params, bytes_per_s=1.0)
    engine = bench.engine(batch, PROMPT + 8)
    first, then = (requests(bench.prompts([PROMPT] * batch, seed=seed), 1) for seed in (0, 1))  # what a row holds is not fed again
    engine.run(params, first)
    return {"batch": batch, **kernels(lambda: engine.run(params, then), 1)}


def group(name: str, batch: int) -> dict:
    """Sixteen samples of a prompt of 4,096 tokens."""
    static, params = build_backbone(dataclasses.replace(sizes(name), compute_dtype="bfloat16", param_dtype="bfloat16"), jax.random.key(0))
    bench = Bench(name=name, static=static, params=params, bytes_per_s=1.0)
    engine = bench.engine(16, 4112, chunks=(512, 4096))
    first, then = (requests(bench.prompts([4096], seed=seed) * 16, 1) for seed in (0, 1))
    engine.run(params, first)
    return kernels(lambda: engine.run(params, then), 1)


def train(name: str, batch: int) -> dict:
    step = LearnerStep(model=name, rows=4, tokens=4096, remat="products")
    for _ in range(2):
        step()
    return kernels(step, 1)


def attention(name: str, batch: int, bytes_per_s: float) -> dict:
    """Microseconds of a decode step's attention in one layer, by slots looked at together, warps, stages and parts of a row."""
    cfg = dataclasses.replace(sizes(name), compute_dtype="bfloat16")
    slots, (n, kv, h) = PROMPT + NEW, (cfg.n_heads, cfg.n_kv_heads, cfg.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    products = jax.random.normal(keys[0], (batch, n + 2 * kv, h), cfg.dtype)
    scale = jnp.ones((n + kv, h)) if cfg.family == "qwen3" else None
    rows = []
    for full in (slots // 2, slots - 1):
        positions = jnp.full(batch, full, jnp.int32)
        rope = tuple(angles[:, 0, 0] for angles in rope_angles(cfg, positions[:, None]))
        floor_us = 1e6 * 2 * batch * kv * full * h * cfg.dtype.itemsize / bytes_per_s
        for block, warps, stages in CUTS:
            for splits in (1, 2):
                step = functools.partial(fused_step, eps=1e-6, splits=splits, block=block, num_warps=warps, num_stages=stages)
                run = jax.jit(lambda products, k, v, step=step: step(products, scale, rope, k, v, positions, positions), donate_argnums=(1, 2))  # noqa: B023
                pair = [jax.random.normal(key, (batch, kv, slots, h), cfg.dtype) for key in keys[1:]]
                state = {"pair": run(products, *pair)[1]}

                def work(run=run, state=state):
                    for _ in range(20):
                        mixed, state["pair"] = run(products, *state["pair"])
                    mixed.block_until_ready()

                found = kernels(work, 20)
                cut = {"full": full, "block": block, "warps": warps, "stages": stages, "splits": splits}
                rows.append({**cut, "us": found["device_us"], "floor_us": floor_us})
                print(json.dumps(rows[-1]), flush=True)
    return {"batch": batch, "cuts": rows}


def first(name: str, batch: int, bytes_per_s: float) -> dict:
    """Microseconds of a layer's norms, RoPE and writing for 32 prompts of 512 tokens, by tokens and warps of a program."""
    cfg = dataclasses.replace(sizes(name), compute_dtype="bfloat16")
    n, kv, h = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim
    keys = jax.random.split(jax.random.key(0), 3)
    products = jax.random.normal(keys[0], (FIRST_ROWS, PROMPT, n + 2 * kv, h), cfg.dtype)
    scale = jnp.ones((n + kv, h)) if cfg.family == "qwen3" else None
    rope = tuple(angles[0, :, 0] for angles in rope_angles(cfg, jnp.arange(PROMPT, dtype=jnp.int32)[None]))
    moved = 2 * products.size + 2 * FIRST_ROWS * PROMPT * kv * h  # read, written, and keys and values once more
    rows = []
    for tokens, warps in FIRST_CUTS:
        step = functools.partial(fused_first, eps=1e-6, heads_first=True, tokens=tokens, num_warps=warps)
        run = jax.jit(lambda products, k, v, step=step: step(products, scale, rope, k, v, jnp.arange(FIRST_ROWS)), donate_argnums=(1, 2))  # noqa: B023
        pair = [jax.random.normal(key, (batch, kv, PROMPT + NEW, h), cfg.dtype) for key in keys[1:]]
        state = {"pair": run(products, *pair)[3]}

        def work(run=run, state=state):
            for _ in range(20):
                q, _, _, state["pair"] = run(products, *state["pair"])
            q.block_until_ready()

        found = kernels(work, 20)
        rows.append({"tokens": tokens, "warps": warps, "us": found["device_us"], "floor_us": 1e6 * moved * cfg.dtype.itemsize / bytes_per_s})
        print(json.dumps(rows[-1]), flush=True)
    return {"batch": batch, "cuts": rows}


def products(name: str, batch: int, bytes_per_s: float) -> dict:
    """Microseconds of each of a layer's products."""
    cfg = dataclasses.replace(sizes(name), compute_dtype="bfloat16")
    d, f, of_heads, h = cfg.d_model, cfg.d_ff, cfg.n_heads * cfg.head_dim, cfg.head_dim
    residual = jnp.ones((batch, d), jnp.float32)
    gate = lambda x, w: jax.nn.silu(jnp.split(x @ w, 2, axis=-1)[0]) * jnp.split(x @ w, 2, axis=-1)[1]  # noqa: E731
    kinds = {  # ours, XLA's, inner places, columns, of the matrix for one of ours
        "qkv": (product, lambda x, w: x @ w, d, of_heads + 2 * cfg.n_kv_heads * h, 1),
        "o": (functools.partial(added, residual), lambda x, w: residual + x @ w, of_heads, d, 1),
        "gate_up": (gated, gate, d, f, 2),
        "down": (functools.partial(added, residual), lambda x, w: residual + x @ w, f, d, 1),
    }
    rows = []
    for kind, (ours, plain, inner, columns, times) in kinds.items():
        keys = jax.random.split(jax.random.key(0), 2)
        x = jax.random.normal(keys[0], (batch, inner), cfg.dtype)
        size = inner * columns * times * cfg.dtype.itemsize
        matrices = list(jax.random.normal(keys[1], (-(-BEYOND_CACHE // size), inner, times * columns), cfg.dtype))
        chosen = cut_of(batch, inner, columns, 64 if kind == "gate_up" else 128)
        widths = [wide for wide in (chosen.columns // 2, chosen.columns, 2 * chosen.columns) if 16 <= wide <= 128]
        cuts = [Cut(chosen.rows, wide, deep, *way) for wide in widths for deep in INNERS for way in WAYS]
        held = lambda cut, times=times: 2 * cut.stages * cut.inner * (cut.rows + times * cut.columns)  # noqa: E731
        cuts = [cut for cut in cuts if held(cut) <= 220 << 10 and not (columns % cut.columns or inner % cut.inner)]
        for cut in [None, chosen, *(cut for cut in cuts if cut != chosen)]:
            one = plain if cut is None else functools.partial(ours, cut=cut)
            run = jax.jit(lambda x, matrices, one=one: [one(x, matrix) for matrix in matrices])
            try:
                jax.block_until_ready(run(x, matrices))
                us = kernels(lambda run=run, x=x, matrices=matrices: jax.block_until_ready(run(x, matrices)), len(matrices))["device_us"]
            except jax.errors.JaxRuntimeError as error:  # a piece too large for the device
                us = str(error).splitlines()[0][:100]
            rows.append({"product": kind, "by": "xla" if cut is None else cut._asdict(), "us": us, "floor_us": 1e6 * size / bytes_per_s})
            print(json.dumps(rows[-1] | {"chosen": cut == chosen}), flush=True)
    return {"batch": batch, "cuts": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="decode,train", help="sections")
    parser.add_argument("--models", default="0.6b")
    parser.add_argument("--batch", type=int, default=64, help="rows of decode, prefill, attention and the cache of first")
    parser.add_argument("--bytes-per-s", type=float, default=4.2e12, help="what the memory gives; for `attention`, `first` and `products`")
    arguments = parser.parse_args()
    asked = arguments.only.split(",")
    if unknown := set(asked) - set(SECTIONS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is unknown; there are {', '.join(SECTIONS)}")
    found: list[dict] = []
    work = {"decode": decode, "prefill": prefill, "group": group, "train": train}
    for section in (attention, first, products):
        work[section.__name__] = functools.partial(section, bytes_per_s=arguments.bytes_per_s)
    for name in arguments.models.split(","):
        for section in asked:
            measured = work[section](name, arguments.batch)
            found.append({"model": name, "section": section, **measured})
            print(json.dumps({key: value for key, value in found[-1].items() if key not in ("kernels", "cuts")}), flush=True)
            for row in measured.get("kernels", ())[:25]:
                print(f"{row['us']:10.1f} us {row['times']:8.1f} times  {row['kernel'][:110]}", flush=True)
            arguments.out.write_text(json.dumps({**provenance(), "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
