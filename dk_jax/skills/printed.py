"""Skills and libraries in lines for a terminal: tables, histories, differences. Nothing is read or printed here."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from dk_jax.skills.library import LoggedEvent
from dk_jax.skills.lifecycle import LifecycleRules, Posterior
from dk_jax.skills.markdown import effect_in_use, interval, ratio, row
from dk_jax.skills.record import STATUSES, Evidence, Skill, Usage
from dk_jax.skills.view import LibraryView

LEAST_CUT = 12
"""Characters that a shortened column keeps."""


def printable(text: str) -> str:
    """The text with control characters, which models write too, made visible: a terminal must not obey them."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def count(number: int, noun: str) -> str:
    """E.g. "1 skill", "2 skills"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def summary(path: Path, view: LibraryView) -> str:
    """Path, step, and how many skills of which status."""
    counts = Counter(skill.status for skill in view.skills())
    of = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    return f"{path}: {'no step committed' if view.step < 0 else f'step {view.step}'}, {count(len(view), 'skill')}{f' ({of})' if of else ''}"


def verification(skill: Skill) -> Evidence | None:
    """The last one that accepted it, or else the last one, or None."""
    accepted = [e for e in skill.evidence if e.decision == "accept"]
    return (accepted or list(skill.evidence) or [None])[-1]


def verified(skill: Skill) -> str:
    """The effect in its verification with the 95 % interval, e.g. "1.50x (1.20–1.88)"."""
    evidence = verification(skill)
    return "" if evidence is None else f"{ratio(evidence.effect)}x" + (f" ({interval(evidence)})" if interval(evidence) else "")


def in_use(usage: Usage) -> str:
    """The geometric mean of the effects when selected and their number, e.g. "1.23x of 4"; "" without any."""
    return f"{effect_in_use(usage)[0]:.2f}x of {usage.effects}" if usage.effects else ""


def posterior_line(known: Posterior, rules: LifecycleRules) -> str:
    """What is known of a skill's effect, in a line."""
    mean, low, high = (math.exp(x) for x in (known.mean, known.low, known.high))
    uses = f"{known.effects:.1f} measured uses" if known.effects else "no measured use"
    return f"{mean:.2f}x ({low:.2f} to {high:.2f}); faster by {rules.least_gain:g}x or more with probability {known.helps:.2f}; {uses}, aged"


def table(
    rows: Sequence[Sequence[object]], *, width: int | None, right: Sequence[int] = (), cut: int = 0, spare: int | None = None
) -> str:
    """Rows as aligned lines.

    Args:
        rows: at least one, of equal length; the header first if there is one.
        width: columns of the terminal to fit into, or None for any number of them.
        right: columns that are aligned at their right.
        cut: the column that is shortened where lines are too long.
        spare: a column that goes before another is shortened.
    """
    cells = [[" ".join(str(cell).split()) for cell in line] for line in rows]
    if spare is not None and width is not None and _length(_widths(cells)) > width:
        right = [i - (i > spare) for i in right if i != spare]
        cells, cut = [line[:spare] + line[spare + 1 :] for line in cells], cut - (cut > spare)
    widths = _widths(cells)
    if width is not None and _length(widths) > width:
        widths[cut] = max(min(LEAST_CUT, widths[cut]), widths[cut] - (_length(widths) - width))
    for line in cells:
        if len(line[cut]) > widths[cut]:
            line[cut] = line[cut][: widths[cut] - 1] + "…"
    aligned = [[c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))] for line in cells]
    return "\n".join("  ".join(line).rstrip() for line in aligned)


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*cells, strict=True)]


