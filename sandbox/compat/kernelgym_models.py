"""Requests and replies of KernelGYM's HTTP API, and what they are in the sandbox's own protocol.

Names, defaults and limits are those of its published server (hkust-nlp/KernelGYM, kernelgym/server/api/models.py). What an
option of a request asks for and the sandbox does always or never (warm-up, detection of decoys, caches of reference timings) is
accepted and has no effect.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from sandbox.protocol import Candidate, EvaluationResult, Options, TaskSpec

LEAST_CODE_CHARS, MOST_CODE_CHARS = 10, 100_000
MOST_BATCH = 100
CHECK_S, LOAD_S = 60.0, 60.0
"""A candidate that hangs holds the device: its stages end at the latest after these, however long the request may take."""
STATUS = Literal["pending", "processing", "completed", "failed", "timeout"]
_COMPILE_BASELINES = ("torch_compile", "torch.compile")
_UNBUILT = ("build_failed", "load_failed")
_CODES = {
    "build_failed": "COMPILATION_ERROR",
    "load_failed": "COMPILATION_ERROR",
    "runtime_error": "RUNTIME_ERROR",
    "out_of_memory": "RESOURCE_ERROR",
    "incorrect": "CORRECTNESS_ERROR",
    "timeout": "TIMEOUT_ERROR",
    "task_rejected": "VALIDATION_ERROR",
    "infra_error": "SYSTEM_ERROR",
    "cancelled": "SYSTEM_ERROR",
}
"""KernelGYM's word for each outcome that is a failure there; `integrity` is none, but marks a decoy."""


class EvaluationRequest(BaseModel):
    """One kernel to judge."""

    task_id: str = Field(min_length=1, max_length=100)
    reference_code: str
    kernel_code: str
    backend: Literal["cuda", "triton"] = "triton"
    num_correct_trials: int = Field(default=5, ge=1, le=20)
    num_perf_trials: int = Field(default=100, ge=1, le=1000)
    num_warmup: int = Field(default=3, ge=0, le=100)
    timeout: int = Field(default=300, ge=10, le=3600)
    priority: Literal["low", "normal", "high"] = "normal"
    device_preference: str | None = None
    force_refresh: bool = False
    entry_point: str = Field(default="Model", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=90)
    reference_backend: str | None = None
    enable_profiling: bool | None = None
    measure_performance: bool | None = None
    run_performance: bool | None = None
    workflow: str | None = "kernelbench"

    @field_validator("reference_code", "kernel_code")
    @classmethod
    def _has_a_size(cls, code: str) -> str:
        if not LEAST_CODE_CHARS <= len(code.strip()) <= MOST_CODE_CHARS:
            raise ValueError(f"code must have {LEAST_CODE_CHARS} to {MOST_CODE_CHARS} characters, not {len(code.strip())}")
        return code

    @field_validator("workflow")
    @classmethod
    def _is_known(cls, workflow: str | None) -> str | None:
        if (workflow or "kernelbench").strip().lower() != "kernelbench":
            raise ValueError(f"workflow {workflow!r} is not served here, only 'kernelbench'")
        return workflow

    @property
    def timed(self) -> bool:
        """Whether speed is asked for."""
        wanted = self.run_performance if self.run_performance is not None else self.measure_performance
        return wanted is not False

    @property
    def baseline(self) -> str:
        """The baseline that the speedup is against, as the sandbox calls it."""
        return "torch.compile" if self.reference_backend in _COMPILE_BASELINES else "eager"

    @property
    def urgency(self) -> int:
        """The priority, as the sandbox counts it."""
        return ("low", "normal", "high").index(self.priority)

    def translated(self, devices: list[str]) -> tuple[TaskSpec, Candidate, Options]:
        """The request in the sandbox's protocol.

        Args:
          devices: that the sandbox serves, at least one.
        """
        gpus = [device for device in devices if device != "cpu"]
        device = self.device_preference if self.device_preference in devices else (gpus or devices)[0]
        language = "cpp" if self.backend == "cuda" and device == "cpu" else self.backend
        on_gpu = device != "cpu"
        return (
            TaskSpec(reference=self.reference_code, name=self.task_id, entry_point=self.entry_point, device=device),
            Candidate(source=self.kernel_code, language=language, entry_point=f"{self.entry_point}New"),
            Options(
                correctness_trials=self.num_correct_trials,
                timing="full" if self.timed else "none",
                baselines=["eager"] if self.baseline == "eager" or not self.timed else ["eager", self.baseline],
                profile=on_gpu and self.enable_profiling is not False,
                build_s=min(self.timeout, 1800),
                load_s=min(self.timeout, LOAD_S),
                check_s=min(self.timeout, CHECK_S),
                time_s=min(self.timeout, CHECK_S),
            ),
        )


