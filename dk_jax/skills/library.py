"""The skill library: an append-only log of events in SQLite, and the skills as they stand, in one file.

    propose, record_evidence, activate, reject, use   stage changes in memory; only `staged` shows them
    commit(step)                                      writes them in one transaction
    rollback_to(step)                                 undoes later steps by one more event; nothing is erased

A step's skills belong to that step's checkpoint (DESIGN 3.3): commit the library, then save the checkpoint,
and on resume roll the library back to the checkpoint's step. A kill at any instant leaves a step whole or
absent, and replaying it from the journal gives equal ids and an equal `version`.

One process writes at a time, from one thread; others may read. Not here: retrieval and verification.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dk_jax.skills import exchange
from dk_jax.skills.record import Evidence, Provenance, Skill, SkillDraft, Status, validate_draft
from dk_jax.skills.schema import LibraryError, connect
from dk_jax.skills.view import Event, LibraryView, NameTaken


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggedEvent:
    """An event as it is in the log: its place, step and time, and whether a later rollback undid it."""

    seq: int
    step: int
    event: Event
    time_s: float
    undone: bool


class SkillLibrary:
    """A library in the SQLite file `path`, made if it is not there. Use as a context manager, or `close` it.

    Reading (`active`, `get`, `counts`, `step`, `version`, ...) sees committed steps only; `staged` sees the
    open step too. While another process writes, reading and writing wait for up to `timeout_s`.

    Raises:
        LibraryError: the file is no library, or of a newer version, or can't be opened.
    """

    def __init__(self, path: str | Path, *, timeout_s: float = 30.0):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._guarded("open it"):
            self._db = connect(self.path, timeout_s)
        self._refresh()

    def _refresh(self) -> None:
        """Reads the committed state and drops what is staged."""
        with self._guarded("read it"), self._transaction(write=False):
            step, version = self._db.execute("SELECT step, version FROM state").fetchone()
            rows = self._db.execute("SELECT record FROM skills ORDER BY length(id), id").fetchall()
            self._last_seq = self._newest_seq()
        self._committed = LibraryView(step=step, version=version)
        self._committed.load(Skill.from_dict(json.loads(record)) for (record,) in rows)
        self.discard()

    @property
    def step(self) -> int:
        """The last committed step, -1 before any."""
        return self._committed.step

    @property
    def version(self) -> str:
        """Digest of all that is committed; equal histories have equal versions."""
        return self._committed.version

    @property
    def staged(self) -> LibraryView:
        """The library as it will be after `commit`. Do not change it."""
        return self._staged

    @property
    def staged_events(self) -> tuple[Event, ...]:
        """What `commit` will write, in order."""
        return tuple(self._events)

    @property
    def current(self) -> LibraryView:
        """The library as committed. Do not change it."""
        return self._committed

    def skills(self, *statuses: Status) -> list[Skill]:
        """Committed skills in the order of their proposal, of the given statuses or all."""
        return self._committed.skills(*statuses)

    def active(self) -> list[Skill]:
        """Committed skills that retrieval may offer."""
        return self._committed.active()

    def get(self, name: str) -> Skill:
        """The committed skill of that name. Raises KeyError."""
        return self._committed.get(name)

    def counts(self) -> dict[str, int]:
        """Committed skills by status, and `proposed` and `verified`; see `LibraryView.counts`."""
        return self._committed.counts()

    def at_step(self, step: int) -> LibraryView:
        """The library as it was after `step` was committed, rebuilt from the log.

        Raises:
            ValueError: that step is not committed.
        """
        if step > self.step:
            raise ValueError(f"{self.path}: step {step} is not committed; the last one is {self.step}")
        view = LibraryView()
        for logged in self.history():
            if logged.undone or logged.step > step:
                continue
            if logged.event.kind == "commit":
                view.step, view.version = logged.step, logged.event.data["version"]
            elif logged.event.kind != "rollback":
                view.apply(logged.event)
        return view

    def history(self, skill_id: str | None = None, *, after: int = 0) -> list[LoggedEvent]:
        """All events ever committed, oldest first, or those of one skill, or those beyond a place in the log.

        Undone ones are marked, never missing; beyond a place, those that are undone by what follows it.
        """
        with self._guarded("read it"):
            found = self._db.execute("SELECT seq, step, kind, skill, data, time_s FROM events WHERE seq > ? ORDER BY seq", (after,))
            rows = found.fetchall()
        undone: set[int] = set()
        standing: list[tuple[int, int]] = []
        for seq, step, kind, *_ in rows:
            if kind == "rollback":
                undone.update(s for s, at in standing if at > step)
                standing = [(s, at) for s, at in standing if at <= step]
            else:
                standing.append((seq, step))
        return [
            LoggedEvent(
                seq=seq,
                step=step,
                event=Event(kind=kind, skill=skill, data=json.loads(data)),
                time_s=time_s,
                undone=seq in undone,
            )
            for seq, step, kind, skill, data, time_s in rows
            if skill_id is None or skill == skill_id
        ]

    def propose(
        self,
        draft: SkillDraft,
        provenance: Provenance | None = None,
        *,
        language: str = "",
        parents: Sequence[str] = (),
        count_tokens: Callable[[str], int] | None = None,
    ) -> str:
        """Stages a new skill as a candidate and returns its id.

        Args:
            draft: the text; its name must be free (`staged.free_name` gives one).
            provenance: where it comes from.
            language: of its kernels, e.g. "cpp".
            parents: ids of skills it was merged from.
            count_tokens: counts the content's tokens, see `validate_draft`.

        Raises:
            ValueError: the draft may not enter a library; the message says why.
            NameTaken: another skill has that name.
        """
        if problems := validate_draft(draft, count_tokens=count_tokens):
            raise ValueError(f"skill {draft.name[:60]!r} may not enter the library: {'; '.join(problems)}")
        skill = Skill.from_draft(
            draft, provenance=provenance or Provenance(), language=language, parents=tuple(parents)
        )
        return self.add(skill)

    def add(self, skill: Skill) -> str:
        """Stages a whole record, status, evidence and usage included, under a new id. Raises NameTaken."""
        skill_id = self._staged.next_id()
        data = skill.to_dict()
        del data["id"]
        return self._stage("proposed", skill_id, data)

    def record_evidence(self, skill_id: str, evidence: Evidence) -> None:
        """Stages the outcome of a verification; rejections keep theirs too."""
        self._stage("evidence", skill_id, dataclasses.asdict(evidence))

    def use(
        self, skill_id: str, *, shown: int = 0, selected: int = 0, log_effects: Sequence[float] = ()
    ) -> None:
        """Stages usage: how often a skill was shown and selected, and measured log-effects when it was."""
        data = {"shown": shown, "selected": selected, "log_effects": [float(e) for e in log_effects]}
        self._stage("usage", skill_id, data)

    def set_status(self, skill_id: str, status: Status, reason: str = "") -> None:
        """Stages a change of status. Raises ValueError if it can't follow the present one."""
        self._stage("status", skill_id, {"status": status, "reason": reason})

    def absorb(self, skill_id: str, other_id: str, reason: str = "") -> None:
        """Stages that a skill stands for another one too, which is retired: it takes over its uses, and names it as a parent."""
        self._stage("absorbed", skill_id, {"of": other_id})
        self.set_status(other_id, "retired", reason)

    def activate(self, skill_id: str, reason: str = "") -> None:
        """Stages a skill's entry into retrieval."""
        self.set_status(skill_id, "active", reason)

    def reject(self, skill_id: str, reason: str = "") -> None:
        """Stages the refusal of a candidate. Its name becomes free; record and evidence stay."""
        self.set_status(skill_id, "rejected", reason)

    def _stage(self, kind: str, skill_id: str, data: dict[str, Any]) -> str:
        # Through JSON and back, so that what is seen now is what will be read later.
        event = Event(kind=kind, skill=skill_id, data=json.loads(json.dumps(data, allow_nan=False)))
        self._staged.apply(event)
        self._events.append(event)
        return skill_id

    def discard(self) -> None:
        """Forgets what is staged."""
        self._staged = self._committed.copy()
        self._events: list[Event] = []

    def commit(self, step: int) -> str:
        """Makes what is staged, if only nothing, the library as of `step`: all of it or none.

        Returns the new version.

        Raises:
            ValueError: `step` is not later than the last one (roll back first to repeat a step).
            LibraryError: another process committed meanwhile, or the file can't be written; what is staged is
              kept.
        """
        if step <= self.step:
            raise ValueError(
                f"{self.path}: step {step} can't follow step {self.step}, which is committed; "
                f"rollback_to({step - 1}) first if it is to be done again"
            )
        version = _chained(self.version, step, self._events)
        touched = dict.fromkeys(event.skill for event in self._events)
        with self._writing(f"commit step {step}"):
            self._append(step, self._events + [Event(kind="commit", skill="", data={"version": version})])
            self._put(self._staged.by_id(skill_id) for skill_id in touched)
            self._db.execute("UPDATE state SET step = ?, version = ?", (step, version))
        self._staged.step, self._staged.version = step, version
        self._committed = self._staged
        self.discard()
        return version

    def rollback_to(self, step: int) -> int:
        """Undoes every step later than `step`, and drops what is staged; returns how many steps were undone.

        The undone events stay in the log. Without later steps nothing is written.
        """
        undone = {
            logged.step
            for logged in self.history()
            if not logged.undone and logged.step > step and logged.event.kind != "rollback"
        }
        if not undone:
            self.discard()
            return 0
        view = self.at_step(step)
        with self._writing(f"roll back to step {step}"):
            self._append(
                step, [Event(kind="rollback", skill="", data={"from": self.step, "version": self.version})]
            )
            self._db.execute("DELETE FROM skills")
            self._put(view.skills())
            self._db.execute("UPDATE state SET step = ?, version = ?", (view.step, view.version))
        self._committed = view
        self.discard()
        return len(undone)

    def _append(self, step: int, events: Sequence[Event]) -> None:
        now = time.time()
        self._db.executemany(
            "INSERT INTO events (step, kind, skill, data, time_s) VALUES (?, ?, ?, ?, ?)",
            [(step, event.kind, event.skill, json.dumps(event.data), now) for event in events],
        )

    def _put(self, skills) -> None:
        self._db.executemany(
            "INSERT OR REPLACE INTO skills VALUES (?, ?, ?, ?)",
            [(skill.id, skill.name, skill.status, json.dumps(skill.to_dict())) for skill in skills],
        )

    def _newest_seq(self) -> int:
        return self._db.execute("SELECT COALESCE(MAX(seq), 0) FROM events").fetchone()[0]

    def export_jsonl(self, path: str | Path, *statuses: Status) -> int:
        """Writes committed skills, of the given statuses or all, as JSONL; returns how many."""
        return exchange.write_jsonl(path, self.skills(*statuses))

    def export_markdown(self, directory: str | Path, *statuses: Status) -> int:
        """Writes one Markdown file a committed skill; returns how many."""
        return exchange.write_markdown(directory, self.skills(*statuses))

    def import_jsonl(self, path: str | Path, *, status: Status | None = None) -> list[str]:
        """Stages the skills of a JSONL file and returns their new ids; all of them or, on any error, none.

        Args:
            path: daVinci's fields, with or without ours.
            status: given to all of them; by default each keeps its own, "candidate" where the file has none.

        Raises:
            exchange.BadSkillFile: lines that are no skill, or names that are taken; names file, line and
            field.
        """
        return self.import_skills([(f"{path}:{line}", s) for line, s in exchange.read_jsonl(path)], status=status)

    def import_markdown(self, directory: str | Path, *, status: Status | None = None) -> list[str]:
        """Stages the skill of each Markdown file of a directory, or of one file; else as `import_jsonl`."""
        return self.import_skills([(f"{path}:1", s) for path, s in exchange.read_markdown(directory)], status=status)

    def import_skills(self, found: Sequence[tuple[str, Skill]], *, status: Status | None = None) -> list[str]:
        """Stages skills, each given with where it was read; else as `import_jsonl`."""
        before, events = self._staged.copy(), list(self._events)
        ids, problems = [], []
        try:
            for where, skill in found:
                try:
                    ids.append(self.add(dataclasses.replace(skill, status=status) if status else skill))
                except ValueError as error:
                    field = "field 'name': " if isinstance(error, NameTaken) else ""
                    problems.append(f"{where}: {field}{error}")
            if problems:
                raise exchange.BadSkillFile(*problems)
        except BaseException:
            self._staged, self._events = before, events
            raise
        return ids

    @contextmanager
    def _guarded(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            hint = "check that it is a skill library, that no other run uses it and that the disk has room"
            raise LibraryError(
                f"{self.path}: could not {doing}: {error}. Nothing was changed; {hint}, then try again."
            ) from error

    @contextmanager
    def _transaction(self, *, write: bool = True) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _writing(self, doing: str) -> Iterator[None]:
        with self._guarded(doing), self._transaction():
            if self._newest_seq() != self._last_seq:
                raise LibraryError(
                    f"{self.path}: could not {doing}: another process has written to it since. "
                    "Give each run a library of its own."
                )
            yield
            newest = self._newest_seq()
        self._last_seq = newest

    def close(self) -> None:
        """Closes the file; what is staged is lost."""
        self._db.close()

    def __enter__(self) -> SkillLibrary:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _chained(version: str, step: int, events: Sequence[Event]) -> str:
    content = json.dumps([version, step, [dataclasses.astuple(event) for event in events]], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
