"""Looks at the processes of a jail: both ways find the same, and a kernel without lists of children is no reason to miss one."""

import inspect
import os
import subprocess
import sys

import pytest

from sandbox.jail import processes
from tests.sandbox.helpers import eventually

TREE = """
import subprocess, sys, threading, time
deeper = [sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"]
threading.Thread(target=lambda: subprocess.run(deeper)).start()
subprocess.run(deeper)
"""


@pytest.fixture
def family():
    """The pid of a process with two children, one of them a thread's, that have a child each."""
    process = subprocess.Popen([sys.executable, "-c", TREE], start_new_session=True)
    try:
        assert eventually(lambda: len(processes.members(process.pid)) == 5, 30)
        yield process.pid
    finally:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.mark.parametrize("thorough", [0, 1])
def test_both_ways_to_look_find_the_whole_family(monkeypatch, family, thorough):
    monkeypatch.setattr(processes.secrets, "randbelow", lambda n: 0 if thorough else n - 1)
    monkeypatch.setattr(processes, "processes", processes.processes if thorough else None)
    found = processes.watched_members(family)
    assert len(found) == len(set(found)) == 5 and found[0] == family


def test_without_lists_of_children_every_look_goes_over_all_processes(monkeypatch, family):
    monkeypatch.setattr(processes, "_lists_children", lambda: False)
    monkeypatch.setattr(processes, "_tree", None)
    assert len(processes.watched_members(family)) == 5


def test_a_chain_deeper_than_the_stack_may_be_is_no_reason_to_stumble():
    length = 400
    chain = f"import os, time\nfor _ in range({length}):\n    if os.fork(): break\nelse:\n    print(flush=True)\ntime.sleep(600)"
    process = subprocess.Popen([sys.executable, "-S", "-c", chain], stdout=subprocess.PIPE, start_new_session=True)
    limit = sys.getrecursionlimit()
    try:
        assert process.stdout.readline() == b"\n"
        sys.setrecursionlimit(len(inspect.stack()) + length // 2)
        assert len(list(processes._tree(process.pid))) == length + 1
        assert len({pid for pid, _ in processes._states(process.pid)}) == length + 1
    finally:
        sys.setrecursionlimit(limit)
        os.killpg(process.pid, 9)
        process.wait()


def test_a_process_that_has_ended_has_no_family():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert processes.watched_members(process.pid) == [process.pid]
