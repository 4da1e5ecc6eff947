"""The admission report: all tasks of a recipe, fit for training, fit with marks or refused, as a table and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dk_jax.tasks.records import Records
from dk_jax.tasks.task import Task
from dk_jax.train.admission import ADMITTED, MARKED, REFUSED, category
from sandbox.protocol import Admission, TaskFacts

SUMMARY = "admission_summary.json"
MOST_LINES = 300


def summary(tasks: Sequence[Task], found: Mapping[str, Admission], records: Records | None = None, **about: Any) -> dict[str, Any]:
    """What is reported, as plain data.

    Args:
        tasks: all that were to be examined. found: what is known, by name.
        records: what the tasks were read from, if it was files.
        about: more that is told (device, config, ...).
    """
    known = [(task, found[task.name]) for task in tasks if task.name in found]
    counts = Counter(category(one) for _, one in known)
    facts = [one.facts for _, one in known if one.facts is not None]
    timed = [one for one in facts if one.eager_ms is not None]
    return {
        **about,
        "tasks": len(tasks),
        "not_examined": [task.name for task in tasks if task.name not in found],
        "counts": {name: counts[name] for name in (ADMITTED, MARKED, REFUSED)},
        "by_level": {
            str(level): dict(Counter(category(one) for task, one in known if task.level == level)) for level in sorted({t.level for t in tasks})
        },
        "refused": {task.name: one.refusal for task, one in known if one.refusal},
        "trivial": {task.name: list(one.facts.trivial) for task, one in known if one.facts is not None and one.facts.trivial},
        "marks": {task.name: list(one.marks) for task, one in known if one.marks},
        "launch_known": any(one.launch_ms is not None for one in facts),
        "timed": len(timed),
        "most_needed_bytes": max((one.needed_bytes for one in facts), default=0),
        "judging_s": sum(one.judging_s for one in facts),
        "rows": None if records is None else {
            "said": records.summary, "bad": [str(row) for row in records.bad], "merged": dict(records.merged),
        },
    }  # fmt: skip


def table(tasks: Sequence[Task], found: Mapping[str, Admission], data: Mapping[str, Any]) -> str:
    """The report for people: a line a task, then what it comes to. Of very many the refused and marked ones come first.

    Args:
        data: the `summary` of the same tasks.
    """
    known = [task for task in tasks if task.name in found]
    if len(known) > MOST_LINES:
        known.sort(key=lambda task: (REFUSED, MARKED, ADMITTED).index(category(found[task.name])))
    width = max([4, *(len(task.name) for task in known[:MOST_LINES])])
    lines = [f"{'task':{width}}  level  {'':9}{'eager':>11}{'of launch':>11}{'needs':>10}{'judging':>10}"]
    for task in known[:MOST_LINES]:
        one = found[task.name]
        lines.append(f"{task.name:{width}}  {task.level:5}  {_SHORT[category(one)]:9}{_numbers(one.facts)}")
        lines += [f"{'':{width}}         {words}" for words in ([one.refusal] if one.refusal else []) + list(one.marks)]
    if len(known) > MOST_LINES:
        lines.append(f"... and {len(known) - MOST_LINES} more: see the file")
    counts = data["counts"]
    lines += ["", f"{data['tasks']} tasks: {', '.join(f'{counts[name]} {name}' for name in counts)}"]
    if data["not_examined"]:
        lines.append(f"{len(data['not_examined'])} are not examined yet: the same command goes on")
    if data["trivial"]:
        lines.append(f"{len(data['trivial'])} would be passed by an answer without any work")
    if not data["launch_known"]:
        lines.append("which of them are mostly launch overhead is not known: that shows on a GPU alone")
    if data["rows"] is not None:
        lines += [data["rows"]["said"], *(f"  {row}" for row in data["rows"]["bad"][:MOST_LINES])]
    return "\n".join(lines)


_SHORT = {ADMITTED: "admitted", MARKED: "marked", REFUSED: "REFUSED"}


def _numbers(facts: TaskFacts | None) -> str:
    if facts is None:
        return f"{'-':>11}{'-':>11}{'-':>10}{'-':>10}"
    eager = "-" if facts.eager_ms is None else f"{1000 * facts.eager_ms:.1f} us" if facts.eager_ms < 1 else f"{facts.eager_ms:.3g} ms"
    launches = "-" if not facts.launch_ms or facts.eager_ms is None else f"{facts.eager_ms / facts.launch_ms:.3g} x"
    needed = f"{facts.needed_bytes / 1e9:.3g} GB" if facts.needed_bytes >= 1e9 else f"{facts.needed_bytes / 1e6:.3g} MB"
    return f"{eager:>11}{launches:>11}{needed:>10}{f'{facts.judging_s:.3g} s':>10}"
