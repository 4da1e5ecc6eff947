"""What a skill is: the text that an agent writes, and the record that the library keeps (DESIGN 4.1)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from dk_jax.skills.refusal import refusal

Status = Literal["candidate", "active", "dormant", "retired", "rejected"]
STATUSES: tuple[Status, ...] = ("candidate", "active", "dormant", "retired", "rejected")
SECTIONS = ("Motivation", "Key Idea", "Example")
MAX_NAME_CHARS = 64
MAX_DESCRIPTION_CHARS = 120
MAX_CONTENT_TOKENS = 512

_NAME = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
_SCOPE = re.compile(r"general|task_specific/[a-z0-9]+(?:_[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,31}")
_HEADING = re.compile(
    r"[ \t]*(?:#{1,6}[ \t]*|\*\*)?(Motivation|Key Idea|Example)(?:\*\*)?[ \t]*:?(?:\*\*)?", re.IGNORECASE
)
# Text that a chat template or a tool-call parser would act on; inside a skill it could close somebody's
# message.
CONTROL = re.compile(
    r"<\|[^|<>\n]{1,40}\|>|</?(?:tool_call|think)>|</?(?:function|parameter)(?:=[^<>\n]{1,100})?>|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|[\ud800-\udfff]"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkillDraft:
    """A skill as an agent proposes it.

    Attributes:
        name: snake_case, unique in a library.
        description: one line of at most 120 characters.
        scope: "general" or "task_specific/<type>".
        tags: three to six words.
        content: sections Motivation, Key Idea and Example, at most 512 tokens.
    """

    name: str
    description: str
    scope: str
    tags: tuple[str, ...]
    content: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a skill comes from, and the code before and after the improvement it names."""

    task: str = ""
    step: int = -1
    rollouts: tuple[str, ...] = ()
    code_before: str = ""
    code_after: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """One verification of a skill.

    Attributes:
        step: training step it belongs to.
        tasks: names of the tasks it was tried on.
        device: where, e.g. "cpu" or "cuda:0".
        rule: name of the rule that decided ("sequential" or "paper").
        decision: "accept" or "reject".
        effect: speedup ratio, with the skill over without.
        low, high: 95 % interval of the effect, or None where there is none.
        p: p-value, or None where the rule has none.
        n: pairs of candidates compared.
        reason: the decision in words.
    """

    step: int
    tasks: tuple[str, ...]
    device: str
    rule: str
    decision: Literal["accept", "reject"]
    effect: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    n: int
    reason: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Evidence:
        """From plain data. Raises TypeError naming the field that does not fit."""
        return _from_plain(cls, data, "evidence")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """How often a skill was shown and selected, and what it did then.

    Attributes:
        shown, selected: counts.
        effects: number of measured effects when selected.
        log_effect_sum, log_effect_square_sum: of their logarithms; enough for a mean and a spread.
    """

    shown: int = 0
    selected: int = 0
    effects: int = 0
    log_effect_sum: float = 0.0
    log_effect_square_sum: float = 0.0

    def plus(self, *, shown: int = 0, selected: int = 0, log_effects: tuple[float, ...] = ()) -> Usage:
        """This usage with more counted in."""
        return Usage(
            shown=self.shown + shown,
            selected=self.selected + selected,
            effects=self.effects + len(log_effects),
            log_effect_sum=self.log_effect_sum + sum(log_effects),
            log_effect_square_sum=self.log_effect_square_sum + sum(e * e for e in log_effects),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skill:
    """A skill with everything that the library knows of it. `id` is "" outside a library."""

    name: str
    description: str
    scope: str
    tags: tuple[str, ...]
    content: str
    id: str = ""
    language: str = ""
    status: Status = "candidate"
    provenance: Provenance = Provenance()
    evidence: tuple[Evidence, ...] = ()
    usage: Usage = Usage()
    parents: tuple[str, ...] = ()

    @classmethod
    def from_draft(cls, draft: SkillDraft, **fields: Any) -> Skill:
        """The draft as a skill; `fields` are further attributes."""
        return cls(**_draft_fields(draft), **fields)

    @property
    def draft(self) -> SkillDraft:
        """The text alone."""
        return SkillDraft(**_draft_fields(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that goes to JSON and back through `from_dict`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Skill:
        """Raises TypeError or ValueError naming the field that is missing, unknown or of the wrong type."""
        data = dict(data)
        for field, kind in (("provenance", Provenance), ("usage", Usage)):
            if field in data:
                data[field] = _from_plain(kind, data[field], field)
        data["evidence"] = tuple(
            _from_plain(Evidence, item, f"evidence[{i}]") for i, item in enumerate(data.get("evidence", ()))
        )
        return _from_plain(cls, data, "skill")


def _draft_fields(draft: SkillDraft | Skill) -> dict[str, Any]:
    return {field.name: getattr(draft, field.name) for field in dataclasses.fields(SkillDraft)}


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "str": lambda v: isinstance(v, str),
    "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "float": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "float | None": lambda v: v is None or (isinstance(v, (int, float)) and not isinstance(v, bool)),
    "tuple[str, ...]": lambda v: isinstance(v, (list, tuple)) and all(isinstance(x, str) for x in v),
    "Status": lambda v: v in STATUSES,
    "Literal['accept', 'reject']": lambda v: v in ("accept", "reject"),
}


def _from_plain(kind: type, data: Any, where: str) -> Any:
    """Builds a dataclass from a mapping, naming the field that does not fit."""
    if not isinstance(data, Mapping):
        raise TypeError(f"{where}: expected an object, got {type(data).__name__}")
    known = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(set(data) - set(known)):
        raise TypeError(f"{where}: unknown field {unknown[0]!r}")
    values = {}
    for name, field in known.items():
        if name not in data:
            if field.default is dataclasses.MISSING:
                raise TypeError(f"{where}: field {name!r} is missing")
            continue
        check = _CHECKS.get(str(field.type).replace('"', "'"))
        if check is not None and not check(data[name]):
            raise TypeError(f"{where}: field {name!r} must be {field.type}, got {data[name]!r:.60}")
        values[name] = tuple(data[name]) if isinstance(data[name], list) else data[name]
    return kind(**values)


def sections(content: str) -> dict[str, str]:
    """The sections of a skill's content by name.

    Headings may be written "Key Idea: ...", "## Key Idea" or "**Key Idea**".

    A heading begins a line. Text before the first heading belongs to no section; a section named twice is
    joined.
    """
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in content.splitlines():
        heading = _HEADING.match(line)
        # "Example of a loop" is prose: a heading is marked up, ends in a colon, or stands alone.
        if heading and (re.search(r"[:#*]", heading.group()) or heading.end() == len(line.rstrip())):
            name = next(s for s in SECTIONS if s.lower() == heading.group(1).lower())
            current = found.setdefault(name, [])
            line = line[heading.end() :]
        if current is not None:
            current.append(line)
    return {name: "\n".join(lines).strip() for name, lines in found.items()}


def validate_draft(
    draft: SkillDraft,
    *,
    count_tokens: Callable[[str], int] | None = None,
    max_tokens: int = MAX_CONTENT_TOKENS,
) -> list[str]:
    """What is wrong with a draft, one sentence a problem; empty if it may enter a library.

    Args:
        draft: the proposal.
        count_tokens: counts the tokens of a text (the model's codec). Without one the content's length is not
            checked.
        max_tokens: most tokens of content.
    """
    problems = []
    if len(draft.name) > MAX_NAME_CHARS or not _NAME.fullmatch(draft.name):
        problems.append(f"name {draft.name[:40]!r} is not snake_case of at most {MAX_NAME_CHARS} characters")
    if not draft.description.strip():
        problems.append("description is empty")
    if len(draft.description) > MAX_DESCRIPTION_CHARS:
        length = len(draft.description)
        problems.append(f"description has {length} characters; at most {MAX_DESCRIPTION_CHARS} are allowed")
    if len(draft.description.splitlines()) > 1:
        problems.append("description has more than one line")
    if not _SCOPE.fullmatch(draft.scope):
        problems.append(f"scope {draft.scope[:40]!r} is neither 'general' nor 'task_specific/<type>'")
    if not 3 <= len(draft.tags) <= 6:
        problems.append(f"{len(draft.tags)} tags; three to six are needed")
    if len(set(draft.tags)) != len(draft.tags):
        problems.append("a tag is given twice")
    problems += [f"tag {tag[:40]!r} is not one short word" for tag in draft.tags if not _TAG.fullmatch(tag)]
    parts = sections(draft.content)
    problems += [f"content has no section {name!r}" for name in SECTIONS if not parts.get(name)]
    if CONTROL.search("\n".join([draft.description, draft.content])):
        problems.append("text holds control characters or chat control markers")  # which a codec may refuse to encode
    elif count_tokens is not None and (count := count_tokens(draft.content)) > max_tokens:
        problems.append(f"content has {count} tokens; at most {max_tokens} are allowed")
    reason = refusal(
        draft.description, draft.content, key_idea=parts.get("Key Idea", ""), example=parts.get("Example", "")
    )
    if reason:
        problems.append(f"refused: {reason}")
    return problems
