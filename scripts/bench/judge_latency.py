"""How long the sandbox takes to judge a Triton candidate, and how repeated timings of one kernel spread.

    python scripts/bench/judge_latency.py --out latency.json

Starts a server of its own with an empty cache (or uses --socket), then: (1) judges N distinct candidates one
after another; (2) submits N more at once; (3) judges one kernel R times. Writes JSON with the card, versions,
date and command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from serving import private_server, provenance

from sandbox.bench import TASK, TRITON
from sandbox.client import SandboxClient
from sandbox.protocol import Candidate, EvaluationResult, Options, TaskSpec


def candidate(number: int, mark: str = "") -> Candidate:
    """A distinct Triton candidate: its own kernel name and one of three block sizes."""
    return Candidate(
        source=f"{TRITON.format(mark=number, block=(512, 1024, 2048)[number % 3])}# {mark}\n",
        language="triton",
    )


@contextlib.contextmanager
def _client(arguments: argparse.Namespace) -> Iterator[SandboxClient]:
    if arguments.socket:
        with contextlib.closing(SandboxClient(arguments.socket, timeout_s=60)) as client:
            yield client
    else:
        with private_server(arguments.device, arguments.workers) as server:
            yield server.client


def judged(result: EvaluationResult) -> dict:
    """The part of a verdict that this benchmark keeps."""
    timing = result.timing
    return {
        "outcome": result.outcome,
        "coverage": result.coverage,
        "speedup": timing and timing.speedup,
        "median_ms": timing and timing.candidate.median_ms,
        "interval_ms": timing and [timing.candidate.low_ms, timing.candidate.high_ms],
        "eager_ms": timing and timing.baselines["eager"].median_ms,
        "bound_by": timing and timing.bound_by,
        "stage_s": result.stage_s,
        "feedback": "" if result.outcome == "ok" else result.feedback[:500],
    }


def main() -> None:
    """Runs the three measurements and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--socket", help="use this running server instead of a private one")
    parser.add_argument(
        "--candidates", type=int, default=8, help="distinct candidates, for each of (1) and (2)"
    )
    parser.add_argument("--repeats", type=int, default=6, help="timings of one kernel, for (3)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2048, help="inputs are rows x 4096 numbers of 4 bytes")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    task = TaskSpec(reference=TASK.format(rows=arguments.rows, columns=4096), name="multiply_add", device=arguments.device)
    options = Options(timing="quick" if arguments.device.startswith("cuda") else "none")
    with _client(arguments) as client:
        client.evaluate(task, [candidate(9999, "warm-up")], options)
        idle = []
        for number in range(arguments.candidates):
            start = time.monotonic()
            (result,) = client.evaluate(task, [candidate(number)], options)
            idle.append({"seconds": time.monotonic() - start, **judged(result)})
            print(
                f"idle {number}: {idle[-1]['seconds']:.2f} s, {result.outcome}, stages {result.stage_s}",
                flush=True,
            )
        start = time.monotonic()
        batch = client.evaluate(task, [candidate(100 + n) for n in range(arguments.candidates)], options)
        batch_s = time.monotonic() - start
        repeats = [
            judged(client.evaluate(task, [candidate(0, f"repeat {n}")], Options(timing="full"))[0])
            for n in range(arguments.repeats)
        ]
    seconds = [entry["seconds"] for entry in idle]
    medians = [entry["median_ms"] for entry in repeats if entry["median_ms"]]
    report = {
        **provenance(),
        "latency_s": {"median": statistics.median(seconds), "best": min(seconds), "worst": max(seconds)},
        "batch": {
            "candidates": len(batch), "workers": arguments.workers, "seconds": batch_s,
            "per_s": len(batch) / batch_s, "ok": sum(result.outcome == "ok" for result in batch),
        },
        "spread": {
            "repeats": len(repeats),
            "median_ms": medians,
            "max_over_min": max(medians) / min(medians) if medians else None,
        },
        "idle": idle,
        "repeated": repeats,
    }  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1))
    print(json.dumps({key: report[key] for key in ("card", "latency_s", "batch", "spread")}, indent=1))


if __name__ == "__main__":
    main()
