"""What keeps a CPU's timings apart from the machine's moods: stopped jails, cores awake, threads placed, unrest noticed."""

import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from sandbox.jail.frames import Message
from sandbox.jail.processes import stopped
from sandbox.oracle.calm import CALM_QUARTER, REMEMBERED, Calm
from sandbox.oracle.clock import Side
from sandbox.oracle.steady import Placement, awake, steady
from sandbox.protocol import Span, Timing
from sandbox.verdict.feedback import correct
from sandbox.verdict.timing import MOST_UNREST

CORES = sorted(os.sched_getaffinity(0))
several = pytest.mark.skipif(len(CORES) < 2, reason="one core: nothing to choose")
BUSY = """
import os, threading, time
if os.fork() == 0:
    while True: pass
def spin():
    while True: time.sleep(0)
threading.Thread(target=spin, daemon=True).start()
print(flush=True)
while True: pass
"""
THREADS = """
import sys, threading, time
def work():
    while True: sum(range(1000))
for number in range(int(sys.argv[1]) + 3):
    target, args = (work, ()) if number < int(sys.argv[1]) else (time.sleep, (60,))
    threading.Thread(target=target, args=args, daemon=True).start()
print(flush=True)
work()
"""
"""So many threads that work besides the first one, and three that rest."""


@contextmanager
def running(code, *arguments):
    """A process that has printed a line."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            process.stdout.readline()
            yield process
        finally:
            os.killpg(process.pid, 9)


def ticks(pid):
    """Processor time of a process and its children, in ticks of the kernel."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        family = [pid, *map(int, file.read().split())]
    total = 0
    for member in family:
        with open(f"/proc/{member}/stat") as file:
            total += sum(map(int, file.read().rsplit(")", 1)[1].split()[11:13]))
    return total


def test_no_thread_of_a_stopped_jail_runs_and_all_run_on_afterwards():
    with running(BUSY) as process:
        with stopped(process.pid):
            before = ticks(process.pid)
            time.sleep(0.2)
            assert ticks(process.pid) == before
        deadline = time.monotonic() + 20
        while ticks(process.pid) < before + 20:
            assert time.monotonic() < deadline, "it does not run on"
            time.sleep(0.01)


