"""The short text that a language model reads after its kernel was judged.

Text that the candidate can influence (compiler messages, exceptions) is bounded and each of its lines is
quoted with "> ", so that it cannot pose as the judge's own words.
"""

from __future__ import annotations

import re

from sandbox.protocol import Roofline, Timing
from sandbox.verdict.timing import MOST_UNREST

MAX_QUOTED_LINES = 8
MAX_LINE_CHARS = 160
MAX_FEEDBACK_CHARS = 1600
_ERROR_LINE = re.compile(r"(error\b|undefined reference|multiple definition)", re.IGNORECASE)
_DIRECTORIES = re.compile(r"(?<![\w.])/(?:[^\s:/]+/)+")
_CONTROL = re.compile(r"[^\t\x20-\x7e\u00a0-\ud7ff\ue000-\uffff]")


def quote(text: str, max_lines: int = MAX_QUOTED_LINES) -> str:
    """At most `max_lines` lines of `text`, each cut, stripped of control characters and prefixed with ">
    "."""
    lines = [_CONTROL.sub("?", line.rstrip())[:MAX_LINE_CHARS] for line in text.splitlines() if line.strip()]
    left_out = len(lines) - max_lines
    quoted = [f"> {line}" for line in lines[:max_lines]]
    if left_out > 0:
        quoted.append(f"({left_out} more lines)")
    return "\n".join(quoted)


def compiler_errors(log: str) -> str:
    """The compiler's error lines, or the whole log where none can be told; paths are cut to file names."""
    lines = _DIRECTORIES.sub("", log).splitlines()
    return "\n".join([line for line in lines if _ERROR_LINE.search(line)] or lines)


def build_failed(log: str) -> str:
    """Feedback for a candidate that does not compile: its first errors."""
    return _bounded(f"does not compile:\n{quote(compiler_errors(log))}")


def failed(what: str, detail: str) -> str:
    """Feedback for a failure at run time; `detail` may be the candidate's own text."""
    return _bounded(f"{what}:\n{quote(detail)}" if detail.strip() else what)


def incorrect(reason: str, trial: int, trials: int) -> str:
    """Feedback for a wrong result; `reason` is the comparison's, free of candidate text."""
    return _bounded(f"wrong result: {reason} (trial {trial + 1} of {trials})")


def correct(timing: Timing | None, coverage: float | None, why_untimed: str = "", roofline: Roofline | None = None) -> str:
    """Feedback for a correct candidate: its speed against each baseline, and in a second line how near that comes to the card's best."""
    if timing is None:
        return f"correct; {why_untimed or 'speed was not measured'}"
    eager_ms = timing.baselines["eager"].median_ms
    text = f"correct; {_speed(timing.speedup, timing.candidate.median_ms, eager_ms, 'eager')}"
    for name, baseline in timing.baselines.items():
        if name != "eager":
            ratio = baseline.median_ms / timing.candidate.median_ms
            text += f", {_speed(ratio, timing.candidate.median_ms, baseline.median_ms, name)}"
    if timing.unrest > MOST_UNREST:
        text += f"; the machine was not calm (times differ by {100 * (timing.unrest - 1):.0f}% from the usual)"
    elif timing.noisy:
        text += "; the difference is within noise"
    if coverage is not None and coverage < 1.0:
        text += f"; {100 * coverage:.0f}% of the device time is in its own kernels"
    return _bounded(f"{text}\n{nearness(roofline)}" if roofline else text)


def nearness(roofline: Roofline) -> str:
    """One line: what a call must move and compute, how long the card takes for that at best, and how much of the candidate's time it is."""
    moved = f"moves at least {_amount(roofline.bytes, 'B')}"
    computed = f" and computes {_amount(roofline.flops, 'FLOP')}" if roofline.flops else ""
    best = "memory's speed" if roofline.bound == "unknown" else "peak"
    share = f"{100 * roofline.share:.0f}%" if roofline.share >= 0.1 else f"{100 * roofline.share:.1f}%"
    bound = "" if roofline.bound == "unknown" else f": {roofline.bound}-bound"
    taken = _ms(roofline.floor_ms / roofline.share)
    return f"roofline: {moved}{computed}: {_ms(roofline.floor_ms)} at this card's {best}; this takes {taken} ({share}){bound}"


def _amount(value: float, unit: str) -> str:
    """A number with a prefix, such as 12.6 MB."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def _speed(ratio: float, candidate_ms: float, baseline_ms: float, name: str) -> str:
    word = f"{ratio:.2f}x faster than" if ratio >= 1 else f"{1 / ratio:.2f}x slower than"
    return f"{word} {name} ({_ms(candidate_ms)} vs {_ms(baseline_ms)})"


def _ms(value: float) -> str:
    return f"{value:.3g} ms" if value >= 0.01 else f"{1000 * value:.2g} us"


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_FEEDBACK_CHARS else text[: MAX_FEEDBACK_CHARS - 4] + " ..."
