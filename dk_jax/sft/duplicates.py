"""Kernels and samples of the cold start that are there twice: their normal forms are equal, or share most of their runs of five tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import numpy as np
from tqdm import tqdm

from dk_jax.agents.text import fenced_blocks, prose
from dk_jax.sft.judged import JudgedKernel
from dk_jax.sft.normal_form import OWN_NAME, TOKEN, normal_form
from dk_jax.sft.samples import Sample

RUN = 5
"""Tokens in a run of the near-duplicates' measure."""
NEAR = 0.95
"""Similarity from which kernels count as near-duplicates by default: of texts of 200 tokens those that differ in about one place. (In the Triton
corpus another block size or number of warps alone gives 0.89 to 0.98, the longer the kernel the more.)"""
_PERMUTATIONS = 128
_DIRECT = 64  # so many are compared one by one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Removal:
    """One that goes, by its place in what was given, and the one that stays in its place.

    Attributes:
        index, twin: places.
        exact: their normal forms are equal; otherwise they are as similar as it says.
        similarity: share of common runs of five tokens (Jaccard's index), 1.0 where exact.
    """

    index: int
    twin: int
    exact: bool
    similarity: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deduplicated:
    """What stays, as ascending places in what was given, and each removal."""

    kept: tuple[int, ...]
    removals: tuple[Removal, ...]


