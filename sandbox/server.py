"""The broker: protocol v1 over HTTP on a Unix socket. Runs no task or candidate code and imports no torch."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import stat
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException

import sandbox
from sandbox.build.artifacts import ArtifactStore
from sandbox.drain import drain
from sandbox.fleet.fleet import Fleet
from sandbox.fleet.offer import Served
from sandbox.jail.probe import isolation
from sandbox.limited_body import LimitedBody
from sandbox.protocol import (
    MAX_CANDIDATES,
    MAX_SOURCE_BYTES,
    RULE_KINDS,
    AdmissionRequest,
    Candidate,
    Capabilities,
    ErrorReply,
    EvaluationRequest,
    EvaluationResult,
    EvaluationResults,
    EvaluationsAccepted,
    Health,
    Options,
    TaskSpec,
    VerificationAccepted,
    VerificationRequest,
    VerificationResult,
)
from sandbox.records import KeyConflict, QueueFull, ShuttingDown, UnknownId
from sandbox.scheduler import Scheduler
from sandbox.settings import Settings, capabilities, make_scratch
from sandbox.workers import WorkerSettings

log = logging.getLogger("sandbox.server")
MAX_WAIT_S = 60.0
MAX_BODY_BYTES = 2 * MAX_CANDIDATES * MAX_SOURCE_BYTES
MAX_STREAM_IDS = 4096
WaitSeconds = Annotated[float, Query(ge=0, le=MAX_WAIT_S)]


class ServerError(RuntimeError):
    """The server cannot start; the text says why and what to do."""


class _Refused(Exception):
    """An answer other than success."""

    def __init__(
        self, status: int, error: str, field: str | None = None, hint: str | None = None, retry: float = 0
    ):
        super().__init__(error)
        self.status, self.reply, self.retry = status, ErrorReply(error=error, field=field, hint=hint), retry


def create_app(settings: Settings, scratch: Path, fleet: Fleet | None = None) -> FastAPI:
    """The application; its scheduler starts and ends with it and is `app.state.scheduler`. A fleet's nodes judge instead of this host."""
    here = None if fleet else Served(capabilities=capabilities(settings), isolation=isolation(settings.isolation))
    worker_settings = WorkerSettings(
        scratch=scratch,
        cache=settings.cache,
        threads=settings.threads,
        isolation=settings.isolation,
        gpu=any(device.startswith("cuda") for device in settings.devices),
        device_share=settings.device_share,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    started = time.monotonic()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        scheduler = Scheduler(
            worker_settings, workers=settings.workers, max_queue=settings.max_queue, cores=settings.cores, fleet=fleet
        )
        app.state.scheduler = scheduler
        await scheduler.start()
        try:
            yield
        finally:
            await scheduler.close()

    app = FastAPI(title="dk sandbox", version=sandbox.__version__, lifespan=lifespan)
    _handle_errors(app)

    def scheduler() -> Scheduler:
        return app.state.scheduler

    def served() -> Served:
        return here or fleet.offer

    @app.post("/v1/evaluations", status_code=202)
    async def submit(request: EvaluationRequest) -> EvaluationsAccepted:
        """Queues candidates against one task. Idempotent by `client_key`."""
        offered = served().capabilities
        _check_task(request.task, offered, "task")
        _check_profile(request.options, [request.task], offered)
        for number, candidate in enumerate(request.candidates):
            _check_candidate(candidate, request.task, offered, f"candidates.{number}")
        ids = scheduler().submit(request)
        return EvaluationsAccepted(ids=ids)

    # Declared before the route with an id, which would take "stream" and "results" for one.
    @app.get("/v1/evaluations/stream")
    async def stream(ids: str) -> StreamingResponse:
        """NDJSON of stage changes and results; ends when all named evaluations are done."""
        queue, records = scheduler().listen(_named(ids))
        return StreamingResponse(_events(queue, records), media_type="application/x-ndjson")

    @app.get("/v1/evaluations/results")
    async def results(ids: str, wait_s: WaitSeconds = 0.0) -> EvaluationResults:
        """Long-polls the first of the named evaluations, and answers with all results up to the first that is not there yet."""
        return EvaluationResults(results=await scheduler().wait_leading(_named(ids), wait_s))

    @app.get("/v1/evaluations/{evaluation_id}")
    async def result(evaluation_id: str, wait_s: WaitSeconds = 0.0) -> EvaluationResult:
        """Long-polls one result."""
        return await scheduler().wait(evaluation_id, wait_s)

    @app.delete("/v1/evaluations/{evaluation_id}")
    async def cancel(evaluation_id: str) -> EvaluationResult:
        """Cancels; kills what runs. A finished evaluation keeps its verdict."""
        now = scheduler().cancel(evaluation_id)
        return now if now.state == "done" else await scheduler().wait(evaluation_id, 10.0)

    @app.post("/v1/admissions", status_code=202)
    async def examine(request: AdmissionRequest) -> EvaluationsAccepted:
        """Queues the examination of a task; its one id is asked for and cancelled as an evaluation's."""
        _check_task(request.task, served().capabilities, "task")
        return EvaluationsAccepted(ids=scheduler().submit(request.as_evaluation()))

    @app.post("/v1/verifications", status_code=202)
    async def verify(request: VerificationRequest) -> VerificationAccepted:
        """Queues paired arms, control and treated taking turns; with a `rule` the result has its decision."""
        offered = served().capabilities
        _check_profile(request.options, [arm.task for arm in request.arms], offered)
        for number, arm in enumerate(request.arms):
            _check_task(arm.task, offered, f"arms.{number}.task")
            for side in ("control", "treated"):
                for index, candidate in enumerate(getattr(arm, side)):
                    _check_candidate(candidate, arm.task, offered, f"arms.{number}.{side}.{index}")
                    if request.rule is not None:
                        _check_timed(candidate, arm.task, f"arms.{number}.{side}.{index}")
        return VerificationAccepted(id=scheduler().submit_verification(request))

    @app.get("/v1/verifications/{verification_id}")
    async def verification(verification_id: str, wait_s: WaitSeconds = 0.0) -> VerificationResult:
        """Long-polls all results of a verification, and what its rule decides."""
        return await scheduler().wait_verification(verification_id, wait_s)

    @app.get("/v1/health")
    async def health() -> Health:
        """Liveness, isolation level, devices, queue."""
        queue, now = scheduler().queue, served()
        missing = list(now.isolation.missing)
        if scheduler().problem:
            missing.append(scheduler().problem)
        ready = queue.workers_ready == queue.workers > 0
        status = "ok" if ready else "degraded" if scheduler().problem or queue.workers_ready else "starting"
        status = "draining" if scheduler().draining else status
        return Health(
            status=status,
            version=sandbox.__version__,
            level=now.isolation.name,
            features=list(now.isolation.features),
            missing=missing,
            devices=list(now.capabilities.devices),
            queue=queue,
            uptime_s=time.monotonic() - started,
        )

    @app.get("/v1/capabilities")
    async def get_capabilities() -> Capabilities:
        """Languages, devices, limits, and the rule of the bare kernel form."""
        return served().capabilities

    @app.get("/v1/metrics")
    async def metrics() -> PlainTextResponse:
        """Prometheus text."""
        return PlainTextResponse(scheduler().metrics_text(), media_type="text/plain; version=0.0.4")

    return app


def _named(ids: str) -> list[str]:
    """Ids in a query. Raises _Refused for none or too many."""
    names = [name for name in ids.split(",") if name]
    if not 1 <= len(names) <= MAX_STREAM_IDS:
        raise _Refused(422, f"{len(names)} ids, between 1 and {MAX_STREAM_IDS} are possible", "ids")
    return names


def serve(settings: Settings, socket_path: Path, *, fleet: Fleet | None = None, log_level: str = "info") -> None:
    """Serves on a Unix socket (mode 0600) until SIGTERM or SIGINT; nothing it started outlives it.

    Told to end, it finishes what it has for up to `settings.drain_s`, unless it is told again. Logs go wherever the caller has
    them go (`sandbox.logs.configure`).

    Raises:
      ServerError: a live server owns the socket, or a path cannot be used.
    """
    listener = bind_socket(socket_path)
    ours = _file_of(socket_path)
    # uvicorn raises the signal again once it has shut down; the default would skip the clean-up below.
    signal.signal(signal.SIGTERM, _leave)
    scratch: Path | None = None
    try:
        try:
            scratch = make_scratch()
            ArtifactStore(settings.cache).prune()
        except OSError as error:
            raise ServerError(
                f"cannot use the cache {settings.cache} or the temporary directory: {error}"
            ) from error
        config = uvicorn.Config(
            create_app(settings, scratch, fleet),
            log_level=log_level,
            log_config=None,  # ours, as all else here
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=75,
        )
        devices = fleet.offer.capabilities.devices if fleet else settings.devices
        log.info("sandbox serves %s on %s", ", ".join(devices), socket_path)
        _Server(config, settings.drain_s).run(sockets=[listener])
    finally:
        listener.close()
        if ours is not None and _file_of(socket_path) == ours:  # else a successor has taken the place already
            socket_path.unlink(missing_ok=True)
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


class _Server(uvicorn.Server):
    """Told to end, drains and then sends long polls away, which uvicorn would break off with an error."""

    def __init__(self, config: uvicorn.Config, drain_s: float):
        super().__init__(config)
        self._drain_s = drain_s
        self._told = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._told += 1
        if self._told == 1:  # uvicorn would take a second SIGINT for leave to end without ending what runs here
            super().handle_exit(sig, frame)

    async def main_loop(self) -> None:
        await super().main_loop()
        scheduler: Scheduler = self.config.app.state.scheduler
        if self._drain_s:
            await drain(scheduler.begin_drain(), self._drain_s, lambda: self._told > 1)
        scheduler.begin_close()


def _file_of(path: Path) -> tuple[int, int] | None:
    """(Device, inode) of a path, None where nothing is."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _leave(*_: object) -> None:
    raise SystemExit(0)


def bind_socket(path: Path) -> socket.socket:
    """A listening Unix socket of mode 0600; a socket that a dead server left behind is replaced.

    Raises:
      ServerError: a live server listens there, the path is taken by something else, or cannot be made.
    """
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ServerError(f"{path} exists and is no socket; choose another --socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(2.0)
            try:
                probe.connect(str(path))
            except (ConnectionRefusedError, FileNotFoundError):
                path.unlink(missing_ok=True)
            except OSError as error:
                raise ServerError(f"{path} cannot be taken over: {error}") from error
            else:
                raise ServerError(
                    f"a server already listens on {path}; use it, stop it, or choose another --socket"
                )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        reason = "the path is longer than 107 bytes" if "too long" in str(error) else str(error)
        raise ServerError(f"cannot make the socket {path}: {reason}") from error
    finally:
        os.umask(old_mask)
    listener.listen(1024)
    return listener


async def _events(queue: asyncio.Queue, records: list) -> AsyncIterator[str]:
    unfinished = {record.id: record for record in records}
    try:
        while unfinished:
            event = await queue.get()
            yield event.model_dump_json() + "\n"
            if event.state == "done":
                record = unfinished.pop(event.id, None)
                if record is not None:
                    record.fetched = True
    finally:
        for record in records:
            if queue in record.listeners:
                record.listeners.remove(queue)


def _check_task(task: TaskSpec, offered: Capabilities, field: str) -> None:
    if task.device not in offered.devices:
        raise _Refused(
            422,
            f"device {task.device} is not served here",
            f"{field}.device",
            f"served: {', '.join(offered.devices)}; see `python -m sandbox doctor`",
        )


def _check_profile(options: Options, tasks: Sequence[TaskSpec], offered: Capabilities) -> None:
    if options.profile != "ncu":
        return
    if any(task.device == "cpu" for task in tasks):
        raise _Refused(422, "hardware counters are a GPU's, and the task is for cpu", "options.profile", "use a task with device cuda:N")
    if not offered.counters.available:
        hint = f"{offered.counters.problem}; or ask with profile true, for the kernels' shares of time alone"
        raise _Refused(422, "hardware counters cannot be had here", "options.profile", hint)


def _check_candidate(candidate: Candidate, task: TaskSpec, offered: Capabilities, field: str) -> None:
    support = offered.languages[candidate.language]
    if not support.available:
        raise _Refused(
            422, f"{candidate.language} cannot be judged here", f"{field}.language", support.problem
        )
    if task.device not in support.devices:
        raise _Refused(
            422,
            f"{candidate.language} is not judged on {task.device}",
            f"{field}.language",
            f"use a task with device {' or '.join(support.devices)}",
        )


def _check_timed(candidate: Candidate, task: TaskSpec, field: str) -> None:
    if candidate.language == "triton" and task.device == "cpu":
        raise _Refused(
            422,
            "a rule decides by speeds, and triton is not timed on cpu",
            f"{field}.language",
            "use a task on a GPU, or leave `rule` out",
        )


def _handle_errors(app: FastAPI) -> None:
    def too_large(what: str) -> JSONResponse:
        hint = f"at most {MAX_BODY_BYTES} bytes a request: send fewer candidates"
        return _answer(app, _Refused(413, what, "body", hint))

    app.add_middleware(LimitedBody, limit_bytes=MAX_BODY_BYTES, refuse=too_large)

    @app.exception_handler(HTTPException)
    async def refused_by_framework(_: Request, error: HTTPException) -> JSONResponse:
        hints = {404: "see /openapi.json for the paths", 405: "see /openapi.json for the methods"}
        field = "body" if error.status_code == 400 else None
        hint = hints.get(error.status_code, "send JSON in UTF-8 as /openapi.json describes it")
        return _answer(app, _Refused(error.status_code, str(error.detail), field, hint))

    @app.exception_handler(_Refused)
    async def refused(_: Request, error: _Refused) -> JSONResponse:
        return _answer(app, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        # A rule's kind, by which the form of its fields is chosen, is no part of their place.
        place = [str(part) for part in first["loc"] if part not in ("body", "query", "path", *RULE_KINDS)]
        field = ".".join(place) or "body"
        too_large = first["type"] == "source_too_large" or (
            first["type"] == "too_long" and field.endswith("candidates")
        )
        hint = "fewer candidates a request" if first["type"] == "too_long" else None
        return _answer(app, _Refused(413 if too_large else 422, first["msg"], field, hint))

    @app.exception_handler(QueueFull)
    async def full(_: Request, error: QueueFull) -> JSONResponse:
        return _answer(app, _Refused(429, str(error), retry=error.retry_after_s))

    @app.exception_handler(ShuttingDown)
    async def ending(_: Request, error: ShuttingDown) -> JSONResponse:
        return _answer(app, _Refused(503, str(error), retry=1.0))

    @app.exception_handler(KeyConflict)
    async def conflict(_: Request, error: KeyConflict) -> JSONResponse:
        return _answer(app, _Refused(409, str(error), "client_key", "use a new key for a new request"))

    @app.exception_handler(UnknownId)
    async def unknown(_: Request, error: UnknownId) -> JSONResponse:
        hint = "a restarted server knows no work of its predecessor: submit again under the same client_key"
        return _answer(app, _Refused(404, f"no evaluation or verification {error.args[0]}", "id", hint))


def _answer(app: FastAPI, refused: _Refused) -> JSONResponse:
    scheduler: Scheduler | None = getattr(app.state, "scheduler", None)
    if scheduler is not None:
        scheduler.metrics.add("sandbox_rejected_requests_total", status=str(refused.status))
    headers = {"Retry-After": f"{refused.retry:g}"} if refused.retry else None
    return JSONResponse(refused.reply.model_dump(), status_code=refused.status, headers=headers)
