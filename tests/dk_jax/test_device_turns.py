"""Who samples and who learns have the devices in turns; who samples comes first, and can be told that nobody waits for it."""

from __future__ import annotations

import threading
import time

import jax.numpy as jnp
import pytest

from dk_jax.train.clock import StepClock
from dk_jax.train.device_turns import Cancelled, DeviceTurns, TurnSampler, at_once

LIMIT_S = 30.0
"""No wait of these tests takes so long unless something is broken."""


def start(function) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(LIMIT_S)
    return not thread.is_alive()


def until(condition) -> bool:
    """Whether it comes to be, which takes no time where nothing is broken."""
    give_up = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.001)
    return condition()


def test_a_sampler_is_alone_and_learners_are_together():
    turns, inside, seen = DeviceTurns(StepClock()), [], []

    def sampling():
        for _ in range(200):
            with turns.sampling():
                inside.append("s")
                seen.append("".join(inside))
                inside.remove("s")

    def learning():
        for _ in range(200):
            with turns.learning():
                inside.append("l")
                seen.append("".join(inside))
                inside.remove("l")

    assert all(map(ended, [start(sampling), start(learning), start(learning)]))
    assert len(seen) == 600 and set(seen) <= {"s", "l", "ll"}


def test_learners_do_not_wait_for_each_other():
    turns, both = DeviceTurns(StepClock()), threading.Barrier(2)

    def learn():
        with turns.learning():
            both.wait(LIMIT_S)

    assert all(map(ended, [start(learn), start(learn)])) and not both.broken


def test_who_waits_to_sample_comes_before_the_next_to_learn():
    turns, order = DeviceTurns(StepClock()), []

    def sample():
        with turns.sampling():
            order.append("sample")

    def learn():
        with turns.learning():
            order.append("learn")

    with turns.learning():
        first = start(sample)
        assert until(lambda: turns._wanted == 1)
        second = start(learn)
        assert until(lambda: turns._clock._going["update_wait"] == 1) and order == []
    assert ended(first) and ended(second) and order == ["sample", "learn"]


def test_who_is_cancelled_gets_no_turn_and_a_call_that_has_one_comes_to_its_end():
    turns, raised, go = DeviceTurns(StepClock()), [], threading.Event()

    class Sampler:
        name = "own"

        def sample(self, prompts):
            assert go.wait(LIMIT_S)
            return prompts

    sampler = TurnSampler(Sampler(), turns)
    done = []
    at_work = start(lambda: done.append(sampler.sample(["a"])))
    assert until(lambda: turns._sampling == 1)
    turns.cancel()
    with pytest.raises(Cancelled):
        sampler.sample(["b"])
    go.set()
    assert ended(at_work) and done == [["a"]] and sampler.name == "own"

    turns = DeviceTurns(StepClock())

    def wait():
        try:
            with turns.sampling():
                raised.append("a turn")
        except Cancelled as error:
            raised.append(type(error))

    with turns.learning():
        waiting = start(wait)
        assert until(lambda: turns._wanted == 1)
        turns.cancel()
        assert ended(waiting) and raised == [Cancelled]
    with turns.learning():
        assert turns._wanted == 0, "nobody stands before the learner any more"


def test_a_turn_is_given_back_where_something_went_wrong_in_it():
    turns = DeviceTurns(StepClock())
    for turn in (turns.sampling, turns.learning):
        with pytest.raises(ZeroDivisionError), turn():
            raise ZeroDivisionError
    with turns.sampling():
        pass
    assert turns.learn(lambda a, b: a + b, jnp.ones(3), 1).tolist() == [2, 2, 2] == at_once(lambda a: a, [2, 2, 2])
