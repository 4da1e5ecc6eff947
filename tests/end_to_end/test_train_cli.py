"""The training command against a real sandbox process: a whole tiny run, an interruption, and wrong use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "--config.tasks.kinds=('map',)", "--config.tasks.levels=(2,)", "--config.tasks.generated=0",
    "--config.model.d_model=16", "--config.model.n_layers=1", "--config.model.n_heads=2", "--config.model.n_kv_heads=1",
    "--config.model.head_dim=8", "--config.model.d_ff=32", "--config.model.head_rank=2", "--config.codec.vocab_size=400",
    "--config.corpus.variants_per_task=2", "--config.corpus.samples_per_task=2", "--config.sft.steps=3",
    "--config.rollout.tasks=2", "--config.rollout.selections=1", "--config.rollout.max_policy_tokens=40", "--config.rl.steps=1",
    "--config.evaluation.samples=1", "--config.evaluation.max_tasks=2",
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


def test_an_interrupted_run_leaves_no_process_and_the_same_command_finishes_it(tmp_path):
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
    assert wait_until_gone(workdir) == []
    assert journal.read_bytes().startswith(judged)

    second = train(workdir, *TINY)
    assert second.returncode == 0, second.stderr[-3000:]
    for words in ("before RL", "compiled", "correct", "Fast_1", "Fast_1.5", "mean speedup", "skills:", "proposed"):
        assert words in second.stdout
    for name in ("report.html", "library.sqlite", "library.jsonl", "metrics.jsonl", "eval_sft.json", "eval_rl.json"):
        assert (workdir / name).stat().st_size > 0 or name == "library.jsonl"
    assert list((workdir / "tensorboard").iterdir()) and (workdir / "checkpoints" / "rl" / "1").is_dir()
    kernels = [json.loads(line) for line in open(workdir / "corpus.jsonl")]
    assert any(k["verdict"]["speedup"] > 0 for k in kernels)
    assert wait_until_gone(workdir) == []

    third = train(workdir, *TINY, "--config.sft.lr=1e-3")
    assert third.returncode == 1 and "sft.lr: 0.004 -> 0.001" in third.stderr and "another --workdir" in third.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--config=configs/nope.py"], "configs/nope.py"),
        (["--config.rl.learning_rate=1"], "error: --config.rl.learning_rate=1: the recipe has no key"),
        (["--no_such_flag=1"], "no_such_flag"),
        (["--config.tasks.kinds=('maps',)"], "tasks.kinds names ['maps']"),
        (["--config.tasks.source=kernelbench", "--config.tasks.directory=/no/such/folder"], "/no/such/folder"),
    ],
)
def test_wrong_use_ends_with_one_clear_error(tmp_path, flags, said):
    found = train(tmp_path / "run", *flags)
    assert found.returncode != 0
    assert said in found.stderr + found.stdout
    assert "Traceback" not in found.stderr
