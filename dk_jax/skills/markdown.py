"""A skill as Markdown for people, and back: text to `Skill`, no files here.

What Markdown leaves out is the code before and after; numbers come back to the digits that are printed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from dk_jax.skills.record import CONTROL, STATUSES, Evidence, Provenance, Skill, SkillDraft, Status, Usage, validate_draft

_COLUMNS = ("step", "tasks", "device", "rule", "decision", "effect", "95 % interval", "p", "n")
_KEYS = ("scope", "tags", "status", "language", "found on", "rollouts", "merged from", "shown", "effect when selected")
_BULLET = re.compile(r"[-*][ \t]+(.*)")
_EVIDENCE = re.compile(r"(\\*)## Evidence[ \t]*")
_COUNTS = re.compile(r"(\d{1,18}) times?, selected (\d{1,18}) times?")
_EFFECT = re.compile(r"(\S+)x, spread (\S+), (\d{1,18}) measured")


class BadPage(ValueError):
    """Text that is no skill: "LINE: field 'NAME': what is wrong with it"."""


def markdown(skill: Skill) -> str:
    """A skill for people: header, content, evidence, use. `parse` reads it.

    Header and table escape what would end a field, as Markdown does. The content stands as it is, but for a backslash before a line that
    reads "## Evidence".
    """
    usage, origin = skill.usage, skill.provenance
    lines = [f"# {skill.name}", "", re.sub(r"^(?=[-*#])", r"\\", _escaped(skill.description)), ""]
    lines += [f"- scope: {_escaped(skill.scope)}", f"- tags: {_listed(skill.tags)}"]
    lines.append(f"- status: {skill.status}" + (f" (id {skill.id})" if skill.id else ""))
    if skill.language:
        lines.append(f"- language: {_escaped(skill.language)}")
    if origin.task or origin.step != Provenance.step:
        lines.append(f"- found on: {_escaped(origin.task)}{', ' if origin.task else ''}step {origin.step}")
    if origin.rollouts:
        lines.append(f"- rollouts: {_listed(origin.rollouts)}")
    if skill.parents:
        lines.append(f"- merged from: {_listed(skill.parents)}")
    lines.append(f"- shown {usage.shown} times, selected {usage.selected} times")
    if usage.effects:
        mean, spread = effect_in_use(usage)
        lines.append(f"- effect when selected: {mean:.4g}x, spread {spread:.4f}, {usage.effects} measured")
    content = ["\\" + line if _EVIDENCE.fullmatch(line) else line for line in skill.content.split("\n")]
    lines += ["", *content, ""]
    if skill.evidence:
        lines += ["## Evidence", "", f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|", *map(row, skill.evidence), ""]
        reasons = [f"{number}. {_escaped(e.reason)}" for number, e in enumerate(skill.evidence, 1) if e.reason]
        lines += [*reasons, ""] if reasons else []
    return "\n".join(lines)


def effect_in_use(usage: Usage) -> tuple[float, float]:
    """Geometric mean of the speedup ratios measured when selected (1 without any), and the standard deviation of their logarithms."""
    count = max(usage.effects, 1)
    mean = usage.log_effect_sum / count
    return math.exp(max(-700.0, min(mean, 700.0))), math.sqrt(max(0.0, usage.log_effect_square_sum / count - mean * mean))


def interval(evidence: Evidence) -> str:
    """The 95 % interval of the effect, "" where there is none."""
    return "" if evidence.low is None and evidence.high is None else f"{ratio(evidence.low)}–{ratio(evidence.high)}"


def row(e: Evidence) -> str:
    """A verification as a row of the table, without its reason."""
    p = "" if e.p is None else f"{e.p:.3g}"
    words = " | ".join([_listed(e.tasks), _escaped(e.device), _escaped(e.rule), e.decision])
    return f"| {e.step} | {words} | {ratio(e.effect)}x | {interval(e)} | {p} | {e.n} |"


def ratio(value: float | None) -> str:
    """A speedup ratio as text, "" for None: two digits after the point, and three significant ones where that would show little."""
    return "" if value is None else f"{value:.3g}" if 0 < abs(value) < 0.1 else f"{value:.2f}"


def _listed(words: Sequence[str]) -> str:
    return ", ".join(_escaped(word).replace(",", "\\,") for word in words)


def _escaped(text: str) -> str:
    """The text in one line, in which nothing ends a cell or reads as a character reference."""
    text = re.sub(r"\\(?![A-Za-z0-9])|\||&(?=#)", r"\\\g<0>", text)
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]|^\s|\s$", lambda m: f"&#{ord(m[0])};", text)


def _unescaped(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        code = int(match[2] or 0)
        return match[1] or (chr(code) if code < 0xD800 or 0xDFFF < code < 0x110000 else match[0])

    return re.sub(r"\\([!-/:-@\[-`{-~])|&#(\d{1,7});", character, text.strip())


def _split(text: str, separator: str) -> list[str]:
    """The parts between separators that are not escaped, still escaped themselves."""
    parts = [""]
    for piece in re.findall(r"\\.|.", text):
        if piece == separator:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _words(text: str) -> tuple[str, ...]:
    return tuple(_unescaped(word) for word in _split(text, ",")) if text.strip() else ()


def parse(text: str) -> Skill:
    """The skill that `markdown` wrote, without its id, or one written by hand: title, description, scope, tags and sections are enough.

        # name_of_the_skill

        One line that describes it

        - scope: general
        - tags: three, to, six

        Motivation: ...
        Key Idea: ...
        Example: ...

    Raises:
        BadPage: naming line and field.
    """
    # An editor that ends lines its own way does so in all of them.
    return _Page(text.replace("\r\n", "\n") if text.partition("\n")[0].endswith("\r") else text).skill()


class _Page:
    """A skill's Markdown, line by line."""

    def __init__(self, text: str):
        self.lines = text.split("\n")
        self.at: dict[str, int] = {}  # field -> index of its first line, ascending
        self.header: dict[str, str] = {}

    def bad(self, field: str, problem: str, at: int | None = None) -> BadPage:
        line = self.at.get(field, 0) if at is None else at
        return BadPage(f"{line + 1}: field {field!r}: {problem}")

    def skill(self) -> Skill:
        title = re.fullmatch(r"#[ \t]+(.*\S)\s*", self.lines[0])
        if title is None:
            raise self.bad("name", "there is no title: the first line must read '# name_of_the_skill'")
        self.at["name"] = 0
        description, after = self._description()
        after = self._fields(after)
        content, evidence = self._content(after)
        for i, line in enumerate(self.lines):
            if CONTROL.search(line):
                field = [name for name, at in self.at.items() if at <= i][-1]
                raise self.bad(field, "the line holds control characters or chat control markers", i)
        for key, example in (("scope", "general"), ("tags", "three, to, six")):
            if key not in self.header:
                raise self.bad(key, f"missing: a line '- {key}: {example}' belongs under the description", self.at["description"])
        draft = SkillDraft(
            name=title[1], description=description, scope=_unescaped(self.header["scope"]), tags=_words(self.header["tags"]), content=content
        )
        if problems := validate_draft(draft):
            raise self.bad(*self._placed(problems))
        return Skill.from_draft(
            draft, status=self._status(), language=_unescaped(self.header.get("language", "")), provenance=self._origin(),
            parents=_words(self.header.get("merged from", "")), usage=self._usage(), evidence=evidence,
        )  # fmt: skip

    def _placed(self, problems: Sequence[str]) -> tuple[str, str, int]:
        """Field, text and line of what is wrong with the draft; those of the first problem, if there are several."""
        named = re.match(r"(?:\d+ |a )?(name|description|scope|tag|content)", problems[0])
        field = "content" if named is None else named[1].replace("tag", "tags")
        quoted = re.search(r': "([^"]{1,30})', problems[0]) if problems[0].startswith("refused") else None
        lines = [i for i, line in enumerate(self.lines) if quoted and quoted[1] in line.lower()] or [self.at[field]]
        if quoted and lines[0] == self.at["description"]:
            field = "description"
        return field, "; ".join(problems), lines[0]

    def _next(self, at: int) -> int:
        """The next line that is not blank, or the end."""
        return next((i for i in range(at, len(self.lines)) if self.lines[i].strip()), len(self.lines))

    def _description(self) -> tuple[str, int]:
        self.at["description"] = at = self._next(1)
        end = at
        while end < len(self.lines) and self.lines[end].strip() and not _BULLET.match(self.lines[end]):
            end += 1
        if at == end:
            raise self.bad("description", "missing: one line that describes the skill belongs under the title", min(at, len(self.lines) - 1))
        return _unescaped(" ".join(line.strip() for line in self.lines[at:end])), end

    def _fields(self, at: int) -> int:
        """Reads the list of fields; returns the line behind it."""
        at = self._next(at)
        while at < len(self.lines) and (bullet := _BULLET.match(self.lines[at])):
            key, colon, value = bullet[1].partition(":")
            if bullet[1].startswith("shown "):
                key, colon, value = "shown", ":", bullet[1].removeprefix("shown ")
            key = key.strip().lower()
            if not colon or key not in _KEYS:
                raise self.bad(key[:40], f"not known here; there are {', '.join(_KEYS)}", at)
            if key in self.header:
                raise self.bad(key, f"given again; it is on line {self.at[key] + 1} already", at)
            self.header[key], self.at[key] = value.strip(), at
            at += 1
        return at

    def _content(self, at: int) -> tuple[str, tuple[Evidence, ...]]:
        self.at["content"] = min(self._next(at), len(self.lines) - 1)
        end, evidence = len(self.lines), ()
        for i in range(at, len(self.lines)):
            heading = _EVIDENCE.fullmatch(self.lines[i])
            if heading is None or heading[1]:
                continue
            below = self._next(i + 1)
            if below < len(self.lines) and self.lines[below].startswith("|"):
                self.at["evidence"], end, evidence = i, i, self._evidence(below)
                break
        lines = [line[1:] if (m := _EVIDENCE.fullmatch(line)) and m[1] else line for line in self.lines[at:end]]
        if "shown" not in self.header:  # written by hand
            return "\n".join(lines).strip(), evidence
        first, last = int(lines[:1] == [""]), len(lines) - int(lines[1:] != [] and lines[-1] == "")
        return "\n".join(lines[first:last]), evidence

    def _evidence(self, at: int) -> tuple[Evidence, ...]:
        columns = [cell.strip() for cell in _split(self.lines[at], "|")[1:-1]]
        if columns != list(_COLUMNS):
            raise self.bad("evidence", f"the table's columns must be {', '.join(_COLUMNS)}", at)
        found: list[Evidence] = []
        for i in range(at + 1, len(self.lines)):
            line = self.lines[i].strip()
            if not line or re.fullmatch(r"[|:\s-]+", line):
                continue
            if (reason := re.fullmatch(r"(\d{1,9})\. (.*)", line)) and 1 <= int(reason[1]) <= len(found):
                found[int(reason[1]) - 1] = dataclasses.replace(found[int(reason[1]) - 1], reason=_unescaped(reason[2]))
                continue
            cells = _split(line, "|")
            if len(cells) != len(columns) + 2 or cells[0] or cells[-1]:
                raise self.bad("evidence", f"neither a row of the table's {len(columns)} columns nor '1. reason of its first row'", i)
            values: dict[str, Any] = {}
            for column, cell in zip(columns, cells[1:-1], strict=True):
                try:
                    values |= _from_cell(column, cell.strip())
                except ValueError as error:
                    raise self.bad("evidence", f"column {column!r}: {cell.strip()[:40]!r} can't be read: {error}", i) from error
            found.append(Evidence(**values))
        return tuple(found)

    def _status(self) -> Status:
        status = self.header.get("status", "candidate").split(" (id ")[0]
        if status not in STATUSES:
            raise self.bad("status", f"{status[:40]!r} is unknown; use one of {', '.join(STATUSES)}")
        return status

    def _origin(self) -> Provenance:
        found, rollouts = self.header.get("found on", ""), _words(self.header.get("rollouts", ""))
        if stepped := re.fullmatch(r"(?:(.*), )?step (-?\d{1,18})", found):
            return Provenance(task=_unescaped(stepped[1] or ""), step=int(stepped[2]), rollouts=rollouts)
        return Provenance(task=_unescaped(found), rollouts=rollouts)

    def _usage(self) -> Usage:
        usage = Usage()
        if "shown" in self.header:
            counts = _COUNTS.fullmatch(self.header["shown"])
            if counts is None:
                raise self.bad("shown", "it must read '- shown 3 times, selected 1 times'")
            usage = Usage(shown=int(counts[1]), selected=int(counts[2]))
        key = "effect when selected"
        if key in self.header:
            try:
                mean, spread, count = _EFFECT.fullmatch(self.header[key]).groups()
                mean, spread, count = math.log(_finite(mean)), _finite(spread), int(count)
            except (AttributeError, ValueError) as error:
                raise self.bad(key, "it must read '1.5x, spread 0.2, 4 measured'") from error
            total, squares = count * mean, count * (spread * spread + mean * mean)
            usage = dataclasses.replace(usage, effects=count, log_effect_sum=total, log_effect_square_sum=squares)
        return usage


def _from_cell(column: str, cell: str) -> dict[str, Any]:
    """The fields of an Evidence that a cell of the table holds. Raises ValueError."""
    if column in ("step", "n"):
        return {column: int(cell)}
    if column == "tasks":
        return {"tasks": _words(cell)}
    if column == "effect":
        return {"effect": _finite(cell.removesuffix("x"))}
    if column == "p":
        return {"p": _finite(cell) if cell else None}
    if column == "95 % interval":
        low, dash, high = cell.partition("–")
        if cell and not dash:
            raise ValueError("it must read 1.20–1.80")
        return {"low": _finite(low) if low else None, "high": _finite(high) if high else None}
    if column == "decision" and cell not in ("accept", "reject"):
        raise ValueError("it must be accept or reject")
    return {column: _unescaped(cell)}


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value
