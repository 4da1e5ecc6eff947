"""When the next request to an endpoint may begin, and what is raised where none ever may."""

from __future__ import annotations

import asyncio
import collections
import math
import time

WINDOW_S = 60.0


class EndpointError(RuntimeError):
    """Questions can't be asked; the message says why and what to do. Answers that came are kept."""


class EndpointRefused(EndpointError):
    """The endpoint says that a request is wrong or not allowed: asking again does not help."""


class EndpointUnavailable(EndpointError):
    """Nobody answers, or not before a time that is too far off."""


class Clock:
    """Time of pauses and rates; tests pass one of their own."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class RateLimiter:
    """Says when a request may begin so that no window of 60 s holds more than allowed; knows no clock."""

    def __init__(self, *, requests_per_minute: int = 0, tokens_per_minute: int = 0):
        self._requests, self._tokens = requests_per_minute or math.inf, tokens_per_minute or math.inf
        self._begun: collections.deque[list[float]] = collections.deque()  # [time, tokens]
        self._closed_until = -math.inf

    def delay_s(self, now: float, tokens: int) -> float:
        """Seconds until a request of so many tokens may begin, 0 if it may now. Raises EndpointRefused if it never may."""
        if tokens > self._tokens:
            raise EndpointRefused(f"a request may take {tokens} tokens, more than {self._tokens} a minute: raise that, or ask for shorter answers")
        while self._begun and self._begun[0][0] + WINDOW_S <= now:
            self._begun.popleft()
        until, count, total = self._closed_until, len(self._begun), tokens + sum(size for _, size in self._begun)
        for begun, size in self._begun:  # the oldest ones leave the window first
            if count < self._requests and total <= self._tokens:
                break
            until, count, total = max(until, begun + WINDOW_S), count - 1, total - size
        return max(until - now, 1e-3) if until > now else 0.0

    def begin(self, now: float, tokens: int) -> list[float]:
        """Counts a request; the second number of what is returned may be set to the tokens that it came to."""
        self._begun.append([now, tokens])
        return self._begun[-1]

    def close_until(self, moment: float) -> None:
        """Lets none begin before `moment`."""
        self._closed_until = max(self._closed_until, moment)
