"""Requests on their way through an engine: checked, counted, and what a row at rest is."""

from __future__ import annotations

import dataclasses

import numpy as np

from dk_jax.generation.choice import Draw
from dk_jax.generation.programs import Rows
from dk_jax.generation.requests import Conversation, Request, key_data
from dk_jax.models.config import AGENTS


@dataclasses.dataclass
class Counts:
    """What an engine has done so far, in tokens but for `copied` (prompts) and `refed` (conversations)."""

    prefilled: int = 0
    copied: int = 0
    refed: int = 0
    decoded: int = 0
    row_steps: int = 0
    """Steps times rows; `decoded` over this is the share of rows at work."""


@dataclasses.dataclass
class Job:
    """A request on its way."""

    ticket: int
    request: Request
    key: np.ndarray
    history: list[int]
    """All tokens before the sample."""
    limit: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logps: tuple[list[np.ndarray], list[np.ndarray]] = dataclasses.field(default_factory=lambda: ([], []))


def make_job(request: Request, vocab_size: int, max_length_tokens: int) -> Job:
    """A request that has passed the checks; it has no ticket yet.

    Raises:
      ValueError: an empty prompt, an unknown agent or token id, a limit below 1, a key that is none.
    """
    history, agent = _checked(request, vocab_size)
    limit = min(request.max_new_tokens, max_length_tokens - len(history))
    return Job(-1, dataclasses.replace(request, agent=agent), key_data(request.key), history, limit)


def _checked(request: Request, vocab_size: int) -> tuple[list[int], int]:
    """(All tokens before the sample, agent). Raises ValueError."""
    conversation = request.conversation
    if not len(request.tokens):
        raise ValueError("generation: a prompt is empty; it needs at least one token to continue from")
    if min(request.tokens) < 0 or max(request.tokens) >= vocab_size:
        raise ValueError(f"generation: a prompt has a token id outside [0, {vocab_size})")
    if conversation is None and not 0 <= request.agent < len(AGENTS):
        raise ValueError(f"generation: agent {request.agent} is not an index into {AGENTS}")
    if request.max_new_tokens < 1:
        raise ValueError(f"generation: max_new_tokens is {request.max_new_tokens}; it must be at least 1")
    if conversation is None:
        return [int(token) for token in request.tokens], request.agent
    return [*conversation.tokens, *(int(token) for token in request.tokens)], conversation.agent


def rows_at_rest(n: int, memory: int) -> Rows:
    """Rows of nobody; `memory`: tokens of each that stop sequences are held against."""
    whole, real = np.zeros(n, np.int32), np.zeros(n, np.float32)
    return Rows(
        token=whole, position=whole, step=whole, limit=whole, agent=whole, key=np.zeros((n, 2), np.uint32),
        draw=Draw(real + 1, whole, real + 1, real), recent=np.full((n, memory), -1, np.int32), done=np.ones(n, bool),
    )  # fmt: skip


def leave(conversation: Conversation) -> None:
    """Gives a conversation's row back to the engine that keeps it, if one does."""
    keeper = conversation.engine
    if keeper is not None and keeper._kept.get(conversation.row) is conversation:
        del keeper._kept[conversation.row]
    conversation.row = conversation.engine = None
