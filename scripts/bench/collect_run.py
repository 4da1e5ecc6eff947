"""Gathers what a training run leaves as evidence into one small folder that can be committed.

    python scripts/bench/collect_run.py runs/smollm2 scripts/bench/results/smollm2_triton --rollouts 40

The folder then holds metrics.jsonl, config.json, library.jsonl and the evaluations as they are; sample.md, model-written kernels with
their verdicts (the fastest correct one of each task first, then failures drawn evenly over their outcomes); and facts.json with card,
versions, date and the counts of every outcome by step.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import random
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path

from dk_jax.rollout.trajectory import Trajectory, load_trajectories

KEPT = ("metrics.jsonl", "library.jsonl", "eval_sft.json", "eval_rl.json")
PACKAGES = ("jax", "flax", "optax", "torch", "triton", "transformers", "numpy")


def card() -> str:
    """Names of the GPUs and the driver, or "none"."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def versions() -> dict[str, str]:
    """Installed versions of what computes."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def policy_rollouts(workdir: Path) -> list[tuple[int, Trajectory]]:
    """(RL step, policy trajectory), in order.

    Raises:
        SystemExit: the run kept no rollouts.
    """
    files = sorted((workdir / "rollouts").glob("step_*.jsonl"))
    if not files:
        raise SystemExit(f"{workdir}/rollouts holds no step_*.jsonl: the run has not reached RL, or rl.keep_rollouts was off")
    return [(int(f.stem.split("_")[1]), t) for f in files for t in load_trajectories(f) if t.agent == "policy"]


def sample(rollouts: list[tuple[int, Trajectory]], count: int, seed: int = 0) -> list[tuple[int, Trajectory, int]]:
    """At most `count` judged turns (step, trajectory, turn): the best correct one of each task, then failures of every outcome."""
    turns = [(step, t, i) for step, t in rollouts for i, turn in enumerate(t.turns) if turn.verdict is not None]
    best: dict[str, tuple[int, Trajectory, int]] = {}
    failed: dict[str, list] = {}
    for entry in turns:
        _, t, i = entry
        verdict = t.turns[i].verdict
        if verdict.correct:
            known = best.get(t.task)
            if known is None or verdict.speedup > known[1].turns[known[2]].verdict.speedup:
                best[t.task] = entry
        else:
            failed.setdefault(verdict.outcome, []).append(entry)
    rng = random.Random(seed)
    for entries in failed.values():
        rng.shuffle(entries)
    picked = sorted(best.values(), key=lambda e: -e[1].turns[e[2]].verdict.speedup)[:count]
    while len(picked) < count and any(failed.values()):
        picked += [entries.pop() for entries in failed.values() if entries][: count - len(picked)]
    return picked


def rendered(picked: list[tuple[int, Trajectory, int]], fence: str) -> str:
    """The sample as Markdown."""
    parts = ["# Kernels written by the model, with their verdicts\n"]
    for step, t, i in picked:
        turn = t.turns[i]
        v = turn.verdict
        speed = f", {v.speedup:.2f}x over eager" if v.correct else ""
        coverage = f", coverage {v.coverage:.0%}" if v.coverage is not None else ""
        skills = f", skills: {', '.join(t.skills)}" if t.skills else ""
        parts.append(f"## {t.task}: {v.outcome}{speed}{coverage}\n\nRL step {step}, turn {i + 1}, reward {turn.reward:.2f}{skills}\n")
        parts.append("".join(f"> {line}\n" for line in v.feedback.splitlines()))
        parts.append(f"```{fence}\n{(turn.source or turn.text).rstrip()}\n```\n")
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rollouts", type=int, default=40, help="judged turns in sample.md")
    parser.add_argument("--command", default="", help="the command that was run, for facts.json")
    options = parser.parse_args(arguments)
    rollouts = policy_rollouts(options.workdir)
    config = json.loads((options.workdir / "config.json").read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (options.workdir / name).exists():
            shutil.copy(options.workdir / name, options.out / name)
    if config.get("model", {}).get("source"):  # where the weights lay is nobody's business
        config["model"]["source"] = Path(config["model"]["source"]).name
    (options.out / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    fence = {"cpp": "cpp", "cuda": "python", "triton": "python"}[config["sandbox"]["language"]]
    (options.out / "sample.md").write_text(rendered(sample(rollouts, options.rollouts), fence), encoding="utf-8")
    by_step: dict[int, Counter] = {}
    for step, t in rollouts:
        by_step.setdefault(step, Counter()).update(v.outcome for v in t.verdicts)
    facts = {"date": time.strftime("%Y-%m-%d"), "card": card(), "versions": versions(), "command": options.command}
    facts["outcomes_by_step"] = {str(step): dict(counts) for step, counts in sorted(by_step.items())}
    (options.out / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rollouts)} rollouts of {len(by_step)} steps -> {options.out}")


if __name__ == "__main__":
    main()
