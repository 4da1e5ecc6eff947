"""Coverage counts a candidate's own kernels by evidence of the build, not by how kernels are called."""

import pytest

from sandbox.jail.cuda_trace import busy_ms, trace_events
from sandbox.jail.device_cuda import physical_index
from sandbox.jail.faults import JailReply
from sandbox.jail.frames import Message
from sandbox.oracle.gpu import compile_for, measure_coverage, raise_to_launch, raise_to_profile
from sandbox.protocol import Span, Timing
from sandbox.verdict.coverage import DeviceEvent, OwnKernel, judge_coverage, own_share


def event(name, ms, **facts):
    return DeviceEvent(name=name, ms=ms, **facts)


def test_share_is_own_time_over_all_device_time():
    events = [
        event("add_kernel", 3.0),
        event("ampere_sgemm_128x64_nn", 6.0),
        event("Memset (Device)", 1.0, kind="memset"),
    ]
    report = own_share(events, [OwnKernel(name="add_kernel", origin="triton")])
    assert report.coverage == pytest.approx(0.3)
    assert [(k.name, k.own) for k in report.kernels] == [
        ("ampere_sgemm_128x64_nn", False),
        ("add_kernel", True),
        ("Memset (Device)", False),
    ]


def test_launches_of_one_kernel_are_summed():
    report = own_share([event("k", 1.0), event("k", 2.0)], [OwnKernel(name="k", origin="triton")])
    assert report.coverage == 1.0
    assert (report.kernels[0].launches, report.kernels[0].ms) == (2, 3.0)


def test_a_library_kernel_never_counts_however_it_is_called():
    assert own_share([event("my_candidate_kernel", 1.0)], []).coverage == 0.0


def test_an_own_kernel_named_like_a_library_kernel_counts():
    name = "void at::native::vectorized_elementwise_kernel<4>(int)"
    assert own_share([event(name, 1.0)], [OwnKernel(name=name, origin="cuda")]).coverage == 1.0


def test_a_decoy_with_a_library_kernels_name_does_not_inherit_its_time():
    events = [
        event("nvjet_hsh_128x256", 9.0, block_threads=384, registers=168),
        event("nvjet_hsh_128x256", 1.0, block_threads=128, registers=16),
    ]
    own = [OwnKernel(name="nvjet_hsh_128x256", origin="triton", block_threads=128, registers=16)]
    report = own_share(events, own)
    assert report.coverage == pytest.approx(0.1)
    assert "nvjet_hsh_128x256" in report.note


def test_any_compiled_variant_of_a_name_matches():
    own = [
        OwnKernel(name="k", origin="triton", block_threads=threads, registers=32) for threads in (128, 256)
    ]
    assert own_share([event("k", 1.0, block_threads=256, registers=32)], own).coverage == 1.0


def test_a_small_kernel_is_given_more_registers_than_it_needs():
    own = [OwnKernel(name="k", origin="triton", block_threads=128, registers=12)]
    assert own_share([event("k", 1.0, block_threads=128, registers=16)], own).coverage == 1.0
    other = own_share([event("k", 1.0, block_threads=128, registers=24)], own)
    assert other.coverage == 0.0 and "24 registers" in other.note and "has 128 threads, 12 registers" in other.note


def test_a_copy_named_like_an_own_kernel_is_no_kernel():
    assert own_share([event("k", 1.0, kind="memcpy")], [OwnKernel(name="k", origin="triton")]).coverage == 0.0


def test_an_empty_profile_gives_no_coverage_and_says_so():
    report = own_share([], [OwnKernel(name="k", origin="triton")])
    assert report.coverage is None
    assert "no work" in report.note


@pytest.mark.parametrize(
    ("coverage", "fails", "speed", "share"),
    [(0.0, True, False, 0.0), (0.049, True, False, 0.049), (0.05, False, False, 0.05),
     (0.299, False, False, 0.299), (0.30, False, True, 0.30),
     (1.0, False, True, 1.0), (None, False, False, 0.0)],
)  # fmt: skip
def test_the_rule_of_five_and_thirty_percent(coverage, fails, speed, share):
    verdict = judge_coverage(coverage)
    assert (verdict.integrity is not None) is fails
    assert verdict.speed_rewarded is speed
    assert verdict.rewarded_share == share
    assert bool(verdict.note) is not speed


def test_the_evidence_names_where_the_time_went():
    report = own_share([event("ampere_sgemm", 1.0)], [])
    assert "ampere_sgemm (100%)" in judge_coverage(report.coverage, kernels=report.kernels).integrity


def test_a_trace_yields_device_work_only():
    kernel = {
        "ph": "X", "cat": "kernel", "name": "k", "dur": 2.5,
        "args": {"block": [128, 2, 1], "registers per thread": 40},
    }  # fmt: skip
    trace = {
        "traceEvents": [
            {"ph": "X", "cat": "cpu_op", "name": "aten::add", "dur": 9.0},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 5.0},
            {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "dur": 1.0, "args": {}},
            kernel,
        ]
    }
    assert trace_events(trace) == [
        DeviceEvent(name="Memset (Device)", ms=0.001, kind="memset"),
        DeviceEvent(name="k", ms=0.0025, block_threads=256, registers=40),
    ]


