"""What samples took: messages, tokens and money, turn by turn, so that ways to spend a budget are compared at equal ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dk_jax.rollout.trajectory import Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """Tokens of a message's prompt and answer, 0 where nobody counts them, and its cost, None where nobody knows it."""

    prompt: int = 0
    answer: int = 0
    cost: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What a sample took.

    Attributes:
        prompt_tokens, answer_tokens, cost: of all its messages; 0 and None where nobody counts them.
        calls, tokens: of each turn the messages, and the tokens of their prompts and answers.
    """

    prompt_tokens: int = 0
    answer_tokens: int = 0
    cost: float | None = None
    calls: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()


def messages_of(trajectory: Trajectory) -> list[Message]:
    """The messages of a trajectory by its tokens; of one without tokens, as many as it has turns."""
    if not trajectory.turn_index:
        return [Message() for _ in trajectory.turns]
    found: dict[int, list[int]] = {}
    waiting = 0  # of a prompt, before its answer
    for turn in trajectory.turn_index:
        if turn < 0:
            waiting += 1
        else:
            counts = found.setdefault(turn, [waiting, 0])
            counts[1] += 1
            waiting = 0
    return [Message(prompt=prompt, answer=answer) for _, (prompt, answer) in sorted(found.items())]


def tally(own: Sequence[Message], further: Sequence[tuple[str, Sequence[Message]]]) -> Usage:
    """What a sample took in all.

    Args:
        own: messages of its turns.
        further: agent and messages of each further call that was made for it. The selection agent's are counted with the first turn; of all
            others the first with the second turn, and so on, and those that are left over with the last.
    """
    last = max(len(own), 1) - 1
    placed = list(enumerate(own))
    placed += [(0, message) for agent, messages in further if agent == "selection" for message in messages]
    others = [message for agent, messages in further if agent != "selection" for message in messages]
    placed += [(min(i, last), message) for i, message in enumerate(others, 1)]
    calls, tokens = [0] * (last + 1), [0] * (last + 1)
    for turn, message in placed:
        calls[turn] += 1
        tokens[turn] += message.prompt + message.answer
    costs = [message.cost for _, message in placed if message.cost is not None]
    return Usage(
        prompt_tokens=sum(m.prompt for _, m in placed), answer_tokens=sum(m.answer for _, m in placed), cost=sum(costs) if costs else None,
        calls=tuple(calls), tokens=tuple(tokens),
    )  # fmt: skip
