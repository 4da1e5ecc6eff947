"""Small charts as inline SVG text: lines, stacked columns, paired bars. No script, nothing fetched.

Colours are CSS variables of the page (`--ink`, `--muted`, `--grid`, `--series-1` ... `--series-8`,
`--before`), so that a chart follows it into dark mode. Hovering a point shows its numbers by way of SVG's own
`<title>`; a chart's `<desc>` tells in words what it shows. Charts with intervals: dk_jax.evaluation.charts_intervals.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 480, 240
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 40, 38
BEFORE, AFTER = "var(--before)", "var(--series-1)"
MAX_POINTS = 240  # more are averaged together: a chart is 480 units wide and the page stays small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis.

    Attributes:
        label: what is shown, with its unit.
        text: how a value is written, on ticks and in tooltips.
        low, high: ends of the axis where they are fixed; None takes them from the data.
        whole: the values are whole numbers, so there are no ticks between them.
    """

    label: str
    text: Callable[[float], str] = lambda value: f"{value:g}"
    low: float | None = None
    high: float | None = None
    whole: bool = False


def percent(value: float) -> str:
    """A share as per cent."""
    return f"{100 * value:.0f} %"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers (1, 2, 2.5 or 5 times a power of ten apart) that cover [low, high]."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"an axis needs finite ends, not {low} and {high}")
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over `window` values, over fewer at the ends."""
    half = window // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def thin(x: Sequence[float], *ys: Sequence[float], most: int = MAX_POINTS) -> list[list[float]]:
    """Averages neighbours so that at most `most` points remain; returns x and each y."""
    size = -(-len(x) // most) if x else 1
    columns = [x, *ys]
    if size == 1:
        return [list(column) for column in columns]
    starts = range(0, len(x), size)
    return [[sum(c[s : s + size]) / len(c[s : s + size]) for s in starts] for c in columns]


def line_chart(
    title: str,
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    *,
    x_axis: Axis,
    y_axis: Axis,
    smooth: int = 1,
) -> str:
    """Lines over a common x.

    Args:
        title: heading of the chart.
        x: at least one value, ascending.
        lines: values by name; up to four lines, each as long as x.
        smooth: 1, or the window of a running mean, which is then drawn strongly over the faint data.
    """
    names, (x, *values) = list(lines), thin(x, *lines.values())
    frame = Frame(title, x, [v for column in values for v in column], x_axis, y_axis)
    legend = [(name, f"var(--series-{i})", False) for i, name in enumerate(names, 1)]
    legend = legend if len(names) > 1 else []
    for i, column in enumerate(values, 1):
        colour = f"var(--series-{i})"
        smoothed = smooth > 1 and len(x) > smooth
        frame.path(x, column, colour, width=1 if smoothed else 2, opacity=0.4 if smoothed else 1)
        if smoothed:
            frame.path(x, running_mean(column, smooth), colour, width=2.25)
            if len(names) == 1:
                legend = [("each step", colour, True), (f"mean of {smooth}", colour, False)]
    frame.legend(legend)
    frame.tooltips(x, dict(zip(names, values, strict=True)))
    return frame.svg()


def stacked_columns(
    title: str, x: Sequence[float], parts: Mapping[str, Sequence[float]], *, x_axis: Axis, y_axis: Axis
) -> str:
    """Columns whose parts are stacked in the order given; values must not be negative."""
    names, (x, *values) = list(parts), thin(x, *parts.values(), most=MAX_POINTS // 2)
    totals = [sum(column[i] for column in values) for i in range(len(x))]
    frame = Frame(title, x, [0.0, *totals], x_axis, dataclasses.replace(y_axis, low=0.0), inset=True)
    width = frame.slot * 0.78
    for i in range(len(x)):
        base = 0.0
        for s, column in enumerate(values, 1):
            top, bottom = frame.y(base + column[i]), frame.y(base)
            frame.add(
                f'<rect x="{frame.x(x[i]) - width / 2:.1f}" y="{top:.1f}" width="{width:.2f}" '
                f'height="{max(bottom - top, 0):.1f}" fill="var(--series-{s})"/>'
            )
            base += column[i]
    frame.legend([(name, f"var(--series-{s})", False) for s, name in enumerate(names, 1)])
    frame.tooltips(x, dict(zip(names, values, strict=True)) | ({"total": totals} if len(names) > 1 else {}))
    return frame.svg()


def before_and_after(
    title: str, groups: Mapping[str, tuple[float | None, float | None]], *, y_axis: Axis
) -> str:
    """Two upright bars in each group, before and after, with their values above; None leaves one out."""
    values = [0.0, *(v for pair in groups.values() for v in pair if v is not None)]
    frame = Frame(title, [], values, None, dataclasses.replace(y_axis, low=0.0))
    slot = (WIDTH - LEFT - RIGHT) / len(groups)
    width = min(slot * 0.36, 40.0)
    for g, (group, pair) in enumerate(groups.items()):
        middle = LEFT + (g + 0.5) * slot
        frame.add(text_at(middle, HEIGHT - BOTTOM + 16, group, anchor="middle"))
        for left, value, name, colour in zip(
            (middle - width, middle), pair, ("before", "after"), (BEFORE, AFTER), strict=True
        ):
            if value is None:
                continue
            top, text = frame.y(value), y_axis.text(value)
            frame.add(
                f'<rect x="{left + 1:.1f}" y="{top:.1f}" width="{width - 2:.1f}" '
                f'height="{HEIGHT - BOTTOM - top:.1f}" fill="{colour}">'
                f"<title>{escape(f'{group}, {name}: {text}')}</title></rect>"
            )
            number, at = text.removesuffix(" %"), left + width / 2
            frame.add(text_at(at, top - 4, number, anchor="middle", size=10.5, colour="var(--ink)"))
    shown = zip(("before RL", "after RL"), (BEFORE, AFTER), zip(*groups.values(), strict=True), strict=True)
    frame.legend(
        [(name, colour, False) for name, colour, column in shown if any(v is not None for v in column)]
    )
    return frame.svg()


def pair_of_bars(before: float | None, after: float | None, top: float) -> str:
    """Two thin level bars for a table cell, before over after; None leaves one out."""
    rows = []
    for i, (value, colour) in enumerate(((before, BEFORE), (after, AFTER))):
        if value is not None:
            width = 100 * min(max(value / top, 0.0), 1.0) if top > 0 else 0.0
            size = f'width="{max(width, 0.6):.1f}" height="6"'
            rows.append(f'<rect x="0" y="{1 + 7 * i}" {size} fill="{colour}"/>')
    head = '<svg class="pair" viewBox="0 0 100 15" preserveAspectRatio="none" aria-hidden="true">'
    return f"{head}{''.join(rows)}</svg>"


def clipped(text: str, most: int = 56) -> str:
    """As much of a text as there is room for."""
    return text if len(text) <= most else text[: most - 1] + "…"


def text_at(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: float = 11,
    colour: str = "var(--muted)",
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="{colour}">{escape(text)}</text>'
    )


class Frame:
    """Axes, grid and title of a chart, and the way from data to the picture's units."""

    def __init__(
        self,
        title: str,
        x: Sequence[float],
        y: Sequence[float],
        x_axis: Axis | None,
        y_axis: Axis,
        *,
        inset: bool = False,
    ):
        self.title, self.x_axis, self.y_axis = title, x_axis, y_axis
        self._parts: list[str] = []
        low = min(y) if y_axis.low is None else y_axis.low
        high = max(y) if y_axis.high is None else y_axis.high
        marks = ticks(low, high)
        self._y_low, self._y_high = marks[0], marks[-1]
        for mark in marks:
            if y_axis.whole and mark % 1:
                continue
            at = self.y(mark)
            self.add(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="var(--grid)"/>')
            self.add(text_at(LEFT - 6, at + 3.5, y_axis.text(mark), anchor="end"))
        self.add(text_at(LEFT, 12, clipped(title), size=13, colour="var(--ink)", weight=600))
        self.add(text_at(LEFT, 27, y_axis.label))
        if x_axis is not None:
            self._x_axis(x, x_axis, inset)

    def _x_axis(self, x: Sequence[float], axis: Axis, inset: bool) -> None:
        room = WIDTH - LEFT - RIGHT
        self._x_low = x[0] if axis.low is None else axis.low
        self._x_high = max(x[-1] if axis.high is None else axis.high, self._x_low + 1e-9)
        span = self._x_high - self._x_low
        steps = [b - a for a, b in zip(x, x[1:], strict=False)]
        self.slot = room * (min(steps) / (span + min(steps))) if steps else min(40.0, room)
        pad = self.slot / 2 if inset else 0.0
        self._x_from, self._x_to = LEFT + pad, WIDTH - RIGHT - pad
        if not steps:
            self._x_low, self._x_high = x[0] - 0.5, x[0] + 0.5  # one point stands in the middle
        low, high = self._x_low - 1e-6, self._x_high + 1e-6
        marks = [m for m in ticks(low, high, 7) if low <= m <= high and not (axis.whole and m % 1)]
        for mark in marks if steps else [x[0]]:
            at = self.x(mark)
            self.add(f'<path d="M{at:.1f} {HEIGHT - BOTTOM}v4" stroke="var(--muted)"/>')
            self.add(text_at(at, HEIGHT - BOTTOM + 16, axis.text(mark), anchor="middle"))
        self.add(text_at(WIDTH - RIGHT, HEIGHT - 6, axis.label, anchor="end"))

    def x(self, value: float) -> float:
        share = (value - self._x_low) / (self._x_high - self._x_low)
        return self._x_from + share * (self._x_to - self._x_from)

    def y(self, value: float) -> float:
        share = (min(max(value, self._y_low), self._y_high) - self._y_low) / (self._y_high - self._y_low)
        return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)

    def add(self, svg: str) -> None:
        self._parts.append(svg)

    def path(
        self, x: Sequence[float], y: Sequence[float], colour: str, *, width: float, opacity: float = 1.0
    ) -> None:
        points = [(self.x(a), self.y(b)) for a, b in zip(x, y, strict=True)]
        if len(points) == 1:
            self.add(f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3" fill="{colour}"/>')
            return
        d = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        self.add(
            f'<path d="{d}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}" '
            'stroke-linejoin="round" stroke-linecap="round"/>'
        )

    def legend(self, entries: Sequence[tuple[str, str, bool]]) -> None:
        """Names with a swatch each, from the right of the title line."""
        right = WIDTH - RIGHT
        for name, colour, faint in reversed(entries):
            right -= 6.5 * len(name)
            self.add(text_at(right, 12, name))
            right -= 16
            self.add(
                f'<rect x="{right:.1f}" y="{7 if faint else 5}" width="11" height="{3 if faint else 7}" '
                f'rx="1.5" fill="{colour}" fill-opacity="{0.45 if faint else 1}"/>'
            )
            right -= 10

    def tooltips(self, x: Sequence[float], values: Mapping[str, Sequence[float]]) -> None:
        """One invisible column a point; the browser shows its title."""
        edges = [self.x(v) for v in x]
        between = [(a + b) / 2 for a, b in zip(edges, edges[1:], strict=False)]
        lefts, rights = [LEFT, *between], [*between, WIDTH - RIGHT]
        label = self.x_axis.label if self.x_axis is not None else ""
        for i, (left, right) in enumerate(zip(lefts, rights, strict=True)):
            numbers = ", ".join(f"{name} {self.y_axis.text(column[i])}" for name, column in values.items())
            tip = escape(f"{label} {self.x_axis.text(x[i])}: {numbers}")
            self.add(
                f'<rect x="{left:.1f}" y="{TOP}" width="{max(right - left, 0.1):.1f}" '
                f'height="{HEIGHT - BOTTOM - TOP}" fill="transparent"><title>{tip}</title></rect>'
            )

    def svg(self) -> str:
        across = f", by {self.x_axis.label}" if self.x_axis is not None else ""
        return (
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">'
            f"<desc>{escape(f'{self.title}: {self.y_axis.label}{across}')}</desc>{''.join(self._parts)}</svg>"
        )
