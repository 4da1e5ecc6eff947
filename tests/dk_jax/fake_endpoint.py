"""An OpenAI-compatible endpoint on localhost that answers as the test says, and remembers what it was asked; and a clock without waiting."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """A reply as it goes over the line; with `hangs` none comes before the server ends."""

    body: str = ""
    status: int = 200
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hangs: bool = False


def chat(text: str | None, *, finish: str = "stop", usage: tuple[int, int] | None = (100, 20), **message: Any) -> Reply:
    """A completion; `usage` are its prompt and completion tokens, None for an endpoint that tells none."""
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text, **message}}
    told = {"usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}} if usage else {}
    return Reply(body=json.dumps({"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **told}))


def refusal(status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None) -> Reply:
    """An error as OpenAI's interface tells it."""
    return Reply(status=status, body=json.dumps({"error": {"message": message, "type": "error", "code": code}}), headers=headers or {})


class FakeEndpoint:
    """Serves `/v1/chat/completions` from a thread; use as a context manager.

    Args:
        respond: from the request's body and its number, from 0, to the reply.

    Attributes:
        asked: the bodies of all requests, in order. keys: their Authorization headers.
        most_at_once: requests that were in work together at most.
    """

    def __init__(self, respond: Callable[[dict[str, Any], int], Reply]):
        self.respond = respond
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.most_at_once = self._at_once = 0
        self._lock, self._ending = threading.Lock(), threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self):
                with contextlib.suppress(ConnectionError):  # the client has gone
                    super().handle()

            def do_POST(self):  # noqa: N802
                fake._serve(self)

            def log_message(self, *_):
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def prompts(self) -> list[str]:
        """The last message of every request."""
        return [body["messages"][-1]["content"] for body in self.asked]

    def __enter__(self) -> FakeEndpoint:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        data, length = b"", int(handler.headers["content-length"])
        while len(data) < length and (more := handler.rfile.read(length - len(data))):
            data += more
        if len(data) < length:
            handler.close_connection = True
            return  # given up by the client before it was asked
        body = json.loads(data)
        with self._lock:
            number = len(self.asked)
            self.asked.append(body)
            self.keys.append(handler.headers.get("authorization", ""))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            reply = self.respond(body, number)
        finally:
            with self._lock:
                self._at_once -= 1
        if handler.path != "/v1/chat/completions":
            reply = refusal(404, f"no such path: {handler.path}")
        if reply.hangs:
            self._ending.wait()
            handler.close_connection = True
            return
        data = reply.body.encode()
        try:
            handler.send_response(reply.status)
            for name, value in {"content-type": "application/json", **reply.headers, "content-length": str(len(data))}.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(data)
        except OSError:
            handler.close_connection = True


class FakeClock:
    """Sleeping takes no time and moves `moment` on."""

    def __init__(self):
        self.moment = 0.0

    def now(self) -> float:
        return self.moment

    async def sleep(self, seconds: float) -> None:
        until = self.moment + seconds
        await asyncio.sleep(0)
        self.moment = max(self.moment, until)
