"""An oracle process whose broker goes away ends at once and without a word, whatever it was doing."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.oracle.failures import Cancelled
from sandbox.oracle.worker import BrokerGate, BrokerLink
from sandbox.protocol import Options, TaskSpec
from tests.sandbox.helpers import ROOT, python_module

ENDLESS = "        import time; time.sleep(1000)"
LEAVE_S = 20.0


@pytest.fixture
def oracle(tmp_path):
    """A function that starts an oracle process; it returns the process and the broker's end of its link."""
    started = []

    def start() -> tuple[subprocess.Popen, socket.socket]:
        ours, theirs = socket.socketpair()
        settings = {
            "parent": os.getpid(), "scratch": str(tmp_path), "cache": str(tmp_path / "cache"), "threads": 1,
            "isolation": None, "log_level": "WARNING", "log_format": "text",
        }  # fmt: skip
        with theirs:
            command = [sys.executable, "-P", "-m", "sandbox.oracle.worker", str(theirs.fileno())]
            process = subprocess.Popen(
                [*command, json.dumps(settings)], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        started.append((process, ours))
        return process, ours

    yield start
    for process, ours in started:
        ours.close()
        process.kill()
        process.communicate()


def is_quiet(process: subprocess.Popen, scratch: Path) -> bool:
    """Whether the process ends with status 0, without output and without a jail left on the disk."""
    output, _ = process.communicate(timeout=LEAVE_S)
    assert (process.returncode, output.decode()) == (0, "")
    return not list(scratch.glob("jail-*"))


def test_while_it_starts(oracle, tmp_path):
    process, ours = oracle()
    ours.close()
    assert is_quiet(process, tmp_path)


def test_while_it_waits_for_work(oracle, tmp_path):
    process, ours = oracle()
    assert json.loads(ours.makefile().readline()) == {"op": "ready"}
    ours.close()
    assert is_quiet(process, tmp_path)


@pytest.mark.parametrize("unread", [False, True])
def test_while_it_judges(oracle, tmp_path, task, unread):
    process, ours = oracle()
    lines = ours.makefile()
    assert json.loads(lines.readline())["op"] == "ready"
    job = {
        "task": TaskSpec.model_dump(task),
        "candidate": python_module(ENDLESS).model_dump(),
        "options": Options(timing="none", check_s=300).model_dump(),
    }
    ours.sendall(json.dumps({"op": "evaluate", "id": "1", **job}).encode() + b"\n")
    message = json.loads(lines.readline())
    assert message["op"] == "acquire"
    ours.sendall(json.dumps({"op": "granted", "ticket": message["ticket"]}).encode() + b"\n")
    if not unread:
        while message.get("stage") != "loaded":
            message = json.loads(lines.readline())
    lines.close()
    ours.close()
    assert is_quiet(process, tmp_path)


def test_every_way_to_speak_or_listen_ends_quietly():
    def gated(link):
        with BrokerGate(link).exclusive("cpu"):
            pytest.fail("nobody granted it")

    ways = [gated, BrokerLink.receive, BrokerLink.interrupt, lambda link: link.await_grant(1)]
    ways += [lambda link: link.send({"op": "ready"}), lambda link: link.send({"op": "x" * (1 << 22)})]
    for way in ways:
        for said in (b"", b"unread"):
            ours, theirs = socket.socketpair()
            with theirs:
                theirs.sendall(said)
                ours.close()
                with pytest.raises(SystemExit) as end:
                    way(BrokerLink(theirs))
                assert end.value.code == 0


def spoken(*messages):
    """A link to which the broker has said this."""
    ours, theirs = socket.socketpair()
    ours.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))
    return BrokerLink(theirs), ours


def test_work_that_comes_while_the_last_one_is_tidied_up_is_kept_in_order():
    link, ours = spoken({"op": "evaluate", "id": "2"}, {"op": "granted", "ticket": 7}, {"op": "evaluate", "id": "3"})
    with ours:
        link.interrupt()  # all of it arrives at once, and the socket will not be readable again
        assert [link.receive()["id"] for _ in range(2)] == ["2", "3"]
    link, ours = spoken({"op": "evaluate", "id": "2"}, {"op": "granted", "ticket": 7})
    with ours:
        link.await_grant(7)
        assert link.receive() == {"op": "evaluate", "id": "2"} and not link.withdrawn("2")


def test_a_cancellation_ends_what_goes_on_and_is_remembered_for_what_has_not_begun():
    link, ours = spoken({"op": "evaluate", "id": "2"}, {"op": "cancel", "id": "2"}, {"op": "cancel", "id": "1"})
    with ours:
        link.current = "1"
        with pytest.raises(Cancelled):
            link.interrupt()
        assert link.receive() == {"op": "evaluate", "id": "2"} and link.withdrawn("2") and not link.withdrawn("1")


def test_what_comes_in_one_piece_is_heard_at_once():
    link, ours = spoken({"op": "evaluate", "id": "2"}, {"op": "cancel", "id": "2"})
    with ours:
        link.current = link.receive()["id"]
        with pytest.raises(Cancelled):
            link.withdrawn("2")
    link, ours = spoken({"op": "granted", "ticket": 7}, {"op": "cancel", "id": "2"})
    with ours:
        link.current = "2"
        with pytest.raises(Cancelled):
            link.await_grant(7)


def test_an_evaluation_that_was_withdrawn_before_it_began_is_not_judged(oracle, task):
    process, ours = oracle()
    lines = ours.makefile()
    assert json.loads(lines.readline())["op"] == "ready"
    job = {"task": TaskSpec.model_dump(task), "candidate": python_module(ENDLESS).model_dump()}
    first, second = ({"op": "evaluate", "id": name, **job, "options": Options(timing="none").model_dump()} for name in "12")
    ours.sendall(json.dumps(first).encode() + b"\n")
    assert json.loads(lines.readline())["op"] == "acquire"
    for message in (second, {"op": "cancel", "id": "2"}, {"op": "cancel", "id": "1"}):
        ours.sendall(json.dumps(message).encode() + b"\n")
    said = []
    while [message.get("id") for message in said if message["op"] == "result"] != ["1", "2"]:
        said.append(json.loads(lines.readline()))
    assert [message["result"] for message in said if message["op"] == "result"] == [None, None]
    assert not any(message["op"] == "acquire" for message in said)
