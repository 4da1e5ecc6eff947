"""The schema: what a request may hold, and how wrong ones are refused over HTTP."""

import threading

import httpx
import pytest
from pydantic import ValidationError

from sandbox.client import SandboxClient, SandboxRejected, SandboxUnavailable
from sandbox.jail.probe import isolation
from sandbox.protocol import (
    MAX_SOURCE_BYTES,
    Candidate,
    EvaluationRequest,
    EvaluationResult,
    Options,
    RewardSpec,
    TaskSpec,
)
from sandbox.server import MAX_BODY_BYTES
from tests.sandbox.helpers import ADD_BIAS, GOOD_BODY, kernel

BODY = {
    "task": {"reference": ADD_BIAS},
    "candidates": [{"source": "", "language": "cpp", "form": "kernel"}],
    "options": {"timing": "none"},
}


@pytest.fixture
def http(server):
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(server.socket)), base_url="http://sandbox"
    ) as client:
        yield client


def test_requests_survive_json():
    request = EvaluationRequest(
        task=TaskSpec(reference="x"), candidates=[kernel(GOOD_BODY)], options=Options()
    )
    assert EvaluationRequest.model_validate_json(request.model_dump_json()) == request


def test_milestones_need_the_baseline_that_the_last_one_is_for():
    with pytest.raises(ValidationError, match="torch.compile"):
        Options(reward=RewardSpec(kind="milestones"))
    options = Options(reward=RewardSpec(kind="milestones"), baselines=["eager", "torch.compile"])
    assert options.reward.failure == -1.0
    assert Options.model_validate_json(options.model_dump_json()) == options


def test_a_request_of_an_older_client_is_rewarded_by_weights():
    spec = RewardSpec.model_validate({"w_correct": 1.0, "w_speed": 0.5, "w_coverage": 0.0, "speedup_cap": 2.5})
    assert spec.kind == "weighted" and spec.failure == 0.0


def test_unknown_fields_are_refused_in_requests_and_ignored_in_results():
    with pytest.raises(ValidationError):
        TaskSpec.model_validate({"reference": "x", "colour": "red"})
    assert EvaluationResult.model_validate({"id": "a", "colour": "red"}).id == "a"


def test_a_bare_kernel_must_be_cpp():
    with pytest.raises(ValidationError, match="kernel"):
        Candidate(source="", language="triton", form="kernel")


def test_a_source_has_a_largest_size():
    Candidate(source="x" * MAX_SOURCE_BYTES, language="cpp")
    with pytest.raises(ValidationError, match="limit"):
        Candidate(source="\u00e9" * (MAX_SOURCE_BYTES // 2 + 1), language="cpp")


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        (
            {"candidates": [{"source": "x" * (MAX_SOURCE_BYTES + 1), "language": "cpp"}]},
            413,
            "candidates.0.source",
        ),
        ({"task": {"reference": "x" * (MAX_SOURCE_BYTES + 1)}}, 413, "task.reference"),
        ({"candidates": [{"source": "", "language": "cpp"}] * 65}, 413, "candidates"),
        ({"candidates": []}, 422, "candidates"),
        ({"candidates": [{"source": "", "language": "fortran"}]}, 422, "candidates.0.language"),
        ({"candidates": [{"source": "", "language": "triton", "form": "kernel"}]}, 422, "candidates.0"),
        ({"candidates": [{"source": "", "language": "cuda"}]}, 422, "candidates.0.language"),
        ({"task": {"reference": "", "device": "cuda:0"}}, 422, "task.device"),
        ({"task": {"reference": "", "device": "tpu"}}, 422, "task.device"),
        ({"task": {}}, 422, "task.reference"),
        ({"options": {"build_s": -1}}, 422, "options.build_s"),
        ({"options": {"correctness_trials": 0}}, 422, "options.correctness_trials"),
        ({"options": {"baselines": []}}, 422, "options.baselines"),
        ({"options": {"reward": {"kind": "milestones"}}}, 422, "options"),
        ({"options": {"reward": {"kind": "points"}}}, 422, "options.reward.kind"),
        ({"protocol_version": 2}, 422, "protocol_version"),
        ({"surprise": 1}, 422, "surprise"),
    ],
)
def test_a_wrong_request_is_refused_with_the_field_named(http, change, status, field):
    response = http.post("/v1/evaluations", json={**BODY, **change})
    assert (response.status_code, response.json()["field"]) == (status, field), response.text
    assert response.json()["error"]


def test_a_body_that_is_no_json_is_refused(http):
    response = http.post("/v1/evaluations", content="{", headers={"content-type": "application/json"})
    assert response.status_code == 422 and response.json()["error"]


