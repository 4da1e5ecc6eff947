"""What a teacher's run came to, in lines for a terminal."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dk_jax.interop.endpoint import estimate_tokens
from dk_jax.sft.teacher import Teacher


def statistics(teacher: Teacher) -> dict[str, Any]:
    """Counts of a run, as plain data; those of answers and money are of this run alone where `teacher.endpoint.tally` says so.

    Returns:
        `endpoint` (requests, answers, tokens, money), `read` (messages by agent, and how many of them could be read), `judged` (turns by
        outcome), `kept` (samples by kind), `imitated` (answers in them), `refused` (proposed skills by what was wrong), `skills` (accepted).
    """
    tally = teacher.endpoint.tally
    read: dict[str, dict[str, int]] = {}
    judged: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for s in list(teacher.spoken):
        agent, turns = s.trajectory.agent, s.trajectory.turns[: len(s.said)]
        own = read.setdefault(agent, {"messages": 0, "read": 0})
        own["messages"] += len(turns)
        own["read"] += sum(turn.source is not None if agent == "policy" else not turn.error for turn in turns)
        judged.update(turn.verdict.outcome for turn in turns if turn.verdict is not None)
        if agent == "summary" and turns:
            refused.update(problem.split(": ")[-1][:60] for problem in teacher.problems_of(s))
    samples = [one.sample for one in teacher.samples()]
    return {
        "endpoint": {
            "requests": tally.requests, "answered": tally.answered, "from_journal": tally.replayed, "problems": dict(tally.problems),
            "prompt_tokens": tally.prompt_tokens, "completion_tokens": tally.completion_tokens, "estimated": tally.estimated,
            "unbilled": tally.unbilled, "cost": tally.cost, "spent_tokens": tally.spent_tokens, "spent": tally.spent,
        },
        "read": read,
        "judged": dict(judged),
        "kept": dict(Counter(sample.kind for sample in samples)),
        "imitated": sum(keep for sample in samples for *_, keep in sample.turns),
        "refused": dict(refused),
        "skills": len(teacher.accepted),
    }  # fmt: skip


def table(teacher: Teacher, *, seconds: float, max_tokens: int = 0) -> str:
    """The statistics in a few lines.

    Args:
        max_tokens: of a sample that the cold start takes (sft.max_tokens); how many are longer is said, by estimate. 0 says nothing of it.
    """
    s = statistics(teacher)
    e, priced = s["endpoint"], teacher.endpoint.config.price_in is not None
    lines = [
        ("asked", f"{e['requests']} requests, {e['answered']} answered; {e['from_journal']} answers from the journal"),
        ("problems", _counts(e["problems"])),
        ("read", "; ".join(f"{agent} {n['read']} of {n['messages']}" for agent, n in s["read"].items())),
        ("judged", _counts(s["judged"])),
        ("kept", f"{_counts(s['kept']) or 'no sample'}" + (f"; {s['imitated']} answers to imitate" if s["kept"] else "")),
        ("skills", f"{s['skills']} accepted" + (f"; refused: {_counts(s['refused'])}" if s["refused"] else "")),
        ("tokens", f"{e['prompt_tokens']:,} in, {e['completion_tokens']:,} out" + _estimated(e)),
        ("cost", (f"{e['cost']:.4f}" if priced else "unknown, as no prices were given") + _earlier(e, priced)),
        ("time", f"{seconds:.0f} s"),
    ]
    if max_tokens:
        long = sum(sum(map(estimate_tokens, one.sample.texts)) > max_tokens for one in teacher.samples())
        lines.insert(5, ("too long", f"{long} samples for sft.max_tokens={max_tokens}, by estimate: the cold start leaves these out" if long else ""))
    return "\n".join(f"{name:10}{said}" for name, said in lines if said)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def _estimated(e: dict[str, Any]) -> str:
    said = f"; of {e['estimated']} answers estimated, as the endpoint told no usage" if e["estimated"] else ""
    return said + (f"; {e['unbilled']} tries ended without an answer, at a cost that nobody told" if e["unbilled"] else "")


def _earlier(e: dict[str, Any], priced: bool) -> str:
    money = f"{e['spent']:.4f} and " if priced else ""
    return f"; in all, earlier runs included, {money}{e['spent_tokens']:,} tokens"
