"""Imported by the zygote of a GPU worker, so that its children find the compilers ready. Touches no CUDA.

Two traps are stepped around. `torch.utils.cpp_extension` asks at its import whether a GPU is there, which
initialises the driver (and starts its threads) in the process that everything is forked from;
`sandbox.jail.extensions` imports it without. And Triton builds a small C library at its first use, half a
second of gcc for every runner: it is built here once, without being loaded, into a seed that each runner
copies into its private cache (`SANDBOX_TRITON_SEED`). What Triton imports and reads at its first compilation, and keeps for the
process, is done here too: half a second more.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path

import sandbox.jail.extensions  # noqa: F401
from sandbox.jail.device_cuda import SEED_VARIABLE


def _seed_triton_cache() -> None:
    from triton.backends.nvidia import driver
    from triton.runtime import build

    seed, before = (
        tempfile.mkdtemp(prefix="triton-seed-", dir=os.getcwd()),
        os.environ.get("TRITON_CACHE_DIR"),
    )
    load = build._load_module_from_path
    os.environ["TRITON_CACHE_DIR"] = seed
    build._load_module_from_path = lambda name, path: None
    try:
        build.compile_module_from_src(
            src=Path(driver.dirname, "driver.c").read_text(),
            name="cuda_utils",
            library_dirs=driver.library_dirs(),
            include_dirs=driver.include_dirs,
            libraries=driver.libraries,
        )
    finally:
        build._load_module_from_path = load
        del os.environ["TRITON_CACHE_DIR"]
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before
    os.environ[SEED_VARIABLE] = seed


def _compile_as_if() -> None:
    """Imports what the first compilation imports, and has Triton read its own files, whose sum it puts into every key."""
    from triton.runtime import cache

    for module in ("triton.compiler.code_generator", "triton.tools.tensor_descriptor", "triton.experimental.gluon.nvidia.hopper"):
        importlib.import_module(module)
    cache.triton_key()


_seed_triton_cache()
_compile_as_if()
