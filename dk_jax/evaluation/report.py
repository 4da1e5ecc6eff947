"""Reports: one self-contained HTML page of a run, of an evaluation, or of several of these side by side.

What is not there yet is said to be missing, and what was cut short to be part of something. The page needs no network; its script only chooses
rollouts, and whatever a model wrote is escaped.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path

from dk_jax.evaluation import report_run
from dk_jax.evaluation.charts import MAX_POINTS, Axis, percent
from dk_jax.evaluation.charts_intervals import DASHES, Band, band_chart
from dk_jax.evaluation.contents import Contents, load
from dk_jax.evaluation.evaluated import Evaluated, ReportError, is_evaluation, read_evaluation
from dk_jax.evaluation.examples import card, pick_examples
from dk_jax.evaluation.markup import figure, legend, missing, plain
from dk_jax.evaluation.report_compare import by_turn, differences, scatter
from dk_jax.evaluation.report_facts import asked, integrity, skills_in_prompts, spent
from dk_jax.evaluation.report_fast_p import curves, headline, levels
from dk_jax.evaluation.report_page import page, save_page
from dk_jax.evaluation.report_rollouts import MAX_BYTES, Amount, rollouts_section
from dk_jax.evaluation.report_search import growth, scaling, schemes
from dk_jax.evaluation.rollout_sources import Source, known_tasks, source_of_evaluation, sources_of_run
from dk_jax.tasks.task import Task

__all__ = ["ReportError", "write_comparison", "write_report"]
MOST = 8
"""Runs and evaluations side by side: as many as there are colours and dashes."""
RESAMPLES, RUN_RESAMPLES = 1000, 300
"""Of the intervals of an evaluation and of a run, whose report is written again and again."""
RUN_BYTES = 8_000_000
"""Of rollouts in the report that a run writes as it goes."""


def write_report(workdir: Path) -> Path:
    """Writes workdir/report.html, complete or not at all, and returns its path: the report of a run, which may not have finished. Of its RL
    steps it carries the rollouts of the newest one; `write_comparison` takes all.

    Raises:
        ReportError: a file is damaged; it is named.
    """
    workdir = Path(workdir)
    contents = load(workdir, resamples=RUN_RESAMPLES)
    sources = sources_of_run(workdir, _levels(contents), steps=1)
    return save_page(workdir / "report.html", _run_page(contents, sources, amount="all", max_bytes=RUN_BYTES))


def write_comparison(
    paths: Sequence[Path], output: Path, *, amount: Amount = "all", max_bytes: int = MAX_BYTES, tasks: Sequence[Task] = ()
) -> Path:
    """Writes the report of a run or of an evaluation, or of several side by side, complete or not at all.

    Args:
        paths: folders of runs and evaluations, up to eight.
        amount, max_bytes: of rollouts (dk_jax.evaluation.report_rollouts).
        tasks: beside the built-in ones, whose prompts may be rendered again.

    Raises:
        ReportError: a folder holds neither, is named twice, or one of its files is damaged.
    """
    paths = [Path(path) for path in paths]
    if not 1 <= len(paths) <= MOST or len({path.resolve() for path in paths}) < len(paths):
        raise ReportError(f"a report takes 1 to {MOST} different folders, not {', '.join(map(str, paths)) or 'none'}")
    for path in paths:
        if not is_evaluation(path) and not any((path / name).exists() for name in ("config.json", "metrics.jsonl", "rollouts")):
            raise ReportError(f"{path} holds neither a run (config.json) nor an evaluation (settings.json)")
    entries = [_entry(path, name, tasks) for path, name in zip(paths, _names(paths), strict=True)]
    if len(entries) > 1:
        text = _comparison_page(entries, amount=amount, max_bytes=max_bytes)
    elif entries[0].contents is not None:
        text = _run_page(entries[0].contents, entries[0].sources, amount=amount, max_bytes=max_bytes)
    else:
        text = _evaluation_page(entries[0], amount=amount, max_bytes=max_bytes)
    return save_page(Path(output), text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One folder: what is evaluated in it (of a run its last held-out evaluation, None before one), its rollouts, and a run's contents."""

    name: str
    evaluated: Evaluated | None
    sources: list[Source]
    contents: Contents | None = None


