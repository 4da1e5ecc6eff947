"""A GPU that has fallen off the bus is the judge's fault, whatever it makes a candidate or a task look like."""

import pytest

from sandbox.build.artifacts import ArtifactStore
from sandbox.jail import nvml
from sandbox.oracle.draft import Job
from sandbox.oracle.evaluate import Judge
from sandbox.oracle.failures import Failure
from sandbox.oracle.reference import TaskRejected
from sandbox.oracle.room import lost
from sandbox.protocol import Options
from tests.sandbox.helpers import python_module

LOST = "nvmlDeviceGetMemoryInfo failed with status 15"


@pytest.fixture
def judge(tmp_path):
    judge = Judge(scratch=tmp_path, store=ArtifactStore(tmp_path / "store"), threads=1)
    yield judge
    judge.close()


def judged(judge, task, monkeypatch, error, answers):
    def free_bytes(index):
        if not answers:
            raise nvml.NvmlError(LOST)
        return 1 << 40

    def fails(self, job, verdict):
        raise error

    monkeypatch.setattr(nvml, "free_bytes", free_bytes)
    monkeypatch.setattr(Judge, "_evaluate", fails)
    on_gpu = task.model_copy(update={"device": "cuda:0"})
    return judge.evaluate(Job(id="a", task=on_gpu, candidate=python_module("        return x"), options=Options()))


@pytest.mark.parametrize(
    ("error", "otherwise"),
    [
        (Failure("runtime_error", "CUDA error: unknown error"), "runtime_error"),
        (Failure("incorrect", "wrong"), "incorrect"),
        (TaskRejected("CUDA error: no CUDA-capable device is detected"), "task_rejected"),
        (nvml.NvmlError("nvmlDeviceGetName failed with status 15"), "infra_error"),
    ],
)
def test_no_verdict_is_given_on_a_gpu_that_does_not_answer(judge, task, monkeypatch, error, otherwise):
    result = judged(judge, task, monkeypatch, error, answers=False)
    assert result.outcome == "infra_error" and not result.transient
    assert "cuda:0 does not answer its driver" in result.feedback and LOST in result.feedback and "are kept" in result.feedback
    assert judged(judge, task, monkeypatch, error, answers=True).outcome == otherwise


def test_a_cpu_is_never_lost():
    assert lost("cpu") is None
