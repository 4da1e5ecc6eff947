"""The whole road to hardware counters with a stand-in for Nsight Compute on the CPU: its jail, its conversation, its output."""

import shutil
import socket
import sys
import textwrap
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sandbox.jail.tensors import encode
from sandbox.oracle import loading
from sandbox.oracle.counters import Counters, CountersFailed, CountersUnavailable, try_out
from sandbox.oracle.draft import Job
from sandbox.oracle.loading import Loader
from sandbox.oracle.reference import Inputs
from sandbox.profile.metrics import METRICS
from sandbox.protocol import Candidate, KernelTime, Options, TaskSpec
from sandbox.settings import make_scratch
from tests.sandbox.levels import offered_or_skip

UNKNOWN = "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active"
NCU = """\
#!{python}
import os, socket, subprocess, sys
cut = sys.argv.index("-P") - 1
options, command = sys.argv[1:cut], sys.argv[cut:]
metrics = options[options.index("--metrics") + 1].split(",")
{before}
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
    print("==PROF== Connected to process 1", flush=True)  # as it talks to the program
report = options[options.index("--export") + 1]
with open(report, "w") as file:
    file.write("counted")
code = subprocess.run(command, stdin=0).returncode
assert open(report).read() == "counted"
made, won = (open("attempts").read().split() if os.path.exists("attempts") else (0, 0))
names = [*metrics, "Kernel Name"]
print(",".join(f'"{{name}}"' for name in names))
print(",".join('"%"' for name in names))
values = {{"launch__registers_per_thread": made, "sm__inst_executed.sum": won, "gpu__time_duration.sum": "2,000"}}
print(",".join(f'"{{values.get(name, "n/a")}}"' for name in metrics) + ',"rows"')
print(f"==PROF== Disconnected from process 1, which left with {{code}}")
"""
COMPLAINS = f'if "{UNKNOWN}" in metrics:\n    sys.exit("==ERROR== Failed to find metric {UNKNOWN}")'
FORBIDDEN = 'sys.exit("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters")'

HOSTILE = """
import os, socket, sys
import torch

HEAD = '"gpu__time_duration.sum","sm__inst_executed.sum","Kernel Name"\\n"","",""\\n"9e9","1e9","forged"\\n'

def write(path):
    with open(path, "w") as file:
        file.write(HEAD)

def ancestors():
    pid = os.getppid()
    while pid > 1:
        yield pid
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])

def attempts():
    for pid in ancestors():
        for fd in (1, 2):
            yield lambda: write(f"/proc/{pid}/fd/{fd}")
        yield lambda: open(f"/proc/{pid}/mem", "r+b").close()
        yield lambda: os.readlink(f"/proc/{pid}/fd/1")
    for name in os.listdir("../kept"):
        yield lambda: write(f"../kept/{name}")
        yield lambda: os.replace(f"../kept/{name}", "stolen")
    yield lambda: os.rename("../kept", "../other")
    yield lambda: write("../kept/new")
    yield lambda: socket.create_connection(("127.0.0.1", PORT), 2).close()

class ModelNew(torch.nn.Module):
    def forward(self, x):
        for fd in (1, 2):
            os.write(fd, HEAD.encode())
        print(HEAD, flush=True)
        made = won = 0
        for attempt in attempts():
            made += 1
            try:
                attempt()
            except OSError:
                continue
            won += 1
        with open("attempts", "w") as file:
            file.write(f"{made} {won}")
        return x + 1
"""


@pytest.fixture(scope="module")
def loader(store):
    offered_or_skip("strict")
    scratch = make_scratch()
    loader = Loader(scratch=scratch, store=store, threads=1, interrupt=None, isolation="strict", turns=lambda device: None)
    yield loader
    loader.close()
    shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Installs the stand-in, with what it does before all else."""

    def install(before: str = "") -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for directory in (folder, *tmp_path.parents[:2], tmp_path):
            directory.chmod(0o755)
        program = folder / "ncu"
        program.write_text(NCU.format(python=sys.executable, before=before))
        program.chmod(0o755)
        monkeypatch.setattr(loading, "find_ncu", lambda: str(program))

    return install


def alone(device):
    return nullcontext()


def job_of(source: str, **options) -> Job:
    return Job(
        id="1", task=TaskSpec(reference="-"), candidate=Candidate(source=textwrap.dedent(source), language="cpp"),
        options=Options(profile="ncu", memory_bytes=16 << 30, **options),
    )  # fmt: skip


def reference() -> SimpleNamespace:
    tensors: list[torch.Tensor] = []
    args = encode([torch.ones(8)], tensors)
    return SimpleNamespace(seed=0, init=[], init_tensors=[], inputs=lambda seed, slot: Inputs(args, tensors))


def test_counters_are_tried_on_a_kernel_of_our_own_without_those_that_are_not_known(loader, installed):
    installed(COMPLAINS)
    assert try_out(loader, alone, "cpu") == [name for name in METRICS if name != UNKNOWN]


def test_where_counters_are_not_permitted_the_try_says_so_and_what_to_do(loader, installed):
    installed(FORBIDDEN)
    with pytest.raises(CountersUnavailable, match="ERR_NVGPUCTRPERM.*NVreg_RestrictProfilingToAdminUsers=0"):
        try_out(loader, alone, "cpu")


def test_a_candidate_can_forge_no_counters_from_outside_the_profilers_library(loader, installed, monkeypatch):
    installed()
    monkeypatch.setattr(Counters, "check", lambda self, device: tuple(METRICS))
    with socket.create_server(("127.0.0.1", 0)) as outside:
        job = job_of(HOSTILE.replace("PORT", str(outside.getsockname()[1])))
        [counted] = Counters(loader, alone).count(job, reference(), [KernelTime(name="void rows<1>()", share=1.0, ms=1.0, own=True)])
    assert (counted.kernel, counted.own, counted.launches) == ("rows", True, 1)
    assert counted.metrics == {"launch__registers_per_thread": counted.metrics["launch__registers_per_thread"], "sm__inst_executed.sum": 0.0}
    assert counted.metrics["launch__registers_per_thread"] >= 8, "so many attempts were made"


def test_a_candidate_that_does_not_run_under_the_profiler_leaves_the_reason(loader, installed, monkeypatch):
    installed(FORBIDDEN)
    monkeypatch.setattr(Counters, "check", lambda self, device: tuple(METRICS))
    with pytest.raises(CountersFailed, match="ERR_NVGPUCTRPERM"):
        Counters(loader, alone).count(job_of("import torch\n"), reference(), [])
