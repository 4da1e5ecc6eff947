"""Does the judge's clock agree with itself, with the hardware's counters, and with 1 for a reference against itself?

    python scripts/bench/gpu_clock.py --out clock.json [--evaluations 20] [--only self,spread,ncu] [--load 8] [--kernelbench DIRECTORY]

On one NVIDIA GPU, with a server of its own:
(1) spread: a few kernels, each judged afresh --evaluations times: largest over smallest median, and their difference.
(2) self: references timed against themselves in two jails: the ratio and its interval.
(3) ncu: the median of each of twenty kernels (clock_kernels.py) beside ncu's duration, caches cleared, clocks as they are; apart
    from it (host_us) what the host takes to issue a call.
(4) KernelBench's evaluator, where a checkout is at hand, on the kernels of (1): its spread beside ours.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import kernelbench_peer
from clock_kernels import cases
from self_mode import a_loader, against_itself
from serving import Server, private_server, provenance

from sandbox.bench import TASK, TRITON
from sandbox.client import SandboxClient
from sandbox.protocol import Candidate, EvaluationResult, Options, TaskSpec

SPREAD = ("bench_chain_8192", "bench_softmax_512_1024", "bench_chain_4194304", "bench_softmax_4096_4096", "bench_matmul_1024")
SELF = ("bench_chain_65536", "bench_chain_4194304", "bench_chain_67108864", "bench_softmax_4096_4096", "bench_matmul_2048")
SELF_PAIRS, SHORT_PAIRS = 3, 12
"""Pairs of a reference with itself: whether a difference stays with the pair (where its memory lies) or not. Of the first, whose calls
are short, more: how often the interval holds 1."""
NCU_S = 400.0


def judged(client: SandboxClient, case, *marks: str) -> list[dict]:
    """Fresh evaluations of a case, one a mark, all at once: medians in ms (ordinary and audited calls), speedup, what ruled, whether
    noisy, seconds from asking to the verdict."""
    results = client.evaluate(
        TaskSpec(reference=case.task, name=case.name, device="cuda:0", atol=case.atol),
        [Candidate(source=f"{case.kernel}\n# {mark}\n", language="triton") for mark in marks],
        Options(correctness_trials=1),
    )
    found = []
    for result in results:
        if result.outcome != "ok" or result.timing is None:
            raise SystemExit(f"{case.name} was judged {result.outcome}: {result.feedback}")
        timing = result.timing
        found.append({
            "ms": timing.candidate.median_ms, "eager_ms": timing.baselines["eager"].median_ms, "speedup": timing.speedup,
            "ruled_by": timing.bound_by, "noisy": timing.noisy, "seconds": sum(result.stage_s.values()),
            "audited_ms": timing.audited.candidate.median_ms if timing.audited else None, "host_ms": timing.candidate.host_ms,
        })  # fmt: skip
    return found


@contextlib.contextmanager
def loaded(server: Server, workers: int) -> Iterator[None]:
    """Within it the server always has more distinct Triton candidates to judge than workers."""
    task, ended = TaskSpec(reference=TASK.format(rows=2048, columns=4096), name="load", device="cuda:0"), threading.Event()
    judged_ones: list[EvaluationResult] = []
    problems: list[str] = []

    def work(number: int) -> None:
        with SandboxClient(server.socket, timeout_s=300, name=f"load-{number}") as client:
            turn = 0
            while not ended.is_set():
                turn += 1
                marks = [f"{number}_{turn}_{n}" for n in range(2)]
                some = [Candidate(source=TRITON.format(mark=mark, block=1024), language="triton") for mark in marks]
                results = client.evaluate(task, some, Options(timing="quick"))
                judged_ones.extend(results)
                problems.extend(result.feedback for result in results if result.outcome != "ok")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    try:
        while len(judged_ones) < 2 * workers:  # every worker has its reference
            time.sleep(0.1)
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    print(json.dumps({"judged_as_load": len(judged_ones)}), flush=True)
    if problems:
        raise SystemExit(f"{len(problems)} of the load were not judged ok: {problems[0]}")


def spread(client: SandboxClient, evaluations: int, *, at_once: bool) -> list[dict]:
    """Largest and smallest median of each kernel; of evaluations `at_once` where others fill the server anyway, else one after another."""
    rows = []
    for case in (c for c in cases() if c.name in SPREAD):
        marks = [f"spread {n}" for n in range(evaluations)]
        runs = judged(client, case, *marks) if at_once else [run for mark in marks for run in judged(client, case, mark)]
        ms = [run["ms"] for run in runs]
        limit = 1.03 if min(ms) > 0.05 else 1.10
        within = max(ms) - min(ms) <= 0.001 if min(ms) < 0.01 else max(ms) / min(ms) <= limit
        rows.append(
            {
                "kernel": case.name, "median_us": 1e3 * statistics.median(ms), "ratio": max(ms) / min(ms),
                "difference_us": 1e3 * (max(ms) - min(ms)), "within": within,
                "speedups": [min(r["speedup"] for r in runs), max(r["speedup"] for r in runs)],
                "audited_us": sorted(1e3 * r["audited_ms"] for r in runs if r["audited_ms"]),
                "ruled_by": sorted({r["ruled_by"] for r in runs}),
                "host_us": 1e3 * statistics.median(r["host_ms"] for r in runs), "seconds": statistics.median(r["seconds"] for r in runs),
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def self_mode() -> list[dict]:
    """References against themselves, by the judge's own parts in this process."""
    rows = []
    with a_loader() as loader:
        found = loader.card.call_times("cuda:0")
        print(json.dumps({"gap_us": 1e3 * found.gap_ms, "least_us": 1e3 * found.least_ms}), flush=True)
        for case in (c for c in cases() if c.name in SELF):
            task = TaskSpec(reference=case.task, name=case.name, device="cuda:0")
            for number in range(SHORT_PAIRS if case.name == SELF[0] else SELF_PAIRS):
                rows.append({"task": case.name, "pair": number, **against_itself(loader, task, found.gap_ms)})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def ncu_durations() -> dict[str, list[float]]:
    """What ncu says of each kernel's launches, in us; nothing else may use the card meanwhile."""
    command = [
        "ncu", "--csv", "--clock-control", "none", "--cache-control", "all", "--metrics", "gpu__time_duration.sum",
        "--kernel-name", "regex:^bench_", sys.executable, str(Path(__file__).with_name("clock_kernels.py")),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=NCU_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or not lines:
        raise SystemExit(f"ncu gave no durations: {(done.stderr or done.stdout)[-2000:]}")
    durations: dict[str, list[float]] = {}
    units = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        value = float(row["Metric Value"].replace(",", "")) * units[row["Metric Unit"]]
        durations.setdefault(row["Kernel Name"].split("(")[0], []).append(value)
    return durations


def against_ncu(client: SandboxClient, durations: dict[str, list[float]]) -> list[dict]:
    """Our medians beside ncu's mean duration of the launches after the first two."""
    rows = []
    for case in cases():
        [ours] = judged(client, case, "ncu")
        theirs_us = statistics.fmean(durations[case.name][2:])
        ours_us = 1e3 * ours["ms"]
        within = abs(ours_us - theirs_us) <= max(1.0, 0.05 * theirs_us)
        rows.append(
            {"kernel": case.name, "ours_us": ours_us, "ncu_us": theirs_us, "launches": len(durations[case.name]),
             "audited_us": ours["audited_ms"] and 1e3 * ours["audited_ms"], "host_us": 1e3 * ours["host_ms"],
             "ruled_by": ours["ruled_by"], "within": within}
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def kernelbench(checkout: Path, evaluations: int) -> list[dict]:
    """The spread of KernelBench's evaluator on the kernels of (1), a fresh process an evaluation."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for case in (c for c in cases() if c.name in SPREAD):
            task, kernel = Path(directory) / "task.py", Path(directory) / "kernel.py"
            task.write_text(case.task)
            kernel.write_text(case.kernel)
            ms, seconds = [], []
            for _ in range(evaluations):
                found = kernelbench_peer.evaluated(checkout, task, kernel, "triton", correct_trials=3)
                seconds.append(found["seconds"])
                ms.append(found["ms"])
            rows.append(
                {"kernel": case.name, "evaluations": evaluations, "median_us": 1e3 * statistics.median(ms),
                 "ratio": max(ms) / min(ms), "difference_us": 1e3 * (max(ms) - min(ms)), "seconds": statistics.median(seconds)}
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--evaluations", type=int, default=20)
    parser.add_argument("--only", default="self,spread,ncu", help="which of self, spread, ncu")
    parser.add_argument("--load", type=int, default=0, metavar="WORKERS", help="measure spread and ncu while so many workers are busy")
    parser.add_argument("--kernelbench", type=Path, help="checkout of KernelBench")
    parser.add_argument("--kernelbench-evaluations", type=int, default=6)
    arguments = parser.parse_args()
    wanted = set(arguments.only.split(",")) - {""}
    if unknown := wanted - {"self", "spread", "ncu"}:
        parser.error(f"--only knows self, spread and ncu, not {', '.join(sorted(unknown))}")
    found = {**provenance(), "load": arguments.load}

    def keep(name: str, rows: list[dict]) -> None:
        found[name] = rows
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")

    if "self" in wanted:
        keep("self", self_mode())
    if wanted & {"spread", "ncu"}:
        durations = ncu_durations() if "ncu" in wanted else {}
        with private_server("cuda:0", arguments.load or 1) as server:
            with loaded(server, arguments.load) if arguments.load else contextlib.nullcontext():
                if "spread" in wanted:
                    keep("spread", spread(server.client, arguments.evaluations, at_once=arguments.load > 0))
                if "ncu" in wanted:
                    keep("ncu", against_ncu(server.client, durations))
    if arguments.kernelbench:
        keep("kernelbench", kernelbench(arguments.kernelbench, arguments.kernelbench_evaluations))
    rows = [row for name in ("self", "spread", "ncu") for row in found.get(name, ())]
    print(f"{sum(row['within'] for row in rows)} of {len(rows)} within the limits -> {arguments.out}")


if __name__ == "__main__":
    main()
