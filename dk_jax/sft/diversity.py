"""The diversity filter of the cold start: samples are embedded and clustered, and clusters that dominate are thinned out.

A summary agent whose cold start is dominated by a few generic skills proposes little else afterwards (daVinci-kernel, arXiv 2606.16497).
In turn, for each agent that is to be filtered:

    1. a text for each sample: the skills of a summary, the kernel of a policy's last turn, a selection's answer
    2. embeddings (dk_jax.sft.embeddings) less their mean, scaled to length one, PCA to at most 50 dimensions. (Without the mean taken out,
       the mean-pooled states of a language model all point one way: of the Triton cold start's 18 skill texts, two on one topic were nearer
       than two on different ones in 92 % of cases, with it in 97 %.)
    3. HDBSCAN (Campello et al. 2013): clusters of any form and number, and samples that belong to none
    4. no cluster may hold more than `max_share` of what is kept, nor more than `max_multiple` times the median cluster; of larger ones those
       members stay that are farthest apart (greedy k-center, Gonzalez 1985), or are best rewarded
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from dk_jax.agents import policy, summary
from dk_jax.agents.text import Style
from dk_jax.models.config import AGENTS
from dk_jax.rollout.trajectory import derive_seed
from dk_jax.sft.embeddings import NOISE, Embed
from dk_jax.sft.samples import Sample

_TITLE_CHARS = 60
_DENSER = 0.5  # distances to neighbours in a cluster that is the only one, as a share of the others' distances, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiversityConfig:
    """What is filtered, and how much may stay.

    Attributes:
        agents: whose samples are filtered; those of the others all stay.
        style: of the messages, "chat" or "compact".
        components: most dimensions that are clustered in.
        min_cluster_size: fewer samples are no cluster.
        max_share: most of an agent's kept samples that one cluster may hold, as far as thinning can achieve it (see `cap_of`); 0 for no such
            bound.
        max_multiple: most times the median cluster's size that a cluster may have; 0 for no such bound.
        keep: which members of a cluster stay, those "farthest" apart or the best by "reward".
    """

    agents: tuple[str, ...] = ("summary",)
    style: Style = "chat"
    components: int = 50
    min_cluster_size: int = 5
    max_share: float = 0.3
    max_multiple: float = 0.0
    keep: Literal["farthest", "reward"] = "farthest"

    def __post_init__(self):
        if unknown := set(self.agents) - set(AGENTS):
            raise ValueError(f"DiversityConfig.agents names {sorted(unknown)}; there are {', '.join(AGENTS)}")
        if self.components < 1:
            raise ValueError(f"DiversityConfig.components is {self.components}; it must be at least 1")
        if self.min_cluster_size < 2:
            raise ValueError(f"DiversityConfig.min_cluster_size is {self.min_cluster_size}; a cluster has at least 2 members")
        if not 0 <= self.max_share <= 1:
            raise ValueError(f"DiversityConfig.max_share is {self.max_share}; give a share of 0 (no bound) to 1")
        if self.max_multiple and self.max_multiple < 1:
            raise ValueError(f"DiversityConfig.max_multiple is {self.max_multiple}; give 0 (no bound), or at least 1")
        if self.keep not in ("farthest", "reward"):
            raise ValueError(f"DiversityConfig.keep is {self.keep!r}; it must be 'farthest' or 'reward'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topic:
    """A cluster: its label, what its most central sample is called, how many different texts and how many samples it had, and how many
    samples it has."""

    label: int
    title: str
    texts: int
    before: int
    after: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """How samples are spread over clusters.

    Attributes:
        samples: all of them.
        clustered: those in clusters; the other measures are about these.
        clusters: number.
        largest_share: share of all samples that the largest cluster holds.
        entropy: of the clusters' shares, in nats.
    """

    samples: int
    clustered: int
    clusters: int
    largest_share: float
    entropy: float

    @property
    def effective_clusters(self) -> float:
        """exp(entropy): so many clusters of equal size would have this entropy; 0 without clusters."""
        return math.exp(self.entropy) if self.clusters else 0.0

    @classmethod
    def of(cls, sizes: Sequence[int], noise: int) -> Spread:
        """Of cluster sizes and the number of samples in none."""
        sizes = [size for size in sizes if size]
        clustered = sum(sizes)
        total = clustered + noise
        return cls(
            samples=total,
            clustered=clustered,
            clusters=len(sizes),
            largest_share=max(sizes, default=0) / total if total else 0.0,
            entropy=-sum(n / clustered * math.log(n / clustered) for n in sizes) + 0.0,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentDiversity:
    """What was found among one agent's samples.

    Attributes:
        agent: its name.
        places: where its samples are in what was given [N].
        labels: cluster of each, by descending size from 0, or NOISE [N].
        kept: whether it stays [N].
        points: what was clustered [N, <= components].
        titles: what each sample is called [N].
        cap: most samples that a cluster kept; 0 for no bound.
        topics: clusters by descending size.
    """

    agent: str
    places: Int[np.ndarray, " N"]
    labels: Int[np.ndarray, " N"]
    kept: np.ndarray
    points: Float[np.ndarray, "N P"]
    titles: tuple[str, ...]
    cap: int
    topics: tuple[Topic, ...]

    @property
    def noise(self) -> int:
        """Samples in no cluster, all of which stay."""
        return int((self.labels == NOISE).sum())

    @property
    def before(self) -> Spread:
        return Spread.of([topic.before for topic in self.topics], self.noise)

    @property
    def after(self) -> Spread:
        return Spread.of([topic.after for topic in self.topics], self.noise)

    def as_data(self) -> dict[str, Any]:
        """Plain data, without the points."""
        spreads = {
            name: dataclasses.asdict(spread) | {"effective_clusters": spread.effective_clusters}
            for name, spread in (("before", self.before), ("after", self.after))
        }
        return {"agent": self.agent, "cap": self.cap, "noise": self.noise, **spreads, "topics": [dataclasses.asdict(t) for t in self.topics]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiversityReport:
    """What the filter did: the places of the samples that stay, ascending, and what it found for each agent that it looked at."""

    kept: tuple[int, ...]
    agents: tuple[AgentDiversity, ...]


def filter_samples(
    samples: Sequence[Sample], *, config: DiversityConfig, embed: Embed, seed: int, rewards: Sequence[float] | None = None
) -> tuple[list[Sample], DiversityReport]:
    """The samples that stay, in their order, and a report. The same for equal arguments.

    Args:
        samples: of all agents.
        config: see there.
        embed: texts to vectors [N, D]; called once for each agent that has samples, with each distinct text once.
        seed: decides between members that are equally far from others, or equally rewarded.
        rewards: one a sample, for keep="reward".

    Raises:
        ValueError: rewards are missing or too few; vectors of another number, or not finite.
    """
    if config.keep == "reward" and rewards is None:
        raise ValueError("filter_samples: keep='reward' needs rewards, one a sample; use keep='farthest' where there are none")
    if rewards is not None and len(rewards) != len(samples):
        raise ValueError(f"filter_samples: {len(rewards)} rewards for {len(samples)} samples; give one each")
    gone: set[int] = set()
    parts = []
    for agent in config.agents:
        places = [i for i, sample in enumerate(samples) if sample.agent == agent]
        if not places:
            continue
        own = None if rewards is None else np.array([rewards[i] for i in places])
        part = _filter_agent(agent, [samples[i] for i in places], places, own, config=config, embed=embed, seed=seed)
        gone |= {place for place, kept in zip(places, part.kept, strict=True) if not kept}
        parts.append(part)
    kept = tuple(i for i in range(len(samples)) if i not in gone)
    return [samples[i] for i in kept], DiversityReport(kept=kept, agents=tuple(parts))


def _filter_agent(
    agent: str, samples: Sequence[Sample], places: Sequence[int], rewards: np.ndarray | None, *, config: DiversityConfig, embed: Embed, seed: int
) -> AgentDiversity:
    place: dict[str, int] = {}  # of each distinct text
    texts = np.array([place.setdefault(text_of(sample, config.style), len(place)) for sample in samples])
    distinct = reduce(embedded(list(place), embed), config.components, seed=seed)
    labels = cluster(distinct, np.bincount(texts), config.min_cluster_size)[texts]
    points = distinct[texts]
    sizes = np.bincount(labels[labels != NOISE]) if (labels != NOISE).any() else np.zeros(0, int)
    cap = cap_of(sizes.tolist(), int((labels == NOISE).sum()), config)
    titles = tuple(title_of(sample, config.style) for sample in samples)
    kept = np.ones(len(samples), bool)
    topics = []
    for label in range(len(sizes)):
        members = np.flatnonzero(labels == label)
        if cap and len(members) > cap:
            order = np.random.default_rng(derive_seed(seed, "diversity", agent, label)).permutation(members)
            if config.keep == "reward":
                stay = order[np.argsort(-rewards[order], kind="stable")][:cap]
            else:
                stay = order[k_center(points[order], cap)]
            kept[np.setdiff1d(members, stay)] = False
        central = members[_central(points[members])]
        topics.append(
            Topic(
                label=label,
                title=titles[central],
                texts=len(set(texts[members].tolist())),
                before=len(members),
                after=int(kept[members].sum()),
            )
        )
    return AgentDiversity(
        agent=agent, places=np.array(places), labels=labels, kept=kept, points=points, titles=titles, cap=cap, topics=tuple(topics)
    )  # fmt: skip


# --- what a sample says -------------------------------------------------------------------------------------------------------


def text_of(sample: Sample, style: Style) -> str:
    """What a sample is compared by: a summary's skills, the kernel of a policy's last turn, else its last answer."""
    answer = sample.turns[-1][1]
    if sample.agent == "summary":
        notes = summary.parse(answer, style=style)
        drafts = [*notes.drafts, *(draft for draft, _ in notes.refused)]
        return "\n\n".join(f"{draft.description}\n{draft.content}" for draft in drafts) or answer
    if sample.agent == "policy":
        source = None
        for _, said, _ in sample.turns:  # a later turn may hand in the kernel of the one before
            source = policy.parse(said, style=style, previous=source).source
        return source or answer
    return answer


def title_of(sample: Sample, style: Style) -> str:
    """What a sample is called: by the names of a summary's skills, a policy's task, the beginning of another answer."""
    answer = sample.turns[-1][1]
    if sample.agent == "policy":
        return sample.task
    title = " ".join(answer.split())
    if sample.agent == "summary":
        notes = summary.parse(answer, style=style)
        drafts = [*notes.drafts, *(draft for draft, _ in notes.refused)]
        title = ", ".join(draft.name for draft in drafts) or (title if notes.error else "(no skill)")
    return title if len(title) <= _TITLE_CHARS else f"{title[: _TITLE_CHARS - 1]}…"


# --- vectors ------------------------------------------------------------------------------------------------------------------


def embedded(texts: Sequence[str], embed: Embed) -> Float[np.ndarray, "N D"]:
    """Embeddings of distinct texts less their mean, of length one; a vector that is the mean stays zero."""
    vectors = np.asarray(embed(texts), np.float64)
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise ValueError(f"the embedder gave an array of shape {vectors.shape} for {len(texts)} texts; [N, D] is expected")
    if not np.isfinite(vectors).all():
        bad = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
        raise ValueError(f"the embedder gave numbers that are not finite for the text that begins with {texts[bad][:60]!r}")
    vectors = vectors - vectors.mean(axis=0)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 1e-9 * max(lengths.max(), 1e-30))


def reduce(vectors: Float[np.ndarray, "N D"], components: int, *, seed: int) -> Float[np.ndarray, "N P"]:
    """Principal components, at most as many as asked for."""
    n, width = vectors.shape
    most = min(components, width, n - 1)
    if most < 1 or not vectors.any():
        return np.zeros((n, 1))
    from sklearn.decomposition import PCA  # takes seconds

    return PCA(n_components=most, random_state=seed % 2**32).fit_transform(vectors)


def cluster(points: Float[np.ndarray, "N P"], counts: Int[np.ndarray, " N"], min_cluster_size: int) -> Int[np.ndarray, " N"]:
    """Labels of distinct texts: clusters by descending number of samples from 0, or NOISE.

    HDBSCAN sees each text once, since copies of one would be a cluster of their own beside those that say the same in other words; a cluster
    has so many texts as make `min_cluster_size` samples on average, at least two, and a text with so many copies is one by itself.

    It finds clusters by what divides the data, and so none where all that is dense lies in one place, as a dominant skill among a few rare
    ones does. Where it finds none, the texts that stand at least twice as close as the others, if there are such, are therefore one.

    Args:
        points: of each distinct text.
        counts: samples with that text.
        min_cluster_size: in samples.
    """
    n = len(points)
    labels = np.full(n, NOISE)
    least = max(2, round(min_cluster_size * n / counts.sum()))
    if n >= max(least, 3):
        from sklearn.cluster import HDBSCAN  # takes seconds

        labels = HDBSCAN(min_cluster_size=least, copy=True).fit(points).labels_
        if (labels == NOISE).all():
            labels = np.where(_dense(points, least), 0, NOISE)
    groups = [np.flatnonzero(labels == label) for label in np.unique(labels) if label != NOISE]
    groups = [members for members in groups if counts[members].sum() >= min_cluster_size]
    inside = set().union(*groups)
    groups += [np.array([i]) for i in range(n) if i not in inside and counts[i] >= min_cluster_size]
    groups.sort(key=lambda members: (-int(counts[members].sum()), int(members[0])))
    out = np.full(n, NOISE)
    for label, members in enumerate(groups):
        out[members] = label
    return out


def _dense(points: np.ndarray, least: int) -> np.ndarray:
    """Whether each point is among at least `least` that stand so much closer than the others: where the distances to the `least`-th neighbour,
    in ascending order, grow most from one to the next, the latter at least twice the former. None, if they do so nowhere."""
    from sklearn.neighbors import NearestNeighbors

    neighbours = min(least, len(points) - 1)
    apart = NearestNeighbors(n_neighbors=neighbours + 1).fit(points).kneighbors(points)[0][:, -1]
    order = np.argsort(apart, kind="stable")
    growth = apart[order][1:] / np.maximum(apart[order][:-1], 1e-12)
    growth[: least - 1] = 0.0
    at = int(np.argmax(growth))
    dense = np.zeros(len(points), bool)
    if growth[at] >= 1 / _DENSER:
        dense[order[: at + 1]] = True
    return dense


def cap_of(sizes: Sequence[int], noise: int, config: DiversityConfig) -> int:
    """Most samples that a cluster may keep, 0 where all may stay.

    The largest c with c <= max_share * (noise + sum of min(size, c)), so that the bound holds of what is kept; and at most `max_multiple`
    times the median size. But of several clusters none is thinned below the smallest one, after which thinning makes none more even (two
    clusters can't have a third each), a single one not below `min_cluster_size`, and one that is all there is not at all.
    """
    largest = most = max(sizes, default=0)
    if not sizes or (len(sizes) == 1 and not noise):
        return 0
    if config.max_share:
        share = config.max_share + 1e-9
        most = next((c for c in range(largest, 0, -1) if c <= share * (noise + sum(min(size, c) for size in sizes))), 0)
    if config.max_multiple:
        most = min(most, math.floor(config.max_multiple * float(np.median(sizes))))
    cap = max(most, min(sizes) if len(sizes) > 1 else config.min_cluster_size)
    return cap if cap < largest else 0


def k_center(points: Float[np.ndarray, "N P"], count: int) -> Int[np.ndarray, " K"]:
    """Places of `count` members far apart: first the most central one, then always the one farthest from all that were taken, the first of
    equals (greedy k-center; the farthest is at most twice as far from a taken one as with the best choice)."""
    taken = [_central(points)]
    apart = np.linalg.norm(points - points[taken[0]], axis=1)
    apart[taken[0]] = -1.0
    while len(taken) < min(count, len(points)):
        taken.append(int(np.argmax(apart)))
        apart = np.minimum(apart, np.linalg.norm(points - points[taken[-1]], axis=1))
        apart[taken[-1]] = -1.0
    return np.array(taken)


def _central(points: np.ndarray) -> int:
    return int(np.argmin(np.linalg.norm(points - points.mean(axis=0), axis=1)))
