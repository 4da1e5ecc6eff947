"""The report's sections on search at test time: ways to spend a budget of candidates, schemes of skills, and libraries that grow meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dk_jax.evaluation.charts import Axis, clipped, line_chart, percent
from dk_jax.evaluation.charts_intervals import DASHES, Band, band_chart
from dk_jax.evaluation.evaluated import Evaluated
from dk_jax.evaluation.markup import DASH, figure, legend, missing, number, share_cell, table, times_cell

WAYS = {
    "serial": "serial: k turns of one sample",
    "parallel": "parallel: first turns of k samples",
    "both": "both: all turns of some samples",
    "whole": "whole: as the search spent it",
}


def scaling(shown: Sequence[Evaluated]) -> str:
    """Best of the first k candidates for the ways to spend them, an evaluation a chart; equal k is equal budget."""
    charts = []
    for e in shown:
        rows = e.summary["scaling"].get("eager", [])
        if len(rows) <= 2:
            continue
        x = sorted({row["candidates"] for row in rows})
        axis, bands = Axis(label="% faster than eager, best of k", text=percent, low=0.0), {}
        for way in (way for way in WAYS if any(row["way"] == way for row in rows)):
            own = {row["candidates"]: row["fast_1"] for row in rows if row["way"] == way}
            bands[WAYS[way]] = Band(**{name: [own[k][name] if k in own else None for k in x] for name in ("value", "low", "high")})
        bands = {name: _joined(band) for name, band in bands.items()}
        x_axis = Axis(label="k, candidates a task (doubling)", text=lambda v: f"{2**v:.3g}", whole=True)
        chart = band_chart(f"{e.name}: Fast 1", [math.log2(k) for k in x], bands, x_axis=x_axis, y_axis=axis, intervals="whiskers")
        cells = [_way(row) for row in sorted(rows, key=lambda row: (row["candidates"], row["way"]))]
        numbers = table(["Way, samples × turns", "k", *_SCALED, "calls", "tokens"], cells)
        charts.append(figure(chart, legend=legend(list(bands), dashes=DASHES), numbers=numbers))
    if not charts:
        return missing("There is one candidate a task here: nothing to scale.")
    return (
        f'<div class="charts">{"".join(charts)}</div>{_budgets(shown)}<p class="fine">At the same k all ways have had the same budget of '
        "candidates. Parallel and both: the expectation over all choices of so many samples. Calls and tokens: a task, on average. 95 % "
        "intervals over tasks.</p>"
    )  # fmt: skip


def _budgets(shown: Sequence[Evaluated]) -> str:
    """The ways to spend equal budgets beside one another, where an evaluation has several."""
    parts = []
    for e in shown:
        groups = e.summary.get("budgets", {}).get("eager", [])
        rows = [_way(row, mark=row is _best(group)) for group in groups for row in group]
        if rows:
            caption = f"{escape(e.name)}: equal budgets of k candidates, over eager (bold: the highest Fast<sub>1</sub> of its budget)"
            parts.append(table(["Way, samples × turns", "k", *_SCALED, "calls", "tokens"], rows, caption=caption))
    return "".join(parts)


def _best(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(rows, key=lambda row: (row["fast_1"]["value"], row["geomean"]["value"] or 0.0))


def _way(row: Mapping[str, Any], *, mark: bool = False) -> tuple[str, list[str]]:
    name = f"{row['way']}, {row['samples']} × {row['turns']}"
    cells = [number(str(row["candidates"])), share_cell(row["correct"]), share_cell(row["fast_1"]), times_cell(row["geomean"])]
    calls, tokens = row.get("calls"), row.get("tokens")
    cells += [number(DASH if calls is None else f"{calls:,.1f}"), number(DASH if tokens is None else f"{tokens:,.0f}")]
    return (f"<b>{name}</b>" if mark else name), cells


_SCALED = ("correct", "Fast<sub>1</sub>", "geometric mean")


def _joined(band: Band) -> Band:
    """The band with its gaps, where a way has no such k, filled by straight lines without intervals."""
    at = [i for i, v in enumerate(band.value) if v is not None]
    filled = list(band.value)
    for a, b in zip(at, at[1:], strict=False):
        for i in range(a + 1, b):
            filled[i] = filled[a] + (filled[b] - filled[a]) * (i - a) / (b - a)
    return Band(value=filled, low=band.low, high=band.high)


def schemes(shown: Sequence[Evaluated]) -> str:
    """Scores by who chose a sample's skills, of evaluations that searched among schemes; "" without any."""
    parts = []
    for e in shown:
        for baseline, groups in e.summary.get("schemes", {}).items():
            rows = []
            for name, own in groups.items():
                for which, title in (("first_turn", "first turn"), ("best_turn", "best turn")):
                    fast = own[which]["fast"]
                    cells = [number(f"{own['samples']:,}, {own['went_on']:,}"), share_cell(fast["0"]), share_cell(fast["1"])]
                    cells += [share_cell(fast["1.5"]), times_cell(own[which]["geomean"])]
                    rows.append((f"{escape(name)} <span class='muted'>{title}</span>", cells))
            head = ["", "Samples, went on", "Correct", "Fast<sub>1</sub>", "Fast<sub>1.5</sub>", "Geometric mean"]
            parts.append(table(head, rows, caption=f"{escape(e.name)}: by who chose the skills, over {escape(baseline)}"))
    note = '<p class="fine">First turns compare the schemes; best turns also that the better ones got more turns. Null: without skills.</p>'
    return "".join(parts) + note if parts else ""


def growth(shown: Sequence[Evaluated]) -> str:
    """How libraries grew while they were evaluated with, chunk of tasks by chunk; "" where none did."""
    charts = []
    for e in shown:
        grown = e.summary.get("growth")
        if not grown or not grown["steps"]:
            continue
        x = [float(chunk) for chunk in range(1, len(grown["steps"]) + 1)]
        lines = {name: [float(step[name]) for step in grown["steps"]] for name in ("proposed", "accepted", "active")}
        axis = Axis(label=f"skills so far, {grown['offered']} at the beginning", low=0.0, whole=True)
        charts.append(line_chart(clipped(f"{e.name}: library", 28), x, lines, x_axis=Axis(label="chunk of tasks", whole=True), y_axis=axis))
    return f'<div class="charts">{"".join(charts)}</div>' if charts else ""
