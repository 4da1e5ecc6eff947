"""The report's charts show the numbers that they were given."""

import math
import re

import pytest

from dk_jax.evaluation import charts


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.03, 0.031), (-3, 7), (0, 12345), (2, 2), (0, 0), (0.5, 1e6)]
)
def test_ticks_are_round_evenly_spaced_and_cover_the_data(low, high):
    marks = charts.ticks(low, high)
    steps = [b - a for a, b in zip(marks, marks[1:], strict=False)]
    assert marks[0] <= low and marks[-1] >= high and 2 <= len(marks) <= 8
    assert max(steps) - min(steps) < 1e-6 * max(steps)
    digits = f"{steps[0]:.6e}".split("e")[0].rstrip("0").rstrip(".")
    assert digits in ("1", "2", "2.5", "5")


def test_an_axis_without_an_end_is_refused():
    with pytest.raises(ValueError, match="finite"):
        charts.ticks(0.0, math.inf)


def test_thinning_keeps_the_mean_and_bounds_the_points():
    x = list(range(1000))
    thinned_x, y = charts.thin(x, [2.0 * v for v in x], most=240)
    assert len(thinned_x) == len(y) <= 240
    assert y == [2 * v for v in thinned_x]
    assert sum(thinned_x) / len(thinned_x) == pytest.approx(499.5)
    assert charts.thin([1, 2], [3, 4], most=240) == [[1, 2], [3, 4]]


def test_a_running_mean_is_shorter_at_the_ends():
    assert charts.running_mean([0.0, 3.0, 6.0, 9.0], 3) == [1.5, 3.0, 6.0, 7.5]


def test_a_higher_value_is_drawn_higher_and_a_later_one_further_right():
    axis = charts.Axis(label="step")
    svg = charts.line_chart(
        "t", [1, 2, 3], {"y": [0.0, 10.0, 5.0]}, x_axis=axis, y_axis=charts.Axis(label="u")
    )
    path = re.search(r'<path d="M([^"]*)" fill="none"', svg).group(1)
    (x1, y1), (x2, y2), (x3, y3) = (tuple(map(float, point.split())) for point in path.split("L"))
    assert x1 < x2 < x3 and x2 - x1 == pytest.approx(x3 - x2)
    assert y2 < y3 < y1 and y3 - y2 == pytest.approx(y1 - y3, abs=0.11)
    assert "step 2: y 10" in svg, "a tooltip gives the numbers"


def test_stacked_parts_lie_on_one_another():
    axis = charts.Axis(label="step")
    parts = {"a": [2.0, 1.0], "b": [3.0, 1.0]}
    svg = charts.stacked_columns("t", [1, 2], parts, x_axis=axis, y_axis=charts.Axis(label="s"))
    rects = re.findall(r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)" fill="var\(--series-(\d)\)"', svg)
    (a_top, a_height, _), (b_top, b_height, _) = ((float(y), float(h), s) for y, h, s in rects[:2])
    assert b_top + b_height == pytest.approx(a_top, abs=0.11)
    assert b_height / a_height == pytest.approx(1.5, rel=0.02)


def test_one_point_is_a_chart_too():
    axis = charts.Axis(label="step")
    assert "<circle" in charts.line_chart("t", [7], {"y": [1.0]}, x_axis=axis, y_axis=axis, smooth=5)
    assert "<rect" in charts.stacked_columns("t", [7], {"y": [1.0]}, x_axis=axis, y_axis=axis)
