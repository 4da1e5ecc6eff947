"""A test file that runs itself as a script, in a process with eight emulated devices."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ONE_PROGRAM_AT_A_TIME = {"JAX_CPU_ENABLE_ASYNC_DISPATCH": "0"}
"""Emulated devices share few threads: the all-reduces of two programs in work can wait for each other's for ever."""
_SCRIPT = "import gc, runpy, sys; gc.set_threshold(100_000); del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""Runs a script with few searches for cycles, which take a tenth of the time in which a program is traced and lowered."""


def on_eight_devices(script: str, directory: Path) -> Any:
    """What the script writes, as JSON, to the file that is its argument."""
    out = directory / "measured.json"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **ONE_PROGRAM_AT_A_TIME}
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run([sys.executable, "-c", _SCRIPT, script, out], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())