def _length(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def history_lines(history: Sequence[LoggedEvent]) -> list[str]:
    """One line an event of a skill, oldest first, undone ones marked; uses that follow each other are one line."""

    def together(logged: LoggedEvent) -> Hashable:
        return (logged.undone, "usage" if logged.event.kind == "usage" else logged.seq)

    lines = []
    for (undone, _), group in itertools.groupby(history, key=together):
        events = list(group)
        first, last = events[0].step, events[-1].step
        when = datetime.fromtimestamp(events[-1].time_s).strftime("%Y-%m-%d %H:%M")
        steps = f"{first}" if first == last else f"{first}-{last}"
        lines.append(f"step {steps:<9} {when}  {'[undone] ' if undone else ''}{_told(events)}")
    return lines


def _told(events: Sequence[LoggedEvent]) -> str:
    kind, data = events[0].event.kind, events[0].event.data
    if kind == "proposed":
        return f"proposed as {data['name']}" + ("" if data["status"] == "candidate" else f", {data['status']}")
    if kind == "usage":
        usage = Usage()
        for use in (logged.event.data for logged in events):
            usage = usage.plus(shown=use["shown"], selected=use["selected"], log_effects=tuple(use["log_effects"]))
        return f"shown {usage.shown}, selected {usage.selected}" + (f", effect {in_use(usage)}" if usage.effects else "")
    if kind == "status":
        return f"{data['status']}{': ' if data['reason'] else ''}{data['reason']}"
    if kind == "evidence":
        e = Evidence.from_dict(data)
        facts = (f"{e.decision} by rule {e.rule}", f"{ratio(e.effect)}x", interval(e), "" if e.p is None else f"p {e.p:.3g}", f"n {e.n}")
        return f"verified: {', '.join(filter(None, facts))}"
    return f"{kind}: {', '.join(f'{key} {value}' for key, value in data.items())}"


def by_id(view: LibraryView) -> dict[Hashable, Skill]:
    """Keys for `differences` between two moments of one library."""
    return {skill.id: skill for skill in view.skills()}


def by_name(view: LibraryView) -> dict[Hashable, Skill]:
    """Keys for `differences` between two libraries: the name, and which of that name it is, since rejected skills give theirs back."""
    seen: Counter[str] = Counter()
    keys: dict[Hashable, Skill] = {}
    for skill in view.skills():
        keys[skill.name, seen[skill.name]] = skill
        seen[skill.name] += 1
    return keys


def differences(before: Mapping[Hashable, Skill], after: Mapping[Hashable, Skill]) -> list[tuple[str, Skill, str]]:
    """What became of the skills: (kind, skill, in words), several for a skill that changed in several ways.

    Kinds are "added" and "gone", "retired" and, for other changes, "status", "text", "evidence", "usage" and "record" (language, parents,
    provenance). Evidence and usage count as changed where what is printed of them is.
    """
    found = [("added", skill, ", ".join(filter(None, [skill.status, verified(skill)]))) for key, skill in after.items() if key not in before]
    found += [("gone", skill, f"was {skill.status}") for key, skill in before.items() if key not in after]
    for key, new in after.items():
        found += [(kind, new, told) for kind, told in _changes(before.get(key, new), new)]
    return found


def _changes(old: Skill, new: Skill) -> list[tuple[str, str]]:
    found = []
    if old.status != new.status:
        found.append(("retired" if new.status == "retired" else "status", f"{old.status} -> {new.status}"))
    for kind, fields in (("text", ("description", "scope", "tags", "content")), ("record", ("language", "parents", "provenance"))):
        if changed := [field for field in fields if getattr(old, field) != getattr(new, field)]:
            found.append((kind, ", ".join(changed)))
    was, now = [*map(row, old.evidence)], [*map(row, new.evidence)]
    if was != now:
        more = new.evidence[len(was) :] if now[: len(was)] == was else ()
        found.append(("evidence", "; ".join(f"{e.decision} {ratio(e.effect)}x at step {e.step}" for e in more) or "differs"))
    used = [("shown", old.usage.shown, new.usage.shown), ("selected", old.usage.selected, new.usage.selected)]
    used.append(("effect", in_use(old.usage) or "none", in_use(new.usage) or "none"))
    if changed := [f"{what} {before} -> {after}" for what, before, after in used if before != after]:
        found.append(("usage", ", ".join(changed)))
    return found
