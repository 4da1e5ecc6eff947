"""The data card of a cold start: what its kernels and samples are, what was removed and why; as data, as Markdown and as a page.

Here is also how further files are read: JSON lines of samples (`agent`, `kind`, `task`, `turns`) or of judged kernels (as those of
dk_jax.sft.judged, with the `reference` of a task that is none of the run's), either with a `provenance` object.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from dk_jax.agents import summary
from dk_jax.agents.text import Style
from dk_jax.evaluation import charts
from dk_jax.evaluation.markup import columns, missing, number
from dk_jax.evaluation.report_style import STYLE
from dk_jax.models.config import AGENTS
from dk_jax.rollout.trajectory import Verdict
from dk_jax.sft.contamination import Nearest
from dk_jax.sft.diversity import AgentDiversity
from dk_jax.sft.embeddings import NOISE, mark, scatter
from dk_jax.sft.judged import JudgedKernel
from dk_jax.sft.samples import Sample
from dk_jax.sft.skill_topics import SkillTopic
from dk_jax.tasks.kernelbench import check_reference
from dk_jax.tasks.task import Task

log = logging.getLogger(__name__)

PERCENTILES = (5, 50, 95, 99, 100)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where data comes from: "generated", a package and its version, or a teacher model; the licence it is under; its language."""

    source: str = "generated"
    licence: str = "Apache-2.0"  # this project's own
    language: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Further:
    """What a further file holds: kernels and samples, each with its origin, and by name the tasks that kernels came with."""

    kernels: tuple[tuple[JudgedKernel, Origin], ...]
    samples: tuple[tuple[Sample, Origin], ...]
    tasks: Mapping[str, Task]


def read_further(path: Path, *, language: str) -> Further:
    """Reads one file; a line that is cut short at the file's end, as a killed writer leaves it, is left out and counted in a warning.

    Args:
        path: JSON lines.
        language: of what does not say its own.

    Raises:
        ValueError: a line that is neither a sample nor a judged kernel; names file, line and field.
    """
    kernels, samples, tasks = [], [], {}
    *lines, last = Path(path).read_text(encoding="utf-8").split("\n")
    if last and not _is_json(last):
        log.warning("%s:%d: the last line is cut short and was left out", path, len(lines) + 1)
        last = ""
    for count, line in enumerate([*lines, last] if last else lines, 1):
        try:
            data = json.loads(line)
            if not isinstance(data, dict):
                raise TypeError("not an object")
            origin = origin_of(data.get("provenance"), language)
            if "turns" in data:
                samples.append((_sample(data), origin))
            else:
                kernels.append((_kernel(data), origin))
                if "reference" in data:
                    task = _task(data)
                    if tasks.setdefault(task.name, task) != task:
                        raise ValueError(f"task {task.name!r} has another reference than in a line before")
        except KeyError as error:
            raise ValueError(f"{path}:{count}: field {error} is missing. A line holds a sample or a judged kernel; make the file again") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}:{count}: {error}. A line holds a sample or a judged kernel; make the file again") from None
    return Further(kernels=tuple(kernels), samples=tuple(samples), tasks=tasks)


def origin_of(provenance: Mapping[str, Any] | None, language: str) -> Origin:
    """What a provenance object says; "not stated" where it is silent."""
    where = provenance or {}
    if not isinstance(where, Mapping):
        raise TypeError("field 'provenance' is not an object")
    source = " ".join(str(where[key]) for key in ("package", "version") if where.get(key))
    if not source:
        source = " ".join(str(where[key]) for key in ("source", "model") if where.get(key))
    licence = where.get("licence") or where.get("license") or (f"terms of {where['host']}" if where.get("host") else "not stated")
    return Origin(source=source or "not stated", licence=str(licence), language=str(where.get("language") or language))


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _sample(data: dict[str, Any]) -> Sample:
    agent, kind, task, turns = data["agent"], data["kind"], data["task"], data["turns"]
    if agent not in AGENTS:
        raise ValueError(f"field 'agent' is {agent!r:.40}, none of {', '.join(AGENTS)}")
    if not isinstance(kind, str) or not isinstance(task, str):
        raise TypeError("fields 'kind' and 'task' must be texts")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, list) and [*map(type, t)] == [str, str, bool] for t in turns):
        raise TypeError("field 'turns' must be a list of [prompt, answer, imitated], with at least one")
    return Sample(agent=agent, kind=kind, task=task, turns=tuple((prompt, answer, imitated) for prompt, answer, imitated in turns))


