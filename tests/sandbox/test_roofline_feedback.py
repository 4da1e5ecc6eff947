"""How near a time comes to the card's best: counted on the reference, told to agents in one line, made up nowhere."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sandbox.jail.faults import JailReply
from sandbox.jail.frames import Message
from sandbox.jail.runner import Runner
from sandbox.jail.work import count_work
from sandbox.oracle import work
from sandbox.oracle.reference import TaskRejected
from sandbox.oracle.roofline import Bandwidth
from sandbox.oracle.work import Work, find_work, nearness
from sandbox.profile.peaks import peak_flops, roofline
from sandbox.protocol import Roofline, Span, Timing
from sandbox.verdict import feedback
from tests.sandbox.helpers import GOOD_BODY, kernel

F32 = 4
X = torch.randn(64, 96)


def counted(call, *args):
    state = [*call.parameters(), *call.buffers()] if isinstance(call, nn.Module) else []
    with torch.no_grad():
        return count_work(call, args, state)


@pytest.mark.parametrize(
    ("call", "args"),
    [
        (nn.Linear(64, 32), (torch.randn(8, 64),)),
        (nn.Linear(64, 32, bias=False), (torch.randn(2, 8, 64),)),
        (nn.Conv2d(4, 8, 3, groups=2, padding=1), (torch.randn(2, 4, 16, 16),)),
        (nn.ConvTranspose2d(4, 8, 3, stride=2), (torch.randn(2, 4, 9, 9),)),
        (nn.Conv1d(4, 8, 3, dilation=2), (torch.randn(2, 4, 16),)),
        (nn.MultiheadAttention(32, 4, batch_first=True), (torch.randn(2, 10, 32), torch.randn(2, 7, 32), torch.randn(2, 7, 32))),
        (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (torch.randn(2, 3, 4), torch.randn(2, 4, 5))),
        (lambda a, b, c: torch.baddbmm(a, b, c), (torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5))),
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), (torch.randn(4, 8),)),
    ],
)
def test_operations_are_those_that_pytorchs_own_counter_finds(call, args):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(*args)
    assert counted(call, *args)["flops"] == counter.get_total_flops() > 0


COUNTS = """
import sys, torch
from sandbox.jail.work import count_work
before = set(sys.modules)
with torch.no_grad():
    assert count_work(torch.nn.Linear(8, 8), [torch.randn(4, 8)], [])["flops"] == 512
