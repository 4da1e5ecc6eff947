"""Generated Triton modules are what they mean to be, in the interpreter and compiled for a real GPU."""

import dataclasses
import functools
import json
import os
import random
import subprocess
import sys

import pytest

from dk_jax.sft.triton_kernels import TECHNIQUES, triton_variants
from dk_jax.sft.triton_plan import plan
from dk_jax.sft.triton_topics import triton_catalogue
from dk_jax.skills.record import sections, validate_draft
from dk_jax.tasks.builtin import builtin_suite
from dk_jax.tasks.generate import generate_tasks
from dk_jax.tasks.render import render_reference
from dk_jax.tasks.spec import Branch, ColReduce, Linear, Matmul, OpSpec, Transpose

# Reads [[reference, source], ...] and prints for each: ok, incorrect, or the error. Unwritten memory is NaN.
INTERPRET = """
import importlib.util, json, sys, tempfile, warnings
import torch
warnings.simplefilter("ignore")
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True
folder = tempfile.mkdtemp()
def load(source, name):
    path = f"{folder}/{name}.py"
    open(path, "w").write(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
@torch.no_grad()
def verdict(reference, source, name):
    task = load(reference, "task_" + name)
    torch.manual_seed(1)
    model = task.Model()
    torch.manual_seed(2)
    inputs = task.get_inputs()
    expected = model(*inputs)
    try:
        module = load(source, "candidate_" + name)
        torch.manual_seed(1)
        found = module.ModelNew()(*[value.clone() for value in inputs])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    same = found.shape == expected.shape and torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
    return "ok" if same else "incorrect"
for index, (reference, source) in enumerate(json.load(sys.stdin)):
    print(json.dumps(verdict(reference, source, str(index))), flush=True)
"""

# Reads [[shapes, source], ...] and prints for each whether all that forward launches compiles for an H100.
COMPILE = """
import json, sys
import torch
from sandbox.build.triton import aot_compile
torch.set_default_device("meta")
for shapes, source in json.load(sys.stdin):
    try:
        report = aot_compile(source, "sm_90", args=[torch.empty(shape) for shape in shapes])
        said = "ok" if report.compiles and not report.stopped else report.summary() + report.stopped
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps(said), flush=True)
"""


def ask(script, jobs, **environment):
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def shrunk(task):
    """The same composition with small sizes that no block divides, and rows longer than a small block."""
    kinds = {type(stage) for stage in task.spec.stages}
    rows, extents = 5, [1302]
    if kinds & {Linear, Matmul}:
        rows, extents = 70, [16, 50, 90] if "attention" in task.name else [300, 70, 48]
    elif kinds & {ColReduce, Transpose}:
        rows, extents = 150, [70]
    names = {}

    def extent(size):
        return names.setdefault(size, extents[len(names) % len(extents)])

    def stage_of(stage):
        if isinstance(stage, Branch):
            return dataclasses.replace(stage, stages=tuple(map(stage_of, stage.stages)))
        return (
            dataclasses.replace(stage, width=extent(stage.width))
            if isinstance(stage, Linear | Matmul)
            else stage
        )

    cols = extent(task.spec.cols)
    spec = OpSpec(rows=rows, cols=cols, stages=tuple(map(stage_of, task.spec.stages)), draw=task.spec.draw)
    return dataclasses.replace(task, spec=spec, reference=render_reference(spec, "Small."))


@functools.cache
def sample():
    """Small tasks with modules: of each family a right one, every technique at least once, and mistakes."""
    rng, suite = random.Random(5), builtin_suite("gpu")
    pairs, missing = [], set(TECHNIQUES)
    for family in suite.families:
        task = shrunk(suite.by_family(family)[0])
        by_intent = {}
        for variant in triton_variants(task):
            by_intent.setdefault(variant.intent, []).append(variant)
        rights = by_intent["good"] + by_intent["slow"]
        rng.shuffle(rights)
        best = max(rights, key=lambda variant: len(variant.techniques & missing))
        missing -= best.techniques
        pairs.append((task, best))
        if rng.random() < 0.5:
            pairs.append((task, rng.choice(by_intent[rng.choice(["wrong", "wrong", "broken"])])))
    assert not missing
    return pairs


def test_every_task_has_modules_of_every_intent_that_differ():
    for task in [*builtin_suite("gpu"), *generate_tasks(3, 60, "gpu")]:
        variants = triton_variants(task)
        assert {variant.intent for variant in variants} == {"good", "slow", "wrong", "broken"}, task.name
        assert len({variant.source for variant in variants}) == len(variants)
        assert all(variant.techniques <= TECHNIQUES.keys() for variant in variants)
        assert variants == triton_variants(task)


def test_good_and_slow_modules_compute_the_reference_and_mistakes_do_not():
    pairs = sample()
    said = ask(INTERPRET, [[task.reference, variant.source] for task, variant in pairs], TRITON_INTERPRET="1")
    for (task, variant), verdict in zip(pairs, said, strict=True):
        if variant.intent in ("good", "slow"):
            expected = verdict == "ok"
        elif variant.intent == "wrong":
            # The interpreter computes TF32 products in float32; only the hardware shows that mistake.
            expected = verdict == "incorrect" or '"tf32"' in variant.source
        else:
            expected = verdict not in ("ok", "incorrect")
        assert expected, f"{task.name}: meant to be {variant.intent}, is {verdict}\n{variant.source}"


def test_kernels_compile_for_a_real_gpu_at_the_sizes_of_their_tasks():
    rng, jobs, wanted, missing = random.Random(6), [], [], set(TECHNIQUES)
    suite = builtin_suite("gpu")
    for task in suite:
        shapes = [argument.shape for argument in task.spec.arguments if not argument.parameter]
        variants = triton_variants(task)
        for variant in variants:
            if variant.intent in ("good", "slow") and len(variant.techniques & missing) > 1:
                missing -= variant.techniques
                jobs.append([shapes, variant.source])
                wanted.append(True)
        if rng.random() < 0.06:
            broken = next(variant for variant in variants if variant.intent == "broken")
            jobs.append([shapes, broken.source])
            wanted.append(False)
    assert wanted.count(True) > 8 and wanted.count(False) > 2
    for (_, source), expected, said in zip(jobs, wanted, ask(COMPILE, jobs), strict=True):
        assert (said == "ok") == expected, f"{said}\n{source}"


@pytest.mark.parametrize(
    "name, fused, separate", [("mlp_relu", 2, 5), ("conv_pool_mean_relu", 3, 5), ("softmax_wide", 1, 1)]
)
def test_a_plan_is_as_many_kernels_as_its_cut_says(name, fused, separate):
    spec = builtin_suite("gpu").get(name).spec
    assert [len(plan(spec)), len(plan(spec, fuse=False))] == [fused, separate]
    assert plan(spec)[-1].target == "out" and plan(spec)[-1].out_shape == spec.out_shape


def test_topics_are_valid_skills_about_known_techniques():
    drafts = [draft for topic in triton_catalogue() for draft in topic.phrasings]
    assert len({draft.name for draft in drafts}) == len(drafts)
    for topic in triton_catalogue():
        assert topic.techniques <= TECHNIQUES.keys() and len(topic.phrasings) >= 2
    for draft in drafts:
        assert not validate_draft(draft)
        assert all(len(text.split()) < 160 for text in sections(draft.content).values())
