"""Summaries and comparisons of evaluations as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dk_jax.evaluation.results import STATISTICS

_TITLES = {"last_turn": "last turn", "best_turn": "best turn"}
_FIRST, _WIDE = 32, 26
"""Characters of a table's first column and of the others."""


def table(summary: Mapping[str, Any]) -> str:
    """The summary as text for a terminal: scores with their intervals by level, scaling, and what else there is to know."""
    s, there = summary["settings"], summary["samples"]
    lines = [f"{s['policy']['policy']}: {there['there']} of {there['of']} samples over {len(s['tasks'])} tasks ({s['split']}), turns: {s['turns']}"]
    if summary["partial"]:
        grown = summary["growth"]
        taught = f", and the library knows {grown['chunks']} of {grown['of']} chunks" if grown else ""
        lines.append(f"PARTIAL: {len(summary['tasks_not_finished'])} tasks are not finished{taught}; the same command goes on")
    if refused := summary["tasks_refused"]:
        lines.append(f"REFUSED: {len(refused)} tasks are none to the sandbox, and their samples count as wrong whatever they hold; see below")
    if trivial := [name for name, said in summary["tasks_marked"].items() if any("not admitted" in one for one in said)]:
        lines.append(f"TRIVIAL: {len(trivial)} tasks would not be trained on, as answers without any work pass them; see below")
    for which, title in _TITLES.items():
        for baseline, groups in summary["scores"][which].items() if which == "last_turn" or s["turns"] > 1 else ():
            lines += ["", f"{f'{title}, over {baseline}':{_FIRST}}" + "".join(f"{name:>{_WIDE}}" for name in groups)]
            counts = [f"{g['tasks']}, {g['samples']}" for g in groups.values()]
            lines.append(f"{'tasks, samples':{_FIRST}}" + "".join(f"{count:>{_WIDE}}" for count in counts))
            rows = [("compiled", _share, [g["compiled"] for g in groups.values()])]
            rows += [(_fast_name(p), _share, [g["fast"][p] for g in groups.values()]) for p in next(iter(groups.values()))["fast"]]
            rows += [(name, _times, [g[key] for g in groups.values()]) for name, key in (("geometric mean", "geomean"), ("mean *", "mean"))]
            lines += [f"{name:{_FIRST}}" + "".join(f"{say(value):>{_WIDE}}" for value in values) for name, say, values in rows]
    lines += _scaling_lines(summary) + _scheme_lines(summary) + ["", *_notes(summary)]
    return "\n".join(lines)


def _fast_name(p: str) -> str:
    return "correct (Fast_0)" if p == "0" else f"Fast_{p}"


def _share(value: Mapping[str, float | None]) -> str:
    return _with_interval(value, lambda x: f"{100 * x:.1f}", " %")


def _times(value: Mapping[str, float | None]) -> str:
    return _with_interval(value, lambda x: f"{x:.2f}", " x")


def _with_interval(value: Mapping[str, float | None], say: Any, unit: str) -> str:
    if value["value"] is None:
        return "-"
    return f"{say(value['value'])}{unit} ({say(value['low'])} to {say(value['high'])})" if value["low"] is not None else say(value["value"]) + unit


