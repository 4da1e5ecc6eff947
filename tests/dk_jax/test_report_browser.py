"""The page in a browser, where there is one: its script unpacks rollouts and nothing breaks its policy."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from dk_jax.evaluation.report import write_comparison
from tests.dk_jax.report_material import few_draws  # noqa: F401
from tests.dk_jax.test_report_evaluations import TASKS, whole

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.usefixtures("few_draws")
def test_the_first_rollout_is_unpacked_and_shown(tmp_path):
    page = write_comparison([whole(tmp_path / "a", 1.6)], tmp_path / "page.html")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom"]
    done = subprocess.run([BROWSER, *flags, f"file://{page}"], capture_output=True, text=True, timeout=240)
    shown = re.search(r'<div id="rollout"[^>]*>(.*?)</article></div>', done.stdout, re.DOTALL)
    assert shown, done.stdout[-2000:] + done.stderr[-2000:]
    first = min(task.name for task in TASKS)
    assert first in shown.group(1) and "What changed" in shown.group(1)
    assert '<form class="chooser" id="chooser" hidden' not in done.stdout, "the chooser is there with its script"
    assert "Content Security Policy" not in done.stderr