def _names(paths: Sequence[Path]) -> list[str]:
    """Of the folders, with those above them where names alone are equal."""
    for depth in range(1, max(len(path.resolve().parts) for path in paths)):
        names = ["/".join(path.resolve().parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _entry(path: Path, name: str, tasks: Sequence[Task]) -> Entry:
    if is_evaluation(path):
        evaluated = dataclasses.replace(read_evaluation(path, resamples=RESAMPLES), name=name)
        known = known_tasks(evaluated.summary["settings"], tasks)
        return Entry(name=name, evaluated=evaluated, sources=[source_of_evaluation(evaluated, known)])
    contents = load(path, resamples=RESAMPLES)
    evaluated = None
    if contents.stages:
        last = list(contents.stages.values())[-1]
        evaluated = dataclasses.replace(last, name=f"{name} ({last.name})")
    return Entry(name=name, evaluated=evaluated, sources=sources_of_run(path, _levels(contents), name=name), contents=contents)


def _levels(contents: Contents) -> dict[str, int]:
    return {name: task.level for name, task in contents.tasks.items()}


def _notes(lines: Sequence[str]) -> str:
    return f'<div class="note"><ul class="notes">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul></div>' if lines else ""


# --- pages ----------------------------------------------------------------------------------------------------------------------------


def _scored(shown: Sequence[Evaluated]) -> list[tuple[str, str]]:
    """The sections that every report has."""
    return [
        ("Fast<sub>p</sub> with intervals", headline(shown) + differences(shown)),
        ("Share above every p", curves(shown)),
        ("By level, beside published systems", levels(shown)),
        ("Speedup task by task", scatter(shown)),
        ("Turn by turn", by_turn(shown)),
        ("Test-time scaling", scaling(shown)),
    ]


def _run_page(c: Contents, sources: Sequence[Source], *, amount: Amount, max_bytes: int) -> str:
    shown = list(c.stages.values())
    packed = rollouts_section(sources, amount=amount, max_bytes=max_bytes)
    sections = [
        ("Held-out tasks", report_run.headline(c)),
        *(_scored(shown) if shown else ()),
        ("The three agents", report_run.agents(c)),
        ("Learning curves", report_run.curves(c)),
        ("Task by task", report_run.per_task(c)),
        ("Skills", report_run.skills(c) + skills_in_prompts(shown)),
        *([("Tokens and time", spent(shown) + report_run.spent_on_rl(c)), ("Integrity", integrity(shown))] if shown else ()),
        ("Kernels the model wrote", report_run.examples(c)),
        ("Rollouts", packed.html),
        ("How it was made", report_run.making(c)),
    ]
    lead = report_run.progress(c) + _notes([f"{e.name}: {note}" for e in shown for note in e.notes])
    return page(c.name, "Training report", lead, sections)


def _evaluation_page(entry: Entry, *, amount: Amount, max_bytes: int) -> str:
    e = entry.evaluated
    s, there = e.summary["settings"], e.summary["samples"]
    examples = "".join(card(example, None) for example in pick_examples([r.trajectory for r in e.results]))
    sections = [
        *_scored([e]),
        ("Skills", growth([e]) + schemes([e]) + skills_in_prompts([e])),
        ("Tokens, time and cost", spent([e])),
        ("Integrity", integrity([e])),
        ("Kernels that were written", examples or missing("No kernels have been kept yet.")),
        ("Rollouts", rollouts_section(entry.sources, amount=amount, max_bytes=max_bytes).html),
        ("What was asked", asked([e])),
    ]
    about = f"Evaluation of {s['policy']['policy']}: {there['there']:,} of {there['of']:,} samples over {len(s['tasks']):,} tasks ({s['split']})"
    return page(e.name, about, _notes(e.notes), sections)


def _comparison_page(entries: Sequence[Entry], *, amount: Amount, max_bytes: int) -> str:
    shown = [entry.evaluated for entry in entries if entry.evaluated is not None]
    runs = [entry for entry in entries if entry.contents is not None]
    notes = [f"{entry.name}: a run without a held-out evaluation yet." for entry in entries if entry.evaluated is None]
    notes += [f"{e.name}: {note}" for e in shown for note in e.notes]
    tasks = [set(e.levels) for e in shown if e.results]
    if len({frozenset(own) for own in tasks}) > 1:
        notes.append(f"They cover different tasks ({', '.join(str(len(own)) for own in tasks)}): only differences are over what is in both.")
    library = "".join(f"<h3>{escape(entry.name)}</h3>{report_run.skills(entry.contents)}" for entry in runs)
    sections = [
        *_scored(shown),
        ("Learning curves", _overlaid(runs)),
        ("Skills", library + growth(shown) + schemes(shown) + skills_in_prompts(shown)),
        ("Tokens, time and cost", spent(shown)),
        ("Integrity", integrity(shown)),
        ("Rollouts", rollouts_section([s for entry in entries for s in entry.sources], amount=amount, max_bytes=max_bytes).html),
        ("What was asked", asked(shown)),
        ("How the runs were made", "".join(f"<h3>{escape(entry.name)}</h3>{report_run.making(entry.contents)}" for entry in runs)),
    ]
    return page(" / ".join(entry.name for entry in entries), f"Comparison of {len(entries)}", _notes(notes), sections)


def _overlaid(runs: Sequence[Entry]) -> str:
    """RL step by step, a line a run; where a run has fewer steps its line ends."""
    if not any(entry.contents.rl for entry in runs):
        return ""
    found = []
    for key, title, axis in (
        ("reward", "Reward", Axis(label="mean over rollouts of the best turn's reward", text=plain)),
        ("correct", "Correct", Axis(label="% of judged turns", text=percent, low=0.0)),
        ("fast_1.5", "Fast 1.5", Axis(label="% of judged turns", text=percent, low=0.0)),
        ("skills_active", "Active skills", Axis(label="number", low=0.0, whole=True)),
    ):
        lines = {entry.name: {e["step"]: float(e[key]) for e in entry.contents.rl if key in e} for entry in runs}
        lines = {name: values for name, values in lines.items() if values}
        if lines:
            found.append(_lines(title, lines, axis))
    note = '<p class="fine">Each point is the mean over as many steps as a chart has room for; a run that had fewer steps ends before.</p>'
    return f'<div class="charts">{"".join(found)}</div>{note}'


def _lines(title: str, lines: dict[str, dict[int, float]], axis: Axis) -> str:
    last = max(step for values in lines.values() for step in values)
    size = -(-last // MAX_POINTS)
    x = list(range(1, last + 1, size))
    bands = {}
    for name, values in lines.items():
        parts = [[values[step] for step in range(start, start + size) if step in values] for start in x]
        nothing = [None] * len(x)
        bands[name] = Band(value=[statistics.fmean(part) if part else None for part in parts], low=nothing, high=nothing)
    chart = band_chart(title, x, bands, x_axis=Axis(label="RL step", whole=True), y_axis=axis)
    return figure(chart, legend=legend(list(bands), dashes=DASHES))
