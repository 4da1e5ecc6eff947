"""The report's kernels: which turns are worth a look, and how they are shown."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from html import escape

from dk_jax.evaluation.markup import status, times, visible
from dk_jax.evaluation.report_rollout import diff_html
from dk_jax.rollout.trajectory import Trajectory, Turn
from dk_jax.tasks.task import Task

MAX_CODE_CHARS = 6000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """Turns of one trajectory that are worth a look, and why."""

    why: str
    trajectory: Trajectory
    turns: tuple[int, ...]


def pick_examples(trajectories: Iterable[Trajectory]) -> list[Example]:
    """The fastest of two tasks, the largest gain from feedback, a typical one, and three kinds of failure."""
    judged = [(t, i, turn) for t in trajectories for i, turn in enumerate(t.turns) if turn.verdict]
    right = sorted((j for j in judged if j[2].verdict.correct), key=lambda j: -j[2].verdict.speedup)
    out: list[Example] = []
    seen: set[int] = set()

    def add(why: str, found: tuple[Trajectory, int, Turn] | None, turns: tuple[int, ...] = ()) -> None:
        if found is not None and id(found[0]) not in seen:
            seen.add(id(found[0]))
            out.append(Example(why=why, trajectory=found[0], turns=turns or (found[1],)))

    add("Fastest", right[0] if right else None)
    add("Fastest of another task", next((j for j in right if j[0].task != right[0][0].task), None))
    gains = [(j[2].verdict.speedup / max(j[0].turns[0].verdict.speedup, 0.1), j) for j in right if j[1] > 0]
    gains = [pair for pair in gains if pair[0] > 1 and id(pair[1][0]) not in seen]
    if gains:
        _, found = max(gains, key=lambda pair: pair[0])
        add("Largest gain from feedback", found, (0, found[1]))
    if right:
        middle = right[len(right) // 2][2].verdict.speedup
        fresh = [j for j in right if id(j[0]) not in seen]
        add(
            "Typical of the correct",
            min(fresh, key=lambda j: abs(j[2].verdict.speedup - middle), default=None),
        )
    wrong = Counter(j[2].verdict.outcome for j in judged if not j[2].verdict.correct)
    for outcome, count in wrong.most_common(3):
        some = [j for j in judged if j[2].verdict.outcome == outcome and id(j[0]) not in seen]
        some.sort(key=lambda j: len(j[2].source or j[2].text))
        share = f"{count:,} of {len(judged):,} turns"
        add(f"Failed: {outcome.replace('_', ' ')} ({share})", some[len(some) // 2] if some else None)
    return out


def card(example: Example, task: Task | None) -> str:
    t = example.trajectory
    skills = "".join(f'<span class="chip">{visible(name, 80)}</span>' for name in t.skills)
    level = f" · level {task.level}" if task else ""
    parts = [
        f'<div class="why">{escape(example.why)}</div>',
        f'<h3><span class="name">{visible(t.task, 200)}</span><small>{level}</small>{skills}</h3>',
    ]
    if task is not None:
        parts.append(
            "<details><summary>the PyTorch reference</summary>"
            f"<pre>{visible(task.reference.strip())}</pre></details>"
        )
    for at, i in enumerate(example.turns):
        turn = t.turns[i]
        v = turn.verdict
        speed = f"<span><b>{times(v.speedup)}</b> eager</span>" if v.speedup > 0 else ""
        noise = "<span>noisy</span>" if v.correct and v.noisy else ""
        parts.append(
            f'<p class="verdict"><span class="badge {status(v.outcome)}">'
            f"{visible(v.outcome.replace('_', ' '), 60)}</span>{speed}{noise}"
            f'<span class="rest">turn {i + 1} of {len(t.turns)} · reward {v.reward:.2f}</span></p>'
            + _code(turn, t.turns[example.turns[at - 1]] if at else None)
        )
        if v.feedback:
            parts.append(f"<blockquote><b>Feedback</b> {visible(v.feedback.strip(), MAX_CODE_CHARS)}</blockquote>")
    return f"<article>{''.join(parts)}</article>"


def _code(turn: Turn, before: Turn | None) -> str:
    """A turn's kernel, or its message where it holds none; after another turn that is shown, what changed."""
    code = f"<pre>{visible((turn.source if turn.source is not None else turn.text).strip(), MAX_CODE_CHARS)}</pre>"
    if before is None or before.source is None or turn.source is None:
        return code
    return f"{diff_html(before.source, turn.source)}<details><summary>The whole kernel</summary>{code}</details>"