def test_unknown_ids_are_404_with_a_hint(http):
    for call in ("/v1/evaluations/none", "/v1/verifications/none", "/v1/evaluations/stream?ids=none"):
        response = http.get(call)
        assert response.status_code == 404 and response.json()["hint"], call
    assert http.delete("/v1/evaluations/none").status_code == 404


def test_the_client_turns_refusals_into_exceptions(sandbox, task):
    with pytest.raises(SandboxRejected, match="cuda") as caught:
        sandbox.evaluate(task, [Candidate(source="", language="cuda")])
    assert caught.value.field == "candidates.0.language" and caught.value.hint


def test_a_patient_call_ends_when_the_client_is_told_to_abort(tmp_path):
    client = SandboxClient(tmp_path / "none", retry_for_s=600)
    threading.Timer(0.3, client.abort).start()
    with pytest.raises(SandboxUnavailable, match="told to abort"):
        client.health()
    with pytest.raises(SandboxUnavailable, match="told to abort"):
        client.health()


def test_no_server_is_said_at_once_and_how_to_start_one(tmp_path):
    with SandboxClient(tmp_path / "none", retry_for_s=0) as client:
        with pytest.raises(SandboxUnavailable, match="sandbox serve"):
            client.health()


def test_openapi_names_every_call(http):
    paths = http.get("/openapi.json").json()["paths"]
    assert {
        "/v1/evaluations",
        "/v1/evaluations/{evaluation_id}",
        "/v1/evaluations/stream",
        "/v1/verifications",
        "/v1/verifications/{verification_id}",
        "/v1/health",
        "/v1/metrics",
        "/v1/capabilities",
    } <= paths.keys()
    assert set(paths["/v1/evaluations/{evaluation_id}"]) == {"get", "delete"}


def test_health_and_capabilities_describe_the_server(sandbox):
    health = sandbox.health()
    assert (health.status, health.devices) == ("ok", ["cpu"])
    level = isolation()
    assert (health.level, health.features, health.missing) == (level.name, [*level.features], [*level.missing])
    assert health.queue.workers_ready == health.queue.workers == 2
    offered = sandbox.capabilities()
    assert offered.languages["cpp"].available and offered.languages["cpp"].timing
    assert not offered.languages["cuda"].available and offered.languages["cuda"].problem
    assert not offered.languages["triton"].timing
    assert 'extern "C" void kernel' in offered.kernel_form["cpp"]["rule"]


def test_the_published_example_is_correct(sandbox):
    example = sandbox.capabilities().kernel_form["cpp"]["example"]
    reference = (
        "import torch\nclass Model(torch.nn.Module):\n    "
        + example["forward"]
        + "\ndef get_inputs(): return [torch.randn(8, 16), torch.randn(16)]\n"
        + "def get_init_inputs(): return []\n"
    )
    candidate = Candidate(source=example["source"], language="cpp", form="kernel")
    [result] = sandbox.evaluate(TaskSpec(reference=reference), [candidate], Options(timing="none"))
    assert (result.outcome, result.kernel_signature) == ("ok", example["signature"]), result.feedback


def test_metrics_are_prometheus_text(sandbox, task, quick):
    sandbox.evaluate(task, [kernel("out[0] = metrics_test;")], quick)
    lines = sandbox.metrics().splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(samples['sandbox_evaluations_total{outcome="build_failed"}']) >= 1
    assert "sandbox_queue_waiting" in samples
    assert all(line.startswith(("# HELP ", "# TYPE ", "sandbox_")) for line in lines)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/evaluations", b"\xc3( not UTF-8", 400),
        ("POST", "/v1/verifications", b"1\xe3", 400),
        ("GET", "/v1/nothing", None, 404),
        ("PATCH", "/v1/health", None, 405),
    ],
)
def test_the_frameworks_own_refusals_have_the_form_of_ours(http, method, path, body, status):
    answer = http.request(method, path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"] and answer.json()["hint"]


def test_an_endless_body_without_a_declared_length_is_refused_on_the_way(http):
    sent = 0

    def flood():
        nonlocal sent
        while sent < 4 * MAX_BODY_BYTES:
            sent += 1 << 20
            yield b" " * (1 << 20)

    try:
        answer = http.post("/v1/evaluations", content=flood())
    except httpx.WriteError:
        answer = None  # the server has hung up, as it may
    assert answer is None or (answer.status_code == 413 and answer.json()["field"] == "body")
    assert sent < 2 * MAX_BODY_BYTES + (8 << 20)
    assert http.get("/v1/health").status_code == 200
