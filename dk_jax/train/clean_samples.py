"""Which of the cold start's samples are trained on: none of a held-out task in other words, none twice, and no topic above its share.

    all samples -> without contaminated ones -> without duplicates -> without what a dominant topic has too much of (`corpus.diversity`)

What stays is written to the workdir before training begins, and read back afterwards: embeddings differ in the last bits between
devices, and a run that goes on elsewhere is trained on the same samples all the same. What was removed and why:
`scripts/sft_data.py` tells it of the same corpus.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from dk_jax.rollout.trajectory import derive_seed
from dk_jax.sft.contamination import HeldOut, contaminated_samples, decontaminate
from dk_jax.sft.diversity import DiversityConfig, filter_samples
from dk_jax.sft.duplicates import deduplicate_samples
from dk_jax.sft.embeddings import Embed
from dk_jax.sft.samples import Sample
from dk_jax.tasks.task import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cleaned:
    """The samples that stay, in their order, and how many went, by reason."""

    samples: tuple[Sample, ...]
    counts: dict[str, int]


def is_on(c: ConfigDict) -> bool:
    """Whether the recipe's `corpus` asks for any of it."""
    return bool(c.contaminated or c.near_duplicates or c.diversity.on)


def diversity_config(cfg: ConfigDict) -> DiversityConfig:
    """By `corpus.diversity`. Raises ValueError for a number out of its range."""
    fields = cfg.corpus.diversity.to_dict()
    fields.pop("on")
    return DiversityConfig(**{**fields, "agents": tuple(fields["agents"])}, style=cfg.style)


def cleaned(
    samples: Sequence[Sample], trained: Sequence[Task], held_out: Sequence[Task], *, cfg: ConfigDict, embed: Callable[[], Embed], path: Path
) -> Cleaned:
    """Looks through the samples, or reads back what was found before.

    Args:
        samples: all there are. trained: the tasks that they are about, as far as they are known. held_out: tasks of the evaluation.
        cfg: its `corpus.contaminated` and `.near_duplicates` (similarities, 0 for off), `.diversity`, `style` and `seed`.
        embed: makes the embedder; called where samples are filtered for diversity.
        path: where it is kept.

    Raises:
        ValueError: the file is of other samples, or can't be read.
    """
    c, all_of_them = cfg.corpus, _digest(samples)
    if path.exists():
        return _read(path, samples, all_of_them)
    kept, counts = list(range(len(samples))), {"samples": len(samples)}

    def without(gone: set[int], why: str) -> None:
        nonlocal kept
        kept = [place for i, place in enumerate(kept) if i not in gone]
        counts[why] = len(gone)

    def left() -> list[Sample]:
        return [samples[place] for place in kept]

    if c.contaminated:
        known = HeldOut(held_out)
        found = decontaminate(trained, known, threshold=c.contaminated)
        without(set(contaminated_samples(left(), found, known)), "contaminated")
    if c.near_duplicates:
        without({removal.index for removal in deduplicate_samples(left(), threshold=c.near_duplicates).removals}, "duplicates")
    if c.diversity.on:
        _, report = filter_samples(left(), config=diversity_config(cfg), embed=embed(), seed=derive_seed(cfg.seed, "diversity"))
        without(set(range(len(kept))) - set(report.kept), "of_a_dominant_topic")
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"of": all_of_them, "counts": counts, "kept": kept}) + "\n", encoding="utf-8")
    partial.replace(path)
    return Cleaned(samples=tuple(left()), counts=counts)


def _read(path: Path, samples: Sequence[Sample], all_of_them: str) -> Cleaned:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        of, kept, counts = found["of"], [int(place) for place in found["kept"]], dict(found["counts"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} can't be read ({error}). Delete it: the samples are looked through again") from error
    if of != all_of_them:
        raise ValueError(f"{path} is of other samples than this recipe and corpus make: take back what was changed, or use another --workdir")
    return Cleaned(samples=tuple(samples[place] for place in kept), counts=counts)


def _digest(samples: Sequence[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample.agent, sample.kind, sample.task, sample.turns], ensure_ascii=True).encode())
    return digest.hexdigest()[:24]
