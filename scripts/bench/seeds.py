"""What RL added, over finished runs of one recipe that differ in their seed.

    python scripts/bench/seeds.py runs/demo runs/demo_seed1 runs/demo_seed2 --out scripts/bench/results/NAME.json

For each number of the final table: mean and standard deviation over the seeds before and after RL, and the rise, whose spread is
that of the paired differences. A rise exceeds the spread when its mean is larger than both standard deviations over seeds; it is called
clear when besides its 95 % interval (Student's t over seeds, which is wide for three) lies above 0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from pathlib import Path

from scipy.special import stdtrit

MEASURES = {
    "compiled": lambda s: s["compiled"],
    "correct": lambda s: s["correct"],
    "Fast_1": lambda s: s["fast"]["1.0"],
    "Fast_1.5": lambda s: s["fast"]["1.5"],
    "mean speedup": lambda s: s["mean_speedup"],
}


def load(workdir: Path) -> dict:
    """Seed, scores and times of one finished run.

    Raises:
        SystemExit: the run has not finished, or is no run.
    """
    try:
        config = json.loads((workdir / "config.json").read_text())
        scores = {k: json.loads((workdir / f"eval_{k}.json").read_text()) for k in ("sft", "rl")}
        metrics = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise SystemExit(f"{workdir} holds no finished run ({error}): run scripts/demo.sh --workdir={workdir} to its end") from error
    rl = [row for row in metrics if row["phase"] == "rl"]
    return {
        "seed": config["seed"],
        "config": {k: v for k, v in config.items() if k != "seed"},
        "before": scores["sft"]["last_turn"],
        "after": scores["rl"]["last_turn"],
        "samples": scores["rl"]["last_turn"]["samples"],
        "skills": {k: rl[-1][f"skills_{k}"] for k in ("proposed", "verified", "active")},
        "rl_steps": len(rl),
    }


def summarise(runs: list[dict]) -> dict[str, dict]:
    """Per measure: before and after RL as (mean, sd), the rise as (mean, low, high), whether it exceeds the spread, and is clear."""
    out = {}
    for name, get in MEASURES.items():
        before, after = [get(r["before"]) for r in runs], [get(r["after"]) for r in runs]
        rises = [b - a for a, b in zip(before, after, strict=True)]
        rise = statistics.mean(rises)
        half = float(stdtrit(len(runs) - 1, 0.975)) * statistics.stdev(rises) / math.sqrt(len(runs))
        spread = max(statistics.stdev(before), statistics.stdev(after))
        out[name] = {
            "before": [statistics.mean(before), statistics.stdev(before)],
            "after": [statistics.mean(after), statistics.stdev(after)],
            "rise": [rise, rise - half, rise + half],
            "exceeds_spread": rise > spread,
            "clear": rise - half > 0 and rise > spread,
        }
    return out


def table(summary: dict[str, dict], runs: list[dict]) -> str:
    """The summary as plain text."""
    lines = [
        f"{len(runs)} seeds ({', '.join(str(r['seed']) for r in runs)}), {runs[0]['samples']} held-out samples each; mean ± sd over seeds",
        f"{'':14}{'before RL':>16}{'after RL':>16}{'rise [95 %]':>26}",
    ]
    for name, row in summary.items():
        scale, unit = (1.0, "x") if name == "mean speedup" else (100.0, "%")
        digits = 2 if unit == "x" else 1

        def shown(pair):
            return f"{scale * pair[0]:.{digits}f} ± {scale * pair[1]:.{digits}f} {unit}"  # noqa: B023

        rise, low, high = (scale * v for v in row["rise"])
        lines.append(
            f"{name:14}{shown(row['before']):>16}{shown(row['after']):>16}"
            f"{f'{rise:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]':>26}"
            f"{'  clear' if row['clear'] else '  exceeds the spread' if row['exceeds_spread'] else ''}"
        )
    skills = "; ".join("{proposed:.0f} / {verified:.0f} / {active:.0f}".format(**r["skills"]) for r in runs)
    return "\n".join([*lines, f"skills proposed / verified / active by seed: {skills}"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdirs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="write the summary and each run's scores here, as JSON")
    options = parser.parse_args(arguments)
    runs = [load(path) for path in options.workdirs]
    if len(runs) < 2:
        raise SystemExit("a spread over seeds needs at least two runs")
    if len({r["seed"] for r in runs}) < len(runs):
        raise SystemExit(f"runs share a seed ({[r['seed'] for r in runs]}): each needs its own --config.seed")
    for path, run in zip(options.workdirs, runs, strict=True):
        if run["config"] != runs[0]["config"]:
            raise SystemExit(f"{path} and {options.workdirs[0]} were run with different recipes: compare their config.json")
    summary = summarise(runs)
    print(table(summary, runs))
    if options.out:
        facts = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "cpus": os.cpu_count()}
        facts["cpu"] = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "unknown")
        # Without --out: where the file lay at first is no part of the result.
        command = " ".join(["python scripts/bench/seeds.py", *map(str, options.workdirs)])
        options.out.write_text(json.dumps({"command": command, **facts, "summary": summary, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
