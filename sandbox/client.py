"""Clients of a running sandbox: `SandboxClient` (blocking) and `AsyncSandboxClient` with the same methods.

    with SandboxClient("/run/sandbox.sock", retry_for_s=600) as sandbox:
        results = sandbox.evaluate(TaskSpec(reference=...), [Candidate(source=..., language="cpp", form="kernel")])

With `retry_for_s` > 0 a call outlives a busy, restarting or lost server: it backs off, honours Retry-After, and submits
again under the same client key when a new server no longer knows the ids. Results already received are kept.

The logic is written once, as generators that yield what they want from the world (a call, a pause); the two clients
differ only in how they carry that out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel

from sandbox.protocol import (
    MAX_CANDIDATES,
    Candidate,
    Capabilities,
    EvaluationRequest,
    EvaluationResult,
    EvaluationsAccepted,
    Health,
    Options,
    StageEvent,
    TaskSpec,
    VerificationAccepted,
    VerificationRequest,
    VerificationResult,
    VerificationTask,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
OnResult = Callable[[int, EvaluationResult], None]
LONG_POLL_S = 30.0
LOG_EVERY_S = 15.0


class SandboxUnavailable(RuntimeError):
    """No server answers on the socket, or it lost the evaluation and retrying was not allowed."""


class SandboxBusy(RuntimeError):
    """The queue is full (429) or the server is not ready (503); `retry_after_s` is its own estimate."""

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SandboxRejected(RuntimeError):
    """The request itself is wrong; `field` names what, `hint` says what to do. Never retried."""

    def __init__(self, message: str, *, status: int, field: str | None = None, hint: str | None = None):
        where = f" (field {field})" if field else ""
        super().__init__(f"{message}{where}" + (f": {hint}" if hint else ""))
        self.status, self.field, self.hint = status, field, hint


@dataclass(frozen=True)
class _Call:
    method: str
    path: str
    body: str | None = None
    params: dict[str, Any] | None = None
    read_s: float = 30.0


@dataclass(frozen=True)
class _Pause:
    seconds: float


Steps = Generator[_Call | _Pause, Any, T]


@dataclass(frozen=True)
class _Protocol:
    """The conversation with a server, free of any way of doing input and output."""

    socket: str
    timeout_s: float
    retry_for_s: float

    def request(self, call: _Call) -> Steps[httpx.Response]:
        give_up = time.monotonic() + self.retry_for_s
        attempt, logged = 0, -LOG_EVERY_S
        while True:
            error: RuntimeError
            pause_s = min(0.1 * 2**attempt, 5.0)
            try:
                response = yield call
            except httpx.TransportError as problem:
                error = SandboxUnavailable(
                    f"no sandbox answers on {self.socket} ({type(problem).__name__}: {problem}); "
                    f"start one with: python -m sandbox serve --socket {self.socket}"
                )
            else:
                if response.status_code < 400:
                    return response
                details = _error_details(response)
                if response.status_code not in (429, 502, 503, 504):
                    raise SandboxRejected(
                        details.get("error", response.text[:200]), status=response.status_code,
                        field=details.get("field"), hint=details.get("hint"),
                    )  # fmt: skip
                pause_s = _retry_after_s(response, pause_s)
                error = SandboxBusy(f"sandbox on {self.socket} is busy: {details.get('error', '')}", pause_s)
            if time.monotonic() + pause_s > give_up:
                raise error
            if time.monotonic() - logged >= LOG_EVERY_S:
                logged = time.monotonic()
                log.warning("%s; retrying for up to %.0f s more", error, give_up - logged)
            attempt += 1
            yield _Pause(pause_s * random.uniform(0.8, 1.2))

    def get(self, path: str, model: type[T], params: dict | None = None, read_s: float = 0.0) -> Steps[T]:
        response = yield from self.request(_Call("GET", path, params=params, read_s=read_s + self.timeout_s))
        return model.model_validate_json(response.content)

    def post(self, path: str, body: BaseModel, model: type[T]) -> Steps[T]:
        call = _Call("POST", path, body=body.model_dump_json(), read_s=self.timeout_s)
        response = yield from self.request(call)
        return model.model_validate_json(response.content)

    def text(self, path: str) -> Steps[str]:
        response = yield from self.request(_Call("GET", path, read_s=self.timeout_s))
        return response.text

    def submit(self, request: EvaluationRequest) -> Steps[list[str]]:
        accepted = yield from self.post("/v1/evaluations", request, EvaluationsAccepted)
        return accepted.ids

    def result(self, evaluation_id: str, wait_s: float) -> Steps[EvaluationResult]:
        path = f"/v1/evaluations/{evaluation_id}"
        return (yield from self.get(path, EvaluationResult, {"wait_s": wait_s}, read_s=wait_s))

    def cancel(self, evaluation_id: str) -> Steps[EvaluationResult]:
        response = yield from self.request(
            _Call("DELETE", f"/v1/evaluations/{evaluation_id}", read_s=self.timeout_s)
        )
        return EvaluationResult.model_validate_json(response.content)

    def evaluate(
        self, task: TaskSpec, candidates: Sequence[Candidate], options: Options | None, client_key: str | None,
        on_result: OnResult | None,
    ) -> Steps[list[EvaluationResult]]:  # fmt: skip
        key = client_key or uuid.uuid4().hex
        batches = []
        for start in range(0, len(candidates), MAX_CANDIDATES):
            request = EvaluationRequest(
                client_key=key if start == 0 else f"{key}/{start}", task=task,
                candidates=list(candidates[start : start + MAX_CANDIDATES]), options=options or Options(),
            )  # fmt: skip
            ids = yield from self.submit(request)
            batches.append((start, request, ids))
        results: list[EvaluationResult] = []
        for start, request, ids in batches:
            finished = 0
            while finished < len(ids):
                try:
                    result = yield from self.result(ids[finished], LONG_POLL_S)
                except SandboxRejected as error:
                    ids = yield from self._resubmit(request, ids, finished, error)
                    continue
                if result.state == "done":
                    if on_result:
                        on_result(start + finished, result)
                    results.append(result)
                    finished += 1
        return results

    def _resubmit(
        self, request: EvaluationRequest, ids: list[str], finished: int, error: SandboxRejected
    ) -> Steps[list[str]]:
        """A new server does not know our ids: same key, same body; what we already have is not judged again."""
        if error.status != 404:
            raise error
        if self.retry_for_s <= 0:
            raise SandboxUnavailable(f"the sandbox on {self.socket} was restarted and lost {ids[finished]}") from error
        log.warning("the sandbox on %s was restarted; submitting %d unfinished candidates again",
                    self.socket, len(ids) - finished)  # fmt: skip
        fresh_ids = yield from self.submit(request)
        for known_id in fresh_ids[:finished]:
            yield from self.cancel(known_id)
        return fresh_ids

    def verify(
        self, arms: Sequence[VerificationTask], options: Options | None, client_key: str | None
    ) -> Steps[VerificationResult]:
        request = VerificationRequest(
            client_key=client_key or uuid.uuid4().hex, arms=list(arms), options=options or Options()
        )
        accepted = yield from self.post("/v1/verifications", request, VerificationAccepted)
        while True:
            path = f"/v1/verifications/{accepted.id}"
            try:
                result = yield from self.get(path, VerificationResult, {"wait_s": LONG_POLL_S}, read_s=LONG_POLL_S)
            except SandboxRejected as error:
                if error.status != 404 or self.retry_for_s <= 0:
                    raise
                accepted = yield from self.post("/v1/verifications", request, VerificationAccepted)
                continue
            if result.state == "done":
                return result

    def admission(self, task: TaskSpec) -> Steps[str]:
        # The task is examined before anything is built, so a source that cannot build costs next to nothing.
        probe = Candidate(source="#error admission only\n", language="cpp", form="kernel")
        if task.device != "cpu":
            probe = Candidate(source="raise SystemExit('admission only')\n", language="triton")
        results = yield from self.evaluate(task, [probe], Options(admit=True, timing="none"), None, None)
        if results[0].outcome == "infra_error":
            raise SandboxUnavailable(f"the task could not be examined: {results[0].feedback}")
        return results[0].feedback if results[0].outcome == "task_rejected" else ""


def _error_details(response: httpx.Response) -> dict[str, Any]:
    try:
        details = response.json()
    except ValueError:
        return {}
    return details if isinstance(details, dict) else {}


def _retry_after_s(response: httpx.Response, default_s: float) -> float:
    try:
        return min(max(float(response.headers["retry-after"]), 0.05), 60.0)
    except (KeyError, ValueError):
        return default_s


def _stream_path(ids: Sequence[str]) -> dict[str, str]:
    return {"ids": ",".join(ids)}


class SandboxClient:
    """Blocking client; one object may be shared by threads.

    Args:
      socket: path of the server's Unix socket.
      timeout_s: longest silence of the server that is not a long poll.
      retry_for_s: how long a busy or absent server is waited for, per outage; 0 raises at once.

    Raises (every method):
      SandboxUnavailable: nobody answers. SandboxBusy: queue full. SandboxRejected: the request is wrong.
    """

    def __init__(self, socket: str | Path, timeout_s: float = 30.0, retry_for_s: float = 0.0):
        self._protocol = _Protocol(str(socket), timeout_s, retry_for_s)
        transport = httpx.HTTPTransport(uds=str(socket))
        self._http = httpx.Client(transport=transport, base_url="http://sandbox", timeout=timeout_s, trust_env=False)

    def __enter__(self) -> SandboxClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; evaluations that were submitted go on."""
        self._http.close()

    def _run(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                if isinstance(step, _Pause):
                    time.sleep(step.seconds)
                    step = steps.send(None)
                    continue
                try:
                    reply = self._http.request(
                        step.method, step.path, content=step.body, params=step.params,
                        headers=_JSON if step.body is not None else None,
                        timeout=httpx.Timeout(self._protocol.timeout_s, read=step.read_s),
                    )  # fmt: skip
                except httpx.TransportError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(reply)
        except StopIteration as stop:
            return stop.value

    def health(self) -> Health:
        """Liveness, isolation level, devices and queue."""
        return self._run(self._protocol.get("/v1/health", Health))

    def capabilities(self) -> Capabilities:
        """Languages, devices, limits and the rule of the bare kernel form."""
        return self._run(self._protocol.get("/v1/capabilities", Capabilities))

    def metrics(self) -> str:
        """Prometheus text."""
        return self._run(self._protocol.text("/v1/metrics"))

    def submit(
        self, task: TaskSpec, candidates: Sequence[Candidate], options: Options | None = None,
        client_key: str | None = None,
    ) -> list[str]:  # fmt: skip
        """Queues up to 64 candidates and returns their ids at once."""
        request = EvaluationRequest(
            client_key=client_key, task=task, candidates=list(candidates), options=options or Options()
        )
        return self._run(self._protocol.submit(request))

    def result(self, evaluation_id: str, wait_s: float = LONG_POLL_S) -> EvaluationResult:
        """State of one evaluation, waiting up to `wait_s` (the server caps it at 60) for it to be done."""
        return self._run(self._protocol.result(evaluation_id, wait_s))

    def cancel(self, evaluation_id: str) -> EvaluationResult:
        """Cancels; kills what runs. A finished evaluation keeps its verdict."""
        return self._run(self._protocol.cancel(evaluation_id))

    def evaluate(
        self, task: TaskSpec, candidates: Sequence[Candidate], options: Options | None = None,
        client_key: str | None = None, on_result: OnResult | None = None,
    ) -> list[EvaluationResult]:  # fmt: skip
        """Judges any number of candidates and waits for all; `on_result(index, result)` is called in order."""
        return self._run(self._protocol.evaluate(task, candidates, options, client_key, on_result))

    def verify(
        self, arms: Sequence[VerificationTask], options: Options | None = None, client_key: str | None = None
    ) -> VerificationResult:
        """Judges control and treated candidates interleaved and waits for all."""
        return self._run(self._protocol.verify(arms, options, client_key))

    def admission(self, task: TaskSpec) -> str:
        """Why the task must not be trained on (a trivial answer would pass, no `Model`, ...); "" when it may."""
        return self._run(self._protocol.admission(task))

    def stream(self, ids: Sequence[str]) -> Iterator[StageEvent]:
        """Stage changes and results as they come; ends when all are done."""
        with self._http.stream("GET", "/v1/evaluations/stream", params=_stream_path(ids), timeout=None) as response:
            if response.status_code >= 400:
                response.read()
                raise SandboxRejected(_error_details(response).get("error", ""), status=response.status_code)
            for line in response.iter_lines():
                if line:
                    yield StageEvent.model_validate(json.loads(line))


class AsyncSandboxClient:
    """`SandboxClient` with awaitable methods; see there for arguments and errors."""

    def __init__(self, socket: str | Path, timeout_s: float = 30.0, retry_for_s: float = 0.0):
        self._protocol = _Protocol(str(socket), timeout_s, retry_for_s)
        transport = httpx.AsyncHTTPTransport(uds=str(socket))
        self._http = httpx.AsyncClient(
            transport=transport, base_url="http://sandbox", timeout=timeout_s, trust_env=False
        )

    async def __aenter__(self) -> AsyncSandboxClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def _run(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                if isinstance(step, _Pause):
                    await asyncio.sleep(step.seconds)
                    step = steps.send(None)
                    continue
                try:
                    reply = await self._http.request(
                        step.method, step.path, content=step.body, params=step.params,
                        headers=_JSON if step.body is not None else None,
                        timeout=httpx.Timeout(self._protocol.timeout_s, read=step.read_s),
                    )  # fmt: skip
                except httpx.TransportError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(reply)
        except StopIteration as stop:
            return stop.value

    async def health(self) -> Health:
        return await self._run(self._protocol.get("/v1/health", Health))

    async def capabilities(self) -> Capabilities:
        return await self._run(self._protocol.get("/v1/capabilities", Capabilities))

    async def metrics(self) -> str:
        return await self._run(self._protocol.text("/v1/metrics"))

    async def submit(
        self, task: TaskSpec, candidates: Sequence[Candidate], options: Options | None = None,
        client_key: str | None = None,
    ) -> list[str]:  # fmt: skip
        request = EvaluationRequest(
            client_key=client_key, task=task, candidates=list(candidates), options=options or Options()
        )
        return await self._run(self._protocol.submit(request))

    async def result(self, evaluation_id: str, wait_s: float = LONG_POLL_S) -> EvaluationResult:
        return await self._run(self._protocol.result(evaluation_id, wait_s))

    async def cancel(self, evaluation_id: str) -> EvaluationResult:
        return await self._run(self._protocol.cancel(evaluation_id))

    async def evaluate(
        self, task: TaskSpec, candidates: Sequence[Candidate], options: Options | None = None,
        client_key: str | None = None, on_result: OnResult | None = None,
    ) -> list[EvaluationResult]:  # fmt: skip
        return await self._run(self._protocol.evaluate(task, candidates, options, client_key, on_result))

    async def verify(
        self, arms: Sequence[VerificationTask], options: Options | None = None, client_key: str | None = None
    ) -> VerificationResult:
        return await self._run(self._protocol.verify(arms, options, client_key))

    async def admission(self, task: TaskSpec) -> str:
        return await self._run(self._protocol.admission(task))

    async def stream(self, ids: Sequence[str]) -> AsyncIterator[StageEvent]:
        params = _stream_path(ids)
        async with self._http.stream("GET", "/v1/evaluations/stream", params=params, timeout=None) as response:
            if response.status_code >= 400:
                await response.aread()
                raise SandboxRejected(_error_details(response).get("error", ""), status=response.status_code)
            async for line in response.aiter_lines():
                if line:
                    yield StageEvent.model_validate(json.loads(line))


_JSON = {"content-type": "application/json"}
