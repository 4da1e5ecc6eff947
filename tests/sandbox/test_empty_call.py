"""What a call costs that does nothing is measured once, and is not held against kernels."""

import pytest

from sandbox.jail.frames import Message
from sandbox.oracle.clock import Side
from sandbox.oracle.gpu import EmptyCall, measure_empty_call

EVENT = {"name": "copy_one", "ms": 0.001, "kind": "kernel", "block_threads": 128, "registers": 8, "launches": 1}


def runner(span_ms, kernels=(EVENT,), log=None):
    def order(command, timeout_s, **fields):
        if log is not None:
            log.append(command)
        if command == "time_block":
            return Message({"span_ms": span_ms * fields["calls"]}, [])
        return Message({"kernels": list(kernels), "own": [], "busy_ms": 0.001}, [])

    return order


def test_the_gap_is_what_the_events_show_beyond_the_kernel_and_the_profiler_comes_last():
    log = []
    cost = measure_empty_call(runner(0.006, log=log))
    assert cost.gap_ms == pytest.approx(0.005)
    assert cost.launch_ms >= 0
    assert log[-2:] == ["start_profiler", "profile"] and set(log[:-2]) == {"time_block"}


def test_spans_shorter_than_the_kernel_leave_no_gap_and_a_profile_without_kernels_is_no_measurement():
    assert measure_empty_call(runner(0.0005)).gap_ms == 0.0
    with pytest.raises(ValueError, match="shows no kernel"):
        measure_empty_call(runner(0.006, kernels=()))
    assert EmptyCall(launch_ms=1.0, gap_ms=0.0) == EmptyCall(launch_ms=1.0, gap_ms=0.0)


@pytest.mark.parametrize(("claim_ms", "believed_ms"), [(0.030, 0.025), (0.0052, 0.00052), (0.004, 0.0004), (0.0, 1e-6)])
def test_a_flushed_span_is_taken_without_the_gap_and_never_as_nothing(claim_ms, believed_ms):
    side = Side(order=None, slots=[0], deadline=lambda: 1.0, flushed=True, gap_ms=0.005, calls=10)
    side.claims_ms = [10 * claim_ms] * 4
    times, ruled = side.times_ms(0.5)
    assert times == pytest.approx([believed_ms] * len(times)) and not ruled
