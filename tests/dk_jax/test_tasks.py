"""The built-in suite, its references, and the text that a small model reads."""

import math

import pytest

torch = pytest.importorskip("torch")

from dk_jax.tasks.builtin import builtin_suite  # noqa: E402
from dk_jax.tasks.ops import torch_text  # noqa: E402
from dk_jax.tasks.render import render_reference  # noqa: E402
from dk_jax.tasks.spec import Branch, Linear, OpSpec, RowReduce, Scalar, Tensor, Unary, Vector, Window  # noqa: E402
from dk_jax.tasks.task import Suite, Task  # noqa: E402

SUITE = builtin_suite("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Many tiny operations: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reference_of(task):
    """(module, inputs) of a task's reference."""
    space = {}
    exec(task.reference, space)
    torch.manual_seed(0)
    return space["Model"](*space["get_init_inputs"]()), space["get_inputs"]


def test_suite_has_enough_tasks_on_three_levels_in_both_sizes():
    for size in ("cpu", "gpu"):
        suite = builtin_suite(size)
        assert len(suite) >= 66
        assert {task.level for task in suite} == {1, 2, 3}
        assert all(task.size == size for task in suite)
    assert [t.name for t in builtin_suite("gpu")] == [t.name for t in SUITE]


def test_every_family_has_siblings_that_differ_in_source():
    for family in SUITE.families:
        tasks = SUITE.by_family(family)
        assert len(tasks) >= 2 and len({task.reference for task in tasks}) == len(tasks)
        assert SUITE.siblings(tasks[0]) == tasks[1:]


def test_split_by_family_holds_out_about_a_third_with_every_level_and_kind():
    share = len(SUITE.held_out) / len(SUITE)
    assert 0.25 < share < 0.4
    for tasks in (SUITE.train, SUITE.held_out):
        assert {task.level for task in tasks} == {1, 2, 3}
        assert {task.spec.kind for task in tasks} == {task.spec.kind for task in SUITE}


def test_no_held_out_composition_is_trained_on_and_its_operations_are_known():
    trained = {task.spec.structure for task in SUITE.train}
    parts = {part for structure in trained for part in structure}
    for task in SUITE.held_out:
        assert task.spec.structure not in trained
        alien = [
            part for part in task.spec.structure if part not in parts and part[0] not in ("Branch", "branch")
        ]
        assert not alien, f"{task.name} needs {alien}, which no train task has"


def test_gpu_tasks_stay_under_half_a_gigabyte():
    for task in builtin_suite("gpu"):
        shapes = [shape for _, shape in task.arguments] + [task.spec.out_shape]
        assert 4 * sum(map(math.prod, shapes)) < 0.5e9, task.name


@pytest.mark.parametrize("task", SUITE.tasks, ids=lambda task: task.name)
def test_reference_matches_the_signature_and_nothing_lazy_is_admitted(task):
    model, get_inputs = reference_of(task)
    inputs = get_inputs()
    with torch.no_grad():
        out, other = model(*inputs), model(*get_inputs())
    assert tuple(out.shape) == task.spec.out_shape and out.is_contiguous() and out.isfinite().all()
    parameters = [(name.replace(".", "_"), tuple(p.shape)) for name, p in model.named_parameters()]
    names = list(dict(task.arguments))[: len(inputs)]
    tensors = [(name, tuple(value.shape)) for name, value in zip(names, inputs, strict=True)]
    assert list(task.arguments) == tensors + parameters
    assert f"def forward(self, {', '.join(names)}):" in task.reference

    lazy = {
        "zeros": torch.zeros_like(out),
        "a constant": torch.full_like(out, out.mean()),
        "other inputs": other,
    }
    lazy |= {f"input {i}": x for i, x in enumerate(inputs) if x.shape == out.shape}
    for name, answer in lazy.items():
        assert not torch.allclose(answer, out, atol=1e-4, rtol=1e-4), f"{name} would pass"


def test_compact_text_has_shapes_statements_and_signature():
    task = SUITE.get("linear_activation_relu")
    assert task.compact.splitlines() == [
        "x 4096 16; fc_weight 128 16; fc_bias 128",
        "// 1: x = fc(x)",
        "// 2: x = relu(x)",
        "// 3: x = x * 2.0",
        'extern "C" void kernel(const float* x, const float* fc_weight, const float* fc_bias, float* out)',
    ]


def test_compact_text_is_short():
    for task in SUITE:
        assert len(task.compact.split()) < (100 if task.level < 3 else 150), task.name
        assert "self." not in task.compact and "torch." not in task.compact


def test_branches_render_as_variables():
    stages = (
        Branch(name="g", stages=(Linear(name="gate", width=8), Unary(fn="silu"))),
        Branch(name="r"),
        Scalar(op="rsub", value=1.0),
        Tensor(op="mul", name="r"),
    )
    source = render_reference(OpSpec(rows=2, cols=4, stages=stages), "Title.")
    body = ["g = self.gate(x)", "g = F.silu(g)", "r = x", "x = 1.0 - x", "x = x * r"]
    assert "\n".join(" " * 8 + line for line in body) in source


def test_arguments_come_by_first_use_and_parameters_last():
    stages = (
        Linear(name="fc", width=8, bias=False),
        Vector(op="add", name="b"),
        Tensor(op="mul", name="y", factor=0.5),
    )
    spec = OpSpec(rows=2, cols=4, stages=stages)
    assert [(a.name, a.shape) for a in spec.arguments] == [
        ("x", (2, 4)),
        ("b", (8,)),
        ("y", (2, 8)),
        ("fc_weight", (8, 4)),
    ]


def test_structure_ignores_sizes_constants_and_names():
    def spec(rows, value, name):
        return OpSpec(rows=rows, cols=4, stages=(Scalar(op="mul", value=value), Vector(op="add", name=name)))

    assert spec(2, 0.5, "a").structure == spec(8, 2.0, "b").structure
    assert (
        spec(2, 0.5, "a").structure != OpSpec(rows=2, cols=4, stages=(Scalar(op="mul", value=0.5),)).structure
    )


def test_bad_specs_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="empty"):
        OpSpec(rows=2, cols=2, stages=())
    with pytest.raises(ValueError, match="operand twice"):
        OpSpec(rows=2, cols=2, stages=(Vector(op="add", name="b"), Vector(op="mul", name="b")))
    with pytest.raises(ValueError, match="two dimensions"):
        OpSpec(rows=2, cols=2, stages=(RowReduce(fn="sum"), RowReduce(fn="sum")))
    with pytest.raises(ValueError, match="needs a name"):
        OpSpec(rows=2, cols=8, stages=(Window(fn="conv", size=3),))
    with pytest.raises(ValueError, match="unknown function 'rleu'"):
        torch_text(Unary(fn="rleu"))


def test_suite_refuses_duplicates_and_families_in_both_splits():
    def task(name, family, split):
        return Task(name=name, level=1, family=family, split=split, reference="")

    with pytest.raises(ValueError, match="unique"):
        Suite((task("a", "f", "train"), task("a", "g", "train")))
    with pytest.raises(ValueError, match="both splits"):
        Suite((task("a", "f", "train"), task("b", "f", "held_out")))
    with pytest.raises(KeyError, match="no task"):
        SUITE.get("nothing")
    with pytest.raises(KeyError, match="no family"):
        SUITE.by_family("nothing")
    with pytest.raises(ValueError, match="'cpu' or 'gpu'"):
        builtin_suite("tpu")
