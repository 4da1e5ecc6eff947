"""KernelGYM's HTTP API in front of a running sandbox: its published clients work with only the URL changed.

    python -m sandbox serve --socket /run/sandbox.sock
    SANDBOX_TOKEN=secret python -m sandbox gateway --socket /run/sandbox.sock --listen 0.0.0.0:8000
    # a client's server_url: http://secret@judge.example:8000

`POST /evaluate` answers when the verdict is there, as KernelGYM does; until then `GET /status/{task_id}` tells where it stands,
afterwards `GET /results/{task_id}` has it. A task id stands for one evaluation: who posts it again, say after a lost connection,
gets the same one, unless `force_refresh` is set.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

import sandbox
from sandbox.client import AsyncSandboxClient, SandboxBusy, SandboxRejected, SandboxUnavailable
from sandbox.compat.kernelgym_models import (
    BatchEvaluationRequest,
    BatchEvaluationResponse,
    EvaluationRequest,
    EvaluationResponse,
    TaskStatusResponse,
    response_of,
    status_of,
)
from sandbox.limited_body import LimitedBody
from sandbox.protocol import EvaluationResult

KEPT_TASKS = 50_000
PATIENCE_S = 600.0
"""How long a sandbox that is restarting is waited for; evaluations that it has lost are submitted again."""
MAX_BODY_BYTES = 32 << 20
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


class GatewayError(RuntimeError):
    """The gateway cannot start; the text says why and what to do."""


@dataclass
class Task:
    """One evaluation under its client's name."""

    request: EvaluationRequest
    evaluation_id: str
    submitted_at: str
    started: float
    verdict: asyncio.Task[EvaluationResult]
    completed_at: str | None = None
    seconds: float | None = None

    def response(self, result: EvaluationResult) -> EvaluationResponse:
        return response_of(self.request, result).model_copy(
            update={"submitted_at": self.submitted_at, "completed_at": self.completed_at, "processing_time": self.seconds}
        )


class Gateway:
    """Keeps the tasks that clients have named, and asks the sandbox for their verdicts.

    Args:
      socket: of the sandbox.
    """

    def __init__(self, socket: str | Path):
        name = f"kernelgym {uuid.uuid4().hex}"
        self._prompt = AsyncSandboxClient(socket, name=name)
        self._patient = AsyncSandboxClient(socket, retry_for_s=PATIENCE_S, name=name)
        self._tasks: OrderedDict[str, Task] = OrderedDict()
        self._devices: list[str] = []
        self.finished = 0

    async def close(self) -> None:
        for task in self._tasks.values():
            task.verdict.cancel()
        await asyncio.gather(*(task.verdict for task in self._tasks.values()), return_exceptions=True)
        await self._prompt.close()
        await self._patient.close()

    async def submit(self, request: EvaluationRequest) -> Task:
        """The task of that id, submitted if it is new.

        Raises:
          SandboxBusy, SandboxUnavailable, SandboxRejected.
        """
        known = self._tasks.get(request.task_id)
        if known is not None and not request.force_refresh and not _came_to_nothing(known.verdict):
            return known
        if not self._devices:
            self._devices = (await self._prompt.capabilities()).devices
        spec, candidate, options = request.translated(self._devices)
        key = "kernelgym-" + hashlib.sha256(request.model_dump_json().encode()).hexdigest()
        if request.force_refresh:  # the sandbox answers what it has judged before
            key = f"{key}-{uuid.uuid4().hex}"
            candidate = candidate.model_copy(update={"source": f"{candidate.source}\n# {key[-32:]}\n"})
        [evaluation_id] = await self._prompt.submit(spec, [candidate], options, key, request.urgency)
        verdict = asyncio.create_task(self._verdict(spec, candidate, options, key, request.urgency))
        task = Task(request, evaluation_id, _now(), time.monotonic(), verdict)
        verdict.add_done_callback(lambda _: self._finish(task))
        self._tasks[request.task_id] = task
        self._tasks.move_to_end(request.task_id)
        while len(self._tasks) > KEPT_TASKS and next(iter(self._tasks.values())).verdict.done():
            self._tasks.popitem(last=False)
        return task

    async def _verdict(self, spec, candidate, options, key: str, priority: int) -> EvaluationResult:
        [result] = await self._patient.evaluate(spec, [candidate], options, key, priority=priority)
        return result

    def _finish(self, task: Task) -> None:
        task.completed_at, task.seconds = _now(), time.monotonic() - task.started
        self.finished += 1

    def task(self, task_id: str) -> Task:
        """Raises HTTPException (404)."""
        try:
            return self._tasks[task_id]
        except KeyError:
            raise HTTPException(404, f"Task {task_id} not found") from None

    async def wait(self, task: Task) -> EvaluationResponse:
        """The verdict, once it is there; a client that goes away does not end the evaluation."""
        return task.response(await asyncio.shield(task.verdict))

    async def state(self, task: Task) -> EvaluationResult:
        """The evaluation as it stands now."""
        if task.verdict.done():
            return task.verdict.result()
        try:
            return await self._prompt.result(task.evaluation_id, 0.0)
        except SandboxRejected as error:
            if error.status != 404:
                raise
            return EvaluationResult(id=task.evaluation_id)  # a sandbox that has restarted: it is submitted again

    async def cancel(self, task: Task) -> bool:
        """Whether it was still to be cancelled."""
        return not task.verdict.done() and (await self._prompt.cancel(task.evaluation_id)).outcome == "cancelled"

    async def health(self) -> dict[str, Any]:
        found = await self._prompt.health()
        return {
            "status": "healthy" if found.status == "ok" else found.status,
            "timestamp": _now(),
            "gpu_status": {device: {} for device in found.devices if device != "cpu"},
            "queue_status": {
                "pending": found.queue.waiting,
                "processing": found.queue.running,
                "completed": self.finished,
                "limit": found.queue.limit,
                "workers": found.queue.workers,
            },
            "memory_usage": {},
            "active_tasks": found.queue.waiting + found.queue.running,
            "total_processed": self.finished,
            "uptime": found.uptime_s,
        }

    async def metrics(self) -> str:
        """The sandbox's own, as Prometheus text."""
        return await self._prompt.metrics()


