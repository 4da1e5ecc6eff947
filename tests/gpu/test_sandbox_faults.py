"""A candidate that hangs, faults or eats memory hurts itself only; the next one finds a working GPU."""

import time

from sandbox.jail import nvml
from sandbox.jail.device_cuda import physical_index


def still_works(judge, mark):
    result = judge("task_add", "add_triton", suffix=f"\n# after {mark}\n", timing="none")
    assert result.outcome == "ok"


def test_a_kernel_that_never_ends_is_stopped_at_its_deadline(judge):
    start = time.monotonic()
    result = judge("task_add", "add_hang", check_s=8)
    assert result.outcome == "timeout"
    assert time.monotonic() - start < 60
    still_works(judge, "a hang")


def test_an_illegal_access_is_a_runtime_error(judge):
    result = judge("task_add", "add_triton", change=("out_ptr + offsets,", "out_ptr + offsets + (1 << 40),"))
    assert result.outcome == "runtime_error"
    assert "illegal memory access" in result.feedback
    still_works(judge, "an illegal access")


def test_too_large_an_allocation_is_out_of_memory(judge):
    result = judge("task_add", "add_out_of_memory")
    assert result.outcome == "out_of_memory"
    assert "memory" in result.feedback
    still_works(judge, "running out of memory")


def test_no_process_keeps_device_memory_after_its_evaluation(judge):
    still_works(judge, "nothing yet")  # the oracle and the warm reference have their contexts now
    before_bytes = sum(nvml.memory_by_process(physical_index("cuda:0")).values())
    judge("task_add", "add_hang", suffix="\n# again\n", check_s=5)
    still_works(judge, "a hang whose memory is looked at")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        more_bytes = sum(nvml.memory_by_process(physical_index("cuda:0")).values()) - before_bytes
        if more_bytes < 256 << 20:
            return
        time.sleep(0.5)
    raise AssertionError(f"{more_bytes >> 20} MiB of device memory more are held")
