"""A server that is told to end finishes what it has, takes no more, and hands its results out before it goes."""

import asyncio
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from sandbox import drain as drain_module
from sandbox.client import SandboxBusy, SandboxUnavailable
from sandbox.drain import drain
from sandbox.protocol import Options
from sandbox.server import bind_socket
from tests.sandbox.helpers import GOOD_BODY, eventually, kernel, running_server

SLOW = Options(timing="none", check_s=20, correctness_trials=1, memory_bytes=1 << 30)


def slow(mark, seconds=2):
    """A right kernel that takes its time."""
    return kernel(GOOD_BODY + f"\nsleep({seconds});", f"#include <unistd.h>\n// {mark}")


def test_what_is_queued_is_finished_and_nothing_more_is_taken(short_dir, task):
    with running_server(short_dir, "--workers", "1", "--drain-s", "20") as server, server.client() as client:
        found = []
        waiting = threading.Thread(target=lambda: found.extend(client.evaluate(task, [slow("a"), slow("b")], SLOW)))
        waiting.start()
        with server.client(retry_for_s=0) as other:
            assert eventually(lambda: other.health().queue.running == 1)
            server.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: other.health().status == "draining")
            with pytest.raises(SandboxBusy, match="takes no more"):
                other.evaluate(task, [kernel(GOOD_BODY, "// too late")], SLOW)
        waiting.join(60)
        assert [result.outcome for result in found] == ["ok", "ok"]
        assert server.process.wait(30) == 0 and not server.socket.exists()


@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_told_twice_it_ends_at_once(short_dir, task, how, status):
    with running_server(short_dir, "--workers", "1", "--drain-s", "20") as server, server.client(retry_for_s=0) as client:
        ended = []

        def evaluate():
            try:
                client.evaluate(task, [slow("c", 15)], SLOW)
            except (SandboxBusy, SandboxUnavailable) as error:
                ended.append(error)

        waiting = threading.Thread(target=evaluate)
        waiting.start()
        with server.client(retry_for_s=0) as other:
            assert eventually(lambda: other.health().queue.running == 1)
        start = time.monotonic()
        server.process.send_signal(how)
        time.sleep(0.5)
        assert server.process.poll() is None
        server.process.send_signal(how)
        assert server.process.wait(30) == status and time.monotonic() - start < 10
        waiting.join(30)
        assert len(ended) == 1


def test_what_was_done_before_is_handed_out_too(short_dir, task):
    with running_server(short_dir, "--workers", "1", "--drain-s", "20") as server, server.client() as client:
        ids = client.submit(task, [kernel(GOOD_BODY, "// done before")], SLOW)
        assert eventually(lambda: client.health().queue.running + client.health().queue.waiting == 0)
        server.process.send_signal(signal.SIGTERM)
        assert eventually(lambda: client.health().status == "draining")
        time.sleep(1.0)
        assert client.result(ids[0]).outcome == "ok"
        assert server.process.wait(20) == 0


def test_an_ended_server_leaves_its_successors_socket_alone(short_dir):
    with running_server(short_dir, "--workers", "1") as server:
        server.socket.unlink()
        successor = bind_socket(server.socket)
        try:
            assert server.stop() == 0 and server.socket.exists()
        finally:
            successor.close()


def records(*states):
    """Records that are (done, fetched)."""
    found = []
    for done, fetched in states:
        record = SimpleNamespace(done=asyncio.Event(), fetched=fetched)
        if done:
            record.done.set()
        found.append(record)
    return found


def test_it_waits_for_clients_between_two_questions_but_not_for_those_that_have_gone(monkeypatch):
    monkeypatch.setattr(drain_module, "FETCH_S", 0.3)

    async def scenario():
        gone = records((True, True), (True, False))
        slow_reader = records((True, False), (True, False), (True, False))
        for number, record in enumerate(slow_reader):  # each within FETCH_S, all of them together not
            asyncio.get_running_loop().call_later(0.2 * (number + 1), setattr, record, "fetched", True)
        assert await drain(slow_reader, 60, lambda: False) == 0 and all(record.fetched for record in slow_reader)
        start = time.monotonic()
        assert await drain(gone, 60, lambda: False) == 0
        assert time.monotonic() - start >= 0.3
        slow_one = records((False, False))
        asyncio.get_running_loop().call_later(0.1, slow_one[0].done.set)
        asyncio.get_running_loop().call_later(0.2, lambda: setattr(slow_one[0], "fetched", True))
        assert await drain(slow_one, 60, lambda: False) == 0 and slow_one[0].fetched
        assert await drain(records((True, True), (False, False)), 0.1, lambda: False) == 1
        assert await drain(records((False, False)), 60, lambda: True) == 1
        assert await drain([], 60, lambda: False) == 0

    asyncio.run(scenario())
