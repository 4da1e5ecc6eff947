"""KernelBench's evaluate function, answered by a sandbox: same name, same arguments, same fields in the result.

    from sandbox.compat.kernelbench import eval_kernel_against_ref

    result = eval_kernel_against_ref(reference, candidate, measure_performance=True, backend="triton")

The socket of a running server is taken from SANDBOX_SOCKET, or given to `connect`. The candidate never runs in this process, which
needs neither torch nor a GPU: `device` and `precision` may be names.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.client import SandboxClient
from sandbox.protocol import Candidate, EvaluationResult, Options, TaskSpec, Timing

SOCKET_VARIABLE = "SANDBOX_SOCKET"
PATIENCE_S = 600.0
MOST_TRIALS = 20
LANGUAGES = {"cuda": "cuda", "triton": "triton"}
_lock = threading.Lock()
_clients: dict[str, SandboxClient] = {}


@dataclass
class KernelExecResult:
    """What KernelBench calls its result; times are in milliseconds, -1 where none was measured.

    Attributes:
      runtime, ref_runtime: medians (KernelBench has means).
      runtime_stats, ref_runtime_stats: `mean` (the median), `min` and `max` (ends of its 95 % interval), `num_trials` (blocks).
      metadata: what went wrong, under KernelBench's names, and the sandbox's `outcome`, `feedback` and `evaluation_id`.
    """

    compiled: bool = False
    correctness: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    runtime: float = -1.0
    runtime_stats: dict[str, Any] = field(default_factory=dict)
    ref_runtime: float = -1.0
    ref_runtime_stats: dict[str, Any] = field(default_factory=dict)


def connect(socket: str | Path | None = None) -> SandboxClient:
    """The client for a server's socket, one for each.

    Raises:
      ValueError: no socket is named.
    """
    path = str(socket or os.environ.get(SOCKET_VARIABLE) or "")
    if not path:
        raise ValueError(f"set {SOCKET_VARIABLE} to the socket of a running sandbox (python -m sandbox serve --socket PATH)")
    with _lock:
        if path not in _clients:
            _clients[path] = SandboxClient(path, retry_for_s=PATIENCE_S)
        return _clients[path]


def eval_kernel_against_ref(
    original_model_src: str,
    custom_model_src: str,
    seed_num: int = 42,
    num_correct_trials: int = 1,
    num_perf_trials: int = 10,
    measure_performance: bool = False,
    timing_method: str = "cuda_event",
    verbose: bool = False,
    build_dir: os.PathLike | None = None,
    device: Any = None,
    backend: str = "cuda",
    precision: Any = "float32",
    check_for_excessive_speedup: bool = True,
    excessive_speedup_threshold: float = 10,
) -> KernelExecResult | None:
    """Judges a candidate against its reference (ScalingIntelligence/KernelBench, src/kernelbench/eval.py).

    Args:
      original_model_src, custom_model_src: Python with `Model`, `get_inputs`, `get_init_inputs`; and with `ModelNew`.
      seed_num, num_perf_trials, timing_method, build_dir: without effect. Inputs are drawn freshly, samples are taken until the interval is
        narrow, and builds are the server's.
      num_correct_trials: at most 20 are done.
      device: a torch.device, its name or a GPU's number; None takes the server's first GPU, or its CPU.
      backend: "cuda" or "triton".
      precision: a torch.dtype or its name.
      excessive_speedup_threshold: a faster candidate is marked in `metadata`, as KernelBench does; it stays correct.

    Returns:
      The result; None where the judge itself failed (KernelBench's sign for "try again").

    Raises:
      ValueError: a backend or precision that is not judged; no socket.
      SandboxUnavailable, SandboxRejected: see `SandboxClient`.
    """
    if backend.lower() not in LANGUAGES:
        raise ValueError(f"backend {backend!r} is not judged here: choose one of {', '.join(LANGUAGES)}")
    client = connect()
    devices = client.capabilities().devices
    where = _device(device, devices)
    language = "cpp" if where == "cpu" and backend.lower() == "cuda" else LANGUAGES[backend.lower()]
    [result] = client.evaluate(
        TaskSpec(reference=original_model_src, device=where, dtype=str(precision).removeprefix("torch.")),
        [Candidate(source=custom_model_src, language=language)],
        Options(
            correctness_trials=min(max(num_correct_trials, 1), MOST_TRIALS),
            timing="full" if measure_performance else "none",
            profile=where != "cpu",
        ),
    )
    if result.outcome == "infra_error":
        return None
    found = _translated(result, measure_performance)
    found.metadata["device"] = where
    speedup = result.speedup
    if check_for_excessive_speedup and speedup is not None and speedup > excessive_speedup_threshold:
        found.metadata["excessive_speedup"] = True
    if verbose:
        print(f"[Eval] {result.outcome}: {result.feedback}")
    return found


def _device(device: Any, devices: list[str]) -> str:
    if device is None:
        return next((name for name in devices if name != "cpu"), devices[0])
    if isinstance(device, int):
        return f"cuda:{device}"
    name = str(device)
    return "cuda:0" if name == "cuda" else name


def _translated(result: EvaluationResult, timed: bool) -> KernelExecResult:
    unbuilt = result.outcome in ("build_failed", "load_failed", "task_rejected")
    found = KernelExecResult(compiled=not unbuilt, correctness=result.outcome == "ok")
    passed = sum(trial.ok for trial in result.trials)
    found.metadata = {
        "outcome": result.outcome,
        "feedback": result.feedback,
        "evaluation_id": result.id,
        "correctness_trials": f"({passed} / {len(result.trials)})",
    }
    name = {"build_failed": "compilation_error", "load_failed": "compilation_error", "incorrect": "correctness_issue"}
    if result.outcome != "ok":
        found.metadata[name.get(result.outcome or "", "runtime_error")] = result.feedback
    if result.integrity:
        found.metadata["integrity"] = [finding.model_dump() for finding in result.integrity]
    if timed and found.correctness and result.timing is not None:
        _add_times(found, result.timing)
    return found


def _add_times(found: KernelExecResult, timing: Timing) -> None:
    own, eager = timing.candidate, timing.baselines["eager"]
    found.runtime, found.ref_runtime = own.median_ms, eager.median_ms
    found.runtime_stats, found.ref_runtime_stats = (
        {"mean": span.median_ms, "min": span.low_ms, "max": span.high_ms, "num_trials": span.samples} for span in (own, eager)
    )
