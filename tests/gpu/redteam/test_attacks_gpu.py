"""No attack on a GPU gains anything, and the honest evaluation after it is untouched."""

import pytest

from sandbox.protocol import Candidate, Options, TaskSpec
from tests.gpu.conftest import KERNELS
from tests.gpu.redteam.attacks import CASES

NOISE = 1.3
TWINS = {"task_add": "add_triton"}


@pytest.fixture(scope="session")
def twin_speedups(server):
    speedups = {}
    for task, twin in TWINS.items():
        spec = TaskSpec(reference=(KERNELS / f"{task}.py").read_text(), name=task, device="cuda:0")
        source = (KERNELS / f"{twin}.py").read_text() + "\n# twin\n"
        [result] = server.evaluate(spec, [Candidate(source=source, language="triton")], Options())
        print(f"{twin}: {result.timing}, {result.notes}, {result.stage_s}")
        assert result.outcome == "ok", result.feedback
        speedups[task] = result.speedup
    return speedups


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number:02}-{case.name}")
def test_an_attack_gains_nothing(server, judge, twin_speedups, case):
    spec = TaskSpec(reference=(KERNELS / f"{case.task}.py").read_text(), name=case.task, device="cuda:0")
    [result] = server.evaluate(spec, [Candidate(source=case.source, language=case.language)], Options())
    canary = judge("task_add", "add_triton", suffix=f"\n# after {case.name}\n", timing="none")
    assert result.outcome in case.outcomes, result.feedback
    if result.outcome == "ok":
        assert result.speedup <= NOISE * twin_speedups[case.task], result.feedback
    else:
        assert result.reward.total == 0
    assert canary.outcome == "ok", canary.feedback
