"""What a fleet consists of, without Ray: who may have which evaluation, late results, tokens, what nodes offer together, clear errors."""

import asyncio
import subprocess
import sys
import time

import pytest

from sandbox import scheduler as scheduler_module
from sandbox.fleet import FleetError, crew
from sandbox.fleet import fleet as fleet_module
from sandbox.fleet.crew import Node
from sandbox.fleet.fleet import Fleet, check_address, gpu_share
from sandbox.fleet.listener import TOKEN_BYTES, Listener
from sandbox.fleet.offer import Served, merge
from sandbox.fleet.survey import Wishes, code_digest, survey
from sandbox.jail.probe import Isolation
from sandbox.protocol import Capabilities, EvaluationRequest, LanguageSupport, Options, TaskSpec, VerificationRequest, VerificationTask
from sandbox.scheduler import Scheduler
from sandbox.settings import SettingsError
from sandbox.workers import Gates
from tests.sandbox.helpers import ROOT, kernel
from tests.sandbox.test_scheduler import FakeWorker

OPTIONS = Options(timing="none")
CPU, GPU = TaskSpec(reference="on a cpu"), TaskSpec(reference="on a gpu", device="cuda:0")


def offering(*devices, cuda=False, level="strict", workers=2):
    def support(available, on):
        return LanguageSupport(available=available, forms=["module"], devices=on, timing=True, problem="" if available else "not here")

    gpus = [device for device in devices if device != "cpu"]
    languages = {"cpp": support(True, ["cpu"]), "triton": support(True, list(devices)), "cuda": support(cuda, gpus)}
    limits = {"workers": workers, "threads": workers, "max_queue": 1}
    return Served(
        capabilities=Capabilities(languages=languages, devices=list(devices), limits=limits, kernel_form={}),
        isolation=Isolation(name=level, features=("walls", level), missing=(f"what {level} lacks",)),
    )


CPU_NODE, GPU_NODE = offering("cpu", workers=4), offering("cuda:0", "cpu", cuda=True, level="standard")


class NoSource:
    """A fleet whose nodes the test makes."""

    problem = ""

    async def start(self, scheduler):
        pass

    async def close(self):
        pass


def scenario(test, **nodes):
    """Runs an async test with a scheduler and fake workers.

    Args:
      nodes: by name, (what the node serves, how many workers it has); the test gets a list of workers for each.
    """

    async def run():
        scheduler = Scheduler(None, workers=0, max_queue=100, cores=1, fleet=NoSource())
        await scheduler.start()
        workers = {}
        for name, (served, count) in nodes.items():
            node = Node(name=name, gates=Gates(shared_limit=1), offers=served.capabilities)
            workers[name] = [scheduler.join(node, None) for _ in range(count)]
        try:
            await test(scheduler, **workers)
        finally:
            await scheduler.close()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def fake_workers(monkeypatch):
    monkeypatch.setattr(scheduler_module, "Worker", FakeWorker)


def candidate(name, language="cpp"):
    return kernel(name).model_copy(update={"source": name, "language": language, "form": "module"})


def submit(scheduler, *names, task=CPU, language="cpp"):
    candidates = [candidate(name, language) for name in names]
    return scheduler.submit(EvaluationRequest(task=task, candidates=candidates, options=OPTIONS))


def has(worker):
    return worker.taken[-1] if worker.job_id else None


def test_nodes_share_the_work_however_many_workers_each_has():
    async def test(scheduler, a, b):
        submit(scheduler, *"123")
        assert sum(map(bool, map(has, a))) == 2 and sum(map(bool, map(has, b))) == 1

    scenario(test, a=(CPU_NODE, 4), b=(CPU_NODE, 2))


def test_a_node_gets_only_what_its_devices_and_compilers_can_judge():
    async def test(scheduler, small, big):
        submit(scheduler, "gpu 1", "gpu 2", task=GPU, language="cuda")
        submit(scheduler, "cpu")
        assert [has(small[0]), has(big[0])] == ["cpu", "gpu 1"]
        small[0].answer()
        assert has(small[0]) is None and scheduler.queue.waiting == 1
        big[0].answer()
        assert has(big[0]) == "gpu 2"

    scenario(test, small=(CPU_NODE, 1), big=(GPU_NODE, 1))


def test_what_nobody_can_judge_waits_for_a_node_that_can():
    async def test(scheduler, small):
        submit(scheduler, "gpu", task=GPU, language="cuda")
        assert scheduler.queue.waiting == 1 and has(small[0]) is None
        scheduler.leave(small, "it has gone")
        assert (scheduler.queue.workers, scheduler.queue.waiting) == (0, 1)
        big = scheduler.join(Node(name="big", gates=Gates(shared_limit=1), offers=GPU_NODE.capabilities), None)
        big._on_free(big)
        assert has(big) == "gpu"

    scenario(test, small=(CPU_NODE, 1))


