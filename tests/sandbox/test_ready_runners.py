"""A runner that is made ready ahead judges like any other, and inputs are drawn where they are needed."""

import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sandbox.build.artifacts import ArtifactStore
from sandbox.jail.device import make_device
from sandbox.jail.faults import JailTimeout
from sandbox.jail.frames import Message
from sandbox.jail.jailed import Runner as JailRunner
from sandbox.jail.processes import members
from sandbox.jail.runner import Runner
from sandbox.oracle.draft import Job
from sandbox.oracle.evaluate import Judge
from sandbox.oracle.failures import Cancelled
from sandbox.oracle.spares import CONNECTIONS_VARIABLE, Spares, Wanted, connections
from sandbox.protocol import Options, TaskSpec
from sandbox.verdict.rounding import Rounding
from tests.sandbox.helpers import python_module


@pytest.fixture
def judge(tmp_path):
    (tmp_path / "scratch").mkdir(mode=0o711)
    tmp_path.chmod(0o711)
    judge = Judge(scratch=tmp_path / "scratch", store=ArtifactStore(tmp_path / "store"), threads=1)
    yield judge
    judge.close()


def job(task, **options):
    return Job(id="a", task=task, candidate=python_module("        return x + bias"), options=Options(timing="none", **options))


def ready_one(judge):
    return next((spare.runner for spare in judge._loader._spares._kept.values()), None)


def test_the_runner_that_is_ready_is_the_next_candidate_s_and_only_if_it_fits(judge, task, monkeypatch):
    taken = []
    take = Spares.take
    monkeypatch.setattr(Spares, "take", lambda self, wanted: taken.append(take(self, wanted)) or taken[-1])
    first = judge.evaluate(job(task))
    for memory_bytes, fits in ((4 << 30, True), (3 << 30, False)):
        judge._loader.make_spare(job(task))
        ready = ready_one(judge)
        result = judge.evaluate(job(task, memory_bytes=memory_bytes))
        assert result.outcome == first.outcome and ready_one(judge) is None
        assert taken[-1] is (ready if fits else None) and ready.exit is not None
    assert taken[0] is None and not judge._loader.give_up_spare()


def test_a_runner_that_has_died_meanwhile_is_not_taken(judge, task):
    expected = judge.evaluate(job(task)).outcome
    judge._loader.make_spare(job(task))
    ready = ready_one(judge)
    for member in reversed(members(ready.pid)):  # behind the oracle's back, as a kernel short of memory does
        os.kill(member, signal.SIGKILL)
    assert ready.exit is None
    result = judge.evaluate(job(task))
    assert result.outcome == expected and ready.exit is not None


def test_it_is_given_up_before_a_reference_where_memory_is_short(judge, task):
    judge.evaluate(job(task))
    judge._loader.make_spare(job(task))
    assert judge._give_up() and ready_one(judge) is None
    assert judge._give_up() and not judge._give_up()


class ReadyRunner:
    exit = None

    def __init__(self, orders):
        self.orders = orders

    def begin(self, command, timeout_s, **order):
        self.orders.append(f"begin {command}")

    def collect(self, timeout_s):
        self.orders.append("collect")

    def call(self, command, timeout_s, **order):
        self.orders.append(command)

    def close(self):
        self.exit = 0


def test_each_evaluation_gets_the_environment_it_needs_and_one_of_another_kind_waits():
    orders, made = [], []
    spares = Spares(lambda wanted: made.append(wanted) or ReadyRunner(orders))
    single, several = (Wanted("gpu", "cuda:0", 1, environment) for environment in (connections("x + 1"), connections("torch.cuda.Stream()")))
    reference = Wanted("plain", "cuda:0", 1, connections("x + 1"))
    for wanted in (single, several, reference):
        spares.prepare(wanted)
    assert made == [single, reference] and orders == ["begin connect"] * 2, "nobody waits for them"
    assert spares.take(several) is None
    assert spares.take(single).exit is None and spares.take(single) is None
    assert orders[2:] == ["collect", "warm"], "but who needs one"
    spares.settle()
    assert orders[4:] == ["collect", "warm"]
    spares.settle()
    assert spares.take(reference).exit is None and orders[6:] == ["memory"], "one that has waited is asked whether it is there"
    spares.prepare(several)
    ready = spares._kept["gpu"].runner
    assert spares.take(Wanted("gpu", "cuda:0", 2, {})) is None and ready.exit == 0 and not spares.give_up()


@pytest.mark.parametrize("step", ["begin", "collect", "call"])
@pytest.mark.parametrize(("error", "raised"), [(JailTimeout("too long"), None), (Cancelled(), Cancelled)])
def test_one_that_does_not_get_ready_is_ended_and_not_taken(step, error, raised):
    def fail(*_, **__):
        raise error

    runner = ReadyRunner([])
    setattr(runner, step, fail)
    spares, wanted = Spares(lambda wanted: runner), Wanted("gpu", "cuda:0", 1, {})
    with pytest.raises(raised) if raised else nullcontext():
        spares.prepare(wanted)
        assert spares.take(wanted) is None
    assert runner.exit == 0 and not spares.give_up()


def test_the_next_evaluation_s_runners_open_their_device_while_this_one_goes_on(judge, task, monkeypatch):
    """On a GPU; the CPU stands in for it here."""
    begun = []
    monkeypatch.setattr(JailRunner, "begin", lambda self, command, *rest, **order: begun.append(command))
    monkeypatch.setattr(judge, "_get_ready", lambda job: judge._loader.make_spare(job, reference=True))
    load = JailRunner.call

    def call(self, command, *rest, **order):
        if command == "load_module":
            begun.append(command)
        return load(self, command, *rest, **order)

    monkeypatch.setattr(JailRunner, "call", call)
    judge.evaluate(job(task))
    assert begun[-2:] == ["connect", "load_module"] and begun.count("connect") == 1, "a candidate's and a reference's are one flavour here"


