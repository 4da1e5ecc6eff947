"""Chart of scripts/bench/verification.py's result: share accepted by true effect, and what a decision costs. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

LINES = {
    "paper": ("published rule: one turn", "#b2182b", "--", "s"),
    "default": ("paired, default: 0.1, 8 pairs", "#7f7f7f", "-", "v"),
    "differences": ("paired, differences: 0.05, 64 pairs", "#e08214", "-", "o"),
    "ranks": ("paired, ranks: 0.05, 64 pairs", "#2166ac", "-", "D"),
}
BLUES, GREYS = ("#c6dbef", "#6baed6", "#3182bd", "#08519c"), ("#e3e3e3", "#bdbdbd", "#8c8c8c", "#525252")
BARS = {0.8: "20 % slower", 1.0: "no effect", 1.2: "20 % faster", 1.5: "50 % faster"}


def chart(result: dict[str, Any], path: Path) -> None:
    """Writes the chart of a result as PNG."""
    curve = result["curve"]
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#666666"}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.4), width_ratios=(1.15, 1.0), layout="constrained")
        _acceptance(left, curve)
        _cost(right, curve)
        figure.savefig(path, dpi=150, facecolor="white")
        plt.close(figure)


def _acceptance(axes, curve) -> None:
    x = [100 * (point["ratio"] - 1) for point in curve["points"]]
    for rule, (label, colour, style, marker) in LINES.items():
        rows = [point["rules"][rule] for point in curve["points"]]
        y = [100 * row["accepted"] for row in rows]
        errors = [[100 * (r["accepted"] - r["low"]) for r in rows], [100 * (r["high"] - r["accepted"]) for r in rows]]
        axes.errorbar(x, y, yerr=errors, label=label, color=colour, linestyle=style, marker=marker, markersize=4, linewidth=1.5, elinewidth=0.8)
    for share in (5, 80):
        axes.axhline(share, color="#444444", linewidth=0.7, linestyle=":")
        where = axes.get_yaxis_transform()
        axes.annotate(f"{share} %", (1.0, share), xycoords=where, xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(0, color="#bbbbbb", linewidth=0.7)
    axes.set(xlabel="true effect of the skill on correct kernels' speed (%)", ylabel="skills accepted (%)", ylim=(-2, 102))
    axes.set_title(f"Accepted by true effect\n(samples' log-speedups: sd {curve['s']:g}; {100 * curve['f']:.0f} % of candidates fail)", fontsize=9.5)
    axes.legend(frameon=False, fontsize=8, ncol=2, loc="upper center", bbox_to_anchor=(0.5, -0.13), columnspacing=1.2)


def _cost(axes, curve) -> None:
    points = {point["ratio"]: point["ranks_accepted_rejected_at"] for point in curve["points"]}
    ticks, names = [], []
    for i, (ratio, name) in enumerate(BARS.items()):
        at, total = points[ratio], sum(map(sum, points[ratio].values()))
        for which, (colours, offset) in enumerate(((BLUES, -0.18), (GREYS, 0.18))):
            start = 0.0
            for (rollouts, counts), colour in zip(at.items(), colours, strict=True):
                width = 100 * counts[which] / total
                label = f"{('accepted', 'rejected')[which]} after {rollouts}" if i == 0 else None
                axes.barh(i + offset, width, 0.32, left=start, color=colour, edgecolor="white", linewidth=0.5, label=label)
                start += width
            axes.annotate(f"{start:.1f} %", (start, i + offset), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
        ticks.append(i)
        names.append(name)
    axes.set_yticks(ticks, names)
    axes.invert_yaxis()
    axes.set(xlim=(0, 116), xticks=range(0, 101, 20), xlabel="skills (%)")
    axes.set_title("Rollouts until the decision (paired, ranks)\nupper bar accepted, lower bar rejected", fontsize=9.5)
    axes.legend(frameon=False, fontsize=8, ncol=2, loc="upper center", bbox_to_anchor=(0.5, -0.13), columnspacing=1.2)
