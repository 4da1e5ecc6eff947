"""What the two commands say where the machine lacks something, before anything is installed."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "dirname", "sha256sum", "cut", "cat")


@pytest.fixture
def poor_path(tmp_path):
    """A PATH of the shell's tools alone; more are added by name."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def add(*names):
        for name in names:
            (folder / name).symlink_to(shutil.which(name))
        return str(folder)

    add(*TOOLS)
    return add


def run(script, path, tmp_path):
    environment = {"PATH": path, "HOME": str(tmp_path), "DK_VENV": str(tmp_path / "venv")}
    return subprocess.run(["bash", str(ROOT / "scripts" / script)], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", ["demo.sh", "test.sh"])
def test_without_a_compiler_it_says_how_to_get_one(poor_path, tmp_path, script):
    found = run(script, poor_path(), tmp_path)
    assert found.returncode == 1 and "g++ was not found" in found.stderr and "apt-get install g++" in found.stderr
    assert not (tmp_path / "venv").exists()


def test_without_python_it_says_which_one_is_needed(poor_path, tmp_path):
    found = run("demo.sh", poor_path("g++"), tmp_path)
    assert found.returncode == 1 and "Python 3.11 or newer was not found" in found.stderr and "DK_PYTHON" in found.stderr


def test_an_interrupt_while_byte_code_is_compiled_ends_that_too(tmp_path):
    marker = f"marker_{os.getpid()}"
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/bash\nexec -a {marker} sleep 1000\n")
    fake.chmod(0o755)
    script = f"source {ROOT}/scripts/env.sh; PYTHON={fake}; compile_imports"
    # A shell that is started with SIGINT ignored, as these tests are in the background of another, can't hear it again.
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    process = subprocess.Popen(["bash", "-c", script], start_new_session=True, preexec_fn=heard)

    def left():
        return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] and p.info["cmdline"][0] == marker]

    give_up = time.monotonic() + 20
    while len(left()) < 2 and time.monotonic() < give_up:
        time.sleep(0.05)
    assert len(left()) == 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.wait(20)
    while left() and time.monotonic() < give_up:
        time.sleep(0.05)
    assert left() == []
