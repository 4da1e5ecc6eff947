"""Queue, verdicts and their lives: what is asked twice is judged once, what the judge broke is judged
again."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

from sandbox.affinity import Affinity
from sandbox.expectation import expected_s
from sandbox.fleet.crew import Crew, Node, OracleSource
from sandbox.lanes import Lanes
from sandbox.ledger import Ledger
from sandbox.logs import fields
from sandbox.metrics import Metrics
from sandbox.protocol import (
    MAX_CANDIDATES,
    Candidate,
    EvaluationRequest,
    EvaluationResult,
    QueueHealth,
    Stage,
    TaskSpec,
    VerificationRequest,
    VerificationResult,
)
from sandbox.records import (
    QueueFull,
    Record,
    ShuttingDown,
    copy_verdict,
    digest,
    event,
)
from sandbox.verification import Asked, decided
from sandbox.workers import Gates, LocalOracle, Oracle, Worker, WorkerSettings

log = logging.getLogger("sandbox.scheduler")
MAX_ATTEMPTS = 3
NOT_OF_THE_BODY = {"client_key", "client", "priority"}
"""Fields of a request that may differ when it is sent again under its key."""
RETRY_AFTER_S = 1.0


class Scheduler:
    """Takes requests, keeps oracle processes busy, remembers verdicts.

    Args:
      settings: of the oracle processes.
      workers: how many.
      max_queue: most evaluations that may wait.
      cores: how many ordinary pieces of work may run at once beside each other.
      fleet: its oracles are used instead of ones on this host.
    """

    def __init__(self, settings: WorkerSettings, *, workers: int, max_queue: int, cores: int, fleet: OracleSource | None = None):
        self.metrics = Metrics()
        self._settings, self._n_workers, self._cores, self.max_queue = settings, workers, cores, max_queue
        self._fleet = fleet
        self._crew = Crew()
        self._numbers = itertools.count()
        self._ledger = Ledger()
        self._waiting = Lanes()
        self._affinity = Affinity()
        self._running: dict[str, tuple[Record, Worker, float]] = {}
        self._leaders: dict[str, Record] = {}
        self._watchdog: asyncio.Task | None = None
        self._closing = asyncio.Event()
        self.draining = False

    async def start(self) -> None:
        """Starts the oracle processes; returns before they are ready."""
        if self._fleet is not None:
            await self._fleet.start(self)
        else:
            here = Node(name="", gates=Gates(shared_limit=max(1, self._cores)))
            for number in range(self._n_workers):
                self.join(here, LocalOracle(number, self._settings))
        self._watchdog = asyncio.create_task(self._watch())

    def begin_drain(self) -> list[Record]:
        """Takes no more work, while what there is goes on; returns the evaluations whose results nobody has been given yet."""
        self.draining = True
        return self._ledger.unfetched()

    def begin_close(self) -> None:
        """Sends away all who wait for a result, so that they can turn to a successor."""
        self._closing.set()

    async def close(self) -> None:
        """Ends everything that runs."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        await asyncio.gather(*(worker.close() for worker in self._crew))
        if self._fleet is not None:
            await self._fleet.close()

    # ------------------------------------------------------------ workers

    def join(self, node: Node, oracle: Oracle) -> Worker:
        """Takes a worker with this oracle into service."""
        worker = Worker(
            next(self._numbers),
            oracle,
            node.gates,
            on_message=self._on_message,
            on_free=self._on_free,
            on_lost=self._on_lost,
        )
        self._crew.join(worker, node)
        return worker

    def leave(self, workers: Sequence[Worker], why: str) -> None:
        """Takes workers out of service; what they have in hand is judged elsewhere, and what they still say is not heard. The caller
        closes them."""
        for worker in workers:
            self._affinity.forget(worker)
            self._crew.leave(worker)
        for worker in workers:
            self._put_back(worker, why)
        self._dispatch()

    # ------------------------------------------------------------ requests

    def submit(self, request: EvaluationRequest) -> list[str]:
        """Queues candidates and returns their ids.

        Raises:
          QueueFull, ShuttingDown: nothing was queued. KeyConflict: the key belongs to another request.
        """
        body = digest("evaluation", request.model_dump(exclude=NOT_OF_THE_BODY))
        known = self._ledger.answer(request.client_key, body)
        if known is not None:
            return known
        self._make_room(request.client, len(request.candidates))
        ids = [self._add(request, request.task, candidate, expected_s(candidate)).id for candidate in request.candidates]
        self._ledger.remember_answer(request.client_key, body, ids)
        self._dispatch()
        return ids

    def submit_verification(self, request: VerificationRequest) -> str:
        """Queues all arms, control and treated taking turns; returns the verification's id. Raises as
        `submit`."""
        body = digest("verification", request.model_dump(exclude=NOT_OF_THE_BODY))
        known = self._ledger.answer(request.client_key, body)
        if known is not None:
            return known
        self._make_room(request.client, sum(len(arm.control) + len(arm.treated) for arm in request.arms))
        verification_id = f"ver-{secrets.token_hex(8)}"
        everyone = [candidate for arm in request.arms for candidate in (*arm.control, *arm.treated)]
        head_start_s = max(map(expected_s, everyone))  # one for all, which are to take turns
        arms = []
        for place, arm in enumerate(request.arms):
            ids: tuple[list[str], list[str]] = ([], [])
            for number in range(max(len(arm.control), len(arm.treated))):
                for side, candidates in zip(ids, (arm.control, arm.treated), strict=True):
                    if number < len(candidates):
                        side.append(self._add(request, arm.task, candidates[number], head_start_s, f"{verification_id}.{place}").id)
            arms.append(ids)
        self._ledger.add_verification(verification_id, arms, Asked.of(request))
        self._ledger.remember_answer(request.client_key, body, verification_id)
        self._dispatch()
        return verification_id

    async def wait(self, evaluation_id: str, wait_s: float) -> EvaluationResult:
        """The result as it is once done, or after `wait_s` seconds. Raises UnknownId, ShuttingDown."""
        record = self._ledger.record(evaluation_id)
        if wait_s > 0 and not record.done.is_set():
            events = [asyncio.create_task(one.wait()) for one in (record.done, self._closing)]
            try:
                await asyncio.wait(events, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for waiting in events:
                    waiting.cancel()
            if self._closing.is_set() and not record.done.is_set():
                raise ShuttingDown("the server is ending")
        record.fetched = record.fetched or record.done.is_set()
        return record.result

    async def wait_leading(self, ids: Sequence[str], wait_s: float) -> list[EvaluationResult]:
        """The results of those before the first that is not done, a batch at most, waiting up to `wait_s` seconds for the first. They
        count as fetched. Raises UnknownId (for the first alone), ShuttingDown."""
        await self.wait(ids[0], wait_s)
        found: list[EvaluationResult] = []
        for one in ids[:MAX_CANDIDATES]:
            record = self._ledger.find(one)
            if record is None or not record.done.is_set():
                break
            record.fetched = True
            found.append(record.result)
        return found

    async def wait_verification(self, verification_id: str, wait_s: float) -> VerificationResult:
        """All results of a verification, waiting up to `wait_s` for the last, and once all are done what its rule decides. Raises
        UnknownId."""
        arms = self._ledger.arms(verification_id)
        deadline = time.monotonic() + wait_s
        for one in (one for arm in arms for side in arm for one in side):
            await self.wait(one, max(0.0, deadline - time.monotonic()))
        result = self._ledger.verification(verification_id)
        if result.state == "done" and (asked := self._ledger.undecided(verification_id)) is not None:
            result = await asyncio.to_thread(decided, result, asked)
            self._ledger.keep_decision(result)
        return result

    def listen(self, ids: Sequence[str]) -> tuple[asyncio.Queue, list[Record]]:
        """A queue that gets a StageEvent at every change of the given evaluations. Raises UnknownId."""
        records = [self._ledger.record(one) for one in ids]
        queue: asyncio.Queue = asyncio.Queue()
        for record in records:
            record.listeners.append(queue)
            queue.put_nowait(event(record))
        return queue, records

    def cancel(self, evaluation_id: str) -> EvaluationResult:
        """Cancels an evaluation; one that is done keeps its verdict. Raises UnknownId."""
        record = self._ledger.record(evaluation_id)
        if record.done.is_set():
            record.fetched = True
            return record.result
        record.cancelled = True
        if record.id in self._running:
            if not record.followers:
                self._running[record.id][1].cancel()
                return record.result
        elif record in self._waiting:
            self._waiting.remove(record)
            self._promote_follower(record)
        else:
            for leader in self._leaders.values():
                if record in leader.followers:
                    leader.followers.remove(record)
        record.fetched = True
        self._finish(record, _cancelled(record))
        return record.result

    @property
    def queue(self) -> QueueHealth:
        """Numbers for /v1/health."""
        return QueueHealth(
            waiting=len(self._waiting),
            running=len(self._running),
            limit=self.max_queue,
            workers=len(self._crew),
            workers_ready=sum(worker.ready for worker in self._crew),
        )

    @property
    def problem(self) -> str:
        """Why an oracle process is missing, if one is."""
        missing = (worker.last_error for worker in self._crew if worker.last_error and not worker.ready)
        return (self._fleet.problem if self._fleet else "") or next(missing, "")

    def metrics_text(self) -> str:
        queue = self.queue
        self.metrics.set("sandbox_queue_waiting", queue.waiting)
        self.metrics.set("sandbox_queue_running", queue.running)
        self.metrics.set("sandbox_workers_ready", queue.workers_ready)
        reached = [record.result.stage for record, _, _ in self._running.values()]
        for stage in get_args(Stage):
            self.metrics.set("sandbox_running", reached.count(stage), stage=stage)
        self._crew.report(self.metrics)
        return self.metrics.text()

    # ------------------------------------------------------------ life of a record

    def _add(
        self,
        request: EvaluationRequest | VerificationRequest,
        task: TaskSpec,
        candidate: Candidate,
        head_start_s: float,
        arm: str = "",
    ) -> Record:
        job = {
            "task": task.model_dump(),
            "candidate": candidate.model_dump(),
            "options": request.options.model_dump(),
        }
        nameless = task.model_dump(exclude={"name"})
        content = digest("content", nameless, job["candidate"], job["options"])
        evaluation_id, now = f"eval-{secrets.token_hex(8)}", time.monotonic()
        record = Record(
            evaluation_id,
            content,
            digest("task", nameless),
            job,
            EvaluationResult(id=evaluation_id, language=candidate.language),
            now,
            client=request.client,
            priority=request.priority,
            arm=arm,
            due_s=now - head_start_s,
        )
        self._ledger.add(record)
        log.info("queued", extra=fields(evaluation=record.id, client=record.client or None, task=task.name, language=candidate.language))
        verdict = self._ledger.verdict(content)
        leader = self._leaders.get(content)
        if verdict is not None:
            self._finish(record, copy_verdict(verdict, record))
        elif leader is not None:
            leader.followers.append(record)
        else:
            self._leaders[content] = record
            self._waiting.append(record)
        return record

    def _dispatch(self) -> None:
        for worker in self._crew.free(self._is_warm_for_the_first):
            if not self._waiting:
                return
            others = [other for other in self._crew if other is not worker]
            record = self._affinity.take(self._waiting, worker, others, partial(self._crew.suits, worker))
            if record is None:
                continue
            node = self._crew.node(worker).name
            self._crew.gave(worker, record)
            record.attempts += 1
            self._running[record.id] = (record, worker, time.monotonic())
            self._update(record, state="running", attempts=record.attempts)
            log.info("started", extra=fields(evaluation=record.id, oracle=worker.number, node=node or None, attempt=record.attempts))
            worker.evaluate(record.id, record.job)

    def _is_warm_for_the_first(self, worker: Worker) -> bool:
        first = next(iter(self._waiting), None)
        return first is not None and self._affinity.is_warm(worker, first.task)

    def _on_free(self, worker: Worker) -> None:
        self._dispatch()

    def _on_message(self, worker: Worker, message: dict[str, Any]) -> None:
        entry = self._running.get(message["id"])
        if entry is None or entry[1] is not worker:
            return  # too late: it was given up, or is judged elsewhere
        record, _, started = entry
        if message["op"] == "stage":
            self._update(record, stage=message["stage"])
            return
        del self._running[record.id]
        if node := self._crew.node(worker).name:
            self.metrics.add("sandbox_node_evaluations_total", node=node)
        if message["result"] is None:
            self._promote_follower(record)
            self._finish(record, _cancelled(record))
            return
        result = EvaluationResult.model_validate(message["result"])
        waited = {"queued": round(started - record.created_s, 6)}
        result = result.model_copy(update={"attempts": record.attempts, "stage_s": waited | result.stage_s})
        if result.outcome == "infra_error" and (record.cancelled or record.attempts < MAX_ATTEMPTS):
            self._retry(record, result.feedback)
        else:
            self._conclude(record, result)

    def _on_lost(self, worker: Worker, text: str) -> None:
        self._affinity.forget(worker)
        self.metrics.add("sandbox_worker_restarts_total")
        self._put_back(worker, text)

    def _put_back(self, worker: Worker, text: str) -> None:
        """What a worker has in hand is judged again, if it has not been too often."""
        entry = self._running.pop(worker.job_id or "", None)
        worker.job_id = None
        if entry is None:
            return
        record = entry[0]
        if settle_s := self._crew.lost(worker, record):
            asyncio.get_running_loop().call_later(settle_s, self._dispatch)
        if record.cancelled or record.attempts < MAX_ATTEMPTS:
            self._retry(record, text)
        else:
            self._conclude(
                record,
                record.result.model_copy(
                    update={
                        "state": "done",
                        "outcome": "infra_error",
                        "transient": True,
                        "attempts": record.attempts,
                        "feedback": f"the judge failed {record.attempts} times: {text}",
                    }
                ),
            )

    def _retry(self, record: Record, text: str) -> None:
        if record.cancelled:
            self._promote_follower(record)
            if not record.done.is_set():
                self._finish(record, _cancelled(record))
            return
        log.warning("judged again after a fault of the judge: %s", text, extra=fields(evaluation=record.id))
        self.metrics.add("sandbox_retries_total")
        self._update(record, state="queued", stage="queued")
        self._waiting.appendleft(record)
        self._dispatch()

    def _conclude(self, record: Record, result: EvaluationResult) -> None:
        """A verdict is reached: it is remembered (unless the judge failed) and given to all who asked the
        same."""
        if result.outcome != "infra_error":
            self._ledger.keep_verdict(record.content, result)
        self._leaders.pop(record.content, None)
        self.metrics.count_work(result)
        followers, record.followers = record.followers, []
        record.job = None
        if not record.done.is_set():
            self._finish(record, result)
        for follower in followers:
            self._finish(follower, copy_verdict(result, follower))

    def _promote_follower(self, record: Record) -> None:
        """The evaluation that others waited for is cancelled: the next of them takes its place."""
        if self._leaders.get(record.content) is record:
            del self._leaders[record.content]
        if record.followers:
            heir, *rest = record.followers
            record.followers = []
            heir.followers = rest
            self._leaders[record.content] = heir
            self._waiting.appendleft(heir)
            self._dispatch()

    def _finish(self, record: Record, result: EvaluationResult) -> None:
        record.result = result
        if record.id not in self._running:
            record.job = None
        record.done.set()
        self.metrics.add("sandbox_evaluations_total", outcome=result.outcome)
        if result.cached:
            self.metrics.add("sandbox_cached_total")
        spent = {"seconds": round(time.monotonic() - record.created_s, 6), "cached": result.cached}
        log.info("judged", extra=fields(evaluation=record.id, outcome=result.outcome, stage=result.stage, **spent))
        self._tell(record)

    def _update(self, record: Record, **changes: Any) -> None:
        record.result = record.result.model_copy(update=changes)
        self._tell(record)

    def _tell(self, record: Record) -> None:
        for queue in record.listeners:
            queue.put_nowait(event(record))

    async def _watch(self) -> None:
        """Kills an oracle that is far beyond what its deadlines allow: a fault of the judge, not of the
        candidate."""
        while True:
            await asyncio.sleep(5.0)
            now = time.monotonic()
            for record, worker, started in list(self._running.values()):
                options = record.job["options"]
                stages = ("build_s", "load_s", "check_s", "time_s", *(("ncu_s",) if options["profile"] == "ncu" else ()))
                limit_s = 120 + 3 * sum(options[name] for name in stages)
                if now - started > limit_s:
                    text = "runs for more than %.0f s; replacing its oracle process"
                    log.error(text, limit_s, extra=fields(evaluation=record.id, oracle=worker.number))
                    worker.kill()

    def _make_room(self, client: str, count: int) -> None:
        if self.draining:
            raise ShuttingDown("the server finishes what it has and takes no more: ask its successor")
        if count > self.max_queue:
            raise QueueFull(f"the request has {count} candidates, the queue holds {self.max_queue}", RETRY_AFTER_S)
        if count > self._waiting.room_for(client, self.max_queue):
            advice = "send this again later, or fewer candidates at a time; --max-queue makes room for more"
            raise QueueFull(f"{len(self._waiting)} evaluations wait, the queue holds {self.max_queue}: {advice}", RETRY_AFTER_S)


def _cancelled(record: Record) -> EvaluationResult:
    return record.result.model_copy(update={"state": "done", "outcome": "cancelled", "feedback": "cancelled"})
