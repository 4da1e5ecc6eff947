"""Small pieces of HTML of which a report is made. What a model wrote goes through `visible` or html.escape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

DASH = '<span class="none">–</span>'


def times(value: float) -> str:
    """A speedup."""
    return f"{value:.2f} ×"


def number(text: str, *, sign: float = 0.0, css: str = "") -> str:
    """A right-aligned cell; `sign` colours a gain or a loss. `text` is markup."""
    tint = "gain" if sign > 1e-9 else "loss" if sign < -1e-9 else css
    return f'<td class="n {tint}">{text.replace("-", "−", 1) if text[:1] == "-" else text}</td>'


def columns(*names: str) -> str:
    """Headings of right-aligned columns."""
    return "".join(f'<th class="n">{name}</th>' for name in names)


def duration(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 90:
        return f"{seconds:.0f}\u00a0s"
    return f"{seconds / 60:.0f}\u00a0min" if seconds < 5400 else f"{seconds / 3600:.1f}\u00a0h"


def plain(value: float) -> str:
    return f"{value:.3g}"


def missing(text: str) -> str:
    return f'<p class="missing">{text}</p>'


def status(word: str) -> str:
    good, middling = ("ok", "active"), ("incorrect", "candidate", "dormant", "retired", "no_kernel")
    return "good" if word in good else "middling" if word in middling else "bad"


_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def visible(text: str, most: int | None = None) -> str:
    """Text as markup that shows all of it: markup characters are escaped; control characters, marks that turn the direction of writing and
    lone surrogates are named, so that code can't look like other code. Beyond `most` characters it is cut, and that is said."""
    text = text.replace("\r\n", "\n")
    cut = f"\n... ({len(text) - most:,} more characters)" if most is not None and len(text) > most else ""
    return _ODD.sub(lambda found: f'<span class="odd">U+{ord(found[0]):04X}</span>', escape(text[:most])) + cut


def share_cell(value: Mapping[str, float | None]) -> str:
    """A share with its interval below it (a Value as plain data)."""
    return _cell(value, lambda x: f"{100 * x:.1f}", " %")


def times_cell(value: Mapping[str, float | None]) -> str:
    """A speedup with its interval below it."""
    return _cell(value, lambda x: f"{x:.2f}", " ×")


def _cell(value: Mapping[str, float | None], say, unit: str) -> str:
    if value["value"] is None:
        return number(DASH)
    low, high = value["low"], value["high"]
    interval = f"<small>{say(low)} – {say(high)}</small>" if low is not None and high is not None else ""
    return f'<td class="n">{say(value["value"])}{unit}{interval}</td>'


def table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], *, caption: str = "", css: str = "") -> str:
    """A table that scrolls within itself.

    Args:
        head: markup of the columns' headings, that of the rows' names first.
        rows: markup of a row's name, and its cells (`number`, `share_cell`, ...).
    """
    above = f"<caption>{caption}</caption>" if caption else ""
    body = "".join(f'<tr><th scope="row">{name}</th>{"".join(cells)}</tr>' for name, cells in rows)
    first, *others = head
    heads = f'<th scope="col">{first}</th>' + "".join(f'<th scope="col" class="n">{name}</th>' for name in others)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table"><table class="{css or "wide"}">{above}<thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def figure(svg: str, *, legend: str = "", numbers: str = "") -> str:
    """A chart with its legend and, folded away, the table of its numbers."""
    told = f"<details><summary>Numbers</summary>{numbers}</details>" if numbers else ""
    caption = f"<figcaption>{legend}</figcaption>" if legend else ""
    return f"<figure>{svg}{caption}{told}</figure>"


def legend(names: Sequence[str], *, dashes: Sequence[str] = (), published: bool = False) -> str:
    """Names with their series' colours in order, lines dashed as `dashes` says (SVG's stroke-dasharray)."""
    entries = []
    for i, name in enumerate(names, 1):
        dash = f' stroke-dasharray="{dashes[i - 1]}"' if dashes and dashes[i - 1] else ""
        line = f'<path d="M0 5H26" stroke="var(--series-{i})" stroke-width="3"{dash}/>'
        mark = line if dashes else f'<path d="M0 1h12v8H0Z" fill="var(--series-{i})"/>'
        entries.append(f'<span><svg class="swatch" width="{26 if dashes else 12}" height="10" aria-hidden="true">{mark}</svg>{escape(name)}</span>')
    if published:
        entries.append('<span><i class="hatched"></i>as published (other hardware and judge)</span>')
    return f'<span class="legend">{"".join(entries)}</span>'
