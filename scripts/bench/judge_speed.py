"""How fast the judge is on a GPU, beside KernelBench's evaluator on the same candidates in the same run.

    python scripts/bench/judge_speed.py --out scripts/bench/results/judge_speed.json [--kernelbench DIRECTORY] [--only triton,cuda,...]

Every candidate is new to the server (empty cache). `triton` and `cuda`: latency of one after another on an idle server, a pause between
them, and throughput of many at once; `repeats`: judged ones again in batches; `calls`: the broker's part of a call, and 16 clients with
100 evaluations each on the CPU; `alone`: for how long a timing keeps the GPU; `gpus`, where there are two: throughput of both against
that of one, with the same server (contexts.py says what the driver does). KernelBench's evaluator gets a fresh process for each
candidate, as its users run it, with 16 CUDA builds at once for its throughput.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernelbench_peer
import psutil
from cuda_corpus import WARM
from serving import Server, awaited, private_server, provenance

from sandbox.bench import CPP, TASK, TRITON, seconds_alone, seconds_of
from sandbox.client import SandboxClient
from sandbox.protocol import Candidate, EvaluationResult, Options, TaskSpec
from tests.cuda_corpus import CASES

SECTIONS = ("triton", "cuda", "repeats", "calls", "alone", "gpus")
PAUSE_S = 1.0
"""Between candidates on an idle server, whose workers get ready for the next one meanwhile."""
BATCH, CLIENTS, TRIVIAL = 64, 16, 100

MARKS = itertools.count(1)
Pair = tuple[TaskSpec, Candidate]


def triton_pairs(rows: int = 2048, device: str = "cuda:0") -> Iterator[Pair]:
    """Distinct Triton candidates of one task; no two iterators give the same."""
    task = TaskSpec(reference=TASK.format(rows=rows, columns=4096), name=f"multiply_add_{rows}", device=device)
    while True:
        number = next(MARKS)
        yield task, Candidate(source=TRITON.format(mark=number, block=(512, 1024, 2048)[number % 3]), language="triton")


def cuda_pairs() -> list[Pair]:
    """The corpus' candidates that are meant to be right, each with its own task."""
    return [
        (TaskSpec(reference=case.task, name=case.name, device="cuda:0", dtype=case.dtype), Candidate(source=case.candidate, language="cuda"))
        for case in CASES
        if case.meant == "ok"
    ]


def right(client: SandboxClient, ids: Sequence[str]) -> list[EvaluationResult]:
    """Results of right candidates. Raises SystemExit for one that is judged otherwise."""
    found = awaited(client, ids)
    for result in found:
        if result.outcome != "ok":
            raise SystemExit(f"judged {result.outcome}: {result.feedback}")
    return found


def one_after_another(client: SandboxClient, pairs: Sequence[Pair], options: Options) -> dict:
    """Latencies on a server that is idle before each."""
    seconds, stages = [], []
    for task, candidate in pairs:
        time.sleep(PAUSE_S)
        start = time.monotonic()
        [result] = right(client, client.submit(task, [candidate], options))
        seconds.append(time.monotonic() - start)
        stages.append(result.stage_s)
    return {
        "candidates": len(seconds), "median_s": statistics.median(seconds), "worst_s": max(seconds), "seconds": seconds,
        "median_stage_s": middle_of(stages),
    }  # fmt: skip


