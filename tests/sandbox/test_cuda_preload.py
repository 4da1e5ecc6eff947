"""The zygote of a GPU worker imports its compilers without waking the driver."""

import os
import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import os, torch
torch.cuda.is_available = lambda: (_ for _ in ()).throw(AssertionError("the driver was asked"))
import sandbox.jail.preload_cuda
from torch.utils import cpp_extension
assert len(os.listdir("/proc/self/task")) == 1
assert "TRITON_CACHE_DIR" not in os.environ
print(*(name for _, _, names in os.walk(os.environ["SANDBOX_TRITON_SEED"]) for name in names))
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_preloading_asks_no_driver_starts_no_thread_and_leaves_a_seed(tmp_path):
    # Linking needs a libcuda; nothing is called in it.
    stub = [
        "gcc",
        "-shared",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(tmp_path / "libcuda.so.1"),
        "-xc",
        "/dev/null",
    ]
    subprocess.run(stub, check=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=100,
        env={
            **{name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"},
            "TRITON_LIBCUDA_PATH": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OPENBLAS_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    assert "cuda_utils" in done.stdout
