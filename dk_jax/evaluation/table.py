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
        *_calls(results),
        "",
        f"skills: {skills['proposed']} proposed, {skills['verified']} verified, {skills['active']} active",
        "",
        *(f"{name:12}{path}" for name, path in results["paths"].items()),
    ]
    return "\n".join(lines)


def _calls(results: dict[str, Any]) -> list[str]:
    """How many of the agents' calls on held-out tasks can be used, if they were asked; and first turns, if the untrained model was."""
    columns = {"untrained": results.get("untrained"), "before RL": results["before"], "after RL": results["after"]}
    found = {title: scores for title, scores in columns.items() if scores is not None}
    calls = {title: scores.get("calls", {}) for title, scores in found.items()}
    if not any(calls.values()) and "untrained" not in found:
        return []
    lines = ["", f"{'':32}" + "".join(f"{title:>12}" for title in found)]
    for key in ("compiled", "correct"):
        shares = [scores["turns"][0][key] if scores["turns"] else None for scores in found.values()]
        lines.append(f"{'first turn ' + key:32}" + "".join(_share(share) for share in shares))
    for agent, name, key in (("selection", "selection calls that parse", "parsed"), ("summary", "summary calls that parse", "parsed"),
                             ("summary", "... with a usable skill", "usable")):  # fmt: skip
        shares = [own.get(agent, {}).get(key) for own in calls.values()]
        if any(shares):
            lines.append(f"{name:32}" + "".join(_share(share and share["share"]) for share in shares))
    return lines


def _share(value: float | None) -> str:
    return f"{100 * value:10.1f} %" if value is not None else f"{'-':>12}"
