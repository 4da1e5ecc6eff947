"""The levels as a whole: which one a host gets, what it says of it, and that honest candidates work at each."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from sandbox.build.artifacts import ArtifactStore
from sandbox.jail import probe, seccomp
from sandbox.oracle.draft import Job
from sandbox.oracle.evaluate import Judge
from sandbox.protocol import Options, TaskSpec
from sandbox.settings import SettingsError, make_scratch, make_settings
from tests.sandbox.helpers import ADD_BIAS, GOOD_BODY, ROOT, kernel, module, python_module, running_server
from tests.sandbox.levels import offered_or_skip

TRITON_ADD = """
import torch, triton
import triton.language as tl

@triton.jit
def add_relu(x_ptr, bias_ptr, out_ptr, n, features, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask) + tl.load(bias_ptr + offsets % features, mask=mask)
    tl.store(out_ptr + offsets, tl.maximum(x, 0.0), mask=mask)

class ModelNew(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(features))

    def forward(self, x):
        out = torch.empty_like(x)
        add_relu[(triton.cdiv(x.numel(), 1024),)](x, self.bias, out, x.numel(), x.shape[1], BLOCK=1024)
        return out
"""


@pytest.mark.parametrize("level", ["strict", "standard"])
def test_honest_candidates_are_judged_as_ever(level):
    offered_or_skip(level)
    scratch = make_scratch()
    store = ArtifactStore(scratch / "cache")
    judge = Judge(scratch=scratch, store=store, threads=1, isolation=level)
    quick = Options(timing="none", load_s=60, check_s=30, build_s=120, memory_bytes=4 << 30)
    candidates = {
        "kernel": (kernel(GOOD_BODY), quick),
        "module": (python_module("        return torch.relu(x + self.bias)"), quick),
        "triton": (module(TRITON_ADD, "triton"), quick.model_copy(update={"target_arch": "sm_90"})),
    }
    try:
        for name, (candidate, options) in candidates.items():
            job = Job(id=name, task=TaskSpec(reference=ADD_BIAS), candidate=candidate, options=options)
            result = judge.evaluate(job)
            assert result.outcome == "ok", (name, result.feedback)
            if name == "triton":
                assert any("compiles for sm_90: yes" in note for note in result.notes), result.notes
    finally:
        judge.close()
        shutil.rmtree(scratch, ignore_errors=True)


def no_namespaces():
    """In a child about to execute: what a container does to user namespaces and mounts."""
    from sandbox.jail.syscalls import PR_SET_NO_NEW_PRIVS, prctl

    prctl(PR_SET_NO_NEW_PRIVS, 1)
    seccomp.load(seccomp.program_without_namespaces(os.uname().machine))


def test_where_namespaces_are_forbidden_the_next_lower_level_is_found_and_reported(tmp_path):
    offered_or_skip("standard")
    done = subprocess.run(
        [sys.executable, "-m", "sandbox", "doctor"],
        cwd=ROOT,
        preexec_fn=no_namespaces,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert "isolation level: standard (the default here)" in done.stdout, done.stdout + done.stderr
    assert re.search(r"isolation strict\s+cannot be had: .*Operation not permitted", done.stdout)
    assert "lacking:" in done.stdout and "namespaces (" in done.stdout.split("lacking:")[1]


def test_a_server_does_not_start_below_the_level_asked_for(monkeypatch):
    poor = replace(probe.offered(), problems={"strict": "mount: refused", "standard": "Landlock is off", "none": ""})
    monkeypatch.setattr(probe, "offered", lambda: poor)
    with pytest.raises(SettingsError, match="strict cannot be had here: mount: refused; the best here is none"):
        make_settings(device="cpu", isolation="strict")
    with pytest.raises(SettingsError, match="mount: refused.*Landlock is off.*--isolation none"):
        make_settings(device="cpu")
    assert make_settings(device="cpu", isolation="none").isolation == "none"
    level = probe.isolation("none")
    assert level.name == "none" and any("mount: refused" in text for text in level.missing)


def test_a_server_says_at_which_level_it_runs(short_dir):
    offered_or_skip("standard")
    with running_server(short_dir, "--workers", "1", "--isolation", "standard") as server:
        with server.client() as client:
            health = client.health()
        level = probe.isolation("standard")
        assert (health.level, health.features, health.missing) == (
            "standard",
            [*level.features],
            [*level.missing],
        )
        (short_dir / "task.py").write_text(ADD_BIAS)
        (short_dir / "good.cpp").write_text(kernel(GOOD_BODY).source)
        files = ["--task", f"{short_dir}/task.py", "--candidate", f"{short_dir}/good.cpp", "--timing", "none"]
        command = [
            sys.executable,
            "-m",
            "sandbox",
            "eval",
            *files,
            "--socket",
            str(server.socket),
            "--isolation",
        ]
        refused, done = (subprocess.run([*command, level], cwd=ROOT, capture_output=True, text=True, timeout=120) for level in ("strict", "standard"))
    assert refused.returncode == 2 and "runs at level standard" in refused.stderr
    assert done.returncode == 0 and "outcome   ok" in done.stdout, done.stdout + done.stderr


def test_every_architecture_has_a_complete_filter():
    for machine in seccomp.ARCHITECTURES:
        code = seccomp.program(machine, False, 1234, False)
        assert len(code) % 8 == 0 and len(code) // 8 < 4096


def probed(prepare, directory):
    """Best level and problems that the probe finds after `prepare`, in a process of its own: the probe forks, which this
    one with its threads must not."""
    program = prepare + "offer = probe._try_all(sys.argv[1])\nprint(json.dumps([offer.best, offer.problems]))\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(directory)],
        cwd=directory, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize("broken_everywhere", [False, True])
def test_a_level_at_which_cuda_does_not_start_is_not_offered_on_a_machine_with_a_gpu(tmp_path, broken_everywhere):
    offered_or_skip("strict")
    refused = "True" if broken_everywhere else "os.getcwd() == '/private'"
    prepare = f"""
import json, os, sys
from sandbox.jail import probe
there = os.path.exists
os.path.exists = lambda path: path == "/dev/nvidiactl" or there(path)
probe.CUDA_CHECK = "import os\\nassert not ({refused}), 'cuInit answers 304'"
"""
    best, problems = probed(prepare, tmp_path)
    if broken_everywhere:  # the GPU is out of order, which is no fault of the jail's
        assert best == "strict" and not any(problems.values())
    else:
        assert best != "strict"
        assert "CUDA" in problems["strict"] and "304" in problems["strict"]


def test_a_program_that_ends_at_once_is_in_its_jail_however_late_the_zygote_looks(tmp_path):
    offered_or_skip("strict")
    prepare = """
import json, os, sys, time
from sandbox.jail import confine, probe
look = os.pidfd_open
def late(pid, *rest):
    time.sleep(0.05)
    return look(pid, *rest)
os.pidfd_open = late
"""
    best, problems = probed(prepare, tmp_path)
    assert best == "strict" and not any(problems.values()), problems
