"""How alike two skills' code is, whatever its names, numbers and comments: one idea in other words shows the same code.

Prose does not tell: of the cold start's skills, phrasings of one subject share as few telling words as skills on different ones. Examples
do. They are taken as sequences of tokens, identifiers numbered in the order of their first appearance, numbers as one token, strings as
another; the likeness is the share of common runs of four tokens (Jaccard's index of their sets; compare Schleimer et al. 2003, winnowing).
"""

from __future__ import annotations

import re
from collections import Counter

from dk_jax.skills.record import Skill, SkillDraft, sections

RUN = 4
LEAST_RUNS = 8
"""Shorter examples are no sign of anything."""
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|#(?!\s*(?:include|pragma|define|if|endif|else|undef))[^\n]*|```\w*", re.DOTALL)
_TOKEN = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|[A-Za-z_]\w*|\d[\w.]*|[^\s\w]")
_KEPT = frozenset(
    "if else for while return break continue def class lambda in not and or import from as with int float double half bool void char auto const "
    "static inline extern unsigned long short struct template typename sizeof true false True False None tl triton torch jit constexpr load store "
    "dot program_id arange zeros full maximum minimum where sum max min exp log sqrt rsqrt abs mask other num_warps num_stages __global__ "
    "__device__ __shared__ __restrict__ __syncthreads threadIdx blockIdx blockDim gridDim __shfl_down_sync __ldg float2 float4 __half half2 "
    "pragma omp simd parallel unroll include define range size_t".split()
)
"""Names that belong to the language or the library, not to who writes."""


def runs(skill: Skill | SkillDraft) -> frozenset[tuple[str, ...]]:
    """The runs of tokens in a skill's example; empty where it is too short to say anything."""
    code = _COMMENT.sub(" ", sections(skill.content).get("Example", ""))
    names: dict[str, str] = {}
    tokens = [_plain(token, names) for token in _TOKEN.findall(code)]
    found = frozenset(zip(*(tokens[i:] for i in range(RUN)), strict=False))
    return found if len(found) >= LEAST_RUNS else frozenset()


def _plain(token: str, names: dict[str, str]) -> str:
    if token[0] in "\"'":
        return "text"
    if token[0].isdigit():
        return "number"
    if (token[0].isalpha() or token[0] == "_") and token not in _KEPT:
        return names.setdefault(token, f"name{len(names)}")
    return token


class Alike:
    """Which of the skills seen so far are alike, each looked at once: what is new is held against those that share runs with it.

    Args:
      least: likeness from which two are.
    """

    def __init__(self, least: float):
        self._least = least
        self._forget()

    def _forget(self) -> None:
        self._contents: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._near: dict[str, dict[str, float]] = {}
        self._holders: dict[tuple[str, tuple[str, ...]], list[str]] = {}

    def to(self, skill: Skill) -> dict[str, float]:
        """Ids of the skills seen before this one that are like it, in its own language, and how much."""
        if self._contents.get(skill.id, skill.content) != skill.content:  # steps were undone, and done again otherwise
            self._forget()
        if skill.id not in self._near:
            self._contents[skill.id] = skill.content
            self._near[skill.id] = self._seen(skill)
        return self._near[skill.id]

    def _seen(self, skill: Skill) -> dict[str, float]:
        own = runs(skill)
        common: Counter[str] = Counter()
        for run in own:
            holders = self._holders.setdefault((skill.language, run), [])
            common.update(holders)
            holders.append(skill.id)
        self._sizes[skill.id] = len(own)
        near = {other: count / (len(own) + self._sizes[other] - count) for other, count in common.items()}
        return {other: degree for other, degree in near.items() if degree >= self._least}


def likeness(one: frozenset, other: frozenset) -> float:
    """Of two skills' `runs`: 0 to 1, and 0 where one of them says nothing."""
    return len(one & other) / len(one | other) if one and other else 0.0
