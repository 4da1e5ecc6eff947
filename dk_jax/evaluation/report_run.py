"""The sections of a report that a run alone has: how far it has come, held-out scores before and after RL, the three agents, learning curves,
scores task by task, skills, kernels that the model wrote, config and versions. What is not there yet is said to be missing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from dk_jax.evaluation import charts, machine
from dk_jax.evaluation.agents_section import agents_table
from dk_jax.evaluation.charts import Axis, percent
from dk_jax.evaluation.contents import Contents
from dk_jax.evaluation.examples import card, pick_examples
from dk_jax.evaluation.markup import DASH, columns, duration, missing, number, plain, status, table, times, visible
from dk_jax.skills.lifecycle import Posterior


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the headline table: its name, key in the scores, and whether it is a share or a speedup."""

    name: str
    key: str
    share: bool = True

    def of(self, scores: dict[str, Any]) -> float:
        return scores["fast"][self.key] if self.key[0].isdigit() else scores[self.key]

    def text(self, value: float) -> str:
        return f"{100 * value:.1f} %" if self.share else times(value)

    def change(self, value: float) -> str:
        return f"{100 * value:+.1f}" if self.share else f"{value:+.2f}"


GROWTH = {"proposed": "proposed", "accepted": "verified", "active": "active", "retired": "retired"}
ROWS = (
    Row(name="Compiled", key="compiled"),
    Row(name="Correct", key="correct"),
    Row(name="Fast<sub>1</sub>", key="1.0"),
    Row(name="Fast<sub>1.2</sub>", key="1.2"),
    Row(name="Fast<sub>1.5</sub>", key="1.5"),
    Row(name="Fast<sub>2</sub>", key="2.0"),
    Row(name="Mean speedup", key="mean_speedup", share=False),
    Row(name="Geometric mean of the correct", key="geomean_correct", share=False),
)


def progress(c: Contents) -> str:
    """How far the run has come, phase by phase."""
    config = c.config or {}

    def steps(entries: list[dict], phase: str) -> tuple[str, bool]:
        wanted = config.get(phase, {}).get("steps")
        done = entries[-1]["step"] if entries else 0
        return (
            f"{done} of {wanted if wanted is not None else '?'} steps",
            wanted is not None and done >= wanted,
        )

    (sft_text, sft_done), (rl_text, rl_done) = steps(c.sft, "sft"), steps(c.rl, "rl")
    spent = sum(e.get("collect_s", 0.0) + e.get("update_s", 0.0) - e.get("overlap_s", 0.0) for e in c.rl)
    if spent:
        rl_text += f", {duration(spent)}"
    corpus = f"{c.corpus.get('kernels', 0):,.0f} kernels judged" if c.corpus else "not done"
    if c.corpus and "seconds" in c.corpus:
        corpus += f", {duration(c.corpus['seconds'])}"

    def scored(scores: dict | None) -> str:
        return f"{scores['last_turn']['samples']:,} samples" if scores else "not done"

    phases = (
        ("Corpus", corpus, c.corpus is not None),
        ("Cold start", sft_text, sft_done),
        ("Evaluation before RL", scored(c.before), c.before is not None),
        ("Joint RL", rl_text, rl_done),
        ("Evaluation after RL", scored(c.after), c.after is not None),
    )
    items = "".join(
        f'<li class="{"done" if done else "open"}"><b>{name}</b><span>{text}</span></li>'
        for name, text, done in phases
    )
    unfinished = [name for name, _, done in phases if not done]
    note = (
        f'<p class="note">This run has not finished: <b>{unfinished[0]}</b> comes next. '
        "The same command goes on where it stopped.</p>"
        if unfinished
        else ""
    )
    return f'<ol class="phases">{items}</ol>{note}'


