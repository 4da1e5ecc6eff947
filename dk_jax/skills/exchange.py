"""Skills as files: JSONL with daVinci's fields and ours, and one Markdown file a skill for people, which is read back too.

JSONL holds whole records. Markdown leaves out the code before and after, and has numbers to the digits that are printed.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from dk_jax.skills.markdown import BadPage, markdown, parse
from dk_jax.skills.record import Skill, validate_draft

MAX_MARKDOWN_BYTES = 100_000
Where = TypeVar("Where", int, Path)


class BadSkillFile(ValueError):
    """A file of skills, or a directory of files, that can't be used; the message names file, line and field.

    Attributes:
        problems: why, one line for each skill that is refused.
    """

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


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
        BadSkillFile: naming file, line and field of every line that is no skill.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadSkillFile(f"{path}: can't be read as UTF-8 text: {error}") from error
    readers = {n: functools.partial(_from_json, line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()}
    return _read_all(readers, lambda n: f"{path}:{n}", lambda n: f"on line {n}")


def _from_json(line: str, where: str) -> Skill:
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
    return skill


def _read_all(
    readers: Mapping[Where, Callable[[], Skill]], place: Callable[[Where], str], called: Callable[[Where], str]
) -> list[tuple[Where, Skill]]:
    """What all readers read, with where it is from; or one BadSkillFile of all that fail or give a name again."""
    found: list[tuple[Where, Skill]] = []
    seen: dict[str, Where] = {}
    problems: list[str] = []
    for where, read in readers.items():
        try:
            skill = read()
        except BadSkillFile as error:
            problems += error.problems
            continue
        if skill.status != "rejected" and seen.setdefault(skill.name, where) != where:
            problems.append(f"{place(where)}: field 'name': {skill.name!r} is already {called(seen[skill.name])}")
        found.append((where, skill))
    if problems:
        raise BadSkillFile(*problems)
    return found


def write_markdown(directory: str | Path, skills: Sequence[Skill]) -> int:
    """Writes NAME.md for each skill (NAME-ID.md for rejected ones, whose names need not be unique)."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for skill in skills:
        name = f"{skill.name}-{skill.id}" if skill.status == "rejected" else skill.name
        _write(directory / f"{name}.md", markdown(skill))
    return len(skills)


def read_markdown(path: str | Path) -> list[tuple[Path, Skill]]:
    """The skill of a Markdown file, or those of all .md files of a directory (not of those below it), by file name; ids are dropped.

    What `write_markdown` writes comes back, but for the code before and after and for digits that are not printed; for files written by
    hand see dk_jax.skills.markdown.parse.

    Raises:
        BadSkillFile: naming file, line and field for every file that is no skill, is larger than 100 kB or has the name of another one.
    """
    path = Path(path)
    files = sorted(file for file in path.glob("*.md") if file.is_file()) if path.is_dir() else [path]
    if not files:
        raise BadSkillFile(f"{path}: the directory holds no .md files")
    readers = {file: functools.partial(_from_markdown, file) for file in files}
    return _read_all(readers, lambda file: f"{file}:1", lambda file: f"in {file.name}")


def _from_markdown(path: Path) -> Skill:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_MARKDOWN_BYTES + 1)
    except OSError as error:
        raise BadSkillFile(f"{path}: can't be read: {error.strerror or error}") from error
    if len(data) > MAX_MARKDOWN_BYTES:
        raise BadSkillFile(f"{path}:1: field 'content': the file is larger than {MAX_MARKDOWN_BYTES // 1000} kB")
    try:
        return parse(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadSkillFile(f"{path}:{line}: can't be read as UTF-8 text: {error.reason} (byte {data[error.start]:#x})") from error
    except BadPage as error:
        raise BadSkillFile(f"{path}:{error}") from error


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    # Line ends as they are in the text, on any system.
    partial.write_text(text, encoding="utf-8", newline="")
    os.replace(partial, path)


def read_offered(path: Path) -> list[Skill]:
    """Skills of a .jsonl, of a Markdown file or of a directory of these, that may be offered: not those at rest, retired or rejected.

    Raises:
        BadSkillFile: as the readers of these.
    """
    read = read_jsonl if path.suffix == ".jsonl" else read_markdown
    return [skill for _, skill in read(path) if skill.status in ("candidate", "active")]
