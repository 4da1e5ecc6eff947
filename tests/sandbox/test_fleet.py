"""A fleet on a real Ray cluster of two nodes on this machine: work is shared, nodes are lost and join, and no verdict is lost or given twice."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from sandbox.client import SandboxClient
from sandbox.protocol import Candidate, Options
from sandbox.top import parse
from tests.sandbox.helpers import GOOD_BODY, ROOT, Server, command_of, eventually, kernel, running_server

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(240)]
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
OPTIONS = Options(timing="none", correctness_trials=1, check_s=20, memory_bytes=1 << 30)
QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 4,
}
"""How Ray finds out that a node has gone."""
PACE_S = 0.3


@dataclass
class Fleet:
    """A cluster and the server that judges on it."""

    cluster: object
    server: Server
    client: SandboxClient

    def kill(self, node) -> list[psutil.Process]:
        """Kills a node; returns what the sandbox had running on it. Ray's own agents may take a minute to see that their node has gone."""
        family = processes_of(node)
        self.cluster.remove_node(node, allow_graceful=False)
        agents = [process for process in family if alive(process) and process.name().startswith("ray::") and "Agent" in process.name()]
        for agent in agents:
            agent.kill()
        return [process for process in family if process not in agents]

    def nodes(self) -> dict[str, float]:
        """Oracles that are up, by the beginning of their node's id."""
        return {name.rpartition("-")[2]: n for name, n in parse(self.client.metrics()).get("sandbox_node_workers_ready", {}).items() if n}

    def judged(self) -> Counter:
        """Evaluations that came to an end, by the beginning of their node's id."""
        values = parse(self.client.metrics())["sandbox_node_evaluations_total"]
        return Counter({name.rpartition("-")[2]: int(n) for name, n in values.items() if name})

    def verdicts(self) -> int:
        return int(sum(parse(self.client.metrics())["sandbox_evaluations_total"].values()))

    def have_two(self) -> None:
        """Adds what is missing to two nodes that serve."""
        if len(self.cluster.list_all_nodes()) < 2:
            self.cluster.add_node(**NODE)
        assert eventually(lambda: len(self.nodes()) == 2 and self.client.health().status == "ok", 60), self.client.health().missing


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="sbt-", dir="/tmp") as name:
        for variable, value in {**ENVIRONMENT, "RAY_TMPDIR": name}.items():
            patch.setenv(variable, value)
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        try:
            cluster.add_node(**NODE, _system_config=QUICK_TO_NOTICE)
            cluster.add_node(**NODE)
            arguments = ("--fleet", "ray", "--fleet-address", cluster.address, "--workers", "1")
            with running_server(Path(name), *arguments) as server, server.client() as client:
                yield Fleet(cluster, server, client)
        finally:
            cluster.shutdown()


def short_id(node) -> str:
    return node.node_id[:8]


def processes_under(pids: list[int]) -> list[psutil.Process]:
    found = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [*found, *(child for process in found for child in process.children(recursive=True))]


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def processes_of(node) -> list[psutil.Process]:
    """All processes of a Ray node, with the oracles and jails on it."""
    return processes_under([info.process.pid for infos in node.all_processes.values() for info in infos])


def mixed(mark: str, count: int) -> tuple[list[Candidate], list[str]]:
    """Candidates that take a while, and their right verdicts."""
    pause = f"usleep({int(PACE_S * 1e6)});"
    kinds = [(GOOD_BODY + pause, "ok"), ("out[0] = 77;" + pause, "incorrect"), ("broken;", "build_failed")]
    chosen = [kinds[number % 3 if number % 6 else 0] for number in range(count)]
    candidates = [kernel(body, f"#include <unistd.h>\n// {mark} {number}") for number, (body, _) in enumerate(chosen)]
    return candidates, [outcome for _, outcome in chosen]


def watched(client: SandboxClient, ids: list[str]) -> tuple[threading.Thread, Counter]:
    """Counts, until all are done, how often each evaluation is said to be."""
    ended: Counter = Counter()

    def watch() -> None:
        for event in client.stream(ids):
            ended[event.id] += event.state == "done"

    thread = threading.Thread(target=watch)
    thread.start()
    return thread, ended


def test_both_nodes_judge_and_the_verdicts_are_right(fleet, task):
    fleet.have_two()
    before = fleet.judged()
    candidates, expected = mixed("both", 12)
    results = fleet.client.evaluate(task, candidates, OPTIONS)
    assert [result.outcome for result in results] == expected
    assert all(result.attempts == 1 for result in results)
    counts = fleet.judged() - before
    assert set(counts) == {short_id(node) for node in fleet.cluster.list_all_nodes()} and counts.total() == 12
    assert min(counts.values()) >= 3
    health = fleet.client.health()
    assert (health.queue.workers, health.queue.workers_ready, health.devices) == (2, 2, ["cpu"])


