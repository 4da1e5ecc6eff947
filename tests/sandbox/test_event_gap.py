"""What the events around a call take by themselves is measured once, and is not held against kernels."""

import random

import pytest

from sandbox.jail.frames import Message
from sandbox.oracle.clock import GPU_PLANS, PLANS, Side, measure
from sandbox.oracle.gpu import measure_call_times


def test_the_gap_is_the_middle_of_flushed_blocks_of_a_call_that_launches_nothing():
    orders, spans = [], iter([9.0, 0.002, 0.003, 0.002, 0.1, 0.002, 9.0, 0.005, 0.003, 0.004, 0.1, 0.002])

    def order(command, timeout_s, buffers=(), **fields):
        orders.append((command, fields))
        return Message({"span_ms": next(spans) * fields["calls"]} if command == "time_block" else {}, [])

    found = measure_call_times(order, "cuda:0")
    assert (found.gap_ms, found.least_ms) == pytest.approx((0.002, 0.002))
    sources = [fields["source"] for command, fields in orders if command == "load_module"]
    assert len(sources) == 2 and "return x.add_(1)" in sources[1] and "class OneCall" in sources[1]
    assert orders[0][0] == "load_module" and orders[0][1]["device"] == "cuda:0" and "return x" in orders[0][1]["source"]
    assert all(fields["flush"] for command, fields in orders if command == "time_block")


@pytest.mark.parametrize(("claim_ms", "believed_ms"), [(0.030, 0.025), (0.0052, 0.00052), (0.004, 0.0004), (0.0, 1e-6)])
def test_a_flushed_span_is_taken_without_the_gap_and_never_as_nothing(claim_ms, believed_ms):
    side = Side(order=None, slots=[0], deadline=lambda: 1.0, flushed=True, gap_ms=0.005, calls=10)
    side.claims_ms = [10 * claim_ms] * 4
    times, ruled = side.times_ms(0.5)
    assert times == pytest.approx([believed_ms] * len(times)) and not ruled


def test_what_the_host_takes_is_reported_apart_and_is_no_part_of_any_time():
    """Two sides of equal spans; the candidate's host is slow, and says once that it takes no time at all, and once something else than one."""

    def order_of(hosts_ms):
        stated = iter(hosts_ms * 1000)

        def order(command, timeout_s, buffers=(), **fields):
            return Message({"span_ms": 0.02 * fields["calls"], "host_ms": next(stated)}, [])

        return order

    hosts = {"candidate": [0.5, 0.5, "5", -1.0, 0.5, float("nan")], "eager": [0.01]}
    sides = {name: Side(order=order_of(ms), slots=[0], deadline=lambda: 1.0, flushed=True) for name, ms in hosts.items()}
    timing = measure(sides["candidate"], {"eager": sides["eager"]}, GPU_PLANS["quick"], random.Random(0))
    assert (timing.candidate.host_ms, timing.baselines["eager"].host_ms) == (0.5, 0.01)
    assert timing.speedup == pytest.approx(1.0) and timing.candidate.median_ms == pytest.approx(0.02)


def test_a_device_that_is_the_host_reports_no_time_of_the_host():
    def order(command, timeout_s, buffers=(), **fields):
        return Message({"span_ms": 0.02 * fields["calls"], "host_ms": None}, [])

    sides = [Side(order=order, slots=[0], deadline=lambda: 1.0) for _ in range(2)]
    timing = measure(sides[0], {"eager": sides[1]}, PLANS["quick"], random.Random(0))
    assert timing.candidate.host_ms is None and timing.baselines["eager"].host_ms is None
