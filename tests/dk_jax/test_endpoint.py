"""The endpoint's client against a server that behaves well, badly or not at all: what it asks again, what it gives up, what it keeps."""

from __future__ import annotations

import collections
import json
import random
import threading
import time
from email.utils import formatdate

import pytest

from dk_jax.interop.endpoint import (
    Answer,
    AnswerJournal,
    ChatRequest,
    Endpoint,
    EndpointConfig,
    EndpointRefused,
    EndpointUnavailable,
    estimate_tokens,
)
from tests.dk_jax.fake_endpoint import FakeClock, FakeEndpoint, Reply, chat, refusal

KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("TEST_KEY", KEY)


def question(text: str = "hello", sample: int = 0, **fields) -> ChatRequest:
    return ChatRequest(messages=(("user", text),), sample=sample, **{"max_tokens": 50, **fields})


def connect(fake: FakeEndpoint, journal=None, clock=None, **fields) -> Endpoint:
    config = EndpointConfig(base_url=fake.base_url, model="m", api_key_env="TEST_KEY", **fields)
    return Endpoint(config, journal, clock=clock or FakeClock(), rng=random.Random(0))


def echo(body, number):
    return chat(f"re: {body['messages'][-1]['content']}")


def script(*replies):
    """The replies in turn, the last one for ever."""
    return lambda body, number: replies[min(number, len(replies) - 1)]


# --- asking -------------------------------------------------------------------------------------------------------------------------------


def test_answers_come_in_order_with_their_usage_and_cost(tmp_path):
    with FakeEndpoint(echo) as fake, connect(fake, price_in=2.0, price_out=10.0) as endpoint:
        answers = endpoint.ask([question(f"q{i}", temperature=0.7, extra={"top_k": 5}) for i in range(5)])
    assert [a.text for a in answers] == [f"re: q{i}" for i in range(5)]
    assert all((a.prompt_tokens, a.completion_tokens, a.estimated, a.problem) == (100, 20, False, "") for a in answers)
    assert answers[0].cost == pytest.approx((100 * 2 + 20 * 10) / 1e6)
    assert endpoint.tally.cost == pytest.approx(5 * answers[0].cost)
    body = fake.asked[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["top_k"]) == ("m", 50, 0.7, 5)
    assert "top_p" not in body and "seed" not in body
    assert set(fake.keys) == {f"Bearer {KEY}"}


def test_no_more_requests_are_in_flight_than_allowed():
    def slow(body, number):
        time.sleep(0.02)
        return chat("x")

    with FakeEndpoint(slow) as fake, connect(fake, parallel=3) as endpoint:
        endpoint.ask([question(f"q{i}") for i in range(12)])
    assert fake.most_at_once <= 3


def test_the_name_of_the_limit_is_the_endpoints():
    with FakeEndpoint(echo) as fake, connect(fake, max_tokens_field="max_completion_tokens") as endpoint:
        endpoint.ask([question()])
    assert fake.asked[0]["max_completion_tokens"] == 50 and "max_tokens" not in fake.asked[0]


def test_threads_that_ask_the_same_share_one_request():
    def slow(body, number):
        time.sleep(0.05)
        return chat("x")

    with FakeEndpoint(slow) as fake, connect(fake) as endpoint:
        threads = [threading.Thread(target=endpoint.ask, args=([question()],)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(fake.asked) == 1


# --- trying again -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        (refusal(500, "broken"), "status 500"),
        (refusal(503, "busy"), "status 503"),
        (refusal(408, "slow"), "status 408"),
        (refusal(429, "slow down", code="rate_limit_exceeded"), "status 429"),
        (Reply(body="<html>Bad gateway</html>", headers={"content-type": "text/html"}), "not_json"),
        (Reply(body="{\"choices\": [{"), "not_json"),
        (Reply(body="[1, 2]"), "no_choices"),
        (Reply(body='{"choices": []}'), "no_choices"),
        (Reply(body='{"choices": [{"message": null}]}'), "no_choices"),
        (Reply(body='{"error": {"message": "upstream failed"}}'), "no_choices"),
        (chat(""), "empty"),
        (chat(None), "empty"),
        (chat(" \n"), "empty"),
    ],
)
def test_what_may_pass_is_asked_again(first, problem):
    clock = FakeClock()
    with FakeEndpoint(script(first, chat("good"))) as fake, connect(fake, clock=clock) as endpoint:
        [answer] = endpoint.ask([question()])
    assert (answer.text, answer.problem, len(fake.asked)) == ("good", "", 2)
    assert endpoint.tally.problems == {problem: 1}
    assert 0.5 <= clock.moment <= 1.0
    assert endpoint.tally.unbilled == (problem != "empty")


