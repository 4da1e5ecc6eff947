"""What counts as the same kernel, sample or task, what stays of several, and what of training data is a held-out task in other words."""

from __future__ import annotations

import ast
import dataclasses
import io
import itertools
import random
import tokenize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dk_jax.rollout.trajectory import Verdict
from dk_jax.sft import duplicates
from dk_jax.sft.contamination import HeldOut, contaminated_kernels, contaminated_samples, decontaminate, operation_similarity
from dk_jax.sft.cpp_kernels import cpp_variants
from dk_jax.sft.duplicates import deduplicate_kernels, deduplicate_samples, similarity
from dk_jax.sft.judged import JudgedKernel
from dk_jax.sft.normal_form import normal_form
from dk_jax.sft.operations import operations
from dk_jax.sft.samples import Sample
from dk_jax.sft.triton_kernels import triton_variants
from dk_jax.tasks.builtin import builtin_suite, held_out_structures
from dk_jax.tasks.generate import generate_tasks
from dk_jax.tasks.kernelbench import load_kernelbench
from dk_jax.tasks.task import Task

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


# --- normal forms -------------------------------------------------------------------------------------------------------------


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


# --- duplicates ---------------------------------------------------------------------------------------------------------------


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


# --- contamination ------------------------------------------------------------------------------------------------------------


def reference(body: str, *, init: str = "pass", arguments: str = "x, y=None", before: str = "") -> str:
    head = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
    model = f"class Model(nn.Module):\n    def __init__(self, n=4):\n        super().__init__()\n        {init}\n"
    model += f"    def forward(self, {arguments}):\n"
    inputs = "def get_inputs():\n    return []\ndef get_init_inputs():\n    return []\n"
    return head + before + model + "".join(f"        {line}\n" for line in body.split("\n")) + inputs


def task(name: str, source: str) -> Task:
    return Task(name=name, level=2, family=name, split="train", reference=source)


SAME_OPERATIONS = {
    "function, method, layer and alias": [
        reference("return torch.relu(x)"),
        reference("return x.relu()"),
        reference("return F.relu(x, inplace=True)"),
        reference("out = self.act(x)\nreturn out", init="self.act = nn.ReLU()"),
        reference("return relu(x)", before="from torch.nn.functional import relu\n"),
        reference("return f(x)", before="def f(t):\n    return t.clone().relu_()\n"),
    ],
    "one expression or many": [
        reference("x = x + y\nx = F.silu(x)\nreturn torch.softmax(x * 2.0, dim=-1)"),
        reference("return nn.Softmax(dim=1)(F.silu(torch.add(x, y)) / 0.25)"),
        reference("z = (x + y)\nz *= torch.sigmoid(z)\nz = 3 * z.contiguous().view(-1, 4)\nreturn z.softmax(-1)"),
    ],
    "silu and mish by name or by what they are made of": [
        reference("return F.mish(F.silu(x)) + x"),
        reference("h = x * torch.sigmoid(x)\nh = h * torch.tanh(F.softplus(h))\nreturn x + h"),
    ],
    "layers in lists, loops and submodules": [
        reference("return self.b(F.gelu(self.a(x)))", init="self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)"),
        reference("return self.net(x)", init="self.net = nn.Sequential(nn.Linear(n, 9), nn.GELU(), nn.Linear(9, n))"),
        reference(
            "for layer in self.layers:\n    x = layer(x)\nreturn x", init="self.layers = nn.ModuleList([nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)])"
        ),
        reference(
            "return self.block(x)",
            init="self.block = Block(4)",
            before="class Block(nn.Module):\n    def __init__(self, d):\n        super().__init__()\n        layers = [nn.Linear(d, d)]\n"
            "        layers.append(nn.GELU())\n        self.net = nn.Sequential(*layers, nn.Linear(d, d))\n    def forward(self, t):\n"
            "        return self.net(t)\n",
        ),
    ],
}


@pytest.mark.parametrize("sources", SAME_OPERATIONS.values(), ids=SAME_OPERATIONS.keys())
def test_operations_are_the_same_however_they_are_written(sources):
    assert len({operations(source) for source in sources}) == 1, [operations(source) for source in sources]


def test_operations_tell_their_order_their_operands_and_what_they_go_along():
    bodies = (
        "return torch.relu(x) + y", "return torch.relu(x + y)", "return torch.relu(x) + x", "return torch.relu(x) + 1", "return torch.relu(x) - y",
        "return y - torch.relu(x)", "return x.sum(dim=0)", "return x.sum(dim=-1)", "return x.sum()", "return F.gelu(x)",
        'return F.gelu(x, approximate="tanh")', "return F.normalize(x)", "return F.normalize(x, p=1.0)", "return x * y",
        "return x * x", "return x @ y", "return x @ y.t()",
    )  # fmt: skip
    assert len({operations(reference(body)) for body in bodies}) == len(bodies)
    told = operations(reference("h = F.silu(x + y)\nh = F.normalize(h, dim=-1) * z\nreturn h + x", arguments="x, y, z"))
    assert told == ("add:tt", "silu:p", "normalize:p", "mul:pt", "add:ap")
    assert operations(reference("return x")) == ()


def test_similarity_of_operations_counts_what_has_to_be_changed():
    assert operation_similarity("abcd", "abcd") == 1.0
    assert operation_similarity("abcd", "abxd") == 0.75
    assert operation_similarity("abcd", "abc") == 0.75
    assert operation_similarity("abcd", "wxyz") == 0.0 == operation_similarity("", "a")


