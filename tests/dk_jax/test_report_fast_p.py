"""Curves of Fast_p and several differences at once: against counting by hand and one at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dk_jax.evaluation.fast_p import THRESHOLDS, Measured, curve, difference, differences, score

SAMPLES = st.lists(
    st.builds(lambda task, s: Measured(task=task, speedup=s, correct=s > 0), st.sampled_from("abc"), st.sampled_from([0.0, 0.5, 1.0, 1.5, 4.0])),
    min_size=1,
    max_size=12,
)
PS = [0.0, 0.25, 0.5, 1.0, 1.2, 1.5, 2.0, 4.0]


@settings(max_examples=60, deadline=None)
@given(SAMPLES)
def test_a_curve_counts_what_is_above_each_p_and_never_rises_from_the_share_that_is_correct(measured):
    value, low, high = curve(measured, PS, resamples=30)
    assert value.tolist() == pytest.approx([np.mean([m.correct if p == 0 else m.speedup > p for m in measured]) for p in PS])
    assert (np.diff(value) <= 1e-12).all() and (low <= high + 1e-12).all() and (low >= 0).all() and (high <= 1).all()


def test_a_curve_has_the_values_and_intervals_of_the_scores():
    rng = np.random.default_rng(0)
    measured = [Measured(task=f"t{i % 9}", speedup=float(s), spread=0.02) for i, s in enumerate(np.exp(rng.normal(0.1, 0.5, 45)))]
    own = score(measured, seed=5, resamples=200)
    value, low, high = curve(measured, THRESHOLDS, seed=5, resamples=200)
    for i, p in enumerate(THRESHOLDS):
        assert (value[i], low[i], high[i]) == pytest.approx((own.fast[p].value, own.fast[p].low, own.fast[p].high))


def test_several_differences_are_those_of_each_alone():
    rng = np.random.default_rng(1)
    sides = [[Measured(task=f"t{i % 4}", speedup=float(s)) for i, s in enumerate(np.exp(rng.normal(m, 0.5, 12)))] for m in (0.0, 0.4)]
    of = [lambda s: s.fast[1.0], lambda s: s.geomean, lambda s: s.mean]
    found, shared = differences(*sides, of, seed=2, resamples=50)
    assert shared == 4 and found == [difference(*sides, pick, seed=2, resamples=50)[0] for pick in of]
