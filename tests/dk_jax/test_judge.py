"""A verdict that has been received is never asked for again, and what is asked for is asked for once."""

import dataclasses
import json
import logging
import signal
import threading
import time

import pytest

from dk_jax.rollout.judge import Arms, Journal
from dk_jax.rollout.trajectory import Verdict
from sandbox.client import SandboxUnavailable
from sandbox.protocol import Options
from tests.dk_jax.fake_sandbox import A, B, FakeClient, make_judge, requests


def verdict(reward: float) -> Verdict:
    return Verdict(
        outcome="ok",
        stage="timed",
        reward=reward,
        speedup=1.0,
        noisy=False,
        coverage=0.5,
        feedback='say "hi"\n',
    )


# --- the journal -------------------------------------------------------------------------------------------


def test_a_journal_remembers_across_processes(tmp_path):
    path = tmp_path / "made" / "journal.jsonl"
    first = Journal(path)
    first.put("a", verdict(1.0))
    first.put("b", verdict(2.0))
    again = Journal(path)  # the first was not closed: its process was killed
    assert (again.get("a"), again.get("b"), again.get("c"), len(again)) == (
        verdict(1.0),
        verdict(2.0),
        None,
        2,
    )
    again.put("c", verdict(3.0))
    assert Journal(path).get("c") == verdict(3.0)


def test_the_newest_verdict_on_a_key_stands(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.put("a", verdict(1.0))
    journal.put("a", verdict(2.0))
    assert journal.get("a") == Journal(journal.path).get("a") == verdict(2.0)


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_last_line_that_was_cut_short_is_dropped_and_can_be_written_again(tmp_path, caplog, cut):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.put("a", verdict(1.0))
    journal.put("b", verdict(2.0))
    journal.close()
    journal.path.write_bytes(journal.path.read_bytes()[:-cut])
    with caplog.at_level(logging.WARNING):
        again = Journal(journal.path)
    assert "cut short" in caplog.text
    assert (again.get("a"), again.get("b")) == (verdict(1.0), None)
    again.put("b", verdict(3.0))
    assert Journal(journal.path).get("b") == verdict(3.0)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"key": "a"}', '{"key": "a", "verdict": {"outcome": "ok"}}', ""]
)
def test_a_damaged_line_is_named_and_nothing_is_changed(tmp_path, line):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.put("a", verdict(1.0))
    good = journal.path.read_text()
    journal.path.write_text(good + line + "\n" + good)
    with pytest.raises(ValueError, match=r"journal\.jsonl:2: damaged journal line .* Delete that line"):
        Journal(journal.path)
    assert journal.path.read_text() == good + line + "\n" + good


