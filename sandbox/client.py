"""Clients of a running sandbox: `SandboxClient` (blocking) and `AsyncSandboxClient` with the same methods.

    with SandboxClient("/run/sandbox.sock", retry_for_s=600) as sandbox:
        candidate = Candidate(source=..., language="cpp", form="kernel")
        [result] = sandbox.evaluate(TaskSpec(reference=...), [candidate])

With `retry_for_s` > 0 a call outlives a busy, restarting or lost server: it backs off, honours
Retry-After, and submits again under the same client key when a new server no longer knows the ids. Results
already received are kept.

The logic is written once, as generators that yield what they want from the world (a call, a pause); the
two clients differ only in how they carry that out.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Literal

import httpx

from sandbox.conversation import (
    LONG_POLL_S,
    Conversation,
    OnResult,
    Pause,
    SandboxBusy,
    SandboxRejected,
    SandboxUnavailable,
    Steps,
    T,
    error_details,
    stream_parameters,
)
from sandbox.protocol import (
    Admission,
    Candidate,
    Capabilities,
    EvaluationRequest,
    EvaluationResult,
    Health,
    Options,
    PairedSpeedups,
    RuleSpec,
    StageEvent,
    TaskSpec,
    VerificationResult,
    VerificationTask,
)

__all__ = ["AsyncSandboxClient", "SandboxBusy", "SandboxClient", "SandboxRejected", "SandboxUnavailable"]


class SandboxClient:
    """Blocking client; one object may be shared by threads.

    Args:
      socket: path of the server's Unix socket.
      timeout_s: longest silence of the server that is not a long poll.
      retry_for_s: how long a busy or absent server is waited for, per outage; 0 raises at once.
      name: clients of different names take turns; by default this object has one of its own.

    Raises (every method):
      SandboxUnavailable: nobody answers. SandboxBusy: queue full. SandboxRejected: the request is wrong.
    """

    def __init__(self, socket: str | Path, timeout_s: float = 30.0, retry_for_s: float = 0.0, name: str | None = None):
        self._conversation = Conversation(str(socket), timeout_s, retry_for_s, name or uuid.uuid4().hex)
        transport = httpx.HTTPTransport(uds=str(socket))
        self._http = httpx.Client(
            transport=transport, base_url="http://sandbox", timeout=timeout_s, trust_env=False
        )
        self._aborted = threading.Event()

    def __enter__(self) -> SandboxClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; evaluations that were submitted go on."""
        self._http.close()

    def abort(self) -> None:
        """Has calls that other threads are waiting in, and all later ones, raise SandboxUnavailable, within one long poll
        (LONG_POLL_S): for a process that is told to end while it waits for verdicts."""
        self._aborted.set()

    def _run(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                if self._aborted.is_set():
                    raise SandboxUnavailable("the call was given up: this client was told to abort")
                if isinstance(step, Pause):
                    self._aborted.wait(step.seconds)
                    step = steps.send(None)
                    continue
                try:
                    reply = self._http.request(
                        step.method,
                        step.path,
                        content=step.body,
                        params=step.params,
                        headers=_JSON if step.body is not None else None,
                        timeout=httpx.Timeout(self._conversation.timeout_s, read=step.read_s),
                    )
                except httpx.TransportError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(reply)
        except StopIteration as stop:
            return stop.value

    def health(self) -> Health:
        """Liveness, isolation level, devices and queue."""
        return self._run(self._conversation.get("/v1/health", Health))

    def capabilities(self) -> Capabilities:
        """Languages, devices, limits and the rule of the bare kernel form."""
        return self._run(self._conversation.get("/v1/capabilities", Capabilities))

    def metrics(self) -> str:
        """Prometheus text."""
        return self._run(self._conversation.text("/v1/metrics"))

    def submit(
        self,
        task: TaskSpec,
        candidates: Sequence[Candidate],
        options: Options | None = None,
        client_key: str | None = None,
        priority: int = 0,
    ) -> list[str]:
        """Queues up to 64 candidates and returns their ids at once. For `priority` see `evaluate`."""
        request = EvaluationRequest(
            client_key=client_key, client=self._conversation.name, priority=priority, task=task, candidates=list(candidates),
            options=options or Options(),
        )  # fmt: skip
        return self._run(self._conversation.submit(request))

    def result(self, evaluation_id: str, wait_s: float = LONG_POLL_S) -> EvaluationResult:
        """State of one evaluation, waiting up to `wait_s` (the server caps it at 60) for it to be done."""
        return self._run(self._conversation.result(evaluation_id, wait_s))

    def cancel(self, evaluation_id: str) -> EvaluationResult:
        """Cancels; kills what runs. A finished evaluation keeps its verdict."""
        return self._run(self._conversation.cancel(evaluation_id))

    def evaluate(
        self,
        task: TaskSpec,
        candidates: Sequence[Candidate],
        options: Options | None = None,
        client_key: str | None = None,
        on_result: OnResult | None = None,
        priority: int = 0,
    ) -> list[EvaluationResult]:
        """Judges any number of candidates and waits for all; `on_result(index, result)` is called in
        order. Of what this client has submitted the highest `priority` (0 to 9; verifications have 1) comes first."""
        return self._run(self._conversation.evaluate(task, candidates, options, client_key, on_result, priority))

    def verify(
        self,
        arms: Sequence[VerificationTask],
        options: Options | None = None,
        client_key: str | None = None,
        rule: RuleSpec | None = None,
        earlier: Sequence[Sequence[PairedSpeedups]] = (),
    ) -> VerificationResult:
        """Judges control and treated candidates interleaved and waits for all.

        With a `rule` the answer has its `decision` and the `samples` that it rests on. While that says "continue" a test goes on: new
        candidates for the same arms, the same rule, and as `earlier` the answer's samples.
        """
        return self._run(self._conversation.verify(arms, options, client_key, rule, earlier))

    def examine(self, task: TaskSpec, options: Options | None = None, timing: Literal["none", "quick"] = "quick") -> Admission:
        """What the server finds out about a task itself: whether it can be used, what trivial answers would pass, what it takes.

        Args:
            options: whose deadlines and memory it has to keep to.
            timing: "none" leaves times of calls out.

        Raises:
            SandboxUnavailable: it could not be examined, by no fault of its own.
        """
        return self._run(self._conversation.examine(task, options, timing))

    def admission(self, task: TaskSpec) -> str:
        """Why the task must not be trained on (a trivial answer would pass, no `Model`, ...); "" when it
        may."""
        return self.examine(task, timing="none").refusal

    def stream(self, ids: Sequence[str]) -> Iterator[StageEvent]:
        """Stage changes and results as they come; ends when all are done."""
        with self._http.stream(
            "GET", "/v1/evaluations/stream", params=stream_parameters(ids), timeout=None
        ) as response:
            if response.status_code >= 400:
                response.read()
                raise SandboxRejected(error_details(response).get("error", ""), status=response.status_code)
            for line in response.iter_lines():
                if line:
                    yield StageEvent.model_validate(json.loads(line))


class AsyncSandboxClient:
    """`SandboxClient` with awaitable methods; see there for arguments and errors."""

    def __init__(self, socket: str | Path, timeout_s: float = 30.0, retry_for_s: float = 0.0, name: str | None = None):
        self._conversation = Conversation(str(socket), timeout_s, retry_for_s, name or uuid.uuid4().hex)
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
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    step = steps.send(None)
                    continue
                try:
                    reply = await self._http.request(
                        step.method,
                        step.path,
                        content=step.body,
                        params=step.params,
                        headers=_JSON if step.body is not None else None,
                        timeout=httpx.Timeout(self._conversation.timeout_s, read=step.read_s),
                    )
                except httpx.TransportError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(reply)
        except StopIteration as stop:
            return stop.value

    async def health(self) -> Health:
        return await self._run(self._conversation.get("/v1/health", Health))

    async def capabilities(self) -> Capabilities:
        return await self._run(self._conversation.get("/v1/capabilities", Capabilities))

    async def metrics(self) -> str:
        return await self._run(self._conversation.text("/v1/metrics"))

    async def submit(
        self,
        task: TaskSpec,
        candidates: Sequence[Candidate],
        options: Options | None = None,
        client_key: str | None = None,
        priority: int = 0,
    ) -> list[str]:
        request = EvaluationRequest(
            client_key=client_key, client=self._conversation.name, priority=priority, task=task, candidates=list(candidates),
            options=options or Options(),
        )  # fmt: skip
        return await self._run(self._conversation.submit(request))

    async def result(self, evaluation_id: str, wait_s: float = LONG_POLL_S) -> EvaluationResult:
        return await self._run(self._conversation.result(evaluation_id, wait_s))

    async def cancel(self, evaluation_id: str) -> EvaluationResult:
        return await self._run(self._conversation.cancel(evaluation_id))

    async def evaluate(
        self,
        task: TaskSpec,
        candidates: Sequence[Candidate],
        options: Options | None = None,
        client_key: str | None = None,
        on_result: OnResult | None = None,
        priority: int = 0,
    ) -> list[EvaluationResult]:
        return await self._run(self._conversation.evaluate(task, candidates, options, client_key, on_result, priority))

    async def verify(
        self,
        arms: Sequence[VerificationTask],
        options: Options | None = None,
        client_key: str | None = None,
        rule: RuleSpec | None = None,
        earlier: Sequence[Sequence[PairedSpeedups]] = (),
    ) -> VerificationResult:
        return await self._run(self._conversation.verify(arms, options, client_key, rule, earlier))

    async def examine(self, task: TaskSpec, options: Options | None = None, timing: Literal["none", "quick"] = "quick") -> Admission:
        return await self._run(self._conversation.examine(task, options, timing))

    async def admission(self, task: TaskSpec) -> str:
        return (await self.examine(task, timing="none")).refusal

    async def stream(self, ids: Sequence[str]) -> AsyncIterator[StageEvent]:
        params = stream_parameters(ids)
        async with self._http.stream(
            "GET", "/v1/evaluations/stream", params=params, timeout=None
        ) as response:
            if response.status_code >= 400:
                await response.aread()
                raise SandboxRejected(error_details(response).get("error", ""), status=response.status_code)
            async for line in response.aiter_lines():
                if line:
                    yield StageEvent.model_validate(json.loads(line))


_JSON = {"content-type": "application/json"}
