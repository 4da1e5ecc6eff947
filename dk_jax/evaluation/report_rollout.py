"""One rollout as HTML: the conversation turn by turn, what changed in the code from each turn to the next, and what the judge said.

A diff's lines carry their sign as text, so that it can be read without colours. All that a model wrote is escaped and bounded.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from html import escape

from dk_jax.evaluation.markup import status, times, visible
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict

MAX_CODE_CHARS, MAX_TEXT_CHARS, MAX_PROMPT_CHARS = 20_000, 6_000, 24_000
MAX_DIFF_LINES, MAX_LINE_CHARS, MAX_NAMED = 1500, 400, 40
_KNOWN = frozenset(
    "outcome stage reward speedup noisy coverage feedback cached speed_rewarded profile speedups spread findings".split()
)
"""Fields of a verdict that have a place of their own; any other is told by its name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
    """What the model was asked before each turn, as far as it is known.

    Attributes:
        of_turns: a text for each turn, None where it is not known. note: how they were got, or why they are missing.
        reference: the task's own text, where no prompt shows it and it is known.
    """

    of_turns: Sequence[str | None]
    note: str
    reference: str = ""


def rollout_html(t: Trajectory, prompts: Prompts, *, level: int | None, prompt_html: Callable[[str], str] | None = None) -> str:
    """The rollout as an article.

    Args:
        level: of its task, None where it is not known.
        prompt_html: what stands in the page for a prompt; by default the prompt itself.
    """
    show = prompt_html or (lambda text: f"<pre>{visible(text, MAX_PROMPT_CHARS)}</pre>")
    facts = [f"level {level}"] if level else []
    facts += [t.agent] if t.agent != "policy" else []
    facts += [f"scheme {t.scheme}"] if t.scheme >= 0 else []
    facts += [f"sample {t.member}"] + ([] if t.timed else ["only checked, not timed"])
    parts = [f'<h3><span class="name">{visible(t.task, 200)}</span> <small>{" · ".join(facts)}</small></h3>']
    for title, names in (("Skills in the prompt" if t.agent != "selection" else "Chosen skills", t.skills), ("Skills on offer", t.shown)):
        if names:
            chips = "".join(f'<span class="chip">{visible(name, 80)}</span>' for name in names[:MAX_NAMED])
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            parts.append(f'<p class="fine">{title}: {chips}{more}</p>')
    if prompts.note:
        parts.append(f'<p class="fine">{visible(prompts.note)}</p>')
    if prompts.reference:
        parts.append(f"<details><summary>The PyTorch reference</summary>{show(prompts.reference)}</details>")
    previous = None
    for number, turn in enumerate(t.turns):
        prompt = prompts.of_turns[number] if number < len(prompts.of_turns) else None
        asked = f"<details><summary>Prompt, {len(prompt):,} characters</summary>{show(prompt)}</details>" if prompt else ""
        advantage = t.advantages[number] if number < len(t.advantages) else None
        parts.append(
            f'<div class="turn"><h4>Turn {number + 1} of {len(t.turns)}</h4>{asked}{_message(turn, previous)}{_judged(turn, advantage)}</div>'
        )
        previous = turn.source if turn.source is not None else previous
    if not t.turns:
        parts.append('<p class="missing">It has no turn.</p>')
    return f"<article>{''.join(parts)}</article>"


def _message(turn: Turn, previous: str | None) -> str:
    """What the model said, with its code; where there is a kernel before it, what changed first."""
    if turn.source is None:
        why = f'<p class="fine">No kernel: {visible(turn.error, 400)}</p>' if turn.error and turn.verdict else ""
        return f"{_note(turn)}<pre>{visible(turn.text, MAX_CODE_CHARS)}</pre>{why}"
    before, found, after = turn.text.partition(turn.source)
    if not found:
        before, after = turn.text if turn.text.strip() != turn.source.strip() else "", ""
    around = [
        f'<blockquote class="said">{visible(part.strip(), MAX_TEXT_CHARS)}</blockquote>' if part.strip(" `\n") else "" for part in (before, after)
    ]
    code = f"<pre>{visible(turn.source, MAX_CODE_CHARS)}</pre>"
    if previous is None:
        return around[0] + code + around[1] + _note(turn)
    return f"{around[0]}{diff_html(previous, turn.source)}<details><summary>The whole kernel</summary>{code}</details>{around[1]}{_note(turn)}"


