"""What the events around a call take by themselves is measured once, and is not held against kernels."""

import pytest

from sandbox.jail.frames import Message
from sandbox.oracle.clock import Side
from sandbox.oracle.gpu import measure_event_gap


def test_the_gap_is_the_middle_of_flushed_blocks_of_a_call_that_launches_nothing():
    orders, spans = [], iter([9.0, 0.002, 0.003, 0.002, 0.1, 0.002])

    def order(command, timeout_s, buffers=(), **fields):
        orders.append((command, fields))
        return Message({"span_ms": next(spans) * fields["calls"]} if command == "time_block" else {}, [])

    assert measure_event_gap(order, "cuda:0") == pytest.approx(0.002)
    assert orders[0][0] == "load_module" and orders[0][1]["device"] == "cuda:0" and "return x" in orders[0][1]["source"]
    assert all(fields["flush"] for command, fields in orders if command == "time_block")


@pytest.mark.parametrize(("claim_ms", "believed_ms"), [(0.030, 0.025), (0.0052, 0.00052), (0.004, 0.0004), (0.0, 1e-6)])
def test_a_flushed_span_is_taken_without_the_gap_and_never_as_nothing(claim_ms, believed_ms):
    side = Side(order=None, slots=[0], deadline=lambda: 1.0, flushed=True, gap_ms=0.005, calls=10)
    side.claims_ms = [10 * claim_ms] * 4
    times, ruled = side.times_ms(0.5)
    assert times == pytest.approx([believed_ms] * len(times)) and not ruled
