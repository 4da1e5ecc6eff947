"""Requests, results and errors of evaluations, and what a server says of itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from sandbox.protocol.base import Reply, Request
from sandbox.protocol.facts import TaskFacts
from sandbox.protocol.profiles import CounterSupport, KernelCounters, KernelTime, Profile, Roofline

PROTOCOL_VERSION = 1
MAX_SOURCE_BYTES = 256 * 1024
MAX_CANDIDATES = 64

Outcome = Literal[
    "ok",
    "build_failed",
    "load_failed",
    "runtime_error",
    "incorrect",
    "integrity",
    "timeout",
    "out_of_memory",
    "task_rejected",
    "cancelled",
    "infra_error",
]
Stage = Literal["queued", "built", "loaded", "correct", "timed"]
State = Literal["queued", "running", "done"]
Language = Literal["triton", "cuda", "cpp"]
Form = Literal["module", "kernel"]
DType = Literal["float32", "float16", "bfloat16"]
TimingMode = Literal["none", "quick", "full"]
Baseline = Literal["eager", "torch.compile"]
InputVariant = Literal["scaled", "sparse", "shifted"]
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)]
ClientKey = Annotated[str, Field(min_length=1, max_length=200)]
ClientName = Annotated[str, Field(max_length=100)]
Priority = Annotated[int, Field(ge=0, le=9)]


def _bounded_source(text: str) -> str:
    size_bytes = len(text.encode("utf-8", "surrogatepass"))
    if size_bytes > MAX_SOURCE_BYTES:
        raise PydanticCustomError(
            "source_too_large",
            "source has {size} bytes, the limit is {limit}",
            {"size": size_bytes, "limit": MAX_SOURCE_BYTES},
        )
    if "\x00" in text:
        raise PydanticCustomError("source_has_nul", "source contains a NUL character", {})
    return text


class TaskSpec(Request):
    """What is to be optimised: a PyTorch reference in KernelBench form.

    Attributes:
      reference: Python source defining `Model`, `get_inputs()` and `get_init_inputs()`.
      entry_point: name of the reference class.
      dtype: floating-point inputs and parameters are cast to it.
      atol, rtol: tolerances; None takes the data type's own (1e-4 for float32, 1e-2 for 16-bit types).
      tolerance: "oracle" derives them from the reference's own rounding, measured against a run in float64.
      variants: distributions on which a candidate must be right too, made from the inputs that `get_inputs` draws; one
        on which the reference itself fails or is not finite is left out.
    """

    reference: str
    name: str = Field(default="task", min_length=1, max_length=200)
    entry_point: Identifier = "Model"
    dtype: DType = "float32"
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda:[0-9]{1,2})$")
    atol: float | None = Field(default=None, ge=0, le=1)
    rtol: float | None = Field(default=None, ge=0, le=1)
    tolerance: Literal["default", "oracle"] = "default"
    variants: tuple[InputVariant, ...] = ("scaled", "sparse", "shifted")

    _size = field_validator("reference")(_bounded_source)


class Candidate(Request):
    """A kernel to judge: a Python `module` that defines `ModelNew`, or a bare `kernel` (see
    /v1/capabilities)."""

    source: str
    language: Language
    form: Form = "module"
    entry_point: Identifier = "ModelNew"

    _size = field_validator("source")(_bounded_source)

    @model_validator(mode="after")
    def _kernel_form_is_cpp(self) -> Candidate:
        if self.form == "kernel" and self.language != "cpp":
            raise PydanticCustomError(
                "form_not_supported", "form 'kernel' exists for language 'cpp' only; send a 'module'", {}
            )
        return self


class RewardSpec(Request):
    """How a verdict is rewarded.

    "weighted": reward = correct * (w_correct + w_speed * min(speedup, speedup_cap) + w_coverage * coverage).
    "milestones" (CUDA Agent, arXiv 2602.24286): -1 failed, 1 correct, 2 faster than eager by 5 %, 3 faster than eager and torch.compile
    by 5 %; weights and cap are not used.
    """

    kind: Literal["weighted", "milestones"] = "weighted"
    w_correct: float = Field(default=0.5, ge=0, le=100)
    w_speed: float = Field(default=0.5, ge=0, le=100)
    w_coverage: float = Field(default=0.5, ge=0, le=100)
    speedup_cap: float = Field(default=6.0, gt=0, le=1000)

    @property
    def failure(self) -> float:
        """What a candidate gets that failed by its own fault."""
        return -1.0 if self.kind == "milestones" else 0.0


class Options(Request):
    """How to judge. Deadlines are per stage, in seconds, and start when the stage starts.

    `profile="ncu"`: a candidate that was judged correct on a GPU is run once more under Nsight Compute, with the hardware's counters
    (`EvaluationResult.counters`); `ncu_s` is the time for that. Where counters can't be had, which /v1/capabilities tells, such a request
    is refused before anything is judged.
    """

    correctness_trials: int = Field(default=3, ge=1, le=20)
    timing: TimingMode = "quick"
    baselines: list[Baseline] = Field(default=["eager"], max_length=2)
    profile: Profile = False
    reward: RewardSpec = RewardSpec()
    build_s: float = Field(default=120, gt=0, le=1800)
    load_s: float = Field(default=30, gt=0, le=1800)
    check_s: float = Field(default=60, gt=0, le=1800)
    time_s: float = Field(default=60, gt=0, le=1800)
    ncu_s: float = Field(default=120, gt=0, le=1800)
    memory_bytes: int = Field(default=4 << 30, ge=64 << 20, le=1 << 40)
    target_arch: str | None = Field(default=None, pattern=r"^sm_[0-9]{2,3}[af]?$")
    """Say whether Triton kernels compile for this GPU, such as "sm_90"; it need not be there."""
    audit: bool = True
    """On a CPU, hold the timing against calls on inputs that the candidate has never seen. False saves a third of the time
    where nobody can gain by cheating, as with kernels of the client's own generator."""
    admit: bool = False
    """Reject a task that a trivial answer (zeros, a constant, an input, the output for other inputs) would
    pass."""
    examine: bool = False
    """Find out about the task alone (`sandbox.protocol.admissions`); the candidate is neither built nor judged."""

    @field_validator("baselines")
    @classmethod
    def _eager_is_measured(cls, value: list[str]) -> list[str]:
        if "eager" not in value:
            raise PydanticCustomError(
                "eager_missing", "baselines must contain 'eager': the speedup is against it", {}
            )
        return value

    @model_validator(mode="after")
    def _milestones_are_measured(self) -> Options:
        if self.reward.kind == "milestones" and "torch.compile" not in self.baselines:
            raise PydanticCustomError(
                "compile_missing", "baselines must contain 'torch.compile' with reward kind 'milestones': 3 is for being faster than it", {}
            )
        return self


