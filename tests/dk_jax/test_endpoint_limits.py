"""Limits of rate and money, and configurations that cannot work."""

from __future__ import annotations

import asyncio
import collections
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dk_jax.interop.endpoint import (
    AnswerJournal,
    ChatRequest,
    Endpoint,
    EndpointConfig,
    EndpointError,
    EndpointRefused,
    RateLimiter,
)
from tests.dk_jax.fake_endpoint import FakeClock, FakeEndpoint, Reply, chat
from tests.dk_jax.test_endpoint import KEY, _key, connect, echo, question, script  # noqa: F401


def long_question(i: int) -> ChatRequest:
    """Of about the 100 tokens that the server counts for each."""
    return question(f"q{i} " + "word " * 95)


# --- limits -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [dict(requests_per_minute=3), dict(tokens_per_minute=400)])
@pytest.mark.parametrize("parallel", [1, 4])
def test_rates_hold_in_every_minute(limit, parallel, monkeypatch):
    clock, begun, begin = FakeClock(), [], RateLimiter.begin

    def noting(self, now, tokens):
        begun.append(now)
        return begin(self, now, tokens)

    monkeypatch.setattr(RateLimiter, "begin", noting)
    with FakeEndpoint(script(chat("x", usage=(100, 20)))) as fake, connect(fake, clock=clock, parallel=parallel, **limit) as endpoint:
        answers = endpoint.ask([long_question(i) for i in range(10)])
    assert [a.text for a in answers] == ["x"] * 10 and len(begun) == len(fake.asked) == 10
    for moment in begun:  # three of 120 tokens fit into 400, but none beside them that may come to 151
        assert sum(moment <= other < moment + 60 for other in begun) <= 3
    assert 180 <= clock.moment < (181 if parallel == 1 or "requests_per_minute" in limit else 301), "and no longer than that takes"


def test_a_request_that_never_fits_the_rate_is_refused_with_the_reason():
    with FakeEndpoint(echo) as fake, connect(fake, tokens_per_minute=40) as endpoint:
        with pytest.raises(EndpointRefused, match="may take .* tokens, more than 40 a minute"):
            endpoint.ask([question()])
    assert fake.asked == []


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 4), st.integers(0, 3), st.lists(st.tuples(st.floats(0, 50), st.integers(1, 100), st.floats(0, 1)), min_size=1, max_size=30)
)
def test_the_limiter_never_lets_a_window_overflow(requests, hundreds, arrivals):
    limiter = RateLimiter(requests_per_minute=requests, tokens_per_minute=100 * hundreds)
    now, begun = 0.0, []
    for pause, tokens, share in arrivals:
        now += pause
        while (delay := limiter.delay_s(now, tokens)) > 0:
            assert delay <= 60.01
            now += delay
        entry = limiter.begin(now, tokens)
        entry[1] = int(tokens * share)  # an answer shorter than it might have been
        begun.append((now, entry[1]))
    for moment, _ in begun:
        window = [tokens for other, tokens in begun if moment - 60 + 1e-6 < other <= moment]
        assert not requests or len(window) <= requests
        assert not hundreds or sum(window) <= 100 * hundreds


def test_the_budget_in_tokens_is_never_passed_and_holds_over_restarts(tmp_path):
    path = tmp_path / "answers.jsonl"
    with FakeEndpoint(echo) as fake:
        for budget, whole in ((500, 3), (500, 3), (1000, 8)):
            with connect(fake, AnswerJournal(path), budget_tokens=budget) as endpoint:
                answers = endpoint.ask([long_question(i) for i in range(10)])
                assert endpoint.tally.spent_tokens <= budget
            assert collections.Counter(a.problem for a in answers) == {"": whole, "budget": 10 - whole}
            assert len(fake.asked) == whole


def test_the_budget_in_money_stops_and_keeps(tmp_path):
    with FakeEndpoint(echo) as fake:
        with connect(fake, AnswerJournal(tmp_path / "a.jsonl"), price_in=1000.0, price_out=10_000.0, budget=1.21) as endpoint:
            answers = endpoint.ask([long_question(i) for i in range(6)])
        # 0.1 + 0.2 each; for another one 0.1 and up to 0.5 for 50 tokens of answer must be left
        assert sum(a.problem == "" for a in answers) == len(fake.asked) == 3
        assert endpoint.tally.spent == pytest.approx(0.9)


def test_abort_gives_up_what_is_in_flight():
    with FakeEndpoint(script(Reply(hangs=True))) as fake, connect(fake) as endpoint:
        timer = threading.Timer(0.2, endpoint.abort)
        timer.start()
        with pytest.raises(EndpointError, match="given up"):
            endpoint.ask([question()])
        timer.join()
        with pytest.raises(EndpointError, match="given up"):
            endpoint.ask([question("later")])


# --- configuration ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(base_url="api.example.com/v1"), "no http"),
        (dict(base_url="https://user:pw@example.com/v1"), "leave out user, password"),
        (dict(base_url="https://example.com/v1?key=abc"), "leave out user, password"),
        (dict(model=""), "model is empty"),
        (dict(parallel=0), "parallel is 0"),
        (dict(price_in=-1.0), "price_in is -1"),
        (dict(deadline_s=float("nan")), "deadline_s is nan"),
        (dict(budget=5.0), "needs price_in and price_out"),
    ],
)
def test_a_config_that_cannot_work_is_refused(fields, said):
    with pytest.raises(ValueError, match=said) as caught:
        EndpointConfig(**{"base_url": "https://example.com/v1", "model": "m", **fields})
    assert "pw" not in str(caught.value).split() and "abc" not in str(caught.value)


def test_a_key_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("TEST_KEY")
    with pytest.raises(EndpointError, match="environment variable TEST_KEY holds no key for example.com"):
        Endpoint(EndpointConfig(base_url="https://example.com/v1", model="m", api_key_env="TEST_KEY"), None)


def test_white_space_around_a_key_is_no_part_of_it_and_other_characters_are_refused(monkeypatch):
    monkeypatch.setenv("TEST_KEY", f" {KEY}\n")
    with FakeEndpoint(echo) as fake, connect(fake) as endpoint:
        endpoint.ask([question()])
    assert fake.keys == [f"Bearer {KEY}"]
    monkeypatch.setenv("TEST_KEY", "sk-one\nsk-two")
    with pytest.raises(EndpointError, match="TEST_KEY holds characters that no key has") as caught:
        connect(fake)
    assert "sk-" not in str(caught.value)


def test_the_fake_clock_wakes_sleepers_in_no_time():
    clock = FakeClock()
    asyncio.run(clock.sleep(100.0))
    assert clock.now() == 100.0
