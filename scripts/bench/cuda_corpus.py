"""How the CUDA candidates of `tests/cuda_corpus` are judged, and by which roads: verdicts, latency and throughput, nothing cached.

    python scripts/bench/cuda_corpus.py --out scripts/bench/results/cuda_corpus.json
    SANDBOX_ROADS=plain python scripts/bench/cuda_corpus.py --idle 0 --timing none --sample 24 --out plain.json

Starts a server of its own with an empty cache. Candidates that run into the same limits as any other: the first `--idle` are judged
one after another (latency on an idle server), all others at once (throughput). Writes for each case its outcome and what it was meant
to have, the road of each of its extensions, and its times; with the share of extensions that compile on each road.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path

from serving import awaited, builds_of, by_road, private_server, provenance

from sandbox.build.roads import ROADS_VARIABLE
from sandbox.client import SandboxClient
from sandbox.protocol import Candidate, EvaluationResult, Options, TaskSpec
from tests.cuda_corpus import CASES
from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

WARM = CorpusCase(
    name="warm_up",
    task=stateless_task("x + 1", "torch.randn(1024)"),
    candidate=plain_module(
        name="warm_up",
        cuda_source="""
#include <torch/extension.h>
__global__ void add_one(const float* x, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + 1;
}
torch::Tensor warm_up(torch::Tensor x) {
  auto out = torch::empty_like(x);
  add_one<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.numel());
  return out;
}
""",
        cpp_source="torch::Tensor warm_up(torch::Tensor x);",
        functions="warm_up",
        forward="ext.warm_up(x)",
    ),
)
"""Pays for the one-time steps."""


def submitted(client: SandboxClient, case: CorpusCase, device: str, options: Options) -> list[str]:
    """Ids of the case's evaluation."""
    task = TaskSpec(reference=case.task, name=case.name, device=device, dtype=case.dtype)
    return client.submit(task, [Candidate(source=case.candidate, language="cuda")], options)


def row(case: CorpusCase, result: EvaluationResult) -> dict:
    """What this benchmark keeps of a verdict."""
    return {
        "case": case.name,
        "meant": case.meant,
        "outcome": result.outcome,
        **builds_of(result),
        "stage_s": result.stage_s,
        "speedup": result.timing and round(result.timing.speedup, 3),
        "noisy": result.timing and result.timing.noisy,
        "notes": [note[:200] for note in result.notes],
        "feedback": "" if result.outcome == "ok" else result.feedback[:700],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--idle", type=int, default=32, help="cases that are judged one after another; the others at once")
    parser.add_argument("--timing", choices=["none", "quick", "full"], default="quick")
    parser.add_argument("--build-s", type=float, default=300.0)
    parser.add_argument("--only", nargs="*", help="names of cases, instead of all")
    parser.add_argument("--sample", type=int, default=0, help="so many of them, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    arguments = parser.parse_args()
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only]
    if 0 < arguments.sample < len(cases):
        drawn = set(random.Random(arguments.seed).sample([case.name for case in cases], arguments.sample))
        cases = [case for case in cases if case.name in drawn]
    step = max(1, len(cases) // arguments.idle) if arguments.idle else len(cases) + 1
    alone = cases[::step][: arguments.idle]
    together = [case for case in cases if case not in alone]
    options = Options(timing=arguments.timing, build_s=arguments.build_s)
    rows: list[dict] = []
    latencies: list[float] = []
    began = provenance()

    def write(**more) -> dict:
        """The report on what has been judged so far: a run that is cut short leaves that."""
        report = {
            **began,
            "roads_allowed": os.environ.get(ROADS_VARIABLE, "all"),
            "cases": len(rows),
            "latency_s": latencies and {"median": statistics.median(latencies), "worst": max(latencies)},
            **more,
            **by_road(rows),
            "not_as_meant": [entry["case"] for entry in rows if entry["outcome"] != entry["meant"]],
            "rows": rows,
        }  # fmt: skip
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        return report

    with private_server(arguments.device, arguments.workers) as server:
        client = server.client
        start = time.monotonic()
        awaited(client, submitted(client, WARM, arguments.device, options))
        one_time_s = time.monotonic() - start
        for case in alone:
            start = time.monotonic()
            [result] = awaited(client, submitted(client, case, arguments.device, options))
            latencies.append(time.monotonic() - start)
            rows.append({**row(case, result), "latency_s": round(latencies[-1], 3)})
            print(f"{case.name}: {result.outcome} by {rows[-1]['roads']}, {latencies[-1]:.2f} s {result.stage_s}", flush=True)
            write()
        start = time.monotonic()
        ids = [submitted(client, case, arguments.device, options)[0] for case in together]
        for case, evaluation_id in zip(together, ids, strict=True):
            [result] = awaited(client, [evaluation_id])
            rows.append(row(case, result))
            print(f"{case.name}: {result.outcome} by {rows[-1]['roads']}, {time.monotonic() - start:.1f} s after the start", flush=True)
            write()
        together_s = time.monotonic() - start
    together = {
        "cases": len(together), "workers": arguments.workers, "seconds": round(together_s, 2), "per_s": round(len(together) / together_s, 3),
    }  # fmt: skip
    report = write(first_with_one_time_steps_s=round(one_time_s, 2), together=together)
    print(json.dumps({key: value for key, value in report.items() if key != "rows"}, indent=1))
    for entry in (entry for entry in rows if entry["outcome"] != entry["meant"]):
        print(f"NOT AS MEANT {entry['case']}: {entry['outcome']} for {entry['meant']}: {entry['feedback']}")


if __name__ == "__main__":
    main()
