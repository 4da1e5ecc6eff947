"""The report's sections on Fast_p: the headline with intervals, shares above every p, and levels beside what others have published."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from dk_jax.evaluation import fast_p
from dk_jax.evaluation.charts import Axis, percent
from dk_jax.evaluation.charts_intervals import DASHES, Band, Bar, band_chart, interval_text, level_bars
from dk_jax.evaluation.evaluated import Evaluated
from dk_jax.evaluation.markup import figure, legend, missing, number, share_cell, table, times_cell
from dk_jax.evaluation.published import OVERALL, PUBLISHED
from dk_jax.evaluation.results import Which, measured

TURNS: dict[Which, str] = {"last_turn": "last turn", "best_turn": "best turn"}
THRESHOLDS = [i / 20 for i in range(81)]
CURVE_RESAMPLES = 300
_HEAD = ["", "Tasks, samples", "Compiled", "Correct", *(f"Fast<sub>{p}</sub>" for p in ("1", "1.2", "1.5", "2")), "Geometric mean", "Mean"]
_KERNELBENCH = re.compile(r"level[1-4]_\d+_")
NOTHING = "No sample has been judged yet."


def kept_turns(shown: Sequence[Evaluated]) -> list[Which]:
    """Which turns to tell of: the last, and the best where there are several."""
    return ["last_turn", "best_turn"] if any(e.turns > 1 for e in shown) else ["last_turn"]


def all_baselines(shown: Sequence[Evaluated]) -> list[str]:
    """Every baseline that some of them was timed against, in order of appearance."""
    return list(dict.fromkeys(b for e in shown for b in e.baselines))


def headline(shown: Sequence[Evaluated]) -> str:
    """Scores with their intervals over each baseline, for the last and the best turn; by level folded away."""
    shown = [e for e in shown if e.results]
    if not shown:
        return missing(NOTHING)
    parts, by_level = [], []
    for baseline in all_baselines(shown):
        rows, levels = [], []
        for e in (e for e in shown if baseline in e.baselines):
            for which in kept_turns(shown):
                groups = e.summary["scores"][which][baseline]
                name = escape(e.name) + (f" <span class='muted'>{TURNS[which]}</span>" if len(kept_turns(shown)) > 1 else "")
                rows.append((name, _cells(groups["all"])))
                levels += [(f"{level.capitalize()}: {name}", _cells(own)) for level, own in groups.items() if level != "all"]
        parts.append(table(_HEAD, rows, caption=f"Over {escape(baseline)}"))
        by_level.append(table(_HEAD, sorted(levels, key=lambda row: row[0].partition(":")[0]), caption=f"Over {escape(baseline)}"))
    return (
        "".join(parts)
        + f"<details><summary>By level</summary>{''.join(by_level)}</details>"
        + '<p class="fine">Fast<sub>p</sub>: the share of samples that are correct and more than p times as fast as the baseline. Best turn: of '
        "each sample the fastest correct one. Geometric mean: of the speedups that count; mean: what does not count is 0. In small print 95 % "
        "intervals by a bootstrap over tasks, samples and the clock.</p>"
    )  # fmt: skip


def _cells(group: dict) -> list[str]:
    shares = [group["compiled"], *(group["fast"][p] for p in ("0", "1", "1.2", "1.5", "2"))]
    return [number(f"{group['tasks']}, {group['samples']}"), *map(share_cell, shares), times_cell(group["geomean"]), times_cell(group["mean"])]


def curves(shown: Sequence[Evaluated]) -> str:
    """Fast_p for p from 0 to 4, a chart a baseline and turn."""
    shown = [e for e in shown if e.results]
    if not shown:
        return missing(NOTHING)
    charts = []
    for baseline in all_baselines(shown):
        for which in kept_turns(shown):
            bands = {}
            for e in (e for e in shown if baseline in e.baselines):
                found = fast_p.curve(measured(e.results, which, baseline), THRESHOLDS, seed=e.seed, resamples=CURVE_RESAMPLES)
                bands[e.name] = Band(value=found[0].tolist(), low=found[1].tolist(), high=found[2].tolist())
            y_axis = Axis(label="% of samples that are correct and faster than p", text=percent, low=0.0, high=1.0)
            title = f"Over {baseline}, {TURNS[which]}"
            x_axis = Axis(label="p", low=0.0, high=4.0)
            chart = band_chart(title, THRESHOLDS, bands, x_axis=x_axis, y_axis=y_axis)
            rows = [
                (escape(name), [number(interval_text(b.value[i], b.low[i], b.high[i], y_axis)) for i in range(0, len(THRESHOLDS), 10)])
                for name, b in bands.items()
            ]
            heads = [f"p = {p:g}" for p in THRESHOLDS[::10]]
            charts.append(figure(chart, legend=legend(list(bands), dashes=DASHES), numbers=table(["", *heads], rows)))
    return f'<div class="charts">{"".join(charts)}</div><p class="fine">Bands: 95 % intervals, each p by itself.</p>'


def levels(shown: Sequence[Evaluated]) -> str:
    """Fast_1 and Fast_1.2 over eager by level, last turn, beside published figures."""
    shown = [e for e in shown if e.results and "eager" in e.baselines]
    if not shown:
        return missing(NOTHING)
    known = sorted({level for e in shown for level in e.levels.values()})
    charts, axis = [], Axis(label="% of samples, over eager", text=percent)
    for p in ("1", "1.2"):
        for level in known:
            bars = []
            for series, e in enumerate(shown, 1):
                group = e.summary["scores"]["last_turn"]["eager"].get(f"level {level}")
                if group:
                    own = group["fast"][p]
                    bars.append(Bar(name=e.name, value=own["value"], low=own["low"], high=own["high"], series=series))
            bars += [Bar(name=f"{s.name}", value=s.fast[p][level], series=0) for s in PUBLISHED if level in s.fast.get(p, {})]
            rows = [
                (escape(b.name), [number(interval_text(b.value, b.low, b.high, axis)), number("" if b.series else "as published")]) for b in bars
            ]
            title = f"Fast {p}, {f'level {level}' if level else 'level unknown'}"
            full = Axis(label=axis.label, text=percent, high=1.0)
            charts.append(figure(level_bars(title, bars, axis=full), numbers=table(["", "share", ""], rows)))
    sources = "".join(f"<li>{escape(s.name)}: {escape(s.source)}; {escape(s.protocol)}</li>" for s in PUBLISHED)
    others = "".join(f"<li>{escape(s.name)}: {escape(s.said)} ({escape(s.source)})</li>" for s in OVERALL)
    note = (
        ""
        if _on_kernelbench(shown)
        else '<p class="note">These are not the tasks of KernelBench, on which the published figures are: a level here is of the same kind, not of '
        "the same difficulty. The bars of others show the order of magnitude alone.</p>"
    )
    return (
        f'{note}<p class="fine">{legend([e.name for e in shown], published=True)}</p><div class="charts">{"".join(charts)}</div>'
        '<p class="fine">Last turn. Hatched: as published, on other hardware, with another judge, and of at least p instead of above p.</p>'
        f"<details><summary>Sources of the published figures, and systems without figures by level</summary><ul>{sources}{others}</ul></details>"
    )  # fmt: skip


def _on_kernelbench(shown: Sequence[Evaluated]) -> bool:
    """Whether the tasks are named as those of a KernelBench checkout (dk_jax.tasks.kernelbench)."""
    return all(_KERNELBENCH.match(r.trajectory.task) for e in shown for r in e.results)