def test_a_lost_node_s_evaluation_runs_elsewhere_and_its_late_result_is_dropped():
    async def test(scheduler, a, b):
        [one] = submit(scheduler, "one")
        assert has(a[0]) == "one"
        queue, _ = scheduler.listen([one])
        job_id = a[0].job_id
        scheduler.leave(a, "node a has gone")
        assert has(b[0]) == "one" and scheduler.queue.workers == 1
        a[0].job_id = job_id
        a[0].answer("incorrect", "of a node believed lost")
        result = await scheduler.wait(one, 0)
        assert result.state == "running"
        b[0].answer()
        result = await scheduler.wait(one, 0)
        assert (result.outcome, result.attempts) == ("ok", 2)
        events = [queue.get_nowait() for _ in range(queue.qsize())]
        assert [event.state for event in events].count("done") == 1
        text = scheduler.metrics_text()
        assert 'sandbox_evaluations_total{outcome="ok"} 1' in text and "incorrect" not in text
        assert 'sandbox_node_workers_ready{node="a"} 0' in text and 'sandbox_node_workers_ready{node="b"} 1' in text

    scenario(test, a=(CPU_NODE, 1), b=(CPU_NODE, 1))


def test_what_a_dying_node_had_in_hand_is_not_given_to_its_other_oracles_for_a_moment(monkeypatch):
    monkeypatch.setattr(crew, "SETTLE_S", 0.2)

    async def test(scheduler, a):
        [one] = submit(scheduler, "one")
        a[0]._on_lost(a[0], "its connection is closed")
        a[1]._on_free(a[1])
        assert has(a[0]) is has(a[1]) is None and (await scheduler.wait(one, 0)).state == "queued"
        deadline = time.monotonic() + 5
        while not any(map(has, a)) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert "one" in map(has, a), "a node that is still there afterwards may try again"

    scenario(test, a=(CPU_NODE, 2))


def test_an_arm_of_a_verification_stays_on_one_node_while_that_is_there():
    async def test(scheduler, a, b):
        arm = VerificationTask(task=CPU, control=[candidate("c0"), candidate("c1")], treated=[candidate("t0"), candidate("t1")])
        other = VerificationTask(task=GPU, control=[candidate("oc", "triton")], treated=[candidate("ot", "triton")])
        scheduler.submit_verification(VerificationRequest(arms=[arm, other], options=OPTIONS))
        assert [has(a[0]), has(b[0])] == ["c0", "oc"]
        b[0].answer()
        b[0].answer()
        assert b[0].taken == ["oc", "ot"] and has(b[0]) is None
        a[0].answer()
        assert has(a[0]) == "t0"
        scheduler.leave(a, "node a has gone")
        for _ in range(3):
            b[0].answer()
        assert sorted(b[0].taken[2:]) == ["c1", "t0", "t1"]

    scenario(test, a=(GPU_NODE, 1), b=(GPU_NODE, 1))


def test_devices_of_the_same_name_on_two_nodes_are_two_devices():
    async def test(scheduler, a, b):
        granted = []
        for name, [worker] in (("a", a), ("b", b)):
            scheduler._crew.node(worker).gates.of("cpu").acquire(name, exclusive=True, grant=lambda name=name: granted.append(name))
        assert granted == ["a", "b"]
        text = scheduler.metrics_text()
        assert 'sandbox_exclusive_seconds_total{device="a/cpu"}' in text and 'device="b/cpu"' in text

    scenario(test, a=(CPU_NODE, 1), b=(CPU_NODE, 1))


def test_nodes_together_offer_what_any_of_them_does_at_the_weakest_level():
    both = merge([CPU_NODE, GPU_NODE], [], max_queue=7)
    assert both.capabilities.devices == ["cuda:0", "cpu"] and both.capabilities.languages["cuda"].available
    assert both.capabilities.limits == {"workers": 6, "threads": 2, "max_queue": 7}
    assert both.isolation.name == "standard" and both.isolation.features == ("walls",)
    assert both.isolation.missing == ("what strict lacks", "what standard lacks")
    left = merge([CPU_NODE], [GPU_NODE], max_queue=7)
    assert left.capabilities.languages["cuda"].devices == ["cuda:0"] and left.isolation.name == "strict"
    assert left.capabilities.limits["workers"] == 4
    alone = merge([CPU_NODE], [], max_queue=7)
    assert not alone.capabilities.languages["cuda"].available and alone.capabilities.languages["cuda"].problem == "not here"


