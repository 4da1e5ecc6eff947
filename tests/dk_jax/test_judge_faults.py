"""What the sandbox could not judge is asked again where that may help, and is never a verdict."""

import threading
import time

import pytest

from dk_jax.rollout import judge as judge_module
from dk_jax.rollout.judge import Arms, Journal
from sandbox.client import SandboxUnavailable
from sandbox.protocol import EvaluationResult
from tests.dk_jax.fake_sandbox import A, B, FakeClient, make_judge, requests


class Faulty(FakeClient):
    """The judge fails at the first `faults` candidates that it is given."""

    def __init__(self, faults: int, transient: bool = True):
        super().__init__()
        self.faults, self.transient = faults, transient

    def _judge(self):
        with self._lock:
            self.faults -= 1
            if self.faults >= 0:
                fault = dict(outcome="infra_error", attempts=3, feedback="the card is full", transient=self.transient)
                return EvaluationResult(id="x", state="done", **fault)
        return super()._judge()


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(judge_module, "FIRST_PAUSE_S", 0.01)


def test_what_the_sandbox_could_not_judge_is_asked_again_and_the_rest_is_not(hasty, tmp_path, caplog):
    client = Faulty(2)
    journal = Journal(tmp_path / "j.jsonl")
    verdicts = make_judge(client, journal, retry_for_s=30.0).evaluate(requests((A, "1"), (A, "2"), (A, "3"), (B, "4")), phase="p")
    assert [v.outcome for v in verdicts] == ["ok"] * 4 and len(journal) == 4
    assert client.asked == [("a", "1"), ("a", "2"), ("a", "3"), ("a", "1"), ("a", "2"), ("b", "4")]
    assert "the card is full; asking again" in caplog.text


def test_a_verification_is_asked_again_whole(hasty):
    client = Faulty(1)
    arms = [Arms(task=A, control=("c",), treated=("t",))]
    [(control, treated)] = make_judge(client, retry_for_s=30.0).verify(arms, phase="v")
    assert control[0].correct and treated[0].correct and len(client.verified) == 2


def test_patience_ends_and_what_was_judged_is_kept(hasty, tmp_path):
    journal = Journal(tmp_path / "j.jsonl")
    judge = make_judge(Faulty(10**6), journal, retry_for_s=0.05)
    with pytest.raises(SandboxUnavailable, match="infra_error after 3 attempts.*card is full.*same command again"):
        judge.evaluate(requests((A, "1")), phase="p")
    with pytest.raises(SandboxUnavailable, match="card is full"):
        judge.verify([Arms(task=A, control=("c",), treated=("t",))], phase="v")
    assert len(journal) == 0


def test_what_a_person_has_to_put_right_is_not_waited_for(tmp_path):
    client = Faulty(1, transient=False)
    start = time.monotonic()
    with pytest.raises(SandboxUnavailable, match="card is full.*same command again"):
        make_judge(client, retry_for_s=600.0).evaluate(requests((A, "1")), phase="p")
    assert len(client.asked) == 1 and time.monotonic() - start < 10


def test_nobody_waits_for_a_judge_when_another_task_has_ended_it_all(monkeypatch):
    monkeypatch.setattr(judge_module, "FIRST_PAUSE_S", 60.0)
    waiting = threading.Event()

    class Client(Faulty):
        def evaluate(self, task, *args, **kwargs):
            if task.name == "b":
                waiting.wait(10)
                time.sleep(0.2)
                raise SandboxUnavailable("gone")
            try:
                return super().evaluate(task, *args, **kwargs)
            finally:
                waiting.set()

    start = time.monotonic()
    with pytest.raises(SandboxUnavailable):
        make_judge(Client(10**6), max_parallel=2, retry_for_s=600.0).evaluate(requests((A, "1"), (B, "2")), phase="p")
    assert time.monotonic() - start < 30


def test_a_task_that_the_sandbox_rejects_is_told_once(caplog):
    class Client(FakeClient):
        def _judge(self):
            return EvaluationResult(id="x", state="done", outcome="task_rejected", feedback="get_inputs() fails")

    judge = make_judge(Client())
    verdicts = judge.evaluate(requests((A, "1"), (A, "2")), phase="p")
    assert [v.outcome for v in verdicts] == ["task_rejected"] * 2
    assert caplog.text.count("rejects task a") == 1 and "get_inputs() fails" in caplog.text


@pytest.mark.parametrize("call", ["evaluate", "verify"])
def test_who_is_told_to_abort_does_not_sit_out_the_pause(monkeypatch, call):
    monkeypatch.setattr(judge_module, "FIRST_PAUSE_S", 60.0)
    asked, raised = threading.Event(), []

    class Told(Faulty):
        def _judge(self):
            asked.set()
            return super()._judge()

        def abort(self):
            """Nothing is in flight."""

    judge = make_judge(Told(10**6), retry_for_s=600.0)

    def ask():
        try:
            if call == "evaluate":
                judge.evaluate(requests((A, "1"), (B, "2")), phase="p")
            else:
                judge.verify([Arms(task=A, control=("c",), treated=("t",))], phase="v")
        except SandboxUnavailable as error:
            raised.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert asked.wait(30)
    judge.abort()
    thread.join(30)
    assert not thread.is_alive() and "card is full" in str(raised[0])