class EvaluationRequest(Request):
    """Candidates to judge against one task. Idempotent by `client_key`. `client`: clients of different names take turns.
    `priority`: of this client's own work the highest comes first."""

    protocol_version: Literal[1] = PROTOCOL_VERSION
    client_key: ClientKey | None = None
    client: ClientName = ""
    priority: Priority = 0
    task: TaskSpec
    candidates: list[Candidate] = Field(min_length=1, max_length=MAX_CANDIDATES)
    options: Options = Options()


class EvaluationsAccepted(Reply):
    """Ids in the order of the request's candidates."""

    ids: list[str]


class Trial(Reply):
    """One correctness trial on fresh inputs. `reason` says what was wrong, with numbers."""

    ok: bool
    reason: str = ""
    max_abs_err: float | None = None
    max_rel_err: float | None = None


class Span(Reply):
    """Time of one call: median over blocks and its 95 % interval, in milliseconds. `host_ms`: apart from it, what the host takes to
    issue a call (on a GPU, by the clock of the process that calls; no part of any speed)."""

    median_ms: float
    low_ms: float
    high_ms: float
    samples: int
    host_ms: float | None = None


class Audited(Reply):
    """Time of one call on inputs never seen before, on the oracle's clock. `replayed`: the calls were recorded and replayed
    at once, without the host's launches."""

    candidate: Span
    eager: Span
    replayed: bool


class Timing(Reply):
    """Speed of a candidate. `noisy`: the interval of the speedup contains 1, there was unrest, or the audit had to rule. `unrest`: by so much
    slower or faster the reference ran than it usually does, or the candidate in a second timing (on a CPU; 1 is calm). `bound_by`: which clock
    ruled. `audited`: what the speed was held against, if it was."""

    candidate: Span
    baselines: dict[str, Span]
    speedup: float
    speedup_low: float | None = None
    speedup_high: float | None = None
    noisy: bool
    unrest: float = 1.0
    bound_by: str
    audited: Audited | None = None

    @property
    def credited(self) -> float:
        """The speedup that counts: one whose interval holds 1 can't be told from none, so it counts for no more than 1."""
        unclear = self.speedup_low is not None and self.speedup_low <= 1.0
        return min(self.speedup, 1.0) if unclear else self.speedup

    def credited_against(self, baseline: str) -> float | None:
        """The same against another baseline, by the medians and their intervals; None where that was not timed."""
        if baseline == "eager":
            return self.credited
        if (other := self.baselines.get(baseline)) is None or self.candidate.median_ms <= 0:
            return None
        ratio = other.median_ms / self.candidate.median_ms
        return ratio if other.low_ms > self.candidate.high_ms else min(ratio, 1.0)


