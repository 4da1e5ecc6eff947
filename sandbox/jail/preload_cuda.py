"""Imported by the zygote of a GPU worker, so that its children find the compilers ready. Touches no CUDA.

Triton builds a small C library at its first use (half a second of gcc). It is built here once and stays
loaded; it only links against the driver, which a child initialises for itself.
"""

from __future__ import annotations

import os
import shutil
import tempfile

import torch.utils.cpp_extension  # noqa: F401
import triton  # noqa: F401
import triton.language  # noqa: F401
from triton.backends.nvidia import driver


def _load_driver_library() -> None:
    directory, before = tempfile.mkdtemp(prefix="triton-preload-"), os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = directory
    try:
        driver.CudaUtils()
        # The singleton's constructor would build the library again in every child.
        driver.CudaUtils.__init__ = lambda self: None
    finally:
        if before is None:
            del os.environ["TRITON_CACHE_DIR"]
        else:
            os.environ["TRITON_CACHE_DIR"] = before
        shutil.rmtree(directory, ignore_errors=True)


_load_driver_library()
