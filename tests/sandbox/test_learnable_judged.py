"""Kernels of the learnable set, judged by a real sandbox: experts are right and compile for an H100, wrong ones are seen to be."""

from __future__ import annotations

import pytest

from dk_jax.evaluation.scripted_policy import kernels_of
from dk_jax.sft.triton_kernels import triton_variants
from dk_jax.tasks.learnable import learnable_tasks
from sandbox.protocol import Candidate, Options, TaskSpec


@pytest.mark.parametrize("name", ["few_long_rows_softplus_product", "norm_then_reduction_softmax_pooling"])
def test_the_expert_is_right_and_a_wrong_kernel_is_not(sandbox, name):
    [task] = [task for task in learnable_tasks("small") if task.name == name]
    variants = triton_variants(task)
    wrong = next(source for source in kernels_of("wrong", variants, task.family) if '"tf32"' not in source)
    candidates = [Candidate(source=source, language="triton") for source in (kernels_of("expert", variants, task.family)[0], wrong)]
    options = Options(timing="none", target_arch="sm_90", admit=True)
    expert, mistaken = sandbox.evaluate(TaskSpec(reference=task.reference, name=task.name), candidates, options)
    assert expert.outcome == "ok" and "compiles for sm_90: yes" in expert.feedback
    assert mistaken.outcome == "incorrect"
