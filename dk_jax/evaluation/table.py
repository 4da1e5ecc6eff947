"""The table a finished run prints."""

from __future__ import annotations

from typing import Any


def final_table(results: dict[str, Any]) -> str:
    """Held-out scores before and after RL, skills, and paths, as plain text.

    Args:
        results: what `dk_jax.train.run.Run.all` returns.
    """
    before, after = results["before"]["last_turn"], results["after"]["last_turn"]
    skills = results["skills"]

    def share(value: float) -> str:
        return f"{100 * value:8.1f} %"

    rows = [
        ("compiled", share(before["compiled"]), share(after["compiled"])),
        ("correct", share(before["correct"]), share(after["correct"])),
        ("Fast_1", share(before["fast"]["1.0"]), share(after["fast"]["1.0"])),
        ("Fast_1.5", share(before["fast"]["1.5"]), share(after["fast"]["1.5"])),
        ("mean speedup *", f"{before['mean_speedup']:8.2f} x", f"{after['mean_speedup']:8.2f} x"),
    ]
    lines = [
        "",
        f"held-out tasks, {after['samples']} samples of the last turn",
        f"{'':16}{'before RL':>12}{'after RL':>12}",
        *(f"{name:16}{a:>12}{b:>12}" for name, a, b in rows),
        "* over PyTorch eager; a sample that is not correct counts as 0",
        "",
        f"skills: {skills['proposed']} proposed, {skills['verified']} verified, {skills['active']} active",
        "",
        *(f"{name:12}{path}" for name, path in results["paths"].items()),
    ]
    return "\n".join(lines)
