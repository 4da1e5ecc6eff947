"""The training command against a real sandbox process: a whole tiny run, an interruption, and wrong use."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "--config.tasks.kinds=('map',)", "--config.tasks.levels=(2,)", "--config.tasks.generated=0", "--config.tasks.rl_fresh=0",
    "--config.tasks.rl_checked=0", "--config.rollout.checked_tasks=0",
    "--config.model.d_model=16", "--config.model.n_layers=1", "--config.model.n_heads=2", "--config.model.n_kv_heads=1",
    "--config.model.head_dim=8", "--config.model.d_ff=32", "--config.model.head_rank=2", "--config.codec.vocab_size=400",
    "--config.corpus.variants_per_task=2", "--config.corpus.samples_per_task=2", "--config.sft.steps=3",
    "--config.rollout.tasks=2", "--config.rollout.selections=1", "--config.rollout.max_policy_tokens=40", "--config.rl.steps=1",
    "--config.evaluation.samples=1", "--config.evaluation.max_tasks=2", "--config.sandbox.workers=2",
]  # fmt: skip


def command(workdir: Path, *flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "scripts/train.py"), f"--config={ROOT}/configs/demo.py", f"--workdir={workdir}", *flags]


def train(workdir: Path, *flags: str, timeout_s: float = 240) -> subprocess.CompletedProcess:
    return subprocess.run(command(workdir, *flags), capture_output=True, text=True, timeout=timeout_s, cwd=workdir.parent)


def left_behind(workdir: Path) -> list[str]:
    """Command lines of living processes that mention the workdir."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(workdir) in line and process.pid != os.getpid() and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found


def wait_until_gone(workdir: Path, patience_s: float = 20) -> list[str]:
    give_up = time.monotonic() + patience_s
    while (left := left_behind(workdir)) and time.monotonic() < give_up:
        time.sleep(0.2)
    return left


@pytest.fixture
def unused():
    """--sandbox=... of a socket on which somebody listens: for mistakes that are found before anything is judged, as starting a sandbox
    takes several times as long as finding them."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:  # pytest's own folders may be too long for a socket
        listening.bind(f"{folder}/s")
        listening.listen()
        yield f"--sandbox={folder}/s"


def test_an_interrupted_run_leaves_no_process_and_the_same_command_finishes_it(tmp_path, unused):
    workdir = tmp_path / "run"
    with open(tmp_path / "out", "w") as out:
        first = subprocess.Popen(command(workdir, *TINY), stdout=out, stderr=out, cwd=tmp_path, start_new_session=True)
        journal = workdir / "journal_corpus.jsonl"
        give_up = time.monotonic() + 120
        while not (journal.exists() and journal.stat().st_size) and first.poll() is None and time.monotonic() < give_up:
            time.sleep(0.05)
        judged = journal.read_bytes()
        first.send_signal(signal.SIGINT)
        assert first.wait(timeout=60) == 130, (tmp_path / "out").read_text()
    assert "goes on where it stopped" in (tmp_path / "out").read_text()
    assert "os.fork()" not in (tmp_path / "out").read_text(), "the sandbox is forked before JAX starts its threads"
    assert wait_until_gone(workdir) == []
    assert journal.read_bytes().startswith(judged)

    # The second time the sandbox is killed in the middle of the work: it is started again, and the run waits for it.
    before = journal.read_bytes()
    with open(tmp_path / "err", "w") as err:
        running = subprocess.Popen(command(workdir, *TINY), stdout=subprocess.PIPE, stderr=err, text=True, cwd=tmp_path)
        while journal.exists() and journal.read_bytes() == before and running.poll() is None:
            time.sleep(0.02)
        server = next(p for p in psutil.Process(running.pid).children() if "serve" in p.cmdline())
        server.kill()
        output, _ = running.communicate(timeout=240)
    said = (tmp_path / "err").read_text()
    assert running.returncode == 0, said[-3000:]
    assert "the sandbox died (status -9); starting it again" in said
    for words in ("before RL", "compiled", "correct", "Fast_1", "Fast_1.5", "mean speedup", "skills:", "proposed"):
        assert words in output
    for name in ("report.html", "library.sqlite", "library.jsonl", "metrics.jsonl", "eval_sft.json", "eval_rl.json"):
        assert (workdir / name).stat().st_size > 0 or name == "library.jsonl"
    assert list((workdir / "tensorboard").iterdir()) and (workdir / "checkpoints" / "rl" / "1").is_dir()
    kernels = [json.loads(line) for line in open(workdir / "corpus.jsonl")]
    assert any(k["verdict"]["speedup"] > 0 for k in kernels)
    assert wait_until_gone(workdir) == []

    needs = "generation needs about"
    assert said.count(needs) == 1 and (workdir / "run.log").read_text().count(needs) > 1, "told before the first step, and once"
    assert "attention in training: xla" in said
    told = train(workdir, *TINY, "--mode=eval_sft", unused)
    assert told.returncode == 0 and "cold start evaluated: " in told.stdout and str(workdir / "eval_sft.json") in told.stdout

    third = train(workdir, *TINY, "--config.sft.lr=1e-3", unused)
    assert third.returncode == 1 and "sft.lr: 0.008 -> 0.001" in third.stderr and "another --workdir" in third.stderr


def test_a_full_disk_ends_with_one_clear_error_and_what_was_judged_stays(tmp_path):
    """The workdir lies on a file system of a few hundred kilobytes, in a mount namespace of the test's own."""
    workdir = tmp_path / "small" / "run"
    workdir.parent.mkdir()
    inner = shlex.join(command(workdir, *TINY))
    script = f"mount -t tmpfs -o size=400k tmpfs {workdir.parent} && {{ {inner}; echo status $?; wc -l {workdir}/journal_corpus.jsonl; }}"
    if subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", str(workdir.parent)], capture_output=True).returncode:
        pytest.skip("no user namespaces with mounts here")
    found = subprocess.run(["unshare", "-Urm", "sh", "-c", script], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert "status 1" in found.stdout, found.stderr[-3000:]
    assert "Traceback" not in found.stderr
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("error:") and ("no space left" in last.lower() or "disk is full" in last.lower()), last
    assert "again" in last


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--config=configs/nope.py"], "configs/nope.py"),
        (["--config.rl.learning_rate=1"], "error: --config.rl.learning_rate=1: the recipe has no key"),
        (["--no_such_flag=1"], "no_such_flag"),
        (["--config.tasks.kinds=('maps',)"], "tasks.kinds names ['maps']"),
        (
            ["--config.tasks.source=kernelbench", "--config.tasks.directory=/no/such/folder", "--config.sandbox.form=module"],
            "/no/such/folder: no such directory",
        ),
        (["--config.rollout.tasks=9999"], "rollout.tasks=9999 but there are only"),
        (["--sandbox=/no/such/socket"], "--sandbox=/no/such/socket: no socket is there. Start one with python -m sandbox serve"),
    ],
)
def test_wrong_use_ends_with_one_clear_error(tmp_path, unused, flags, said):
    own = "--sandbox" in said or "kinds" in said  # an error ends a sandbox of the run's own too
    found = train(tmp_path / "run", *flags, *([] if own else [unused]))
    assert found.returncode != 0
    assert said in found.stderr + found.stdout
    assert "Traceback" not in found.stderr
