"""What is found out about a task itself: trivial answers, repetition, memory and time, over the protocol and the command line."""

from __future__ import annotations

import json
import threading

import pytest

from sandbox import cli
from sandbox.client import SandboxRejected, SandboxUnavailable
from sandbox.protocol import Admission, AdmissionRequest, EvaluationResult, Options, TaskFacts, TaskSpec
from tests.sandbox.helpers import ADD_BIAS

FORWARD = "torch.relu(x + self.bias)"
CARD = dict(input_bytes=1, output_bytes=1, state_bytes=0, peak_bytes=10, needed_bytes=20, total_bytes=1000, trial_s=0.1, judging_s=1.0)


def spec(forward: str = FORWARD, inputs: str = "torch.randn(256, 128)") -> TaskSpec:
    return TaskSpec(reference=ADD_BIAS.replace(FORWARD, forward).replace("torch.randn(256, 128)", inputs))


@pytest.mark.parametrize(
    ("forward", "inputs", "passing"),
    [
        (FORWARD, "torch.randn(256, 128)", ()),
        ("x * 0.0", "torch.randn(256, 128)", ("zeros", "a constant", "the output for other inputs")),
        ("x + 1e-9 * self.bias", "torch.randn(256, 128)", ("input 0 passed through",)),
        ("x.T.contiguous()", "torch.randn(128, 128)", ("a view of input 0 (transposed)",)),
        ("x.reshape(128, 256) + 1e-9", "torch.randn(256, 128)", ("a view of input 0 (reshaped)",)),
        ("x.repeat(3, 1)", "torch.randn(1, 128)", ("a view of input 0 (broadcast)",)),
        ("x[:7, :5] + 0 * self.bias[:5]", "torch.randn(256, 128)", ("a view of input 0 (its beginning)",)),
        ("(x > 9).sum(1)", "torch.randn(256, 128)", ("zeros", "a constant", "the output for other inputs")),
    ],
)
def test_all_trivial_answers_that_pass_are_told(sandbox, forward, inputs, passing):
    found = sandbox.examine(spec(forward, inputs), timing="none")
    assert found.facts.trivial == passing and bool(found.refusal) == bool(passing), found
    assert all(name in found.refusal for name in passing)
    assert found.facts.eager_ms is None and found.facts.launch_ms is None


def test_what_a_sound_task_takes_is_known(sandbox):
    found = sandbox.examine(spec())
    facts = found.facts
    assert (found.problem, found.refusal, found.marks, facts.trivial) == ("", "", (), ())
    assert (facts.input_bytes, facts.output_bytes, facts.state_bytes) == (256 * 128 * 4, 256 * 128 * 4, 128 * 4)
    assert 0 < facts.eager_low_ms <= facts.eager_ms <= facts.eager_high_ms and facts.judging_s > facts.trial_s > 0
    assert facts.repeats and facts.total_bytes > facts.needed_bytes > facts.peak_bytes > 1 << 20
    assert (facts.launch_ms, facts.floor_ms, facts.host_ms) == (None, None, None)  # not known on a CPU


def test_aliases_and_changed_inputs_are_marks(sandbox):
    aliasing = sandbox.examine(spec("x.mul_(2.0)"), timing="none")
    assert (aliasing.facts.changes, aliasing.facts.aliases) == ((0,), (0,))
    assert any("changes its input 0" in mark for mark in aliasing.marks) and any("returns memory" in mark for mark in aliasing.marks)


@pytest.mark.parametrize(
    ("forward", "inputs", "words"),
    [
        ("nothing", "torch.randn(4)", "NameError"),
        ("torch.rand_like(x)", "torch.randn(256, 128)", "output is random"),
        ("x / 0 * 0", "torch.randn(256, 128)", "NaN"),
        (FORWARD, "torch.randn(1 << 29)", "memory"),
        ("(__import__('time').sleep(3), torch.relu(x))[1]", "torch.randn(256, 128)", "longer than 2 s"),
        ("(__import__('time').sleep(0.5), torch.relu(x))[1]", "torch.randn(256, 128)", "too long to be timed within 1 s"),
    ],
)
def test_a_task_that_can_not_be_used_has_a_problem_and_no_facts(sandbox, forward, inputs, words):
    found = sandbox.examine(spec(forward, inputs), Options(check_s=2, time_s=1, memory_bytes=1 << 30))
    assert words in found.problem and found.refusal == found.problem and found.facts is None and found.marks == (), found


def test_an_examination_is_no_verdict_and_earns_nothing(sandbox, server):
    request = AdmissionRequest(task=spec(), timing="none").as_evaluation()
    ids = sandbox.submit(request.task, request.candidates, request.options)
    result = sandbox.result(ids[0], wait_s=60)
    assert result.outcome == "ok" and result.admission is not None and result.stage == "queued"
    assert result.reward.total == 0 and not result.trials and result.timing is None


def test_a_device_that_is_not_served_is_refused(sandbox):
    with pytest.raises(SandboxRejected, match="cuda:7 is not served here"):
        sandbox.examine(spec().model_copy(update={"device": "cuda:7"}))


def test_an_examination_without_an_answer_is_an_error_and_no_refusal():
    for outcome in ("infra_error", "cancelled"):
        with pytest.raises(ValueError, match="could not be examined"):
            Admission.of(EvaluationResult(id="x", state="done", outcome=outcome, feedback="the disk is full"))


def test_who_is_gone_while_a_task_is_examined_says_so(server):
    with server.client(retry_for_s=0) as client:
        threading.Timer(0.3, client.abort).start()
        with pytest.raises(SandboxUnavailable):
            client.examine(spec("(__import__('time').sleep(2), torch.relu(x))[1]"), Options(check_s=30), "none")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (dict(eager_ms=0.008, launch_ms=0.005), "launch overhead: eager takes 8.0 us, the shortest launch 5.0 us"),
        (dict(eager_ms=0.5, launch_ms=0.005), None),
        (dict(eager_ms=0.02, launch_ms=0.005, host_ms=0.09), "bound by the host: it takes 90.0 us to issue"),
        (dict(needed_bytes=801), "memory: a judging needs"),
        (dict(judging_s=61.0), "slow: a judging takes about 61 s"),
        (dict(repeats=False), "not exact"),
    ],
)
def test_marks_say_what_the_facts_mean(facts, words):
    marks = Admission(facts=TaskFacts(**(CARD | facts))).marks
    assert not marks if words is None else len(marks) == 1 and marks[0].startswith(words)


def test_the_command_prints_a_paragraph_a_task(server, tmp_path, capsys):
    for name, forward in (("sound", FORWARD), ("zeros", "x * 0.0"), ("broken", "nothing")):
        (tmp_path / f"{name}.py").write_text(spec(forward).reference)
    files = [str(tmp_path / f"{name}.py") for name in ("sound", "zeros", "broken")]
    assert cli.main(["admit", *files, "--socket", str(server.socket), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "sound.py: ADMITTED\n" in said and "zeros.py: REFUSED\n  reason    zeros, a constant" in said
    assert "NameError" in said and "the share of launches is not known on a CPU" in said
    assert cli.main(["admit", *files, "--socket", str(server.socket), "--device", "cpu", "--json", "--timing", "none"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [bool(row["refusal"]) for row in rows] == [False, True, True] and rows[1]["facts"]["trivial"][0] == "zeros"
    assert cli.main(["admit", str(tmp_path / "gone.py"), "--device", "cpu"]) == 2 and "cannot read" in capsys.readouterr().err
