"""Which kernels the cold start's corpus holds, what is asked of the judge, and what samples come of the verdicts."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from dk_jax.agents.policy import KEEP
from dk_jax.rollout.episode import task_view
from dk_jax.rollout.trajectory import Verdict
from dk_jax.sft.corpus import CorpusConfig, CorpusError, choose, choose_all, judge_all
from dk_jax.sft.judged import load_kernels, save_kernels
from dk_jax.sft.samples import SampleConfig, make_samples
from dk_jax.sft.skill_topics import skill_catalogue
from dk_jax.tasks.builtin import builtin_suite


@dataclasses.dataclass(frozen=True)
class Kernel:
    source: str
    techniques: frozenset[str]
    intent: str = "good"


VARIANTS = [
    Kernel("plain a", frozenset(), "slow"),
    Kernel("plain b", frozenset(), "slow"),
    Kernel("simd", frozenset({"simd"})),
    Kernel("parallel", frozenset({"parallel"})),
    Kernel("both a", frozenset({"simd", "parallel"})),
    Kernel("both b", frozenset({"simd", "parallel"})),
    Kernel("off by one", frozenset(), "wrong"),
    Kernel("no semicolon", frozenset(), "broken"),
]
WRONG = {"off by one", "no semicolon"}


class Judge:
    """Says of each kernel what its text means; times only where it is asked to."""

    def __init__(self):
        self.asked = []

    def evaluate(self, requests, *, phase, progress=None, timed=True, trusted=False):
        assert trusted
        out = []
        for request in requests:
            self.asked.append((request.task.name, request.source, timed))
            ok = request.source not in WRONG
            out.append(
                Verdict(
                    outcome="ok" if ok else "incorrect", stage="timed" if ok and timed else "correct", reward=float(ok),
                    speedup=(3.0 if "both" in request.source else 0.8) if ok and timed else 0.0,
                    noisy=False, coverage=None, feedback="correct" if ok else "wrong result",
                )
            )  # fmt: skip
            if progress is not None:
                progress(1)
        return out


def test_right_kernels_are_spread_over_technique_sets():
    for seed in range(20):
        picked = choose(VARIANTS, 4, wrong_share=0.0, rng=np.random.default_rng(seed))
        assert len({v.techniques for v in picked}) == 4, picked
    picked = choose(VARIANTS, 100, wrong_share=0.0, rng=np.random.default_rng(0))
    assert sorted(v.source for v in picked) == sorted(v.source for v in VARIANTS if v.source not in WRONG)


def test_a_single_kernel_is_of_every_technique_set_now_and_then_and_never_a_wrong_one():
    seen = {choose(VARIANTS, 1, wrong_share=0.0, rng=np.random.default_rng(s))[0].techniques for s in range(60)}
    assert len(seen) == 4
    for seed in range(20):
        assert choose(VARIANTS, 1, wrong_share=1.0, rng=np.random.default_rng(seed))[0].source not in WRONG


def test_wrong_kernels_come_on_top_by_their_share():
    counts = [
        sum(v.source in WRONG for v in choose(VARIANTS, 2, wrong_share=0.25, rng=np.random.default_rng(s))) for s in range(400)
    ]
    assert np.mean(counts) == pytest.approx(0.5, abs=0.1)


def test_only_the_first_tasks_are_timed_and_the_others_get_fewer_kernels():
    tasks = [SimpleNamespace(name=f"t{i}") for i in range(5)]
    config = CorpusConfig(timed_tasks=2, variants_per_task=3, untimed_variants=1, wrong_share=0.0)
    chosen = choose_all(tasks, lambda task: VARIANTS, config=config, seed=3)
    assert [c.task.name for c in chosen if c.timed] == ["t0"] * 3 + ["t1"] * 3
    assert [c.task.name for c in chosen if not c.timed] == ["t2", "t3", "t4"]
    assert chosen == choose_all(tasks, lambda task: VARIANTS, config=config, seed=3)

    judge, ticks = Judge(), []
    kernels, counts = judge_all(chosen, judge, progress=ticks.append)
    assert sum(ticks) == 9 and counts["kernels"] == counts["correct"] == 9 and counts["tasks"] == 5
    assert {(name, timed) for name, _, timed in judge.asked} == {
        ("t0", True), ("t1", True), ("t2", False), ("t3", False), ("t4", False),
    }  # fmt: skip
    assert all((k.verdict.speedup > 0) == (k.task in ("t0", "t1")) for k in kernels)


def test_a_verdict_against_the_intent_is_counted_and_no_correct_kernel_at_all_is_an_error():
    config = CorpusConfig(timed_tasks=1, variants_per_task=1, untimed_variants=1, wrong_share=0.0)
    task = [SimpleNamespace(name="t")]
    variants = [Kernel("off by one", frozenset(), "good"), Kernel("plain", frozenset({"x"}))]
    chosen = choose_all(task, lambda _: variants, config=dataclasses.replace(config, variants_per_task=2), seed=0)
    _, counts = judge_all(chosen, Judge())
    assert counts["surprises"] == 1 and counts["kernels"] == 2
    with pytest.raises(CorpusError, match="none of 1 generated kernels was judged correct"):
        judge_all(choose_all(task, lambda _: [Kernel("off by one", frozenset(), "good")], config=config, seed=0), Judge())


def test_untimed_tasks_teach_to_write_and_repair_but_not_what_is_fast(tmp_path):
    tasks = builtin_suite("cpu").tasks[:6]
    views = {t.name: task_view(t, language="cpp", form="kernel") for t in tasks}
    config = CorpusConfig(timed_tasks=3, variants_per_task=4, untimed_variants=1, wrong_share=1.0)
    kernels, _ = judge_all(choose_all(tasks, lambda task: VARIANTS, config=config, seed=1), Judge())
    save_kernels(tmp_path / "corpus.jsonl", kernels)
    kernels = load_kernels(tmp_path / "corpus.jsonl")
    style = SampleConfig(
        style="compact", samples_per_task=4, untimed_samples=2, selection_samples=1, summary_samples=1, wrong_share=0.5,
        max_skills=2, headers=4,
    )  # fmt: skip
    samples = make_samples(views, kernels, skill_catalogue(), config=style, seed=0)
    untimed = [s for s in samples if s.task in {t.name for t in tasks[3:]}]
    assert len(untimed) == 6 and {s.agent for s in untimed} == {"policy"}
    for sample in untimed:
        first_prompt, first, imitated = sample.turns[0]
        if imitated:
            assert len(sample.turns) == 1
        else:
            (prompt, answer, repaired) = sample.turns[1]
            assert repaired and "wrong" in prompt and answer not in WRONG
    assert any(len(s.turns) == 2 for s in untimed)
    timed = [s for s in samples if s.task in {t.name for t in tasks[:3]}]
    assert {s.agent for s in timed} >= {"policy", "selection"}
    assert all(len(s.turns) == 2 for s in timed if s.agent == "policy")
    best = {t: max((k for k in kernels if k.task == t and k.verdict.correct), key=lambda k: k.verdict.speedup) for t in {s.task for s in timed}}
    pairs = {(s.task, s.turns[0][1].strip(), s.turns[1][1].strip()) for s in timed if s.agent == "policy" and s.turns[0][2]}
    assert {second == KEEP for _, _, second in pairs} == {True, False}
    for task, first, second in pairs:  # what is best is kept, and nothing is written twice
        assert second != first and (second == KEEP or first != best[task].source.strip())