def test_a_cleared_journal_is_empty_and_goes_on(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.put("a", verdict(1.0))
    journal.clear()
    assert len(journal) == 0 and journal.get("a") is None and journal.path.read_bytes() == b""
    journal.put("a", verdict(2.0))
    again = Journal(journal.path)
    assert len(again) == 1 and again.get("a") == verdict(2.0)


# --- evaluation --------------------------------------------------------------------------------------------


def test_verdicts_come_in_the_order_of_the_requests():
    client = FakeClient()
    found = make_judge(client).evaluate(requests((A, "x"), (B, "y"), (A, "z")), phase="p")
    order = {asked: i + 1.0 for i, asked in enumerate(client.asked)}
    assert [v.speedup for v in found] == [order["a", "x"], order["b", "y"], order["a", "z"]]


def test_what_is_sent_is_the_task_and_the_candidate_as_configured():
    client, options = FakeClient(), Options(correctness_trials=7)
    make_judge(client, language="triton", form="module", device="cuda:0", options=options).evaluate(
        requests((A, "x")), phase="p"
    )
    [(task, [candidate], sent)] = client.calls
    assert (task.name, task.reference, task.dtype, task.device) == ("a", "# a\n", "float32", "cuda:0")
    assert (candidate.source, candidate.language, candidate.form) == ("x", "triton", "module")
    assert sent == options


def test_a_source_is_sent_once_a_task_and_each_of_its_samples_gets_the_verdict():
    client = FakeClient()
    found = make_judge(client).evaluate(requests((A, "x"), (A, "x"), (B, "x"), (A, "y"), (A, "x")), phase="p")
    assert sorted(client.asked) == [("a", "x"), ("a", "y"), ("b", "x")]
    assert found[0] == found[1] == found[4]
    assert found[0] != found[2], "the same source against another task is another question"


def test_more_sources_than_a_request_may_hold_go_in_several():
    client = FakeClient()
    found = make_judge(client).evaluate(requests(*((A, f"x{i}") for i in range(130))), phase="p")
    assert [len(sources) for _, sources, _ in client.calls] == [64, 64, 2]
    assert [v.speedup for v in found] == [i + 1.0 for i in range(130)]


def test_nothing_to_judge_asks_nothing():
    client = FakeClient()
    assert make_judge(client).evaluate([], phase="p") == []
    assert client.calls == []


def test_tasks_are_judged_side_by_side():
    together = threading.Barrier(2, timeout=10)

    class Meeting(FakeClient):
        def evaluate(self, *args, **kwargs):
            together.wait()  # breaks unless both tasks are in flight at once
            return super().evaluate(*args, **kwargs)

    assert len(make_judge(Meeting(), max_parallel=2).evaluate(requests((A, "x"), (B, "y")), phase="p")) == 2


def test_precautions_against_cheating_are_left_out_for_trusted_candidates_alone():
    client = FakeClient()
    judge = make_judge(client)
    judge.evaluate(requests((A, "x")), phase="corpus", trusted=True)
    judge.evaluate(requests((A, "y")), phase="rl")
    (trusted_task, _, trusted), (usual_task, _, usual) = client.calls
    assert not trusted.audit and not trusted_task.variants
    assert usual.audit and len(usual_task.variants) >= 3
    assert trusted.correctness_trials == usual.correctness_trials and trusted.timing == usual.timing


def test_progress_counts_every_sample_once(tmp_path):
    asked = requests((A, "x"), (A, "x"), (B, "y"))
    for _ in range(2):  # judged, then replayed
        counted = []
        judge = make_judge(FakeClient(), Journal(tmp_path / "journal.jsonl"))
        judge.evaluate(asked, phase="p", progress=counted.append)
        assert sum(counted) == 3


def test_an_interrupt_does_not_wait_for_verdicts_in_flight():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    try:
        _interrupted_while_waiting()
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted_while_waiting():
    aborted, given_up = threading.Event(), []

    class Slow(FakeClient):
        def evaluate(self, *args, **kwargs):
            time.sleep(0.3)  # until all threads have started
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # Ctrl-C while a verdict is waited for
            given_up.append(aborted.wait(20))
            raise SandboxUnavailable("given up")

        def abort(self):
            aborted.set()

    with pytest.raises(KeyboardInterrupt):
        make_judge(Slow()).evaluate(requests((A, "x")), phase="p")
    assert given_up == [True]


def test_after_a_crash_only_what_is_missing_is_asked_for(tmp_path):
    asked, path = requests((A, "x"), (A, "y"), (B, "z")), tmp_path / "journal.jsonl"
    with pytest.raises(SandboxUnavailable):
        make_judge(FakeClient(dies_after=2), Journal(path)).evaluate(asked, phase="p")
    received = Journal(path)
    assert len(received) == 2
    client = FakeClient()
    found = make_judge(client, received).evaluate(asked, phase="p")
    assert len(client.asked) == 1
    assert sorted(v.speedup for v in found) == [1.0, 1.0, 2.0], "two from before the crash, one new"
    silent = FakeClient()
    assert make_judge(silent, Journal(path)).evaluate(asked, phase="p") == found
    assert silent.asked == [], "finished work is never judged again"


@pytest.mark.parametrize(
    ("phase", "other"),
    [
        ("q", (A, "x")),
        ("p", (A, "x ")),
        ("p", (dataclasses.replace(A, reference="# changed"), "x")),
        ("p", (B, "x")),
    ],
    ids=["phase", "source", "reference", "task"],
)
def test_a_verdict_is_replayed_for_the_same_question_only(tmp_path, phase, other):
    journal, client = Journal(tmp_path / "journal.jsonl"), FakeClient()
    make_judge(client, journal).evaluate(requests((A, "x")), phase="p")
    make_judge(client, journal).evaluate(requests(other), phase=phase)
    assert len(client.asked) == 2


def test_samples_of_one_source_share_a_verdict_even_if_a_crash_came_between_them(tmp_path):
    asked, path = requests((A, "x"), (A, "x")), tmp_path / "journal.jsonl"
    make_judge(FakeClient(), Journal(path)).evaluate(asked, phase="p")
    path.write_text(path.read_text().splitlines()[0] + "\n")
    client = FakeClient()
    client._judged = 5
    first, second = make_judge(client, Journal(path)).evaluate(asked, phase="p")
    assert first == second and client.asked == []


# --- verification ------------------------------------------------------------------------------------------

ARMS = [
    Arms(task=A, control=("a", "b"), treated=("c", "d")),
    Arms(task=B, control=("a", "b"), treated=("c", "c")),
]


def speedups(found) -> list[tuple[list[float], list[float]]]:
    return [([v.speedup for v in control], [v.speedup for v in treated]) for control, treated in found]


def test_all_arms_go_in_one_verification_and_come_back_in_their_places():
    client = FakeClient()
    found = make_judge(client).verify(ARMS, phase="v")
    [sent] = client.verified
    assert [
        (arm.task.name, [c.source for c in arm.control], [c.source for c in arm.treated]) for arm in sent
    ] == [
        ("a", ["a", "b"], ["c", "d"]),
        ("b", ["a", "b"], ["c", "c"]),
    ]
    assert speedups(found) == [([1.0, 2.0], [3.0, 4.0]), ([5.0, 6.0], [7.0, 8.0])]


def test_a_finished_verification_is_replayed(tmp_path):
    path = tmp_path / "journal.jsonl"
    found = make_judge(FakeClient(), Journal(path)).verify(ARMS, phase="v")
    client = FakeClient()
    assert make_judge(client, Journal(path)).verify(ARMS, phase="v") == found
    assert client.verified == []
    make_judge(client, Journal(path)).verify(ARMS, phase="v/look1")
    assert len(client.verified) == 1, "another look is another question"


def _half_finished(path):
    """A journal that a crash left with three of a verification's eight verdicts."""
    make_judge(FakeClient(), Journal(path)).verify(ARMS, phase="v")
    [line] = path.read_text().splitlines()  # they are written together; once they were not
    verdicts = json.loads(line)["together"]
    assert len(verdicts) == 8
    path.write_text("".join(json.dumps(entry) + "\n" for entry in verdicts[:3]))


def test_a_half_finished_verification_is_asked_for_whole(tmp_path):
    path = tmp_path / "journal.jsonl"
    _half_finished(path)
    client = FakeClient()
    client._judged = 100
    found = make_judge(client, Journal(path)).verify(ARMS, phase="v")
    assert len(client.verified) == 1 and len(client.verified[0]) == 2
    assert min(min(control + treated) for control, treated in speedups(found)) > 100, (
        "no verdict of the first try"
    )


def test_a_verification_asked_for_again_is_replayed_as_it_was_answered(tmp_path):
    path = tmp_path / "journal.jsonl"
    _half_finished(path)
    client = FakeClient()
    client._judged = 100
    found = make_judge(client, Journal(path)).verify(ARMS, phase="v")
    assert make_judge(FakeClient(), Journal(path)).verify(ARMS, phase="v") == found


def test_journal_lines_are_plain_json(tmp_path):
    make_judge(FakeClient(), Journal(tmp_path / "j.jsonl")).evaluate(requests((A, "x")), phase="p/turn0")
    entry = json.loads((tmp_path / "j.jsonl").read_text())
    assert entry["key"].startswith("p/turn0/0/") and entry["verdict"]["speedup"] == 1.0
