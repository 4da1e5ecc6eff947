"""An evaluation as the broker knows it, and the errors of asking for one."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from sandbox.protocol import EvaluationResult, StageEvent


class QueueFull(RuntimeError):
    """No room for the request; try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class KeyConflict(RuntimeError):
    """The client key was used before with another body."""


class ShuttingDown(RuntimeError):
    """The server is about to end; what waits here must be asked of its successor."""


class UnknownId(KeyError):
    """No such evaluation or verification (any more)."""


@dataclass(eq=False)
class Record:
    """One evaluation as the broker knows it; `content` and `task` are digests of all that is judged and of its task.

    Attributes:
      arm: names what is to be judged on one host, as the candidates of a verification's arm are; "" for all else.
      passed: so often another was preferred to it while it was the first that waited.
      due_s: its place among what is as urgent of its client: the time at which it came, less what it is expected to take (monotonic).
      shunned, shunned_until_s: the host on which its oracle was lost, which does not get it again before that time (monotonic).
    """

    id: str
    content: str
    task: str
    job: dict[str, Any] | None
    result: EvaluationResult
    created_s: float
    client: str = ""
    priority: int = 0
    arm: str = ""
    attempts: int = 0
    passed: int = 0
    due_s: float = 0.0
    shunned: str = ""
    shunned_until_s: float = 0.0
    cancelled: bool = False
    fetched: bool = False
    """Somebody has been given the result."""
    followers: list[Record] = field(default_factory=list)
    listeners: list[asyncio.Queue] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)


def digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def copy_verdict(verdict: EvaluationResult, record: Record) -> EvaluationResult:
    return verdict.model_copy(update={"id": record.id, "cached": True, "attempts": 0})


def event(record: Record) -> StageEvent:
    result = record.result
    return StageEvent(
        id=record.id,
        state=result.state,
        stage=result.stage,
        result=result if result.state == "done" else None,
    )
