"""When a GPU's timing is ruled by its audit, and by how much: what audits of given times say of given claims."""

import pytest

from sandbox.oracle.audit import REPLAYED_SLACK, WRITTEN_BACK, replayed_slack, rule, rule_rounds
from sandbox.oracle.fresh import Audit, Run
from sandbox.protocol import Span, Timing


def replayed_audit(candidate_ms, reference_ms):
    runs = [[Run(claim_ms=10 * ms, wall_ms=10 * ms + 1.0, samples=[]) for ms in each] for each in (candidate_ms, reference_ms)]
    return Audit(calls=10, apart_ms=0.2, candidate=runs[0], reference=runs[1])


def claim_of_ms(candidate_ms, eager_ms):
    spans = [Span(median_ms=ms, low_ms=ms, high_ms=ms, samples=9) for ms in (candidate_ms, eager_ms)]
    return Timing(
        candidate=spans[0], baselines={"eager": spans[1]}, speedup=eager_ms / candidate_ms, speedup_low=eager_ms / candidate_ms,
        speedup_high=eager_ms / candidate_ms, noisy=False, bound_by="runner span",
    )  # fmt: skip


@pytest.mark.parametrize(("claimed_ms", "ruled"), [(0.0179, True), (0.0200, False)])
def test_claims_of_less_than_the_replays_of_candidate_and_reference_bear_out_are_ruled(claimed_ms, ruled):
    """Spans stated shorter by a fifth: the audit had forgiven up to a quarter, and the gap between events is taken off what is stated."""
    claimed = claim_of_ms(claimed_ms, 0.0228)
    timing = rule(claimed, replayed_audit([0.0225] * 6, [0.0228] * 6), replayed=True)[0]
    assert (timing != claimed) == ruled and (not ruled or timing.speedup < 1.05)


def test_what_is_forgiven_ends_by_degrees_where_the_audit_replays():
    """An honest softmax, 30.6 us by itself, writes what does not fit into the cache: 32 to 36.5 us in audits, where every call pays for it."""
    claimed = claim_of_ms(0.0306, 0.0546)
    times = [rule(claimed, replayed_audit([ms] * 6, [0.055] * 6), replayed=True)[0].candidate.median_ms for ms in (0.032, 0.035, 0.0365)]
    assert times[:2] == [0.0306] * 2 and 0.0306 < times[2] < 1.10 * 0.0306
    slower = [rule(claimed, replayed_audit([ms] * 6, [0.055] * 6), replayed=True)[0] for ms in (0.037, 0.04, 0.045, 0.061)]
    ratios = [timing.speedup * ms / 0.055 for timing, ms in zip(slower, (0.037, 0.04, 0.045, 0.061), strict=True)]
    assert 1.10 > ratios[0] > ratios[1] >= 1.0 and ratios[2:] == [pytest.approx(1.0)] * 2
    assert all(timing.noisy and timing.speedup_low <= timing.speedup <= timing.speedup_high for timing in slower)


def test_a_claim_just_beyond_its_own_replays_is_not_held_against_a_reference_of_many_kernels():
    """A reference of six kernels takes 24.7 us by itself and 21.9 us replayed; its candidate 8.95 us, and 10.48 us in one process of 20."""
    claimed = claim_of_ms(0.00895, 0.0247)
    ruled = rule(claimed, replayed_audit([0.01048] * 6, [0.0219] * 6), replayed=True)[0]
    assert 1.0 < ruled.candidate.median_ms / 0.00895 < 1.08 and ruled.noisy
    stated = claim_of_ms(0.00895 / 1.24, 0.0247)  # a lie is not spared what tells it from that
    assert rule(stated, replayed_audit([0.0095] * 6, [0.0219] * 6), replayed=True)[0].speedup < 0.0247 / 0.00895


def test_first_calls_of_the_reference_that_were_held_up_are_not_taken_for_what_memory_costs():
    """A kernel of 37.6 us claims 11.3; beside other work all first calls of the reference but one block's are late by a millisecond."""
    lost_ms, warm_ms = 1.0, 0.54
    first_ms = [warm_ms + 0.03 + lost_ms * late for late in (1, 1.1, 0.9, 0, 1.2, 0.9, 1, 1)]
    found = replayed_audit([0.0376] * 8, [0.0546] * 8)
    found.reference = [Run(claim_ms=ms, wall_ms=ms + warm_ms + 1.0, samples=[], warm_ms=warm_ms) for ms in first_ms]
    assert found.cold_ms == pytest.approx(0.003)
    timing, own, _ = rule(claim_of_ms(0.0113, 0.0546), found, replayed=True)
    assert own.median == pytest.approx(0.0376 - 0.003) and timing.candidate.median_ms > 0.9 * own.median
    found.reference = [Run(claim_ms=0.6, wall_ms=2.0, samples=[], warm_ms=0.5)] * 8  # where none is, it is what it was
    assert found.cold_ms == pytest.approx(0.01)


