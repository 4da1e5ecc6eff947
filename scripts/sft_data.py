"""What a cold start's data is and holds twice: data card, duplicates, contamination by held-out tasks, and the diversity of its topics.

    python scripts/train.py --config=configs/smollm2_triton.py --workdir=runs/smollm2 --mode=corpus
    python scripts/sft_data.py --config=configs/smollm2_triton.py --workdir=runs/smollm2

Reads the run's corpus.jsonl (and --further files) and writes into WORKDIR/sft_data; of the run itself nothing is changed. Samples are
embedded by the run's own model, before training; what was embedded is kept, so an interrupted command goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import app, flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from dk_jax.command_line import parse_flags  # noqa: E402

_CONFIG = config_flags.DEFINE_config_file("config", None, "Recipe: a file with get_config().", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run, with its corpus.jsonl.")
_FURTHER = flags.DEFINE_list("further", [], "Files of further samples or judged kernels (JSON lines).")
_KERNELBENCH = flags.DEFINE_string("kernelbench", "", "Folder of KernelBench files; all of them count as held out, too.")
_EMBEDDER = flags.DEFINE_string("embedder", "", "A sentence-transformers model; by default the run's own model embeds.")
_AGENTS = flags.DEFINE_list("agents", ["summary"], "Whose samples are filtered for diversity; none with --agents=")
_PROJECTION = flags.DEFINE_enum("projection", "pca", ["pca", "tsne"], "How the picture is made.")
_NEAR = flags.DEFINE_float("near", 0.95, "Similarity from which two are near-duplicates; 0 looks for exact duplicates alone.", 0.0, 1.0)
_ACROSS = flags.DEFINE_bool("across_tasks", False, "Look for duplicates among different tasks, too.")
_CONTAMINATED = flags.DEFINE_float("contaminated", 0.9, "Similarity of operations from which a task counts as a held-out one.", 0.0, 1.0)
_LEAST = flags.DEFINE_integer("least_operations", 1, "Tasks of fewer operations are never removed as contaminated.", 1)
_CLUSTER = flags.DEFINE_integer("min_cluster_size", 5, "Fewer samples are no cluster.", 2)
_SHARE = flags.DEFINE_float("max_share", 0.3, "Most of an agent's samples that a cluster may have afterwards; 0 for no bound.", 0.0, 1.0)
_MULTIPLE = flags.DEFINE_float("max_multiple", 0.0, "Most times the median cluster's size that a cluster may have; 0 for no bound.", 0.0)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 1024, "Of a text so many tokens are embedded at most.", 1)


def main(argv) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}: flags look like --workdir=DIR or --config.seed=1")
    for flag in (_CONFIG, _WORKDIR):
        if flag.value is None:
            raise app.UsageError(f"--{flag.name} is missing, e.g. --config=configs/smollm2_triton.py --workdir=runs/smollm2")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)
    try:
        cfg, workdir = _CONFIG.value, Path(_WORKDIR.value)
        cfg.seed  # noqa: B018  a recipe that could not be loaded says so at its first use
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str((workdir / "xla_cache").absolute()))  # before jax is imported
        return _run(cfg, workdir)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(cfg, workdir: Path) -> int:
    from dk_jax.rollout.episode import task_view
    from dk_jax.sft import contamination, duplicates, lessons
    from dk_jax.sft import data_card as cards
    from dk_jax.sft.diversity import DiversityConfig, filter_samples
    from dk_jax.sft.embeddings import project
    from dk_jax.sft.judged import load_kernels
    from dk_jax.tasks.kernelbench import load_kernelbench
    from dk_jax.train import setup
    from dk_jax.train.cold_start import ColdStartData

    corpus = workdir / "corpus.jsonl"
    if not corpus.exists():
        raise FileNotFoundError(f"{corpus}: no such file. Make it by scripts/train.py --mode=corpus with the same --config and --workdir")
    _check_recipe(cfg, workdir)
    out = workdir / "sft_data"
    out.mkdir(exist_ok=True)
    language, near = cfg.sandbox.language, _NEAR.value or None
    sets = setup.load_tasks(cfg)
    further = [cards.read_further(Path(path), language=language) for path in _FURTHER.value]
    own = cards.Origin(language=language)
    kernels = [(kernel, own) for kernel in load_kernels(corpus)] + [pair for file in further for pair in file.kernels]
    tasks = {task.name: task for task in (*sets.train, *sets.generated)}
    for file in further:
        tasks = {**file.tasks, **tasks}
    if unknown := sorted({kernel.task for kernel, _ in kernels} - tasks.keys()):
        raise ValueError(
            f"{len(unknown)} tasks with kernels are not among this recipe's training tasks and come without a reference, such as "
            f"{unknown[0]!r}: give the config, with its overrides, that {corpus} was made with"
        )
    stages: list[cards.Stage] = []

    def without(pairs: list, gone, name: str, of: str) -> list:
        left = [pair for i, pair in enumerate(pairs) if i not in gone]
        stages.append(cards.Stage(name=name, of=of, before=len(pairs), after=len(left)))
        return left

    # Contamination.
    all_held_out = [*sets.held_out, *(load_kernelbench(_KERNELBENCH.value, split="held_out") if _KERNELBENCH.value else [])]
    held_out = contamination.HeldOut(all_held_out)
    found = contamination.decontaminate(list(tasks.values()), held_out, threshold=_CONTAMINATED.value, least_operations=_LEAST.value)
    rows = [("task", nearest) for nearest in found.removed]
    stages.append(cards.Stage(name="contaminated", of="tasks", before=len(tasks), after=len(tasks) - len(found.tasks)))
    bad = contamination.contaminated_kernels([kernel for kernel, _ in kernels], found, held_out)
    rows += [("kernel", nearest) for nearest in bad.values()]
    kernels = without(kernels, bad, "contaminated", "kernels")

    # Duplicates among kernels, then the samples that are made of the others.
    twins = duplicates.deduplicate_kernels([kernel for kernel, _ in kernels], threshold=near, across_tasks=_ACROSS.value)
    removals = [("kernel", r, kernels[r.index][0], kernels[r.twin][0]) for r in twins.removals]
    kernels = without(kernels, {r.index for r in twins.removals}, "duplicates", "kernels")
    origin_of = {kernel.task: origin for kernel, origin in kernels}
    views = {name: task_view(tasks[name], language=language, form=cfg.sandbox.form) for name in origin_of}
    made = ColdStartData(cfg, sets, corpus).samples(views, [kernel for kernel, _ in kernels])
    samples = [(sample, origin_of[sample.task]) for sample in made] + [pair for file in further for pair in file.samples]
    bad = contamination.contaminated_samples([sample for sample, _ in samples], found, held_out)
    rows += [("sample", nearest) for nearest in bad.values()]
    samples = without(samples, bad, "contaminated", "samples")
    twins = duplicates.deduplicate_samples([sample for sample, _ in samples], threshold=near, across_tasks=_ACROSS.value)
    removals += [("sample", r, samples[r.index][0], samples[r.twin][0]) for r in twins.removals]
    samples = without(samples, {r.index for r in twins.removals}, "duplicates", "samples")

    # Diversity.
    codec = _codec(cfg, workdir, out, [text for sample, _ in samples for text in sample.texts])
    agents = tuple(agent for agent in _AGENTS.value if agent)
    config = DiversityConfig(
        agents=agents, style=cfg.style, min_cluster_size=_CLUSTER.value, max_share=_SHARE.value, max_multiple=_MULTIPLE.value
    )
    embed, by = _embedder(cfg, out, codec) if agents else (None, "nothing")
    _, report = filter_samples([sample for sample, _ in samples], config=config, embed=embed, seed=cfg.seed)
    samples = without(samples, set(range(len(samples))) - set(report.kept), "more of a topic", "samples")
    for part in report.agents:
        if config.max_share and part.after.largest_share > config.max_share + 1e-6:
            print(
                f"{part.agent}: a cluster has {part.after.largest_share:.0%} of what is left: --max_share={config.max_share:g} can't be met with "
                f"{len(part.topics)} clusters, of which none is thinned below the smallest",
                file=sys.stderr,
            )

    topics = setup.kernel_variants(language)[1]()
    card = cards.make_card(
        kernels,
        samples,
        kernel_topics=[[topic.topic for topic in lessons.taught_by(kernel, topics)] for kernel, _ in kernels],
        summary_topics=cards.summary_topics([sample for sample, _ in samples], topics, style=cfg.style),
        tokens=[_tokens(sample, codec) for sample, _ in samples],
        stages=stages,
        similarity_to_held_out=found.counts(),
        contaminated=[nearest for of, nearest in rows if of == "task"],
        diversity=report.agents,
        made_with={
            "embeddings": by, "near-duplicates from": str(near or "exact ones alone"), "contaminated from": str(_CONTAMINATED.value),
            "held-out tasks": str(len(all_held_out)), "most of a topic": str(_SHARE.value), "seed": str(cfg.seed),
        },
    )  # fmt: skip
    name = Path(config_flags.get_config_filename(flags.FLAGS["config"])).stem
    text = cards.card_markdown(card, name)
    flat = [project(part.points, method=_PROJECTION.value, seed=cfg.seed) for part in report.agents]
    _write(out / "data_card.json", json.dumps(card, indent=1) + "\n")
    _write(out / "data_card.md", text)
    _write(out / "topics.html", cards.topics_page(card, report.agents, flat, name=name, projection=_PROJECTION.value))
    _write(out / "contamination.jsonl", "".join(json.dumps({"of": of, **vars(nearest)}) + "\n" for of, nearest in rows))
    _write(out / "duplicates.jsonl", "".join(json.dumps(_removal(*row)) + "\n" for row in removals))
    print(text)
    print(f"-> {out}: data_card.md, data_card.json, topics.html, {len(removals)} duplicates, {len(rows)} contaminated")
    return 0


def _removal(of: str, removal, gone, twin) -> dict:
    """A duplicate as a line of the log: both texts, and how similar they are."""

    def said(one) -> str:
        return one.source if of == "kernel" else "\n\n".join(one.texts)

    measures = {"exact": removal.exact, "similarity": round(removal.similarity, 4)}
    return {"of": of, "task": gone.task, "twin_task": twin.task, **measures, "text": said(gone), "twin": said(twin)}


def _check_recipe(cfg, workdir: Path) -> None:
    """Whether the samples made here are the run's; a folder that a corpus was copied into has no recipe to compare with."""
    path = workdir / "config.json"
    if not path.exists():
        return
    run, here = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(cfg.to_dict()))
    differing = sorted(key for key in ("seed", "style", "tasks", "corpus") if run.get(key) != here[key])
    if differing:
        raise ValueError(f"{path} differs from --config in {', '.join(differing)}: give the config, with its overrides, that began the run")


