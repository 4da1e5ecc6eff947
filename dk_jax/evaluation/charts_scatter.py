"""A scatter of speedups task by task as inline SVG, both axes logarithmic, with the diagonal and the lines of speedup 1.

A task that has no speedup that counts on a side lies in that side's margin, so that no task is missing from the picture.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from html import escape

from dk_jax.evaluation.charts import clipped, text_at

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 480, 400, 46, 40, 42, 14
MARGIN = 26
"""Room beside the axes for what has no speedup on a side."""
_MARKS = [m * 10.0**e for e in range(-4, 5) for m in (1, 2, 5)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One task: its name, its speedups on the two axes (None: nothing that counts), and whether the clock was unsure of them."""

    name: str
    x: float | None
    y: float | None
    noisy: bool = False


def speedup_scatter(title: str, points: Sequence[Point], *, x_label: str, y_label: str, series: int = 1) -> str:
    """The scatter; filled circles are sure, rings noisy, crosses in the margins have nothing that counts on that side."""
    known = [v for p in points for v in (p.x, p.y) if v is not None] or [1.0]
    low, high = _ends(min(known), max(known))
    some_without = any(p.x is None or p.y is None for p in points)
    floor, margin = HEIGHT - BOTTOM, MARGIN if some_without else 0
    a, b, c, d = LEFT + margin, WIDTH - RIGHT, floor - margin, TOP

    def x(value: float) -> float:
        return a + (b - a) * _share(value, low, high)

    def y(value: float) -> float:
        return c + (d - c) * _share(value, low, high)

    ink = f"var(--series-{series})"
    parts = [text_at(LEFT, 12, clipped(title), size=13, colour="var(--ink)", weight=600), text_at(LEFT, 27, f"up: {clipped(y_label)}")]
    if some_without:
        parts.append(f'<path d="M{LEFT} {floor}H{b}V{c}H{a}V{d}H{LEFT}Z" fill="var(--grid)"/>')
        parts.append(text_at(LEFT - 6, floor - margin / 2 + 4, "none", anchor="end"))
        parts.append(text_at(LEFT + margin / 2, floor + 16, "none", anchor="middle"))
    marks = [m for m in _MARKS if low * 0.999 <= m <= high * 1.001]
    marks = [m for m in marks if len(marks) < 9 or f"{m:e}"[0] == "1"]
    for mark in marks:
        line = "var(--muted)" if mark == 1 else "var(--grid)"
        parts.append(f'<path d="M{x(mark):.1f} {c}V{d}M{a} {y(mark):.1f}H{b}" stroke="{line}"/>')
        if not some_without or x(mark) - LEFT > 44:  # beside the margin's own label
            parts.append(text_at(x(mark), floor + 16, f"{mark:g}×", anchor="middle"))
        if not some_without or floor - y(mark) > 34:
            parts.append(text_at(LEFT - 6, y(mark) + 4, f"{mark:g}×", anchor="end"))
    parts.append(f'<path d="M{a} {c}L{b} {d}" stroke="var(--muted)" stroke-dasharray="4 3"/>')
    for p in points:
        at_x = x(p.x) if p.x is not None else LEFT + margin / 2
        at_y = y(p.y) if p.y is not None else floor - margin / 2
        said = ", ".join(f"{label} {f'{v:.2f}×' if v is not None else 'nothing that counts'}" for label, v in ((x_label, p.x), (y_label, p.y)))
        tip = f"<title>{escape(f'{p.name}: {said}' + (' (noisy)' if p.noisy else ''))}</title>"
        if p.x is None or p.y is None:
            mark = f'<path d="M{at_x - 3.5:.1f} {at_y - 3.5:.1f}l7 7m0 -7l-7 7" stroke="{ink}" stroke-width="1.6" fill="none">{tip}</path>'
        elif p.noisy:
            mark = f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="4" fill="var(--card)" stroke="{ink}" stroke-width="1.6">{tip}</circle>'
        else:
            mark = f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="4" fill="{ink}" fill-opacity=".75">{tip}</circle>'
        parts.append(mark)
    parts.append(text_at(b, HEIGHT - 6, f"across: {clipped(x_label)}", anchor="end"))
    told = f"{len(points)} tasks; across: {x_label}; up: {y_label}; above the diagonal the latter is faster"
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"<desc>{escape(told)}</desc>{''.join(parts)}</svg>"
    )


def _ends(low: float, high: float) -> tuple[float, float]:
    """Ends of an axis that hold the data and 1, at least a factor of 4 apart."""
    low, high = min(low, 0.8) / 1.15, max(high, 1.25) * 1.15
    if high / low < 4:
        centre = math.sqrt(low * high)
        low, high = centre / 2, centre * 2
    return low, high


def _share(value: float, low: float, high: float) -> float:
    return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
