"""The library as of one moment: skills by id and name, and how each event changes them. No storage here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from dk_jax.skills.record import MAX_NAME_CHARS, STATUSES, Evidence, Skill, SkillDraft, Status
from dk_jax.skills.sameness import same_as

# Where a skill may go from each status. Rejected ones stay in the log, and stay what they are; retired ones can be revived.
_NEXT: dict[Status, tuple[Status, ...]] = {
    "candidate": ("active", "rejected"),
    "active": ("dormant", "retired"),
    "dormant": ("active", "retired"),
    "retired": ("active",),
    "rejected": (),
}


class NameTaken(ValueError):
    """A proposed name belongs to another skill of the library."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """One change: what happened (`kind`), to which skill, and the data of it (plain JSON values)."""

    kind: str
    skill: str
    data: dict[str, Any]


class LibraryView:
    """Skills as of one step; cheap to copy. The library hands these out for past steps.

    Attributes:
        step: the last committed step in it, -1 before any.
        version: a digest of everything committed up to that step, "" before any. Equal histories have equal
          versions.
    """

    def __init__(self, *, step: int = -1, version: str = ""):
        self.step = step
        self.version = version
        self._skills: dict[str, Skill] = {}
        self._by_name: dict[str, str] = {}

    def copy(self) -> LibraryView:
        """A view that changes on its own; the skills themselves are immutable and shared."""
        other = LibraryView(step=self.step, version=self.version)
        other._skills = dict(self._skills)
        other._by_name = dict(self._by_name)
        return other

    def skills(self, *statuses: Status) -> list[Skill]:
        """Skills in the order of their proposal, of the given statuses or all."""
        return [skill for skill in self._skills.values() if not statuses or skill.status in statuses]

    def active(self) -> list[Skill]:
        """Skills that retrieval may offer."""
        return self.skills("active")

    def by_id(self, skill_id: str) -> Skill:
        """Raises KeyError for an id that is not in this view."""
        if skill_id not in self._skills:
            raise KeyError(f"no skill with id {skill_id!r} at step {self.step}")
        return self._skills[skill_id]

    def get(self, name: str) -> Skill:
        """The skill that holds a name; rejected ones do not. Raises KeyError if none does."""
        if name not in self._by_name:
            raise KeyError(f"no skill named {name!r} at step {self.step}")
        return self._skills[self._by_name[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __len__(self) -> int:
        return len(self._skills)

    def counts(self) -> dict[str, int]:
        """Skills by status, and `proposed` and `verified`.

        Proposed are all of them; verified those that a verification accepted at least once.
        """
        found = {status: 0 for status in STATUSES}
        verified = 0
        for skill in self._skills.values():
            found[skill.status] += 1
            verified += any(evidence.decision == "accept" for evidence in skill.evidence)
        return {"proposed": len(self._skills), "verified": verified, **found}

    def free_name(self, name: str) -> str:
        """`name` itself, or with the first free number behind it: tile_rows, tile_rows_2, tile_rows_3, ..."""
        number, free = 1, name
        while free in self._by_name:
            number += 1
            ending = f"_{number}"
            free = name[: MAX_NAME_CHARS - len(ending)].rstrip("_") + ending
        return free

    def duplicate_of(self, draft: SkillDraft) -> Skill | None:
        """The first candidate, active or dormant skill that says the same (dk_jax.skills.sameness), or None."""
        return same_as(draft, self.skills("candidate", "active", "dormant"))

    def next_id(self) -> str:
        """The id of the next proposal. It depends on the view alone, so a replayed step gives equal ids."""
        return f"s{len(self._skills) + 1:05d}"

    def apply(self, event: Event) -> None:
        """Changes the view by one event.

        Raises:
            KeyError: the event is about a skill that is not here.
            ValueError: a name that is taken, or a status that can't follow.
        """
        if event.kind == "proposed":
            self._add(Skill.from_dict({**event.data, "id": event.skill}))
            return
        skill = self.by_id(event.skill)
        if event.kind == "evidence":
            skill = dataclasses.replace(skill, evidence=(*skill.evidence, Evidence.from_dict(event.data)))
        elif event.kind == "usage":
            usage = skill.usage.plus(**{**event.data, "log_effects": tuple(event.data["log_effects"])})
            skill = dataclasses.replace(skill, usage=usage)
        elif event.kind == "status":
            status = event.data["status"]
            if status not in _NEXT[skill.status]:
                raise ValueError(
                    f"skill {skill.name!r} ({skill.id}) is {skill.status} and can't become {status!r}; "
                    f"allowed: {', '.join(_NEXT[skill.status]) or 'nothing'}"
                )
            skill = dataclasses.replace(skill, status=status)
        elif event.kind == "absorbed":
            usage, other = skill.usage, self.by_id(event.data["of"])
            usage = dataclasses.replace(usage, **{f.name: getattr(usage, f.name) + getattr(other.usage, f.name) for f in dataclasses.fields(usage)})
            skill = dataclasses.replace(skill, usage=usage, parents=(*skill.parents, other.id))
        else:
            raise ValueError(f"unknown event {event.kind!r}: this library was written by a newer version")
        self._skills[skill.id] = skill
        if skill.status == "rejected" and self._by_name.get(skill.name) == skill.id:
            del self._by_name[skill.name]

    def _add(self, skill: Skill) -> None:
        if skill.id in self._skills:
            raise ValueError(f"skill id {skill.id!r} is there already")
        if skill.status != "rejected":
            if skill.name in self._by_name:
                raise NameTaken(
                    f"the name {skill.name!r} belongs to skill {self._by_name[skill.name]}; "
                    f"{self.free_name(skill.name)!r} is free"
                )
            self._by_name[skill.name] = skill.id
        self._skills[skill.id] = skill

    def load(self, skills: Iterable[Skill]) -> None:
        """Fills an empty view with skills that have ids."""
        for skill in skills:
            self._add(skill)
