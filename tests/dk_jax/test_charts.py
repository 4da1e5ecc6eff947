"""The report's charts show the numbers that they were given."""

import math
import re

import pytest

from dk_jax.evaluation import charts, charts_intervals, charts_scatter
from dk_jax.evaluation.charts_intervals import Band, Bar
from dk_jax.evaluation.charts_scatter import Point


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


def test_a_band_covers_its_interval_and_stops_where_nothing_is_known():
    band = Band(value=[0.5, 0.5, None, 0.2], low=[0.25, 0.0, None, None], high=[0.75, 1.0, None, None])
    axis = charts.Axis(label="share", text=charts.percent, low=0.0, high=1.0)
    svg = charts_intervals.band_chart("t", [0, 1, 2, 3], {"a": band}, x_axis=charts.Axis(label="p"), y_axis=axis)
    edge = re.search(r'd="M([^"]*)Z"', svg).group(1)
    (_, high), (_, top), (_, bottom), (_, low) = (tuple(map(float, point.split())) for point in edge.split("L"))
    assert top < high < low < bottom and high - top == pytest.approx((bottom - top) / 4, abs=0.2)
    assert len(re.findall(r'stroke-width="2"', svg)) == 2, "a line before the gap, and what is left after it"
    assert "p 1: a 50 % (0 % to 100 %)" in svg and "p 2: a –" in svg and "p 3: a 20 %<" in svg


def test_whiskers_of_several_series_stand_side_by_side():
    one = Band(value=[1.0, 2.0], low=[0.5, 1.0], high=[2.0, 4.0])
    axis = charts.Axis(label="x")
    svg = charts_intervals.band_chart("t", [1, 2], {"a": one, "b": one}, x_axis=axis, y_axis=axis, intervals="whiskers")
    (a1, a2), (b1, b2) = ([float(x) for x in re.findall(rf'<circle cx="([\d.]+)"[^>]*series-{s}\)', svg)] for s in (1, 2))
    assert a1 < b1 < a2 < b2 and 'stroke-dasharray' in svg, "told apart without colours"


def test_level_bars_are_as_long_as_their_values_and_published_ones_are_hatched():
    bars = [Bar(name="own <b>", value=0.5, low=0.25, high=0.75), Bar(name="theirs", value=0.25, series=0)]
    svg = charts_intervals.level_bars("t", bars, axis=charts.Axis(label="share", text=charts.percent, high=1.0))
    (own, _), (theirs, fill) = re.findall(r'<rect x="[\d.]+" y="[\d.]+" width="([\d.]+)" height="\d+" fill="([^"]+)"', svg)
    assert float(own) == pytest.approx(2 * float(theirs), abs=0.11) and fill.startswith("url(#published")
    assert "theirs: 25 %, as published" in svg and "own &lt;b&gt;: 50 % (25 % to 75 %)" in svg and "<b>" not in svg


def test_every_task_is_in_the_scatter_and_what_has_no_speedup_lies_in_a_margin():
    points = [Point(name="faster", x=1.0, y=4.0), Point(name="unsure", x=2.0, y=2.0, noisy=True), Point(name="lost", x=0.5, y=None)]
    svg = charts_scatter.speedup_scatter("t", points, x_label="a", y_label="b")
    (x1, y1), (x2, y2) = ((float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg))
    assert x1 < x2 and y1 < y2, "further right is faster in a, higher faster in b"
    diagonal = [float(v) for v in re.search(r'M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)" stroke="var\(--muted\)"', svg).groups()]
    share = (x2 - diagonal[0]) / (diagonal[2] - diagonal[0])
    assert y2 == pytest.approx(diagonal[1] + share * (diagonal[3] - diagonal[1]), abs=0.2), "equal speedups lie on the diagonal"
    assert "lost: a 0.50×, b nothing that counts" in svg and "unsure: a 2.00×, b 2.00× (noisy)" in svg
    assert ">none</text>" in svg and ">none</text>" not in charts_scatter.speedup_scatter("t", points[:2], x_label="a", y_label="b")
    assert "<svg" in charts_scatter.speedup_scatter("t", [], x_label="a", y_label="b")
