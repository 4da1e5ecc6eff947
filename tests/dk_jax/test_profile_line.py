"""What a verdict keeps of the profiler's counters and of the card's best, for the agents that read it."""

from dk_jax.rollout.trajectory import Verdict
from sandbox.protocol import EvaluationResult, KernelCounters, KernelTime, Roofline

NEAR = Roofline(bytes=12.6e6, flops=0.5e9, floor_ms=0.0031, share=0.33, bound="memory")


def profile_of(**fields) -> str:
    return Verdict.from_result(EvaluationResult(id="1", state="done", outcome="ok", stage="timed", **fields)).profile


def test_counters_of_the_heaviest_own_kernel_stand_in_the_profile_without_what_a_candidate_could_write_into_a_prompt():
    library = KernelCounters(kernel="reduce", own=False, launches=1, metrics={"sm__cycles_active.avg": 9.0})
    own = KernelCounters(
        kernel="rows;`", own=True, launches=1, metrics={"sm__cycles_active.avg": 123456.7, "lts__t_sector_hit_rate.pct": 51.25},
        units={"sm__cycles_active.avg": "cycle", "lts__t_sector_hit_rate.pct": "%"},
    )  # fmt: skip
    kernels = [KernelTime(name="rows", share=0.9, ms=1.0, own=True)]
    assert profile_of(coverage=0.9, kernels=kernels, roofline=NEAR, counters=[library, own]) == (
        "coverage 90 %; rows 90 % (own); roofline 33 % (memory-bound); "
        "counters of rows??: sm__cycles_active.avg 1.235e+05 cycle, lts__t_sector_hit_rate.pct 51.25 %"
    )
    assert profile_of(counters=[library]) == "counters of reduce: sm__cycles_active.avg 9"


def test_without_a_known_bound_the_share_stands_alone_and_without_either_nothing():
    assert profile_of(roofline=NEAR.model_copy(update={"bound": "unknown"})) == "roofline 33 %"
    assert profile_of() == ""
