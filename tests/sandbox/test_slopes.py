"""The slope of the oracle's wall clock over back-to-back calls: an estimate with an interval, which no candidate can lower."""

import random

import pytest

from sandbox.oracle.clock import GPU_PLANS, Side, measure, measure_slopes

EMPTY_MS = 0.2


class Scripted(Side):
    """A side whose blocks take what a formula says: claims of `span_ms` a call and walls of `call_ms` a call, with jitter."""

    def __init__(self, call_ms, span_ms, *, jitter=0.0, delay=lambda calls: 0.0, **fields):
        super().__init__(order=None, slots=[0], deadline=lambda: 1.0, flushed=True, **fields)
        self._call_ms, self._span_ms, self._jitter, self._delay = call_ms, span_ms, jitter, delay
        self._rng = random.Random(1)

    def block(self, calls, keep=None, flush=True):
        noise = 1 + self._jitter * self._rng.random()
        return calls * self._span_ms * noise, EMPTY_MS + calls * self._call_ms * noise + self._delay(calls)


def sampled(side):
    side.prepare(1.5)
    measure_slopes([side], GPU_PLANS["full"])
    return side.slopes_ms(0.5)


def test_it_is_what_one_more_call_takes():
    for call_ms in (0.05, 0.003):
        assert sampled(Scripted(call_ms, 0.0)) == pytest.approx([call_ms] * 6)


def test_a_block_is_as_long_as_wanted_with_all_that_is_done_between_its_calls():
    for call_ms, span_ms, calls in ((0.1, 0.002, 15), (0.1, 0.05, 15), (3.0, 2.9, 1), (0.001, 0.0005, 1500)):
        side = Scripted(call_ms, span_ms)
        side.prepare(1.5)
        assert side.calls == pytest.approx(calls, abs=1) and side.call_ms == pytest.approx(span_ms)


def test_back_to_back_calls_are_counted_by_their_own_time_():
    for call_ms, calls in ((0.005, 300), (1.0, 1), (0.1, 15), (30.0, 1)):
        side = Scripted(call_ms, call_ms)
        side.prepare(1.5)
        side.prepare_slope(1.5)
        assert side.slope_calls == pytest.approx(calls, abs=1)


def test_drawing_out_short_blocks_gains_next_to_nothing():
    side = Scripted(0.05, 0.01)
    side.prepare(1.5)
    side.prepare_slope(1.5)
    short = side.slope_calls
    side._delay = lambda calls: 20 * EMPTY_MS if calls == short else 0.0
    measure_slopes([side], GPU_PLANS["full"])
    assert side.slope_calls == short
    assert min(side.slopes_ms(0.5)) > 0.9 * 0.05


@pytest.mark.parametrize("jitter", [0.02, 0.1])
def test_a_ratio_that_slopes_rule_has_an_interval_around_the_truth(jitter):
    sides = [Scripted(call_ms, 0.01, jitter=jitter) for call_ms in (0.05, 0.10)]
    timing = measure(sides[0], {"eager": sides[1]}, GPU_PLANS["full"], random.Random(0), use_slope=True)
    assert timing.bound_by == "oracle wall clock"
    assert timing.speedup_low < timing.speedup < timing.speedup_high
    assert timing.speedup_low <= 2.0 * (1 + jitter) and timing.speedup_high >= 2.0 / (1 + jitter)


def test_spans_above_the_slope_stand():
    sides = [Scripted(0.05, span_ms, jitter=0.01) for span_ms in (0.06, 0.12)]
    timing = measure(sides[0], {"eager": sides[1]}, GPU_PLANS["quick"], random.Random(0), use_slope=True)
    assert timing.bound_by == "runner span" and timing.speedup == pytest.approx(2.0, rel=0.02)
