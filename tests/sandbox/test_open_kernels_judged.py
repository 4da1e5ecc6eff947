"""A kernel that is read from a package, judged by a real sandbox: scripts/open_kernels.py from end to end."""

from __future__ import annotations

import json
import subprocess
import sys

from dk_jax.sft.open_source.kernels import load_records
from tests.dk_jax.test_open_kernels import root  # noqa: F401  a fixture
from tests.sandbox.helpers import ROOT


def test_the_script_lists_refuses_and_judges_a_made_up_package(root, server, tmp_path):  # noqa: F811
    """One real verdict: the interpreter checks the extracted kernel, and it compiles for an H100."""

    def run(*flags: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "scripts/open_kernels.py", *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)

    assert "error: " in run(f"--root={tmp_path / 'nowhere'}", "--list").stderr
    output = tmp_path / "out" / "open.jsonl"
    done = run(f"--root={root}", f"--output={output}", f"--summary={tmp_path / 'summary.json'}", "--only=softmax", f"--sandbox={server.socket}")
    assert done.returncode == 0, done.stderr
    assert "fla-core 1.2.3, MIT" in done.stdout and "1 records" in done.stdout
    [record] = load_records(output)
    assert record.kernel.verdict.correct, record.kernel.verdict.feedback
    assert "compiles for sm_90: yes" in record.kernel.verdict.feedback and record.task.size == "small"
    assert "not installed: flag-gems, of which the catalogue has 2 kernels" in done.stdout
    report = json.loads((tmp_path / "summary.json").read_text())
    assert report["packages"] == {"fla-core": "1.2.3, MIT"} and report["counts"]["fla-core"] == {"ok": 1} and "triton.jit" not in json.dumps(report)
