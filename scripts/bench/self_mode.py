"""References timed against themselves, each in two jails of its own, by the judge's own parts: how far is the ratio from 1?

    python scripts/bench/self_mode.py --kernelbench DIRECTORY --out scripts/bench/results/self_mode.json [--levels 1] [--minutes 9]

On the tasks of a KernelBench checkout: 1.00 +- 0.02 is what it should be from 50 us on, and below that within the interval. What does not
fit, or fails by itself, is listed with its reason. The file is written as it goes; the same command goes on with the tasks that it
lacks. (`--device cpu` tries the script; a CPU's clock is another one.)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from serving import provenance

from dk_jax.tasks.kernelbench import load_kernelbench
from sandbox.build import BuildUnavailable
from sandbox.build.artifacts import ArtifactStore
from sandbox.jail.faults import JailError
from sandbox.oracle.clock import GPU_PLANS, PLANS, Side, measure
from sandbox.oracle.draft import Job
from sandbox.oracle.loading import Loader
from sandbox.oracle.reference import TaskRejected
from sandbox.protocol import Candidate, Options, TaskSpec

SLOTS = 3
NEAR, FROM_MS = 0.02, 0.05


@contextlib.contextmanager
def a_loader() -> Iterator[Loader]:
    """The judge's part that makes references, in this process."""
    with tempfile.TemporaryDirectory(prefix="self-") as directory:
        os.chmod(directory, 0o711)
        scratch = Path(directory) / "scratch"
        scratch.mkdir(mode=0o711)
        loader = Loader(
            scratch=scratch, store=ArtifactStore(Path(directory) / "store"), threads=1, interrupt=None, isolation=None,
            turns=lambda device: None,
        )  # fmt: skip
        try:
            loader.start()
            yield loader
        finally:
            loader.close()


def against_itself(loader: Loader, task: TaskSpec, gap_ms: float, options: Options | None = None) -> dict:
    """One pair of fresh jails with the same reference, timed against each other.

    Raises:
      TaskRejected: the reference fails. JailError: its process is gone.
    """
    job, on_gpu = Job(id=task.name, task=task, candidate=Candidate(source="", language="triton"), options=options or Options()), task.device != "cpu"
    with contextlib.ExitStack() as stack:
        sides = []
        for _ in range(2):
            reference = loader.reference(job)
            stack.callback(reference.close)
            for slot in range(SLOTS):
                reference.inputs(slot, slot)
            sides.append(Side(order=reference.order, slots=list(range(SLOTS)), deadline=lambda: 60.0, flushed=on_gpu, gap_ms=gap_ms))
        timing = measure(sides[0], {"eager": sides[1]}, (GPU_PLANS if on_gpu else PLANS)["full"], random.Random(0))  # as where calls are replayed
    own, other = timing.candidate.median_ms, timing.baselines["eager"].median_ms
    within = abs(timing.speedup - 1) <= NEAR if own >= FROM_MS else timing.speedup_low <= 1 <= timing.speedup_high
    return {
        "median_us": [1e3 * own, 1e3 * other], "ratio": timing.speedup,
        "interval": [timing.speedup_low, timing.speedup_high], "within": within,
    }  # fmt: skip


def summary(rows: list[dict]) -> str:
    timed = [row for row in rows if "ratio" in row]
    long, out = [row for row in timed if row["median_us"][0] >= 1e3 * FROM_MS], [row["task"] for row in timed if not row["within"]]
    furthest = max((abs(row["ratio"] - 1) for row in long), default=0.0)
    return (
        f"{len(timed)} tasks timed, {len(long)} of them from {1e3 * FROM_MS:.0f} us on (furthest from 1: {furthest:.3f}); not within: "
        f"{', '.join(out) or 'none'}; {len(rows) - len(timed)} not timed"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernelbench", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--levels", type=int, nargs="+", default=[1])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no task after so long; 0 for no limit")
    parser.add_argument("--only", nargs="*", default=[], help="names of tasks")
    arguments = parser.parse_args()
    found = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    known, started = {row["task"] for row in found}, time.monotonic()
    tasks = [task for task in load_kernelbench(arguments.kernelbench, arguments.levels) if not arguments.only or task.name in arguments.only]
    if not tasks:
        parser.error(f"--only: no such task in levels {arguments.levels}")
    options = Options(load_s=60.0, check_s=60.0, memory_bytes=64 << 30)
    with a_loader() as loader:
        gap_ms = loader.card.call_times(arguments.device).gap_ms
        for task in (task for task in tasks if task.name not in known):
            if arguments.minutes and time.monotonic() - started > 60 * arguments.minutes:
                break
            start = time.monotonic()
            spec = TaskSpec(reference=task.reference, name=task.name, device=arguments.device)
            try:
                row = against_itself(loader, spec, gap_ms, options)
            except (TaskRejected, JailError, BuildUnavailable) as error:
                row = {"failed": f"{type(error).__name__}: {error}"[:300]}
            found.append({"task": task.name, **row, "seconds": time.monotonic() - start})
            print(json.dumps(found[-1]), flush=True)
            arguments.out.write_text(json.dumps({**provenance(("torch",)), "gap_us": 1e3 * gap_ms, "rows": found}, indent=1) + "\n")
    print(summary(found))
    left = {task.name for task in tasks} - {row["task"] for row in found}
    return 3 if left else int(any(not row["within"] for row in found if "within" in row))


if __name__ == "__main__":
    raise SystemExit(main())