def _kernel(data: dict[str, Any]) -> JudgedKernel:
    if not all(isinstance(data[name], str) for name in ("task", "source", "intent")) or not isinstance(data["verdict"], dict):
        raise TypeError("fields 'task', 'source' and 'intent' must be texts, 'verdict' an object")
    return JudgedKernel(
        task=data["task"],
        source=data["source"],
        techniques=tuple(data.get("techniques", ())),
        intent=data["intent"],
        verdict=Verdict(**data["verdict"]),
    )


def _task(data: dict[str, Any]) -> Task:
    """The task of a kernel's line: its reference, with `described` for what else is known of it."""
    described = {"name": data["task"], "level": 1, "family": data["task"], "size": "gpu"} | data.get("described", {})
    check_reference(data["reference"], f"the reference of {data['task']}")
    return Task(split="train", reference=data["reference"], **described)


# --- the card -----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One step on the way from what was made to what is trained on: how many of what there were, and how many are left."""

    name: str
    of: str
    before: int
    after: int


def make_card(
    kernels: Sequence[tuple[JudgedKernel, Origin]],
    samples: Sequence[tuple[Sample, Origin]],
    *,
    kernel_topics: Sequence[Sequence[str]],
    summary_topics: Sequence[Sequence[str]],
    tokens: Sequence[tuple[int, int]],
    stages: Sequence[Stage],
    similarity_to_held_out: Mapping[str, int],
    contaminated: Sequence[Nearest],
    diversity: Sequence[AgentDiversity],
    made_with: Mapping[str, str],
) -> dict[str, Any]:
    """The card as plain data.

    Args:
        kernels, samples: those that are left, with their origins.
        kernel_topics: of each kernel the topics that it is an example of; a kernel counts for each.
        summary_topics: of each summary sample the topics of its skills.
        tokens: of each sample all tokens and the imitated ones.
        stages: what was removed, in order.
        similarity_to_held_out: how many training tasks are how similar to the nearest held-out one.
        contaminated: the tasks that were removed for it.
        diversity: what the diversity filter found.
        made_with: settings that belong on the card.
    """
    by_agent = {agent: [count for (sample, _), count in zip(samples, tokens, strict=True) if sample.agent == agent] for agent in AGENTS}
    return {
        "made_with": dict(made_with),
        "stages": [dataclasses.asdict(stage) | {"removed": stage.before - stage.after} for stage in stages],
        "kernels": {
            "count": len(kernels),
            "tasks": len({kernel.task for kernel, _ in kernels}),
            "outcome": _counted(kernel.verdict.outcome for kernel, _ in kernels),
            "intent": _counted(kernel.intent for kernel, _ in kernels),
            "topic": _counted(topic for topics in kernel_topics for topic in topics or ["(none)"]),
            "source": _counted(origin.source for _, origin in kernels),
            "language": _counted(origin.language for _, origin in kernels),
            "licence": _counted(origin.licence for _, origin in kernels),
        },
        "samples": {
            "count": len(samples),
            "tasks": len({sample.task for sample, _ in samples}),
            "agent": _counted(sample.agent for sample, _ in samples),
            "kind": _counted(sample.kind for sample, _ in samples),
            "turns": _counted(str(len(sample.turns)) for sample, _ in samples),
            "summary topic": _counted(topic for topics in summary_topics for topic in topics or ["(none)"]),
            "source": _counted(origin.source for _, origin in samples),
            "language": _counted(origin.language for _, origin in samples),
            "licence": _counted(origin.licence for _, origin in samples),
        },
        "tokens": {agent: _percentiles(counts) for agent, counts in by_agent.items() if counts},
        "similarity_to_held_out": dict(similarity_to_held_out),
        "contaminated": [dataclasses.asdict(nearest) for nearest in contaminated],
        "diversity": [part.as_data() for part in diversity],
    }


def summary_topics(samples: Sequence[Sample], topics: Sequence[SkillTopic], *, style: Style) -> list[list[str]]:
    """Of each summary sample the topics of its skills: those of the catalogue that a skill of that name phrases, else "(other)"."""
    phrased = {draft.name: topic.topic for topic in topics for draft in topic.phrasings}
    notes = (summary.parse(sample.turns[-1][1], style=style) for sample in samples if sample.agent == "summary")
    return [[phrased.get(draft.name, "(other)") for draft in note.drafts] for note in notes]


def _counted(values: Iterable[str]) -> dict[str, int]:
    """By descending count, then name."""
    return dict(sorted(Counter(values).items(), key=lambda item: (-item[1], item[0])))