def _scaling_lines(summary: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for baseline, rows in summary["scaling"].items():
        titles = "".join(f"{title:>{_WIDE}}" for title in ("correct", "Fast_1", "geometric mean"))
        if len(rows) > 2:  # more than one candidate a task
            lines += ["", f"{f'best of k, over {baseline}':{_FIRST}}{'k':>6}{'samples x turns':>18}{titles}{_TAKEN}"]
            lines += [f"  {row['way']:{_FIRST - 2}}{_way_cells(row)}" for row in rows]
        if groups := summary["budgets"].get(baseline):
            lines += ["", f"{f'equal budgets, over {baseline}':{_FIRST}}{'k':>6}{'samples x turns':>18}{titles}{_TAKEN}"]
            lines += [f"  {row['way'] + (' *' if row is _best(rows) else ''):{_FIRST - 2}}{_way_cells(row)}" for rows in groups for row in rows]
            lines.append("  * the highest Fast_1 of its budget, then the highest geometric mean; calls and tokens: a task, on average")
    return lines


_TAKEN = f"{'calls':>9}{'tokens':>12}"


def _way_cells(row: Mapping[str, Any]) -> str:
    cells = "".join(f"{say(row[key]):>{_WIDE}}" for key, say in (("correct", _share), ("fast_1", _share), ("geomean", _times)))
    tokens = "-" if row["tokens"] is None else f"{row['tokens']:,.0f}"
    product = f"{row['samples']} x {row['turns']}"
    return f"{row['candidates']:>6}{product:>18}{cells}{row['calls']:>9.1f}{tokens:>12}"


def _best(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of the ways to spend a budget."""
    return max(rows, key=lambda row: (row["fast_1"]["value"], row["geomean"]["value"] or 0.0))


def _scheme_lines(summary: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for baseline, groups in summary["schemes"].items():
        lines += ["", f"{f'by scheme, over {baseline}':{_FIRST}}" + "".join(f"{name:>{_WIDE}}" for name in groups)]
        for title, key in (("samples", "samples"), ("of which went on", "went_on"), ("candidates", "candidates")):
            lines.append(f"{title:{_FIRST}}" + "".join(f"{group[key]:>{_WIDE}}" for group in groups.values()))
        for which, title in (("first_turn", "first turn"), ("best_turn", "best turn")):
            own = [group[which] for group in groups.values()]
            rows = [(f"{title}, {_fast_name(p)}", _share, [g["fast"][p] for g in own]) for p in own[0]["fast"]]
            rows.append((f"{title}, geometric mean", _times, [g["geomean"] for g in own]))
            lines += [f"{name:{_FIRST}}" + "".join(f"{say(value):>{_WIDE}}" for value in values) for name, say, values in rows]
    return lines


def _notes(summary: Mapping[str, Any]) -> list[str]:
    missing, noisy, cost, tokens, c = (summary[name] for name in ("missing", "noisy", "cost", "tokens", "candidates"))
    lines = [
        "Intervals: 95 %, over tasks, samples and the clock (of best of k over tasks alone); without width where all samples agree, however few.",
        "* what does not count is 0",
        "last turns: " + ", ".join(f"{outcome} {n}" for outcome, n in summary["outcomes"].items()),
    ]
    lines.append(f"without a kernel: {missing['samples']} samples" + _counted_list(missing["reasons"]))
    lines.append("integrity: " + (", ".join(f"{rule} {n}" for rule, n in summary["integrity"].items()) or "no rule fired"))
    if noisy["of"]:
        lines.append(f"noisy: {noisy['kernels']} of {noisy['of']} timed kernels (the interval holds 1, or the machine was restless)")
    if summary["speed_not_counted"]:
        lines.append(f"speed not counted: {summary['speed_not_counted']} correct kernels, whose work is not their own")
    lines += [f"not timed against {name}: {n} kernels, which count as no faster" for name, n in summary["not_timed_against"].items()]
    lines += [f"refused by the sandbox: {name}: {reason}" for name, reason in summary["tasks_refused"].items()]
    lines += [f"marked: {name}: {'; '.join(said)}" for name, said in summary["tasks_marked"].items()]
    lines += [f"does not fit: {name}: {reason}" for name, reason in summary["tasks_that_do_not_fit"].items()]
    if tokens:
        lines.append(f"tokens: {tokens['prompt']:,} of prompts, {tokens['answers']:,} of answers")
    if "tokens" in cost:
        money = f"{cost['cost']:.4f} for " if cost["cost"] is not None else ""
        lines.append(f"spent: {money}{cost['tokens']:,} tokens in all, those of no result included")
    if summary["calls"]["further"]:
        lines.append(f"messages: {summary['calls']['messages']}, of which {summary['calls']['further']} are no candidates")
    if grown := summary["growth"]:
        lines.append(
            f"library: {grown['offered']} skills at the beginning; {grown['proposed']} were put to the proof and {grown['accepted']} held; "
            f"{grown['active']} are active after {grown['chunks']} of {grown['of']} chunks"
        )
    machines = {f"{session['machine']['processor']}, GPU {session['machine']['gpu']}" for session in summary["sessions"]}
    if len(machines) > 1:
        lines.append(f"MIXED: judged on different machines, whose timings are not comparable: {'; '.join(sorted(machines))}")
    lines.append(f"candidates: {c['handed_in']} in {c['turns']} turns, {c['distinct']} distinct ones judged; {summary['wall_s']:.0f} s")
    return lines


def _counted_list(counts: Mapping[str, int]) -> str:
    shown = [f"{' '.join(reason.split())[:80]} {n}" for reason, n in list(counts.items())[:4]]
    return f" ({'; '.join(shown)}{'; ...' if len(counts) > 4 else ''})" if counts else ""


def comparison_table(found: Mapping[str, Any], against: str) -> str:
    """What `compare` has found, as text."""
    lines = [f"less {against}, over the {found['tasks']} tasks in both (here alone {found['only_own']}, there alone {found['only_other']})"]
    for which, by_baseline in found["differences"].items():
        lines.append(f"{_TITLES[which]:20}" + "".join(f"{f'over {name}':>28}" for name in by_baseline))
        for name in STATISTICS:
            say = _points if name.startswith("Fast") else _more
            lines.append(f"  {name:18}" + "".join(f"{_with_interval(own[name], say, ''):>28}" for own in by_baseline.values()))
    lines += _equal_budget_lines(found.get("equal_budget"))
    lines.append("shares in points of 100; intervals: 95 %, tasks drawn together")
    return "\n".join([*lines, *(f"differs: {text}" for text in found.get("settings", ()))])


def _equal_budget_lines(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return ["at an equal budget of candidates: the larger evaluation can't be cut to the smaller one's"]
    sides = []
    for name in ("own", "other"):
        side = found[name]
        tokens = "" if side["tokens"] is None else f", {side['tokens']:,.0f} tokens"
        sides.append(f"{side['samples']} x {side['turns']} ({side['calls']:.1f} calls{tokens} a task)")
    lines = [f"best of {found['candidates']} candidates: here samples x turns are {sides[0]}, there {sides[1]}"]
    for name, title, say in (("correct", "correct", _points), ("fast_1", "Fast_1", _points), ("geomean", "geomean", _more)):
        lines.append(f"  {title:18}" + "".join(f"{_with_interval(own[name], say, ''):>28}" for own in found["differences"].values()))
    return lines


def _points(x: float) -> str:
    return f"{100 * x:+.1f}"


def _more(x: float) -> str:
    return f"{x:+.2f}"