def digest(form: str) -> str:
    """Of a normal form, in hexadecimal digits."""
    return hashlib.blake2b(form.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def similarity(one: str, other: str) -> float:
    """Of two sources: the share of common runs of five tokens of their normal forms, 0 to 1."""
    return _jaccard(*(frozenset(_runs(normal_form(source))) for source in (one, other)))


def deduplicate_kernels(kernels: Sequence[JudgedKernel], *, threshold: float | None = NEAR, across_tasks: bool = False) -> Deduplicated:
    """Kernels without those that are the same as another one but for names, comments, white space and the spelling of constants, or nearly so.

    Of several the correct, then the fastest, then the first stays. Near-duplicates are looked for among correct kernels and among others
    apart: a wrong kernel is a lesson just by how little makes it wrong.

    Args:
        threshold: similarity from which kernels are near-duplicates, above 0 and at most 1; None removes exact ones alone.
        across_tasks: compare kernels of different tasks too. One kernel is right for many tasks, and each shows when to write it; so by
            default kernels are compared within their task.
    """
    _check(threshold)
    order = sorted(range(len(kernels)), key=lambda i: (not kernels[i].verdict.correct, -kernels[i].verdict.speedup, i))
    forms = [normal_form(kernel.source) for kernel in kernels]
    scope = ["" if across_tasks else kernel.task for kernel in kernels]
    return _deduplicate(
        order,
        exact=[(scope[i], digest(form)) for i, form in enumerate(forms)],
        groups=[(scope[i], kernel.verdict.correct) for i, kernel in enumerate(kernels)],
        parts=lambda i: (_runs(forms[i]),),
        threshold=threshold,
    )


def deduplicate_samples(
    samples: Sequence[Sample], *, threshold: float | None = NEAR, across_tasks: bool = False, rewards: Sequence[float] | None = None
) -> Deduplicated:
    """Samples without those whose prompts and answers are both the same as another one's, or nearly so; of several the best rewarded, then
    the first stays.

    Code in messages is compared by its normal form, prose by its words; the task's own name is not looked at.

    Args:
        threshold: prompts and answers have to be at least so similar each; None removes exact duplicates alone.
        across_tasks: look for near-duplicates among different tasks too (exact ones are found anyway: their prompts hold equal tasks).
        rewards: one a sample.
    """
    _check(threshold)
    if rewards is not None and len(rewards) != len(samples):
        raise ValueError(f"deduplicate_samples: {len(rewards)} rewards for {len(samples)} samples; give one each")
    order = sorted(range(len(samples)), key=lambda i: (-rewards[i] if rewards is not None else 0.0, i))
    texts = [_messages(sample) for sample in samples]
    return _deduplicate(
        order,
        exact=[(sample.agent, digest("\0".join((*prompts, "", *answers)))) for sample, (prompts, answers) in zip(samples, texts, strict=True)],
        groups=[(sample.agent, "" if across_tasks else sample.task) for sample in samples],
        parts=lambda i: tuple(((turn, run) for turn, text in enumerate(side) for run in _runs(text)) for side in texts[i]),
        threshold=threshold,
    )


def _check(threshold: float | None) -> None:
    if threshold is not None and not 0 < threshold <= 1:
        raise ValueError(f"the threshold of near-duplicates is {threshold}: give a similarity above 0 and at most 1, or None for exact ones")


def _messages(sample: Sample) -> tuple[list[str], list[str]]:
    """Normal forms of a sample's prompts, and of its answers with whether they are imitated."""
    name = re.compile(rf"\b{re.escape(sample.task)}\b")
    prompts = [_message(name.sub("TASK", prompt)) for prompt, _, _ in sample.turns]
    answers = [f"{imitated} {_message(answer, code=sample.agent == 'policy')}" for _, answer, imitated in sample.turns]
    return prompts, answers


def _message(text: str, code: bool = False) -> str:
    """A message's prose and code blocks; `code`: without blocks it is code as a whole."""
    blocks, _ = fenced_blocks(text)
    if not blocks:
        return normal_form(text) if code else " ".join(text.split())
    return "\n".join([" ".join(prose(text).split()), *map(normal_form, blocks)])


def _runs(form: str) -> Iterator[tuple[str, ...]]:
    """Runs of tokens of a normal form. Of its numbered names it only matters how many mentions of such names ago each was last mentioned, up
    to four, so that one name more does not change all that follow."""
    tokens = ["^"] * (RUN - 1) + TOKEN.findall(form) + ["$"]  # so that no text is without runs
    mentions, last = 0, {}
    for i, token in enumerate(tokens):
        if OWN_NAME.fullmatch(token):
            mentions += 1
            ago = mentions - last.get(token, -RUN)
            last[token] = mentions
            tokens[i] = f"v{ago}" if ago < RUN else "v"
    return zip(*(tokens[i:] for i in range(RUN)), strict=False)


def _jaccard(one: frozenset, other: frozenset) -> float:
    common = len(one & other)
    return common / (len(one) + len(other) - common) if one or other else 1.0


def _deduplicate(
    order: Sequence[int],
    *,
    exact: Sequence[Hashable],
    groups: Sequence[Hashable],
    parts: Callable[[int], tuple[Iterable[Hashable], ...]],
    threshold: float | None,
) -> Deduplicated:
    """Goes through the places in `order` and keeps those that are neither equal to one that came before (`exact`) nor, within their group,
    similar to one that was kept. `parts` of a place are sets of runs, all of which have to be similar."""
    ids: dict[Hashable, int] = {}
    first: dict[Hashable, Removal] = {}
    kept: dict[Hashable, _Kept] = {}
    removals = []
    for i in tqdm(order, desc="looking for duplicates", unit="text", delay=2):
        removal = first.get(exact[i])
        if removal is None and threshold is not None:
            sets = tuple(frozenset(ids.setdefault((side, run), len(ids)) for run in part) for side, part in enumerate(parts(i)))
            if groups[i] not in kept:
                kept[groups[i]] = _Kept(threshold)
            found = kept[groups[i]].nearest(i, sets)
            removal = found and Removal(index=i, twin=found[0], exact=False, similarity=found[1])
        if removal is None:
            first[exact[i]] = Removal(index=i, twin=i, exact=True, similarity=1.0)
        else:
            first.setdefault(exact[i], removal)
            removals.append(dataclasses.replace(removal, index=i))
    gone = {removal.index for removal in removals}
    return Deduplicated(kept=tuple(i for i in range(len(exact)) if i not in gone), removals=tuple(sorted(removals, key=lambda r: r.index)))


class _Kept:
    """The members of a group that were kept, and which of them one that comes is similar to.

    The first 64 are looked at one by one. Of more, candidates are those that agree in a whole band of a 128-fold MinHash signature
    (Broder 1997; bands: Indyk and Motwani 1998), with bands so narrow that one at the threshold is missed once in a thousand times at most.
    Either way it is the true similarity that decides.
    """

    def __init__(self, threshold: float):
        self._threshold = threshold
        widths = (w for w in (16, 8, 4, 2, 1) if (1 - threshold**w) ** (_PERMUTATIONS // w) <= 1e-3)
        self._width = next(widths, 1)
        self._members: list[tuple[int, tuple[frozenset[int], ...]]] = []
        self._bands: dict[tuple[int, bytes], list[int]] = {}
        self._signatures: list[np.ndarray] = []

    def nearest(self, key: int, sets: tuple[frozenset[int], ...]) -> tuple[int, float] | None:
        """The key of the most similar member at or above the threshold, the first of equals, and its similarity. If there is none, this one
        becomes a member."""
        signature = _signature(frozenset().union(*sets))
        bands = [(at, signature[at : at + self._width].tobytes()) for at in range(0, _PERMUTATIONS, self._width)]
        if len(self._members) <= _DIRECT:
            candidates: Iterable[int] = range(len(self._members))
        else:
            candidates = sorted({member for band in bands for member in self._bands.get(band, ())})
            candidates = self._plausible(candidates, signature)
        best: tuple[float, int] | None = None
        for member in candidates:
            degree = min(map(_jaccard, sets, self._members[member][1]))
            if degree >= self._threshold and (best is None or degree > best[0]):
                best = degree, member
        if best is not None:
            return self._members[best[1]][0], best[0]
        for band in bands:
            self._bands.setdefault(band, []).append(len(self._members))
        self._members.append((key, sets))
        self._signatures.append(signature)
        return None

    def _plausible(self, candidates: Sequence[int], signature: np.ndarray) -> Sequence[int]:
        """Without those whose signatures agree so little that they are below the threshold, by five standard deviations."""
        if len(candidates) < 8:
            return candidates
        agreeing = np.mean(np.stack([self._signatures[member] for member in candidates]) == signature, axis=1)
        margin = 5 * (self._threshold * (1 - self._threshold) / _PERMUTATIONS) ** 0.5
        return [member for member, share in zip(candidates, agreeing, strict=True) if share >= self._threshold - margin]


_MULTIPLIERS = np.random.default_rng(0).integers(1, 2**63, size=(2, _PERMUTATIONS), dtype=np.uint64) | np.uint64(1)


def _signature(ids: frozenset[int]) -> np.ndarray:
    """MinHash signature of a set: for each of 128 hash functions the least hash of a member, u32[128]."""
    mixed = np.fromiter(ids, np.uint64, len(ids)) + np.uint64(1)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    hashes = mixed[:, None] * _MULTIPLIERS[0] + _MULTIPLIERS[1]
    return (hashes.min(axis=0) >> np.uint64(32)).astype(np.uint32)
