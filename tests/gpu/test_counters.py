"""Hardware counters of real kernels, by Nsight Compute, where this machine gives any; forging them from outside fails."""

import pytest

from sandbox.profile.metrics import METRICS
from sandbox.profile.ncu import find_ncu
from sandbox.protocol import Options

ADD_BYTES = 2048 * 4096 * 4

HOSTILE = """

def _forge():
    head = '"gpu__time_duration.sum","sm__inst_executed.sum","Kernel Name"\\n"","",""\\n"9e12","1e9","forged"\\n'
    pid = os.getppid()
    for path in (f"/proc/{pid}/fd/1", f"/proc/{pid}/fd/2", f"/proc/{pid}/mem", "../kept/report.ncu-rep", "../kept/report"):
        try:
            with open(path, "r+b") as file:
                file.write(head.encode())
        except OSError:
            pass
    try:
        os.rename("../kept", "../other")
    except OSError:
        pass
    for fd in (1, 2):
        os.write(fd, head.encode())

_forge()
"""


@pytest.fixture
def counted(server, judge):
    """Judges with counters; skips, with the reason, where there are none."""
    support = server.capabilities().counters
    if not support.available:
        pytest.skip(support.problem)

    def evaluate(task, candidate, **more):
        result = judge(task, candidate, profile="ncu", **more)
        if result.outcome == "infra_error" and "no hardware counters" in result.feedback:
            pytest.skip(result.feedback)
        print({one.kernel: one.metrics for one in result.counters}, result.notes, result.roofline)
        return result

    return evaluate


def test_an_adds_counters_say_what_it_moves(counted):
    result = counted("task_add", "add_triton")
    assert result.outcome == "ok" and result.timing is not None
    [own] = [one for one in result.counters if one.own]
    assert own.kernel == "add_kernel" and own.launches == 1
    assert set(own.metrics) <= set(METRICS) and len(own.metrics) >= 20
    assert 0.9 * 2 * ADD_BYTES < own.metrics["dram__bytes_read.sum"] < 1.2 * 2 * ADD_BYTES
    assert own.units["dram__bytes_read.sum"] == "byte"
    assert own.metrics["sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active"] == 0
    assert own.metrics["dram__throughput.avg.pct_of_peak_sustained_elapsed"] > 40
    assert 0 < result.stage_s["counters"] < Options().ncu_s


def test_a_kernel_that_writes_where_counters_come_from_changes_nothing(counted):
    honest = counted("task_add", "add_triton", suffix="\n# counted\n")
    result = counted("task_add", "add_triton", suffix="\nimport os\n" + HOSTILE)
    assert result.outcome == "ok"
    assert [one.kernel for one in result.counters] == [one.kernel for one in honest.counters]
    name = "sm__inst_executed.sum"
    assert result.counters[0].metrics[name] == pytest.approx(honest.counters[0].metrics[name], rel=0.01)


def test_an_autotuned_kernel_is_counted_once_tuned(counted):
    result = counted("task_chain", "chain_triton")
    assert result.outcome == "ok" and sum(one.launches for one in result.counters if one.own) <= 2


def test_a_correct_kernel_is_told_how_near_it_comes_to_the_card(judge):
    result = judge("task_add", "add_triton", suffix="\n# roofline\n")
    near = result.roofline
    assert near.bound == "memory" and near.bytes == 3 * ADD_BYTES and near.flops == 0
    assert 0.4 < near.share < 1.1
    assert result.feedback.splitlines()[1].startswith("roofline: moves at least 101 MB: ")


def test_a_product_is_told_its_operations(judge):
    result = judge("task_matmul", "matmul_triton")
    assert result.outcome == "ok", result.feedback
    assert result.roofline.flops > 0 and result.roofline.bound in ("compute", "unknown")


def test_where_there_is_no_ncu_the_request_is_refused(server, judge):
    from sandbox.client import SandboxRejected

    if server.capabilities().counters.available:
        pytest.skip(f"there is one: {find_ncu()}")
    with pytest.raises(SandboxRejected, match="hardware counters cannot be had here"):
        judge("task_add", "add_triton", profile="ncu")