def create_app(socket: str | Path, token: str | None = None) -> FastAPI:
    """The application. With a token every request needs it, as the URL's user or as a bearer token."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.gateway = Gateway(socket)
        try:
            yield
        finally:
            await app.state.gateway.close()

    app = FastAPI(title="KernelGYM's API by dk sandbox", version=sandbox.__version__, lifespan=lifespan)
    _handle_errors(app)
    app.add_middleware(LimitedBody, limit_bytes=MAX_BODY_BYTES, refuse=_too_large)

    @app.middleware("http")
    async def admit(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        if token is not None and not _has_token(request.headers.get("authorization", ""), token):
            detail = "a token is needed: http://TOKEN@host:port, or the header 'Authorization: Bearer TOKEN'"
            return JSONResponse({"detail": detail}, 401, {"WWW-Authenticate": 'Basic realm="sandbox"'})
        return await proceed(request)

    def gateway() -> Gateway:
        return app.state.gateway

    @app.get("/")
    async def root() -> dict[str, str]:
        return {"name": "KernelGym", "version": sandbox.__version__, "description": app.title, "timestamp": _now()}

    @app.post("/evaluate")
    async def evaluate(request: EvaluationRequest) -> EvaluationResponse:
        """Judges a kernel and answers with its verdict."""
        return await gateway().wait(await gateway().submit(request))

    @app.post("/evaluate/batch")
    async def evaluate_batch(request: BatchEvaluationRequest) -> BatchEvaluationResponse:
        """Judges several kernels and answers with all verdicts."""
        submitted_at = _now()
        tasks = [await gateway().submit(task) for task in request.tasks]
        results = [await gateway().wait(task) for task in tasks]
        completed = sum(result.status == "completed" for result in results)
        return BatchEvaluationResponse(
            batch_id=request.batch_id, total_tasks=len(results), completed_tasks=completed,
            failed_tasks=len(results) - completed, results=results, batch_status="completed" if completed else "failed",
            submitted_at=submitted_at, completed_at=_now(),
        )  # fmt: skip

    @app.get("/status/{task_id}")
    async def status(task_id: str) -> TaskStatusResponse:
        """Where an evaluation stands."""
        task = gateway().task(task_id)
        result = await gateway().state(task)
        found = TaskStatusResponse(task_id=task_id, status=status_of(result))
        if found.status in ("failed", "timeout"):
            found.error_message = result.feedback
        return found

    @app.get("/results/{task_id}")
    async def results(task_id: str) -> EvaluationResponse:
        """A verdict, or the evaluation's state as long as there is none."""
        task = gateway().task(task_id)
        return task.response(await gateway().state(task))

    @app.delete("/tasks/{task_id}")
    async def cancel(task_id: str) -> dict[str, str]:
        """Cancels an evaluation that is not done."""
        if not await gateway().cancel(gateway().task(task_id)):
            raise HTTPException(404, f"Task {task_id} not found or cannot be cancelled")
        return {"message": f"Task {task_id} cancelled successfully"}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return await gateway().health()

    @app.get("/queue/status")
    async def queue() -> dict[str, Any]:
        return (await gateway().health())["queue_status"]

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(await gateway().metrics(), media_type="text/plain; version=0.0.4")

    return app


def serve(socket: Path, listen: str, token: str | None, *, log_level: str = "warning") -> None:
    """Serves on TCP until SIGTERM or SIGINT.

    Args:
      listen: HOST:PORT.

    Raises:
      GatewayError: an address that is none, or one that others reach without a token.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise GatewayError(f"--listen {listen}: write HOST:PORT, such as 127.0.0.1:8000")
    if token is None and host not in _LOOPBACK:
        raise GatewayError(
            f"--listen {listen}: others can reach this address; set SANDBOX_TOKEN (or --token-file) to what clients must "
            "put before the host in their URL, or listen on 127.0.0.1"
        )
    uvicorn.run(create_app(socket, token), host=host.strip("[]"), port=int(port), log_level=log_level, access_log=False)


def _came_to_nothing(verdict: asyncio.Task[EvaluationResult]) -> bool:
    return verdict.done() and (verdict.cancelled() or verdict.exception() is not None)


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(SandboxBusy)
    async def busy(_: Request, error: SandboxBusy) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 429, {"Retry-After": f"{error.retry_after_s:g}"})

    @app.exception_handler(SandboxUnavailable)
    async def unavailable(_: Request, error: SandboxUnavailable) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 503, {"Retry-After": "5"})

    @app.exception_handler(SandboxRejected)
    async def rejected(_: Request, error: SandboxRejected) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, error.status)


def _too_large(what: str) -> JSONResponse:
    return JSONResponse({"detail": f"{what}: at most {MAX_BODY_BYTES} bytes a request"}, 413)


def _has_token(header: str, token: str) -> bool:
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "basic":
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            value = base64.b64decode(value, validate=True).decode().partition(":")[0]
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(value.encode(), token.encode())


def _now() -> str:
    return datetime.now(UTC).isoformat()
