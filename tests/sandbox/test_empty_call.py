"""What a call costs that does nothing is measured once, and is not held against kernels."""

import pytest

from sandbox.jail.frames import Message
from sandbox.oracle.clock import Side
from sandbox.oracle.gpu import measure_empty_call


def test_an_empty_call_is_timed_between_its_events_and_back_to_back():
    flushed = []

    def order(command, timeout_s, **fields):
        assert command == "time_block"
        flushed.append(fields["flush"])
        return Message({"span_ms": 0.002 * fields["calls"]}, [])

    cost = measure_empty_call(order)
    assert cost.span_ms == pytest.approx(0.002) and cost.launch_ms >= 0
    assert flushed.count(True) == 5 and flushed.count(False) > 20


@pytest.mark.parametrize(("claim_ms", "believed_ms"), [(0.030, 0.025), (0.0052, 0.00052), (0.004, 0.0004), (0.0, 1e-6)])
def test_a_flushed_span_is_taken_without_the_gap_and_never_as_nothing(claim_ms, believed_ms):
    side = Side(order=None, slots=[0], deadline=lambda: 1.0, flushed=True, gap_ms=0.005, calls=10)
    side.claims_ms = [10 * claim_ms] * 4
    times, ruled = side.times_ms(0.5)
    assert times == pytest.approx([believed_ms] * len(times)) and not ruled