def test_pauses_grow_and_differ():
    clock = FakeClock()
    moments = []

    def respond(body, number):
        moments.append(clock.moment)
        return refusal(500, "broken") if number < 5 else chat("good")

    with FakeEndpoint(respond) as fake, connect(fake, clock=clock) as endpoint:
        assert endpoint.ask([question()])[0].text == "good"
    pauses = [b - a for a, b in zip(moments, moments[1:], strict=False)]
    assert all(0.5 * 2**i <= pause <= 2**i for i, pause in enumerate(pauses)), pauses
    assert len({pause / 2**i for i, pause in enumerate(pauses)}) == len(pauses)


@pytest.mark.parametrize("value", ["7", "7.5", lambda: formatdate(time.time() + 9, usegmt=True)])
def test_retry_after_holds_for_all_requests(value):
    clock, moments = FakeClock(), []

    def respond(body, number):
        moments.append(clock.moment)
        return refusal(429, "slow down", headers={"retry-after": value if isinstance(value, str) else value()}) if number == 0 else chat("good")

    with FakeEndpoint(respond) as fake, connect(fake, clock=clock, parallel=1) as endpoint:
        answers = endpoint.ask([question(f"q{i}") for i in range(3)])
    assert [a.text for a in answers] == ["good"] * 3
    assert len(moments) == 4 and all(7 <= moment <= 12 for moment in moments[1:]), moments


def test_a_wait_that_is_too_long_ends_the_work():
    with FakeEndpoint(script(refusal(429, "tomorrow", headers={"retry-after": "7200"}))) as fake, connect(fake) as endpoint:
        with pytest.raises(EndpointUnavailable, match="wants 7200 s to pass.*tomorrow"):
            endpoint.ask([question()])
    assert len(fake.asked) == 1


def test_a_server_that_hangs_meets_the_deadline_of_each_try():
    def respond(body, number):
        return Reply(hangs=True) if number < 2 else chat("good")

    with FakeEndpoint(respond) as fake, connect(fake, deadline_s=0.15) as endpoint:
        [answer] = endpoint.ask([question()])
    assert answer.text == "good" and endpoint.tally.problems == {"timeout": 2} and endpoint.tally.unbilled == 2


def test_nobody_there_is_said_after_the_tries():
    with FakeEndpoint(echo) as fake:
        url = fake.base_url
    config = EndpointConfig(base_url=url, model="m", api_key_env="", retries=1, give_up_after=2)
    with Endpoint(config, None, clock=FakeClock()) as endpoint:
        [answer] = endpoint.ask([question("a")])
        assert (answer.problem, answer.text) == ("unanswered", "") and "connection" in answer.detail
        with pytest.raises(EndpointUnavailable, match=r"2 requests in a row, 2 tries each.*try again later"):
            endpoint.ask([question("b")])
        with pytest.raises(EndpointUnavailable):
            endpoint.ask([question("c")])
    assert endpoint.tally.requests == 4


