"""How long a runner takes to enter its jail, by isolation level.

    python scripts/bench/jail_entry.py [--runs=40] [--out=scripts/bench/results/jail_entry.json]

Per level: `forked_ms`, from the order to the zygote until the process is confined (the trusted side waits for
it); `answered_ms`, until the runner has answered a first order; `ended_ms`, for killing it and reaping the
jail. Levels take turns, so that other load on the machine falls on all of them. The machine's other work is
not controlled: `load` says how much there was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import time
from pathlib import Path

from serving import provenance

from sandbox.jail.limits import Limits
from sandbox.jail.probe import offered
from sandbox.jail.spawn import Zygote
from sandbox.settings import make_scratch

MEMORY_BYTES = 1 << 30
EMPTY_MODULE = "class ModelNew:\n    pass\n"


def enter(zygote: Zygote) -> dict[str, float]:
    """Times of one runner's life, in milliseconds."""
    times = [time.perf_counter()]
    runner = zygote.runner(Limits(memory_bytes=MEMORY_BYTES), MEMORY_BYTES)
    times.append(time.perf_counter())
    runner.call(
        "load_module",
        20.0,
        source=EMPTY_MODULE,
        entry_point="ModelNew",
        dtype="float32",
        device="cpu",
        language="cpp",
        seed=0,
        init=[],
        tensors=[],
    )
    times.append(time.perf_counter())
    runner.close()
    times.append(time.perf_counter())
    spans = [1000 * (after - before) for before, after in zip(times[:-1], times[1:], strict=True)]
    return {"forked_ms": spans[0], "answered_ms": spans[0] + spans[1], "ended_ms": spans[2]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40, help="jails of each level")
    parser.add_argument("--out", type=Path, help="also write the result here, as JSON")
    arguments = parser.parse_args()
    scratch = make_scratch()
    levels = [level for level, problem in offered().problems.items() if not problem]
    zygotes = {
        level: Zygote(modules=["torch"], threads=1, directory=scratch, level=level) for level in levels
    }
    samples: dict[str, list[dict[str, float]]] = {level: [] for level in levels}
    try:
        for _ in range(arguments.runs):
            for level, zygote in zygotes.items():
                samples[level].append(enter(zygote))
    finally:
        for zygote in zygotes.values():
            zygote.close()
        shutil.rmtree(scratch, ignore_errors=True)
    summary = {
        level: {
            name: {
                "median": round(statistics.median(run[name] for run in runs), 2),
                "least": round(min(run[name] for run in runs), 2),
                "most": round(max(run[name] for run in runs), 2),
            }
            for name in runs[0]
        }
        for level, runs in samples.items()
    }
    result = {
        **provenance(),
        "kernel": platform.release(),
        "user": "root" if os.getuid() == 0 else "ordinary",
        "control_groups": not offered().no_cgroups,
        "load": os.getloadavg()[0],
        "runs": arguments.runs,
        "summary": summary,
        "samples": samples,
    }
    print(json.dumps({name: value for name, value in result.items() if name != "samples"}, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
