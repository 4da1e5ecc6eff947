"""The report's sections beside scores: what was spent, skills in prompts, integrity, and what was asked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dk_jax.evaluation.evaluated import Evaluated
from dk_jax.evaluation.fast_p import score
from dk_jax.evaluation.markup import DASH, duration, missing, number, share_cell, table, times_cell, visible
from dk_jax.evaluation.report_fast_p import NOTHING
from dk_jax.evaluation.results import Result, measured, plain

RESAMPLES = 300
MAX_SKILLS, MAX_RULES = 200, 60


def spent(shown: Sequence[Evaluated]) -> str:
    """Tokens, time and cost, in all and for each sample."""
    shown = [e for e in shown if e.results]
    if not shown:
        return missing(NOTHING)
    head = ["Samples", "Turns", "Distinct kernels judged", "Prompt tokens", "Answer tokens", "a sample", "Cost", "a right sample"]
    head += ["Wall time", "a sample", "Messages"]
    rows = []
    for e in shown:
        s, n = e.summary, len(e.results)
        tokens, cost, right = s["tokens"], s["cost"], sum(r.trajectory.best is not None for r in e.results)
        money = cost.get("cost") or cost["of_results"]
        cells = [f"{n:,}", f"{s['candidates']['turns']:,}", f"{s['candidates']['distinct']:,}"]
        cells += [f"{tokens['prompt']:,}", f"{tokens['answers']:,}", f"{tokens['answers'] / n:,.0f}"] if tokens else [DASH] * 3
        cells += [f"{money:,.4g}" if money else DASH, f"{money / right:,.3g}" if money and right else DASH]
        cells += [duration(s["wall_s"]), f"{s['wall_s'] / n:,.1f} s"] if s["wall_s"] else [DASH] * 2
        calls = s.get("calls")
        cells += [f"{calls['messages']:,}" + (f" ({calls['further']:,} no candidates)" if calls["further"] else "") if calls else DASH]
        rows.append((escape(e.name), cells))
    kept = [i for i in range(len(head)) if any(cells[i] != DASH for _, cells in rows)]
    found = table(["", *(head[i] for i in kept)], [(name, [number(cells[i]) for i in kept]) for name, cells in rows])
    return found + (
        '<p class="fine">Tokens and cost: of the results, where somebody counts them; cost in the unit of the prices that were given. Wall time: of '
        "the command, all its starts together. What nobody has counted has no column.</p>"
    )


def skills_in_prompts(shown: Sequence[Evaluated]) -> str:
    """What samples came to that had a skill in their prompt, beside those without any; "" where none had one."""
    parts = []
    for e in (e for e in shown if any(r.trajectory.skills for r in e.results)):
        with_, without = {}, [r for r in e.results if not r.trajectory.skills]
        for r in e.results:
            for name in r.trajectory.skills:
                with_.setdefault(name, []).append(r)
        ordered = sorted(with_.items(), key=lambda item: -len(item[1]))
        rows = [(f'<span class="name">{visible(name, 80)}</span>', _scored(own, e)) for name, own in ordered[:MAX_SKILLS]]
        rows += [("no skill", _scored(without, e))] if without else []
        head = ["", "Tasks, samples", "Correct", "Fast<sub>1</sub>", "Geometric mean"]
        parts.append(table(head, rows, caption=f"{escape(e.name)}: samples by the skills in their prompt, last turn, over eager"))
        if len(ordered) > MAX_SKILLS:
            parts.append(f'<p class="fine">{len(ordered) - MAX_SKILLS} rarer skills are not listed.</p>')
    note = '<p class="fine">Skills go to tasks that they are chosen for: rows are of different tasks, and no effect can be read off them alone.</p>'
    return "".join(parts) + note if parts else ""


def _scored(results: Sequence[Result], e: Evaluated) -> list[str]:
    own = score(measured(results, "last_turn", "eager"), seed=e.seed, resamples=RESAMPLES)
    values = [share_cell(plain(own.fast[0.0])), share_cell(plain(own.fast[1.0])), times_cell(plain(own.geomean))]
    return [number(f"{own.tasks}, {own.samples}"), *values]


def integrity(shown: Sequence[Evaluated]) -> str:
    """Outcomes of last turns, rules that fired, and what does not count, counted."""
    shown = [e for e in shown if e.results]
    if not shown:
        return missing(NOTHING)
    groups = {
        "Outcomes of last turns": [
            (visible(name.replace("_", " "), 60), [_of(e.summary["outcomes"].get(name, 0), len(e.results)) for e in shown])
            for name in _most_common(shown, "outcomes")
        ],
        "What does not count in full": [(name, [_plain(of(e.summary)) for e in shown]) for name, of in _FAULTS.items()]
        + [
            (f"Not timed against {escape(b)}", [_plain(e.summary["not_timed_against"].get(b, 0)) for e in shown])
            for b in _most_common(shown, "not_timed_against")
        ],
        "Integrity rules that fired, kernels of all turns": [
            (f'<span class="name">{visible(rule, 80)}</span>', [_plain(e.summary["integrity"].get(rule, 0)) for e in shown])
            for rule in _most_common(shown, "integrity")[:MAX_RULES]
        ]
        or [("none", [_plain(0) for _ in shown])],
    }
    rows = []
    for title, own in groups.items():
        rows.append((f"<b>{title}</b>", ["<td></td>"] * len(shown)))
        rows += [(name, [number(cell) for cell in cells]) for name, cells in own]
    parts = [table(["", *(escape(e.name) for e in shown)], rows)]
    reasons = "".join(
        f"<li>{escape(e.name)}: {visible(reason, 160)}: {n:,}</li>" for e in shown for reason, n in e.summary["missing"]["reasons"].items()
    )
    refused = "".join(
        f"<li>{escape(e.name)}: {visible(name, 100)}: {visible(reason, 300)}</li>"
        for e in shown
        for kind in ("tasks_refused", "tasks_that_do_not_fit")
        for name, reason in e.summary[kind].items()
    )
    marked = "".join(
        f"<li>{escape(e.name)}: {visible(name, 100)}: {visible('; '.join(said), 300)}</li>"
        for e in shown
        for name, said in e.summary.get("tasks_marked", {}).items()
    )
    if reasons or refused or marked:
        parts.append(f"<details><summary>Reasons and marks</summary><ul>{reasons}{refused}{marked}</ul></details>")
    return "".join(parts)


_FAULTS = {
    "Samples without a kernel": lambda s: s["missing"]["samples"],
    "Noisy, of the timed kernels of last turns": lambda s: f"{s['noisy']['kernels']:,} of {s['noisy']['of']:,}",
    "Correct, but the speed is not their own": lambda s: s["speed_not_counted"],
    "Tasks that the sandbox refuses": lambda s: len(s["tasks_refused"]),
    "Tasks whose prompt does not fit": lambda s: len(s["tasks_that_do_not_fit"]),
}


def _most_common(shown: Sequence[Evaluated], key: str) -> list[str]:
    """What the summaries count under a key, the most frequent first."""
    counts = Counter()
    for e in shown:
        counts.update(e.summary[key])
    return [name for name, _ in counts.most_common()]


def _of(count: int, total: int) -> str:
    return f"{count:,} <span class='muted'>({100 * count / total:.0f} %)</span>" if count else '<span class="none">0</span>'


def _plain(value: int | str) -> str:
    return (f"{value:,}" if value else '<span class="none">0</span>') if isinstance(value, int) else value


def asked(shown: Sequence[Evaluated]) -> str:
    """What each evaluation was asked for; what differs is marked. "" for a run's own, whose config is told elsewhere."""
    shown = [e for e in shown if "policy" in e.summary["settings"]]
    if not shown:
        return ""
    flat = [dict(_flat(e.summary["settings"])) for e in shown]
    names = dict.fromkeys(name for own in flat for name in own)
    rows = []
    for name in names:
        values = [_said(own.get(name)) for own in flat]
        differs = len(set(values)) > 1
        rows.append((f"<b>{escape(name)}</b>" if differs else escape(name), [f"<td>{visible(value, 300)}</td>" for value in values]))
    machines = [sorted({f"{s['machine']['processor']}, GPU {s['machine']['gpu']}" for s in e.summary["sessions"]}) for e in shown]
    rows.append(("machine", [f"<td>{escape('; '.join(own)) or DASH}</td>" for own in machines]))
    head = ["", *(escape(e.name) for e in shown)]
    heads = f"<th></th>{''.join(f'<th>{name}</th>' for name in head[1:])}"
    body = "".join(f'<tr><th scope="row">{name}</th>{"".join(cells)}</tr>' for name, cells in rows)
    note = '<p class="fine">In bold what is not the same everywhere.</p>' if len(shown) > 1 else ""
    box = '<div class="scroll" tabindex="0" role="region" aria-label="Table">'
    return f'{box}<table class="wide"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>{note}'


def _flat(data: Mapping[str, Any], prefix: str = ""):
    for key, value in data.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in ("tasks", "library.skills"):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{len(value)}"
    return value if isinstance(value, str) else "–" if value is None else json.dumps(value)


