"""Trajectories as text for a reader: prompt, answer, verdict, reward, advantage and log-probs of every turn, coloured on a terminal.

What it does not do: find files or page; see scripts/trajectories.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from dk_jax.generation.tokenizer import Codec
from dk_jax.rollout.trajectory import Trajectory, Turn

HEAD_LINES, TAIL_LINES = 4, 3
_LEXERS = {"cpp": "cpp", "triton": "python", "cuda": "python"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """What to show.

    Attributes:
        task: trajectories of tasks whose name holds this; "" for all. agent: of this agent; "" for all.
        turn: this turn alone (0 is the first), or None for all.
        best: of each task its best policy rollout alone, by speedup and then by reward, the best of them first.
        full: whole prompts; else their first and last lines.
        language: of the kernels, for colours.
    """

    task: str = ""
    agent: str = ""
    turn: int | None = None
    best: bool = False
    full: bool = False
    language: str = "cpp"


def choose(trajectories: Sequence[Trajectory], view: View) -> list[Trajectory]:
    """Those that the view shows, in the order of the file or, for `best`, of their worth."""
    found = [t for t in trajectories if view.task in t.task and view.agent in ("", t.agent)]
    if view.turn is not None:
        found = [t for t in found if view.turn < len(t.turns)]
    if not view.best:
        return found
    best: dict[str, Trajectory] = {}
    for t in found:
        if t.agent == "policy" and (t.task not in best or _worth(t) > _worth(best[t.task])):
            best[t.task] = t
    return sorted(best.values(), key=_worth, reverse=True)


def show(trajectories: Sequence[Trajectory], console: Console, view: View, codec: Codec | None = None) -> int:
    """Prints what the view shows of them; returns how many that are.

    Args:
        codec: of the run, to show prompts; without one their lengths are told.
    """
    chosen = choose(trajectories, view)
    counts = Counter(t.agent for t in trajectories)
    told = ", ".join(f"{n} {agent}" for agent, n in counts.items())
    _line(console, f"{len(trajectories)} trajectories ({told}), {len({t.task for t in trajectories})} tasks; {len(chosen)} shown", "bold")
    for trajectory in chosen:
        _show_one(trajectory, console, view, codec)
    return len(chosen)


def _worth(trajectory: Trajectory) -> tuple[float, float]:
    best = trajectory.best
    return (best.verdict.earned_speedup if best else 0.0), max(trajectory.rewards, default=-math.inf)


def _show_one(t: Trajectory, console: Console, view: View, codec: Codec | None) -> None:
    facts = [t.agent, f"task {t.task}"]
    facts += [f"scheme {t.scheme}"] if t.scheme >= 0 else []
    facts += [f"rollout {t.member}"]
    facts += ["only checked"] if not t.timed else []
    facts += [f"shown {', '.join(t.shown)}"] if t.shown else []
    facts += [f"skills {', '.join(t.skills)}"] if t.skills else []
    _line(console, "")
    _line(console, f"=== {' | '.join(facts)} ===", "bold cyan")
    for number, turn in enumerate(t.turns):
        if view.turn in (None, number):
            _show_turn(t, number, turn, console, view, codec)


def _show_turn(t: Trajectory, number: int, turn: Turn, console: Console, view: View, codec: Codec | None) -> None:
    sampled = [i for i, at in enumerate(t.turn_index) if at == number]
    first = sampled[0] if sampled else len(t.tokens)
    begin = next((i + 1 for i in range(first - 1, -1, -1) if t.turn_index[i] >= 0 or i + 1 in t.starts), 0)
    prompt = t.tokens[begin:first]
    _line(console, f"--- turn {number}: prompt, {len(prompt)} tokens", "blue")
    if codec is not None:
        _block(console, _folded(codec.decode(prompt), view.full), "dim")
    _line(console, f"--- turn {number}: answer, {len(sampled)} tokens, stop {turn.stop}", "green")
    if console.is_terminal and turn.source is not None and turn.text.strip() == turn.source.strip():
        source = "\n".join(map(_printable, turn.text.splitlines()))
        console.print(Syntax(source, _LEXERS.get(view.language, "text"), background_color="default"))
    else:
        _block(console, turn.text, "")
    _line(console, f"--- turn {number}: {_numbers(t, number, sampled)}", "magenta")
    if turn.error:
        _line(console, f"error: {turn.error}", "red")
    if turn.verdict is not None:
        _show_verdict(turn, console)


def _numbers(t: Trajectory, number: int, sampled: Sequence[int]) -> str:
    """Reward, advantage and log-probs of a turn."""
    said = []
    for name, values, form in (("reward", t.rewards, ".4f"), ("advantage", t.advantages, "+.4f")):
        said.append(f"{name} {values[number]:{form}}" if number < len(values) else f"no {name}")
    if sampled:
        logp = [t.logp_sample[i] for i in sampled]
        mean, least = sum(logp) / len(logp), min(range(len(logp)), key=logp.__getitem__)
        said.append(f"log-prob mean {mean:.4f}, least {logp[least]:.4f} at token {least}, sum {sum(logp):.2f}")
    return "; ".join(said)


def _show_verdict(turn: Turn, console: Console) -> None:
    v = turn.verdict
    facts = [f"verdict {v.outcome}", f"stage {v.stage}"]
    if v.speedup:
        facts.append(f"speedup {v.speedup:.2f}x{' (noisy)' if v.noisy else ''}{'' if v.speed_rewarded else ' (not rewarded)'}")
    if v.profiled:
        facts.append(v.profiled)
    facts += ["cached"] if v.cached else []
    _line(console, ", ".join(facts), "bold green" if v.correct else "yellow")
    if v.feedback:
        _block(console, v.feedback, "italic")


def _folded(text: str, full: bool) -> str:
    lines = text.splitlines()
    if full or len(lines) <= HEAD_LINES + TAIL_LINES + 1:
        return text
    left_out = len(lines) - HEAD_LINES - TAIL_LINES
    return "\n".join([*lines[:HEAD_LINES], f"[... {left_out} lines ...]", *lines[-TAIL_LINES:]])


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(_printable(text), style=style), soft_wrap=True)


def _block(console: Console, text: str, style: str) -> None:
    for line in text.splitlines():
        _line(console, f"    {line}", style)


def _printable(text: str) -> str:
    """Models write control characters too: a terminal must not obey them."""
    return "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in text)
