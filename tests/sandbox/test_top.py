"""`top`: what it reads from a server and what it shows of it."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from sandbox.protocol import Health, QueueHealth
from sandbox.top import Look, parse, view
from tests.sandbox.helpers import kernel

METRICS = """# HELP sandbox_evaluations_total Finished evaluations by outcome
# TYPE sandbox_evaluations_total counter
sandbox_evaluations_total{outcome="ok"} 30
sandbox_evaluations_total{outcome="incorrect"} 1e+01
sandbox_stage_seconds_total{stage="check"} 12.5
sandbox_running{stage="built"} 2
sandbox_running{stage="timed"} 0
sandbox_exclusive_seconds_total{device="cuda:0"} 6
sandbox_retries_total 3
what is this
"""


def look(at_s, metrics):
    queue = QueueHealth(waiting=7, running=2, limit=100, workers=2, workers_ready=1)
    health = Health(status="ok", version="1", level="strict", devices=["cuda:0"], queue=queue, uptime_s=3723)
    return Look(at_s, health, parse(metrics))


def shown(renderable):
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    return console.file.getvalue()


def test_metrics_are_read_by_name_and_label():
    found = parse(METRICS)
    assert found["sandbox_evaluations_total"] == {"ok": 30.0, "incorrect": 10.0}
    assert found["sandbox_retries_total"] == {"": 3.0} and len(found) == 5


def test_rates_are_what_came_between_two_looks():
    before = METRICS.replace('"ok"} 30', '"ok"} 20').replace('"cuda:0"} 6', '"cuda:0"} 5')
    text = shown(view(look(10.0, before), look(12.0, METRICS)))
    assert "verdicts 5.0/s" in text and "waiting 7 of 100" in text and "oracles 1/2" in text and "up 1:02:03" in text
    lines = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert lines["ok"] == ["30", "5.00"] and lines["incorrect"] == ["10", "0.00"]
    assert lines["check"] == ["12.5", "0.00"] and lines["cuda:0"] == ["6", "0.50"]
    assert "running after: built 2\n" in text


def test_the_command_shows_a_running_server(sandbox, server, task, quick):
    sandbox.evaluate(task, [kernel("out[0] = 1.0f;", "// top")], quick)
    command = [sys.executable, "-m", "sandbox", "top", "--socket", str(server.socket), "--every", "0.2", "--once"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "waiting 0 of" in done.stdout and "incorrect" in done.stdout and "check" in done.stdout


@pytest.mark.parametrize(("every", "socket", "said"), [("0", "", "--every"), ("1", "/nowhere", "no sandbox answers")])
def test_what_cannot_be_watched_is_said(server, every, socket, said):
    command = [sys.executable, "-m", "sandbox", "top", "--socket", socket or str(server.socket), "--every", every]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and said in done.stderr


def test_a_fleet_s_nodes_are_shown():
    nodes = 'sandbox_node_workers_ready{node="a-1"} 2\nsandbox_node_workers_ready{node="b-2"} 0\nsandbox_node_evaluations_total{node="a-1"} '
    text = shown(view(look(0.0, METRICS + nodes + "1"), look(2.0, METRICS + nodes + "7")))
    lines = [line.split() for line in text.splitlines()]
    assert "oracles by node: a-1 2  b-2 0" in text and ["a-1", "7", "3.00"] in lines
    assert "node" not in shown(view(look(0.0, METRICS), look(2.0, METRICS)))
