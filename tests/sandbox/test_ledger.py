"""What a server remembers is bounded, and never confuses one request with another."""

import asyncio

import pytest

from sandbox import ledger
from sandbox.ledger import Ledger
from sandbox.protocol import EvaluationResult
from sandbox.records import KeyConflict, Record, UnknownId


def record(name: str, done: bool = True) -> Record:
    made = Record(name, f"content {name}", "task", {}, EvaluationResult(id=name), 0.0)
    if done:
        made.done.set()
    return made


@pytest.fixture(autouse=True)
def loop():
    """Records hold an event of asyncio."""
    with asyncio.Runner() as runner:
        yield runner.get_loop()


def test_the_oldest_evaluations_are_forgotten_but_none_that_is_not_done(monkeypatch):
    monkeypatch.setattr(ledger, "KEPT_RECORDS", 2)
    kept = Ledger()
    for name in ("a", "b", "c"):
        kept.add(record(name))
    with pytest.raises(UnknownId):
        kept.record("a")
    assert kept.record("b").id == "b"
    kept.add(record("d", done=False))
    for name in ("e", "f"):
        kept.add(record(name))
    assert kept.record("d").id == "d" and kept.record("f").id == "f"


def test_a_key_is_answered_for_its_request_alone(monkeypatch):
    kept = Ledger()
    assert kept.answer("key", "body") is None and kept.answer(None, "body") is None
    kept.add(record("a"))
    kept.remember_answer("key", "body", ["a"])
    assert kept.answer("key", "body") == ["a"]
    with pytest.raises(KeyConflict, match="key"):
        kept.answer("key", "another body")
    monkeypatch.setattr(ledger, "KEPT_RECORDS", 1)
    kept.add(record("b"))
    assert kept.answer("key", "body") is None, "its evaluation is forgotten: dead ids help nobody"


def test_verdicts_in_use_outlive_others(monkeypatch):
    monkeypatch.setattr(ledger, "CACHED_VERDICTS", 2)
    kept = Ledger()
    for name in ("a", "b"):
        kept.keep_verdict(name, EvaluationResult(id=name))
    assert kept.verdict("a").id == "a" and kept.verdict("z") is None
    kept.keep_verdict("c", EvaluationResult(id="c"))
    assert kept.verdict("b") is None and kept.verdict("a") and kept.verdict("c")


def test_verifications_are_found_until_they_are_too_many(monkeypatch):
    monkeypatch.setattr(ledger, "KEPT_KEYS", 1)
    kept = Ledger()
    kept.add_verification("v", [(["a"], ["b"])])
    assert kept.arms("v") == [(["a"], ["b"])]
    kept.add_verification("w", [])
    with pytest.raises(UnknownId):
        kept.arms("v")
