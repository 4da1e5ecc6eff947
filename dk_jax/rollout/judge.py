"""The learner's side of the sandbox: judge a batch of candidates over many tasks, and never judge finished work twice.

`Judge` is what the rollout needs; `SandboxJudge` asks a real sandbox; tests use a scripted one. Every verdict goes to the
journal the moment it arrives, so a killed run replays them instead of asking again (DESIGN 3.5).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from dk_jax.rollout.trajectory import Verdict
from dk_jax.tasks.task import Task
from sandbox.client import SandboxClient, SandboxUnavailable
from sandbox.protocol import Admission, Candidate, Options, TaskSpec, VerificationResult, VerificationTask, limits_of

log = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Between attempts at what the sandbox could not judge."""
_UNREADABLE = "this message held no kernel"  # builds in no language, and so fails in its arm as it should


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One candidate to judge against one task."""

    task: Task
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arms:
    """Control and treated candidates of one task, judged interleaved on one device."""

    task: Task
    control: tuple[str, ...]
    treated: tuple[str, ...]


class Judge(Protocol):
    """What turns candidates into verdicts. `phase` names the work within a run and keys the journal."""

    def evaluate(
        self,
        requests: Sequence[Request],
        *,
        phase: str,
        progress: Callable[[int], None] | None = None,
        timed: bool = True,
        trusted: bool = False,
    ) -> list[Verdict]:
        """Verdicts in the order of the requests; with `timed=False` on correctness alone, their speedup 0.

        `trusted`: whoever wrote the candidates gains nothing by cheating (a generator of ours). They are checked and timed as
        all others, without the precautions: the audit of timings, inputs of other distributions.
        """


    def verify(self, arms: Sequence[Arms], *, phase: str) -> list[tuple[list[Verdict], list[Verdict]]]: ...

    def abort(self) -> None:
        """Has calls that other threads are in end soon, by any error, and may make later ones fail. Needed with rl.staleness=1 alone."""


class Journal:
    """Append-only JSONL of verdicts received since the last checkpoint.

    A line that a crash cut short is dropped on reading (its verdict is asked for again); a damaged line elsewhere is an error.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._verdicts: dict[str, Verdict] = {}
        self._lock = threading.Lock()  # verdicts arrive on several threads
        if self.path.exists():
            self._read()
        self._file = open(self.path, "a", encoding="utf-8")

    def _read(self) -> None:
        raw = self.path.read_bytes()
        lines = raw.split(b"\n")
        whole = 0
        for number, line in enumerate(lines[:-1], 1):
            try:
                entry = json.loads(line)
                for one in entry["together"] if "together" in entry else [entry]:
                    self._verdicts[one["key"]] = Verdict(**one["verdict"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self.path}:{number}: damaged journal line ({error}). Delete that line; its verdict is judged again."
                ) from error
            whole += len(line) + 1
        if lines[-1]:
            log.warning("%s: the last line was cut short and is dropped", self.path)
            os.truncate(self.path, whole)

    def get(self, key: str) -> Verdict | None:
        return self._verdicts.get(key)

    def put(self, key: str, verdict: Verdict) -> None:
        """Keeps a verdict; the newest one of a key stands."""
        with self._lock:
            if self._verdicts.get(key) == verdict:
                return
            self._verdicts[key] = verdict
            self._file.write(_line(key, verdict))
            self._file.flush()

    def put_together(self, verdicts: dict[str, Verdict]) -> None:
        """Keeps verdicts of which some are worth nothing without the others: a crash leaves all of them or none."""
        with self._lock:
            self._verdicts |= verdicts
            entries = [{"key": key, "verdict": dataclasses.asdict(verdict)} for key, verdict in verdicts.items()]
            self._file.write(json.dumps({"together": entries}) + "\n")
            self._file.flush()

    def clear(self) -> None:
        """Forgets everything: call after the checkpoint that makes it needless."""
        self._verdicts.clear()
        self._file.truncate(0)

    def forget(self, needless: Callable[[str], bool]) -> None:
        """Forgets the verdicts whose key is `needless`, all of them or, on any error, none."""
        with self._lock:
            kept = {key: verdict for key, verdict in self._verdicts.items() if not needless(key)}
            if len(kept) == len(self._verdicts):
                return
            partial = self.path.with_suffix(".part")
            partial.write_text("".join(_line(key, verdict) for key, verdict in kept.items()), encoding="utf-8")
            partial.replace(self.path)
            self._file.close()
            self._file = open(self.path, "a", encoding="utf-8")
            self._verdicts = kept

    def keys(self) -> list[str]:
        with self._lock:
            return list(self._verdicts)

    def __len__(self) -> int:
        return len(self._verdicts)

    def close(self) -> None:
        self._file.close()


def _line(key: str, verdict: Verdict) -> str:
    return json.dumps({"key": key, "verdict": dataclasses.asdict(verdict)}) + "\n"