def middle_of(stages: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each stage."""
    return {name: statistics.median(stage.get(name, 0.0) for stage in stages) for name in sorted(set().union(*stages))}


def at_once(client: SandboxClient, pairs: Sequence[Pair], options: Options) -> dict:
    """Throughput of all of them submitted at once, and how many of the machine's cores were busy meanwhile."""
    start, worked = time.monotonic(), psutil.cpu_times()
    ids = [client.submit(task, [candidate], options)[0] for task, candidate in pairs]
    stages = [result.stage_s for result in right(client, ids)]
    seconds = time.monotonic() - start
    busy = {name: getattr(psutil.cpu_times(), name) - getattr(worked, name) for name in ("user", "system")}
    totals = (sum(stage.values()) - stage.get("queued", 0.0) for stage in stages)
    spent = sorted(((total, task.name) for total, (task, _) in zip(totals, pairs, strict=True)), reverse=True)
    return {
        "candidates": len(pairs), "seconds": seconds, "per_s": len(pairs) / seconds, "median_stage_s": middle_of(stages),
        "busy_cores": {name: spent_s / seconds for name, spent_s in busy.items()},
        "mean_stage_s": {name: statistics.fmean(stage.get(name, 0.0) for stage in stages) for name in middle_of(stages)},
        "slowest": [{"task": name, "seconds": each} for each, name in spent[:5]],
    }  # fmt: skip


def triton(server: Server, arguments: argparse.Namespace) -> dict:
    options, pairs = Options(timing="quick"), triton_pairs()
    at_once(server.client, [next(pairs) for _ in range(3 * arguments.workers)], options)  # every worker has the reference
    idle = one_after_another(server.client, [next(pairs) for _ in range(arguments.idle)], options)
    return {"idle": idle, "at_once": at_once(server.client, [next(pairs) for _ in range(128)], options)}


def cuda(server: Server, arguments: argparse.Namespace) -> dict:
    options, pairs = Options(timing="quick"), cuda_pairs()
    warm = TaskSpec(reference=WARM.task, name=WARM.name, device="cuda:0")
    right(server.client, server.client.submit(warm, [Candidate(source=WARM.candidate, language="cuda")], options))
    step = len(pairs) // arguments.idle
    alone = pairs[::step][: arguments.idle]
    idle = one_after_another(server.client, alone, options)
    return {"idle": idle, "at_once": at_once(server.client, [pair for pair in pairs if pair not in alone][:64], options)}


def repeats(server: Server, arguments: argparse.Namespace) -> dict:
    pairs = triton_pairs()
    task = next(pairs)[0]
    batch = [candidate for _, candidate in (next(pairs) for _ in range(8))] * (BATCH // 8)
    server.client.evaluate(task, batch, Options(timing="quick"))
    rounds, start = 0, time.monotonic()
    while time.monotonic() - start < 3.0:
        server.client.evaluate(task, batch, Options(timing="quick"))
        rounds += 1
    return {"batch": BATCH, "per_s": rounds * BATCH / (time.monotonic() - start)}


def calls(_server: Server, arguments: argparse.Namespace) -> dict:
    """On a server of its own that judges on the CPU."""
    task = TaskSpec(reference=TASK.format(rows=4, columns=4), name="trivial", device="cpu")
    with private_server("cpu", arguments.workers) as server:
        candidate = Candidate(source=CPP.format(mark=0), language="cpp", form="kernel")
        server.client.evaluate(task, [candidate], Options(timing="none"))
        overhead = [seconds_of(server.client.health) for _ in range(400)]
        ended: dict[int, float] = {}
        barrier = threading.Barrier(CLIENTS)

        def work(number: int) -> None:
            candidates = [Candidate(source=CPP.format(mark=f"{number} {n}"), language="cpp", form="kernel") for n in range(TRIVIAL)]
            with SandboxClient(server.socket, timeout_s=600, name=f"client-{number}") as client:
                barrier.wait()
                start = time.monotonic()
                results = client.evaluate(task, candidates, Options(timing="none"))
                if any(result.outcome != "ok" for result in results):
                    raise SystemExit(f"client {number}: {[result.outcome for result in results]}")
                ended[number] = time.monotonic() - start

        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(work, range(CLIENTS)))
    return {
        "call_ms": 1e3 * statistics.median(overhead), "worst_call_ms": 1e3 * max(overhead), "clients": CLIENTS, "evaluations_each": TRIVIAL,
        "first_client_s": min(ended.values()), "last_client_s": max(ended.values()), "per_s": CLIENTS * TRIVIAL / max(ended.values()),
    }  # fmt: skip


def alone(server: Server, arguments: argparse.Namespace) -> dict:
    """Seconds for which the GPU is one evaluation's, by the size of the kernel and how it is timed."""
    found = {}
    for rows in (256, 4096, 32768):
        for timing in ("quick", "full"):
            pairs = triton_pairs(rows)
            task, first = next(pairs)
            right(server.client, server.client.submit(task, [first], Options(timing=timing)))  # the reference is there from now on
            before, results = seconds_alone(server.client), []
            for _ in range(5):
                results += right(server.client, server.client.submit(task, [next(pairs)[1]], Options(timing=timing)))
            each_s = (seconds_alone(server.client) - before) / len(results)
            spans = [result.timing.candidate for result in results if result.timing]
            found[f"{rows} rows, {timing}"] = {
                "alone_ms": 1e3 * each_s, "median_us": 1e3 * statistics.median(span.median_ms for span in spans),
                "half_interval": statistics.median((span.high_ms - span.low_ms) / 2 / span.median_ms for span in spans),
            }  # fmt: skip
    return found


def gpus(_server: Server, arguments: argparse.Namespace) -> dict:
    """On a server of its own that judges on all GPUs: one of them busy, then two."""
    options, each = Options(timing="quick"), 128
    with private_server("auto", 2 * arguments.workers) as server:
        if "cuda:1" not in server.client.health().devices:
            return {"skipped": "this host has one GPU"}
        pairs = [triton_pairs(device=f"cuda:{number}") for number in range(2)]

        def both(count: int) -> list[Pair]:
            return [pair for taken in zip(*(itertools.islice(one, count) for one in pairs), strict=True) for pair in taken]

        at_once(server.client, both(3 * arguments.workers), options)  # every worker has both references
        one = at_once(server.client, list(itertools.islice(pairs[0], each)), options)
        two = at_once(server.client, both(each), options)
    return {"one": one, "two": two, "ratio": two["per_s"] / one["per_s"]}


def kernelbench(checkout: Path, directory: Path) -> dict:
    """Wall time of KernelBench's evaluator on the first of the same candidates."""
    pairs = triton_pairs()
    some = {"triton": [next(pairs) for _ in range(3)], "cuda": cuda_pairs()[:16]}

    def judged(backend: str, number: int, pair: Pair) -> float:
        task, kernel = directory / f"{backend}{number}_task.py", directory / f"{backend}{number}.py"
        task.write_text(pair[0].reference)
        kernel.write_text(pair[1].source)
        return kernelbench_peer.evaluated(checkout, task, kernel, backend, correct_trials=5)["seconds"]

    one_triton = [judged("triton", number, pair) for number, pair in enumerate(some["triton"])]
    one_cuda = judged("cuda", 0, some["cuda"][0])
    start = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda one: judged("cuda", *one), enumerate(some["cuda"][1:], 1)))
    seconds = time.monotonic() - start
    return {
        "triton_s": one_triton, "cuda_s": [one_cuda],
        "cuda_at_once": {"candidates": len(together), "seconds": seconds, "per_s": len(together) / seconds, "each_s": together},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--idle", type=int, default=16, help="candidates of each kind one after another")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections")
    parser.add_argument("--kernelbench", type=Path, help="checkout of KernelBench")
    arguments = parser.parse_args()
    named = [name for name in arguments.only.split(",") if name]
    if unknown := set(named) - set(SECTIONS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is unknown; there are {', '.join(SECTIONS)}")
    report = {**provenance(), "workers": arguments.workers}

    def keep(name: str, found: dict) -> None:
        report[name] = found
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps({name: found}), flush=True)

    with private_server("cuda:0", arguments.workers) as server:
        for name in named:
            keep(name, {"triton": triton, "cuda": cuda, "repeats": repeats, "calls": calls, "alone": alone, "gpus": gpus}[name](server, arguments))
    if arguments.kernelbench:
        with tempfile.TemporaryDirectory() as directory:
            keep("kernelbench", kernelbench(arguments.kernelbench, Path(directory)))


if __name__ == "__main__":
    main()
