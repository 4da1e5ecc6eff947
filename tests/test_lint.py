"""The rules of pyproject.toml hold everywhere: above all, no name that is used is undefined, even where no test comes by."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def ruff(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)


def test_the_tree_keeps_to_the_rules():
    done = ruff("--output-format=concise", "configs", "dk_jax", "sandbox", "scripts", "tests")
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_undefined_name_is_found(tmp_path):
    (tmp_path / "module.py").write_text("def parse(text):\n    try:\n        return int(text)\n    except MALFORMED:\n        return 0\n")
    done = ruff("--output-format=concise", "--config", str(ROOT / "pyproject.toml"), "module.py", cwd=tmp_path)
    assert done.returncode == 1 and "F821" in done.stdout and "MALFORMED" in done.stdout, done.stdout + done.stderr