def _percentiles(counts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    lengths = np.array([length for length, _ in counts])
    return {
        "samples": len(counts),
        **{f"p{q}" if q < 100 else "most": int(np.percentile(lengths, q, method="inverted_cdf")) for q in PERCENTILES},
        "total": int(lengths.sum()),
        "imitated": int(sum(imitated for _, imitated in counts)),
    }


def card_markdown(card: Mapping[str, Any], name: str) -> str:
    """The card as Markdown; `name` is the recipe's."""
    parts = [f"# Data card of the cold start: {name}", "## From what was made to what is trained on"]
    keys = ("name", "of", "before", "removed", "after")
    parts.append(_table(("step", *keys[1:]), [[stage[key] for key in keys] for stage in card["stages"]]))
    for group in ("kernels", "samples"):
        part = card[group]
        parts.append(f"## {group.capitalize()}: {part['count']:,} about {part['tasks']:,} tasks")
        for title, counts in part.items():
            if isinstance(counts, dict) and counts:
                parts.append(_table((title, group, "share"), [(k, n, _percent(n, part["count"])) for k, n in counts.items()]))
    parts.append("## Tokens of a sample")
    heads = ("agent", *(f"{q} %" if q < 100 else "most" for q in PERCENTILES), "all samples", "imitated")
    keys = (*(f"p{q}" if q < 100 else "most" for q in PERCENTILES), "total", "imitated")
    parts.append(_table(heads, [(agent, *(counts[key] for key in keys)) for agent, counts in card["tokens"].items()]))
    parts.append("## Similarity of training tasks to the nearest held-out one")
    parts.append(_table(("similarity of operations", "tasks"), list(card["similarity_to_held_out"].items())))
    if card["contaminated"]:
        parts.append("## Contaminated tasks, removed with their kernels and samples")
        rows = [(c["task"], c["held_out"], f"{c['similarity']:.2f}", ", ".join(c["operations"])) for c in card["contaminated"]]
        parts.append(_table(("task", "held-out task", "similarity", "operations"), rows))
    for part in card["diversity"]:
        parts.append(f"## Topics of {part['agent']} samples")
        parts.append(_table(("", "before", "after"), _spread_rows(part)))
        rows = [(topic["label"] + 1, *(topic[key] for key in ("title", "texts", "before", "after"))) for topic in part["topics"]]
        parts.append(_table(("cluster", "most central sample", "texts", "before", "after"), rows))
    parts += ["## Made with", _table(("", ""), list(card["made_with"].items()))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _spread_rows(part: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = (
        ("samples", "samples", "{:,}"), ("in clusters", "clustered", "{:,}"), ("clusters", "clusters", "{}"),
        ("share of the largest", "largest_share", "{:.1%}"), ("entropy, nats", "entropy", "{:.2f}"),
        ("effective number of clusters", "effective_clusters", "{:.1f}"),
    )  # fmt: skip
    return [(name, text.format(part["before"][key]), text.format(part["after"][key])) for name, key, text in rows]


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; "" without rows."""
    if not rows:
        return ""

    def line(cells: Iterable[Any]) -> str:
        return "| " + " | ".join(f"{c:,}" if isinstance(c, int) else str(c).replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    return "\n".join([line(heads), "|" + " --- |" * len(heads), *map(line, rows)])


# --- the page -----------------------------------------------------------------------------------------------------------------

# Okabe and Ito's colours (2008), told apart with any colour vision, and lighter ones of the same hues on dark ground; yellow, which is too
# faint on white, is left out.
_COLOURS = """
.topics { --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #e69f00; --c5: #56b4e9; --c6: #1c2024; --rest: #8b929a; }
@media (prefers-color-scheme: dark) { .topics { --c0: #4ba3e3; --c1: #ff8a3d; --c2: #2fc79a; --c3: #e39cc4; --c4: #f0b429; --c5: #8fd0f7;
  --c6: #e6e8ea; --rest: #7b828a; } }
.topics .panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 16px; }
.topics svg.plot { width: 100%; height: auto; display: block; background: var(--card); border: 1px solid var(--line); border-radius: 6px; }
.topics figure { margin: 0; } .topics figcaption { font-weight: 600; font-size: 13px; margin: 0 0 6px; }
.topics figcaption span { font-weight: 400; color: var(--muted); }
.topics g.cluster:focus { outline: none; } .topics svg.plot:has(g.cluster:focus) g.cluster:not(:focus) { opacity: 0.15; }
.topics svg.mark { width: 15px; height: 15px; vertical-align: -2px; margin-right: 7px; }
.topics td.bars { width: 130px; }
"""


def topics_page(card: Mapping[str, Any], diversity: Sequence[AgentDiversity], flat: Sequence[np.ndarray], *, name: str, projection: str) -> str:
    """A page without scripts: each agent's samples in two dimensions before and after, the topics, and what was removed.

    Args:
        card: see `make_card`.
        diversity, flat: of each agent that was filtered, with its samples' places [N, 2].
        name: the recipe's.
        projection: how those places were found, for the text.
    """
    sections = [
        f"<section><h2>Topics of {escape(part.agent)} samples</h2>{_topics(part, xy, projection)}</section>"
        for part, xy in zip(diversity, flat, strict=True)
    ]
    if not sections:
        sections = [missing("No agent's samples were looked at: there are none, or the filter is off.")]
    rows = "".join(
        f"<tr><th>{escape(stage['name'])}</th><td>{escape(stage['of'])}</td>"
        + "".join(number(f"{stage[key]:,}") for key in ("before", "removed", "after"))
        + "</tr>"
        for stage in card["stages"]
    )
    stages = (
        f"<section><h2>From what was made to what is trained on</h2><table><thead><tr><th>Step</th><th>Of</th>{columns('before', 'removed', 'after')}"
        f"</tr></thead><tbody>{rows}</tbody></table></section>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Cold-start data of {escape(name)}</title><style>{STYLE}{_COLOURS}</style></head><body><main class=\"topics\">"
        f"<header><h1>{escape(name)}</h1><p class=\"sub\">Cold-start data</p></header>{''.join(sections)}{stages}</main></body></html>\n"
    )


def _topics(part: AgentDiversity, xy: np.ndarray, projection: str) -> str:
    data = part.as_data()
    before, after = ("".join(number(escape(row[i])) for row in _spread_rows(data)) for i in (1, 2))
    heads = columns(*(row[0] for row in _spread_rows(data)))
    spread = (
        f'<div class="scroll"><table><thead><tr><th></th>{heads}</tr></thead><tbody><tr><th>before</th>{before}</tr><tr><th>after</th>{after}</tr>'
        "</tbody></table></div>"
    )
    names = {topic.label: f"cluster {topic.label + 1}, {topic.title}" for topic in part.topics} | {NOISE: "in no cluster"}
    panels = "".join(
        f"<figure><figcaption>{title} <span>{int(shown.sum()):,} samples</span></figcaption>"
        f"{scatter(xy, part.labels, shown, titles=part.titles, names=names, label=f'{part.agent} samples {title.lower()} the filter')}</figure>"
        for title, shown in (("Before", np.ones(len(xy), bool)), ("After", part.kept))
    )
    cap = f"At most {part.cap:,} samples of a cluster were kept." if part.cap else "No cluster was large enough to be thinned."
    how = {
        "pca": "the two main axes of the embeddings",
        "tsne": "t-SNE of the embeddings: neighbours are alike, distances between groups say nothing",
    }
    note = (
        f"{cap} Places are {how.get(projection, projection)}. A mark's area is the number of samples with that text; an empty ring in the right "
        "picture is what was removed; bars are before and, below, after. The tabulator key goes from cluster to cluster and dims the others."
    )
    return f'{spread}<div class="panels" style="margin-top:18px">{panels}</div><p class="fine">{note}</p>{_topic_table(part)}'


def _topic_table(part: AgentDiversity, most: int = 40) -> str:
    total = (len(part.labels), int(part.kept.sum()))
    top = max((topic.before for topic in part.topics), default=0)
    rows = [(mark(t.label), f'<span class="name">{escape(t.title)}</span>', f"{t.texts:,}", t.before, t.after) for t in part.topics[:most]]
    further = part.topics[most:]
    if further:
        texts, *sums = (sum(getattr(topic, key) for topic in further) for key in ("texts", "before", "after"))
        rows.append((mark(most), f"{len(further)} further clusters", f"{texts:,}", *sums))
    if part.noise:
        rows.append((mark(NOISE), "in no cluster", "", part.noise, part.noise))
    body = "".join(
        f"<tr><td>{shape}{title}</td>{number(texts)}{number(f'{before:,}')}{number(_percent(before, total[0]))}{number(f'{after:,}')}"
        f'{number(_percent(after, total[1]))}<td class="bars">{charts.pair_of_bars(before, after, top)}</td></tr>'
        for shape, title, texts, before, after in rows
    )
    return (
        '<div class="scroll"><table class="wide"><thead><tr><th>Cluster, by its most central sample</th>'
        f"{columns('texts', 'before', 'share', 'after', 'share')}<th></th></tr></thead><tbody>{body}</tbody></table></div>"
    )
