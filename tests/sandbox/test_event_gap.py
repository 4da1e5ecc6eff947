"""What the events around a call take by themselves is measured once, and is not held against kernels."""

import pytest

from sandbox.jail.frames import Message
from sandbox.oracle.clock import Side
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
