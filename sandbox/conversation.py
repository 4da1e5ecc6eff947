"""What clients say to a server and how they persist, free of any way of doing input and output.

Each method of `Conversation` is a generator: it yields a `Call` to make or a `Pause` to keep, is sent the
reply (or has a transport error thrown in), and returns its result. `sandbox.client` carries that out,
blocking or asynchronously.
"""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import httpx
from pydantic import BaseModel

from sandbox.protocol import (
    MAX_CANDIDATES,
    Admission,
    AdmissionRequest,
    Candidate,
    EvaluationRequest,
    EvaluationResult,
    EvaluationResults,
    EvaluationsAccepted,
    Options,
    PairedSpeedups,
    RuleSpec,
    TaskSpec,
    VerificationAccepted,
    VerificationRequest,
    VerificationResult,
    VerificationTask,
    limits_of,
)

log = logging.getLogger("sandbox.client")
T = TypeVar("T")
OnResult = Callable[[int, EvaluationResult], None]
LONG_POLL_S = 5.0
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
class Call:
    method: str
    path: str
    body: str | None = None
    params: dict[str, Any] | None = None
    read_s: float = 30.0


@dataclass(frozen=True)
class Pause:
    seconds: float


Steps = Generator[Call | Pause, Any, T]


@dataclass(frozen=True)
class Conversation:
    """The conversation with a server, free of any way of doing input and output."""

    socket: str
    timeout_s: float
    retry_for_s: float
    name: str
    """Under which this client's work takes turns with others'."""

    def request(self, call: Call) -> Steps[httpx.Response]:
        give_up = time.monotonic() + self.retry_for_s
        attempt, logged = 0, -LOG_EVERY_S
        while True:
            error: RuntimeError
            pause_s = min(0.1 * 2 ** min(attempt, 6), 5.0)
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
                details = error_details(response)
                said = details.get("error", response.text[:200])
                if response.status_code == 500:
                    error = SandboxUnavailable(f"the sandbox on {self.socket} failed: {said}")
                elif response.status_code in (429, 502, 503, 504):
                    pause_s = _retry_after_s(response, pause_s)
                    error = SandboxBusy(f"the sandbox on {self.socket} is busy: {said}", pause_s)
                else:
                    raise SandboxRejected(
                        said,
                        status=response.status_code,
                        field=details.get("field"),
                        hint=details.get("hint"),
                    )
            if time.monotonic() + pause_s > give_up:
                raise error
            if time.monotonic() - logged >= LOG_EVERY_S:
                logged = time.monotonic()
                log.warning("%s; retrying for up to %.0f s more", error, give_up - logged)
            attempt += 1
            yield Pause(pause_s * random.uniform(0.8, 1.2))

    def get(self, path: str, model: type[T], params: dict | None = None, read_s: float = 0.0) -> Steps[T]:
        response = yield from self.request(Call("GET", path, params=params, read_s=read_s + self.timeout_s))
        return model.model_validate_json(response.content)

    def post(self, path: str, body: BaseModel, model: type[T], without: set[str] | None = None) -> Steps[T]:
        """`without`: fields that are not sent, which a server of before they came would refuse."""
        call = Call("POST", path, body=body.model_dump_json(exclude=without), read_s=self.timeout_s)
        response = yield from self.request(call)
        return model.model_validate_json(response.content)

    def text(self, path: str) -> Steps[str]:
        response = yield from self.request(Call("GET", path, read_s=self.timeout_s))
        return response.text

    def submit(self, request: EvaluationRequest) -> Steps[list[str]]:
        accepted = yield from self.post("/v1/evaluations", request, EvaluationsAccepted)
        return accepted.ids

    def result(self, evaluation_id: str, wait_s: float) -> Steps[EvaluationResult]:
        path = f"/v1/evaluations/{evaluation_id}"
        return (yield from self.get(path, EvaluationResult, {"wait_s": wait_s}, read_s=wait_s))

    def results(self, ids: Sequence[str], wait_s: float) -> Steps[list[EvaluationResult]]:
        """Those before the first that is not done."""
        params = {"ids": ",".join(ids), "wait_s": wait_s}
        found = yield from self.get("/v1/evaluations/results", EvaluationResults, params, read_s=wait_s)
        return found.results

    def cancel(self, evaluation_id: str) -> Steps[EvaluationResult]:
        response = yield from self.request(
            Call("DELETE", f"/v1/evaluations/{evaluation_id}", read_s=self.timeout_s)
        )
        return EvaluationResult.model_validate_json(response.content)

    def evaluate(
        self,
        task: TaskSpec,
        candidates: Sequence[Candidate],
        options: Options | None,
        client_key: str | None,
        on_result: OnResult | None,
        priority: int = 0,
    ) -> Steps[list[EvaluationResult]]:
        key = client_key or uuid.uuid4().hex
        batches = []
        for start in range(0, len(candidates), MAX_CANDIDATES):
            request = EvaluationRequest(
                client_key=key if start == 0 else f"{key}/{start}",
                client=self.name,
                priority=priority,
                task=task,
                candidates=list(candidates[start : start + MAX_CANDIDATES]),
                options=options or Options(),
            )
            ids = yield from self.submit(request)
            batches.append((start, request, ids))
        results: list[EvaluationResult] = []
        for start, request, ids in batches:
            finished = 0
            while finished < len(ids):
                try:
                    found = yield from self.results(ids[finished:], LONG_POLL_S)
                except SandboxRejected as error:
                    ids = yield from self._resubmit(request, ids, finished, error)
                    continue
                for result in found:
                    if on_result:
                        on_result(start + finished, result)
                    results.append(result)
                    finished += 1
        return results

    def _resubmit(
        self, request: EvaluationRequest, ids: list[str], finished: int, error: SandboxRejected
    ) -> Steps[list[str]]:
        """A new server does not know our ids: same key, same body; what we already have is not judged
        again."""
        if error.status != 404:
            raise error
        if self.retry_for_s <= 0:
            raise SandboxUnavailable(
                f"the sandbox on {self.socket} was restarted and lost {ids[finished]}"
            ) from error
        log.warning(
            "the sandbox on %s was restarted; submitting %d unfinished candidates again",
            self.socket,
            len(ids) - finished,
        )
        fresh_ids = yield from self.submit(request)
        for known_id in fresh_ids[:finished]:
            yield from self.cancel(known_id)
        return fresh_ids

    def verify(
        self,
        arms: Sequence[VerificationTask],
        options: Options | None,
        client_key: str | None,
        rule: RuleSpec | None,
        earlier: Sequence[Sequence[PairedSpeedups]],
    ) -> Steps[VerificationResult]:
        request = VerificationRequest(
            client_key=client_key or uuid.uuid4().hex, client=self.name, arms=list(arms), options=options or Options(),
            rule=rule, earlier=[list(look) for look in earlier],
        )  # fmt: skip
        accepted = yield from self.post(
            "/v1/verifications", request, VerificationAccepted, without=None if rule or earlier else {"rule", "earlier"}
        )
        while True:
            path = f"/v1/verifications/{accepted.id}"
            try:
                result = yield from self.get(
                    path, VerificationResult, {"wait_s": LONG_POLL_S}, read_s=LONG_POLL_S
                )
            except SandboxRejected as error:
                if error.status != 404 or self.retry_for_s <= 0:
                    raise
                accepted = yield from self.post(
            "/v1/verifications", request, VerificationAccepted, without=None if rule or earlier else {"rule", "earlier"}
        )
                continue
            if result.state == "done":
                return result

    def examine(self, task: TaskSpec, options: Options | None, timing: Literal["none", "quick"]) -> Steps[Admission]:
        limits = limits_of(options or Options())
        request = AdmissionRequest(client_key=uuid.uuid4().hex, client=self.name, task=task, timing=timing, **limits)
        accepted = yield from self.post("/v1/admissions", request, EvaluationsAccepted)
        while True:
            try:
                result = yield from self.result(accepted.ids[0], LONG_POLL_S)
            except SandboxRejected as error:
                if error.status != 404 or self.retry_for_s <= 0:
                    raise
                accepted = yield from self.post("/v1/admissions", request, EvaluationsAccepted)
                continue
            if result.state == "done":
                break
        try:
            return Admission.of(result)
        except ValueError as error:
            raise SandboxUnavailable(str(error)) from error


def error_details(response: httpx.Response) -> dict[str, Any]:
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


def stream_parameters(ids: Sequence[str]) -> dict[str, str]:
    return {"ids": ",".join(ids)}
