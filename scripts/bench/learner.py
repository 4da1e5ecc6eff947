"""How fast and in how much memory the learner's own step trains, beside Hugging Face's training step in the same run.

    python scripts/bench/learner.py --out scripts/bench/results/learner.json [--only train,peer,longest] [--models 0.6b] [--rows 4] [--tokens 4096]

Random weights, full training with AdamW, parameters and optimiser in float32, products in bfloat16, of the layers recomputed what --remat
says; Hugging Face all in bfloat16 with gradient checkpointing, as it comes. `train`: one update of --rows sequences of --tokens tokens
(policy loss on every token): seconds, tokens a second, model FLOPs (6 a parameter and token, and attention's) over what a large bfloat16
product reaches here, peak memory. `longest`: the longest single sequence that fits, by doubling and then halving the step between. Each
measurement is a process of its own, so that memory counts from nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from serving import ROOT, provenance

SECTIONS = ("train", "peer", "longest")
LIMIT_S = 400
OURS = """
import json, sys, time
import jax, jax.numpy as jnp, numpy as np
from learner_step import LearnerStep
asked = json.loads(sys.argv[1])
gpu = jax.default_backend() == "gpu"
step = LearnerStep(model=asked["model"], rows=asked["rows"], tokens=asked["tokens"], shrunk=asked["shrunk"], remat=asked["remat"])
seconds = []
for _ in range(2 + asked["repeats"]):
    start = time.perf_counter()
    metrics = step()
    seconds.append(time.perf_counter() - start)
took = float(np.median(seconds[2:] or seconds))
peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
n, flops = step.parameters, step.model_flops
del step
a = jax.random.normal(jax.random.key(1), (8192 if gpu else 512,) * 2, jnp.bfloat16 if gpu else jnp.float32)
product = jax.jit(lambda a, b: a @ b)
b = jax.block_until_ready(product(a, a))
start = time.perf_counter()
for _ in range(20):
    b = product(a, b)
jax.block_until_ready(b)
rate = 2 * a.shape[0] ** 3 * 20 / (time.perf_counter() - start)
print("RESULT", json.dumps({"step_s": took, "first_s": seconds[0], "tokens_per_s": asked["rows"] * asked["tokens"] / took, "parameters": n,
    "model_flops_per_s": flops / took, "product_flops_per_s": rate, "use": flops / took / rate, "peak_bytes": peak,
    "grad_norm": metrics["grad_norm"]}))
"""
PEER = """
import json, sys, time, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
asked, s = json.loads(sys.argv[1]), json.loads(sys.argv[2])
if not torch.cuda.is_available(): raise SystemExit("Hugging Face's step is measured on a GPU")
config = Qwen3Config(hidden_size=s["d_model"], intermediate_size=s["d_ff"], num_hidden_layers=s["n_layers"], num_attention_heads=s["n_heads"],
    num_key_value_heads=s["n_kv_heads"], head_dim=s["head_dim"], vocab_size=s["vocab_size"], tie_word_embeddings=s["tie_embeddings"],
    max_position_embeddings=max(40960, asked["tokens"]))
with torch.device("cuda"):
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa").train()
torch.set_default_dtype(torch.float32)
model.gradient_checkpointing_enable()
n, rows, tokens = sum(p.numel() for p in model.parameters()), asked["rows"], asked["tokens"]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
ids = torch.randint(0, s["vocab_size"], (rows, tokens), device="cuda")
def step():
    model(ids, labels=ids).loss.backward(); optimizer.step(); optimizer.zero_grad(set_to_none=True)
seconds = []
for _ in range(2 + asked["repeats"]):
    start = time.perf_counter(); step(); torch.cuda.synchronize(); seconds.append(time.perf_counter() - start)
took = sorted(seconds[2:] or seconds)[len(seconds[2:] or seconds) // 2]
peak = torch.cuda.max_memory_allocated()
flops = 6 * n * rows * tokens + 6 * s["n_layers"] * s["n_heads"] * s["head_dim"] * tokens * tokens * rows
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16); b = a @ a; torch.cuda.synchronize(); start = time.perf_counter()
for _ in range(20): b = a @ a
torch.cuda.synchronize(); rate = 2 * 8192**3 * 20 / (time.perf_counter() - start)
print("RESULT", json.dumps({"step_s": took, "tokens_per_s": rows * tokens / took, "parameters": n, "model_flops_per_s": flops / took,
    "product_flops_per_s": rate, "use": flops / took / rate, "peak_bytes": peak}))
"""


def sizes(name: str) -> dict:
    """Of a preset, or of Qwen3's 0.6b, 1.7b, ..."""
    import dataclasses

    from dk_jax.models.presets import PRESETS, preset

    return dataclasses.asdict(preset(name if name in PRESETS else f"qwen3-{name}"))


def measured(program: str, asked: dict, *more: str) -> dict:
    """What a process of its own says, or why it said nothing."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "scripts" / "bench"))), "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, json.dumps(asked), *more], capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=ROOT, env=env
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {**asked, "failed": f"no answer in {LIMIT_S} s"}
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    result = json.loads(line.removeprefix("RESULT ")) if line else {"failed": done.stderr[-400:]}
    print(json.dumps({**asked, **result}), flush=True)
    return {**asked, **result}


def longest(program: str, asked: dict, most: int, *more: str) -> dict:
    """The longest sequence whose update fits, to an eighth: what was tried, and its measurement."""
    fits, fails, tried = 0, None, []
    tokens = asked["tokens"]
    while tokens <= most and (fails is None or fails - fits > max(1024, fits // 8)):
        found = measured(program, {**asked, "tokens": tokens, "rows": 1, "repeats": 1}, *more)
        tried.append(found)
        if "failed" in found:
            fails = tokens
        else:
            fits = tokens
        tokens = 2 * fits if fails is None else (fits + fails) // 2 // 1024 * 1024
        if tokens in (fits, fails) or not tokens:
            break
    return {"tokens": fits, "tried": tried}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="train,peer")
    parser.add_argument("--models", default="0.6b,1.7b")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--remat", default="full", help="of ours: none, products, attention or full, or several; for `longest` the last")
    parser.add_argument("--most", type=int, default=262_144, help="longest: where the search ends")
    parser.add_argument("--shrunk", action="store_true", help="a model of two small layers instead: to try this script")
    arguments = parser.parse_args()
    named = arguments.only.split(",")
    if unknown := set(named) - set(SECTIONS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is unknown; there are {', '.join(SECTIONS)}")
    report = {**provenance(("jax", "jaxlib", "flax", "optax", "transformers")), "models": {}}
    for name in arguments.models.split(","):
        asked = {"model": name, "rows": arguments.rows, "tokens": arguments.tokens, "repeats": arguments.repeats, "shrunk": arguments.shrunk}
        asked["remat"] = arguments.remat.split(",")[-1]
        found, config = report["models"].setdefault(name, {}), json.dumps(sizes(name))
        if "train" in named:
            found["train"] = [measured(OURS, {**asked, "remat": remat}) for remat in arguments.remat.split(",")]
        if "peer" in named:
            found["peer"] = measured(PEER, asked, config)
        if "longest" in named:
            found["longest"] = {"ours": longest(OURS, asked, arguments.most), "peer": longest(PEER, asked, arguments.most, config)}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
