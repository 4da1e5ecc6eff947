"""Does the judge's clock on a CPU agree with itself? One kernel, judged afresh many times: the spread of its speedup over eager.

    python scripts/bench/cpu_clock.py --out scripts/bench/results/cpu_clock.json [--evaluations 20]

Each kernel is compiled and judged anew every time (a comment differs), against the same warm reference as in training. For each:
largest over smallest speedup, with and without the evaluations that the judge itself flags as noisy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from serving import private_server, provenance

from sandbox.client import SandboxClient
from sandbox.protocol import Candidate, Options, TaskSpec

LIMIT = 1.3
"""Largest over smallest speedup that is allowed where not flagged."""
TASK = """
import torch

class Model(torch.nn.Module):
    def forward(self, {names}):
        return {value}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""
MATRIX, VECTOR = "torch.randn(512, 1024)", "torch.randn(1024)"
CASES = {
    "chain": (
        ("x", "torch.relu(x) * 0.5 + torch.sigmoid(x)", MATRIX),
        "const float* x, float* out",
        "#pragma omp parallel for simd\n  for (long i = 0; i < 512L * 1024; ++i) {\n"
        "    out[i] = (x[i] > 0 ? x[i] : 0.f) * 0.5f + 1.f / (1.f + std::exp(-x[i]));\n  }",
    ),
    "row_sum": (
        ("x", "x.sum(dim=1)", MATRIX),
        "const float* x, float* out",
        "for (int r = 0; r < 512; ++r) {\n    float s = 0;\n    #pragma omp simd reduction(+ : s)\n"
        "    for (int j = 0; j < 1024; ++j) s += x[1024L * r + j];\n    out[r] = s;\n  }",
    ),
    "scaled_add": (
        ("x, v", "x * v + x", f"{MATRIX}, {VECTOR}"),
        "const float* x, const float* v, float* out",
        "for (int r = 0; r < 512; ++r) {\n    for (int j = 0; j < 1024; ++j) {\n"
        "      out[1024L * r + j] = x[1024L * r + j] * v[j] + x[1024L * r + j];\n    }\n  }",
    ),
    "naive_matmul": (
        ("x, y", "x @ y", "torch.randn(192, 192), torch.randn(192, 192)"),
        "const float* x, const float* y, float* out",
        "for (int i = 0; i < 192; ++i) {\n    for (int j = 0; j < 192; ++j) out[192 * i + j] = 0;\n"
        "    for (int k = 0; k < 192; ++k) {\n      for (int j = 0; j < 192; ++j) out[192 * i + j] += x[192 * i + k] * y[192 * k + j];\n    }\n  }",
    ),
}


def judged(client: SandboxClient, name: str, mark: str) -> dict:
    """One fresh evaluation of a case."""
    (names, value, inputs), signature, body = CASES[name]
    source = f'#include <cmath>\nextern "C" void kernel({signature}) {{\n  {body}\n}}\n// {mark}\n'
    task = TaskSpec(reference=TASK.format(names=names, value=value, inputs=inputs), name=name, device="cpu")
    start = time.monotonic()
    [result] = client.evaluate(task, [Candidate(source=source, language="cpp", form="kernel")], Options())
    if result.outcome != "ok" or result.timing is None:
        raise SystemExit(f"{name} was judged {result.outcome}: {result.feedback}")
    timing = result.timing
    return {
        "speedup": timing.speedup, "ms": timing.candidate.median_ms, "eager_ms": timing.baselines["eager"].median_ms,
        "noisy": timing.noisy, "unrest": timing.unrest, "ruled_by": timing.bound_by, "seconds": time.monotonic() - start,
    }  # fmt: skip


def spread(runs: list[dict]) -> float | None:
    """Largest over smallest speedup; None without runs."""
    speedups = [run["speedup"] for run in runs]
    return max(speedups) / min(speedups) if speedups else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--evaluations", type=int, default=20)
    options = parser.parse_args()
    rows = []
    with private_server("cpu", 1) as server:
        for name in CASES:
            judged(server.client, name, "warm")
            runs = [judged(server.client, name, f"run {n}") for n in range(options.evaluations)]
            quiet = [run for run in runs if not run["noisy"]]
            row = {
                "kernel": name, "median_speedup": statistics.median(run["speedup"] for run in runs), "all": spread(runs),
                "not_noisy": spread(quiet), "noisy": len(runs) - len(quiet), "within": (spread(quiet) or 1.0) <= LIMIT, "runs": runs,
            }  # fmt: skip
            rows.append(row)
            print(json.dumps({key: value for key, value in row.items() if key != "runs"}), flush=True)
    options.out.write_text(json.dumps({**provenance(), "limit": LIMIT, "kernels": rows}, indent=1) + "\n")
    if not all(row["within"] for row in rows):
        raise SystemExit("some kernel's speedup spreads more than allowed")


if __name__ == "__main__":
    main()