def _key(phase: str, index: int, task: Task, source: str) -> str:
    digest = hashlib.sha256(f"{task.name}\x1f{task.reference}\x1f{source}".encode()).hexdigest()[:24]
    return f"{phase}/{index}/{digest}"


def _is_verdict(result) -> bool:
    """Whether a result says something about the candidate; what does not is never a reward of 0 (DESIGN 2.2)."""
    return result.outcome not in ("infra_error", "cancelled")


class _Patience:
    """Pauses between attempts at what the sandbox could not judge, where what was in its way may pass by itself.

    Args:
        over: set when nobody wants the answer any more.
    """

    def __init__(self, retry_for_s: float, over: threading.Event):
        self._give_up, self._pause_s, self._over = time.monotonic() + retry_for_s, FIRST_PAUSE_S, over

    def wait(self, result) -> None:
        """Raises SandboxUnavailable where waiting does not help, there is no time left, or all is over."""
        said = f"the sandbox could not judge a candidate ({result.outcome} after {result.attempts} attempts): {result.feedback}"
        if not result.transient or time.monotonic() + self._pause_s > self._give_up:
            raise SandboxUnavailable(
                f"{said}. Look into its log and python -m sandbox doctor, then run the same command again: what was judged is kept."
            )
        log.warning("%s; asking again in %.0f s", said, self._pause_s)
        if self._over.wait(self._pause_s):
            raise SandboxUnavailable(said)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


