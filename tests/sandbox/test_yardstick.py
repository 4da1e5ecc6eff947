"""The yardstick tells a machine that is slower than it can be, whichever core or kind of work it shows on."""

import os

import pytest

from sandbox.oracle.yardstick import EVERY, RUNS, Yardstick

CORES = sorted(os.sched_getaffinity(0))[:1]


class Clock:
    """Each work takes as long as the test says."""

    def __init__(self):
        self.now, self.started, self.takes = 0.0, False, [1.0, 2.0]
        self.turn = 0

    def __call__(self):
        if self.started:
            late = 0.5 if self.turn % RUNS == 0 else 0.0  # the first run, when caches are cold
            self.now += self.takes[self.turn // RUNS % len(self.takes)] + late
            self.turn += 1
        self.started = not self.started
        return self.now


@pytest.fixture
def yardstick():
    clock = Clock()
    made = Yardstick(clock)
    made.clock = clock
    return made


def slowdown(yardstick, *takes, looks=4 * EVERY, cores=CORES):
    yardstick.clock.takes = takes
    yardstick.clock.turn = 0
    for _ in range(looks):
        yardstick.look(cores)
    return yardstick.slowdown()


def test_the_slowest_kind_of_work_counts(yardstick):
    assert slowdown(yardstick, 1.0, 2.0) == 1.0
    assert slowdown(yardstick, 1.2, 2.0) == pytest.approx(1.2)
    assert slowdown(yardstick, 1.1, 3.0) == pytest.approx(1.5)
    assert slowdown(yardstick, 1.0, 2.0) == pytest.approx(1.0)


def test_a_machine_that_is_slow_nine_times_in_ten_is_slow(yardstick):
    found = [slowdown(yardstick, *((1.0, 2.0) if n % 10 == 0 else (1.3, 2.6))) for n in range(40)]
    assert found[0] == 1.0 and all(one == pytest.approx(1.0 if n % 10 == 0 else 1.3) for n, one in enumerate(found))


def test_what_a_timing_that_failed_has_seen_is_not_the_next_one_s(yardstick):
    assert slowdown(yardstick, 1.0, 2.0) == 1.0
    yardstick.clock.takes, yardstick.clock.turn = [9.0, 9.0], 0
    for _ in range(EVERY + 2):
        yardstick.look(CORES)
    yardstick.begin()
    assert slowdown(yardstick, 1.0, 2.0, looks=1) == 1.0 and yardstick.clock.turn == RUNS * 2 * len(CORES)


def test_without_a_look_nothing_is_said_and_looks_are_few(yardstick):
    assert yardstick.slowdown() == 1.0
    slowdown(yardstick, 1.0, 2.0, looks=EVERY * 3)
    assert yardstick.clock.turn == RUNS * 2 * 3 * len(CORES)


def test_it_works_on_the_cores_it_is_given_and_leaves_this_thread_where_it_was():
    before = os.sched_getaffinity(0)
    yardstick = Yardstick()
    for _ in range(3):
        for _ in range(EVERY * 5):
            yardstick.look(sorted(before))
        assert 1.0 <= yardstick.slowdown() < 100
    assert os.sched_getaffinity(0) == before
