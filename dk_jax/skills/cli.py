"""The command line for skill libraries (scripts/skills.py): list, show, search, diff, export, import, prune, revive.

Reading leaves a library as it is, and may go on beside a run that writes to it. `import`, `prune` and `revive` commit a step of their own, the one
after the library's last, and only while no run uses the library, which would stop at its next commit.
"""

from __future__ import annotations

import argparse
import difflib
import fcntl
import math
import os
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from dk_jax.skills import exchange
from dk_jax.skills.library import LibraryError, SkillLibrary
from dk_jax.skills.lifecycle import Lifecycle, LifecycleRules
from dk_jax.skills.printed import (
    by_id,
    by_name,
    count,
    differences,
    history_lines,
    in_use,
    posterior_line,
    printable,
    summary,
    table,
    verification,
    verified,
)
from dk_jax.skills.record import STATUSES, Skill, Status
from dk_jax.skills.retrieval import SkillIndex, words
from dk_jax.skills.rules import RULES, rules_of
from dk_jax.skills.view import LibraryView

FILE = "library.sqlite"
"""A library's name in its run's directory."""
TIMEOUT_S = 2.0
"""How long another process's write is waited for."""
SORTS: dict[str, Callable[[Skill, int], tuple]] = {
    "step": lambda skill, step: (step,),
    "name": lambda skill, step: (skill.name,),
    "used": lambda skill, step: (-skill.usage.selected, -skill.usage.shown),
    "effect": lambda skill, step: (-(e.effect if (e := verification(skill)) else -math.inf),),
}


class CliError(Exception):
    """What was asked for can't be done; the message says what, where and what to do."""


def main(argv: Sequence[str]) -> int:
    """Runs a command; returns the exit status: 0, or 2 after an error, which is one line on stderr."""
    try:
        args = _parser().parse_args(argv)
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (CliError, LibraryError, exchange.BadSkillFile, OSError) as error:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"error: {' '.join(printable(said).split())}", file=sys.stderr)
        return 2
    return 0


def library_file(name: str, *, new: bool = False) -> Path:
    """The file of a library that is named by it or by its run's directory; with `new` it need not be there.

    Raises:
        CliError: there is none, or it is no library, or damaged.
    """
    path = Path(name)
    file = path / FILE if path.is_dir() or (new and not path.exists() and not path.suffix) else path
    if new and not file.exists():
        return file
    if not file.is_file():
        raise CliError(f"{name}: no such library: there is no file {file}; name a library's file, or a run's directory with {FILE} in it")
    # Opening it as a library would make tables in any database.
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=TIMEOUT_S)) as db:
            tables = {table for (table,) in db.execute("SELECT name FROM sqlite_master")}
    except sqlite3.OperationalError as error:
        raise CliError(f"{file}: can't be opened: {error}; if another process is using it at the moment, try again when it is done") from error
    except sqlite3.DatabaseError as error:
        raise CliError(f"{file}: damaged, or no skill library: {error}; put it back from a copy") from error
    if not {"events", "skills", "state"} <= tables:
        raise CliError(f"{file}: not a skill library: it lacks the tables of one; name a library's file, or a run's directory")
    return file


