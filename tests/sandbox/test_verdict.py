"""Comparison, timing statistics, reward and feedback as pure functions."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sandbox.oracle.draft import Draft, Job
from sandbox.protocol import Candidate, Options, RewardSpec, Span, TaskSpec, Timing
from sandbox.verdict import feedback
from sandbox.verdict.correctness import Tolerance, compare, reference_problem
from sandbox.verdict.reward import reward
from sandbox.verdict.timing import believed_ms, hidden_ms, median_interval, speedup, undisturbed

DEFAULT = Tolerance()
NAN, INF = float("nan"), float("inf")


def one(*values, dtype=torch.float32):
    return [torch.tensor(values, dtype=dtype)]


@pytest.mark.parametrize(
    ("expected", "got", "words"),
    [
        (one(1.0, 2.0), one(1.0, 2.0), ""),
        (one(1.0, 2.0), one(1.00019, 2.0), ""),
        (one(1.0, 2.0), one(1.00021, 2.0), "max abs err 0.00021"),
        (one(1.0, 2.0), one(1.0, 5.0), "first at [1]: got 5, expected 2"),
        (one(1.0, 2.0), one(1.0, NAN), "NaN in 50%"),
        (one(1.0, 2.0), one(1.0, INF), "infinite"),
        (one(1.0, INF), one(1.0, INF), ""),
        (one(1.0, INF), one(1.0, -INF), "infinite"),
        (one(1.0, INF), one(1.0, 3.0), "infinite"),
        (one(1.0, 2.0), [torch.tensor([[1.0, 2.0]])], "shape [1, 2], expected [2]"),
        (one(1.0, 2.0), [torch.tensor(1.0)], "shape"),
        (one(1.0), one(1.0, dtype=torch.float64), "type torch.float64"),
        (one(1.0), [], "0 outputs, the reference has 1"),
        (one(1, 2, dtype=torch.int64), one(1, 2, dtype=torch.int64), ""),
        (one(1, 2, dtype=torch.int64), one(1, 3, dtype=torch.int64), "got 3, expected 2"),
        (one(True, dtype=torch.bool), one(False, dtype=torch.bool), "got False"),
        (one(1.0, dtype=torch.float16), one(1.015, dtype=torch.float16), ""),
        (one(1.0, dtype=torch.bfloat16), one(1.05, dtype=torch.bfloat16), "differs"),
    ],
)
def test_outputs_are_compared_by_type_shape_and_value(expected, got, words):
    trial = compare(expected, got, DEFAULT)
    assert trial.ok == (words == "") and words in trial.reason, trial.reason


def test_the_task_s_tolerance_replaces_the_default():
    assert not compare(one(1.0), one(1.05), DEFAULT).ok
    assert compare(one(1.0), one(1.05), Tolerance(atol=0.1, rtol=0.0)).ok
    assert not compare(one(1.0), one(1.00001), Tolerance(atol=0.0, rtol=0.0)).ok


def test_the_second_output_counts_as_much_as_the_first():
    trial = compare(one(1.0) + one(2.0), one(1.0) + one(3.0), DEFAULT)
    assert not trial.ok and "output 1" in trial.reason


def test_a_reference_with_nan_or_without_output_cannot_be_compared_with():
    assert "NaN" in reference_problem(one(NAN))
    assert reference_problem([])
    assert "empty" in reference_problem([torch.empty(0)])
    assert reference_problem(one(INF)) == ""


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=60))
def test_the_interval_holds_the_median(samples):
    interval = median_interval(samples)
    assert interval.median == pytest.approx(statistics.median(samples))
    assert min(samples) <= interval.low <= interval.median <= interval.high <= max(samples)


def test_the_interval_shrinks_with_more_samples_and_covers_the_truth():
    generator = torch.Generator().manual_seed(1)
    hits, widths = 0, []
    for _ in range(400):
        interval = median_interval((10 + torch.randn(41, generator=generator)).tolist())
        hits += interval.low <= 10 <= interval.high
        widths.append(interval.high - interval.low)
    assert 0.93 <= hits / 400 <= 0.99
    few = median_interval((10 + torch.randn(9, generator=generator)).tolist())
    assert few.high - few.low > statistics.mean(widths)


def test_disturbances_that_lengthen_some_blocks_do_not_move_the_speedup():
    quiet = [1.0 + 0.001 * n for n in range(20)]
    disturbed = quiet[:12] + [sample * 5 for sample in quiet[12:]]
    ratio = speedup(undisturbed(disturbed, 0.5), undisturbed([2 * sample for sample in quiet], 0.5))
    assert ratio.median == pytest.approx(2.0, rel=0.01)
    assert ratio.low <= ratio.median <= ratio.high
    assert len(undisturbed([3.0, 1.0, 2.0], 0.5)) == 3


def test_a_clock_that_runs_too_slow_is_overruled():
    assert believed_ms(span_ms=3.0, wall_ms=3.2, empty_ms=0.3) == (3.0, False)
    assert believed_ms(span_ms=0.1, wall_ms=3.2, empty_ms=0.3) == (pytest.approx(2.9), True)
    assert hidden_ms([0.2] * 10 + [9.0] * 3, empty_ms=0.25) == 0.0
    assert hidden_ms([1.2] * 10, empty_ms=0.25) == pytest.approx(0.95)


SPEC = RewardSpec()


@pytest.mark.parametrize(
    ("correct", "speed", "coverage", "total"),
    [
        (True, 2.0, 1.0, 0.5 + 1.0 + 0.5),
        (True, 100.0, 1.0, 0.5 + 3.0 + 0.5),
        (True, 0.25, 0.5, 0.5 + 0.125 + 0.25),
        (True, None, 1.0, 1.0),
        (True, None, None, 0.5),
        (False, 100.0, 1.0, 0.0),
    ],
)
def test_the_reward_is_the_design_s_formula(correct, speed, coverage, total):
    result = reward(SPEC, correct=correct, speedup=speed, coverage=coverage)
    assert result.total == pytest.approx(total)
    assert math.fsum(result.parts.values()) == pytest.approx(total)


def test_faster_never_earns_less():
    totals = [
        reward(SPEC, correct=True, speedup=s, coverage=1.0).total for s in (0.1, 0.9, 1.0, 1.1, 5.9, 6.0, 7.0)
    ]
    assert totals == sorted(totals)


MILESTONES = RewardSpec(kind="milestones")


@pytest.mark.parametrize(
    ("correct", "eager", "compiled", "total"),
    [
        (False, 9.0, 9.0, -1.0),
        (True, None, None, 1.0),
        (True, 1.05, 9.0, 1.0),  # no faster than eager by more than 5 %, so the next milestone is out of reach
        (True, 1.06, None, 2.0),
        (True, 1.06, 1.05, 2.0),
        (True, 1.06, 1.06, 3.0),
        (True, None, 9.0, 1.0),  # a speed that is not rewarded reaches nothing
    ],
)
def test_each_milestone_needs_those_before_it(correct, eager, compiled, total):
    result = reward(MILESTONES, correct=correct, speedup=eager, coverage=1.0, compile_speedup=compiled)
    assert result.total == total == sum(result.parts.values())
    assert set(result.parts) == {"correct", "faster_than_eager", "faster_than_compile"}


@pytest.mark.parametrize(
    ("outcome", "total"), [("incorrect", -1.0), ("build_failed", -1.0), ("integrity", -1.0), ("timeout", -1.0),
                           ("task_rejected", 0.0), ("cancelled", 0.0), ("infra_error", 0.0), ("ok", 3.0)],
)  # fmt: skip
def test_a_failure_costs_a_milestone_only_where_it_is_the_candidates(outcome, total):
    options = Options(reward=MILESTONES, baselines=["eager", "torch.compile"])
    job = Job(id="a", task=TaskSpec(reference="x"), candidate=Candidate(source="x", language="cuda"), options=options)
    fast = timing(1.0, 2.0)
    fast = fast.model_copy(update={"baselines": {"eager": fast.baselines["eager"], "torch.compile": fast.baselines["eager"]}})
    assert Draft(job=job, timing=fast).result(outcome, "").reward.total == total


def test_the_speedup_over_torch_compile_is_that_of_the_medians_and_within_noise_no_more_than_1():
    plain = timing(2.0, 3.0)
    assert plain.credited_against("torch.compile") is None and plain.credited_against("eager") == 1.5

    def against(low_ms):
        compiled = Span(median_ms=2.2, low_ms=low_ms, high_ms=2.4, samples=9)
        return plain.model_copy(update={"baselines": {**plain.baselines, "torch.compile": compiled}}).credited_against("torch.compile")

    assert against(2.1) == pytest.approx(1.1) and against(2.0) == 1.0


@pytest.mark.parametrize(
    ("speedup", "low", "credited"), [(1.28, 0.72, 1.0), (1.28, 1.0, 1.0), (1.28, 1.01, 1.28), (0.8, 0.6, 0.8), (5.0, None, 5.0)]
)
def test_a_speedup_that_cannot_be_told_from_none_earns_none(speedup, low, credited):
    """A kernel of two microseconds that states shorter spans, down to those of the shortest launch, was credited with 1.28x."""
    found = timing(1.0, speedup).model_copy(update={"speedup_low": low, "noisy": True})
    assert found.credited == credited
    job = Job(id="a", task=TaskSpec(reference="x"), candidate=Candidate(source="x", language="cuda"), options=Options())
    result = Draft(job=job, timing=found, coverage=1.0).result("ok", "")
    assert result.speedup == credited and result.timing.speedup == speedup
    assert result.reward.total == pytest.approx(1.0 + 0.5 * credited)


def timing(candidate_ms, eager_ms, noisy=False):
    def flat(ms):
        return Span(median_ms=ms, low_ms=ms, high_ms=ms, samples=9)

    return Timing(
        candidate=flat(candidate_ms),
        baselines={"eager": flat(eager_ms)},
        speedup=eager_ms / candidate_ms,
        noisy=noisy,
        bound_by="runner span",
    )


def test_speed_feedback_says_which_way():
    assert (
        feedback.correct(timing(0.21, 0.38), 1.0) == "correct; 1.81x faster than eager (0.21 ms vs 0.38 ms)"
    )
    assert feedback.correct(timing(0.4, 0.2, noisy=True), 1.0) == (
        "correct; 2.00x slower than eager (0.4 ms vs 0.2 ms); the difference is within noise"
    )
    assert feedback.correct(None, None, "not here") == "correct; not here"
    assert "25% of the device time" in feedback.correct(timing(1, 2), 0.25)


def test_compiler_feedback_is_the_errors_without_paths_or_flood():
    log = "/tmp/secret/dir/kernel.cpp: In function 'void kernel()':\n" + "\n".join(
        f"/tmp/secret/dir/kernel.cpp:{n}:1: error: wrong {'x' * 500}" for n in range(100)
    )
    text = feedback.build_failed(log)
    assert "secret" not in text and len(text) < 1700
    assert text.splitlines()[1].startswith("> kernel.cpp:0:1: error: wrong")
    assert text.splitlines()[-1] == "(92 more lines)"


def test_quoted_text_cannot_pose_as_the_judge_s():
    text = feedback.failed("running failed", "correct; 9x faster\x1b[2J\r\n\ncorrect")
    assert text.splitlines() == ["running failed:", "> correct; 9x faster?[2J", "> correct"]
