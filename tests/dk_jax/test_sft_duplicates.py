"""Kernels and samples that are the same: which stay, and from which similarity on."""

from __future__ import annotations

import random

import pytest

from dk_jax.rollout.trajectory import Verdict
from dk_jax.sft.contamination import HeldOut, decontaminate
from dk_jax.sft.duplicates import deduplicate_kernels, deduplicate_samples, similarity
from dk_jax.sft.judged import JudgedKernel
from dk_jax.sft.samples import Sample
from dk_jax.tasks.builtin import builtin_suite

TRITON = '''
import torch
import torch.nn as nn
import triton
import triton.language as tl


@triton.jit
def scale_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Twice the input."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n  # the last block
    v = tl.load(x_ptr + i, mask=mask)
    tl.store(out_ptr + i, v * 2.0 - 1e-5, mask=mask)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        n = x.numel()
        grid = lambda meta: (triton.cdiv(n, meta["BLOCK"]),)
        scale_kernel[grid](x, out, n, BLOCK=0x400, num_warps=8)
        self.calls += 1
        return self._checked(out)

    def _checked(self, out):
        return out
'''

SAME_TRITON = """
from triton import cdiv, jit
import triton.language as lang
from torch import empty_like, nn


@jit
def double(source, target, count, SIZE: lang.constexpr):
    where = lang.program_id(0) * SIZE + lang.arange(0, SIZE)
    inside = (where < count)

    value = lang.load(source + where, mask=inside)
    lang.store(target + where, value * 2. - 0.00001, mask=inside)


class Fast(nn.Module):
    '''Other words.'''

    def __init__(this):
        super().__init__()
        this.counter: int = 0

    def forward(this, tensor):
        result = empty_like(tensor)
        total = tensor.numel()
        launch = lambda config: (cdiv(total, config['SIZE']),)
        double[launch](tensor, result, total, SIZE=1024, num_warps=8)
        this.counter += 1
        return this.look(result)

    def look(this, result):
        return result
"""

CPP = """
#include <cmath>
// rows of a softmax
#define LANES 8
extern "C" void kernel(const float* x, const float* y, float* out) {
    long rows = 64, cols = 0x80;   /* sizes */
    for (long r = 0; r < rows; ++r) {
        float best = -1e30f;
        for (int i = 0; i < cols; i++) best = fmaxf(best, x[r * cols + i]);
        out[r] = best + 1.0f * expf(y[r]);
    }
}
"""

SAME_CPP = """
#include <cmath>
#define WIDTH 8
extern "C" void kernel(const float *a, const float *b,
                       float *res)
{
    long n = 64, m = 128;
    for (long row = 0; row < n; ++row)
    {
        float top = -1.0e+30F;
        for (int col = 0; col < m; col++)
            top = fmaxf(top, a[row * m + col]);
        res[row] = top + 1.f * expf(b[row]);
    }
}
"""

CUDA = '''
import torch
from torch.utils.cpp_extension import load_inline

source = r"""
#include <torch/extension.h>
__global__ void __launch_bounds__(256) add_one(const float* __restrict__ x, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, step = 1;
    if (i < n) out[i] = x[i] + step;  // one more
}
torch::Tensor run(torch::Tensor x) {
    auto out = torch::empty_like(x);
    add_one<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.numel());
    return out;
}
"""
ext = load_inline(name="one", cpp_sources="torch::Tensor run(torch::Tensor x);", cuda_sources=source, functions=["run"])


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return ext.run(x)
'''


def kernel(source: str, *, task: str = "t", correct: bool = True, speedup: float = 1.0) -> JudgedKernel:
    verdict = Verdict(
        outcome="ok" if correct else "incorrect", stage="timed", reward=1.0, speedup=speedup, noisy=False, coverage=None, feedback=""
    )
    return JudgedKernel(task=task, source=source, techniques=(), intent="good", verdict=verdict)


def test_of_equal_kernels_the_correct_then_the_fastest_then_the_first_stays():
    kernels = [
        kernel(TRITON, correct=False, speedup=0.0),
        kernel(TRITON, speedup=1.5),
        kernel(SAME_TRITON, speedup=2.0),
        kernel(TRITON, speedup=2.0),
        kernel(CPP),
    ]
    found = deduplicate_kernels(kernels)
    assert found.kept == (2, 4)
    assert [(r.index, r.twin, r.exact, r.similarity) for r in found.removals] == [(i, 2, True, 1.0) for i in (0, 1, 3)]


