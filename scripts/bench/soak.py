"""A long run of honest and hostile candidates while oracle processes are killed at random: is anything lost, wrong or left over?

    python scripts/bench/soak.py --device cpu --evaluations 2000 --out scripts/bench/results/soak_cpu.json

A third of the candidates hang, crash, leave with status 0, eat memory, fork, fill the disk, flood the output or break the compiler.
Every one has the verdicts that it may get; a result that never comes, another verdict, a process that outlives its
evaluation, a file or GPU memory left behind is a failure, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from serving import Server, private_server, provenance
from soak_candidates import CPU_KINDS, GPU_KINDS, Kind, task

from sandbox.client import SandboxClient
from sandbox.jail import nvml
from sandbox.jail.device_cuda import physical_index
from sandbox.protocol import Candidate, Options

DEADLINE_S = 3.0
BATCH = 16
LEAVE_S = 20.0
SETTLE_S = 5.0
"""Workers get ready for what comes next."""


class Watch(threading.Thread):
    """Remembers every process under the server, and kills one of its oracle processes now and then."""

    def __init__(self, server: Server, kill_every_s: float, seed: int):
        super().__init__(daemon=True)
        self.seen: dict[int, float] = {}
        self.kills = 0
        self._root = psutil.Process(server.process.pid)
        self._every_s, self._rng = kill_every_s, random.Random(seed)
        self._stopped = threading.Event()

    def run(self) -> None:
        next_kill = time.monotonic() + self._every_s
        while not self._stopped.wait(0.2):
            for child in self._root.children(recursive=True):
                try:
                    self.seen[child.pid] = child.create_time()
                except psutil.NoSuchProcess:
                    continue
            if self._every_s and time.monotonic() > next_kill:
                next_kill = time.monotonic() + self._every_s * self._rng.uniform(0.5, 1.5)
                oracles = [p for p in self._root.children() if _is_oracle(p)]
                if oracles:
                    self._rng.choice(oracles).kill()
                    self.kills += 1

    def spare(self) -> None:
        """Kills no more, and goes on watching."""
        self._every_s = 0.0

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def alive(self) -> list[int]:
        """Pids seen under the server that still run."""
        found = []
        for pid, born in self.seen.items():
            try:
                process = psutil.Process(pid)
                if process.create_time() == born and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
            except psutil.NoSuchProcess:
                continue
        return found


def _is_oracle(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
        return "sandbox.oracle.worker" in " ".join(process.cmdline())
    return False


def plan(kinds: tuple[Kind, ...], count: int, seed: int) -> list[tuple[Kind, Candidate]]:
    """`count` distinct candidates in the mix's proportions, in random order."""
    rng = random.Random(seed)
    drawn = rng.choices(kinds, [kind.weight for kind in kinds], k=count)
    return [(kind, kind.write(number)) for number, kind in enumerate(drawn)]


def soak(client: SandboxClient, jobs: list[tuple[Kind, Candidate]], device: str, clients: int) -> list[dict[str, Any]]:
    """Judges all jobs from `clients` threads; returns one record a job, in order."""
    options = Options(
        correctness_trials=2, timing="quick", build_s=20, load_s=20, check_s=DEADLINE_S, time_s=DEADLINE_S,
        memory_bytes=1 << 30 if device == "cpu" else 8 << 30,
    )  # fmt: skip
    records: list[dict[str, Any]] = [{} for _ in jobs]
    batches = [range(at, min(at + BATCH, len(jobs))) for at in range(0, len(jobs), BATCH)]
    lock, started = threading.Lock(), time.monotonic()
    done = 0

    def work() -> None:
        nonlocal done
        while True:
            with lock:
                if not batches:
                    return
                batch = batches.pop(0)
            results = client.evaluate(task(device), [jobs[n][1] for n in batch], options)
            for number, result in zip(batch, results, strict=True):
                kind = jobs[number][0]
                records[number] = {
                    "kind": kind.name, "outcome": result.outcome, "right": result.outcome in kind.outcomes,
                    "attempts": result.attempts, "feedback": result.feedback[:300],
                }  # fmt: skip
            with lock:
                done += len(batch)
                print(f"{done}/{len(jobs)}  {time.monotonic() - started:.0f} s", flush=True)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return records


def device_bytes(device: str) -> int:
    """GPU memory in use by all processes; 0 for a CPU."""
    return 0 if device == "cpu" else sum(nvml.memory_by_process(physical_index(device)).values())


def settled(server: Server, kind: Kind, device: str, workers: int, first: int) -> str:
    """Lets every worker judge something honest, and waits until none has anything to do; returns the server's state. What its workers hold
    ready for the next evaluations is then the same at any time.

    Args:
      first: number of the first candidate; no other has it.
    """
    for turn in range(2):
        numbers = range(first + turn * 4 * workers, first + (turn + 1) * 4 * workers)
        server.client.evaluate(task(device), [kind.write(number) for number in numbers], Options(correctness_trials=1, timing="none"))
    deadline = time.monotonic() + LEAVE_S
    while time.monotonic() < deadline:
        health = server.client.health()
        if health.status == "ok" and not health.queue.running and not health.queue.waiting:
            break
        time.sleep(0.2)
    time.sleep(SETTLE_S)
    return server.client.health().status


def main() -> int:
    """Runs the soak and writes its report; 1 if anything was lost, wrong or left over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--kill-every-s", type=float, default=20.0, help="mean time between two kills; 0 kills none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    kinds = CPU_KINDS if arguments.device == "cpu" else GPU_KINDS
    jobs = plan(kinds, arguments.evaluations, arguments.seed)
    with private_server(arguments.device, arguments.workers) as server:
        settled(server, kinds[0], arguments.device, arguments.workers, len(jobs))
        memory_before = device_bytes(arguments.device)
        watch = Watch(server, arguments.kill_every_s, arguments.seed)
        watch.start()
        started = time.monotonic()
        records = soak(server.client, jobs, arguments.device, arguments.clients)
        seconds = time.monotonic() - started
        watch.spare()
        status = settled(server, kinds[0], arguments.device, arguments.workers, 2 * len(jobs) + 100 * arguments.workers)
        watch.stop()
        memory_after = device_bytes(arguments.device)
        files = [f"{p.parent.name}/{p.name}" for p in server.scratch.glob("dk_sandbox-*/*/*")]
    time.sleep(1.0)
    memory_stopped = device_bytes(arguments.device)
    orphans = watch.alive()
    wrong = [record for record in records if not record.get("right")]
    by_kind = {k.name: dict(Counter(r["outcome"] for r in records if r.get("kind") == k.name)) for k in kinds}
    report = {
        **provenance(),
        "evaluations": len(jobs), "seconds": seconds, "hostile": sum(kind.hostile for kind, _ in jobs),
        "lost": sum(not record for record in records), "wrong": wrong, "outcomes": by_kind,
        "oracles_killed": watch.kills, "judged_again": sum(r.get("attempts", 0) > 1 for r in records),
        "orphans": len(orphans), "processes_seen": len(watch.seen), "files_in_scratch_before_stop": files,
        "device_bytes": {"before": memory_before, "after": memory_after, "stopped": memory_stopped}, "status_at_end": status,
    }  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "wrong"}, indent=1))
    for record in wrong[:20]:
        print("WRONG", record)
    leaked = memory_after - memory_before > 256 << 20 or memory_stopped
    return int(bool(wrong or orphans or leaked or report["lost"] or status != "ok"))


if __name__ == "__main__":
    raise SystemExit(main())