@contextmanager
def opened(file: Path, *, writing: bool = False) -> Iterator[SkillLibrary]:
    """The library, closed afterwards; with `writing` runs are kept out meanwhile.

    Raises:
        CliError: it is damaged, or a run uses it and `writing` is set.
        LibraryError: another process has it locked.
    """
    with ExitStack() as stack:
        if writing:
            stack.enter_context(_alone(file))
        with _reading(file):
            library = stack.enter_context(SkillLibrary(file, timeout_s=TIMEOUT_S))
        yield library


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Keeps runs away from the directory that the file lies in, as a run does itself (dk_jax.train.run)."""
    lock = file.parent / ".lock"
    if not lock.exists():
        yield
        return
    with open(lock) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CliError(f"{file}: a run is using it at the moment; wait for its end, or change a copy of the file") from error
        yield


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """For what is read from the file: no record in it that is not as we write them goes on as another error."""
    try:
        yield
    except (ValueError, TypeError, KeyError) as error:
        raise CliError(f"{file}: damaged: what it holds does not fit together ({error}); put it back from a copy") from error


def view_at(library: SkillLibrary, step: int | None) -> LibraryView:
    """The library as of a step, or as committed last for None. Raises CliError for a step that is not committed."""
    if step is None:
        return library.current
    with _reading(library.path):
        commits = [logged for logged in library.history() if logged.event.kind == "commit"]
        standing = [logged.step for logged in commits if not logged.undone]
        if standing and standing[0] <= step <= standing[-1]:
            return library.at_step(step)
    undone = step in [logged.step for logged in commits if logged.undone]
    there = f"there are {standing[0]} to {standing[-1]}" if standing else "there is none"
    raise CliError(f"{library.path}: step {step} {'was rolled back' if undone else 'is not committed'}; {there}")


def find(view: LibraryView, name: str, path: Path) -> Skill:
    """The skill of that name or id; of rejected ones, whose names need not be unique, the last. Raises CliError with names that are close."""
    if name in view:
        return view.get(name)
    called = [skill for skill in view.skills() if name in (skill.name, skill.id)]
    if called:
        return called[-1]
    close = difflib.get_close_matches(name, sorted({skill.name for skill in view.skills()}), n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "`list` shows all that there are"
    raise CliError(f"{path}: no skill named {name!r} at step {view.step}; {hint}")


def _list(args: argparse.Namespace) -> None:
    with opened(library_file(args.library)) as library:
        view = view_at(library, args.step)
        with _reading(library.path):
            proposed = [logged for logged in library.history() if logged.event.kind == "proposed" and not logged.undone]
    step = {skill.id: skill.provenance.step for skill in view.skills()} | {logged.event.skill: logged.step for logged in proposed}
    rows = [("name", "status", "scope", "shown", "sel", "verified", "when selected", "step")]
    for s in sorted(view.skills(*args.status), key=lambda skill: SORTS[args.sort](skill, step[skill.id])):
        scope = s.scope.removeprefix("task_specific/")
        rows.append((s.name, s.status, scope, s.usage.shown, s.usage.selected, verified(s), in_use(s.usage), step[s.id]))
    _print(summary(library.path, view))
    _print(table(rows, right=(3, 4, 7), width=_width(), spare=2) if len(rows) > 1 else "no skills")


def _show(args: argparse.Namespace) -> None:
    with opened(library_file(args.library)) as library:
        view = view_at(library, args.step)
        skill = find(view, args.name, library.path)
        rules, _ = _rules(library.path, {})
        known = Lifecycle(rules).posteriors(library, library.step).get(skill.name) if args.step is None else None
        with _reading(library.path):
            history = history_lines([logged for logged in library.history(skill.id) if logged.step <= view.step])
    _print(exchange.markdown(skill))
    if known is not None:
        _print("\n".join(["## Effect by all that is known", "", posterior_line(known, rules), ""]))
    before, after = skill.provenance.code_before, skill.provenance.code_after
    if before or after:
        code = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="")
        _print("\n".join(["## Code before and after", "", *code, ""]))
    _print("\n".join(["## History", "", *history]))
    if others := [other.id for other in view.skills() if other.name == skill.name and other.id != skill.id]:
        _print(f"\nalso of this name: {', '.join(others)} (show them by id)")


def _search(args: argparse.Namespace) -> None:
    query = " ".join(args.words)
    with opened(library_file(args.library)) as library:
        active = library.active()
        _print(summary(library.path, library.current))
    index = SkillIndex(active)
    scores = dict(zip((skill.id for skill in active), index.scores(query), strict=True))
    rows = [(rank, f"{scores[s.id]:.3f}", s.name, s.description) for rank, s in enumerate(index.top(query, args.k), 1)]
    _print(table([("", "score", "name", "description"), *rows], right=(0, 1), width=_width(), cut=3) if rows else "no active skills")
    if rows and not any(scores.values()):
        _print(f"no active skill holds any of: {', '.join(dict.fromkeys(words(query))) or query}")


def _diff(args: argparse.Namespace) -> None:
    first, last = args.first, args.last
    if last is None and (Path(first).exists() or not first.isdecimal()):
        with opened(library_file(args.library)) as one, opened(library_file(first)) as other:
            before, after = by_name(one.current), by_name(other.current)
            said = f"{one.path}, step {one.step} -> {other.path}, step {other.step}"
    elif first.isdecimal():
        with opened(library_file(args.library)) as library:
            old, new = view_at(library, int(first)), view_at(library, last)
        before, after = by_id(old), by_id(new)
        said = f"{library.path}: step {old.step} -> {new.step}"
    else:
        raise CliError(f"diff: {first!r} and {last} are not two steps of the library; name two steps, or one other library")
    found = differences(before, after)
    kinds = Counter(kind for kind, *_ in found)
    _print(f"{said}: {', '.join(f'{number} {kind}' for kind, number in kinds.items()) or 'no difference'}")
    if found:
        _print(table([(kind, skill.name, detail) for kind, skill, detail in found], width=_width(), cut=1))


def _export(args: argparse.Namespace) -> None:
    to = Path(args.destination)
    form = args.format or ("jsonl" if to.suffix == ".jsonl" else "markdown")
    with opened(library_file(args.library)) as library:
        if form == "jsonl" and to.is_dir():
            raise CliError(f"{to}: is a directory; name a file for JSONL, or use --format=markdown")
        if form == "markdown" and to.exists() and not to.is_dir():
            raise CliError(f"{to}: is a file; name a directory for Markdown, or use --format=jsonl")
        if to.exists() and to.samefile(library.path):
            raise CliError(f"{to}: is the library itself; name another destination")
        number = (library.export_jsonl if form == "jsonl" else library.export_markdown)(to, *args.status)
    _print(f"{count(number, 'skill')} written to {to} ({form})")


def _import(args: argparse.Namespace) -> None:
    source = Path(args.source)
    try:
        if source.is_dir() or source.suffix == ".md":
            found = [(f"{path}:1", skill) for path, skill in exchange.read_markdown(source)]
        else:
            found = [(f"{source}:{line}", skill) for line, skill in exchange.read_jsonl(source)]
        if not found:
            raise exchange.BadSkillFile(f"{source}: there are no skills in it")
        file = library_file(args.library, new=args.new)
        with ExitStack() as stack:
            if args.dry_run and not file.exists():
                file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / FILE
            library = stack.enter_context(opened(file, writing=not args.dry_run))
            ids = library.import_skills(found, status=args.status)
            step = library.step + 1
            come = [library.staged.by_id(skill_id) for skill_id in ids]
            if not args.dry_run:
                library.commit(step)
    except exchange.BadSkillFile as error:
        if len(error.problems) == 1:
            raise CliError(f"{error}; nothing was imported") from error
        for problem in error.problems:
            _print(f"refused  {problem}")
        raise CliError(f"{source}: nothing was imported, {len(error.problems)} refused; the first is {error.problems[0]}") from error
    _print(table([(s.id, s.name, s.status, f"from {where}") for s, (where, _) in zip(come, found, strict=True)], width=None))
    _print(f"{count(len(come), 'skill')} {'would be imported' if args.dry_run else 'imported'} at step {step}")
    _tell_of_runs(file, step)


def _rules(file: Path, given: dict[str, float]) -> tuple[LifecycleRules, str]:
    try:
        return rules_of(file.with_name("config.json") if file.name == FILE else None, given)
    except ValueError as error:
        raise CliError(str(error)) from error


def _prune(args: argparse.Namespace) -> None:
    file = library_file(args.library)
    given = {name: value for name in RULES if (value := getattr(args, name)) is not None}
    rules, where = _rules(file, given)
    with opened(file, writing=not args.dry_run) as library:
        step = library.step + 1
        with _reading(file):
            changes = Lifecycle(rules).review(library, step)
        if changes and not args.dry_run:
            library.commit(step)
    if changes:
        _print(table([(change.status, change.name, change.reason) for change in changes], width=None))
    done = "would be made" if args.dry_run else "made"
    _print(f"{count(len(changes), 'change')} {done}{f' at step {step}' if changes else ''}, by {where}; nothing is erased")
    if changes:
        _tell_of_runs(file, step)


def _revive(args: argparse.Namespace) -> None:
    file = library_file(args.library)
    with opened(file, writing=True) as library:
        skill = find(library.current, args.name, file)
        if skill.status not in ("dormant", "retired"):
            raise CliError(f"{file}: skill {skill.name!r} is {skill.status}; what is dormant or retired can be revived")
        step = library.step + 1
        library.activate(skill.id, args.reason)
        library.commit(step)
    _print(f"{skill.name} was {skill.status} and is active from step {step} on")
    _tell_of_runs(file, step)


def _tell_of_runs(file: Path, step: int) -> None:
    if file.name == FILE and step > 0:
        _print("note: a run that goes on in this directory first undoes the library's steps after its checkpoint (a new run: after step 0)")


def _print(text: str) -> None:
    print(printable(text))


def _width() -> int | None:
    """Columns of the terminal; None where the output goes elsewhere, and is not cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise CliError(f"{message}; see `{self.prog} --help`")


