"""Skills as files: JSONL with daVinci's fields and ours, and one Markdown file a skill for people."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from dk_jax.skills.record import Skill, validate_draft


class BadSkillFile(ValueError):
    """A file of skills that can't be used; the message names file, line and field."""


def write_jsonl(path: str | Path, skills: Sequence[Skill]) -> int:
    """One JSON line a skill; whole or not at all.

    daVinci's name, description, scope, tags and content come first, then the rest of the record.
    """
    _write(Path(path), "".join(json.dumps(skill.to_dict(), ensure_ascii=False) + "\n" for skill in skills))
    return len(skills)


def read_jsonl(path: str | Path) -> list[tuple[int, Skill]]:
    """The skills of a JSONL file with their line numbers; blank lines are passed over, ids are dropped.

    Fields beyond daVinci's five may be absent, e.g. in daVinci's own files.

    Raises:
        BadSkillFile: naming file, line and field.
    """
    path, found, seen = Path(path), [], {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadSkillFile(f"{path}: can't be read as UTF-8 text: {error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadSkillFile(f"{where}: not JSON: {error}") from error
        if not isinstance(data, dict):
            raise BadSkillFile(f"{where}: not a JSON object")
        data.pop("id", None)
        try:
            skill = Skill.from_dict(data)
        except (TypeError, ValueError) as error:
            raise BadSkillFile(f"{where}: {error}") from error
        if problems := validate_draft(skill.draft):
            raise BadSkillFile(f"{where}: {'; '.join(problems)}")
        if skill.status != "rejected":
            if skill.name in seen:
                raise BadSkillFile(
                    f"{where}: field 'name': {skill.name!r} is already on line {seen[skill.name]}"
                )
            seen[skill.name] = number
        found.append((number, skill))
    return found


def markdown(skill: Skill) -> str:
    """A skill for people: header, content, evidence, use."""
    usage = skill.usage
    lines = [
        f"# {skill.name}",
        "",
        skill.description,
        "",
        f"- scope: {skill.scope}",
        f"- tags: {', '.join(skill.tags)}",
        f"- status: {skill.status}" + (f" (id {skill.id})" if skill.id else ""),
    ]
    if skill.language:
        lines.append(f"- language: {skill.language}")
    if skill.provenance.task:
        lines.append(f"- found on: {skill.provenance.task}, step {skill.provenance.step}")
    if skill.parents:
        lines.append(f"- merged from: {', '.join(skill.parents)}")
    lines += [f"- shown {usage.shown} times, selected {usage.selected} times", "", skill.content.strip(), ""]
    if skill.evidence:
        lines += [
            "## Evidence",
            "",
            "| step | tasks | device | rule | decision | effect | 95 % interval | p | n |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for e in skill.evidence:
            interval = "" if e.low is None or e.high is None else f"{e.low:.2f}–{e.high:.2f}"
            p = "" if e.p is None else f"{e.p:.3g}"
            lines.append(
                f"| {e.step} | {', '.join(e.tasks)} | {e.device} | {e.rule} | {e.decision} | {e.effect:.2f}x "
                f"| {interval} | {p} | {e.n} |"
            )
        lines.append("")
    return "\n".join(lines)


def write_markdown(directory: str | Path, skills: Sequence[Skill]) -> int:
    """Writes NAME.md for each skill (NAME-ID.md for rejected ones, whose names need not be unique)."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for skill in skills:
        name = f"{skill.name}-{skill.id}" if skill.status == "rejected" else skill.name
        _write(directory / f"{name}.md", markdown(skill))
    return len(skills)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
