"""The same program in other names, comments and spellings has the same normal form, and any other has another."""

from __future__ import annotations

import ast
import io
import itertools
import random
import tokenize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dk_jax.sft.cpp_kernels import cpp_variants
from dk_jax.sft.duplicates import similarity
from dk_jax.sft.normal_form import normal_form
from dk_jax.sft.triton_kernels import triton_variants
from dk_jax.tasks.builtin import builtin_suite
from dk_jax.tasks.generate import generate_tasks
from tests.dk_jax.test_sft_duplicates import CPP, CUDA, SAME_CPP, SAME_TRITON, TRITON

SAME_CUDA = '''
import torch
from torch.utils.cpp_extension import load_inline

text = """
#include <torch/extension.h>
__global__ void __launch_bounds__(256) plus_kernel(const float* __restrict__ in, float* result, int size) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x, by = 1;
    if (at < size)
        result[at] = in[at] + by;
}
torch::Tensor plus(torch::Tensor input) {
    auto result = torch::empty_like(input);
    plus_kernel<<<(input.numel() + 255) / 256, 256>>>(input.data_ptr<float>(), result.data_ptr<float>(), input.numel());
    return result;
}
"""
module = load_inline(
    name="another_name", cpp_sources="torch::Tensor plus(torch::Tensor input);", cuda_sources=text, functions=["plus"]
)


class ModelNew(torch.nn.Module):
    def forward(self, tensor):
        return module.plus(tensor)
'''


def test_triton_kernels_in_other_names_hints_imports_and_spellings_are_the_same():
    assert normal_form(TRITON) == normal_form(SAME_TRITON)
    assert similarity(TRITON, SAME_TRITON) == 1.0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("v * 2.0 - 1e-5", "v * 2.0 - 1e-6"),
        ("v * 2.0 - 1e-5", "1e-5 - v * 2.0"),
        ("v * 2.0", "i * 2.0"),
        ("i < n", "i <= n"),
        ("mask=mask)\n    tl.store", "mask=mask, other=0.0)\n    tl.store"),
        ("num_warps=8", "num_warps=4"),
        ("(x, out, n,", "(out, x, n,"),
        ("BLOCK: tl.constexpr", "BLOCK"),
        ("torch.empty_like", "torch.zeros_like"),
        ("tl.arange", "torch.arange"),
        ('meta["BLOCK"]', 'meta["n"]'),
    ],
)
def test_what_changes_the_program_changes_its_normal_form(old, new):
    assert old in TRITON
    assert normal_form(TRITON) != normal_form(TRITON.replace(old, new, 1))


def test_cpp_kernels_in_other_names_layout_and_number_spellings_are_the_same():
    assert normal_form(CPP) == normal_form(SAME_CPP)


@pytest.mark.parametrize(
    ("old", "new"),
    [("expf", "tanhf"), ("fmaxf", "fminf"), ("1.0f", "1.0"), ("float best", "double best"), ("best + ", "best - "), ("y[r]", "x[r]")],
)
def test_names_of_libraries_types_and_operators_of_cpp_stay(old, new):
    assert normal_form(CPP) != normal_form(CPP.replace(old, new, 1))


def test_what_is_not_declared_in_the_text_is_not_renamed():
    """Were it, exp and tanh of one variable would be the same kernel."""
    form = normal_form("float f(float h_t, float c) { return h_t * tanhf(c) + threadIdx.x; }")
    assert "tanhf" in form and "threadIdx . x" in form and "h_t" not in form


def test_cuda_in_strings_is_read_as_cuda_and_follows_into_the_calls():
    assert normal_form(CUDA) == normal_form(SAME_CUDA)
    assert normal_form(CUDA) != normal_form(CUDA.replace("x[i] + step", "x[i] - step"))
    assert normal_form(CUDA) != normal_form(CUDA.replace("__restrict__ ", ""))


@pytest.mark.parametrize("source", ["", "def f(:\n  # nothing\n", "\0", "(" * 5000, "int f() { /* open", '"' * 999, "x = 1 +\n" * 9])
def test_no_text_is_too_broken_to_compare(source):
    assert normal_form(source) == normal_form(source + "\n")


def _renamed(source: str, rng: random.Random) -> str:
    """A Python source with other names for all that it binds, comments, and blank lines."""
    tree = ast.parse(source)
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)} | {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    bound -= {k.arg for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) for k in n.keywords}  # mask=mask
    names = {name: f"{rng.choice('abcdefg')}_{i}_{rng.randrange(99)}" for i, name in enumerate(sorted(bound))}
    out, before = [], ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        keep = token.type != tokenize.NAME or before == "." or token.string not in names
        out.append((token.type, token.string if keep else names[token.string]))
        before = token.string
    lines = tokenize.untokenize(out).splitlines()
    return "\n".join(f"{line}  # {rng.randrange(9)}\n" if line.strip() and not line.endswith("\\") else line for line in lines)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_generated_triton_kernels_are_the_same_in_random_names(seed):
    rng = random.Random(seed)
    [task] = generate_tasks(seed % 50, 1, "small")
    source = rng.choice([v for v in triton_variants(task) if v.intent in ("good", "slow")]).source
    assert normal_form(_renamed(source, rng)) == normal_form(source)
    constants = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, int | float)]
    node = rng.choice(constants)
    lines = source.splitlines()
    line = lines[node.lineno - 1]
    lines[node.lineno - 1] = f"{line[: node.col_offset]}{node.value + 1}{line[node.end_col_offset :]}"
    assert normal_form("\n".join(lines)) != normal_form(source), "one constant differs"


def test_different_generated_kernels_have_different_normal_forms():
    """Of one task; by their own authors' account they differ in more than names."""
    for task, variants in itertools.product(builtin_suite("cpu").train[::12], (triton_variants, cpp_variants)):
        sources = [v.source for v in variants(task)]
        forms = {normal_form(source) for source in sources}
        assert len(forms) == len(set(sources)), task.name
