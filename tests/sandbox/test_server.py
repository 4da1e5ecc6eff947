"""The server as a process: queueing, idempotency, cancelling, streaming, dying, and what it leaves behind."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest

from sandbox import settings
from sandbox.build import BuildUnavailable
from sandbox.client import AsyncSandboxClient, SandboxBusy, SandboxClient, SandboxRejected
from sandbox.protocol import Options, VerificationTask
from sandbox.workers import make_directory, remove_directory
from tests.sandbox.helpers import (
    GOOD_BODY,
    ROOT,
    command_of,
    descendants,
    eventually,
    kernel,
    parent_of,
    python_module,
    running_server,
)

SLOW = "        import time; time.sleep(0.4)\n        return torch.relu(x + self.bias)"
ENDLESS = "        import time; time.sleep(1000)"


def oracle_processes(server_pid: int) -> list[int]:
    """Pids of a server's oracle processes."""
    children = psutil.Process(server_pid).children()
    return [child.pid for child in children if "sandbox.oracle.worker" in command_of(child)]


def good(number: object):
    return kernel(GOOD_BODY, f"// {number}")


def test_candidates_of_several_clients_are_all_judged(server, task, quick):
    results = {}

    def work(name):
        with server.client() as client:
            results[name] = client.evaluate(task, [good((name, i)) for i in range(4)], quick)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.outcome for name in range(3) for result in results[name]] == ["ok"] * 12
    assert len({result.id for name in range(3) for result in results[name]}) == 12


def test_the_async_client_does_the_same(server, task, quick):
    async def work():
        async with AsyncSandboxClient(server.socket, retry_for_s=60) as client:
            first, second = await asyncio.gather(
                client.evaluate(task, [good("async 1")], quick),
                client.evaluate(task, [good("async 2")], quick),
            )
            events = [event async for event in client.stream([first[0].id])]
            return first + second, events, await client.health()

    results, events, health = asyncio.run(work())
    assert [result.outcome for result in results] == ["ok", "ok"]
    assert events[-1].result == results[0]
    assert health.status == "ok"


def test_more_than_one_request_s_worth_of_candidates_can_be_given(sandbox, task, quick):
    seen = []
    candidates = [kernel(f"out[0] = missing_{i % 3};") for i in range(70)]
    results = sandbox.evaluate(task, candidates, quick, on_result=lambda index, result: seen.append(index))
    assert [result.outcome for result in results] == ["build_failed"] * 70
    assert seen == list(range(70))


def test_what_is_asked_twice_is_judged_once(sandbox, task, quick):
    twice = sandbox.evaluate(task, [good("twice"), good("twice")], quick)
    later = sandbox.evaluate(task.model_copy(update={"name": "other name"}), [good("twice")], quick)
    assert [result.cached for result in twice + later] == [False, True, True]
    other = sandbox.evaluate(task, [good("twice")], quick.model_copy(update={"correctness_trials": 1}))
    assert not other[0].cached


def test_a_client_key_makes_submitting_idempotent(sandbox, task, quick):
    ids = sandbox.submit(task, [good("key")], quick, client_key="idempotent")
    assert sandbox.submit(task, [good("key")], quick, client_key="idempotent") == ids
    with pytest.raises(SandboxRejected) as caught:
        sandbox.submit(task, [good("another")], quick, client_key="idempotent")
    assert caught.value.status == 409


def test_a_queued_and_a_running_evaluation_can_be_cancelled(sandbox, server, task):
    options = Options(timing="none", check_s=60)
    runs = sandbox.submit(task, [python_module(ENDLESS, f"# {n}") for n in range(2)], options)
    waits = sandbox.submit(task, [good("waits")], options)
    assert eventually(lambda: all(sandbox.result(one, 0).stage == "loaded" for one in runs))
    assert sandbox.cancel(waits[0]).outcome == "cancelled"
    started = time.monotonic()
    for one in runs:
        assert sandbox.cancel(one).outcome == "cancelled"
        assert sandbox.cancel(one).outcome == "cancelled"
    assert time.monotonic() - started < 5
    assert sandbox.evaluate(task, [good("after cancelling")], options)[0].outcome == "ok"


def test_cancelling_a_finished_evaluation_keeps_its_verdict(sandbox, task, quick):
    [result] = sandbox.evaluate(task, [good("finished")], quick)
    assert sandbox.cancel(result.id) == result


def test_cancelling_one_of_two_equal_evaluations_leaves_the_other(sandbox, task, quick):
    first, second = sandbox.submit(task, [python_module(SLOW), python_module(SLOW)], quick)
    sandbox.cancel(first)
    assert sandbox.result(first, 5).outcome == "cancelled"
    assert sandbox.result(second, 30).outcome == "ok"