@pytest.mark.parametrize(
    ("source", "several"),
    [
        ("out = x + 1", False),
        ("@triton.jit\ndef kernel(x): tl.store(x, tl.load(x) + tl.program_id(0))", False),
        ("side = torch.cuda.Stream()", True),
        ("cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);", True),
        ("self.layer = nn.LSTM(8, 8)", True),
        ("g = torch.cuda.CUDAGraph()", True),
        ("torch.linalg.inv(x)", True),
        ("auto pool = at::cuda::getStreamFromPool();", True),
        ("with torch.cuda.stream(side): y = x + 1", True),
        ("torch.lu_solve(b, *torch.lu_factor(a)), torch.eig(a), torch.linalg.qr(a)", True),
        ("torch.lu_factor(a)", True),
        ("cudnn_rnn(x)", True),
        ("cudaStream_t stream = at::cuda::getCurrentCUDAStream(); k<<<1, 32, 0, stream>>>(x);", False),
        ("#include <c10/cuda/CUDAStream.h>\nk<<<1, 32, 0, c10::cuda::getCurrentCUDAStream().stream()>>>(x);", False),
        ("stream = torch.cuda.current_stream()", False),
        ("F.linear(x, self.weight).relu_(); gelu_kernel(x); sqrt(x); height = x.shape[-2]; eight = 8", False),
    ],
)
def test_one_hardware_queue_is_for_what_has_a_single_stream(source, several):
    assert connections(source) == ({} if several else {CONNECTIONS_VARIABLE: "1"})
    assert connections("y = 2 * x", source) == connections(source)


def drawing(get_inputs, device="meta"):
    runner = Runner()
    runner.device = SimpleNamespace(name=device, to_device=lambda tensor: tensor, trim=lambda: None)
    runner.get_inputs, runner.draws_on_device = get_inputs, True
    return runner


def test_inputs_are_drawn_on_the_device():
    runner = drawing(lambda: [torch.randn(3, 4), torch.ones(2), 5])
    drawn = runner._drawn(1)
    assert [t.device.type for t in drawn[:2]] == ["meta", "meta"] and drawn[2] == 5 and runner.draws_on_device


def test_inputs_that_need_the_host_are_drawn_there_with_the_same_seed_from_then_on():
    calls = []

    def get_inputs():
        calls.append(torch.get_default_device().type)
        return [torch.randn(3) * torch.from_numpy(np.ones(3, np.float32)), torch.tensor(torch.rand(2).numpy())]

    runner = drawing(get_inputs)
    first, second = runner._drawn(1), runner._drawn(2)
    assert calls == ["meta", "cpu", "cpu"] and not runner.draws_on_device
    assert not torch.equal(first[0], second[0])
    assert all(torch.equal(*pair) for pair in zip(first, runner._drawn(1), strict=True))


def test_a_device_without_room_for_drawing_has_inputs_drawn_on_the_host():
    kept = []

    def to_device(tensor):
        kept.append(tensor.device.type)
        if tensor.device.type == "meta":
            raise MemoryError
        return tensor

    runner = drawing(lambda: [torch.randn(3), torch.randn(2)])
    runner.device.to_device, runner.device.trim = to_device, lambda: kept.append("trimmed")
    assert len(runner._drawn(1)) == 2 and kept == ["meta", "trimmed", "cpu", "cpu"]


@pytest.mark.parametrize("way", ["torch.from_numpy(x.numpy())", "torch.from_dlpack(x)", "x[1:]", "x", "torch.from_numpy(x.numpy()[3:])"])
@pytest.mark.parametrize("rows", [4, 1024])
def test_an_output_that_lies_in_an_input_is_told_however_it_came_by_its_memory(way, rows):
    runner = Runner()
    runner.device = make_device("cpu", language="cpp")
    runner.slots[0] = [runner._place(torch.randn(2, 3)), runner._place(torch.randn(rows, 512))]
    runner.call = eval(f"lambda y, x: ({way}, x + 1)")
    order = Message({"slot": 0, "check": True, "seed": 1, "max_bytes": 1 << 30}, [], [])
    assert runner.do_run(order)[0]["aliased"] == [1]
    runner.call = lambda y, x: (x.clone(), y + 1, x.new_empty(0))
    assert runner.do_run(order)[0]["aliased"] == []


@pytest.mark.parametrize(("value", "draws"), [("x.sum()", 8), ("x.sum(dim=1)", 4), ("x * 2", 1)])
def test_the_rounding_of_few_numbers_is_taken_from_several_draws(judge, monkeypatch, value, draws):
    """One difference may be small by chance: 10 of 150 honest sums around zero were taken for replays."""
    orders = []
    call = JailRunner.call
    monkeypatch.setattr(JailRunner, "call", lambda self, command, *rest, **more: orders.append(command) or call(self, command, *rest, **more))
    source = f"import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): return {value}\n"
    source += "def get_inputs(): return [torch.randn(16, 128)]\ndef get_init_inputs(): return []\n"
    reference = judge._reference(job(TaskSpec(reference=source, device="cpu")))
    assert orders.count("run_double") == draws and orders.count("inputs") == draws
    assert len(reference.rounding) == 1 and reference.rounding[0].bounds[0] > 0


def test_of_two_draws_the_worse_counts():
    one, other = Rounding(relative_rms=1e-7, bounds=(1e-5, 2e-6)), Rounding(relative_rms=3e-8, bounds=(4e-5, 2e-6))
    assert one.or_worse(other) == other.or_worse(one) == Rounding(relative_rms=1e-7, bounds=(4e-5, 2e-6))
