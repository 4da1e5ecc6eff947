"""Rollouts one step ahead: what makes them, what becomes of errors on either side, and where the time goes."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from configs.demo import get_config
from dk_jax import distributed
from dk_jax.train.checks import check_config
from dk_jax.train.clock import StepClock
from dk_jax.train.device_turns import Cancelled
from dk_jax.train.overlap import Behaviour, OneStepAhead, OnPolicy, warn_of_shared_clock
from dk_jax.train.setup import ConfigError
from dk_jax.train.state import TrainState
from dk_jax.train.workdir import remember_config
from sandbox.client import SandboxUnavailable

LIMIT_S = 30.0


def state(step: int) -> TrainState:
    return TrainState(step=step, trainable=f"theta{step}", opt_state=None, record={})


def present(of: TrainState) -> Behaviour:
    return Behaviour(step=of.step, trainable=of.trainable, active=[f"library{of.step}"])


def behind(of: TrainState) -> Behaviour:
    return Behaviour(step=of.step - 1, trainable="before", active=["before"]) if of.step else present(of)


def names(behaviour: Behaviour) -> tuple:
    return behaviour.step, behaviour.trainable, *behaviour.active


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rollouts-of-step")]


def test_on_policy_rollouts_are_made_by_the_state_that_asks_for_them_in_its_own_thread():
    made = []
    source = OnPolicy(lambda behaviour, step: made.append((names(behaviour), step, threading.current_thread())) or step, present)
    with source:
        for step in (4, 5):
            rollouts, behaviour = source.next(state(step))
            assert rollouts == step and names(behaviour) == (step, f"theta{step}", f"library{step}")
    here = threading.current_thread()
    assert made == [((4, "theta4", "library4"), 4, here), ((5, "theta5", "library5"), 5, here)]


@pytest.mark.parametrize(
    ("first", "wanted"),
    [(0, [(0, "theta0", "library0"), (0, "theta0", "library0"), (1, "theta1", "library1"), (2, "theta2", "library2")]),
     (2, [(1, "before", "before"), (2, "theta2", "library2")])],
)  # fmt: skip
def test_ahead_a_steps_rollouts_are_made_by_the_state_before_and_none_beyond_the_last_step(first, wanted):
    made = []
    source = OneStepAhead(lambda behaviour, step: made.append((names(behaviour), step)) or step, behind, present, steps=4, cancel=pytest.fail)
    with source:
        for step in range(first, 4):
            rollouts, behaviour = source.next(state(step))
            assert rollouts == step and names(behaviour) == wanted[step - first]
    assert made == list(zip(wanted, range(first, 4), strict=True)) and not threads()


def test_ahead_the_next_rollouts_are_made_while_the_learner_is_at_work():
    learnt, waited = threading.Event(), []

    def make(behaviour, step):
        if step == 1:
            waited.append(learnt.wait(LIMIT_S))
        return step

    with OneStepAhead(make, behind, present, steps=2, cancel=pytest.fail) as source:
        source.next(state(0))
        learnt.set()
        assert source.next(state(1))[0] == 1
    assert waited == [True]


def test_an_error_in_the_thread_is_raised_when_its_rollouts_are_asked_for():
    def make(behaviour, step):
        if step == 1:
            raise SandboxUnavailable("nobody answers")
        return step

    with pytest.raises(SandboxUnavailable, match="nobody answers"):
        with OneStepAhead(make, behind, present, steps=3, cancel=pytest.fail) as source:
            assert source.next(state(0))[0] == 0, "the step in work is not touched"
            source.next(state(1))
    assert not threads()


@pytest.mark.parametrize("error", [FloatingPointError, KeyboardInterrupt])
def test_an_error_of_the_learner_ends_the_thread_before_it_is_raised(error, caplog):
    cancelled, begun = threading.Event(), threading.Event()

    def make(behaviour, step):
        if step == 1:
            begun.set()
            assert cancelled.wait(LIMIT_S)
            raise Cancelled
        return step

    with caplog.at_level(logging.WARNING), pytest.raises(error):
        with OneStepAhead(make, behind, present, steps=3, cancel=cancelled.set) as source:
            source.next(state(0))
            assert begun.wait(LIMIT_S)
            raise error
    assert not threads() and not caplog.records


def test_an_interrupt_while_rollouts_are_waited_for_ends_the_thread():
    cancelled = threading.Event()

    def make(behaviour, step):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert cancelled.wait(LIMIT_S)
        raise Cancelled

    with pytest.raises(KeyboardInterrupt):
        with OneStepAhead(make, behind, present, steps=3, cancel=cancelled.set) as source:
            source.next(state(0))
    assert cancelled.is_set() and not threads()


def test_where_both_fail_the_learners_error_is_raised_and_the_other_one_told(caplog):
    def make(behaviour, step):
        if step == 1:
            raise ZeroDivisionError("by itself")
        return step

    with caplog.at_level(logging.WARNING), pytest.raises(FloatingPointError):
        with OneStepAhead(make, behind, present, steps=3, cancel=lambda: None) as source:
            source.next(state(0))
            raise FloatingPointError
    assert "rollouts of step 2, which were in work, failed as well: ZeroDivisionError('by itself')" in caplog.text and not threads()


# --- the clock -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock, and what lets its time pass."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def passing(seconds):
        now[0] += seconds

    return StepClock(), passing


def test_time_in_which_both_go_on_counts_for_both_and_is_told(clock):
    clock, passing = clock
    with clock.during("collect"):
        with clock.during("sampling"):
            passing(1.0)
        with clock.during("judging"):
            passing(2.0)
            with clock.during("update"):
                passing(3.0)
        clock.count("tokens", 10)
        passing(1.0)
    passing(3.0)
    found = clock.read()
    seconds = {"step": 10.0, "collect": 7.0, "sampling": 1.0, "judging": 5.0, "update": 3.0, "overlap": 3.0, "device_wait": 0.0}
    assert {name: found[f"{name}_s"] for name in seconds} == seconds
    shares = {name: found[f"share_{name}"] for name in ("rollouts", "judging", "training", "other", "overlap")}
    assert shares == pytest.approx({"rollouts": 0.2, "judging": 0.5, "training": 0.3, "other": 0.3, "overlap": 0.3})
    assert sum(shares.values()) - 2 * shares["overlap"] == pytest.approx(1.0)


def test_waiting_for_the_devices_is_work_of_neither(clock):
    clock, passing = clock
    with clock.during("collect"), clock.during("update"):
        with clock.during("collect_wait"), clock.during("update_turn"):
            passing(2.0)
        with clock.during("sampling"), clock.during("update_wait"):
            passing(3.0)
        with clock.during("update_wait"), clock.during("update_turn"):
            passing(4.0)  # one of two threads that learn
    found = clock.read()
    assert (found["collect_s"], found["update_s"], found["overlap_s"], found["device_wait_s"]) == (7.0, 6.0, 4.0, 5.0)


def test_what_goes_on_beyond_a_steps_end_is_shared_out_and_rates_are_of_whole_calls(clock):
    clock, passing = clock
    with clock.during("collect"), clock.during("sampling"):
        passing(1.0)
        first = clock.read()
        passing(3.0)
    clock.count("tokens", 40)
    second = clock.read()
    assert (first["collect_s"], first["tokens_per_s"], second["collect_s"], second["tokens_per_s"]) == (1.0, 0.0, 3.0, 10.0)


# --- the recipe ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [2, -1, True, 0.5, "1"])
def test_a_staleness_that_is_no_choice_is_refused(value):
    cfg = get_config()
    cfg.rl = ConfigDict(cfg.rl.to_dict() | {"staleness": value})  # whatever its type
    with pytest.raises(ConfigError, match=r"rl\.staleness is .*: use 0 .* or 1"):
        check_config(cfg)


def test_one_process_may_be_stale_and_several_may_not(monkeypatch):
    cfg = get_config()
    assert cfg.rl.staleness == 0
    cfg.rl.staleness = 1
    check_config(cfg)
    monkeypatch.setattr(distributed, "several", lambda: True)
    with pytest.raises(ConfigError, match=r"rl\.staleness=1 with several processes"):
        check_config(cfg)
    cfg.rl.staleness = 0
    check_config(cfg)


def test_a_workdir_keeps_its_staleness(tmp_path):
    cfg = get_config()
    remember_config(cfg, tmp_path)
    cfg.rl.staleness = 1
    with pytest.raises(ConfigError, match=r"rl\.staleness: 0 -> 1"):
        remember_config(cfg, tmp_path)


@pytest.mark.parametrize(
    ("device", "timing", "learners", "said"),
    [("cpu", "quick", [("cpu", 0)], True), ("cpu", "none", [("cpu", 0)], False), ("cpu", "quick", [("gpu", 0)], False),
     ("cuda:0", "quick", [("gpu", 0)], True), ("cuda:1", "full", [("gpu", 0), ("gpu", 1)], True), ("cuda:1", "quick", [("gpu", 0)], False),
     ("cuda:0", "quick", [("cpu", 0)], False)],
)  # fmt: skip
def test_kernels_that_are_timed_where_updates_run_are_warned_of(device, timing, learners, said, caplog):
    cfg = get_config()
    cfg.sandbox.update(dict(device=device, timing=timing))
    devices = [SimpleNamespace(platform=platform, local_hardware_id=number) for platform, number in learners]
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=devices))
    with caplog.at_level(logging.WARNING):
        warn_of_shared_clock(cfg, mesh)
    assert (f"kernels are timed on {device}" in caplog.text) == said
