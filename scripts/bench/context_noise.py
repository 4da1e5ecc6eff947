"""Does creating CUDA contexts in other processes move what the judge measures?

    python scripts/bench/context_noise.py --out scripts/bench/results/context_noise.json

One kernel of each size is judged again and again, alternately on a card that is otherwise idle and while other processes open a
context and leave again without a pause. Writes the medians of both, their spread, and how many contexts were made a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from serving import private_server, provenance

from sandbox.bench import TASK, TRITON
from sandbox.client import SandboxClient
from sandbox.protocol import Candidate, Options, TaskSpec

CHURN = """
import ctypes, os, sys
while True:
    if os.fork() == 0:
        cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        os._exit(0)
    if os.wait()[1]:
        sys.exit("no context could be made")
    print("made", flush=True)
"""
ROWS = {"4 MiB": 256, "64 MiB": 4096}


@contextlib.contextmanager
def churning(processes: int) -> Iterator[list[int]]:
    """Within it contexts are made and ended all the time; the list gets their number at the end."""
    running = [subprocess.Popen([sys.executable, "-c", CHURN], stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    made: list[int] = []
    try:
        yield made
    finally:
        for process in running:
            process.kill()
            made.append(len(process.communicate()[0].split()))


def timed(client: SandboxClient, task: TaskSpec, mark: str) -> dict:
    """One evaluation of the same kernel, made distinct by a comment."""
    candidate = Candidate(source=f"{TRITON.format(mark=0, block=1024)}# {mark}\n", language="triton")
    [result] = client.evaluate(task, [candidate], Options(timing="full"))
    if result.outcome != "ok" or result.timing is None:
        raise SystemExit(f"judged {result.outcome}: {result.feedback}")
    return {"us": 1e3 * result.timing.candidate.median_ms, "eager_us": 1e3 * result.timing.baselines["eager"].median_ms,
            "speedup": result.timing.speedup, "noisy": result.timing.noisy}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--evaluations", type=int, default=3, help="of each kind in a round")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    rows, contexts_per_s = [], []
    with private_server("cuda:0", 1) as server:
        for name, n_rows in ROWS.items():
            task = TaskSpec(reference=TASK.format(rows=n_rows, columns=4096), name=name, device="cuda:0")
            timed(server.client, task, "warm")
            found: dict[str, list[dict]] = {"idle": [], "churning": []}
            for turn in range(arguments.rounds):
                found["idle"] += [timed(server.client, task, f"idle {turn} {n}") for n in range(arguments.evaluations)]
                start = time.monotonic()
                with churning(arguments.processes) as made:
                    found["churning"] += [timed(server.client, task, f"churning {turn} {n}") for n in range(arguments.evaluations)]
                contexts_per_s.append(sum(made) / (time.monotonic() - start))
            row: dict = {"kernel": name}
            for kind, runs in found.items():
                times = [run["us"] for run in runs]
                row[kind] = {"median_us": statistics.median(times), "max_over_min": max(times) / min(times),
                             "median_speedup": statistics.median(run["speedup"] for run in runs), "runs": runs}  # fmt: skip
            row["churning_over_idle"] = row["churning"]["median_us"] / row["idle"]["median_us"]
            rows.append(row)
            print(json.dumps({k: {n: x for n, x in v.items() if n != "runs"} if isinstance(v, dict) else v for k, v in row.items()}), flush=True)
    report = {**provenance(), "processes": arguments.processes, "contexts_per_s": statistics.median(contexts_per_s), "kernels": rows}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"contexts_per_s": report["contexts_per_s"]}))


if __name__ == "__main__":
    main()
