"""Fast_p and its bootstrap: values by hand, intervals that cover, comparisons over the same tasks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dk_jax.evaluation.fast_p import THRESHOLDS, Measured, Scores, difference, score


def wrong(task, compiled=True):
    return Measured(task=task, speedup=0.0, correct=False, compiled=compiled)


HAND = [
    Measured(task="a", speedup=1.6), Measured(task="a", speedup=1.0), wrong("b", compiled=False), Measured(task="b", speedup=2.5),
    Measured(task="c", speedup=0.0), Measured(task="c", speedup=0.5), wrong("c"), Measured(task="c", speedup=1.3),
]  # fmt: skip


def values(scores: Scores) -> list[float]:
    return [scores.fast[p].value for p in THRESHOLDS] + [scores.compiled.value, scores.geomean.value, scores.mean.value]


def test_values_are_those_by_hand():
    found = score(HAND, resamples=50)
    assert (found.tasks, found.samples) == (3, 8)
    # 1.0 is not above 1, and a correct kernel whose speed does not count is correct all the same.
    assert values(found) == pytest.approx([6 / 8, 3 / 8, 3 / 8, 2 / 8, 1 / 8, 7 / 8, (1.6 * 2.5 * 0.5 * 1.3) ** 0.2, 6.9 / 8])
    for value in (*found.fast.values(), found.compiled, found.geomean, found.mean):
        assert value.low <= value.value <= value.high


def test_order_does_not_matter_and_the_seed_does():
    rng = np.random.default_rng(0)
    shuffled = [HAND[i] for i in rng.permutation(len(HAND))]
    by_task = sorted(shuffled, key=lambda m: m.task)
    assert values(score(shuffled)) == pytest.approx(values(score(HAND)))
    assert score(by_task, seed=3) == score(by_task, seed=3) != score(by_task, seed=4)


def test_no_task_is_left_out_where_nothing_is_right():
    found = score([wrong("a"), wrong("b")], resamples=20)
    assert found.tasks == 2 and found.fast[0.0].value == found.mean.value == 0.0 and math.isnan(found.geomean.value)


def test_intervals_cover_what_they_are_of():
    """Tasks with chances of their own, some samples each: the interval of Fast_1 holds the true mean chance about as often as it says."""
    rng = np.random.default_rng(1)
    hits, times = 0, 60
    for trial in range(times):
        chances = rng.beta(1.0, 1.0, 40)  # their mean is 1/2
        measured = [Measured(task=str(t), speedup=2.0 if rng.random() < chance else 0.5) for t, chance in enumerate(chances) for _ in range(4)]
        fast = score(measured, seed=trial, resamples=150).fast[1.0]
        hits += fast.low <= 0.5 <= fast.high
    assert 0.87 <= hits / times <= 1.0


def test_the_clocks_error_widens_an_interval_and_moves_no_value():
    calm = [Measured(task=str(i), speedup=1.05) for i in range(30)]
    noisy = [Measured(task=str(i), speedup=1.05, spread=0.1) for i in range(30)]
    a, b = score(calm), score(noisy)
    assert values(a) == values(b) and (a.mean.low, a.mean.high) == (pytest.approx(1.05), pytest.approx(1.05))
    assert b.mean.high - b.mean.low > 0.03 and b.fast[1.0].low < 1.0 == a.fast[1.0].low


def test_a_difference_is_over_shared_tasks_drawn_together():
    rng = np.random.default_rng(2)
    tasks = rng.lognormal(0.0, 1.0, 60)  # tasks differ far more than the two policies
    one = [Measured(task=str(i), speedup=float(s)) for i, s in enumerate(tasks)]
    better = [Measured(task=str(i), speedup=float(1.1 * s)) for i, s in enumerate(tasks)] + [Measured(task="alone", speedup=9.0)]
    found, shared = difference(one, better, lambda scores: scores.geomean, resamples=400)
    assert shared == 60 and 0 < found.low < found.value < found.high
    apart = score(better).geomean
    assert found.high - found.low < 0.4 * (apart.high - apart.low)
    assert difference(one, one, lambda scores: scores.fast[1.5], resamples=50)[0].value == 0.0
    with pytest.raises(ValueError, match="no task in common"):
        difference(one, [Measured(task="x", speedup=1.0)], lambda scores: scores.mean)


def test_what_can_not_be_scored_is_refused():
    with pytest.raises(ValueError, match="no sample"):
        score([])
    for fields in (dict(speedup=-1.0), dict(speedup=math.nan), dict(speedup=1.0, spread=-0.1), dict(speedup=2.0, correct=False)):
        with pytest.raises(ValueError, match="task 'a'"):
            Measured(task="a", **fields)
