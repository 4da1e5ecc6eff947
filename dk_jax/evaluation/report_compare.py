"""The report's sections that set things side by side: evaluations, tasks and turns."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from html import escape

from dk_jax.evaluation import fast_p
from dk_jax.evaluation.charts import Axis, percent
from dk_jax.evaluation.charts_intervals import DASHES, Band, band_chart, interval_text
from dk_jax.evaluation.charts_scatter import Point, speedup_scatter
from dk_jax.evaluation.evaluated import Evaluated
from dk_jax.evaluation.fast_p import Measured, Scores, Value, score
from dk_jax.evaluation.markup import DASH, figure, legend, missing, number, plain, table
from dk_jax.evaluation.report_fast_p import NOTHING, TURNS, all_baselines, kept_turns
from dk_jax.evaluation.results import Result, counted, measured, turn_of

RESAMPLES = 300
TOLD = {
    "Correct": (lambda s: s.fast[0.0], True),
    "Fast<sub>1</sub>": (lambda s: s.fast[1.0], True),
    "Fast<sub>1.5</sub>": (lambda s: s.fast[1.5], True),
    "Geometric mean": (lambda s: s.geomean, False),
}
"""Statistics of which differences are told: how to pick each from Scores, and whether it is a share."""


def differences(shown: Sequence[Evaluated]) -> str:
    """How much more the others score than the first, over the tasks that both have, drawn together; "" for one alone."""
    first, *others = [e for e in shown if e.results] or [None]
    if not others:
        return ""
    parts = []
    for baseline in (b for b in all_baselines(shown) if b in first.baselines):
        rows = []
        for e in (e for e in others if baseline in e.baselines):
            shared = {r.trajectory.task for r in first.results} & {r.trajectory.task for r in e.results}
            for which in kept_turns(shown):
                name = f"{escape(e.name)} <span class='muted'>{TURNS[which]}, {len(shared)} tasks</span>"
                sides = [measured(some.results, which, baseline) for some in (first, e)]
                rows.append((name, _differences(sides, e.seed) if shared else [number(DASH)] * len(TOLD)))
        if rows:
            parts.append(table(["", *TOLD], rows, caption=f"More than {escape(first.name)}, over {escape(baseline)}"))
    return "".join(parts) + (
        '<p class="fine">Differences over the tasks in both, in points of 100 for shares; 95 % intervals by a bootstrap that draws the same tasks '
        "for both. Coloured where the interval does not hold 0.</p>"
    )


def _differences(sides: Sequence[Sequence[Measured]], seed: int) -> list[str]:
    values, _ = fast_p.differences(*sides, [of for of, _ in TOLD.values()], seed=seed, resamples=RESAMPLES)
    return [_difference(value, share) for value, (_, share) in zip(values, TOLD.values(), strict=True)]


def _difference(value: Value, share: bool) -> str:
    if not math.isfinite(value.value):
        return number(DASH)
    say = (lambda x: f"{100 * x:+.1f}") if share else (lambda x: f"{x:+.2f}")
    tint = "gain" if value.low > 0 else "loss" if value.high < 0 else ""
    said, low, high = (say(x).replace("-", "−") for x in (value.value, value.low, value.high))
    return f'<td class="n {tint}">{said}<small>{low} to {high}</small></td>'


# --- task by task ---------------------------------------------------------------------------------------------------------------------


def scatter(shown: Sequence[Evaluated]) -> str:
    """Speedups task by task: the first evaluation against each other one; of one alone, the first turn against the best, and one baseline
    against another."""
    shown = [e for e in shown if e.results]
    if not shown:
        return missing(NOTHING)
    first, *others = shown
    charts = []
    for series, e in enumerate(others, 2):
        if "eager" in e.baselines and {r.trajectory.task for r in e.results} & set(first.levels):
            sides = [_by_task(some.results, "last_turn", "eager") for some in (first, e)]
            charts.append(_chart(f"{e.name} against {first.name}", sides, f"{first.name}, over eager", f"{e.name}, over eager", series))
    for series, e in enumerate(shown, 1) if not others or len(shown) <= 3 else ():
        if e.turns > 1:
            sides = [_by_task(e.results, which, "eager", of=max) for which in ("first_turn", "best_turn")]
            labels = ("fastest of the first turns, over eager", "fastest of all turns, over eager")
            charts.append(_chart(f"{e.name}: first turns and all turns", sides, *labels, series))
        for baseline in e.baselines[1:]:
            sides = [_by_task(e.results, "last_turn", b) for b in (e.baselines[0], baseline)]
            labels = [f"over {b}, last turn" for b in (e.baselines[0], baseline)]
            charts.append(_chart(f"{e.name}: {e.baselines[0]} and {baseline}", sides, *labels, series))
    if not charts:
        e = shown[0]
        sides = [_by_task(e.results, "last_turn", "eager")] * 2
        charts.append(_chart(f"{e.name}: task by task", sides, "over eager", "over eager", 1))
    return (
        f'<div class="charts">{"".join(charts)}</div><p class="fine">A mark is a task: the geometric mean, or where it says so the fastest, of its '
        "samples' speedups that count. Rings: at least one of them is noisy (its interval holds 1, or the machine was restless). Crosses in the "
        "grey margins: no sample with a speedup that counts on that side (not correct, not timed, or not by its own work).</p>"
    )  # fmt: skip


def _by_task(
    results: Sequence[Result], which: str, baseline: str, of: Callable[[list[float]], float] = statistics.geometric_mean
) -> dict[str, tuple[float | None, bool]]:
    """Of each task the geometric mean (or what `of` makes) of its samples' counted speedups, None without any, and whether one is noisy."""
    found: dict[str, list[tuple[float, bool]]] = {}
    for result in results:
        own = found.setdefault(result.trajectory.task, [])
        turns = result.trajectory.turns
        turn = (turns[0] if turns else None) if which == "first_turn" else turn_of(result.trajectory, which, baseline)
        speedup = counted(turn.verdict, baseline) if turn is not None else None
        if speedup:
            own.append((speedup, turn.verdict.noisy))
    return {
        task: (of([speedup for speedup, _ in own]), any(noisy for _, noisy in own)) if own else (None, False)
        for task, own in found.items()
    }