def headline(c: Contents) -> str:
    """Scores of the last turn before and after RL, their change with its interval, and the turns."""
    if c.before is None and c.after is None:
        return missing("No held-out evaluation has been made yet: it follows the cold start.")
    before, after = ((s or {}).get("last_turn") for s in (c.before, c.after))
    rows = []
    for row in ROWS:
        cells = [number(row.text(row.of(scores))) if scores else number(DASH) for scores in (before, after)]
        change, spread = number(DASH), number("")
        if before and after:
            change = number(row.change(row.of(after) - row.of(before)), sign=row.of(after) - row.of(before))
            half = None if row.key == "geomean_correct" else _half_interval(c, row)
            spread = number(f"± {row.change(half)[1:]}" if half is not None else "", css="muted")
        rows.append(f"<tr><th>{row.name}</th>{''.join(cells)}{change}{spread}</tr>")
    table = (
        f"<table><thead><tr><th></th>{columns('before RL', 'after RL', 'change', '95 %')}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )
    names = {"compiled": "compiled", "correct": "correct"} | {
        r.key: f"Fast {float(r.key):g}" for r in ROWS if r.key[0].isdigit()
    }
    groups = {
        names[row.key]: tuple(row.of(scores) if scores else None for scores in (before, after))
        for row in ROWS
        if row.share
    }
    bars = charts.before_and_after(
        "Before and after RL", groups, y_axis=Axis(label="% of samples, last turn", text=percent, high=1.0)
    )
    samples, tasks = (after or before)["samples"], len((c.after or c.before)["tasks"])
    text = (
        f"{samples:,} samples over {tasks} tasks that training never saw; the last turn counts. "
        "Fast<sub>p</sub> is the share that is correct and more than p times as fast as PyTorch eager. In "
        "the mean speedup a sample that is not correct counts as 0. The 95 % interval of the change is "
        "over tasks, paired."
    )
    if before and after and set(c.before["tasks"]) != set(c.after["tasks"]):
        text += " <b>The two evaluations cover different tasks</b>; the interval is over those in both."
    return f'<div class="two">{table}<div>{bars}{_by_turn(c)}</div></div><p class="fine">{text}</p>'


def agents(c: Contents) -> str:
    """The three agents on held-out tasks, evaluation by evaluation."""
    return agents_table({"untrained": c.untrained, "after the cold start": c.before, "after RL": c.after})


def _half_interval(c: Contents, row: Row) -> float | None:
    """Half the 95 % interval of the mean paired change over tasks; None with fewer than five tasks."""
    shared = [name for name in c.before["tasks"] if name in c.after["tasks"]]
    if len(shared) < 5:
        return None
    changes = [row.of(c.after["tasks"][name]) - row.of(c.before["tasks"][name]) for name in shared]
    return 1.96 * statistics.stdev(changes) / math.sqrt(len(changes))


def _by_turn(c: Contents) -> str:
    most = max(len(s["turns"]) for s in (c.before, c.after) if s is not None)
    if most < 2:
        return ""
    rows = []
    for turn in range(most):
        cells = []
        for scores in (c.before, c.after):
            found = scores["turns"][turn] if scores and turn < len(scores["turns"]) else None
            cells += (
                [number(percent(found["correct"])), number(times(found["mean_speedup"]))]
                if found
                else [number(DASH)] * 2
            )
        rows.append(f"<tr><th>Turn {turn + 1}</th>{''.join(cells)}</tr>")
    return (
        '<table class="small"><thead><tr><th rowspan="2"></th><th class="group" colspan="2">before RL</th>'
        '<th class="group" colspan="2">after RL</th></tr>'
        f"<tr>{columns(*['correct', 'speedup'] * 2)}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def curves(c: Contents) -> str:
    """What the steps of RL and of the cold start measured."""
    step = Axis(label="RL step", whole=True)
    found = []
    window = 5 if len(c.rl) <= 100 else len(c.rl) // 20
    for key, title, axis in (
        ("reward", "Reward", Axis(label="mean over rollouts of the best turn's reward", text=plain)),
        ("correct", "Correct", Axis(label="% of judged turns", text=percent, low=0.0)),
        (
            "speedup",
            "Speedup over eager",
            Axis(label="×, mean over turns, 0 where not correct", text=plain, low=0.0),
        ),
        ("fast_1.5", "Fast 1.5", Axis(label="% of judged turns", text=percent, low=0.0)),
    ):
        x, (y,) = _columns(c.rl, key)
        if x:
            found.append(charts.line_chart(title, x, {key: y}, x_axis=step, y_axis=axis, smooth=window))
    x, (proposed, verified, active) = _columns(c.rl, "skills_proposed", "skills_verified", "skills_active")
    if x:
        lines = {"proposed": proposed, "verified": verified, "active": active}
        found.append(
            charts.line_chart(
                "Skills", x, lines, x_axis=step, y_axis=Axis(label="number so far", low=0.0, whole=True)
            )
        )
    x, (collect, update) = _columns(c.rl, "collect_s", "update_s")
    if x:
        parts = {"collect": collect, "update": update}
        axis = Axis(label="seconds", text=plain)
        found.append(charts.stacked_columns("Time per step", x, parts, x_axis=step, y_axis=axis))
    x, (entropy,) = _columns(c.rl, "entropy")
    if x:
        axis = Axis(label="nats per sampled token", text=plain, low=0.0)
        found.append(
            charts.line_chart("Entropy", x, {"entropy": entropy}, x_axis=step, y_axis=axis, smooth=window)
        )
    notes = "" if found else missing("Joint RL has not begun.")
    x, (loss,) = _columns(c.sft, "loss")
    if x:
        axis = Axis(label="nats per imitated token", text=plain, low=0.0)
        smooth = max(len(x) // 40, 1)
        cold = Axis(label="cold-start step", whole=True)
        found.append(
            charts.line_chart("Cold-start loss", x, {"loss": loss}, x_axis=cold, y_axis=axis, smooth=smooth)
        )
    else:
        notes += missing("The cold start has not begun.")
    names = ["validation_loss", *(key for key in ("policy", "selection", "summary") if any(f"validation_loss_{key}" in e for e in c.sft))]
    keys = [name if name == "validation_loss" else f"validation_loss_{name}" for name in names]
    x, lines = _columns(c.sft, *keys)
    if x:
        named = dict(zip(["all", *names[1:]], lines, strict=True))
        axis = Axis(label="nats per imitated token", text=plain, low=0.0)
        cold = Axis(label="cold-start step", whole=True)
        found.append(charts.line_chart("Loss on tasks that are not trained on", x, named, x_axis=cold, y_axis=axis))
    return notes + f'<div class="charts">{"".join(found)}</div>'


def spent_on_rl(c: Contents) -> str:
    """Where the time of RL went, and the tokens that it learned from; "" before its first step."""
    x, _ = _columns(c.rl, "step_s")
    if not x:
        return ""
    names = {"Wall time": "step_s", "sampling": "sampling_s", "judging": "judging_s", "updating": "update_s"}
    totals = {title: sum(e.get(key, 0.0) for e in c.rl) for title, key in names.items()}
    learned = sum(e.get("tokens", 0.0) for e in c.rl)
    cells = [number(f"{len(x):,}"), *(number(duration(seconds)) for seconds in totals.values()), number(f"{learned:,.0f}" if learned else DASH)]
    return table(["", "Steps", *totals, "Tokens learned from"], [("RL", cells)])


def _columns(entries: Sequence[dict[str, Any]], *keys: str) -> tuple[list[float], list[list[float]]]:
    """Steps and values of the entries that have every key."""
    having = [e for e in entries if all(key in e for key in keys)]
    return [float(e["step"]) for e in having], [[float(e[key]) for e in having] for key in keys]


def per_task(c: Contents) -> str:
    """Scores of every held-out task before and after RL."""
    before, after = ((s or {}).get("tasks", {}) for s in (c.before, c.after))
    names = list(dict.fromkeys([*after, *before]))
    if not names:
        return missing("No held-out evaluation has been made yet.")
    level = {name: c.tasks[name].level for name in names if name in c.tasks}
    names.sort(key=lambda name: (level.get(name, 99), name))
    top = max(scores["mean_speedup"] for group in (before, after) for scores in group.values())
    rows = []
    for name in names:
        a, b = before.get(name), after.get(name)
        cells = [number(str(level.get(name, DASH)))]
        cells += [number(percent(s["correct"]) if s else DASH) for s in (a, b)]
        cells += [number(times(s["mean_speedup"]) if s else DASH) for s in (a, b)]
        change = b["mean_speedup"] - a["mean_speedup"] if a and b else None
        cells.append(number(f"{change:+.2f}", sign=change) if change is not None else number(DASH))
        bars = charts.pair_of_bars(a and a["mean_speedup"], b and b["mean_speedup"], top)
        rows.append(
            f'<tr><th class="name">{escape(name)}</th>{"".join(cells)}<td class="bars">{bars}</td></tr>'
        )
    return (
        f'<p class="fine key"><i style="background:{charts.BEFORE}"></i>before RL'
        f'<i style="background:{charts.AFTER}"></i>after RL; the longest bar is {times(top)}</p>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Table"><table class="wide"><thead>'
        '<tr><th rowspan="2">Task</th><th class="n" rowspan="2">Level</th>'
        '<th class="group" colspan="2">Correct</th><th class="group" colspan="4">Mean speedup</th></tr>'
        f"<tr>{columns('before', 'after', 'before', 'after', 'change')}<th></th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def skills(c: Contents) -> str:
    """How the library grew, and every skill with its evidence, use and effect."""
    if not c.skills:
        return missing("The library is empty: no skill has been proposed and verified yet.")
    order = {"active": 0, "dormant": 1, "candidate": 2, "retired": 3, "rejected": 4}
    rows = []
    for s in sorted(c.skills, key=lambda s: (order[s.status], s.provenance.step, s.name)):
        e = s.evidence[-1] if s.evidence else None
        interval = f"{e.low:.2f} – {e.high:.2f}" if e and e.low is not None and e.high is not None else DASH
        code = f"<details><summary>content</summary><pre>{visible(s.content)}</pre></details>"
        text = f'<b class="name">{visible(s.name)}</b><span class="what">{visible(s.description)}</span>{code}'
        rows.append(
            f'<tr><td class="skill">{text}</td>'
            f'<td><span class="badge {status(s.status)}">{s.status}</span></td>'
            + number(times(e.effect) if e else DASH)
            + number(interval)
            + number(str(e.n) if e else DASH)
            + number(f"{s.usage.selected:,} of {s.usage.shown:,}")
            + number(times(math.exp(s.usage.log_effect_sum / s.usage.effects)) if s.usage.effects else DASH)
            + number(_known(c.posteriors.get(s.name)) if s.status in ("active", "dormant") else DASH)
            + number(str(s.provenance.step) if s.provenance.step >= 0 else DASH)
            + "</tr>"
        )
    return _growth(c) + (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table"><table class="wide skills"><thead><tr><th>Skill</th><th>Status</th>'
        f"{columns('Effect', '95 %', 'Pairs', 'Selected', 'In use', 'All in all', 'RL step')}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        '<p class="fine">Effect: speed of kernels written with the skill over that of kernels written '
        "without it, in its last verification. Selected: how often, of the times it was on offer. In use: "
        "the same ratio in the rollouts that selected it, against those of the same task without any. All in all: "
        "what is known of it by verification and use together, what is long ago counting less, with a 95 % "
        "interval and the probability that it helps (dk_jax.skills.lifecycle).</p>"
    )


def _growth(c: Contents) -> str:
    if len(c.growth) < 2:
        return ""
    x = [float(step) for step, _ in c.growth]
    lines = {title: [float(counts[key]) for _, counts in c.growth] for title, key in GROWTH.items()}
    axis = Axis(label="skills so far", low=0.0, whole=True)
    return f'<div class="charts">{charts.line_chart("Library", x, lines, x_axis=Axis(label="RL step", whole=True), y_axis=axis)}</div>'


def _known(posterior: Posterior | None) -> str:
    if posterior is None:
        return DASH
    mean, low, high = (math.exp(x) for x in (posterior.mean, posterior.low, posterior.high))
    return f"{mean:.2f} ({low:.2f} – {high:.2f}), {percent(posterior.helps)}"


def examples(c: Contents) -> str:
    """Kernels of the newest rollouts that are worth a look."""
    picked = pick_examples(c.kernels)
    if not picked:
        return missing("No kernels have been kept yet.")
    cards = "".join(card(example, c.tasks.get(example.trajectory.task)) for example in picked)
    return f'<p class="fine">From {escape(c.kernels_from)}.</p>{cards}'


def making(c: Contents) -> str:
    """Machine, versions and config."""
    parts = [
        _definitions("Machine of this report", machine.host()),
        _definitions("Versions", machine.versions()),
    ]
    made = f'<div class="defs">{"".join(parts)}</div>'
    if c.config is None:
        return missing("config.json is missing: this folder was not made by a run.") + made
    loose = {k: v for k, v in c.config.items() if not isinstance(v, dict)}
    groups = [("config", loose)] if loose else []
    groups += [(k, v) for k, v in c.config.items() if isinstance(v, dict)]
    config = "".join(_definitions(name, {k: _value(v) for k, v in group.items()}) for name, group in groups)
    return f'{made}<h3>Config</h3><div class="defs">{config}</div>'


def _definitions(title: str, values: dict[str, str]) -> str:
    rows = "".join(
        f"<div{' class=long' if len(v) > 60 else ''}><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>"
        for k, v in values.items()
    )
    return f"<dl><h4>{escape(title)}</h4>{rows}</dl>"


def _value(value: Any) -> str:
    return value or '""' if isinstance(value, str) else json.dumps(value).replace("Infinity", "inf")