def test_one_question_that_never_works_does_not_end_the_work(tmp_path):
    def respond(body, number):
        return refusal(500, "this one crashes us") if body["messages"][0]["content"] == "bad" else chat("good")

    with FakeEndpoint(respond) as fake:
        with connect(fake, AnswerJournal(tmp_path / "a.jsonl"), retries=2, give_up_after=2, parallel=1) as endpoint:
            answers = endpoint.ask([question("a"), question("bad"), question("b"), question("c")])
        assert [a.problem for a in answers] == ["", "unanswered", "", ""]
        asked = len(fake.asked)
        with connect(fake, AnswerJournal(tmp_path / "a.jsonl"), retries=0) as endpoint:
            endpoint.ask([question("a"), question("bad"), question("b"), question("c")])
        assert fake.prompts[asked:] == ["bad"], "only what was not answered is asked another time"


# --- telling at once ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (refusal(401, f"Incorrect API key provided: {KEY}."), "status 401.*look at the environment variable TEST_KEY"),
        (refusal(402, "Insufficient balance"), "status 402.*no credit left"),
        (refusal(403, "not for you"), "status 403.*not for you.*may not use this model"),
        (refusal(404, "no model m"), "status 404.*no model m.*usually ends in /v1"),
        (refusal(400, "Unsupported parameter: 'max_tokens'"), "status 400.*Unsupported parameter"),
        (refusal(429, "You exceeded your current quota", code="insufficient_quota"), "status 429.*exceeded your current quota"),
    ],
)
def test_a_refusal_ends_the_work_at_once_and_is_told_without_the_key(reply, said):
    with FakeEndpoint(script(reply)) as fake, connect(fake, parallel=1) as endpoint:
        with pytest.raises(EndpointRefused, match=said) as caught:
            endpoint.ask([question("a"), question("b"), question("c")])
        assert KEY not in str(caught.value)
        assert len(fake.asked) == 1


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (chat("half an ans", finish="length"), "length"),
        (chat("", finish="length"), "length"),
        (chat("", finish="content_filter"), "content_filter"),
        (refusal(400, "This model's maximum context length is 4096 tokens", code="context_length_exceeded"), "too_long"),
        (refusal(400, "prompt is too long: 5000 tokens"), "too_long"),
        (refusal(400, "flagged", code="content_filter"), "content_filter"),
    ],
)
def test_what_asking_again_does_not_help_is_reported_and_kept(tmp_path, reply, problem, caplog):
    with FakeEndpoint(script(reply)) as fake:
        for _ in range(2):
            with connect(fake, AnswerJournal(tmp_path / "a.jsonl")) as endpoint:
                [answer] = endpoint.ask([question()])
                assert answer.problem == problem
        assert answer.detail and len(fake.asked) == 1
    assert caplog.text.count(f"no whole answer ({problem}): {answer.detail}") == 1


def test_a_model_that_says_nothing_is_believed_in_the_end(tmp_path):
    with FakeEndpoint(script(chat(""))) as fake:
        for _ in range(2):
            with connect(fake, AnswerJournal(tmp_path / "a.jsonl"), retries=2, price_in=1.0, price_out=1.0) as endpoint:
                [answer] = endpoint.ask([question()])
                assert answer.problem == "empty"
                assert endpoint.tally.spent_tokens == 3 * 120, "every empty answer was paid for"
        assert len(fake.asked) == 3


def test_text_in_parts_and_reasoning_apart():
    parts = chat(None, usage=None, reasoning_content="let me think about it")
    data = json.loads(parts.body)
    data["choices"][0]["message"]["content"] = [{"type": "text", "text": "one "}, {"type": "image"}, {"type": "text", "text": "two"}]
    with FakeEndpoint(script(Reply(body=json.dumps(data)))) as fake, connect(fake) as endpoint:
        [answer] = endpoint.ask([question()])
    assert answer.text == "one two"
    assert answer.completion_tokens == estimate_tokens("one two") + estimate_tokens("let me think about it")


def test_no_usage_is_said_and_estimated():
    with FakeEndpoint(script(chat("some words here", usage=None))) as fake, connect(fake, price_in=1.0, price_out=2.0) as endpoint:
        [answer] = endpoint.ask([question("how many tokens is this?")])
    assert answer.estimated and endpoint.tally.estimated == 1
    assert answer.completion_tokens == estimate_tokens("some words here") == 3
    assert answer.prompt_tokens == estimate_tokens("how many tokens is this?") + 4
    assert answer.cost == pytest.approx((answer.prompt_tokens + 2 * answer.completion_tokens) / 1e6)