@pytest.mark.parametrize(
    ("gpus", "workers", "share"), [(0, 4, 0.0), (1, 1, 1.0), (1, 8, 0.125), (1, 3, 0.3333), (8, 8, 1.0), (8, 3, 2.0), (3, 8, 0.3333), (2, 8, 0.25)]
)
def test_a_node_s_workers_fit_into_its_gpus_as_ray_counts_them(gpus, workers, share):
    assert gpu_share(gpus, workers) == share
    per_gpu = -(-workers // gpus) if gpus else 0
    assert share * (per_gpu if share < 1 else workers) <= max(1, gpus)


def test_only_who_shows_a_token_that_is_expected_is_let_in_and_only_once():
    async def test():
        listener = Listener(1 << 16)
        address = await listener.open("127.0.0.1")
        token, arrival = listener.expect()
        void, given_up = listener.expect()
        given_up.cancel()
        await asyncio.sleep(0)

        async def answer_to(sent):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(sent)
            try:
                return await asyncio.wait_for(reader.read(), 5)
            except ConnectionError:
                return b""
            finally:
                writer.close()

        for wrong in (b"0" * 2 * TOKEN_BYTES + b"\n", void.encode() + b"\n", token.encode()[:-1] + b"x\n", token.encode() + b"x", b"\x00" * 1000):
            assert await answer_to(wrong + b'{"op": "ready"}\n') == b"" and not arrival.done()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(token.encode() + b'\n{"op": "ready"}\n')
        their_reader, their_writer = await asyncio.wait_for(arrival, 5)
        assert await their_reader.readline() == b'{"op": "ready"}\n'
        assert await answer_to(token.encode() + b"\n") == b"", "a token is good for one connection"
        their_writer.write(b"still open\n")
        assert await reader.readline() == b"still open\n"
        for one in (writer, their_writer):
            one.close()
        await listener.close()

    asyncio.run(test())


def test_who_shows_no_token_is_sent_away(monkeypatch):
    monkeypatch.setattr("sandbox.fleet.listener.HELLO_S", 0.1)

    async def test():
        listener = Listener(1 << 16)
        reader, writer = await asyncio.open_connection(*await listener.open("127.0.0.1"))
        with pytest.raises(ConnectionError):
            if not await asyncio.wait_for(reader.read(), 5):
                raise ConnectionResetError
        writer.close()
        await listener.close()

    asyncio.run(test())


@pytest.mark.parametrize("address", ["ray://head:10001", "local", "", "head", "head:port", "a b:1"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(FleetError, match="use auto or HOST:PORT"):
        check_address(address)


@pytest.mark.parametrize("address", ["auto", "head:6379", "10.0.0.1:6379", "[::1]:6379"])
def test_what_is_an_address_is_not(address):
    check_address(address)


def test_without_ray_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(fleet_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FleetError, match="pip install 'kernel-sandbox\\[fleet\\]'"):
        Fleet("auto", Wishes(), 1).attach()


def test_the_command_says_so_too(tmp_path):
    program = "import sys; sys.modules['ray'] = None; from sandbox.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "serve", "--fleet", "ray", "--socket", str(tmp_path / "s")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "needs Ray, which is not installed: pip install" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "s").exists()


def test_an_address_without_a_fleet_is_a_mistake(tmp_path):
    command = [sys.executable, "-m", "sandbox", "serve", "--fleet-address", "head:6379", "--socket", str(tmp_path / "s")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "--fleet=ray" in done.stderr


def test_a_node_with_another_sandbox_or_without_what_is_asked_says_why_it_cannot_serve(tmp_path):
    with pytest.raises(SettingsError, match="install the same on every node"):
        survey(Wishes(code="another"))
    with pytest.raises(SettingsError, match="cuda:77"):
        survey(Wishes(code=code_digest(), device="cuda:77", isolation="none", cache=str(tmp_path)))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SettingsError, match="cannot use the cache"):
        survey(Wishes(code=code_digest(), device="cpu", isolation="none", cache=str(blocked / "cache")))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("2026 sandbox.oracle ERROR gone\n", "2026 sandbox.oracle ERROR gone node=a\n"),
        ('{"message": "gone"}\n', '{"message": "gone", "node": "a"}\n'),
        ("17\n", "17 node=a\n"),
        ("\n", "\n"),
    ],
)
def test_what_an_oracle_logs_is_signed_with_its_node(line, said):
    assert fleet_module._signed(line, "a") == said
