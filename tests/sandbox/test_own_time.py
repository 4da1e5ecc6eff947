"""Looking at running threads from outside changes nothing for them; shares rule only where they say something."""

import mmap
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from sandbox.jail.pointers import Region, Regions, places, running
from sandbox.oracle import own_time
from sandbox.oracle.failures import Failure
from sandbox.oracle.own_time import OwnTime, loaded_files, measure_own_time, owner_of
from tests.sandbox.helpers import eventually

COUNTING = """
import signal, sys, time
rings = 0
def ring(*_):
    global rings
    rings += 1
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
end, total = time.monotonic() + 1.5, 0
while time.monotonic() < end:
    total += sum(range(1000)) == 499500
signal.setitimer(signal.ITIMER_REAL, 0)
print(total > 100, rings > 30)
"""


def may_trace():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            return eventually(lambda: bool(running(child.pid)), 5) and bool(places([child.pid]))
        except OSError:
            return False
        finally:
            child.kill()


needs_tracing = pytest.mark.skipif(not may_trace(), reason="this process may not trace its children here")


@needs_tracing
def test_a_process_that_is_looked_at_works_on_and_loses_no_signal():
    with subprocess.Popen([sys.executable, "-c", COUNTING], stdout=subprocess.PIPE, text=True) as child:
        seen = 0
        while child.poll() is None:
            try:
                regions = Regions(child.pid)
                found = places(running(child.pid))
            except OSError:
                continue
            seen += sum(regions.at(place.pointer) is not None for place in found.values())
        assert (child.returncode, child.stdout.read()) == (0, "True True\n")
        assert seen > 100


@needs_tracing
def test_sleepers_are_left_alone_and_the_dead_left_out():
    with subprocess.Popen(["sleep", "1000"]) as sleeper:
        assert eventually(lambda: running(sleeper.pid) == [])
        sleeper.kill()
    assert running(sleeper.pid) == [] and places([sleeper.pid]) == {}


@needs_tracing
def test_python_s_time_is_nobody_s():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        seen = measure_own_time(lambda: time.sleep(0.05) or 1, lambda: {child.pid}, set(), longest_s=0.5)
        child.kill()
    assert not seen.problem and seen.nobody > 10 and seen.own == 0 and not seen.rules


def test_a_host_that_forbids_tracing_fails_nobody(monkeypatch):
    def forbidden(threads):
        raise PermissionError("ptrace: Operation not permitted")

    monkeypatch.setattr(own_time, "places", forbidden)
    seen = measure_own_time(lambda: time.sleep(0.05) or 1, lambda: {os.getpid()}, set(), longest_s=0.5)
    assert "not permitted" in seen.problem and not (seen.rules or seen.fails or seen.unrewarded)


@pytest.mark.parametrize(
    ("own", "libraries", "nobody", "call_ms", "fails", "unrewarded"),
    [
        (0, 100, 100, 1.0, True, True),
        (2, 200, 0, 1.0, True, True),
        (0, 30, 100, 1.0, False, False),  # too few to tell
        (0, 100, 100, 0.05, True, True),  # the libraries take 25 us
        (0, 100, 100, 0.016, False, False),  # 8 us: a trifle
        (0, 0, 300, 1.0, False, False),
        (12, 100, 0, 1.0, False, True),
        (40, 60, 0, 1.0, False, False),
        (100, 0, 0, 1.0, False, False),
    ],
)
def test_what_was_seen_rules_only_where_it_says_something(own, libraries, nobody, call_ms, fails, unrewarded):
    seen = OwnTime(own=own, libraries=libraries, nobody=nobody, call_ms=call_ms)
    assert (bool(seen.fails), bool(seen.unrewarded)) == (fails, unrewarded), seen


@pytest.mark.parametrize(
    ("own", "libraries", "nobody", "call_ms", "wanted"),
    [
        (0, 8, 0, 1.0, True),
        (5, 3, 0, 1.0, True),
        (6, 2, 0, 1.0, False),
        (0, 1, 120, 6.0, False),  # threads that wait for each other
        (0, 8, 0, 0.02, True),
        (0, 8, 0, 0.008, False),  # a trifle
        (0, 0, 200, 1.0, False),
    ],
)
def test_a_glance_wants_a_longer_look_only_where_libraries_have_a_part(own, libraries, nobody, call_ms, wanted):
    assert OwnTime(own=own, libraries=libraries, nobody=nobody, call_ms=call_ms).points_elsewhere is wanted