def test_the_stream_tells_of_every_stage(sandbox, task):
    ids = sandbox.submit(task, [good("streamed"), kernel("streamed;")], Options())
    events = list(sandbox.stream(ids))
    stages = [event.stage for event in events if event.id == ids[0]]
    assert [stage for i, stage in enumerate(stages) if i == 0 or stages[i - 1] != stage][-4:] == [
        "built",
        "loaded",
        "correct",
        "timed",
    ]
    done = {event.id: event.result for event in events if event.state == "done"}
    assert [done[one].outcome for one in ids] == ["ok", "build_failed"]


def test_many_results_come_in_one_answer_up_to_the_first_that_is_not_there(sandbox, server, task, quick):
    done = sandbox.submit(task, [good(f"at once {n}") for n in range(3)], quick)
    expected = [sandbox.result(one, 30) for one in done]
    [endless] = sandbox.submit(task, [python_module(ENDLESS, "# at once")], quick)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.socket)), base_url="http://s") as http:

        def results(*ids, **more):
            return http.get("/v1/evaluations/results", params={"ids": ",".join(ids), **more})

        for ids, first in (((*done, endless), 3), ((done[0], endless, done[1]), 1), ((endless, *done), 0), ((done[2], "eval-unknown", done[0]), 1)):
            answer = results(*ids)
            assert answer.status_code == 200
            assert [r["id"] for r in answer.json()["results"]] == list(ids[:first])
        assert results(*done).json()["results"] == [result.model_dump(mode="json") for result in expected]
        start = time.monotonic()
        assert results(endless, wait_s=0.3).json() == {"results": []} and time.monotonic() - start >= 0.3
        assert results("eval-unknown", *done).status_code == 404
        assert results().status_code == 422 and results(*["x"] * 5000).status_code in (414, 422)
    sandbox.cancel(endless)


def test_a_client_that_goes_away_does_not_stop_its_evaluation(sandbox, server, task, quick):
    [one] = sandbox.submit(task, [python_module(SLOW, "# left alone")], quick)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.socket)), base_url="http://s") as http:
        with pytest.raises(httpx.ReadTimeout):
            http.get(f"/v1/evaluations/{one}?wait_s=30", timeout=0.1)
    assert sandbox.result(one, 30).outcome == "ok"


def test_a_verification_takes_turns_and_keeps_order(sandbox, task, quick):
    control = [good("control 1"), kernel("control_2;")]
    treated = [good("treated 1"), good("treated 2"), kernel("")]
    arms = [VerificationTask(task=task, control=control, treated=treated)]
    result = sandbox.verify(arms, quick, client_key="verification")
    assert result.state == "done"
    assert [r.outcome for r in result.arms[0].control] == ["ok", "build_failed"]
    assert [r.outcome for r in result.arms[0].treated] == ["ok", "ok", "incorrect"]
    again = sandbox.verify(arms, quick, client_key="verification")
    assert again == result