def test_tasks_of_one_structure_have_the_same_operations():
    tasks = [*builtin_suite("cpu"), *builtin_suite("gpu"), *generate_tasks(5, 150, "small")]
    found: dict[tuple, set] = {}
    for one in tasks:
        ops = operations(one.reference)
        assert ops, one.name
        found.setdefault(one.spec.structure, set()).add(ops)
    assert all(len(several) == 1 for several in found.values())


def test_generated_tasks_that_are_held_out_ones_are_all_found_and_hardly_any_other_is_removed():
    suite = builtin_suite("cpu")
    held_out = HeldOut(suite.held_out)
    generated = generate_tasks(0, 700, "small", exclude=())
    bad = {one.name for one in generated if one.spec.structure in held_out_structures()}
    found = decontaminate([*suite.train, *generated], held_out)
    assert len(bad) >= 2 and bad <= found.tasks
    assert len(found.tasks) <= len(bad) + 3
    assert not found.tasks & {one.name for one in suite.train}
    assert sum(found.counts().values()) == len(found.nearest) == len(suite.train) + 700
    # Between "three of four operations are the same" and "all are" lies hardly anything: the threshold does not cut through a crowd.
    assert sum(0.8 <= nearest.similarity < 1.0 for nearest in found.nearest) <= 3


def test_a_held_out_task_in_other_words_and_sizes_is_found_and_said():
    held_out = HeldOut(builtin_suite("cpu").held_out)  # one of them: x + bias, silu, l2 normalisation, * scale
    inside = "self.norm_shift = nn.Parameter(torch.zeros(n))"
    body = "z = torch.add(x, self.norm_shift)\nz = z * z.sigmoid()\nreturn F.normalize(z, dim=1) * y"
    disguised = task("disguised", reference(body, init=inside))
    longer = task("longer", reference("z = torch.tanh(F.silu(x + y))\nreturn F.normalize(z, dim=1).abs().sum(dim=1)"))
    found = decontaminate([disguised, longer], held_out)
    assert found.tasks == {"disguised"}
    [row] = found.removed
    assert (row.task, row.held_out, row.similarity) == ("disguised", "bias_silu_normalize_wide", 1.0)
    assert row.operations == row.held_out_operations == ("add:tt", "silu:p", "normalize:p", "mul:pt")


def test_tasks_of_one_operation_can_be_left_in(tmp_path):
    for number, (name, body) in enumerate({"Relu": "return torch.relu(x)", "Chain": "return F.gelu(x.relu() + y)"}.items(), 1):
        (tmp_path / "level1").mkdir(exist_ok=True)
        (tmp_path / "level1" / f"{number}_{name}.py").write_text(reference(body))
    held_out = HeldOut(load_kernelbench(tmp_path, [1], split="held_out"))
    bodies = {"relu": "return x.relu()", "chain": "return nn.GELU()(y + F.relu(x))", "part": "return x.relu() + y"}
    tasks = [task(name, reference(body)) for name, body in bodies.items()]
    assert decontaminate(tasks, held_out).tasks == {"relu", "chain"}
    assert decontaminate(tasks, held_out, least_operations=2).tasks == {"chain"}


def test_kernels_go_with_their_task_and_for_doing_a_held_out_one_in_pytorch():
    held_out = HeldOut([task("secret", reference("return torch.softmax(x + y, dim=-1)"))])
    found = decontaminate([task("open", reference("return x.abs()")), task("leak", reference("return (x + y).softmax(1)"))], held_out)
    copied = reference("h = y + x\nreturn F.softmax(h, dim=-1)").replace("Model(", "ModelNew(")
    kernels = [kernel(TRITON, task="leak"), *(kernel(source, task="open") for source in (TRITON, copied, CPP, "def ("))]
    bad = contaminated_kernels(kernels, found, held_out)
    assert {i: nearest.held_out for i, nearest in bad.items()} == {0: "secret", 2: "secret"}


def test_samples_go_by_their_tasks_name_or_by_the_reference_in_their_prompt():
    secret = reference("return torch.softmax(x + y, dim=-1)")
    held_out = HeldOut([task("secret", secret)])
    found = decontaminate([task("open", reference("return x.abs()")), task("leak", secret)], held_out)
    asked, other = (f"Make it fast.\n```python\n{source}\n```" for source in (secret, reference("return x.sin()")))
    samples = [sample("", "", task="leak"), sample(other, "", task="open"), sample(asked, "", task="unknown"), sample(other, "", task="unknown")]
    assert list(contaminated_samples(samples, found, held_out)) == [0, 2]


def test_a_reference_that_cannot_be_read_is_named():
    held_out = HeldOut([task("secret", reference("return x.abs()"))])
    endless = "def f(x):\n    return f(x)\n"
    for source, said in (("class Model:", "can't be read"), ("x = 1", "no class Model"), (reference("return f(x)", before=endless), "deep")):
        with pytest.raises(ValueError, match=rf"'odd'.*{said}"):
            decontaminate([task("odd", source)], held_out)
    with pytest.raises(ValueError, match="no held-out tasks"):
        HeldOut([])


def test_records_are_plain_data():
    held_out = HeldOut(builtin_suite("cpu").held_out)
    [nearest] = decontaminate([builtin_suite("cpu").train[0]], held_out).nearest
    assert dataclasses.asdict(nearest)["task"] == builtin_suite("cpu").train[0].name
    assert duplicates.digest("a") != duplicates.digest("b")