def test_cores_stay_awake_as_long_as_the_wish_is_open(tmp_path):
    device = tmp_path / "latency"
    device.write_bytes(b"")
    with awake(device) as told:
        assert told and device.read_bytes() == bytes(4)
        assert str(device) in {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    assert str(device) not in {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
    with awake(tmp_path / "missing") as told:
        assert not told


def test_the_oracle_keeps_to_the_last_core_and_is_let_go():
    with pytest.raises(ZeroDivisionError), steady() as cores:
        assert cores == CORES and os.sched_getaffinity(0) == {CORES[-1]}
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == set(CORES)


@several
def test_threads_that_work_get_a_core_each_unless_there_are_too_many_and_are_let_go():
    def cores_of(process):
        return [os.sched_getaffinity(int(thread)) for thread in sorted(os.listdir(f"/proc/{process.pid}/task"), key=int)]

    with running(THREADS, 1) as few, running(THREADS, len(CORES)) as many:
        with Placement(few.pid, CORES) as one, Placement(many.pid, CORES) as other:
            time.sleep(0.5)
            assert cores_of(few) == [set(CORES)] * 5, "nobody has asked yet"
            one.use(True)
            other.use(True)
            assert cores_of(few) == [{CORES[0]}, {CORES[1]}, *[set(CORES)] * 3]
            assert cores_of(many) == [set(CORES)] * (len(CORES) + 4)
            with one.lifted(), other.lifted():
                assert cores_of(few) == [set(CORES)] * 5
            assert cores_of(few) == [{CORES[0]}, {CORES[1]}, *[set(CORES)] * 3], "as before"
            one.use(False)
            with one.lifted():
                pass
            assert cores_of(few) == [set(CORES)] * 5, "as before"
            one.use(True)
        assert cores_of(few) == [set(CORES)] * 5
        with Placement(few.pid, []) as nowhere:
            nowhere.use(True)
            assert cores_of(few) == [set(CORES)] * 5


class Order:
    """A runner whose calls take longer in one of the two placements."""

    def __init__(self, slower_when_placed):
        self.placed, self._slower = False, slower_when_placed

    def use(self, placed):
        self.placed = placed

    def __call__(self, command, timeout_s, **order):
        time.sleep(0.004 if self.placed == self._slower else 0.001)
        return Message({"span_ms": 1.0}, [])


@pytest.mark.parametrize("slower_when_placed", [True, False])
def test_threads_are_placed_unless_that_is_slower(slower_when_placed):
    order = Order(slower_when_placed)
    side = Side(order=order, slots=[0], deadline=lambda: 5.0, placement=order)
    side.settle()
    assert order.placed is not slower_when_placed


def timing(eager_ms, candidate_ms=1.0):
    def span(ms):
        return Span(median_ms=ms, low_ms=ms, high_ms=ms, samples=9)

    speedup = eager_ms / candidate_ms
    return Timing(
        candidate=span(candidate_ms), baselines={"eager": span(eager_ms)}, speedup=speedup,
        speedup_low=0.99 * speedup, speedup_high=1.01 * speedup, noisy=False, bound_by="runner span",
    )  # fmt: skip


def timed(calm, *timings, tries=3):
    """What becomes of timings made one after the other, and how many were asked for."""
    rest = list(timings)
    found = calm.timed(lambda: rest.pop(0), tries)
    return found, len(timings) - len(rest)


def test_a_timing_in_unrest_is_noisy_and_says_so():
    calm = Calm()
    for _ in range(3):
        found, made = timed(calm, timing(2.0), tries=1)
        assert made == 1 and not found.noisy and found.unrest == 1.0
    for eager_ms in (2.0 * MOST_UNREST + 0.1, 2.0 / MOST_UNREST - 0.1):
        found, _ = timed(calm, timing(eager_ms), tries=1)
        assert found.noisy and found.unrest == pytest.approx(max(eager_ms / 2.0, 2.0 / eager_ms))
        assert "not calm" in correct(found, None) and "within noise" not in correct(found, None)


def test_timings_are_made_until_two_agree_and_each_side_s_calmest_counts():
    calm = Calm()
    found, made = timed(calm, timing(2.0, 1.0), timing(2.1, 1.05), timing(9.0))
    assert made == 2 and found.speedup == 2.0 and found.unrest == pytest.approx(1.05) and not found.noisy
    found, made = timed(calm, timing(3.0, 1.0), timing(2.1, 1.4), timing(2.2, 1.1))
    assert made == 3 and not found.noisy and found.unrest == pytest.approx(1.1)
    assert (found.candidate.median_ms, found.baselines["eager"].median_ms) == (1.0, 2.1)
    assert found.speedup == pytest.approx(2.1) and found.speedup_low <= 2.1 <= found.speedup_high
    found, made = timed(calm, timing(2.1, 1.0), timing(2.1, 1.5), timing(2.1, 1.3))
    assert made == 3 and found.noisy and found.unrest == pytest.approx(1.3), "the candidate's times do not agree"


def test_a_machine_that_has_become_slower_is_calm_again_in_the_end():
    calm = Calm()
    for _ in range(REMEMBERED):
        timed(calm, timing(1.0), tries=1)
    rng = random.Random(0)
    answers = [timed(calm, timing(3.0 + 0.1 * rng.random()), tries=1)[0].noisy for _ in range(REMEMBERED)]
    turns = REMEMBERED * (CALM_QUARTER - 1) // CALM_QUARTER
    assert all(answers[: turns - 1]) and not any(answers[turns + 1 :])


def test_a_host_that_is_busy_most_of_the_time_does_not_pass_for_a_calm_one():
    calm = Calm()
    for _ in range(8):
        timed(calm, timing(1.0), timing(1.01), tries=2)
        busy = [timed(calm, timing(1.3 + 0.02 * n), timing(1.3 + 0.02 * n), tries=2)[0] for n in range(2)]
        assert all(found.noisy and found.unrest > 1.25 for found in busy)
    assert not timed(calm, timing(1.02, 0.5), timing(1.0, 0.5), tries=2)[0].noisy


def test_a_thread_whose_core_others_have_too_is_held_up():
    alone = f"import os; os.sched_setaffinity(0, {{{CORES[-1]}}})\nprint(flush=True)\nwhile True: pass"

    def seen(placement):
        time.sleep(0.2)
        return placement.held_up()

    with running(alone) as first, Placement(first.pid, CORES) as placement:
        placement.held_up()
        calm = min(seen(placement) for _ in range(5))
        with running(alone):
            time.sleep(0.1)
            placement.held_up()
            held_up = [seen(placement) for _ in range(5)]
        assert 1.0 <= calm < 1.5 < max(held_up) and calm < min(held_up)
    with running(alone) as first, Placement(first.pid, []) as nowhere:
        assert nowhere.held_up() == nowhere.held_up() == 1.0