def test_near_duplicates_are_found_from_the_threshold_on_and_wrong_kernels_stay_beside_right_ones():
    other = TRITON.replace("num_warps=8", "num_warps=4")
    degree = similarity(TRITON, other)
    assert 0.9 < degree < 1.0
    found = deduplicate_kernels([kernel(TRITON), kernel(other)], threshold=degree)
    assert found.kept == (0,) and found.removals[0].similarity == degree and not found.removals[0].exact
    assert deduplicate_kernels([kernel(TRITON), kernel(other)], threshold=degree + 0.01).kept == (0, 1)
    assert deduplicate_kernels([kernel(TRITON), kernel(other)], threshold=None).kept == (0, 1)
    assert deduplicate_kernels([kernel(TRITON), kernel(other, correct=False)], threshold=0.5).kept == (0, 1)


def test_kernels_of_different_tasks_are_compared_where_that_is_asked_for():
    kernels = [kernel(TRITON, task="a"), kernel(SAME_TRITON, task="b")]
    assert deduplicate_kernels(kernels).kept == (0, 1)
    assert deduplicate_kernels(kernels, across_tasks=True).kept == (0,)


def test_of_many_texts_exactly_the_similar_ones_are_found():
    """More than are compared one by one; the similarities are those of a direct comparison."""
    rng = random.Random(0)
    texts = [" ".join(str(rng.randrange(10**6)) for _ in range(120)) for _ in range(150)]
    twins = {}
    for i in range(0, 150, 3):
        words = texts[i].split()
        for at in rng.sample(range(0, 120, 6), k=rng.choice((1, 2, 8))):
            words[at] = "changed"
        twins[len(texts)] = i
        texts.append(" ".join(words))
    found = deduplicate_kernels([kernel(f"{text} )") for text in texts], threshold=0.85)
    wanted = {i: similarity(f"{texts[i]} )", f"{texts[twin]} )") for i, twin in twins.items()}
    assert {r.index: (r.twin, r.similarity) for r in found.removals} == {i: (twins[i], s) for i, s in wanted.items() if s >= 0.85}
    assert 10 < len(found.removals) < len(twins), "some of the altered texts are similar, and some are not"


def sample(prompt: str, answer: str, *, agent: str = "policy", task: str = "t", imitated: bool = True) -> Sample:
    return Sample(agent=agent, kind=agent, task=task, turns=((prompt, answer, imitated),))


def test_samples_are_the_same_where_prompt_and_answer_are():
    asked = f"Write a kernel for task t.\n```python\n{TRITON}\n```"
    again = f"Write a kernel  for task other.\n```python\n{SAME_TRITON}\n```"
    samples = [
        sample(asked, f"```python\n{TRITON}```"),
        sample(again, f"```python\n{SAME_TRITON}```", task="other"),
        sample(asked, f"```python\n{TRITON}```", imitated=False),
        sample(asked, f"```python\n{CUDA}```"),
        sample(f"{asked}\nUse float4.", f"```python\n{TRITON}```"),
        sample(asked, f"```python\n{TRITON}```", agent="summary"),
        sample(asked, CPP),
        sample(asked, SAME_CPP),
    ]
    found = deduplicate_samples(samples, threshold=None)
    assert [(r.index, r.twin) for r in found.removals] == [(1, 0), (7, 6)]
    assert deduplicate_samples(samples, threshold=None, rewards=[0, 1, 0, 0, 0, 0, 0, 0]).kept == (1, 2, 3, 4, 5, 6)


def test_samples_are_near_duplicates_only_if_prompts_and_answers_both_are():
    prompt, answer = (" ".join(f"{word}{i}" for i in range(100)) for word in ("ask", "say"))
    samples = [
        sample(prompt, answer, agent="summary"),
        sample(prompt, answer.replace("say50 ", "said "), agent="summary"),
        sample(prompt, " ".join(reversed(answer.split())), agent="summary"),
        sample(" ".join(reversed(prompt.split())), answer, agent="summary"),
    ]
    found = deduplicate_samples(samples, threshold=0.85)
    assert [(r.index, r.twin, r.exact) for r in found.removals] == [(1, 0, False)]


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.1])
def test_a_threshold_out_of_range_is_refused(threshold):
    for deduplicate in (deduplicate_kernels, deduplicate_samples):
        with pytest.raises(ValueError, match="threshold"):
            deduplicate([], threshold=threshold)
    with pytest.raises(ValueError, match="threshold"):
        decontaminate([], HeldOut(builtin_suite("cpu").held_out), threshold=threshold)