def test_a_full_queue_answers_busy_and_a_patient_client_gets_through(short_dir, task, quick):
    with running_server(short_dir, "--workers", "1", "--max-queue", "2") as small:
        with small.client(0) as hasty, small.client(60) as patient:
            hasty.submit(task, [python_module(SLOW, f"# {n}") for n in range(2)], quick)
            assert eventually(lambda: hasty.health().queue.running == 1)
            hasty.submit(task, [python_module(SLOW, "# 3")], quick)
            with pytest.raises(SandboxBusy) as caught:
                hasty.submit(task, [python_module(SLOW, "# 4")], quick)
            assert caught.value.retry_after_s > 0
            assert patient.evaluate(task, [python_module(SLOW, "# 4")], quick)[0].outcome == "ok"
        # Still in work when it is told to end: it ends at once and takes everything along.
        with small.client() as client:
            client.submit(task, [python_module(ENDLESS)], quick)
            assert eventually(lambda: client.health().queue.running == 1)
        family = descendants(small.pid)
        assert len(family) >= 3
        assert stat.S_IMODE(small.socket.stat().st_mode) == 0o600
        second = subprocess.run(
            [sys.executable, "-m", "sandbox", "serve", "--socket", str(small.socket), "--device", "cpu"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 2 and "already listens" in second.stderr
        assert small.stop(signal.SIGTERM) == 0
        assert eventually(lambda: not any(p.is_running() for p in family)), family
        assert not small.socket.exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_ended_server_takes_all_along_and_its_successor_finishes_the_work(short_dir, task, quick, how):
    results = []
    with SandboxClient(short_dir / "s", retry_for_s=120) as client:
        with running_server(short_dir, "--workers", "1") as first:
            candidates = [good("lost 1"), *(python_module(SLOW, f"# {n}") for n in range(3))]
            finished = threading.Event()

            def work():
                results.extend(
                    client.evaluate(
                        task, candidates, quick, client_key=f"lost {how}", on_result=lambda *_: finished.set()
                    )
                )

            thread = threading.Thread(target=work)
            thread.start()
            assert finished.wait(60)
            family = descendants(first.pid)
            first.stop(how)
            assert eventually(lambda: not any(p.is_running() for p in family)), family
            assert first.socket.exists() == (how == signal.SIGKILL)
        with running_server(short_dir, "--workers", "1"):
            thread.join(120)
    assert [result.outcome for result in results] == ["ok"] * 4


def test_a_killed_oracle_is_replaced_and_its_work_done_again(server, sandbox, task, quick):
    [one] = sandbox.submit(task, [python_module(SLOW, "# oracle dies")], quick)
    assert eventually(lambda: sandbox.result(one, 0).stage == "loaded")
    for oracle in oracle_processes(server.pid):
        os.kill(oracle, signal.SIGKILL)
    result = sandbox.result(one, 60)
    assert result.outcome == "ok" and result.attempts >= 2
    assert eventually(lambda: sandbox.health().status == "ok")


def test_a_killed_zygote_is_replaced_too(server, sandbox, task, quick):
    [one] = sandbox.submit(task, [python_module(SLOW, "# zygote dies")], quick)
    assert eventually(lambda: sandbox.result(one, 0).stage == "loaded")
    for process in descendants(server.pid):
        if "sandbox.jail.zygote" in command_of(process) and "zygote" not in command_of(parent_of(process)):
            os.kill(process.pid, signal.SIGKILL)
    assert sandbox.result(one, 60).outcome == "ok"
    assert eventually(lambda: sandbox.health().status == "ok", 60)


def test_nothing_is_left_in_the_temporary_directory(short_dir, task, quick):
    with running_server(short_dir, "--workers", "1", environment={"TMPDIR": str(short_dir)}) as server:
        with server.client() as client:
            client.evaluate(task, [good("files"), kernel("broken;"), python_module(ENDLESS)], quick)
            scratch = next(short_dir.glob("dk_sandbox-*"))
            assert eventually(lambda: len(list(scratch.glob("*/jail-*"))) == 1), "only the warm reference's"
            assert not list(scratch.glob("*/build-*"))
        server.stop()
        assert not list(short_dir.glob("dk_sandbox-*"))


def test_a_killed_oracle_s_files_go_when_it_is_replaced(short_dir, task, quick):
    with running_server(short_dir, "--workers", "1", environment={"TMPDIR": str(short_dir)}) as server:
        with server.client() as client:
            [one] = client.submit(task, [python_module(SLOW, "# its files")], quick)
            assert eventually(lambda: client.result(one, 0).stage == "loaded")
            scratch = next(short_dir.glob("dk_sandbox-*"))
            [old] = scratch.iterdir()
            jails = list(old.glob("jail-*"))
            [oracle] = oracle_processes(server.pid)
            os.kill(oracle, signal.SIGKILL)
            result = client.result(one, 60)
            assert result.outcome == "ok" and result.attempts == 2
            assert len(jails) == 2, "the candidate's and the reference's"
            assert not old.exists()
            [new] = scratch.iterdir()
            assert eventually(lambda: len(list(new.glob("jail-*"))) == 1), "only the warm reference's"


def test_a_directory_that_a_dying_process_still_fills_is_deleted_all_the_same(tmp_path):
    directory = make_directory(tmp_path, "oracle-")
    fill = "i=0; while [ $i -lt 2000 ] && mkdir $0/$i; do i=$((i+1)); done"
    with subprocess.Popen(["sh", "-c", fill, str(directory)], stderr=subprocess.DEVNULL):
        assert eventually(lambda: any(directory.iterdir()))
        assert remove_directory(directory, 60.0) and not directory.exists()


def test_cuda_without_a_toolkit_is_not_offered_and_says_what_to_install(monkeypatch):
    def missing():
        raise BuildUnavailable("no CUDA toolkit: install one, or point CUDA_HOME to it")

    monkeypatch.setattr(settings, "find_cuda", missing)
    monkeypatch.setattr(settings, "find_toolchain", lambda: None)
    support = settings._cuda(["cuda:0"])
    assert not support.available and "point CUDA_HOME to it" in support.problem
    monkeypatch.setattr(settings, "find_cuda", lambda: None)
    assert settings._cuda(["cuda:0"]).available and settings._cuda([]).problem.startswith("no NVIDIA GPU")
