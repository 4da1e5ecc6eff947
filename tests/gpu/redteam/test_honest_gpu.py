"""No honest kernel is flagged on a GPU: each is correct, timed, and covered by its own work."""

import pytest

from sandbox.protocol import Candidate, Options, TaskSpec
from tests.gpu.redteam.honest import CASES, generated

GENERATED = generated(24)


def text_of(result):
    return f"{result.outcome}: {result.feedback} {result.notes} {[f.evidence for f in result.integrity]}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_honest_work_passes(server, case):
    spec = TaskSpec(reference=case.task, name=case.name, device="cuda:0", dtype=case.dtype)
    limits = {"build_s": 240, "memory_bytes": 16 << 30} if case.language == "cuda" else {}
    [result] = server.evaluate(spec, [Candidate(source=case.source, language=case.language)], Options(**limits))
    print(text_of(result), result.timing and round(result.timing.speedup, 3), result.stage_s)
    assert result.outcome == "ok" and not result.integrity, text_of(result)
    assert result.coverage > 0.3 and result.timing is not None
    assert result.reward.total > 0


@pytest.mark.parametrize("name", [name for name, _, _ in GENERATED])
def test_a_generated_kernel_passes(server, name):
    task, kernel = next((task, kernel) for found, task, kernel in GENERATED if found == name)
    spec = TaskSpec(reference=task, name=name, device="cuda:0")
    [result] = server.evaluate(spec, [Candidate(source=kernel, language="triton")], Options(timing="quick"))
    print(text_of(result), result.timing and round(result.timing.speedup, 3), result.stage_s)
    assert result.outcome == "ok" and not result.integrity, text_of(result)
    assert result.coverage > 0.3