def _chart(title: str, sides: Sequence[dict[str, tuple[float | None, bool]]], x_label: str, y_label: str, series: int) -> str:
    a, b = sides
    points = [Point(name=name, x=a[name][0], y=b[name][0], noisy=a[name][1] or b[name][1]) for name in a if name in b]
    rows = [
        (f'<span class="name">{escape(p.name)}</span>', [number(_times(p.x)), number(_times(p.y)), number("noisy" if p.noisy else "")])
        for p in sorted(points, key=lambda p: p.name)
    ]
    head = ["Task", escape(x_label), escape(y_label), ""]
    return figure(speedup_scatter(title, points, x_label=x_label, y_label=y_label, series=series), numbers=table(head, rows))


def _times(value: float | None) -> str:
    return f"{value:.2f} ×" if value is not None else DASH


# --- turn by turn ---------------------------------------------------------------------------------------------------------------------


def by_turn(shown: Sequence[Evaluated]) -> str:
    """Correct, Fast_1 and geometric mean turn by turn, over eager."""
    shown = [e for e in shown if e.results and e.turns > 1 and "eager" in e.baselines]
    if not shown:
        return missing("No evaluation here has several turns.")
    most = max(e.turns for e in shown)
    found = {e.name: [_turn_scores(e, turn) if turn < e.turns else None for turn in range(most)] for e in shown}
    x, charts = [float(turn + 1) for turn in range(most)], []
    for title, of, axis in (
        ("Correct", lambda s: s.fast[0.0], Axis(label="% of samples", text=percent, low=0.0)),
        ("Faster than eager (Fast 1)", lambda s: s.fast[1.0], Axis(label="% of samples", text=percent, low=0.0)),
        ("Geometric mean of speedups that count", lambda s: s.geomean, Axis(label="× over eager", text=plain)),
    ):
        bands = {name: _band([of(s) if s else None for s in turns]) for name, turns in found.items()}
        chart = band_chart(title, x, bands, x_axis=Axis(label="turn", whole=True), y_axis=axis, intervals="whiskers")
        rows = [
            (escape(name), [number(interval_text(b.value[i], b.low[i], b.high[i], axis)) for i in range(most)]) for name, b in bands.items()
        ]
        numbers = table(["", *(f"Turn {turn + 1}" for turn in range(most))], rows)
        charts.append(figure(chart, legend=legend(list(bands), dashes=DASHES), numbers=numbers))
    return (
        f'<div class="charts">{"".join(charts)}</div><p class="fine">Each turn as it is, not the best so far; a sample that ended before keeps its '
        "last one. 95 % intervals.</p>"
    )  # fmt: skip


def _turn_scores(e: Evaluated, turn: int) -> Scores:
    cut = [
        dataclasses.replace(r, trajectory=dataclasses.replace(r.trajectory, turns=r.trajectory.turns[: turn + 1])) for r in e.results
    ]
    return score(measured(cut, "last_turn", "eager"), seed=e.seed, resamples=RESAMPLES)


def _band(values: Sequence) -> Band:
    known = [v if v is not None and math.isfinite(v.value) else None for v in values]
    return Band(**{name: [getattr(v, name) if v else None for v in known] for name in ("value", "low", "high")})
