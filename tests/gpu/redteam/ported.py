"""The attacks of tests/redteam that are written in Python or Triton, sent against a GPU.

What they attack, the runner beside them, the channel, the comparison, the host, is the same there; extensions and bare kernels
for a CPU have variants of their own in `attacks` and `attacks_audit`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from sandbox.protocol import Candidate, EvaluationResult, Options, TaskSpec
from tests.gpu.conftest import KERNELS
from tests.gpu.redteam import honest
from tests.gpu.redteam.attacks import GpuCase
from tests.redteam import suite
from tests.redteam.case import CHECKED, TIMED, Case, RedTeam, text_of
from tests.redteam.honest import Honest

DEVICE = "cuda:0"
NOISE = 1.3
"""By so much a case may be faster than its twin; what is ported works on kernels of a few microseconds."""
MEMORY_BYTES = 8 << 30
"""Of the host's, for a process with a CUDA context."""
BUILD_BYTES = 16 << 30
"""The compilers parse the framework's headers with several GB at once."""
GENERATED = 24
"""Ordinary kernels of the project's own generator in the honest suite."""
MEANINGLESS = {
    "interpreter_claimed": "nothing is interpreted on a GPU",
    "fresh_calls_deferred": "patches the CPU's audit; see audited_block_done_later",
    "fresh_calls_left_out": "patches the CPU's audit; see audited_block_left_out",
    "fresh_calls_of_nothing_at_nowhere": "patches the CPU's audit; see audited_outputs_nowhere",
    "memory_hidden_from_the_judge": "outputs lie in memory that the judge shares, no memory is read from outside",
    "replays_and_hides_work_in_the_audit": "patches the CPU's audit; see replays_and_hides_in_the_arena",
    "fresh_calls_in_half_precision": "patches the CPU's audit; see audited_block_in_half_precision",
    "inputs_watched_where_they_arrive": "patches the CPU's audit; a GPU's inputs are written when the clock runs already",
    "inputs_descriptor_kept": "audited inputs come through an arena that stays open, not through a descriptor of their own",
    "executable_page_of_a_file": "a CPU's own time is told by where it executes, a GPU's by its kernels",
    "library_that_was_not_built_here": "a CPU's own time is told by where it executes, a GPU's by its kernels",
}
"""Names of cases that would test nothing here, and why."""


def _is_ported(case: Case) -> bool:
    candidate = case.candidate
    return candidate.form == "module" and "cpp_extension" not in candidate.source and case.name not in MEANINGLESS


CASES = [replace(case, noise=min(case.noise, NOISE)) for case in suite.CASES if _is_ported(case)]


TWINS = {"task_add": "add_triton", "task_add_small": "add_triton", "task_matmul": "matmul_triton"}
"""Honest kernels for the tasks of cases that are written for a GPU."""


def as_case(case: GpuCase) -> Case:
    """A case written for a GPU in the form of the others."""
    return Case(
        number=case.number,
        name=case.name,
        why=case.why,
        candidate=Candidate(source=case.source, language=case.language),
        outcomes=case.outcomes,
        evidence=rf"(?s)\A(?!.*{re.escape(case.never_says)}).*\Z",
        task=_task(case.task),
        options=TIMED.model_copy(update={"build_s": 240.0, "memory_bytes": BUILD_BYTES}),
        noise=NOISE,
        tries=1,
    )


def honest_work() -> list[Honest]:
    """The honest suite for a GPU, and generated kernels, in the form of the CPU's."""
    found = [
        Honest(
            name=case.name,
            candidate=Candidate(source=case.source, language=case.language),
            task=TaskSpec(reference=case.task, name=case.name, device=DEVICE, dtype=case.dtype),
            options=Options(build_s=240, memory_bytes=BUILD_BYTES) if case.language == "cuda" else Options(),
        )
        for case in honest.CASES
    ]
    for name, reference, source in honest.generated(GENERATED):
        task = TaskSpec(reference=reference, name=name, device=DEVICE)
        candidate = Candidate(source=source, language="triton")
        found.append(Honest(name=name, candidate=candidate, task=task, options=Options(timing="quick")))
    return found


def _task(name: str) -> TaskSpec:
    return TaskSpec(reference=(KERNELS / f"{name}.py").read_text(), name=name, device=DEVICE)


def _twin(task: str) -> Candidate:
    return Candidate(source=(KERNELS / f"{TWINS[task]}.py").read_text(), language="triton")


class GpuRedTeam(RedTeam):
    """Judges the same candidates for the same tasks on a GPU."""

    def judge(self, candidate: Candidate, task: TaskSpec, options: Options) -> EvaluationResult:
        return super().judge(*_moved(candidate, task, options))

    def submit(self, candidate: Candidate, task: TaskSpec, options: Options) -> str:
        return super().submit(*_moved(candidate, task, options))

    def twin_speedup(self, case: Case, again: bool = False) -> float | None:
        name = case.task.name
        if name not in TWINS:
            return super().twin_speedup(case, again)
        if "ok" not in case.outcomes:
            return None
        key = (name, case.candidate.form)
        with self._looking:
            if again or key not in self._twins:
                result = self.judge(_twin(name), case.task, TIMED)
                assert result.outcome == "ok", f"the honest twin is judged {result.outcome}: {text_of(result)}"
                self._twins[key] = max(self._twins.get(key, 0.0), result.speedup)
            return self._twins[key]

    def canary(self) -> EvaluationResult:
        return self.judge(_twin("task_add"), _task("task_add"), CHECKED)


def _moved(candidate: Candidate, task: TaskSpec, options: Options) -> tuple[Candidate, TaskSpec, Options]:
    return (
        candidate.model_copy(update={"language": "cuda" if candidate.language == "cuda" else "triton"}),
        task.model_copy(update={"device": DEVICE}),
        options.model_copy(update={"memory_bytes": max(options.memory_bytes, MEMORY_BYTES)}),
    )
