"""`pip install .` gives other projects the sandbox and its command, without the learner."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TASK = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)


def get_inputs():
    return [torch.randn(64, 64)]


def get_init_inputs():
    return []
"""
KERNEL = """
extern "C" void kernel(const float* x, float* out) {
  for (long i = 0; i < x_n; ++i) out[i] = x[i] > 0.0f ? x[i] : 0.0f;
}
"""
CLIENT = """
import sys
sys.modules["torch"] = sys.modules["jax"] = None
import sandbox.client, sandbox.protocol
print(sandbox.client.__file__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "target"))
    shutil.copytree(ROOT / "sandbox", source / "sandbox", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "dk_jax" / "rl", source / "dk_jax" / "rl")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*command, "--target", target, source], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return target


def run(installed, *command):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(command, env=environment, cwd=installed, capture_output=True, text=True, timeout=200)


def test_the_learner_stays_out_and_what_compilers_need_comes_along(installed):
    assert {path.name for path in installed.iterdir() if path.is_dir()} >= {"sandbox", "bin"}
    assert not (installed / "dk_jax").exists()
    assert (installed / "sandbox" / "build" / "binding.h").exists()
    [metadata] = installed.glob("kernel_sandbox-*.dist-info")
    requires = " ".join(Distribution.at(metadata).requires)
    assert "torch" in requires and "fastapi" in requires and "jax" not in requires


def test_the_command_judges_a_kernel(installed, tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "kernel.cpp").write_text(KERNEL)
    files = ["--task", tmp_path / "task.py", "--candidate", tmp_path / "kernel.cpp", "--cache", tmp_path / "cache"]
    done = run(installed, installed / "bin" / "kernel-sandbox", "eval", *files, "--language", "cpp", "--form", "kernel", "--timing", "none")
    assert done.returncode == 0 and "outcome   ok" in done.stdout, done.stdout + done.stderr


def test_the_command_speaks_of_itself_by_its_name(installed):
    done = run(installed, installed / "bin" / "kernel-sandbox", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: kernel-sandbox ")


def test_a_client_needs_neither_torch_nor_jax(installed):
    done = run(installed, sys.executable, "-c", CLIENT)
    assert done.returncode == 0 and done.stdout.startswith(str(installed)), done.stderr
