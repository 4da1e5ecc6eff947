"""The report's table of the three agents on held-out tasks: untrained, after the cold start, after RL."""

from __future__ import annotations

from html import escape
from typing import Any

from dk_jax.evaluation.charts import percent
from dk_jax.evaluation.markup import DASH, columns, missing, number

_FIRST_TURN = (("Kernel compiles", "compiled"), ("Kernel is correct", "correct"), ("Fast<sub>1</sub>", "1.0"))
_CALLS = (
    ("selection", "Selection: call can be used", "parsed"),
    ("selection", "Selection: chosen skill fits the task", "fitting"),
    ("summary", "Summary: call can be used", "parsed"),
    ("summary", "Summary: holds a skill that may be verified", "usable"),
)


def agents_table(evaluations: dict[str, dict[str, Any] | None]) -> str:
    """The table, a column an evaluation.

    Args:
        evaluations: scores by title, in the order of the columns; None where an evaluation has not been made, and left out if none of
            its title has been.
    """
    found = {title: scores for title, scores in evaluations.items() if scores is not None}
    if not found:
        return missing("No held-out evaluation has been made yet.")
    rows = []
    for name, key in _FIRST_TURN:
        first = [scores["turns"][0] if scores["turns"] else None for scores in found.values()]
        cells = [number(percent(turn["fast"][key] if key[0].isdigit() else turn[key]) if turn else DASH) for turn in first]
        rows.append(f"<tr><th>{name}, first turn</th>{''.join(cells)}</tr>")
    for agent, name, key in _CALLS:
        shares = [scores.get("calls", {}).get(agent, {}).get(key) for scores in found.values()]
        if any(share and share["of"] for share in shares):
            rows.append(f"<tr><th>{name}</th>{''.join(number(_share(share)) for share in shares)}</tr>")
    ideas = [scores.get("calls", {}).get("summary", {}).get("ideas") for scores in found.values()]
    if any(own and own["drafts"] for own in ideas):
        said = [f"{own['effective']:.1f} ({own['distinct']} in {own['drafts']:,} skills)" if own and own["drafts"] else DASH for own in ideas]
        rows.append(f"<tr><th>Summary: different ideas, effective number</th>{''.join(number(text) for text in said)}</tr>")
    table = f"<table><thead><tr><th></th>{columns(*found)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return table + _errors(found) + (
        '<p class="fine">Shares of messages on held-out tasks. A call can be used if it names only what was on offer, keeps its bounds and '
        "was not cut short; in brackets its number of messages and 95 % interval (Wilson). A chosen skill fits if the fastest judged kernel "
        "of the task is an example of it. The effective number of ideas is exp of the entropy of their shares: so many equally frequent ones "
        "would be as diverse.</p>"
    )  # fmt: skip


def _share(share: dict[str, float] | None) -> str:
    if not share or not share["of"]:
        return DASH
    return f"{percent(share['share'])} ({share['of']:,}; {100 * share['low']:.0f} – {100 * share['high']:.0f})"


def _errors(found: dict[str, dict[str, Any]]) -> str:
    """What was wrong with the calls of the last evaluation that made some."""
    parts = []
    for title, scores in reversed(found.items()):
        for agent, own in scores.get("calls", {}).items():
            lines = [f"{count} × {escape(error)}" for error, count in (own.get("errors", {}) | own.get("refused", {})).items()]
            if lines:
                parts.append(f"<h4>{agent}, {escape(title)}</h4><ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>")
        if scores.get("calls"):
            break
    return f"<details><summary>What was wrong with the others</summary>{''.join(parts)}</details>" if parts else ""
