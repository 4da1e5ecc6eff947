"""Tests that need an NVIDIA GPU: `python -m pytest tests/gpu`. One real server process serves them all."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandbox.client import SandboxClient, SandboxUnavailable
from sandbox.jail import nvml
from sandbox.protocol import Candidate, Options, TaskSpec

KERNELS = Path(__file__).parent / "kernels"
START_S = 120.0


def pytest_collection_modifyitems(items):
    """Skips everything here, with the reason, on a machine without a GPU."""
    if nvml.gpus():
        return
    reason = "no NVIDIA GPU: nvidia-smi's library (libnvidia-ml.so.1) finds none on this machine"
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def server_log(tmp_path_factory):
    """File of what the server writes."""
    return tmp_path_factory.mktemp("log") / "server.log"


@pytest.fixture(scope="session")
def server(tmp_path_factory, server_log):
    """A server for cuda:0 with an empty cache; its log is printed if a test fails to reach it.

    SANDBOX_TEST_ISOLATION names an isolation level other than the best of this machine, SANDBOX_TEST_LOG a file for the log.
    """
    directory = tmp_path_factory.mktemp("server")
    socket, log = directory / "sandbox.sock", server_log
    asked = os.environ.get("SANDBOX_TEST_ISOLATION")
    level = ["--isolation", asked] if asked else []
    command = [sys.executable, "-m", "sandbox", "serve", "--socket", str(socket), "--device", "cuda:0"]
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*command, "--workers", "1", "--cache", str(directory / "cache"), *level],
            stdout=output, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2], env=os.environ,
        )  # fmt: skip
    client = SandboxClient(socket, timeout_s=60)
    deadline = time.monotonic() + START_S
    try:
        while True:
            try:
                if client.health().queue.workers_ready:
                    break
            except SandboxUnavailable:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}", pytrace=False)
            time.sleep(0.2)
        yield client
    finally:
        client.close()
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if keep := os.environ.get("SANDBOX_TEST_LOG"):
            Path(keep).write_text(log.read_text())


@pytest.fixture
def judge(server, request):
    """Judges a file of `kernels/` against a task there: judge("task_add", "add_triton", **options).

    `change=(old, new)` is applied to the candidate's text, `suffix` is appended to it.
    """

    def evaluate(task, candidate, language="triton", change=("", ""), suffix="", **options):
        spec = TaskSpec(reference=(KERNELS / f"{task}.py").read_text(), name=task, device="cuda:0")
        source = (KERNELS / f"{candidate}.py").read_text()
        assert change[0] in source
        source = source.replace(*change) + suffix
        (result,) = server.evaluate(spec, [Candidate(source=source, language=language)], Options(**options))
        timing = result.timing
        print(
            f"{candidate}: {result.outcome} at {result.stage}, coverage {result.coverage}, "
            f"speedup {timing and round(timing.speedup, 3)}, ms {timing and timing.candidate.median_ms}, "
            f"bound by {timing and timing.bound_by}, reward {result.reward.total:.3f}, "
            f"stages {result.stage_s}, cached {result.cached}\n  feedback: {result.feedback[:600]}"
        )
        return result

    return evaluate