def test_a_running_evaluation_can_be_cancelled(fleet, task):
    fleet.have_two()
    [one] = fleet.client.submit(task, [kernel(f"{GOOD_BODY} sleep(15);", "#include <unistd.h>\n// cancelled")], OPTIONS)
    assert eventually(lambda: fleet.client.result(one, 0).stage == "loaded")
    start = time.monotonic()
    assert fleet.client.cancel(one).outcome == "cancelled" and time.monotonic() - start < 5
    assert eventually(lambda: fleet.client.health().queue.running == 0)


def test_a_stranger_on_the_brokers_port_is_refused_and_changes_nothing(fleet):
    fleet.have_two()
    listening = [c.laddr for c in psutil.Process(fleet.server.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    [address] = listening
    for hello in (b"0" * 64 + b"\n", b'{"op": "ready"}\n' * 100):
        with socket.create_connection(tuple(address), timeout=10) as stranger:
            stranger.sendall(hello)
            try:
                assert stranger.recv(100) == b""
            except ConnectionError:
                pass
    health = fleet.client.health()
    assert (health.status, health.queue.workers_ready) == ("ok", 2)


def test_a_node_killed_under_load_costs_no_verdict_and_gives_none_twice(fleet, task):
    fleet.have_two()
    candidates, expected = mixed("killed", 16)
    verdicts_before = fleet.verdicts()
    ids = fleet.client.submit(task, candidates, OPTIONS)
    with fleet.server.client() as other:
        watching, ended = watched(other, ids)
        assert eventually(lambda: fleet.client.health().queue.running == 2)
        [victim] = fleet.cluster.worker_nodes
        family = fleet.kill(victim)
        results = [fleet.client.result(one, 60) for one in ids]
        watching.join(30)
    assert [result.outcome for result in results] == expected
    assert max(result.attempts for result in results) == 2, "what ran on the lost node ran again"
    assert ended == {one: 1 for one in ids}
    assert fleet.verdicts() - verdicts_before == len(ids)
    assert eventually(lambda: not any(map(alive, family)), 30), family
    assert eventually(lambda: fleet.client.health().queue.workers == 1, 60), "the lost node is out of service"
    assert fleet.client.health().status == "ok"


def test_a_node_that_joins_later_serves(fleet, task):
    fleet.have_two()
    [newest] = fleet.cluster.worker_nodes
    before = fleet.judged()
    candidates, expected = mixed("joined", 8)
    assert [result.outcome for result in fleet.client.evaluate(task, candidates, OPTIONS)] == expected
    assert (fleet.judged() - before)[short_id(newest)] >= 2


def test_a_killed_oracle_is_replaced_on_its_node(fleet, task):
    fleet.have_two()
    [one] = fleet.client.submit(task, [kernel(f"{GOOD_BODY} sleep(1);", "#include <unistd.h>\n// oracle dies")], OPTIONS)
    assert eventually(lambda: fleet.client.result(one, 0).stage == "loaded")
    for node in fleet.cluster.list_all_nodes():
        for process in processes_of(node):
            if "sandbox.oracle.worker" in command_of(process):
                os.kill(process.pid, signal.SIGKILL)
    result = fleet.client.result(one, 60)
    assert result.outcome == "ok" and result.attempts in (2, 3)
    fleet.have_two()


def test_where_no_cluster_is_it_is_said(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "sandbox", "serve", "--fleet", "ray", "--fleet-address", address, "--socket", str(tmp_path / "s")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and f"no Ray cluster answers at {address}" in done.stderr and "ray start" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "s").exists()


def test_when_the_cluster_goes_evaluations_wait_and_health_says_so_and_nothing_is_left(fleet, task):
    """The last test: it ends the cluster."""
    fleet.have_two()
    family = [process for node in fleet.cluster.list_all_nodes() for process in fleet.kill(node)]
    assert eventually(lambda: "evaluations wait" in " ".join(fleet.client.health().missing), 30), fleet.client.health()
    [one] = fleet.client.submit(task, [kernel(GOOD_BODY, "// nobody is there")], OPTIONS)
    health = fleet.client.health()
    assert (health.status, health.queue.workers_ready, health.queue.waiting) == ("degraded", 0, 1)
    assert fleet.client.result(one, 0).state == "queued"
    assert fleet.client.cancel(one).outcome == "cancelled"
    assert eventually(lambda: not any(map(alive, family)), 30), family
