"""For all tests: programs that JAX compiles are kept for the session, also for the processes that tests start, and are compiled
without costly optimisation, as the models are tiny."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import mmap
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable
from pathlib import Path

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.mkdtemp(prefix="dk_jax_tests-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

gc.set_threshold(100_000)  # looking for cycles takes a tenth of the time in which programs are traced and lowered

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell without job control starts what it puts in the background; what tests start would inherit it, and be deaf to interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_QUICK = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
    "xla_cpu_use_fusion_emitters": "false",
}


def _known_to_xla(flags: Iterable[str]) -> list[str]:
    """Those of the flags that this version of jaxlib has: it ends the process at any other. (Names alone stay in it longer than flags do; a
    flag is a whole string of C.)"""
    path = Path(importlib.util.find_spec("jaxlib").origin).with_name("libjax_common.so")
    if not path.exists():
        return []
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        return [flag for flag in flags if library.find(b"\0" + flag.encode() + b"\0") >= 0]


if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    _flags = [f"--{flag}={_QUICK[flag]}" for flag in _known_to_xla(_QUICK)]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_flags]).strip()
