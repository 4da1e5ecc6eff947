"""A bound on what a client may send: an ASGI layer in front of the application, free of what the bytes mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class LimitedBody:
    """Answers for the application as soon as a request's body is known to exceed a bound, with or without a declared length.

    Args:
      app: the application behind.
      limit_bytes: largest body.
      refuse: makes the answer from a text that says how large the body is.
    """

    def __init__(self, app: ASGIApp, limit_bytes: int, refuse: Callable[[str], Response]):
        self._app, self._limit_bytes, self._refuse = app, limit_bytes, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._limit_bytes:
            await self._answer(f"body of {int(declared)} bytes")(scope, receive, send)
            return
        taken, begun = 0, False

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._limit_bytes:
                raise _TooLarge
            return message

        async def noted(message: dict[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except _TooLarge:
            if begun:
                raise
            await self._answer(f"body of more than {self._limit_bytes} bytes")(scope, receive, send)

    def _answer(self, what: str) -> Response:
        answer = self._refuse(what)
        answer.headers["Connection"] = "close"  # or the rest of the body would be read after all
        return answer


class _TooLarge(BaseException):
    """Passes through the application's own handling of errors."""
