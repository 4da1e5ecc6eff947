"""What the sandbox's benchmarks share: a private server, its processes, and where a result comes from."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from sandbox.client import SandboxClient, SandboxUnavailable  # noqa: E402
from sandbox.jail import nvml  # noqa: E402
from sandbox.protocol import EvaluationResult  # noqa: E402

START_S = 120.0


@dataclass(frozen=True)
class Server:
    """A running private server."""

    process: subprocess.Popen
    client: SandboxClient
    socket: str
    scratch: Path
    """Where its processes have their private directories."""
    log: Path


@contextlib.contextmanager
def private_server(
    device: str, workers: int, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server of its own with an empty cache and a temporary directory of its own. `environment`: variables that it gets besides.

    Raises:
      SystemExit: it does not answer within two minutes; its log goes with it.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        socket, log, scratch = f"{directory}/s.sock", Path(directory) / "log", Path(directory) / "tmp"
        scratch.mkdir()
        command = [sys.executable, "-m", "sandbox", "serve", "--socket", socket, "--device", device]
        with open(log, "w") as output:
            process = subprocess.Popen(
                [*command, "--workers", str(workers), "--cache", f"{directory}/cache", *arguments],
                cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {}), "TMPDIR": str(scratch)},
            )  # fmt: skip
        client, deadline = SandboxClient(socket, timeout_s=60, retry_for_s=120), time.monotonic() + START_S
        try:
            while True:
                with contextlib.suppress(SandboxUnavailable):
                    if client.health().queue.workers_ready:
                        break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start:\n{log.read_text()[-4000:]}")
                time.sleep(0.1)
            yield Server(process, client, socket, scratch, log)
        finally:
            client.close()
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def awaited(client: SandboxClient, ids: Sequence[str]) -> list[EvaluationResult]:
    """Results of evaluations that were submitted, however long they take."""
    found = []
    for evaluation_id in ids:
        result = client.result(evaluation_id)
        while result.state != "done":
            result = client.result(evaluation_id)
        found.append(result)
    return found


def builds_of(result: EvaluationResult) -> dict[str, Any]:
    """The road of each of a candidate's extensions, None for one that did not build, and the seconds that it waited for it."""
    return {"roads": [build.road for build in result.builds], "build_s": [round(build.seconds, 2) for build in result.builds]}


def by_road(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many extensions were built by each road ("none": did not build), and each road's share of those that were built.

    Args:
      rows: with `builds_of` their results.
    """
    counts = Counter(road or "none" for row in rows for road in row["roads"])
    built = sum(count for road, count in counts.items() if road != "none")
    shares = {road: round(count / built, 4) for road, count in counts.items() if road != "none"}
    return {"extensions_by_road": dict(counts), "share_by_road": shares}


def provenance(packages: Sequence[str] = ("torch", "triton", "numpy")) -> dict[str, Any]:
    """Command, date, machine and versions, as every result names them."""
    card = next(iter(nvml.gpus()), None) if os.path.exists("/dev/nvidiactl") else None
    command = [Path(sys.argv[0]).name, *(Path(a).name if a.startswith("/") else a for a in sys.argv[1:])]
    return {
        "command": "python scripts/bench/" + shlex.join(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "card": card and {"name": card.name, "arch": card.arch, "driver": card.driver, "bytes": card.total_bytes},
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }
