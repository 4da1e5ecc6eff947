"""Verification accepts useless skills no more often than it says, and finds useful ones."""

import itertools
import math

import numpy as np
import pytest

from dk_jax.rollout.trajectory import Verdict
from dk_jax.skills.verification import PaperRule, SequentialTest, score, sign_patterns, speedup_of


def arm(rng, n, *, ratio=1.0, spread=0.3, failures=0.0):
    speedups = np.exp(rng.normal(math.log(1.5 * ratio), spread, n))
    return [None if rng.random() < failures else float(s) for s in speedups]


def run(test, rng, *, ratio, **kind):
    """One verification as the trainer runs it: look by look, until the test decides."""
    control, treated = arm(rng, test.looks[-1], **kind), arm(rng, test.looks[-1], ratio=ratio, **kind)
    for look in test.looks:
        decision = test.decide(control[:look], treated[:look])
        if decision.status != "continue":
            return decision
    raise AssertionError("the last look must decide")


def acceptance(test, *, ratio, trials, seed=0, **kind):
    rng = np.random.default_rng(seed)
    return sum(run(test, rng, ratio=ratio, **kind).status == "accept" for _ in range(trials)) / trials


def sequential_p_by_hand(evidence, looks, alpha):
    """Walks all sign patterns look by look with plain loops; whether the observed one passes, and its p at
    the last look."""
    patterns = list(itertools.product([1, -1], repeat=len(evidence)))
    accepted = set()
    for look in looks:
        sums = {s: sum(a * b for a, b in zip(s[:look], evidence[:look], strict=True)) for s in patterns}
        observed = patterns[0]
        as_extreme = {s for s in patterns if sums[s] >= sums[observed] - 1e-9}
        p = len(accepted | as_extreme) / len(patterns)
        still_open = [s for s in patterns if s not in accepted]
        newly = set()
        for s in still_open:
            larger = [o for o in still_open if sums[o] >= sums[s] - 1e-9]
            if len(accepted) + len(larger) <= alpha * look / looks[-1] * len(patterns) + 1e-9:
                newly.add(s)
        accepted |= newly
        if observed in accepted:
            return True, p
    return False, p


@pytest.mark.parametrize("alpha", [0.05, 0.1])
@pytest.mark.parametrize("kind", [{}, {"failures": 0.4}, {"spread": 1.0, "failures": 0.2}], ids=str)
def test_a_useless_skill_is_accepted_no_more_often_than_alpha(alpha, kind):
    test = SequentialTest(alpha=alpha, looks=(4, 6, 8), bar=0.0, futility=1.0)
    trials = 1000
    monte_carlo = 3 * math.sqrt(alpha * (1 - alpha) / trials)
    assert acceptance(test, ratio=1.0, trials=trials, **kind) <= alpha + monte_carlo


def test_the_error_rate_is_used_and_not_only_kept():
    test = SequentialTest(alpha=0.1, looks=(4, 6, 8), bar=0.0, futility=1.0)
    assert acceptance(test, ratio=1.0, trials=1500) > 0.06


def test_a_gain_of_exactly_min_ratio_counts_as_none():
    test = SequentialTest(min_ratio=1.5, alpha=0.1, looks=(4, 8), bar=0.0, futility=1.0)
    assert acceptance(test, ratio=1.5, trials=1000) <= 0.1 + 3 * math.sqrt(0.09 / 1000)
    assert acceptance(test, ratio=1.0, trials=300) < 0.03


@pytest.mark.parametrize(
    ("alpha", "looks", "kind", "power"),
    [
        (0.1, (4,), {}, 0.83),
        (0.05, (6,), {}, 0.96),
        (0.1, (6,), {}, 0.99),
        (0.05, (8,), {}, 0.99),
        (0.1, (8,), {"failures": 0.2}, 0.81),
        (0.1, (4, 8), {}, 1.0),
    ],
)
def test_a_skill_that_doubles_speed_is_found_as_often_as_the_table_says(alpha, looks, kind, power):
    test = SequentialTest(alpha=alpha, looks=looks)
    trials = 400
    tolerance = 3 * math.sqrt(power * (1 - power) / trials) + 0.01
    assert abs(acceptance(test, ratio=2.0, trials=trials, seed=1, **kind) - power) <= tolerance


def test_p_values_are_those_of_an_enumeration_by_hand():
    rng = np.random.default_rng(2)
    test = SequentialTest(alpha=0.1, looks=(3, 5, 7), bar=0.0, futility=1.0)
    passed = 0
    for _ in range(12):
        control, treated = arm(rng, 7, failures=0.2), arm(rng, 7, ratio=1.6, failures=0.2)
        evidence = []
        for c, t in zip(control, treated, strict=True):
            if c is not None and t is not None:
                evidence.append(math.log(t / c))
            else:
                evidence.append(math.log(test.mixed_ratio) * ((t is not None) - (c is not None)))
        decision = test.decide(control, treated)
        want_passed, want_p = sequential_p_by_hand(evidence, test.looks, 0.1)
        if want_passed and decision.effect > 1.0:
            assert decision.status == "accept"
        assert decision.status != "accept" or want_passed
        if decision.n == 7 or want_passed:
            assert decision.p == pytest.approx(want_p)
        passed += want_passed
    assert 0 < passed < 12, "the cases must lie on both sides"


def test_the_result_does_not_depend_on_how_the_pairs_came_in():
    rng = np.random.default_rng(3)
    test = SequentialTest(alpha=0.1, looks=(4, 8))
    control, treated = arm(rng, 8), arm(rng, 8, ratio=1.3)
    by_looks = test.decide(control[:4], treated[:4])
    if by_looks.status == "continue":
        by_looks = test.decide(control, treated)
    assert by_looks == test.decide(control, treated)


def test_before_the_first_look_more_pairs_are_asked_for():
    test = SequentialTest(looks=(4, 8))
    decision = test.decide([1.0] * 3, [9.0] * 3)
    assert (decision.status, decision.p, decision.n) == ("continue", None, 3)
    assert test.decide([], []).effect == 1.0
    assert (test.next_look(0), test.next_look(4), test.next_look(8)) == (4, 8, None)


def test_a_hopeless_skill_is_given_up_at_the_first_look():
    decision = SequentialTest(looks=(4, 8)).decide([2.0] * 4, [1.0, 1.1, 0.9, 1.0])
    assert decision.status == "reject" and decision.n == 4 and "would not help" in decision.reason
    patient = SequentialTest(looks=(4, 8), futility=1.0)
    assert patient.decide([2.0] * 4, [1.0, 1.1, 0.9, 1.0]).status == "continue"


def test_a_gain_below_the_bar_is_not_accepted():
    control, treated = [0.5] * 8, [0.9, 1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0]
    assert SequentialTest(looks=(8,), bar=1.0).decide(control, treated).status == "accept"
    decision = SequentialTest(looks=(8,), bar=1.2).decide(control, treated)
    assert decision.status == "reject" and "the bar is 1.2x" in decision.reason


def test_a_test_once_passed_may_still_clear_the_bar_with_later_pairs():
    test = SequentialTest(looks=(6, 8), alpha=0.1)
    control, treated = [0.4] * 8, [1.0, 1.1, 0.9, 1.0, 1.1, 1.0, 1.0, 1.3]
    assert test.decide(control[:6], treated[:6]).status == "continue"
    assert test.decide(control, treated).status == "accept"


def test_speed_bought_with_failures_is_not_accepted():
    control, treated = [1.0] * 12, [3.0] * 8 + [None] * 4
    decision = SequentialTest(looks=(12,), mixed_ratio=1.0, fail_speedup=0.01).decide(control, treated)
    assert decision.status == "reject" and "failures outweigh the gain" in decision.reason


def test_two_failures_say_nothing_and_one_speaks_for_the_other_side():
    repaired = SequentialTest(looks=(8,)).decide([None] * 8, [1.5] * 8)
    assert repaired.status == "accept" and repaired.p == pytest.approx(1 / 256)
    assert repaired.effect == pytest.approx(1.5 / 0.25)
    broken = SequentialTest(looks=(8,)).decide([None] * 8, [None] * 8)
    assert broken.status == "reject" and broken.p == 1.0 and broken.best == 0.0


def test_pairs_that_the_judge_could_not_judge_are_left_out():
    test = SequentialTest(looks=(4, 8))
    decision = test.decide([1.0, math.nan, 1.0, 1.0], [2.0, 2.0, math.nan, 2.0])
    assert decision.status == "continue" and decision.n == 2


def test_the_interval_holds_the_true_effect_as_often_as_it_says():
    rng = np.random.default_rng(4)
    test = SequentialTest(looks=(8,))
    held = 0
    for _ in range(400):
        decision = test.decide(arm(rng, 8), arm(rng, 8, ratio=1.7))
        held += decision.low <= 1.7 <= decision.high
    assert abs(held / 400 - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 400)


def test_many_pairs_are_tested_on_a_fixed_draw_of_patterns():
    test = SequentialTest(alpha=0.05, looks=(16, 24), bar=0.0, futility=1.0)
    rng = np.random.default_rng(5)
    control, treated = arm(rng, 24), arm(rng, 24, ratio=1.4)
    assert test.decide(control, treated) == test.decide(control, treated)
    assert acceptance(test, ratio=1.0, trials=60) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 60)
    assert acceptance(test, ratio=2.0, trials=20) == 1.0


@pytest.mark.parametrize("statistic", ["differences", "ranks"])
def test_with_many_pairs_too_a_decision_is_the_same_when_it_is_asked_for_later(statistic):
    rng = np.random.default_rng(8)
    test = SequentialTest(alpha=0.05, looks=(8, 16, 20), bar=0.0, futility=1.0, statistic=statistic)
    found = set()
    for _ in range(150):
        control, treated = arm(rng, 20), arm(rng, 20, ratio=1.15)
        for look in test.looks:
            decision = test.decide(control[:look], treated[:look])
            if decision.status != "continue":
                break
        assert decision == test.decide(control, treated)
        found.add((decision.status, decision.n))
    assert len(found) == 4, "accepted at each look, and rejected at the last"


def test_of_many_pairs_the_first_ones_signs_are_enumerated():
    few, many = sign_patterns(14), sign_patterns(20)
    assert many.shape == (2**14, 20) and (many[:, :14] == few).all() and (many[0] == 1).all()
    assert len(np.unique(few, axis=0)) == 2**14
    assert (np.abs(many[:, 14:].mean(0)) < 4 / 2**7).all()


def ranks_by_hand(control, treated, tasks):
    """A pair's score is the treated candidate's minus the control's: how many of its task's correct ones it beats, minus how many beat
    it, over their number; -1/2 for a failed one."""
    out = []
    for c, t, task in zip(control, treated, tasks, strict=True):
        correct = [x for arm in (control, treated) for x, k in zip(arm, tasks, strict=True) if k == task and x is not None]
        marks = [-0.5 if x is None else sum((x > o) - (x < o) for o in correct) / len(correct) for x in (c, t)]
        out.append(marks[1] - marks[0])
    return out


def test_ranks_are_those_within_a_task_and_p_that_of_an_enumeration_by_hand():
    rng = np.random.default_rng(9)
    tasks = ["a", "a", "b", "b", "a", "b", "b"]
    test = SequentialTest(alpha=0.1, looks=(7,), bar=0.0, futility=1.0, statistic="ranks")
    for _ in range(5):
        control, treated = arm(rng, 7, failures=0.3), arm(rng, 7, ratio=1.6, failures=0.3)
        control[0] = control[1]  # a tie, or two failures
        control[2:4] = [None if c is None else 20 * c for c in control[2:4]]
        evidence = ranks_by_hand(control, treated, tasks)
        assert test.decide(control, treated, tasks).p == pytest.approx(sequential_p_by_hand(evidence, (7,), 0.1)[1])


@pytest.mark.parametrize("kind", [{}, {"failures": 0.4}, {"spread": 1.0, "failures": 0.2}], ids=str)
def test_by_ranks_a_useless_skill_is_accepted_no_more_often_than_alpha(kind):
    test = SequentialTest(alpha=0.05, looks=(4, 6, 8), bar=0.0, futility=1.0, statistic="ranks")
    assert acceptance(test, ratio=1.0, trials=1000, **kind) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)
    gains = SequentialTest(alpha=0.1, min_ratio=1.5, looks=(4, 8), bar=0.0, futility=1.0, statistic="ranks")
    assert acceptance(gains, ratio=1.5, trials=600, **kind) <= 0.1 + 3 * math.sqrt(0.09 / 600)


def test_by_ranks_one_slow_candidate_does_not_drown_the_others():
    control, treated = [1.0, 1.02, 0.98, 1.01, 0.99, 1.03, 0.97, 1.0], [1.3, 1.25, 1.28, 0.3, 1.31, 1.27, 1.33, 1.29]
    assert SequentialTest(alpha=0.05, looks=(8,)).decide(control, treated).status == "reject"
    assert SequentialTest(alpha=0.05, looks=(8,), statistic="ranks").decide(control, treated).status == "accept"


