"""Training tasks that are held-out ones in other words or sizes, and what goes with them."""

from __future__ import annotations

import dataclasses

import pytest

from dk_jax.sft import duplicates
from dk_jax.sft.contamination import HeldOut, contaminated_kernels, contaminated_samples, decontaminate, operation_similarity
from dk_jax.sft.operations import operations
from dk_jax.tasks.builtin import builtin_suite, held_out_structures
from dk_jax.tasks.generate import generate_tasks
from dk_jax.tasks.kernelbench import load_kernelbench
from dk_jax.tasks.task import Task
from tests.dk_jax.test_sft_duplicates import CPP, TRITON, kernel, sample


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
