"""The speed model of scripts/bench/modelled_rl.py: what it sees in a kernel, and that it learns what threads are worth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dk_jax.rollout.trajectory import Verdict
from dk_jax.sft.cpp_kernels import cpp_variants
from dk_jax.tasks.builtin import builtin_suite
from sandbox.protocol import Options, RewardSpec
from scripts.bench import modelled_rl as modelled

TASKS = [t for t in builtin_suite("cpu").tasks if t.spec.kind in ("map", "norm")][:8]


def test_features_tell_the_techniques_apart_and_comments_do_not_count():
    task = TASKS[0]
    by_technique = {}
    for variant in cpp_variants(task):
        if variant.intent in ("good", "slow"):
            found = modelled.features(variant.source, "map")
            assert (found["inner_threads"] > 0) == ("inner_parallel" in variant.techniques), variant.source
            assert (found["lanes"] > 0) == ("simd" in variant.techniques), variant.source
            by_technique[variant.techniques] = found
    assert len({tuple(sorted(f.items())) for f in by_technique.values()}) > len(by_technique) // 2
    source = cpp_variants(task)[0].source
    longer = source.replace("// 1:", "// 1: out[i] % expf( += float a[9];")
    assert longer != source and modelled.features(longer, "map") == modelled.features(source, "map")


def test_the_model_recovers_what_techniques_are_worth():
    rng = np.random.default_rng(0)
    kernels = []
    for task in TASKS:
        for variant in cpp_variants(task):
            if variant.intent in ("good", "slow"):
                worth = 1.5 * ("simd" in variant.techniques) - 2.0 * ("inner_parallel" in variant.techniques)
                kernels.append((variant.source, task.spec.kind, math.exp(worth + 0.05 * rng.normal()), task.name))
    error, spread = modelled.error_on_new_tasks(kernels)
    assert error < 0.3 * spread
    model = modelled.SpeedModel.fit([row[:3] for row in kernels])
    variants = cpp_variants(TASKS[0])
    fast = next(v.source for v in variants if "simd" in v.techniques and "inner_parallel" not in v.techniques)
    slow = next(v.source for v in variants if "simd" not in v.techniques)
    assert model.draw(fast, TASKS[0]) > 2 * model.draw(slow, TASKS[0])
    assert model.draw(fast, TASKS[0]) == model.draw(fast, TASKS[0])


def test_a_wrong_kernel_gets_no_speed_and_a_right_one_the_reward_of_its_own():
    options = Options(reward=RewardSpec(w_correct=0.5, w_speed=0.5, w_coverage=0.0, speedup_cap=4.0))
    judge = modelled.ModelledJudge(
        client=None, device="cpu", language="cpp", form="kernel", options=options, verify_options=options,
        model=modelled.SpeedModel({"one": math.log(3.0)}, 0.0),
    )  # fmt: skip
    plain = Verdict(outcome="ok", stage="correct", reward=0.5, speedup=0.0, noisy=False, coverage=None, feedback="correct; speed was not measured")
    right = judge._with_speed(plain, TASKS[0], "kernel")
    assert right.speedup == pytest.approx(3.0, rel=0.5) and right.reward == pytest.approx(0.5 + 0.5 * right.speedup)
    assert right.feedback == f"correct; {right.speedup:.2f}x faster than eager"
    wrong = Verdict.without_kernel("nothing")
    assert judge._with_speed(wrong, TASKS[0], "kernel") is wrong