def test_by_ranks_a_pair_with_one_failure_still_tells_of_speed():
    control, treated = [1.0, 1.1, None, None, 1.05, 0.95, None, 1.0], [None, 1.4, 1.5, 1.45, None, 1.5, 1.4, None]
    p = {s: SequentialTest(looks=(8,), statistic=s).decide(control, treated).p for s in ("differences", "ranks")}
    assert p["ranks"] < p["differences"] / 2
    repaired = SequentialTest(looks=(8,), statistic="ranks").decide([None] * 8, [1.5] * 8)
    assert repaired.status == "accept" and repaired.p == pytest.approx(1 / 256)
    broken = SequentialTest(looks=(8,), statistic="ranks").decide([None] * 8, [None] * 8)
    assert broken.status == "reject" and broken.p == 1.0


def test_by_ranks_tasks_of_other_speed_do_not_hide_a_gain():
    tasks, control = ["slow", "fast"] * 4, [1.0, 9.0, 1.1, 9.3, 0.95, 9.1, 1.05, 8.9]
    treated = [1.2 * c for c in control]
    test = SequentialTest(looks=(8,), statistic="ranks")
    assert test.decide(control, treated, tasks).p == pytest.approx(1 / 256)
    judge_failed = test.decide([*control, math.nan], [*treated, 0.1], [*tasks, "slow"])
    assert judge_failed.p == test.decide(control, treated, tasks).p


def test_every_pair_needs_its_task():
    with pytest.raises(ValueError, match="1 tasks are named for 2 pairs"):
        SequentialTest().decide([1.0, 1.0], [1.0, 2.0], ["a"])


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"statistic": "means"}, "'differences' or 'ranks'"),
        ({"looks": ()}, "ascending"),
        ({"looks": (8, 4)}, "ascending"),
        ({"alpha": 0.0}, "alpha"),
        ({"looks": (4,), "alpha": 0.05}, "4 pairs can't show an error rate of 0.05"),
        ({"min_ratio": 0.0}, "min_ratio"),
        ({"mixed_ratio": 0.5}, "mixed_ratio"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(numbers, said):
    with pytest.raises(ValueError, match=said):
        SequentialTest(**numbers)


def test_arms_must_pair_up():
    with pytest.raises(ValueError, match="do not form pairs"):
        SequentialTest().decide([1.0], [1.0, 2.0])


def test_verdicts_become_speedups_failures_and_gaps():
    def verdict(outcome, speedup=0.0, rewarded=True):
        return Verdict(outcome=outcome, stage="timed", reward=0.0, speedup=speedup, noisy=False, coverage=0.1, feedback="", speed_rewarded=rewarded)

    assert speedup_of(verdict("ok", 2.0)) == 2.0
    assert speedup_of(verdict("incorrect")) is None
    assert speedup_of(verdict("ok", 0.0)) is None, "without an honest speed there is no gain to show"
    assert speedup_of(verdict("ok", 2.0, rewarded=False)) is None, "nor is there with one that is not the candidate's own"
    assert math.isnan(speedup_of(verdict("infra_error"))) and math.isnan(speedup_of(verdict("cancelled")))
    assert score(None, fail_speedup=0.25) == score(0.1, fail_speedup=0.25) == math.log(0.25)
    assert score(2.0, fail_speedup=0.25) == math.log(2.0)


@pytest.mark.parametrize(
    ("first", "treated", "status"),
    [
        (1.0, 1.25, "accept"),
        (1.0, 1.19, "reject"),
        (1.5, 1.7, "reject"),
        (0.5, 1.1, "reject"),
        (None, 1.2, "accept"),
        (1.0, None, "reject"),
    ],
)
def test_the_papers_rule_takes_one_turn_that_beats_eager_and_the_first_turn(first, treated, status):
    decision = PaperRule().decide(first, treated)
    assert decision.status == status and decision.n == 1 and decision.p is None


@pytest.mark.parametrize("pair", [(math.nan, 2.0), (1.0, math.nan)])
def test_the_papers_rule_accepts_nothing_that_the_judge_could_not_judge(pair):
    decision = PaperRule().decide(*pair)
    assert (decision.status, decision.effect, decision.n) == ("reject", 1.0, 0)


def test_the_papers_rule_commits_the_false_improvements_that_the_paired_test_is_there_to_avoid():
    rng = np.random.default_rng(6)
    pairs = [(arm(rng, 1, spread=0.5)[0], arm(rng, 1, spread=0.5)[0]) for _ in range(500)]
    false_accepts = sum(PaperRule().decide(*pair).status == "accept" for pair in pairs) / 500
    assert false_accepts > 0.3