def test_a_glance_that_sees_nobody_at_work_ends_all_the_same():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        start = time.monotonic()
        seen = measure_own_time(lambda: time.sleep(0.001) or 1, lambda: {child.pid}, set(), longest_s=0.2, glance=True)
        child.kill()
    assert seen.own + seen.libraries == 0 and time.monotonic() - start < 5


SLOW_HONEST, FIG_LEAF = OwnTime(own=57, libraries=5, call_ms=0.9), OwnTime(own=1, libraries=200, call_ms=0.9)


@pytest.mark.parametrize(("long_look", "told"), [(SLOW_HONEST, None), (FIG_LEAF, FIG_LEAF)])
def test_a_bare_kernel_s_share_counts_where_the_longer_look_points_to_libraries_too(monkeypatch, long_look, told):
    looks = [OwnTime(own=5, libraries=3, call_ms=0.9), long_look]
    assert looks[0].points_elsewhere and SLOW_HONEST.rules
    monkeypatch.setattr(own_time, "measure_own_time", lambda *_, **__: looks.pop(0))
    if told is None:
        looks.append(OwnTime(own=95, libraries=5, call_ms=20.0))  # a glance of many moments that does not point to them
        assert looks[-1].rules
    job = SimpleNamespace(candidate=SimpleNamespace(form="kernel"), options=SimpleNamespace(time_s=10.0, memory_bytes=1))
    side = SimpleNamespace(call_ms=0.9, calls=10, deadline=lambda: 10.0)
    seen = own_time.own_time_of(job, side, SimpleNamespace(pid=1), SimpleNamespace(libraries={(1, 2)}))
    assert seen == told
    if looks:
        assert own_time.own_time_of(job, side, SimpleNamespace(pid=1), SimpleNamespace(libraries={(1, 2)})) is None
    assert not looks
    verdict = SimpleNamespace(coverage=1.0, notes=[], speed_rewarded=True)
    if told is None:
        own_time.rule(seen, verdict, may_look=True)
        assert (verdict.coverage, verdict.notes, verdict.speed_rewarded) == (1.0, [], True)
    else:
        with pytest.raises(Failure, match="hardly any work"):
            own_time.rule(seen, verdict, may_look=True)


def test_who_forbids_to_be_looked_at_where_others_do_not_has_failed():
    hidden, verdict = OwnTime(problem="ptrace: Operation not permitted", forbidden=True), SimpleNamespace(notes=[])
    own_time.rule(hidden, verdict, may_look=False)
    assert "cannot be seen here" in verdict.notes[0]
    with pytest.raises(Failure, match="forbids to look") as failed:
        own_time.rule(hidden, verdict, may_look=True)
    assert (failed.value.outcome, failed.value.finding.rule) == ("integrity", "coverage")
    own_time.rule(OwnTime(problem="no time was left"), verdict, may_look=True)


def test_whose_code_it_is_is_told_by_what_no_candidate_can_choose():
    def at(path, file=(1, 5)):
        return owner_of(Region(0, 1, file, path), {(1, 77)})

    assert owner_of(None, {(1, 77)}) == "libraries"
    assert at("/memfd:kernel", (1, 77)) == "own"
    assert at("/memfd:kernel") == "libraries", "another memory of the same name"
    assert at("/usr/lib/x86_64-linux-gnu/libc.so.6") == "nobody"
    assert at(f"{sys.prefix}/lib/python3/site-packages/torch/lib/libgomp-24e2ab19.so.1") == "nobody"
    assert at(os.path.realpath(sys.executable)) == "nobody"
    assert at(f"{sys.prefix}/lib/python3/site-packages/torch/lib/libtorch_cpu.so") == "libraries"
    for path in ("/home/user/libc.so.6", "/memfd:libm.so.6", "/dev/shm/libgomp.so", "", "[heap]"):
        assert at(path) == "libraries", path


@pytest.mark.parametrize("name", [b"a\rb r-xp 0 00:01 9", b"caf\xff", "a\u2028b".encode()])
def test_no_name_of_a_mapped_file_forges_a_line_of_the_map_or_blinds_whoever_reads_it(tmp_path, name):
    path = os.fsencode(tmp_path) + b"/" + name
    with open(path, "wb") as file:
        file.write(bytes(4096))
    fd = os.open(path, os.O_RDONLY)
    lines = len(Regions(os.getpid())._regions)
    with mmap.mmap(fd, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC):
        found = [region for region in Regions(os.getpid())._regions if region.file[1] == os.fstat(fd).st_ino]
        assert [os.fsencode(region.path) for region in found] == [path]
        assert len(Regions(os.getpid())._regions) == lines + 1
        status = os.fstat(fd)
        assert (status.st_dev, status.st_ino) in loaded_files([os.getpid()])
    os.close(fd)
