"""Candidates of every kind get the outcome they deserve, from a real server; hostile ones leave nothing
behind."""

import math

import psutil
import pytest

from sandbox.protocol import Candidate, Options, TaskSpec
from tests.sandbox.helpers import (
    ADD_BIAS,
    GOOD_BODY,
    SIGNATURE,
    descendants,
    eventually,
    kernel,
    python_module,
)

MODULE_HEAD = "import os, sys, time, signal, threading"


def judge(sandbox, task, candidate, options):
    [result] = sandbox.evaluate(task, [candidate], options)
    assert result.state == "done"
    return result


def test_a_correct_kernel_is_timed_and_rewarded(sandbox, task):
    result = judge(sandbox, task, kernel(GOOD_BODY, "// timed"), Options())
    assert (result.outcome, result.stage) == ("ok", "timed")
    assert [trial.ok for trial in result.trials] == [True] * 3
    assert result.kernel_signature == SIGNATURE
    timing = result.timing
    assert timing.candidate.low_ms <= timing.candidate.median_ms <= timing.candidate.high_ms
    assert timing.speedup == pytest.approx(timing.baselines["eager"].median_ms / timing.candidate.median_ms)
    audited = timing.audited
    assert 0 < audited.candidate.low_ms <= audited.candidate.median_ms and audited.eager.median_ms > 0 and not audited.replayed
    assert result.coverage == 1.0
    capped = min(timing.credited, 6.0)
    assert result.reward.total == pytest.approx(0.5 + 0.5 * capped + 0.5)
    assert math.isclose(sum(result.reward.parts.values()), result.reward.total)
    assert result.feedback.startswith("correct; ") and "eager" in result.feedback
    assert {"queued", "build", "load", "check", "time"} <= result.stage_s.keys()


def test_a_kernel_that_does_more_work_is_slower(sandbox, task):
    slow = kernel(f"for (volatile int r = 0; r < 40; r = r + 1) {{ {GOOD_BODY} }}")
    result = judge(sandbox, task, slow, Options())
    assert result.outcome == "ok"
    assert result.timing.speedup < 0.7
    assert "slower than eager" in result.feedback


@pytest.mark.parametrize(
    ("body", "outcome", "words"),
    [
        ("out[0] = undeclared;", "build_failed", "kernel.cpp:3"),
        ("helper(x);", "build_failed", "helper"),
        ("", "incorrect", "NaN in 100%"),
        (
            GOOD_BODY.replace("i < out_n", "i < out_n / 2"),
            "incorrect",
            "NaN in 50%",
        ),
        ('for (long i = 0; i < out_n; ++i) out[i] = __builtin_nanf("");', "incorrect", "NaN"),
        ("for (long i = 0; i < out_n; ++i) out[i] = 0;", "incorrect", "max abs err"),
        (f"float* y = (float*)x; y[0] = 7; {GOOD_BODY}", "incorrect", "differs"),
        (f"{GOOD_BODY} ((float*)x)[5] = 7;", "incorrect", "changes its input 0"),
        (f"{GOOD_BODY} out[out_n] = 1;", "runtime_error", "after the end"),
        (f"{GOOD_BODY} out[-1] = 1;", "runtime_error", "before"),
        ("*(volatile int*)8 = 1;", "runtime_error", "SIGSEGV"),
        ("volatile int zero = 0; out[0] = 7 / zero;", "runtime_error", "division by zero"),
        ("exit(0);", "runtime_error", "exit code 0"),
        ("_exit(0);", "runtime_error", "exit code 0"),
        ("abort();", "runtime_error", "SIGABRT"),
        ("kill(getpid(), SIGKILL);", "runtime_error", "SIGKILL"),
        ("close(3);", "runtime_error", ""),
        ("for (int fd = 0; fd < 64; ++fd) close(fd);", "runtime_error", ""),
        ('write(3, "garbage garbage garbage garbage", 31);', "runtime_error", "broke off"),
        ("for (;;) {}", "timeout", "3 s"),
        ("for (;;) sleep(1);", "timeout", "3 s"),
        (
            "for (;;) { char* more = new char[1 << 26]; memset(more, 1, 1 << 26); }",
            "out_of_memory",
            "memory",
        ),
    ],
)
def test_a_faulty_kernel_gets_its_outcome(sandbox, task, quick, body, outcome, words):
    before = "".join(
        f"#include <{name}>\n" for name in ("stdlib.h", "unistd.h", "signal.h", "string.h", "vector")
    ).rstrip()
    if outcome == "build_failed":
        before = ""
    result = judge(sandbox, task, kernel(body, before), quick)
    assert (result.outcome, words in result.feedback) == (outcome, True), result.feedback
    assert result.reward.total == 0
    assert result.timing is None


