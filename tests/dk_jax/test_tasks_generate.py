"""Tasks generated for the cold start."""

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from dk_jax.tasks.builtin import builtin_suite, held_out_structures  # noqa: E402
from dk_jax.tasks.generate import generate_tasks  # noqa: E402

TASKS = generate_tasks(0, 600)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Many tiny operations: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_generation_is_deterministic_and_a_prefix_of_a_longer_one():
    assert generate_tasks(0, 50) == TASKS[:50]
    assert generate_tasks(1, 50) != TASKS[:50]


def test_tasks_are_distinct_and_mostly_of_distinct_composition():
    assert len({task.name for task in TASKS}) == len({task.spec for task in TASKS}) == len(TASKS)
    structures = Counter(task.spec.structure for task in TASKS)
    assert max(structures.values()) <= 4 and len(structures) > 0.8 * len(TASKS)


def test_held_out_compositions_are_never_generated():
    held_out = held_out_structures()
    assert held_out == {task.spec.structure for task in builtin_suite().held_out}
    assert not held_out & {task.spec.structure for seed in range(3) for task in generate_tasks(seed, 600)}


def test_what_is_excluded_is_what_the_caller_says():
    unwanted = {task.spec.structure for task in TASKS[:40]}
    assert not unwanted & {task.spec.structure for task in generate_tasks(0, 200, exclude=unwanted)}


def test_every_kind_is_there_and_small_levels_prevail():
    assert {task.spec.kind for task in TASKS} == {task.spec.kind for task in builtin_suite()}
    assert sum(task.level == 3 for task in TASKS) < 0.1 * len(TASKS)
    assert all(task.split == "train" and len(task.compact.split()) < 100 for task in TASKS)


def test_sizes_fit_what_they_are_meant_for():
    size = lambda tasks: sum(t.spec.rows * t.spec.cols for t in tasks)  # noqa: E731
    assert size(generate_tasks(0, 50, "gpu")) > 5 * size(generate_tasks(0, 50, "cpu"))
    assert all(t.spec.rows * t.spec.cols <= 1 << 14 for t in generate_tasks(0, 300, "small"))
    assert size(generate_tasks(0, 300, "cpu")) > 5 * size(generate_tasks(0, 300, "light"))
    numbers = {n for t in TASKS for n in (t.spec.rows, t.spec.cols)}
    assert {n for t in generate_tasks(0, 300, "light") for n in (t.spec.rows, t.spec.cols)} <= numbers


def test_bad_requests_say_what_to_do():
    with pytest.raises(ValueError, match="give one of small, light, cpu, gpu"):
        generate_tasks(0, 1, "tpu")


@pytest.mark.parametrize(
    "task",
    [*TASKS[::12], *generate_tasks(1, 600, "light")[5::24], *generate_tasks(2, 600, "small")[7::24]],
    ids=lambda task: f"{task.size}-{task.name}",
)
def test_generated_reference_runs_and_nothing_lazy_passes(task):
    space = {}
    exec(task.reference, space)
    torch.manual_seed(0)
    model, inputs = space["Model"](), space["get_inputs"]()
    with torch.no_grad():
        out, other = model(*inputs), model(*space["get_inputs"]())
    assert tuple(out.shape) == task.spec.out_shape and out.isfinite().all()
    lazy = [torch.zeros_like(out), torch.full_like(out, out.mean()), other] + [
        x for x in inputs if x.shape == out.shape
    ]
    assert not any(torch.allclose(answer, out, atol=1e-4, rtol=1e-4) for answer in lazy)