print(sorted({name.split(".")[0] for name in set(sys.modules) - before} | {name for name in sys.modules if name == "torch._dynamo"}))
"""


def test_counting_imports_nothing():
    """It happens in a process of each task, and the compiler that PyTorch asks to step aside for a mode takes seconds to import."""
    done = subprocess.run([sys.executable, "-c", COUNTS], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_attention_counts_both_products_and_vectors_count_too():
    q, k, v = torch.randn(2, 4, 10, 16), torch.randn(2, 4, 7, 16), torch.randn(2, 4, 7, 8)
    assert counted(nn.functional.scaled_dot_product_attention, q, k, v)["flops"] == 2 * 2 * 4 * 10 * 7 * (16 + 8)
    assert counted(torch.mv, torch.randn(3, 4), torch.randn(4))["flops"] == 2 * 3 * 4


@pytest.mark.parametrize(
    ("call", "args", "read", "written"),
    [
        (lambda x, y: torch.relu(x + y), (X, X.clone()), 2 * X.nbytes, X.nbytes),
        (lambda x: (x * 2 + x).sum(0) + x[0], (X,), X.nbytes, 96 * F32),
        (lambda x: x[:5] * 2, (X,), 5 * 96 * F32, 5 * 96 * F32),
        (lambda x: x[:, :48] * x[:, 48:], (X,), X.nbytes, X.nbytes // 2),
        (lambda x, y: torch.relu(x), (X, X.clone()), X.nbytes, X.nbytes),
        (lambda x: x.sum(1, keepdim=True).expand(64, 96), (X,), X.nbytes, 64 * F32),
        (lambda x: (x, [x + 1]), (X,), X.nbytes, 2 * X.nbytes),
        (nn.Embedding(1000, 16), (torch.arange(7),), 7 * 16 * F32 + 7 * 8, 7 * 16 * F32),
        (nn.Linear(64, 32), (torch.randn(8, 64),), (8 * 64 + 64 * 32 + 32) * F32, 8 * 32 * F32),
        (lambda x, scale: x * scale, (X, 3.0), X.nbytes, X.nbytes),
    ],
    ids=["add", "read twice", "a part", "two parts", "one of two", "expanded", "nested", "lookup", "parameters", "a number"],
)
def test_what_is_read_counts_once_and_what_is_not_read_does_not(call, args, read, written):
    found = counted(call, *args)
    assert (found["read_bytes"], found["written_bytes"]) == (read, written)


@pytest.mark.parametrize(
    ("card", "dtype", "teraflops"),
    [
        ("NVIDIA H200", "bfloat16", 989), ("NVIDIA H100 80GB HBM3", "float32", 67), ("NVIDIA H100 PCIe", "float16", 756),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5), ("NVIDIA L40S", "float16", 362), ("NVIDIA L4", "float32", 30.3),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "float32", None), ("NVIDIA H20", "float32", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "float32", None),
    ],
)  # fmt: skip
def test_peaks_are_of_cards_that_are_known_and_of_whole_ones(card, dtype, teraflops):
    assert peak_flops(card, dtype) == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_the_larger_of_both_times_is_the_floor():
    memory = roofline(n_bytes=12.6e6, flops=0.1e9, ms=0.0094, bytes_per_s=4e12, peak=67e12)
    assert memory.bound == "memory" and memory.floor_ms == pytest.approx(0.00315) and memory.share == pytest.approx(0.335, abs=1e-3)
    compute = roofline(n_bytes=12.6e6, flops=1e12, ms=20, bytes_per_s=4e12, peak=67e12)
    assert compute.bound == "compute" and compute.share == pytest.approx(1e3 / 67 / 20)
    assert roofline(n_bytes=1e6, flops=1e9, ms=1, bytes_per_s=4e12, peak=None).bound == "unknown"
    assert roofline(n_bytes=1e6, flops=0, ms=1, bytes_per_s=4e12, peak=None).bound == "memory"
    assert roofline(n_bytes=0, flops=0, ms=1, bytes_per_s=4e12, peak=67e12) is None


def timing(ms: float = 0.0094) -> Timing:
    span = Span(median_ms=ms, low_ms=ms, high_ms=ms, samples=9)
    return Timing(candidate=span, baselines={"eager": span}, speedup=1.0, noisy=False, bound_by="runner span")


NEAR = Roofline(bytes=12.6e6, flops=0.5e9, floor_ms=0.0031, share=0.33, bound="memory")


def test_agents_read_one_line_more_and_nothing_where_nothing_is_known():
    without = feedback.correct(timing(), 1.0)
    first, second = feedback.correct(timing(), 1.0, roofline=NEAR).splitlines()
    assert first == without and "roofline" not in without
    assert second == "roofline: moves at least 12.6 MB and computes 500 MFLOP: 3.1 us at this card's peak; this takes 9.4 us (33%): memory-bound"
    bare = Roofline(bytes=2e9, flops=0, floor_ms=0.5, share=0.004, bound="memory")
    assert feedback.nearness(bare) == "roofline: moves at least 2 GB: 0.5 ms at this card's peak; this takes 125 ms (0.4%): memory-bound"
    unknown = feedback.nearness(NEAR.model_copy(update={"bound": "unknown"}))
    assert unknown.endswith("at this card's memory's speed; this takes 9.4 us (33%)")


@pytest.mark.parametrize("value", [1e-9, 1.0, 1e30])
def test_the_line_is_bounded(value):
    assert len(feedback.nearness(Roofline(bytes=value, flops=value, floor_ms=value, share=value, bound="compute"))) < 250


class Reference:
    """A reference whose process answers with `reply`, or fails."""

    def __init__(self, reply, alive=True):
        self._reply, self.alive, self.work, self.work_is_known, self.asked = reply, alive, None, False, 0

    def order(self, command, timeout_s, **order):
        assert command == "work" and order == {"slot": 3}
        self.asked += 1
        if isinstance(self._reply, Exception):
            raise TaskRejected(str(self._reply)) from self._reply
        return Message(self._reply, [])


def test_work_is_counted_once_for_a_reference():
    reference = Reference({"read_bytes": 8, "written_bytes": 4, "flops": 2})
    for _ in range(2):
        find_work(reference, 3, 5.0)
    assert reference.work == Work(bytes=12, flops=2) and reference.asked == 1


@pytest.mark.parametrize("reply", [{}, {"read_bytes": -1, "written_bytes": 0, "flops": 0}, {"read_bytes": 1e9, "written_bytes": 0, "flops": 0}])
def test_a_made_up_reply_counts_for_nothing(reply):
    reference = Reference(reply)
    find_work(reference, 3, 5.0)
    assert reference.work is None


def test_a_reference_that_cannot_be_counted_is_judged_without_unless_it_broke_down():
    reference = Reference(JailReply("runtime_error", "no dispatch here"))
    find_work(reference, 3, 5.0)
    assert reference.work is None
    with pytest.raises(TaskRejected):
        find_work(Reference(JailReply("runtime_error", "gone"), alive=False), 3, 5.0)


def test_the_candidates_time_stands_beside_the_card_it_ran_on(monkeypatch):
    monkeypatch.setattr(work.nvml, "gpu", lambda index: SimpleNamespace(name="NVIDIA H200"))
    found = nearness(Work(bytes=8_000_000, flops=0), timing(0.004), Bandwidth(read=4e12, write=8e12), "cuda:0", "float32")
    assert found.floor_ms == pytest.approx(0.002) and found.share == pytest.approx(0.5) and found.bound == "memory"
    assert nearness(None, timing(), Bandwidth(read=4e12, write=8e12), "cuda:0", "float32") is None


def test_a_runner_counts_the_work_of_its_reference(tmp_path, monkeypatch):
    source = """
import torch
class Model(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.linear = torch.nn.Linear(n, 4)
    def forward(self, x):
        return torch.relu(self.linear(x))
def get_inputs():
    return [torch.randn(2, 8)]
def get_init_inputs():
    return [8]
"""
    monkeypatch.chdir(tmp_path)  # a runner writes what it executes into its own directory
    runner = Runner()
    runner.do_load_reference(Message({"source": source, "entry_point": "Model", "dtype": "float32", "device": "cpu", "seed": 1}, []))
    runner.do_inputs(Message({"seed": 1, "slot": 3}, []))
    found, tensors = runner.do_work(Message({"slot": 3}, []))
    assert tensors == [] and found == {"read_bytes": (16 + 32 + 4) * F32, "written_bytes": 8 * F32, "flops": 2 * 2 * 8 * 4}


def test_on_a_cpu_nothing_is_said_of_peaks(sandbox, task, quick):
    [result] = sandbox.evaluate(task, [kernel(GOOD_BODY)], quick.model_copy(update={"timing": "quick"}))
    assert result.outcome == "ok" and result.timing is not None
    assert result.roofline is None and "roofline" not in result.feedback