def _note(turn: Turn) -> str:
    return f'<p class="fine">The message stopped by: {visible(turn.stop, 40)}</p>' if turn.stop not in ("eos", "") else ""


def diff_html(old: str, new: str) -> str:
    """What to take away from the old text (-) and to add (+) for the new one, with three lines around each change."""
    a, b = old.strip("\n").splitlines(), new.strip("\n").splitlines()
    if a == b:
        return '<p class="fine">The same kernel as in the turn before.</p>'
    if len(a) + len(b) > MAX_DIFF_LINES:
        return f'<p class="fine">No comparison: {len(a):,} and {len(b):,} lines are too many.</p>'
    lines = list(difflib.unified_diff(a, b, n=3, lineterm=""))[2:]
    added, removed = (sum(line[0] == sign for line in lines) for sign in "+-")
    shown = "".join(_diff_line(line) for line in lines)
    return (
        f'<details open><summary>What changed: lines removed (−) {removed}, added (+) {added}</summary><pre class="diff">{shown}</pre></details>'
    )


def _diff_line(line: str) -> str:
    sign, text = line[0], line[1:]
    css, mark = {"+": ("add", "+"), "-": ("del", "−"), "@": ("at", "")}.get(sign, ("", " "))
    text = line if sign == "@" else text
    cut = text[:MAX_LINE_CHARS] + ("…" if len(text) > MAX_LINE_CHARS else "")
    return f'<span class="l {css}"><b>{mark}</b>{visible(cut)}\n</span>'


def _judged(turn: Turn, advantage: float | None) -> str:
    v = turn.verdict
    credit = f" · advantage {advantage:+.2f}" if advantage is not None else ""
    if v is None:
        error = f'<p class="fine">It can\'t be used: {visible(turn.error, 400)}</p>' if turn.error else ""
        return f'<p class="verdict"><span class="rest">reward {turn.reward:.2f}{credit}</span></p>{error}'
    speedups = v.speedups or ({"eager": v.speedup} if v.speedup > 0 else {})
    facts = [f"<span><b>{times(speedup)}</b> {visible(name, 60)}</span>" for name, speedup in speedups.items()]
    facts += ["<span>noisy</span>"] if v.correct and v.noisy else []
    facts += ["<span>speed not counted</span>"] if v.correct and not v.speed_rewarded else []
    facts += [f"<span>integrity: {visible(', '.join(v.findings), 400)}</span>"] if v.findings else []
    said = (
        f'<p class="verdict"><span class="badge {status(v.outcome)}">{visible(v.outcome.replace("_", " "), 60)}</span>{"".join(facts)}'
        f'<span class="rest">stage {visible(v.stage, 20)} · reward {v.reward:.2f}{credit}{" · judged before" if v.cached else ""}</span></p>'
    )
    if v.profiled:
        said += f"<blockquote><b>Profile</b> {visible(v.profiled, MAX_TEXT_CHARS)}</blockquote>"
    if v.feedback:
        said += f"<blockquote><b>Feedback</b> {visible(v.feedback, MAX_TEXT_CHARS)}</blockquote>"
    return said + "".join(_other(v))


def _other(v: Verdict) -> list[str]:
    found = {field.name: getattr(v, field.name) for field in dataclasses.fields(v) if field.name not in _KNOWN}
    return [
        f"<blockquote><b>{escape(name.replace('_', ' ').capitalize())}</b> {visible(str(value), MAX_TEXT_CHARS)}</blockquote>"
        for name, value in found.items()
        if value not in (None, "", (), {}, [], 0, 0.0, False)
    ]