@dataclasses.dataclass(kw_only=True)
class SandboxJudge:
    """Judges through a running sandbox, waiting and retrying where it may come back.

    Attributes:
        client: the connection; its `retry_for_s` says how long a dead or busy sandbox is waited for.
        device: device of the tasks, e.g. "cpu" or "cuda:0".
        language, form: of every candidate (see DESIGN 2.2).
        options: evaluation options sent with every request; `verify_options` for verifications.
        journal: where verdicts are kept until the next checkpoint, or None.
        max_parallel: tasks in flight at once.
        retry_for_s: how long it asks again for what the sandbox could not judge.
    """

    client: SandboxClient
    device: str
    language: str
    form: str
    options: Options
    verify_options: Options
    journal: Journal | None = None
    max_parallel: int = 8
    retry_for_s: float = 0.0
    _rejected: set[str] = dataclasses.field(default_factory=set, init=False, repr=False)
    _calls: set[threading.Event] = dataclasses.field(default_factory=set, init=False, repr=False)
    """Of the calls in work: each event says that nobody wants the answer any more."""

    def _task(self, task: Task, trusted: bool = False) -> TaskSpec:
        fields = dict(reference=task.reference, name=task.name, dtype=task.dtype, device=self.device)
        return TaskSpec(**fields, **({"variants": ()} if trusted else {}))

    def _candidate(self, source: str) -> Candidate:
        return Candidate(source=source, language=self.language, form=self.form)

    def _refusal(self, source: str) -> str:
        """Why the protocol would not carry this text (a model may write anything), or ""."""
        try:
            self._candidate(source)
        except ValidationError as error:
            return error.errors()[0]["msg"]
        return ""

    def evaluate(self, requests, *, phase, progress=None, timed=True, trusted=False):
        options = self.options if timed else self.options.model_copy(update={"timing": "none", "profile": False})
        if trusted:
            options = options.model_copy(update={"audit": False, "profile": bool(options.profile)})  # nobody reads their counters
        keys = [_key(phase, i, r.task, r.source) for i, r in enumerate(requests)]
        verdicts: list[Verdict | None] = [self.journal.get(k) if self.journal else None for k in keys]
        for i, request in enumerate(requests):
            if verdicts[i] is None and (refusal := self._refusal(request.source)):
                verdicts[i] = Verdict.without_kernel(refusal, penalty=-self.options.reward.failure)
        if progress is not None:
            progress(sum(v is not None for v in verdicts))
        # A crash may have fallen between two samples of one source: they share its verdict, replayed or new.
        known = {(r.task.name, r.source): v for r, v in zip(requests, verdicts, strict=True) if v is not None}
        by_task: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            if verdicts[i] is None and (shared := known.get((request.task.name, request.source))) is not None:
                verdicts[i] = shared
                self.journal.put(keys[i], shared)
                if progress is not None:
                    progress(1)
            if verdicts[i] is None:
                by_task.setdefault(request.task.name, []).append(i)

        def judge(indices: list[int], over: threading.Event) -> None:
            # One candidate text is sent once however often it was sampled; each sample gets the same verdict.
            distinct: dict[str, list[int]] = {}
            for i in indices:
                distinct.setdefault(requests[i].source, []).append(i)
            waiting, patience = list(distinct), None
            while waiting:
                part, unjudged = waiting[:64], {}

                def arrived(position: int, result, part=part, unjudged=unjudged) -> None:
                    if not _is_verdict(result):
                        unjudged[part[position]] = result
                        return
                    verdict = Verdict.from_result(result)
                    if verdict.outcome == "task_rejected":
                        self._tell_rejected(requests[indices[0]].task, verdict)
                    for i in distinct[part[position]]:
                        verdicts[i] = verdict
                        if self.journal is not None:
                            self.journal.put(keys[i], verdict)
                        if progress is not None:
                            progress(1)

                self.client.evaluate(
                    self._task(requests[indices[0]].task, trusted),
                    [self._candidate(s) for s in part],
                    options,
                    on_result=arrived,
                )
                waiting = [*unjudged, *waiting[64:]]
                if unjudged:
                    patience = patience or _Patience(self.retry_for_s, over)
                    patience.wait(next(iter(unjudged.values())))

        with self._call() as over, concurrent.futures.ThreadPoolExecutor(max_workers=self.max_parallel) as pool:
            futures = []
            try:
                for indices in by_task.values():
                    futures.append(pool.submit(judge, indices, over))
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException as error:
                over.set()
                for future in futures:
                    future.cancel()
                if not isinstance(error, Exception):
                    self.client.abort()  # told to end: don't wait for verdicts in flight, they are asked for again
                raise
        return verdicts

    @contextlib.contextmanager
    def _call(self) -> Iterator[threading.Event]:
        """A call from beginning to end."""
        over = threading.Event()
        self._calls.add(over)
        try:
            yield over
        finally:
            self._calls.discard(over)

    def abort(self) -> None:
        """Has calls that other threads are in raise SandboxUnavailable: at once where they pause, else within one long poll of the client.
        Later ones do too, unless the journal has all that they ask for."""
        self.client.abort()
        for over in tuple(self._calls):
            over.set()

    @property
    def limits(self) -> dict[str, float]:
        """To which tasks have to keep."""
        return limits_of(self.options)

    def examinations(self, tasks: Sequence[Task], found: Callable[[Task, Admission], None]) -> None:
        """What the sandbox finds out about tasks themselves, under this judge's limits; `found` is told of each as it comes, on this thread.

        Raises:
            SandboxUnavailable: not all could be examined.
        """
        timing = "none" if self.options.timing == "none" else "quick"
        with concurrent.futures.ThreadPoolExecutor(max_workers=self.max_parallel) as pool:
            futures = {pool.submit(self.client.examine, self._task(task), self.options, timing): task for task in tasks}
            try:
                for future in concurrent.futures.as_completed(futures):
                    found(futures[future], future.result())
            except BaseException as error:
                for future in futures:
                    future.cancel()
                if not isinstance(error, Exception):
                    self.client.abort()  # told to end: don't wait for what is examined now
                raise

    def _tell_rejected(self, task: Task, verdict: Verdict) -> None:
        if task.name not in self._rejected:
            self._rejected.add(task.name)
            log.warning("the sandbox rejects task %s, whose candidates count as wrong: %s", task.name, verdict.feedback)

    def _verified(self, arms: list[VerificationTask]) -> VerificationResult:
        """A verification in which everything was judged. Arms are only comparable when judged together, so all is asked again."""
        patience = None
        with self._call() as over:
            while True:
                result = self.client.verify(arms, self.verify_options)
                flat = [one for arm in result.arms for one in (*arm.control, *arm.treated)]
                unjudged = next((one for one in flat if not _is_verdict(one)), None)
                if unjudged is None:
                    return result
                patience = patience or _Patience(self.retry_for_s, over)
                patience.wait(unjudged)

    def verify(self, arms, *, phase):
        flat = [(a, kind, i) for a, arm in enumerate(arms) for kind in ("control", "treated") for i in range(len(getattr(arm, kind)))]
        keys = [_key(f"{phase}/{kind}", i, arms[a].task, getattr(arms[a], kind)[i]) for a, kind, i in flat]
        found = [self.journal.get(k) if self.journal else None for k in keys]
        if any(v is None for v in found):
            # Arms are only comparable when judged together, so a half-finished verification is asked for whole.
            result = self._verified(
                [
                    VerificationTask(
                        task=self._task(arm.task),
                        control=[self._candidate(s if not self._refusal(s) else _UNREADABLE) for s in arm.control],
                        treated=[self._candidate(s if not self._refusal(s) else _UNREADABLE) for s in arm.treated],
                    )
                    for arm in arms
                ]
            )
            found = [Verdict.from_result(getattr(result.arms[a], kind)[i]) for a, kind, i in flat]
            if self.journal is not None:
                self.journal.put_together(dict(zip(keys, found, strict=True)))
        out = [([], []) for _ in arms]
        for (a, kind, _), verdict in zip(flat, found, strict=True):
            out[a][0 if kind == "control" else 1].append(verdict)
        return out
