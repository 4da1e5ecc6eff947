"""KernelBench's evaluator on one candidate, in a process of its own, as its users run it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LIMIT_S = 600.0
KERNELBENCH = """
import json, sys, types
root, task, kernel, backend, trials = sys.argv[1:]
for name in ("dotenv", "openai", "litellm", "together", "requests", "datasets"):
    try:
        __import__(name)
    except ImportError:  # not needed for judging, but imported
        sys.modules[name] = stub = types.ModuleType(name)
        stub.load_dotenv = lambda *a, **k: None
        stub.OpenAI = stub.Together = object
        stub.completion = None
sys.path[:0] = [root + "/src", root]
try:
    from kernelbench.eval import eval_kernel_against_ref
except ImportError:
    from src.eval import eval_kernel_against_ref
import torch
result = eval_kernel_against_ref(
    open(task).read(), open(kernel).read(), num_correct_trials=int(trials), num_perf_trials=100, measure_performance=True,
    backend=backend, device=torch.device("cuda:0"))
print("RESULT", json.dumps({"ms": result.runtime, "correct": bool(result.correctness)}))
"""


def evaluated(checkout: Path, task: Path, kernel: Path, backend: str, *, correct_trials: int) -> dict[str, Any]:
    """What it finds: `ms` of a call, whether it is `correct`, and the `seconds` that all of it took.

    Args:
      checkout: of KernelBench.
      task, kernel: files with the reference's and the candidate's source.
      backend: as KernelBench calls it, "triton" or "cuda".
      correct_trials: of its correctness check.

    Raises:
      SystemExit: the evaluator failed; its last words go with it.
    """
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", KERNELBENCH, str(checkout), str(task), str(kernel), backend, str(correct_trials)],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"KernelBench's evaluator failed: {(done.stderr or done.stdout)[-2000:]}")
    return {**json.loads(line.removeprefix("RESULT ")), "seconds": time.monotonic() - start}