def _codec(cfg, workdir: Path, out: Path, texts: list[str]):
    """The run's codec, or until it has one the same, kept beside what is written here."""
    from dk_jax.generation.tokenizer import load_codec
    from dk_jax.train.model import make_codec

    return load_codec(workdir / "codec") if (workdir / "codec" / "done").exists() else make_codec(cfg, out, lambda: texts)


def _embedder(cfg, out: Path, codec):
    """What embeds, and its name."""
    import jax
    import numpy as np

    from dk_jax.models.lora import combine
    from dk_jax.sft.embeddings import BackboneEmbedder, CachedEmbedder, sentence_embedder
    from dk_jax.train import model as models

    if _EMBEDDER.value:
        return CachedEmbedder(sentence_embedder(_EMBEDDER.value), out / "embeddings.npz", _EMBEDDER.value), _EMBEDDER.value
    models.check_source(cfg.model)
    if jax.default_backend() == "cpu":
        cfg.model.compute_dtype = "float32"  # CPUs have no fast products of less
    model = models.make_model(cfg, codec)
    params = combine(model.trainable, model.frozen)
    digest = hashlib.sha256(f"{model.config} {_MAX_TOKENS.value} {codec.vocab_size} {codec.encode('for (int i = 0; i < n; ++i)')}".encode())
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf[(0,) * (leaf.ndim - 1)][:256], np.float32).tobytes())
    by = f"the run's own model ({cfg.model.init}), before training"
    if cfg.model.init == "scratch" or cfg.model.source == "random":
        by += ": its weights are random, so texts are near for sharing tokens, and little more can be read from clusters"
        logging.getLogger("dk_jax").warning("embeddings by %s; --embedder=NAME takes a sentence-transformers model", by)
    embed = BackboneEmbedder(model.static, params, codec, length_step=128, max_tokens=_MAX_TOKENS.value)
    return CachedEmbedder(embed, out / "embeddings.npz", digest.hexdigest()), by


def _tokens(sample, codec) -> tuple[int, int]:
    from dk_jax.sft.samples import to_row

    row = to_row(sample, codec)
    return len(row.tokens), int(sum(row.loss))


def _write(path: Path, text: str) -> None:
    """Complete or not at all."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
