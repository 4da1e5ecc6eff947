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
from sandbox.oracle.calm import REMEMBERED, Calm
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
for _ in range(int(sys.argv[1])): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(flush=True)
time.sleep(60)
"""


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
def test_threads_get_a_core_each_unless_there_are_too_many_and_are_let_go():
    def cores_of(process):
        return [os.sched_getaffinity(int(thread)) for thread in sorted(os.listdir(f"/proc/{process.pid}/task"), key=int)]

    with running(THREADS, 1) as few, running(THREADS, len(CORES)) as many:
        with Placement(few.pid, CORES) as one, Placement(many.pid, CORES) as other:
            assert cores_of(few) == [set(CORES)] * 2, "nobody has asked yet"
            one.use(True)
            other.use(True)
            assert cores_of(few) == [{CORES[0]}, {CORES[1]}]
            assert cores_of(many) == [set(CORES)] * (len(CORES) + 1)
        assert cores_of(few) == [set(CORES)] * 2
        with Placement(few.pid, []) as nowhere:
            nowhere.use(True)
            assert cores_of(few) == [set(CORES)] * 2


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


def test_a_timing_in_unrest_is_noisy_and_the_calmest_of_several_counts():
    calm = Calm()
    assert not calm.note(timing(2.0), needed=2), "one timing does not tell"
    assert calm.note(timing(2.1), needed=2)
    disturbed = timing(2.0 * MOST_UNREST + 0.1)
    assert not calm.note(disturbed, needed=2)
    found = calm.judged([disturbed])
    assert found.noisy and found.unrest == pytest.approx(disturbed.baselines["eager"].median_ms / 2.0)
    assert "not calm" in correct(found, None) and "within noise" not in correct(found, None)
    calmer = timing(2.2, candidate_ms=1.1)
    assert calm.note(calmer, needed=2)
    found = calm.judged([disturbed, calmer])
    assert not found.noisy and found.unrest == pytest.approx(1.1) and found.candidate.median_ms == 1.1


def test_a_machine_that_has_become_slower_is_calm_again_in_the_end():
    calm = Calm()
    calm.note(timing(1.0), needed=1)
    rng = random.Random(0)
    answers = [calm.note(timing(3.0 + 0.1 * rng.random()), needed=1) for _ in range(REMEMBERED + 1)]
    assert not any(answers[: REMEMBERED - 1]) and answers[-1]