def test_a_disturbed_audit_is_made_again_and_one_that_bears_the_claim_out_counts():
    claimed, made = claim_of_ms(0.0306, 0.0546), []

    def rounds(*times_ms):
        for ms in times_ms:
            made.append(ms)
            yield replayed_audit([ms] * 6, [0.055] * 6)

    ruled, own, _ = rule_rounds(claimed, rounds(0.082, 0.034, 0.1), replayed=True)
    assert ruled == claimed and own.median == pytest.approx(0.034) and made == [0.082, 0.034]
    ruled, own, _ = rule_rounds(claimed, rounds(0.082, 0.061, 0.1), replayed=True)  # none does: the middle one counts
    assert ruled.speedup == pytest.approx(0.055 / 0.082) and own.median == pytest.approx(0.082)


def test_a_reference_of_short_kernels_counts_with_its_launches_where_the_audit_replays():
    def run(ms):
        return Run(claim_ms=ms, wall_ms=ms + 1.0, samples=[])

    found = Audit(calls=10, candidate=[run(0.2)] * 6, reference=[run(0.3)] * 6)
    span = Span(median_ms=0.02, low_ms=0.02, high_ms=0.02, samples=9)
    claimed = Timing(
        candidate=span, baselines={"eager": Span(median_ms=0.06, low_ms=0.06, high_ms=0.06, samples=9)}, speedup=3.0,
        speedup_low=3.0, speedup_high=3.0, noisy=False, bound_by="runner span",
    )  # fmt: skip
    assert rule(claimed, found, replayed=True)[0] == claimed
    assert rule(claimed, found)[0].speedup == pytest.approx(1.5)
    slow = Audit(calls=10, candidate=[run(1.2)] * 6, reference=[run(0.3)] * 6)
    # Its reference's launches are nothing that it could be credited with by claiming less than its replays show.
    assert rule(claimed, slow, replayed=True)[0].speedup == pytest.approx(0.25)


MEMORY_MS = 0.0161
"""What an H200 needs for 33.5 MB in and 33.5 MB out."""


@pytest.mark.parametrize("audited_ms", [0.0187, 0.0192, 0.0197])
def test_an_honest_kernel_that_memory_bounds_is_not_ruled_for_what_the_call_before_it_wrote(audited_ms):
    claimed = claim_of_ms(0.0158, 0.1376)
    found = replayed_audit([audited_ms] * 6, [0.132] * 6)
    assert rule(claimed, found, replayed=True, memory_ms=MEMORY_MS)[0] == claimed
    assert rule(claimed, found, replayed=True)[0].noisy, "without that it was"


@pytest.mark.parametrize("true_ms", [0.0162, 0.0180, 0.0230, 0.0400])
def test_who_states_less_than_the_truth_gains_little_by_what_memory_is_forgiven(true_ms):
    """A kernel's audited calls take from 1.08 to 1.19 of its time; it states whatever pays best."""
    for of_truth in (1.08, 1.19):
        found = replayed_audit([of_truth * true_ms] * 6, [0.132] * 6)
        stated = [true_ms * share / 100 for share in range(40, 101)]
        best = max(rule(claim_of_ms(ms, 0.1376), found, replayed=True, memory_ms=MEMORY_MS)[0].speedup for ms in stated)
        plain = max(rule(claim_of_ms(ms, 0.1376), found, replayed=True)[0].speedup for ms in stated)
        assert best <= 1.16 * 0.1376 / true_ms
        assert best == plain or true_ms < 1.5 * MEMORY_MS


def test_what_memory_is_forgiven_ends_where_it_cannot_follow_and_where_it_does_not_bound():
    assert replayed_slack(0.9 * MEMORY_MS, MEMORY_MS) == replayed_slack(MEMORY_MS, MEMORY_MS) == pytest.approx(REPLAYED_SLACK + WRITTEN_BACK)
    assert replayed_slack(0.8 * MEMORY_MS, MEMORY_MS) == replayed_slack(0.1 * MEMORY_MS, MEMORY_MS) == REPLAYED_SLACK
    assert replayed_slack(0.85 * MEMORY_MS, MEMORY_MS) == pytest.approx(REPLAYED_SLACK + WRITTEN_BACK / 2)
    assert replayed_slack(1.25 * MEMORY_MS, MEMORY_MS) == pytest.approx(REPLAYED_SLACK + WRITTEN_BACK / 2 / 1.25)
    assert replayed_slack(1.4 * MEMORY_MS, MEMORY_MS) == replayed_slack(10 * MEMORY_MS, MEMORY_MS) == REPLAYED_SLACK
    assert replayed_slack(0.01, 0.0) == REPLAYED_SLACK


def test_work_hidden_from_the_runners_clock_shows_beside_other_work_too():
    """Replies wait for a core in most blocks of either side; in those that do not, the candidate's take longer by the work that it hides."""
    waits_ms = [0.2, 0.25, 4.0, 5.0, 6.0, 7.0, 8.0]
    ours = [Run(claim_ms=1.2, wall_ms=1.2 + 1.2 + wait, samples=[], warm_ms=1.2) for wait in waits_ms]
    hiding = [Run(claim_ms=0.001, wall_ms=1.2 + wait + 0.1, samples=[]) for wait in reversed(waits_ms)]
    found = Audit(calls=10, candidate=hiding, reference=ours)
    candidate, reference = found.times_ms()
    assert candidate.median >= 0.8 * reference.median
    honest = [Run(claim_ms=1.2, wall_ms=1.2 + wait, samples=[]) for wait in waits_ms]
    candidate, reference = Audit(calls=10, candidate=honest, reference=ours).times_ms()
    assert candidate.median == pytest.approx(reference.median, rel=0.05)