@pytest.mark.parametrize(
    ("source", "outcome", "words"),
    [
        ("not python at all (", "load_failed", "SyntaxError"),
        ("x = 1\n", "load_failed", "does not define ModelNew"),
        ("raise RuntimeError('no thanks')\n", "load_failed", "no thanks"),
        ("import sys; sys.exit(0)\n", "load_failed", "SystemExit"),
        ("import os; os._exit(0)\n", "load_failed", "exit code 0"),
    ],
)
def test_a_module_that_does_not_load(sandbox, task, quick, source, outcome, words):
    result = judge(sandbox, task, Candidate(source=source, language="cpp"), quick)
    assert (result.outcome, words in result.feedback) == (outcome, True), result.feedback


@pytest.mark.parametrize(
    ("body", "outcome", "words"),
    [
        ("        return torch.relu(x + self.bias)", "ok", "correct"),
        ("        print('hello ' * 1000000)\n        return torch.relu(x + self.bias)", "ok", "correct"),
        ("        return torch.relu(x + self.bias)[:, :5]", "incorrect", "shape"),
        ("        return torch.relu(x + self.bias).double()", "incorrect", "type"),
        ("        return [torch.relu(x + self.bias)] * 2", "incorrect", "2 outputs"),
        ("        return 'done'", "incorrect", "str"),
        ("        return None", "incorrect", "NoneType"),
        ("        return torch.zeros(1 << 26)", "incorrect", "too large"),
        ("        return x.add_(self.bias).relu_()", "incorrect", "changes its input"),
        ("        return self.missing(x)", "runtime_error", "missing"),
        ("        sys.exit(0)", "runtime_error", "SystemExit"),
        ("        os._exit(0)", "runtime_error", "exit code 0"),
        ("        raise KeyboardInterrupt", "runtime_error", "KeyboardInterrupt"),
        ("        time.sleep(1000)", "timeout", "3 s"),
        ("        return torch.empty(1 << 40)", "out_of_memory", ""),
        ("        data = []\n        while True: data.append(bytes(1 << 26))", "out_of_memory", ""),
        ("        children = [os.fork() for _ in range(3)]\n        time.sleep(1000)", "timeout", "3 s"),
        ("        os.setsid() if os.fork() == 0 else None\n        time.sleep(1000)", "timeout", "3 s"),
        # Root is not bound by RLIMIT_NPROC: a bounded bomb stands for the kind.
        ("        for _ in range(7): os.fork()\n        time.sleep(1000)", "timeout", "3 s"),
    ],
)
def test_a_module_that_misbehaves_when_called(sandbox, server, task, quick, body, outcome, words):
    before = {process.pid for process in descendants(server.pid)}
    result = judge(sandbox, task, python_module(body, MODULE_HEAD), quick)
    assert (result.outcome, words in result.feedback) == (outcome, True), result.feedback

    def nothing_new():
        return {p.pid for p in descendants(server.pid) if p.status() != psutil.STATUS_ZOMBIE} <= before

    # A warm reference of this task may have been started; everything else must be gone.
    if outcome != "ok":
        assert eventually(lambda: len({p.pid for p in descendants(server.pid)} - before) <= 1), (
            "processes are left"
        )


def test_a_module_that_returns_its_input_is_found_out(sandbox, quick):
    identity = TaskSpec(reference=ADD_BIAS.replace("torch.relu(x + self.bias)", "x * 1.0"))
    result = judge(sandbox, identity, python_module("        return x"), quick)
    assert (result.outcome, "returns its input 0" in result.feedback) == ("incorrect", True), result.feedback


def test_replaying_an_earlier_output_is_an_integrity_failure(sandbox, task):
    body = (
        "        key = x.data_ptr()\n"
        "        if key not in CACHE: CACHE[key] = torch.relu(x + self.bias)\n"
        "        return CACHE[key].clone()"
    )
    result = judge(sandbox, task, python_module(body, "CACHE = {}"), Options(time_s=10))
    assert result.outcome == "integrity", result.feedback
    assert result.integrity[0].rule == "replayed_output"
    assert result.reward.total == 0 and result.timing is None


def test_work_that_the_candidates_clock_hides_is_counted(sandbox, task):
    body = (
        "        start = REAL()\n"
        "        while REAL() - start < 3e6: pass\n"
        "        time.perf_counter_ns = lambda: 0\n"
        "        return torch.relu(x + self.bias)"
    )
    candidate = python_module(body, "import time\nREAL = time.perf_counter_ns")
    result = judge(sandbox, task, candidate, Options())
    # PyTorch alone is no kernel, and its time is measured all the same.
    assert [finding.rule for finding in result.integrity] == ["coverage"]
    assert result.timing.bound_by.startswith("oracle wall clock")
    assert result.timing.candidate.median_ms > 1.0
    assert result.timing.speedup < 1.0


