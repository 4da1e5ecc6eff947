"""The write-up's plots as SVG files that stand alone: curves over RL steps, and Fast_p of the arms with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dk_jax.evaluation import charts
from dk_jax.evaluation.charts import Axis, percent

GROUPS = (
    ("main", ("full", "no_skills")),
    ("selection", ("full", "bm25_only", "policy_only")),
    ("data", ("full", "paper_verification", "no_diversity_filter")),
)
"""Which arms share a plot of curves: a chart takes four lines."""
CURVES = {
    "reward": ("Reward", Axis(label="mean over rollouts of the best turn's reward")),
    "fast_1.5": ("Fast 1.5 in training", Axis(label="% of judged turns", text=percent, low=0.0)),
}
THRESHOLDS = ("Fast_1", "Fast_1.5", "Fast_2")
STYLE = (
    "svg { --ink: #1c2024; --muted: #6b7178; --grid: #e6e8eb; --before: #a3abb4; --series-1: #2f6fd0; --series-2: #e08a2b; --series-3: "
    "#2a9d78; --series-4: #8a63c9; font-family: system-ui, sans-serif; background: #fff }"
)
WIDTH, LEFT, RIGHT, ROW, TOP = 620, 190, 20, 46, 44


def write(folder: Path, data: Mapping[str, Any]) -> list[str]:
    """Writes the plots of what is there; returns the files' names, with which the text refers to them."""
    found: dict[str, str] = {}
    for metric, (title, axis) in CURVES.items():
        for group, names in GROUPS:
            curves = {name: data["curves"][name] for name in names if data["curves"].get(name)}
            if len(curves) > 1 or (group == "main" and curves):
                found[f"{metric.replace('.', '_')}_{group}.svg"] = _curve(title, metric, curves, axis)
    skills = data["curves"].get("full")
    if skills:
        lines = {name: skills[f"skills_{name}"] for name in ("proposed", "verified", "active")}
        step, count = Axis(label="RL step", whole=True), Axis(label="skills, mean over seeds", low=0.0)
        found["library.svg"] = charts.line_chart("Library of the full arm", skills["step"], lines, x_axis=step, y_axis=count)
    for part, rows in data["scores"].items():
        if rows:
            found[f"scores_{part}.svg"] = _intervals(data, rows)
    for name, svg in found.items():
        partial = folder / f"{name}.part"
        partial.write_text(_alone(svg), encoding="utf-8")
        partial.replace(folder / name)
    return list(found)


def _curve(title: str, metric: str, curves: Mapping[str, Mapping[str, Sequence[float]]], axis: Axis) -> str:
    """Of several arms, over the steps that all of them have made."""
    steps = min(len(curve["step"]) for curve in curves.values())
    x = list(next(iter(curves.values()))["step"][:steps])
    lines = {name.replace("_", " "): list(curve[metric][:steps]) for name, curve in curves.items()}
    return charts.line_chart(title, x, lines, x_axis=Axis(label="RL step", whole=True), y_axis=axis, smooth=max(steps // 12, 1))


def _intervals(data: Mapping[str, Any], rows: Mapping[str, Any]) -> str:
    """A row for each arm with a mark and its bootstrap interval for each threshold."""
    height = TOP + ROW * len(rows) + 34
    top = max(row["metrics"][name]["high"] or row["metrics"][name]["value"] for row in rows.values() for name in THRESHOLDS)
    marks = [mark for mark in charts.ticks(0.0, max(top, 0.05)) if mark >= 0]

    def x(value: float) -> float:
        return LEFT + value / marks[-1] * (WIDTH - LEFT - RIGHT)

    parts = [f'<text x="{LEFT}" y="16" font-size="13" font-weight="600" fill="var(--ink)">Held-out tasks, last turn, % of samples</text>']
    for i, name in enumerate(THRESHOLDS):
        at = LEFT + 110 * i
        parts.append(f'<circle cx="{at + 4}" cy="31" r="4" fill="var(--series-{i + 1})"/>')
        parts.append(f'<text x="{at + 13}" y="35" font-size="11" fill="var(--muted)">{name.replace("_", " ")}</text>')
    for mark in marks:
        parts.append(f'<path d="M{x(mark):.1f} {TOP}V{height - 30}" stroke="var(--grid)"/>')
        parts.append(f'<text x="{x(mark):.1f}" y="{height - 14}" font-size="11" text-anchor="middle" fill="var(--muted)">{percent(mark)}</text>')
    for r, (arm, row) in enumerate(rows.items()):
        middle = TOP + ROW * (r + 0.5)
        name_at = f'x="{LEFT - 10}" y="{middle + 4:.1f}" font-size="12" text-anchor="end" fill="var(--ink)"'
        parts.append(f"<text {name_at}>{escape(title_of(data, arm))}</text>")
        for i, name in enumerate(THRESHOLDS):
            cell, y, colour = row["metrics"][name], middle + 12 * (i - 1), f"var(--series-{i + 1})"
            told = f"{title_of(data, arm)}, {name}: {percent(cell['value'])}"
            if cell["low"] is not None:
                line = f"M{x(cell['low']):.1f} {y:.1f}H{x(cell['high']):.1f}"
                parts.append(f'<path d="{line}" stroke="{colour}" stroke-width="2" stroke-opacity="0.55"/>')
            parts.append(f'<circle cx="{x(cell["value"]):.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(told)}</title></circle>')
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Fast_p of the arms">{"".join(parts)}</svg>'


def title_of(data: Mapping[str, Any], row: str) -> str:
    """Of a table's row: an arm, or a cold start."""
    starts = {"start_base": "cold start", "start_unfiltered": "cold start, no filter"}
    return starts.get(row) or data["arms"][row]["title"]


def _alone(svg: str) -> str:
    """The picture as a file: with its namespace, size and colours."""
    head, rest = svg.split(">", 1)
    _, _, width, height = head.split('viewBox="')[1].split('"')[0].split()
    return f'{head} xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"><style>{STYLE}</style>{rest}\n'
