"""Clients of KernelGYM and callers of KernelBench's evaluate function get the sandbox's verdicts in their own words."""

import signal
import subprocess
import sys
import threading

import httpx
import pytest
from starlette.testclient import TestClient

from sandbox.client import AsyncSandboxClient
from sandbox.compat import kernelbench
from sandbox.compat.kernelgym import GatewayError, create_app, serve
from sandbox.compat.kernelgym_models import EvaluationRequest, response_of
from sandbox.protocol import EvaluationResult, Finding, KernelTime, Span, Timing
from tests.sandbox.helpers import ROOT, eventually, running_server

TASK = """
import torch

class {name}(torch.nn.Module):
    def forward(self, x, y):
        return x + y

def get_inputs():
    return [torch.randn(64, 33), torch.randn(64, 33)]

def get_init_inputs():
    return []
"""
KERNEL = (ROOT / "tests/gpu/kernels/add_triton.py").read_text()
WRONG = KERNEL.replace(" + tl.load(y_ptr", " - tl.load(y_ptr")
TOKEN = "a-token"


def payload(task_id: str, kernel: str = KERNEL, **more):
    """What KernelGYM's reward client posts."""
    return {
        "task_id": task_id, "reference_code": TASK.format(name="Model"), "kernel_code": kernel, "backend": "triton",
        "num_correct_trials": 2, "num_perf_trials": 100, "timeout": 60, "priority": "normal", "entry_point": "Model",
        "is_valid": False, "verbose_errors": True, "enable_profiling": True, "detect_decoy_kernel": True,
        "reference_backend": None, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def gym(server):
    with TestClient(create_app(server.socket)) as client:
        yield client


def test_a_kernel_is_judged_while_its_client_waits_or_polls(gym):
    answer = gym.post("/evaluate", json=payload("right"))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["status"] == "completed" and found["compiled"] and found["correctness"] and not found["decoy_kernel"]
    assert found["speedup"] == 0.0 and "interpreter" in found["metadata"]["feedback"]
    assert found["submitted_at"] < found["completed_at"] and found["processing_time"] > 0
    assert gym.get("/status/right").json()["status"] == "completed"
    assert gym.get("/results/right").json() == found


@pytest.mark.parametrize(
    ("kernel", "status", "compiled", "code", "said"),
    [
        (WRONG, "completed", True, "CORRECTNESS_ERROR", "wrong result"),
        (KERNEL.replace("return out", "raise ValueError('no more')"), "completed", True, "RUNTIME_ERROR", "no more"),
        (KERNEL.replace("class ModelNew", "class Other"), "failed", False, "COMPILATION_ERROR", "ModelNew"),
        ("def broken(:\n    pass\n", "failed", False, "COMPILATION_ERROR", "SyntaxError"),
    ],
    ids=["wrong", "raises", "no class", "no Python"],
)  # fmt: skip
def test_what_is_wrong_with_a_kernel_is_said_in_its_clients_words(gym, kernel, status, compiled, code, said):
    found = gym.post("/evaluate", json=payload(f"bad {code} {said}", kernel)).json()
    assert (found["status"], found["compiled"], found["correctness"]) == (status, compiled, False)
    assert found["error_code"] == code and said in found["error_message"]


def test_an_id_stands_for_one_evaluation_unless_a_fresh_one_is_asked_for(gym):
    ids = [
        gym.post("/evaluate", json=payload("twice", **more)).json()["metadata"]["evaluation_id"]
        for more in ({}, {}, {"force_refresh": True})
    ]
    assert ids[0] == ids[1] != ids[2]
    assert not gym.get("/results/twice").json()["metadata"]["cached"]


def test_a_batch_has_its_verdicts_in_order_and_other_entry_points_are_found(gym):
    named = payload("batch 2", KERNEL.replace("ModelNew", "SumNew"), entry_point="Sum", reference_code=TASK.format(name="Sum"))
    found = gym.post("/evaluate/batch", json={"batch_id": "b", "tasks": [payload("batch 1", WRONG), named]}).json()
    assert [result["task_id"] for result in found["results"]] == ["batch 1", "batch 2"]
    assert [result["correctness"] for result in found["results"]] == [False, True]
    assert (found["total_tasks"], found["completed_tasks"], found["failed_tasks"]) == (2, 2, 0)


def test_work_can_be_cancelled_and_unknown_work_is_not_found(gym):
    hangs = KERNEL.replace("return out", "\n        while True: pass")
    waiting = threading.Thread(target=gym.post, args=("/evaluate",), kwargs={"json": payload("hangs", hangs)})
    waiting.start()
    assert eventually(lambda: gym.get("/status/hangs").json().get("status") == "processing")
    assert "cancelled" in gym.delete("/tasks/hangs").json()["message"]
    waiting.join(20)
    assert gym.get("/status/hangs").json()["status"] == "failed"
    assert gym.delete("/tasks/hangs").status_code == 404
    for path in ("/status/nobody", "/results/nobody"):
        assert gym.get(path).status_code == 404


def test_a_requests_priority_reaches_the_sandbox(gym, monkeypatch):
    asked = []
    for name in ("submit", "evaluate"):
        plain = getattr(AsyncSandboxClient, name)

        def spied(self, task, candidates, options, key, *args, plain=plain, **more):
            asked.append((self._conversation.name, args[0] if args else more["priority"]))
            return plain(self, task, candidates, options, key, *args, **more)

        monkeypatch.setattr(AsyncSandboxClient, name, spied)
    for priority in ("low", "high"):
        assert gym.post("/evaluate", json=payload(f"priority {priority}", priority=priority)).status_code == 200
    assert [urgency for _, urgency in asked] == [0, 0, 2, 2] and len({name for name, _ in asked}) == 1


def test_a_request_that_cannot_be_served_is_refused_with_its_field(gym):
    for field, value in (("kernel_code", "short"), ("timeout", 5), ("backend", "cute"), ("workflow", "kernel_simple")):
        answer = gym.post("/evaluate", json=payload("refused", **{field: value}))
        assert answer.status_code == 422 and field in answer.text


def test_health_and_queue_are_told(gym):
    assert gym.get("/health").json()["status"] == "healthy"
    assert gym.get("/queue/status").json()["workers"] == 2
    assert "sandbox_evaluations_total" in gym.get("/metrics").text


def test_without_the_token_nothing_is_answered(server):
    with TestClient(create_app(server.socket, TOKEN)) as http:
        for given in ({}, {"auth": ("other", "")}, {"headers": {"Authorization": "Basic ???"}}, {"headers": {"Authorization": TOKEN}}):
            answer = http.get("/health", **given)
            assert answer.status_code == 401 and "http://TOKEN@host:port" in answer.json()["detail"]
        for given in ({"auth": (TOKEN, "")}, {"headers": {"Authorization": f"Bearer {TOKEN}"}}):
            assert http.get("/health", **given).status_code == 200


@pytest.mark.parametrize(("listen", "said"), [("0.0.0.0:8000", "SANDBOX_TOKEN"), ("8000", "HOST:PORT"), ("localhost:http", "HOST:PORT")])
def test_an_address_that_others_reach_needs_a_token(tmp_path, listen, said):
    with pytest.raises(GatewayError, match=said):
        serve(tmp_path / "s", listen, None)


def test_a_sandbox_that_restarts_loses_no_evaluation(short_dir):
    with running_server(short_dir, "--workers", "1") as first, TestClient(create_app(first.socket)) as http:
        answers = []
        hangs = KERNEL.replace("return out", "import time; time.sleep(3); return out")
        waiting = threading.Thread(target=lambda: answers.append(http.post("/evaluate", json=payload("kept", hangs))))
        waiting.start()
        assert eventually(lambda: http.get("/status/kept").json().get("status") == "processing")
        first.stop(signal.SIGKILL)
        assert http.get("/health").status_code == 503
        with running_server(short_dir, "--workers", "1"):
            waiting.join(90)
    assert answers and answers[0].json()["correctness"] is True


def test_the_command_serves_over_tcp(server, tmp_path):
    with httpx.Client() as http:
        for port in range(18431, 18441):
            command = [sys.executable, "-m", "sandbox", "gateway", "--socket", str(server.socket), "--listen", f"127.0.0.1:{port}"]
            process = subprocess.Popen(command, cwd=ROOT)
            try:

                def answers(url=f"http://127.0.0.1:{port}/", process=process):
                    try:
                        return process.poll() is not None or http.get(url).json()["name"] == "KernelGym"
                    except httpx.TransportError:
                        return False

                assert eventually(answers)
                if process.poll() is None:
                    return
            finally:
                process.terminate()
                process.wait(20)
    pytest.fail("no port was free")


def spans(apart, **medians_ms):
    return {name: Span(median_ms=ms, low_ms=ms - apart, high_ms=ms + apart, samples=9) for name, ms in medians_ms.items()}


def verdict(outcome="ok", apart=0.1, **more):
    found = spans(apart, own=2.0, eager=6.0, compiled=3.0)
    timing = Timing(
        candidate=found["own"], baselines={"eager": found["eager"], "torch.compile": found["compiled"]},
        speedup=3.0, speedup_low=(6.0 - apart) / (2.0 + apart), speedup_high=(6.0 + apart) / (2.0 - apart), noisy=False, bound_by="runner span",
    )  # fmt: skip
    kernels = [KernelTime(name="mine", share=0.75, ms=1.5, own=True), KernelTime(name="fill", share=0.25, ms=0.5)]
    return EvaluationResult(id="e", state="done", outcome=outcome, timing=timing, kernels=kernels, coverage=0.75, **more)


def test_speed_and_coverage_are_what_its_clients_compute_rewards_from():
    found = response_of(EvaluationRequest(**payload("t")), verdict())
    assert (found.kernel_runtime, found.reference_runtime, found.speedup) == (2.0, 6.0, 3.0)
    metadata = found.metadata
    assert (metadata["num_custom_kernels"], metadata["num_total_kernels"]) == (1, 2)
    assert metadata["custom_kernel_cuda_time_in_profiling_us"] / metadata["total_kernel_run_time_in_profiling_us"] == 0.75
    compiled = response_of(EvaluationRequest(**payload("t", reference_backend="torch_compile")), verdict())
    assert (compiled.reference_runtime, compiled.speedup) == (3.0, 1.5)
    unclear = response_of(EvaluationRequest(**payload("t", reference_backend="torch_compile")), verdict(apart=0.6))
    assert (unclear.kernel_runtime, unclear.reference_runtime, unclear.speedup) == (2.0, 3.0, 1.0), "what is within noise earns nothing"


def test_a_kernel_that_cheats_is_a_decoy():
    caught = verdict("integrity", integrity=[Finding(rule="coverage", evidence="0 %")])
    found = response_of(EvaluationRequest(**payload("t")), caught)
    assert found.status == "completed" and found.decoy_kernel and found.metadata["integrity"][0]["rule"] == "coverage"


def test_a_request_asks_the_sandbox_for_what_it_says():
    task, candidate, options = EvaluationRequest(**payload("t", reference_backend="torch_compile")).translated(["cpu", "cuda:0"])
    assert task.device == "cuda:0" and candidate.language == "triton" and options.profile
    assert options.baselines == ["eager", "torch.compile"] and options.timing == "full" and options.correctness_trials == 2
    request = EvaluationRequest(**payload("t", backend="cuda", run_performance=False, device_preference="cuda:1"))
    task, candidate, options = request.translated(["cuda:0", "cuda:1"])
    assert task.device == "cuda:1" and candidate.language == "cuda" and options.timing == "none"


def test_kernelbench_s_function_gives_its_fields(server, monkeypatch):
    monkeypatch.setenv(kernelbench.SOCKET_VARIABLE, str(server.socket))
    evaluate, reference = kernelbench.eval_kernel_against_ref, TASK.format(name="Model")
    right = evaluate(reference, KERNEL, num_correct_trials=3, measure_performance=True, backend="triton", device="cpu")
    assert right.compiled and right.correctness and right.runtime == -1.0 and right.metadata["correctness_trials"] == "(3 / 3)"
    wrong = evaluate(reference, WRONG, backend="triton", precision="torch.float32")
    assert wrong.compiled and not wrong.correctness and "wrong result" in wrong.metadata["correctness_issue"]
    broken = evaluate(reference, "def broken(:", backend="triton")
    assert not broken.compiled and "SyntaxError" in broken.metadata["compilation_error"]
    with pytest.raises(ValueError, match="cute"):
        evaluate(reference, KERNEL, backend="cute")


def test_kernelbench_s_function_needs_a_socket(monkeypatch):
    monkeypatch.delenv(kernelbench.SOCKET_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=kernelbench.SOCKET_VARIABLE):
        kernelbench.eval_kernel_against_ref("x", "y")


def test_times_reach_kernelbench_s_fields():
    found = kernelbench._translated(verdict(), timed=True)
    assert (found.runtime, found.ref_runtime, found.runtime_stats["num_trials"]) == (2.0, 6.0, 9)
    assert kernelbench._translated(verdict("integrity"), timed=True).runtime == -1.0
