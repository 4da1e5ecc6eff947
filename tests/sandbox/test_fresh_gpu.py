"""The audit on shared device memory, with memory of the host in its place: what is cached, skipped or late shows."""

import random
import time
from types import SimpleNamespace

import pytest
import torch

from sandbox.jail.carrier import ArenaCarrier, HostCarrier
from sandbox.jail.device import CpuDevice
from sandbox.jail.frames import Message
from sandbox.jail.runner import Runner
from sandbox.oracle.audit import AuditFailed, audit, on_gpu, rule
from sandbox.oracle.fresh_gpu import MAX_CALLS, calls_of_block, draw_blocks, jittered
from sandbox.oracle.reference import Inputs
from sandbox.protocol import Span, Timing
from sandbox.verdict.correctness import Tolerance, compare
from tests.sandbox.test_arena import FakeArena

SHAPE = (64, 32)


def side(function, n_bytes=1 << 20):
    """A runner in this process with an arena, as the oracle holds one."""
    runner = Runner()
    runner.device, runner.arena, runner.call = CpuDevice(language="cpp"), FakeArena(n_bytes), function

    def call(command, timeout_s, **order):
        reply, out = getattr(runner, f"do_{command}")(Message(order, []))
        assert not out
        return Message(reply, [])

    return SimpleNamespace(call=call, carrier=ArenaCarrier(runner.arena))


def reference(function):
    runner = side(function)
    return SimpleNamespace(
        runner=runner, order=runner.call, outputs=[{"dtype": "float32", "shape": list(SHAPE)}],
        max_output_bytes=2 * 4 * SHAPE[0] * SHAPE[1],
    )  # fmt: skip


def inputs(count=3):
    return [Inputs([{"tensor": 0}, 2.0], [torch.randn(SHAPE)]) for _ in range(count)]


def judged(candidate, honest=lambda x, a: torch.relu(x) * a, eager_ms=0.2):
    parts = on_gpu(reference(honest), side(candidate), inputs(), eager_ms)
    return audit(*parts, lambda want, have: compare(want, have, Tolerance()), lambda: 10.0, random.Random(0))


def test_an_honest_candidate_passes_and_its_time_is_near_the_references():
    found = judged(lambda x, a: (x * a).clamp_min(0))
    assert found.calls == 10 and len(found.candidate) == len(found.reference) == 4
    own, other = found.times_ms()
    assert 0 < own.median < 5 and 0 < other.median < 5


class Replays:
    def __init__(self):
        self.known = {}

    def __call__(self, x, a):
        return self.known.setdefault("out", torch.relu(x) * a)


class ByAddress:
    def __init__(self):
        self.known = {}

    def __call__(self, x, a):
        return self.known.setdefault(x.data_ptr(), torch.relu(x) * a)


class LeavesSomeOut:
    def __init__(self):
        self.n = 0

    def __call__(self, x, a):
        self.n += 1
        return torch.empty_like(x) if self.n % 5 == 0 else torch.relu(x) * a


@pytest.mark.parametrize("cheat", [Replays(), ByAddress(), LeavesSomeOut()], ids=lambda cheat: type(cheat).__name__)
def test_what_is_known_from_other_inputs_or_left_out_is_wrong(cheat):
    with pytest.raises(AuditFailed):
        judged(cheat)


def test_a_candidate_that_is_slow_on_new_inputs_is_as_slow_as_that():
    def slow(x, a):
        time.sleep(0.002)
        return torch.relu(x) * a

    found = judged(slow)
    span = Span(median_ms=0.01, low_ms=0.01, high_ms=0.01, samples=9)
    claimed = Timing(
        candidate=span, baselines={"eager": span.model_copy(update={"median_ms": 0.2})}, speedup=20.0, speedup_low=19.0,
        speedup_high=21.0, noisy=False, bound_by="runner span",
    )  # fmt: skip
    timing, own, _ = rule(claimed, found)
    assert own.median > 1.9 and timing.speedup < 1.0 and "fresh inputs" in timing.bound_by
    # What the host needs to launch a call is not held against it.
    lenient, own, _ = rule(claimed, found, allowance_ms=2.0)
    assert own.median < 1.5 and lenient.speedup > timing.speedup


def test_outputs_of_another_form_end_the_order():
    with pytest.raises(TypeError, match="torch.float64"):
        judged(lambda x, a: (torch.relu(x) * a).double())


def test_values_change_a_little_stay_in_range_and_never_repeat():
    base = [torch.rand(100), torch.tensor([0.0, -1.0, 1.0]), torch.arange(5), torch.empty(0)]
    generator = torch.Generator().manual_seed(0)
    one, other = jittered(base, generator), jittered(base, generator)
    assert (one[0] != other[0]).float().mean() > 0.9 and ((one[0] - base[0]).abs() <= 0.0101 * base[0]).all()
    assert one[0].max() <= base[0].max() and one[0].min() >= base[0].min()
    assert one[1][0] == 0 and torch.equal(one[2], base[2]) and one[3].numel() == 0
    blocks = draw_blocks([{"tensor": 0}], [[torch.rand(9)], [torch.rand(9)]], 3, seed=1)
    seen = {tuple(tensors[0].tolist()) for block in blocks for tensors in block.sets}
    assert len(seen) == 3 * len(blocks)


@pytest.mark.parametrize(
    ("eager_ms", "sizes", "half", "calls"),
    [(0.01, (1000, 1000), 1 << 20, MAX_CALLS), (1.0, (1000, 1000), 1 << 20, 2), (30.0, (1000, 0), 1 << 20, 2),
     (0.01, (1 << 19, 10), 1 << 20, 2), (0.01, (10, 1 << 20), 1 << 20, 1), (0.01, (1 << 21, 10), 1 << 20, 0)],
)  # fmt: skip
def test_a_block_has_as_many_calls_as_time_and_room_allow(eager_ms, sizes, half, calls):
    assert calls_of_block(eager_ms, *sizes, half) == calls


def test_without_arenas_or_room_there_is_no_such_audit():
    honest = reference(lambda x, a: x)
    plain = SimpleNamespace(call=None, carrier=HostCarrier())
    assert on_gpu(honest, plain, inputs(), 0.1) is None
    assert on_gpu(honest, side(lambda x, a: x, 1 << 13), inputs(), 0.1) is None
