"""`bench` measures a real server; a server whose verdicts are wrong gets no numbers."""

import json
import subprocess
import sys

import pytest

from sandbox.bench import BenchError, Report, run
from sandbox.protocol import EvaluationResult, Health, QueueHealth
from tests.sandbox.helpers import ROOT


def bench(*arguments):
    command = [sys.executable, "-m", "sandbox", "bench", "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)


def test_a_running_server_is_measured(server):
    done = bench("--socket", str(server.socket), "--candidates", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = Report(**json.loads(done.stdout))
    assert (report.device, report.language, report.workers, report.candidates) == ("cpu", "cpp", 2, 2)
    assert 0 < report.call_ms < 1000 * report.latency_s <= 1000 * report.worst_latency_s
    assert 0 < report.alone_ms < 1000 * report.worst_latency_s and report.spread >= 1
    assert report.repeats_per_s > report.throughput_per_s > 0


def test_numbers_for_people():
    text = "\n".join(
        Report(
            device="cuda:0", language="triton", workers=8, call_ms=0.5, candidates=16, latency_s=0.9, worst_latency_s=1.25, alone_ms=88,
            throughput_per_s=4.1, repeats_per_s=2345.6, spread=1.012,
        ).lines()
    )  # fmt: skip
    assert text.splitlines()[0] == "triton on cuda:0, 8 oracles"
    for number in ("0.50 ms", "0.90 s", "worst 1.25 s", "88 ms", "4.10 /s", "2,346 /s", "1.012", "16 new candidates at once"):
        assert number in text


def test_a_verdict_other_than_ok_ends_it():
    class Client:
        def health(self):
            queue = QueueHealth(waiting=0, running=0, limit=1, workers=1, workers_ready=1)
            return Health(status="ok", version="1", level="none", devices=["cpu"], queue=queue)

        def evaluate(self, task, candidates, options):
            return [EvaluationResult(id="e", state="done", outcome="build_failed", feedback="no compiler") for _ in candidates]

    with pytest.raises(BenchError, match="build_failed: no compiler"):
        run(Client(), "cpu", 1, lambda text: None)


@pytest.mark.parametrize("count", ["0", "1025"])
def test_a_senseless_number_of_candidates_is_refused(count):
    done = bench("--candidates", count)
    assert done.returncode == 2 and "between 1 and 1024" in done.stderr