# --- the journal --------------------------------------------------------------------------------------------------------------------------


def test_nothing_is_asked_twice_over_an_interruption(tmp_path):
    path = tmp_path / "answers.jsonl"
    questions = [question(f"q{i % 6}", sample=i // 6) for i in range(12)]

    def dies(body, number):
        return refusal(401, "the key was withdrawn") if number >= 5 else chat(f"{body['messages'][0]['content']} {number}")

    with FakeEndpoint(dies) as fake:
        with connect(fake, AnswerJournal(path), parallel=1) as endpoint, pytest.raises(EndpointRefused):
            endpoint.ask(questions)
        assert len(fake.asked) == 6
        fake.respond = lambda body, number: chat(f"{body['messages'][0]['content']} {number}")
        with connect(fake, AnswerJournal(path)) as endpoint:
            answers = endpoint.ask(questions)
        assert endpoint.tally.replayed == 5 and endpoint.tally.answered == 7
        assert len(fake.asked) == 6 + 7
        with connect(fake, AnswerJournal(path)) as endpoint:
            assert endpoint.ask(questions) == answers
        assert len(fake.asked) == 6 + 7
    assert len({a.text for a in answers}) == 12, "each sample of a question is an answer of its own"
    counts = collections.Counter(fake.prompts)
    assert sum(counts.values()) == 13 and max(counts.values()) <= 3


def test_a_question_is_known_by_all_that_its_answer_depends_on():
    base = question()
    changes = [dict(sample=1), dict(temperature=0.5), dict(top_p=0.9), dict(max_tokens=51), dict(extra={"seed": 1})]
    others = [question("other"), *(question(**change) for change in changes)]
    assert len({q.key("m") for q in [base, *others]} | {base.key("n")}) == 8
    assert question(extra={"a": 1, "b": 2}).key("m") == question(extra={"b": 2, "a": 1}).key("m")


def test_a_line_cut_short_is_dropped_and_asked_again(tmp_path, caplog):
    path = tmp_path / "answers.jsonl"
    with FakeEndpoint(echo) as fake:
        with connect(fake, AnswerJournal(path)) as endpoint:
            endpoint.ask([question("a"), question("b")])
        whole = path.read_bytes()
        path.write_bytes(whole[:-20])
        journal = AnswerJournal(path)
        assert "cut short" in caplog.text and len(journal) == 1
        with connect(fake, journal) as endpoint:
            endpoint.ask([question("a"), question("b")])
        assert len(fake.asked) == 3
    assert len(AnswerJournal(path)) == 2 and path.read_bytes().count(b"\n") == 2


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "answers.jsonl"
    journal = AnswerJournal(path)
    journal.put(Answer(key="a", model="m"))
    journal.close()
    path.write_text('{"answer": {"key": 1}, "discarded": false}\n' + path.read_text())
    with pytest.raises(ValueError, match=r"answers\.jsonl:1: damaged.*Delete that line"):
        AnswerJournal(path)


def test_the_key_is_in_nothing_that_is_written_or_said(tmp_path, caplog):
    caplog.set_level("DEBUG", logger="dk_jax")

    def respond(body, number):  # an endpoint that quotes the key wherever it can
        return refusal(500, f"key {KEY} failed") if number == 0 else chat(f"your key is {KEY}")

    with FakeEndpoint(respond) as fake, connect(fake, AnswerJournal(tmp_path / "answers.jsonl")) as endpoint:
        [answer] = endpoint.ask([question()])
    assert fake.keys == [f"Bearer {KEY}"] * 2
    assert answer.text == "your key is [key]"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY in path.read_text()]
    assert "asking again" in caplog.text and KEY not in caplog.text
    assert KEY not in repr(endpoint.config) + repr(endpoint.tally) + repr(answer)
