"""The scheduler against oracles that do as the test says: order, retries, the cache of verdicts, bounds."""

import asyncio
from pathlib import Path

import pytest

from sandbox import ledger
from sandbox import scheduler as scheduler_module
from sandbox.protocol import Build, EvaluationRequest, EvaluationResult, Options, TaskSpec, VerificationRequest, VerificationTask
from sandbox.records import KeyConflict, QueueFull, ShuttingDown, UnknownId
from sandbox.scheduler import Scheduler
from sandbox.workers import WorkerSettings
from tests.sandbox.helpers import kernel

TASK = TaskSpec(reference="none")
OPTIONS = Options(timing="none")


class FakeWorker:
    """Takes one evaluation; the test answers for it."""

    instances: list["FakeWorker"] = []
    answers = 0

    def __init__(self, number, settings, gates, *, on_message, on_free, on_lost):
        self.number, self.ready, self.job_id, self.last_error, self.free_since_s = number, True, None, "", 0.0
        self._on_message, self._on_free, self._on_lost = on_message, on_free, on_lost
        self.taken, self.cancelled, self.killed = [], 0, False
        FakeWorker.instances.append(self)

    def evaluate(self, job_id, job):
        self.job_id = job_id
        self.taken.append(job["candidate"]["source"].strip())

    def answer(self, outcome="ok", feedback="", **more):
        job_id = self.job_id
        result = None
        if outcome != "cancelled":
            result = EvaluationResult(
                id=job_id, state="done", outcome=outcome, feedback=feedback, **more
            ).model_dump()
        self._on_message(self, {"op": "result", "id": job_id, "result": result})
        self.job_id = None
        self.free_since_s = FakeWorker.answers = FakeWorker.answers + 1
        self._on_free(self)

    def die(self):
        self._on_lost(self, "it died")
        self._on_free(self)

    def cancel(self):
        self.cancelled += 1

    def kill(self):
        self.killed = True

    async def close(self):
        pass


def named(name):
    return kernel(name).model_copy(update={"source": name})


def scenario(test, *, max_queue=100, workers=1):
    """Runs an async test with a scheduler that has fake workers; the test gets the first one."""

    async def run():
        FakeWorker.instances.clear()
        settings = WorkerSettings(scratch=Path("."), cache=Path("."), threads=1)
        scheduler = Scheduler(settings, workers=workers, max_queue=max_queue, cores=1)
        await scheduler.start()
        try:
            await test(scheduler, FakeWorker.instances[0])
        finally:
            await scheduler.close()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def fake_workers(monkeypatch):
    monkeypatch.setattr(scheduler_module, "Worker", FakeWorker)


def submit(scheduler, *names, key=None, **more):
    candidates = [named(name) for name in names]
    return scheduler.submit(EvaluationRequest(task=TASK, candidates=candidates, options=OPTIONS, client_key=key, **more))


def test_a_fault_of_the_judge_is_retried_twice_and_never_remembered():
    async def test(scheduler, worker):
        [one] = submit(scheduler, "a")
        worker.answer("infra_error", "disk full")
        worker.die()
        assert (await scheduler.wait(one, 0)).state == "running"
        worker.answer("infra_error", "disk full")
        result = await scheduler.wait(one, 0)
        assert (result.outcome, result.attempts, result.reward.total) == ("infra_error", 3, 0) and not result.transient
        [again] = submit(scheduler, "a")
        worker.answer("ok")
        assert (await scheduler.wait(again, 0)).outcome == "ok"
        assert worker.taken == ["a"] * 4
        assert "sandbox_retries_total 2" in scheduler.metrics_text()

    scenario(test)


def test_a_draining_scheduler_finishes_what_it_has_and_answers_known_keys():
    async def test(scheduler, worker):
        [running] = submit(scheduler, "a", key="k")
        [follower] = submit(scheduler, "a")
        [waiting] = submit(scheduler, "b")
        [done] = submit(scheduler, "c")
        scheduler.cancel(done)
        [early] = submit(scheduler, "e", priority=9)
        left = scheduler.begin_drain()
        assert sorted(record.id for record in left) == sorted([running, follower, waiting, early])
        with pytest.raises(ShuttingDown, match="takes no more"):
            submit(scheduler, "d")
        assert submit(scheduler, "a", key="k") == [running]
        for _ in range(3):
            worker.answer()
        assert all(record.done.is_set() for record in left) and not any(record.fetched for record in left)
        await scheduler.wait(running, 0)
        assert [record.id for record in left if record.fetched] == [running]

    scenario(test)