def test_a_cuda_ordinal_is_mapped_through_the_visible_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert physical_index("cuda:1") == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert physical_index("cuda:1") == 5
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES"):
        physical_index("cuda:2")


PROFILE = {
    "kernels": [
        {"name": "k", "ms": 3.0, "launches": 2, "kind": "kernel", "block_threads": 128, "registers": 20},
        {"name": "fill", "ms": 1.0, "launches": 1, "kind": "memset",
     "block_threads": None, "registers": None},
    ],
    "own": [{"name": "k", "origin": "triton", "block_threads": 128, "registers": 20}],
    "busy_ms": 3.5,
}  # fmt: skip


def runner_that_replies(header):
    def order(command, timeout_s, **fields):
        if isinstance(header, Exception):
            raise header
        return Message(header, [])

    return order


def test_coverage_is_taken_from_a_runners_profile():
    report = measure_coverage(runner_that_replies(PROFILE), slot=0, timeout_s=1)
    assert report.coverage == pytest.approx(0.75)
    assert report.busy_ms == 3.5
    assert (report.kernels[0].name, report.kernels[0].launches) == ("k", 2)


@pytest.mark.parametrize(
    "header",
    [{}, {"kernels": 1, "own": []}, {"kernels": [{"name": "k"}], "own": []},
     {"kernels": [{**PROFILE["kernels"][0], "ms": -1.0}], "own": []},
     {"kernels": [{**PROFILE["kernels"][0], "registers": "20"}], "own": []}],
)  # fmt: skip
def test_a_malformed_profile_is_no_coverage(header):
    report = measure_coverage(runner_that_replies(header), slot=0, timeout_s=1)
    assert report.coverage is None
    assert "malformed" in report.note


def test_a_profiler_that_fails_gives_no_coverage_and_its_reason():
    broken = runner_that_replies(JailReply("runtime_error", "CUPTI_ERROR_NOT_INITIALIZED"))
    report = measure_coverage(broken, slot=0, timeout_s=1)
    assert report.coverage is None
    assert "CUPTI_ERROR" in report.note
    assert not judge_coverage(report.coverage).speed_rewarded


def test_a_malformed_or_missing_compile_report_is_an_unknown():
    report = compile_for(runner_that_replies({"report": {"arch": "sm_90"}}), 0, 1, "sm_90")
    assert report.compiles is None and "malformed" in report.summary()
    report = compile_for(runner_that_replies(JailReply("runtime_error", "boom")), 0, 1, "sm_90")
    assert report.summary() == "compiles for sm_90: unknown, no kernel was launched: boom"


def timed(median_ms, speedup=2.0):
    span = Span(median_ms=median_ms, low_ms=0.9 * median_ms, high_ms=1.1 * median_ms, samples=9)
    bounds = {"speedup_low": 1.8, "speedup_high": 2.2, "noisy": False, "bound_by": "runner span"}
    return Timing(candidate=span, baselines={"eager": span}, speedup=speedup, **bounds)


def test_a_profile_that_fits_the_span_leaves_the_timing_alone():
    assert raise_to_profile(timed(1.0), busy_ms=1.4) == timed(1.0)
    assert raise_to_profile(timed(0.002), busy_ms=0.009) == timed(0.002)


def test_work_that_the_span_did_not_see_slows_the_candidate_by_what_it_hid():
    raised = raise_to_profile(timed(0.1), busy_ms=1.0)
    assert raised.candidate.median_ms == 1.0
    assert raised.speedup == pytest.approx(0.2)
    assert raised.bound_by == "profile"
    assert raised.baselines == timed(0.1).baselines


def test_a_call_shorter_than_any_launch_is_raised_to_the_shortest():
    raised = raise_to_launch(timed(0.001, speedup=6.0), least_ms=0.002)
    assert raised.candidate.median_ms == pytest.approx(0.0019) and raised.bound_by == "shortest launch"
    assert raised.speedup == pytest.approx(6.0 / 1.9)
    assert raise_to_launch(timed(0.002), least_ms=0.002) == timed(0.002)


@pytest.mark.parametrize("noisy", [True, False])
def test_a_raised_timing_stays_noisy_where_two_clocks_had_disagreed(noisy):
    ruled = timed(0.001, speedup=6.0).model_copy(update={"noisy": noisy, "speedup_low": 5.0, "speedup_high": 7.0})
    assert raise_to_launch(ruled, least_ms=0.002).noisy == raise_to_profile(ruled, busy_ms=1.0).noisy == noisy
    assert raise_to_launch(timed(0.001), least_ms=0.002).noisy  # its interval holds 1 now


def test_overlapping_streams_are_busy_once():
    spans = [(0, 10), (5, 10), (30, 5)]
    events = [{"ph": "X", "cat": "kernel", "name": "k", "ts": ts, "dur": dur} for ts, dur in spans]
    assert busy_ms({"traceEvents": events}) == pytest.approx(0.020)
    assert busy_ms({}) == 0.0