class EvaluationResponse(BaseModel):
    """One verdict, or where its evaluation stands. Runtimes are in milliseconds."""

    task_id: str
    status: STATUS
    compiled: bool | None = None
    correctness: bool | None = None
    decoy_kernel: bool | None = None
    reference_runtime: float | None = None
    kernel_runtime: float | None = None
    speedup: float | None = None
    metadata: dict[str, Any] | None = None
    error_message: str | None = None
    error_code: str | None = None
    submitted_at: str | None = None
    completed_at: str | None = None
    processing_time: float | None = None


class BatchEvaluationRequest(BaseModel):
    """Several kernels at once."""

    batch_id: str
    tasks: list[EvaluationRequest] = Field(min_length=1, max_length=MOST_BATCH)


class BatchEvaluationResponse(BaseModel):
    """All verdicts of a batch, in its order."""

    batch_id: str
    total_tasks: int
    completed_tasks: int
    failed_tasks: int
    results: list[EvaluationResponse]
    batch_status: STATUS
    submitted_at: str | None = None
    completed_at: str | None = None


class TaskStatusResponse(BaseModel):
    """Where an evaluation stands."""

    task_id: str
    status: STATUS
    progress: float | None = None
    queue_position: int | None = None
    assigned_device: str | None = None
    error_message: str | None = None


def status_of(result: EvaluationResult) -> STATUS:
    """KernelGYM's word for the state of an evaluation."""
    if result.state != "done":
        return "pending" if result.state == "queued" else "processing"
    if result.outcome == "timeout":
        return "timeout"
    return "failed" if result.outcome in (*_UNBUILT, "task_rejected", "infra_error", "cancelled") else "completed"


def response_of(request: EvaluationRequest, result: EvaluationResult) -> EvaluationResponse:
    """A verdict in KernelGYM's words.

    An `integrity` outcome is correct but a decoy, for which its clients give the penalty. A speed that was not measured is 0.
    """
    found = EvaluationResponse(task_id=request.task_id, status=status_of(result))
    if result.state != "done":
        return found
    right = result.outcome in ("ok", "integrity")
    found.compiled = result.outcome not in (*_UNBUILT, "task_rejected", "infra_error", "cancelled")
    found.correctness, found.decoy_kernel = right, result.outcome == "integrity"
    found.reference_runtime = found.kernel_runtime = found.speedup = 0.0
    if result.timing is not None:
        baseline = request.baseline if request.baseline in result.timing.baselines else "eager"
        found.reference_runtime = result.timing.baselines[baseline].median_ms
        found.kernel_runtime = result.timing.candidate.median_ms
        found.speedup = result.timing.credited_against(baseline) if right else 0.0
    if result.outcome not in ("ok", "integrity"):
        found.error_code, found.error_message = _CODES[result.outcome], result.feedback
    found.metadata = _metadata(request, result)
    return found


def _metadata(request: EvaluationRequest, result: EvaluationResult) -> dict[str, Any]:
    kernels_us = 1e3 * sum(kernel.ms for kernel in result.kernels)
    metadata: dict[str, Any] = {
        "backend": request.backend,
        "feedback": result.feedback,
        "notes": result.notes,
        "outcome": result.outcome,
        "evaluation_id": result.id,
        "cached": result.cached,
        "num_custom_kernels": sum(kernel.own for kernel in result.kernels),
        "num_total_kernels": len(result.kernels),
        "custom_kernel_cuda_time_in_profiling_us": 1e3 * sum(kernel.ms for kernel in result.kernels if kernel.own),
        "total_kernel_run_time_in_profiling_us": kernels_us,
        "custom_kernel_cuda_time_coverage": result.coverage,
        "stage_seconds": result.stage_s,
    }
    if result.timing is not None:
        metadata["speedup_interval"] = [result.timing.speedup_low, result.timing.speedup_high]
        metadata["noisy"] = result.timing.noisy
    if result.integrity:
        metadata["integrity"] = [finding.model_dump() for finding in result.integrity]
    problem = {"build_failed": "compilation_error", "load_failed": "compilation_error", "runtime_error": "runtime_error",
               "incorrect": "correctness_issue"}.get(result.outcome or "")  # fmt: skip
    if problem:
        metadata[problem] = result.feedback
    return metadata