class Finding(Reply):
    """An integrity rule that fired, and what was seen."""

    rule: str
    evidence: str


class Build(Reply):
    """An extension that the candidate has asked for. `road`: the one that built it, now or (`cached`) when it came into the cache;
    None if it was refused or did not compile. `seconds`: that the candidate waited for it. `name`: in ASCII, what else it holds
    escaped."""

    name: str = Field(pattern=r"^[ -~]*$")
    road: Literal["lean", "fast", "plain"] | None
    cached: bool = False
    seconds: float = 0.0


class Reward(Reply):
    """The reward and its named, already weighted parts; the parts add up to the total."""

    total: float = 0.0
    parts: dict[str, float] = {}


class EvaluationResult(Reply):
    """Verdict on one candidate. `outcome` is None until `state` is "done"."""

    id: str
    state: State = "queued"
    stage: Stage = "queued"
    outcome: Outcome | None = None
    language: Language = "cpp"
    trials: list[Trial] = []
    timing: Timing | None = None
    coverage: float | None = None
    kernels: list[KernelTime] = []
    counters: list[KernelCounters] = []
    """Of the heaviest kernels, the heaviest first, with `profile="ncu"`; what that took is `stage_s["counters"]`."""
    roofline: Roofline | None = None
    """Of a correct candidate that was timed on a GPU."""
    builds: list[Build] = []
    integrity: list[Finding] = []
    reward: Reward = Reward()
    speed_rewarded: bool = True
    """Whether a measured speed counts: too little of the work may be the candidate's own, or how much may not be known."""
    feedback: str = ""
    notes: list[str] = []
    """What the judge wants known about the evaluation itself (a task not admitted, a cleared cache, ...)."""
    kernel_signature: str | None = None
    stage_s: dict[str, float] = {}
    attempts: int = 0
    admission: TaskFacts | None = None
    """What was found out about the task, where that was asked for (`Options.examine`)."""
    transient: bool = False
    """With the outcome "infra_error": what was in the way may pass by itself (a crowded card, an oracle that died), so that it may help to
    ask again later; a full disk or a missing compiler does not."""
    cached: bool = False

    @property
    def correct(self) -> bool:
        """True when the candidate passed every check."""
        return self.outcome == "ok"

    @property
    def speedup(self) -> float | None:
        """Speedup against eager as it counts (`Timing.credited`), or None where it was not measured."""
        return self.timing.credited if self.timing else None

    @property
    def earned_speedup(self) -> float:
        """The same of a correct candidate whose speed counts, else 0: what a verification's rule goes by."""
        return (self.speedup or 0.0) if self.correct and self.speed_rewarded else 0.0


class EvaluationResults(Reply):
    """Of the evaluations asked for, in their order, those before the first that is not done."""

    results: list[EvaluationResult]


class StageEvent(Reply):
    """One line of /v1/evaluations/stream: a stage change, or (state "done") the result."""

    id: str
    state: State
    stage: Stage
    result: EvaluationResult | None = None


class QueueHealth(Reply):
    waiting: int
    running: int
    limit: int
    workers: int
    workers_ready: int


class Health(Reply):
    """Liveness; a server that is "draining" finishes what it has and takes no more. `level` is the isolation in force, `features`
    what it consists of, `missing` what it lacks."""

    status: str
    """"ok", "starting", "degraded" or "draining"; later servers may know others."""
    version: str
    protocol_version: int = PROTOCOL_VERSION
    level: str
    features: list[str] = []
    missing: list[str] = []
    devices: list[str]
    queue: QueueHealth
    uptime_s: float = 0.0


class LanguageSupport(Reply):
    """What a server can do with a language: `timing` False means correctness only; `problem` says why not
    at all."""

    available: bool
    forms: list[Form]
    devices: list[str]
    timing: bool
    problem: str = ""


class Capabilities(Reply):
    protocol_version: int = PROTOCOL_VERSION
    languages: dict[str, LanguageSupport]
    devices: list[str]
    counters: CounterSupport = CounterSupport()
    limits: dict[str, int | float]
    kernel_form: dict[str, dict]


class ErrorReply(Reply):
    """Body of every 4xx and 5xx answer."""

    error: str
    field: str | None = None
    hint: str | None = None