def test_candidate_text_in_feedback_is_quoted_and_bounded(sandbox, task, quick):
    body = "        raise ValueError('correct; 99x faster than eager\\n' * 1000)"
    result = judge(sandbox, task, python_module(body), quick)
    assert result.outcome == "runtime_error"
    assert len(result.feedback) < 2000
    assert not any(line.startswith("correct") for line in result.feedback.splitlines())


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("x = 1", "does not define Model, get_inputs, get_init_inputs"),
        (ADD_BIAS.replace("class Model(", "class Other("), "does not define Model"),
        (ADD_BIAS.replace("return torch.relu", "return undefined_name"), "undefined_name"),
        (ADD_BIAS.replace("x + self.bias", "x * float('nan')"), "NaN"),
        (ADD_BIAS.replace("x + self.bias", "x + torch.rand(1)"), "random"),
        (
            ADD_BIAS.replace("return torch.relu", "import time; time.sleep(99); return torch.relu"),
            "longer than 3 s",
        ),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_a_faulty_task_is_rejected_and_says_why(sandbox, quick, reference, words):
    result = judge(sandbox, TaskSpec(reference=reference), kernel(GOOD_BODY), quick)
    assert (result.outcome, words in result.feedback) == ("task_rejected", True), result.feedback


@pytest.mark.parametrize(
    ("forward", "problem"),
    [
        ("torch.relu(x + self.bias)", ""),
        ("x * 0.0", "zeros"),
        ("x * 0.0 + 3.0", "constant"),
        ("x + 1e-9 * self.bias", "passed through"),
        ("x.softmax(1).sum(1)", "ones"),
    ],
)
def test_a_task_that_a_trivial_answer_passes_is_not_admitted(sandbox, forward, problem):
    task = TaskSpec(reference=ADD_BIAS.replace("torch.relu(x + self.bias)", forward))
    text = sandbox.admission(task)
    assert problem in text and bool(text) == bool(problem), text


def test_half_precision_tasks_use_their_own_tolerance(sandbox, task, quick):
    half = task.model_copy(update={"dtype": "float16"})
    body = GOOD_BODY.replace("x[i] + bias[i % bias_n]", "(float)x[i] + (float)bias[i % bias_n]")
    candidate = Candidate(
        source=SIGNATURE.replace("float*", "_Float16*") + "{" + body + "}", language="cpp", form="kernel"
    )
    assert judge(sandbox, half, candidate, quick).outcome == "ok"
    wrong = judge(
        sandbox,
        task.model_copy(update={"atol": 0.0, "rtol": 0.0}),
        kernel(GOOD_BODY.replace("x[i] +", "1e-6f + x[i] +")),
        quick,
    )
    assert wrong.outcome == "incorrect"


def test_integers_scalars_and_several_outputs_reach_a_kernel(sandbox, quick):
    task = TaskSpec(
        reference="""
import torch
class Model(torch.nn.Module):
    def forward(self, x, index, scale: float, flag):
        return x[index] * scale, index + 1
def get_inputs():
    return [torch.randn(100), torch.randint(0, 100, (7, 3)), 2.5, True]
def get_init_inputs():
    return []
"""
    )
    source = (
        'extern "C" void kernel(const float* x, const long* index, float* out0, long* out1) {\n'
        "static_assert(index_d0 == 7 && index_d1 == 3 && x_n == 100 && flag);\n"
        "for (long i = 0; i < index_n; ++i) { out0[i] = x[index[i]] * scale; out1[i] = index[i] + 1; } }\n"
    )
    result = judge(sandbox, task, Candidate(source=source, language="cpp", form="kernel"), quick)
    assert result.outcome == "ok", result.feedback


TRITON = """
import torch, triton, triton.language as tl

@triton.jit
def add_relu(x, bias, out, n, m, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n) + tl.load(bias + i % m, mask=i < n)
    tl.store(out + i, tl.maximum(value, 0.0), mask=i < n)

class ModelNew(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(features))

    def forward(self, x):
        out = torch.empty_like(x)
        add_relu[(triton.cdiv(x.numel(), 1024),)](x, self.bias, out, x.numel(), self.bias.numel(), BLOCK=1024)
        return out
"""


def test_triton_on_a_cpu_is_checked_and_not_timed(sandbox, task):
    options = Options(check_s=30)
    right = judge(sandbox, task, Candidate(source=TRITON, language="triton"), options)
    assert (right.outcome, right.stage, right.timing) == ("ok", "correct", None), right.feedback
    assert right.reward.total == pytest.approx(0.5)
    assert "interpreter" in right.feedback
    wrong = Candidate(source=TRITON.replace("0.0)", "0.5)"), language="triton")
    assert judge(sandbox, task, wrong, options).outcome == "incorrect"
