"""Candidates of one task go to the oracle that knows it, and nobody waits for ever."""

from hypothesis import given
from hypothesis import strategies as st

from sandbox.affinity import PATIENCE, WARM_TASKS, Affinity
from sandbox.lanes import Lanes
from sandbox.protocol import EvaluationResult
from sandbox.records import Record


def records(tasks):
    waiting = Lanes()
    for n, task in enumerate(tasks):
        waiting.append(Record(f"{n}", f"{n}", task, {}, EvaluationResult(id=f"{n}", language="cpp"), 0.0))
    return waiting


def test_two_oracles_share_two_tasks_and_each_keeps_to_its_own():
    affinity, waiting = Affinity(), records("aaabbb")
    taken = {"x": "", "y": ""}
    for worker in "xyxyxy":
        other = "y" if worker == "x" else "x"
        taken[worker] += affinity.take(waiting, worker, [other]).task
    assert taken == {"x": "aaa", "y": "bbb"} and not waiting


def test_an_oracle_without_work_of_its_own_helps_with_anothers():
    affinity, waiting = Affinity(), records("aaaa")
    got = [affinity.take(waiting, worker, ["x" if worker == "y" else "y"]).id for worker in "xyyx"]
    assert got == ["0", "1", "2", "3"]


def test_a_retry_comes_first_and_the_first_is_passed_over_a_bounded_number_of_times():
    affinity, waiting = Affinity(), records("ba" + "a" * 100)
    waiting.first.attempts = 1
    assert affinity.take(waiting, "x", []).task == "b"
    affinity, waiting = Affinity(), records("a" + "b" + "a" * 100)
    order = "".join(affinity.take(waiting, "x", []).task for _ in range(60))
    assert order.index("b") == PATIENCE + 1


def test_only_so_many_tasks_count_as_known_and_none_of_a_replaced_oracle():
    affinity = Affinity()
    many = [f"t{n}" for n in range(WARM_TASKS + 1)]
    waiting = records(many)
    for _ in many:
        affinity.take(waiting, "x", [])
    waiting = records(["new", "t0"])
    assert affinity.take(waiting, "x", []).task == "new"
    waiting = records(["newer", many[-1]])
    assert affinity.take(waiting, "x", []).task == many[-1]
    affinity.forget("x")
    waiting = records(["newest", many[-1]])
    assert affinity.take(waiting, "x", []).task == "newest"


@given(st.text("abc", max_size=60), st.text("xyz", min_size=1, max_size=5))
def test_everything_is_taken_once_and_the_order_within_a_task_stands(tasks, workers):
    affinity, waiting, seen = Affinity(), records(tasks), {}
    for n in range(len(tasks)):
        worker = workers[n % len(workers)]
        record = affinity.take(waiting, worker, [other for other in "xyz" if other != worker])
        seen.setdefault(record.task, []).append(int(record.id))
    assert not waiting
    assert sorted(n for ids in seen.values() for n in ids) == list(range(len(tasks)))
    assert all(ids == sorted(ids) for ids in seen.values())
