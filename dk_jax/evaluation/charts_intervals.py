"""Charts of values with intervals as inline SVG: lines with bands or whiskers, and level bars. No script, nothing fetched.

Series are told apart by dashes and not by colour alone; the same numbers are for the caller to give as a table beside (`markup.figure`).
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Literal

from dk_jax.evaluation.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Frame, clipped, text_at

DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 4", "8 2 2 2 2 2")
"""Of a line by its place among the series."""
BAR, GAP, NAMES_CHARS = 17, 7, 28


@dataclasses.dataclass(frozen=True, kw_only=True)
class Band:
    """Values of one series with their intervals, each as long as the chart's x; None where there is none."""

    value: Sequence[float | None]
    low: Sequence[float | None]
    high: Sequence[float | None]

    @property
    def known(self) -> list[float]:
        return [v for column in (self.value, self.low, self.high) for v in column if v is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """A level bar: its name, value with interval (None where it has none), and its series, or 0 for a figure as published elsewhere."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    series: int = 1


def colour(series: int) -> str:
    """Of the series at a place, from 1."""
    return f"var(--series-{series})"


def band_chart(
    title: str, x: Sequence[float], bands: Mapping[str, Band], *, x_axis: Axis, y_axis: Axis, intervals: Literal["band", "whiskers"] = "band"
) -> str:
    """Lines with intervals over a common x, ascending; up to eight. With whiskers also points, which lie side by side at each x.

    The legend is the caller's: names may be long.
    """
    known = [v for band in bands.values() for v in band.known]
    frame = Frame(title, x, known or [0.0, 1.0], x_axis, y_axis, inset=intervals == "whiskers")
    for place, band in enumerate(bands.values()):
        ink, dash = colour(place + 1), DASHES[place]
        shift = 7.0 * (place - (len(bands) - 1) / 2) if intervals == "whiskers" else 0.0
        at = [frame.x(v) + shift for v in x]
        if intervals == "band":
            for run in _runs(band.value, band.low, band.high):
                edge = [(at[i], frame.y(band.high[i])) for i in run] + [(at[i], frame.y(band.low[i])) for i in reversed(run)]
                d = "L".join(f"{a:.1f} {b:.1f}" for a, b in edge)
                frame.add(f'<path d="M{d}Z" fill="{ink}" fill-opacity=".13" stroke="none"/>')
        else:
            for i in (i for run in _runs(band.value, band.low, band.high) for i in run):
                frame.add(_whisker(at[i], frame.y(band.low[i]), frame.y(band.high[i]), ink))
        for run in _runs(band.value):
            points = [(at[i], frame.y(band.value[i])) for i in run]
            d = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
            frame.add(
                f'<path d="M{d}" fill="none" stroke="{ink}" stroke-width="2" stroke-linejoin="round"'
                + (f' stroke-dasharray="{dash}"/>' if dash else "/>")
            )
            if intervals == "whiskers" or len(run) == 1:
                frame.add("".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.2" fill="{ink}"/>' for a, b in points))
    _tips(frame, x, bands)
    return frame.svg()


def _runs(*columns: Sequence[float | None]) -> list[list[int]]:
    """Stretches of neighbouring places at which every column has a value."""
    found: list[list[int]] = []
    for i, values in enumerate(zip(*columns, strict=True)):
        if any(v is None for v in values):
            continue
        if found and found[-1][-1] == i - 1:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def _whisker(x: float, low: float, high: float, ink: str) -> str:
    d = f"M{x - 3:.1f} {high:.1f}h6M{x:.1f} {high:.1f}V{low:.1f}M{x - 3:.1f} {low:.1f}h6"
    return f'<path d="{d}" stroke="{ink}" stroke-width="1.2" stroke-opacity=".75" fill="none"/>'


def _tips(frame: Frame, x: Sequence[float], bands: Mapping[str, Band]) -> None:
    edges = [frame.x(v) for v in x]
    between = [(a + b) / 2 for a, b in zip(edges, edges[1:], strict=False)]
    for i, (left, right) in enumerate(zip([LEFT, *between], [*between, WIDTH - RIGHT], strict=True)):
        said = "; ".join(f"{name} {interval_text(b.value[i], b.low[i], b.high[i], frame.y_axis)}" for name, b in bands.items())
        tip = escape(f"{frame.x_axis.label} {frame.x_axis.text(x[i])}: {said}")
        frame.add(
            f'<rect x="{left:.1f}" y="{TOP}" width="{max(right - left, 0.1):.1f}" height="{HEIGHT - BOTTOM - TOP}" '
            f'fill="transparent"><title>{tip}</title></rect>'
        )


def interval_text(value: float | None, low: float | None, high: float | None, axis: Axis) -> str:
    """A value with its interval in words; "–" where there is none."""
    if value is None:
        return "–"
    return axis.text(value) + (f" ({axis.text(low)} to {axis.text(high)})" if low is not None and high is not None else "")


def level_bars(title: str, bars: Sequence[Bar], *, axis: Axis) -> str:
    """Level bars under one another, each with its name, whiskers and number; those as published are hatched outlines.

    Args:
        axis: of the values; its `high` is the longest that a bar can be, by default the largest value or interval's end.
    """
    top = axis.high if axis.high is not None else max([b.high or b.value for b in bars], default=0.0) or 1.0
    left, right, head = 176.0, WIDTH - 44.0, 34.0
    height = head + len(bars) * (BAR + GAP) + 22
    marks, hatch = [top * i / 4 for i in range(5)], f"published-{zlib.crc32(title.encode()):x}"
    parts = [text_at(0, 12, title, size=13, colour="var(--ink)", weight=600), text_at(0, 27, axis.label)]

    def x(value: float) -> float:
        return left + (right - left) * min(max(value / top, 0.0), 1.0)

    for mark in marks:
        parts.append(f'<path d="M{x(mark):.1f} {head}V{height - 20:.1f}" stroke="var(--grid)"/>')
        parts.append(text_at(x(mark), height - 7, axis.text(mark), anchor="middle"))
    for i, bar in enumerate(bars):
        y, published = head + i * (BAR + GAP) + GAP / 2, bar.series == 0
        ink = "var(--muted)" if published else colour(bar.series)
        fill = f"url(#{hatch})" if published else ink
        said = interval_text(bar.value, bar.low, bar.high, axis)
        tip = f"<title>{escape(f'{bar.name}: {said}' + (', as published' if published else ''))}</title>"
        parts.append(text_at(left - 6, y + 12.5, clipped(bar.name, NAMES_CHARS), anchor="end", colour="var(--muted)" if published else "var(--ink)"))
        edge = f' stroke="{ink}"' if published else ""
        parts.append(
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(x(bar.value) - left, 0.8):.1f}" height="{BAR}" fill="{fill}"{edge}>{tip}</rect>'
        )
        end = x(bar.value)
        if bar.low is not None and bar.high is not None:
            a, b, middle = x(bar.low), x(bar.high), y + BAR / 2
            end = max(end, b)
            d = f"M{a:.1f} {middle - 4:.1f}v8M{a:.1f} {middle:.1f}H{b:.1f}M{b:.1f} {middle - 4:.1f}v8"
            parts.append(f'<path d="{d}" stroke="var(--ink)" stroke-width="1.2" fill="none"/>')
        parts.append(text_at(min(end + 5, WIDTH - 40), y + 12.5, axis.text(bar.value), colour="var(--ink)"))
    pattern = (
        f'<defs><pattern id="{hatch}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path d="M0 0V6" stroke="var(--muted)" stroke-width="2.2"/></pattern></defs>'
        if any(bar.series == 0 for bar in bars)
        else ""
    )
    told = "; ".join(f"{bar.name} {interval_text(bar.value, bar.low, bar.high, axis)}" for bar in bars)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {math.ceil(height)}" role="img" aria-label="{escape(title)}">'
        f"<desc>{escape(f'{axis.label}: {told}')}</desc>{pattern}{''.join(parts)}</svg>"
    )
