"""Candidates that build an extension, judged: builds are reused, failures and deadlines are the candidate's, and named."""

import time

import pytest

from sandbox.oracle.draft import Job
from sandbox.oracle.evaluate import Judge
from sandbox.protocol import Candidate, Options, TaskSpec
from tests.sandbox.helpers import ADD_BIAS, needs_extensions

pytestmark = needs_extensions

FLAGS = ["-O2"]


CANDIDATE = f'''
import torch
from torch.utils.cpp_extension import load_inline
ext = load_inline(name="e", cpp_sources="""
torch::Tensor f(torch::Tensor x, const torch::Tensor& bias) {{
  TORCH_CHECK(x.dim() == 2, "x must be a matrix");
  auto out = torch::empty_like(x);
  const float *a = x.data_ptr<float>(), *b = bias.data_ptr<float>();
  float* o = out.data_ptr<float>();
  const int64_t n = x.size(1);
  for (int64_t i = 0; i < x.numel(); ++i) {{ float v = a[i] + b[i % n]; o[i] = v > 0 ? v : 0; }}
  return out;
}}""", functions=["f"], extra_cflags={FLAGS!r})

class ModelNew(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(features))

    def forward(self, x):
        return ext.f(x, self.bias)
'''


@pytest.fixture(scope="module")
def judge(tmp_path_factory, built_headers):
    judge = Judge(scratch=tmp_path_factory.mktemp("judge"), store=built_headers, threads=1)
    judge.start()

    def evaluate(source, **options):
        job = Job(
            id="1",
            task=TaskSpec(reference=ADD_BIAS),
            candidate=Candidate(source=source, language="cpp"),
            options=Options(**{"timing": "none", "build_s": 250, "memory_bytes": 2 << 30, **options}),
        )
        return judge.evaluate(job)

    yield evaluate
    judge.close()


def test_a_candidate_is_judged_and_its_build_reused_whatever_python_surrounds_it(judge):
    cold = judge(CANDIDATE)
    assert cold.outcome == "ok", cold.feedback
    assert any("by the lean road" in note for note in cold.notes), cold.notes
    assert [(build.name, build.road, build.cached) for build in cold.builds] == [("e", "lean", False)] and cold.builds[0].seconds > 0
    warm = judge(CANDIDATE.replace('name="e"', 'name="other"') + "\n# other Python\n")
    assert warm.outcome == "ok" and any("found in the cache" in note for note in warm.notes), warm.notes
    assert warm.stage_s["build"] < cold.stage_s["build"]
    assert [(build.name, build.road, build.cached) for build in warm.builds] == [("other", "lean", True)]


def test_a_broken_candidate_has_failed_to_build(judge):
    result = judge(CANDIDATE.replace("float v =", "flot v ="))
    assert result.outcome == "build_failed" and "'flot' was not declared" in result.feedback
    assert any("not built" in note for note in result.notes)
    assert [build.road for build in result.builds] == [None]
    refused = judge(CANDIDATE.replace("'-O2'", "'-fplugin=/x'"))
    assert refused.outcome == "build_failed" and "is not allowed here" in refused.feedback


def test_building_has_a_deadline_of_its_own(judge):
    result = judge(CANDIDATE.replace("v > 0", f"v > 0.0 * {time.time_ns() % 1000}"), build_s=0.02)
    assert result.outcome == "timeout" and "building took too long" in result.feedback
    patient = judge(CANDIDATE.replace("v > 0", f"v > 0.0 * {time.time_ns() % 1000 + 1000}"), load_s=1.5)
    assert patient.outcome == "ok", patient.feedback


def test_an_exception_of_the_extension_is_a_runtime_error_with_its_text(judge):
    result = judge(CANDIDATE.replace("x.dim() == 2", "x.dim() == 3"))
    assert result.outcome == "runtime_error" and "x must be a matrix" in result.feedback


def test_what_is_built_while_forward_runs_is_built_before_the_timing(judge):
    lazy = CANDIDATE.replace("ext = load_inline(", "make = lambda: load_inline(").replace(
        "return ext.f(x, self.bias)",
        "\n        if not hasattr(self, 'ext'): self.ext = make()\n        return self.ext.f(x, self.bias)",
    )
    assert judge(lazy).outcome == "ok"
    late = CANDIDATE + (
        "\ncalls = []\nforward = ModelNew.forward\n"
        "def count(self, x):\n"
        "    calls.append(0)\n"
        "    if len(calls) == 8: load_inline(name='late', cpp_sources='int g();', functions=['g'])\n"
        "    return forward(self, x)\n"
        "ModelNew.forward = count\n"
    )
    result = judge(late, timing="quick")
    assert result.outcome == "build_failed" and "not later" in result.feedback, (
        result.outcome,
        result.feedback,
    )