def test_a_result_that_nobody_has_been_given_is_waited_for():
    async def test(scheduler, worker):
        [fetched, unfetched] = submit(scheduler, "a", "b")
        worker.answer()
        worker.answer()
        await scheduler.wait(fetched, 0)
        assert [record.id for record in scheduler.begin_drain()] == [unfetched]

    scenario(test)


def test_an_oracle_that_dies_each_time_is_a_fault_that_may_pass():
    async def test(scheduler, worker):
        [one] = submit(scheduler, "a")
        for _ in range(3):
            worker.die()
        result = await scheduler.wait(one, 0)
        assert (result.outcome, result.transient) == ("infra_error", True)

    scenario(test)


@pytest.mark.parametrize("fault", ["dies", "fails"])
def test_a_cancelled_evaluation_ends_when_its_oracle_does(fault):
    async def test(scheduler, worker):
        [one] = submit(scheduler, "a")
        scheduler.cancel(one)
        assert (await scheduler.wait(one, 0)).state == "running"
        worker.die() if fault == "dies" else worker.answer("infra_error")
        result = await scheduler.wait(one, 0)
        assert (result.state, result.outcome) == ("done", "cancelled")
        assert worker.taken == ["a"]

    scenario(test)


def test_extensions_are_counted_by_road_where_they_were_built():
    async def test(scheduler, worker):
        submit(scheduler, "a")
        submit(scheduler, "a")
        builds = [Build(name="x", road="fast"), Build(name="y", road="fast", cached=True), Build(name="z", road=None)]
        worker.answer(builds=builds)
        submit(scheduler, "a")  # answered from the cache
        text = scheduler.metrics_text()
        assert 'sandbox_builds_total{road="fast"} 2' in text and 'sandbox_builds_total{road="failed"} 1' in text
        assert "sandbox_builds_cached_total 1\n" in text and "sandbox_cached_total 2\n" in text

    scenario(test)


@pytest.mark.parametrize("form", ["kernel", "module"])
def test_control_and_treated_take_turns(form):
    """Also where one side's builds are expected to take longer than the other's."""

    async def test(scheduler, worker):
        treated = [named(name).model_copy(update={"form": form}) for name in ("t0", "t1", "t2")]
        arm = VerificationTask(task=TASK, control=[named("c0"), named("c1")], treated=treated)
        verification = scheduler.submit_verification(VerificationRequest(arms=[arm], options=OPTIONS))
        for _ in range(5):
            worker.answer()
        assert worker.taken == ["c0", "t0", "c1", "t1", "t2"]
        result = await scheduler.wait_verification(verification, 0)
        assert (result.state, len(result.arms[0].control), len(result.arms[0].treated)) == ("done", 2, 3)

    scenario(test)


def test_clients_take_turns_and_a_clients_verification_comes_before_its_evaluations():
    async def test(scheduler, worker):
        submit(scheduler, "a0", "a1", "a2", "a3", client="a")
        submit(scheduler, "b0", client="b", priority=9)
        arm = VerificationTask(task=TASK, control=[named("c0")], treated=[named("t0")])
        scheduler.submit_verification(VerificationRequest(arms=[arm], options=OPTIONS, client="a"))
        submit(scheduler, "a4", client="a", priority=2)
        for _ in range(8):
            worker.answer()
        assert worker.taken == ["a0", "a4", "b0", "c0", "t0", "a1", "a2", "a3"]

    scenario(test)


def test_a_request_sent_again_under_its_key_is_the_same_from_another_name_and_priority():
    async def test(scheduler, worker):
        ids = submit(scheduler, "a", key="key", client="one")
        assert submit(scheduler, "a", key="key", client="two", priority=3) == ids

    scenario(test)


