"""Clients take turns; what is more urgent comes first among a client's own; nobody saves up turns or loses a record."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.expectation import expected_s
from sandbox.lanes import Lanes
from sandbox.protocol import Candidate, EvaluationResult
from sandbox.records import Record


def record(name, client="", priority=0, due_s=0.0):
    result = EvaluationResult(id=name, language="cpp")
    return Record(name, name, "task", {}, result, 0.0, client=client, priority=priority, due_s=due_s)


def lanes_of(*entries):
    lanes = Lanes()
    for entry in entries:
        lanes.append(record(*entry))
    return lanes


def served(lanes, count=None):
    names = []
    while lanes and (count is None or len(names) < count):
        first = lanes.first
        lanes.take(first)
        names.append(first.id)
    return names


def test_one_client_is_served_in_order_and_by_urgency():
    lanes = lanes_of(("0",), ("1", "", 2), ("2",), ("3", "", 2), ("4", "", 1))
    assert [one.id for one in lanes] == ["1", "3", "4", "0", "2"] == served(lanes)
    with pytest.raises(IndexError):
        lanes.first  # noqa: B018


def test_long_work_begins_first_within_its_head_start_and_whatever_is_tried_again_stays_first():
    came = [("short", 0.0, 0.3), ("long", 1.0, 9.0), ("middle", 1.1, 3.0), ("late long", 9.5, 9.0), ("urgent", 9.6, 0.3)]
    lanes = lanes_of(*((name, "", int(name == "urgent"), at_s - takes_s) for name, at_s, takes_s in came))
    assert [one.id for one in lanes] == ["urgent", "long", "middle", "short", "late long"], "who has waited for as long goes first"
    again = record("again", due_s=100.0)
    lanes.appendleft(again)
    lanes.append(record("longest", due_s=-8.5))
    assert served(lanes) == ["urgent", "again", "longest", "long", "middle", "short", "late long"]


@pytest.mark.parametrize(
    ("language", "form", "source", "seconds"),
    [
        ("triton", "module", "import cub", 0.3), ("cpp", "kernel", "", 1.0), ("cpp", "module", "", 3.0), ("cuda", "module", "// cub", 3.0),
        ("cuda", "module", "#include <cub/cub.cuh>", 9.0), ("cuda", "module", '#  include "thrust/sort.h"', 9.0),
    ],
)  # fmt: skip
def test_what_is_expected_is_read_off_the_source(language, form, source, seconds):
    assert expected_s(Candidate(source=source or "x", language=language, form=form)) == seconds


def test_who_comes_late_with_little_waits_for_one_turn_of_each_other():
    lanes = lanes_of(*((f"a{n}", "a", 9) for n in range(50)), *((f"b{n}", "b") for n in range(50)))
    assert served(lanes, 20) == [f"{client}{n}" for n in range(10) for client in "ab"]
    lanes.append(record("c0", "c"))
    assert "c0" in served(lanes, 3)


def test_who_was_away_has_saved_nothing_up_and_owes_what_it_had():
    lanes = lanes_of(*((f"a{n}", "a") for n in range(9)), ("b0", "b"))
    assert served(lanes, 8) == ["a0", "b0", "a1", "a2", "a3", "a4", "a5", "a6"]
    for n in range(1, 4):
        lanes.append(record(f"b{n}", "b"))
    assert served(lanes, 4) in (["a7", "b1", "a8", "b2"], ["b1", "a7", "b2", "a8"])
    lanes = lanes_of(("a0", "a"), ("a1", "a"), ("b0", "b"))
    lanes.take(lanes.first)
    lanes.append(record("a2", "a"))
    assert lanes.first.id == "b0"


def test_a_turn_out_of_order_counts():
    lanes = lanes_of(("a0", "a"), ("a1", "a"), ("a2", "a"), ("b0", "b"), ("b1", "b"), ("b2", "b"))
    by_name = {one.id: one for one in lanes}
    for name in ("b0", "b1"):  # its task was warm
        lanes.take(by_name[name])
    assert served(lanes) == ["a0", "a1", "a2", "b2"]


def test_what_is_tried_again_comes_first_of_its_like_and_the_cancelled_not_at_all():
    lanes = lanes_of(("0",), ("1",), ("2", "", 1))
    again, gone = record("again"), record("gone")
    lanes.appendleft(again)
    lanes.append(gone)
    assert gone in lanes and len(lanes) == 5
    lanes.remove(gone)
    assert gone not in lanes and served(lanes) == ["2", "again", "0", "1"]
    for stranger in (gone, record("x", "nobody")):
        with pytest.raises(ValueError):
            lanes.remove(stranger)


def test_the_room_of_a_full_queue_is_shared_and_ends_at_twice_its_size():
    lanes = lanes_of(*((f"{n}", "hog") for n in range(12)))
    assert [lanes.room_for(client, 12) for client in ("hog", "new")] == [0, 6]
    for n in range(6):
        lanes.append(record(f"new {n}", "new"))
    assert [lanes.room_for(client, 12) for client in ("hog", "new", "third")] == [0, 0, 4]
    for n in range(5):
        lanes.append(record(f"many {n}", f"client {n}"))
    assert [lanes.room_for(client, 12) for client in ("hog", "client 0", "another")] == [0, 0, 1]
    lanes.append(record("last", "last"))
    assert lanes.room_for("another", 12) == 0 == lanes.room_for("hog", 12)
    assert lanes_of(("a", "a")).room_for("a", 12) == 11


def test_clients_that_come_and_go_are_forgotten():
    lanes = Lanes()
    for n in range(1000):
        lanes.append(record(f"{n}", f"client {n}"))
        lanes.take(lanes.first)
    assert len(lanes._lanes) <= 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=60))
def test_everything_is_served_once_and_no_client_is_behind_by_more_than_a_turn(entries):
    lanes = lanes_of(*((str(n), client, priority) for n, (client, priority) in enumerate(entries)))
    assert len(lanes) == len(entries)
    expected = [one.id for one in lanes]
    names = served(lanes)
    assert names == expected and sorted(map(int, names)) == list(range(len(entries)))
    left = {client: sum(one == client for one, _ in entries) for client in "abc"}
    turns = dict.fromkeys("abc", 0)
    for name in names:
        client = entries[int(name)][0]
        turns[client] += 1
        left[client] -= 1
        waiting = [turns[one] for one in "abc" if left[one] or one == client]
        assert turns[client] <= min(waiting) + 1