def statuses(text: str) -> tuple[Status, ...]:
    """Of "active,dormant"."""
    found = tuple(text.split(","))
    if unknown := [status for status in found if status not in STATUSES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no status; there are {', '.join(STATUSES)}")
    return found


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="skills.py", description="Looks into skill libraries, and moves skills between them and files.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], does: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=does, description=does[0].upper() + does[1:] + ".")
        found.add_argument("library", metavar="LIBRARY", help=f"a library's file, or a run's directory with {FILE}")
        found.set_defaults(run=run)
        return found

    c = command("list", _list, "one line a skill; a narrow terminal leaves out the scope, and then the ends of names")
    c.add_argument("--status", type=statuses, default=(), metavar="STATUS,...", help=f"of {', '.join(STATUSES)} (default: all)")
    c.add_argument("--step", type=_natural, help="as of this step (default: the last)")
    c.add_argument("--sort", choices=SORTS, default="step", help="step: as proposed; used: most selected first; effect: as verified")
    c = command("show", _show, "a skill's whole record, the code before and after it, and its history")
    c.add_argument("name", metavar="NAME", help="name or id")
    c.add_argument("--step", type=_natural, help="as of this step (default: the last)")
    c = command("search", _search, "active skills by their score for words (BM25), as retrieval ranks them")
    c.add_argument("words", metavar="WORD", nargs="+")
    c.add_argument("-k", type=_natural, default=20, help="at most so many (default: 20)")
    c = command("diff", _diff, "what became of the skills between two steps, or is different in another library")
    c.add_argument("first", metavar="STEP|LIBRARY", help="an earlier step, or another library")
    c.add_argument("last", metavar="STEP", nargs="?", type=_natural, help="a later step (default: the last)")
    c = command("export", _export, "write skills to files; those of the same names are replaced")
    c.add_argument("destination", metavar="DESTINATION", help="a file for JSONL, a directory for Markdown")
    c.add_argument("--format", choices=("jsonl", "markdown"), help="default: jsonl if the destination ends in .jsonl")
    c.add_argument("--status", type=statuses, default=(), metavar="STATUS,...", help="default: all")
    c = command("import", _import, "add skills from files, in a step of their own; all of them or none")
    c.add_argument("source", metavar="SOURCE", help="a JSONL file, a Markdown file, or a directory of Markdown files")
    c.add_argument("--status", choices=STATUSES, help="given to all (default: each keeps its own, candidate where it has none)")
    c.add_argument("--new", action="store_true", help="make the library if there is none")
    c.add_argument("--dry_run", action="store_true", help="only say what would be done")
    c = command("prune", _prune, "change what the lifecycle's rules would change after a step (rest, retire, merge); nothing is erased")
    for name, says in RULES.items():
        default = getattr(LifecycleRules(), name)
        c.add_argument(f"--{name}", type=type(default), metavar="X", help=f"{says} (default: as the run's config says, or {default:g})")
    c.add_argument("--dry_run", action="store_true", help="only say what would be done")
    c = command("revive", _revive, "set a dormant or retired skill to active")
    c.add_argument("name", metavar="NAME", help="name or id")
    c.add_argument("--reason", default="revived by hand", help="kept in the log")
    return parser
