"""A step that must not be learnt from stops the run, with what it would have learnt from saved: numbers that are not finite, and gradients
far larger than those before them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dk_jax.rollout.episode import StepRollouts
from dk_jax.rollout.trajectory import save_trajectories
from dk_jax.train.update import GradientSpike

NORM_WINDOW, FEWEST_NORMS = 20, 5
"""Gradient norms of which the median is taken, and how many there have to be before a spike can be told."""


class BadBatch(FloatingPointError):
    """An update that was not made; the message names the files of its batch."""


def largest_norm(record: dict[str, Any], spike: float) -> float | None:
    """The largest gradient norm that is applied: `spike` times the median of the last ones; None where there is no bound."""
    norms = record.get("norms", [])
    return spike * statistics.median(norms) if spike > 0 and len(norms) >= FEWEST_NORMS else None


def remembered(record: dict[str, Any], metrics: dict[str, float], *, keep_best: str, window: int) -> dict[str, Any]:
    """The record after a step: its gradient's norm, and its value of the metric `keep_best` ("" for none) among the last `window`."""
    record = dict(record)
    if "grad_norm" in metrics:
        record["norms"] = [*record.get("norms", []), metrics["grad_norm"]][-NORM_WINDOW:]
    if keep_best:
        recent = record.get("recent", {})
        values = recent["values"] if recent.get("metric") == keep_best else []
        record["recent"] = {"metric": keep_best, "values": [*values, metrics[keep_best]][-window:]}
    return record


def check_finite(metrics: dict[str, float]) -> None:
    """Raises FloatingPointError with the names of what is not finite."""
    if wrong := [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]:
        raise FloatingPointError(f"metrics are not finite: {', '.join(wrong)}")


def save_bad_batch(
    workdir: Path, step: int, error: FloatingPointError, rollouts: StepRollouts, batches: Sequence[dict[str, np.ndarray]]
) -> BadBatch:
    """Writes the rollouts of `step` as trajectories and its microbatches as arrays named NUMBER/FIELD, complete or not at all.

    Returns the error to raise: what happened, where the batch is, and how to go on.
    """
    rollouts_file, batch_file = (workdir / f"bad_batch_step_{step:05d}.{kind}" for kind in ("jsonl", "npz"))
    save_trajectories(rollouts_file, rollouts.trajectories)
    where = f"its rollouts are in {rollouts_file}"
    if batches:
        partial = batch_file.with_suffix(".part")
        with open(partial, "wb") as file:
            np.savez(file, **{f"{i}/{name}": array for i, batch in enumerate(batches) for name, array in batch.items()})
        partial.replace(batch_file)
        where = f"its microbatches are in {batch_file}, {where}"
    spike = " with a larger rl.max_grad_norm_spike, or 0, it is let pass;" if isinstance(error, GradientSpike) else ""
    return BadBatch(
        f"RL step {step} was not made: {error}. Checkpoints are as they were; {where}. To look into it: python scripts/trajectories.py "
        f"{rollouts_file}; --train_from={rollouts_file} makes this update alone, from the newest checkpoint;{spike} the same command goes on "
        "from that checkpoint"
    )