def test_followers_share_the_verdict_and_one_inherits_a_cancelled_leader():
    async def test(scheduler, worker):
        submit(scheduler, "first")
        leader, follower = submit(scheduler, "same", "same")
        assert scheduler.cancel(leader).outcome == "cancelled"
        worker.answer()
        worker.answer("incorrect")
        assert (await scheduler.wait(follower, 0)).outcome == "incorrect"
        assert worker.taken == ["first", "same"]

    scenario(test)


def test_a_running_evaluation_that_others_wait_for_goes_on_when_cancelled():
    async def test(scheduler, worker):
        leader, follower = submit(scheduler, "same", "same")
        assert scheduler.cancel(leader).outcome == "cancelled"
        assert worker.cancelled == 0
        worker.answer()
        assert (await scheduler.wait(leader, 0)).outcome == "cancelled"
        assert (await scheduler.wait(follower, 0)).outcome == "ok"

    scenario(test)


def test_a_cancelled_evaluation_is_not_remembered():
    async def test(scheduler, worker):
        [one] = submit(scheduler, "a")
        assert scheduler.cancel(one).state == "running"
        assert worker.cancelled == 1
        worker.answer("cancelled")
        assert (await scheduler.wait(one, 0)).outcome == "cancelled"
        [again] = submit(scheduler, "a")
        worker.answer()
        assert not (await scheduler.wait(again, 0)).cached

    scenario(test)


def test_the_queue_takes_all_or_nothing():
    async def test(scheduler, worker):
        submit(scheduler, "runs")
        submit(scheduler, "waits 1")
        with pytest.raises(QueueFull):
            submit(scheduler, "waits 2", "waits 3")
        submit(scheduler, "waits 2")
        assert scheduler.queue.waiting == 2

    scenario(test, max_queue=2)


def test_a_full_queue_has_room_for_who_has_less_than_a_fair_share():
    async def test(scheduler, worker):
        submit(scheduler, "runs", *"abcd", client="hog")
        submit(scheduler, "e", client="hog")
        with pytest.raises(QueueFull):
            submit(scheduler, "one more", client="hog")
        submit(scheduler, "f", "g", client="small")
        with pytest.raises(QueueFull):
            submit(scheduler, "h", client="small")
        submit(scheduler, "i", client="third")
        assert scheduler.queue.waiting == 8

    scenario(test, max_queue=5)


def test_keys_and_ids_are_checked():
    async def test(scheduler, worker):
        ids = submit(scheduler, "a", key="k")
        assert submit(scheduler, "a", key="k") == ids
        with pytest.raises(KeyConflict):
            submit(scheduler, "b", key="k")
        with pytest.raises(UnknownId):
            await scheduler.wait("nobody", 0)

    scenario(test)


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(ledger, "CACHED_VERDICTS", 3)
    monkeypatch.setattr(ledger, "KEPT_RECORDS", 4)

    async def test(scheduler, worker):
        first = submit(scheduler, "0", key="k")
        worker.answer()
        for number in range(1, 9):
            submit(scheduler, str(number))
            worker.answer()
        with pytest.raises(UnknownId):
            await scheduler.wait(first[0], 0)
        assert submit(scheduler, "0", key="k") != first, "a key whose ids are gone starts anew"
        assert worker.taken[-1] == "0"

    scenario(test)


def test_a_task_goes_to_the_worker_that_has_its_reference_and_a_new_one_to_who_has_rested_longest():
    def judge(scheduler, task, name):
        request = EvaluationRequest(task=TaskSpec(reference=task), candidates=[named(name)], options=OPTIONS)
        scheduler.submit(request)
        [busy] = [worker for worker in FakeWorker.instances if worker.job_id]
        busy.answer()
        return busy.number

    async def test(scheduler, _):
        assert [judge(scheduler, task, "a") for task in ("one", "two", "three", "four")] == [0, 1, 2, 0]
        assert [judge(scheduler, task, "b") for task in ("three", "two", "one", "five")] == [2, 1, 0, 2]

    scenario(test, workers=3)
