"""The audit on shared device memory, with memory of the host in its place: what is cached, skipped or late shows."""

import random
import time
from types import SimpleNamespace

import pytest
import torch

from sandbox.jail.arena import read
from sandbox.jail.carrier import ArenaCarrier, HostCarrier
from sandbox.jail.device import CpuDevice
from sandbox.jail.frames import Message
from sandbox.jail.runner import Runner
from sandbox.oracle.audit import AuditFailed, audit, on_gpu, rule
from sandbox.oracle.fresh_gpu import MAX_CALLS, ArenaOutputs, calls_of_block, draw_blocks, jittered
from sandbox.oracle.reference import Inputs
from sandbox.protocol import Span, Timing
from sandbox.verdict.correctness import Tolerance, compare
from tests.sandbox.test_arena import FakeArena

SHAPE = (64, 32)


class Recorder(CpuDevice):
    """A device that records: a replay is the work done again, into the memory that it left its results in when it was
    recorded. What `misses` says is not part of the recording."""

    def __init__(self, misses=lambda work: work):
        super().__init__(language="cpp")
        self.misses, self.replays = misses, 0

    def record(self, work):
        work()
        recorded = self.misses(work)

        def replay():
            self.replays += 1
            recorded()

        return recorded and replay


def side(function, n_bytes=1 << 20, device=None):
    """A runner in this process with an arena, as the oracle holds one."""
    runner = Runner()
    runner.device, runner.arena, runner.call = device or CpuDevice(language="cpp"), FakeArena(n_bytes), function

    def call(command, timeout_s, **order):
        reply, out = getattr(runner, f"do_{command}")(Message(order, []))
        assert not out
        return Message(reply, [])

    return SimpleNamespace(call=call, carrier=ArenaCarrier(runner.arena))


def reference(function, device=None):
    runner = side(function, device=device)
    return SimpleNamespace(
        runner=runner, order=runner.call, outputs=[{"dtype": "float32", "shape": list(SHAPE)}],
        max_output_bytes=2 * 4 * SHAPE[0] * SHAPE[1],
    )  # fmt: skip


def inputs(count=3):
    return [Inputs([{"tensor": 0}, 2.0], [torch.randn(SHAPE)]) for _ in range(count)]


def honest(x, a):
    return torch.relu(x) * a


def parts_of(candidate, eager_ms=0.2, devices=(None, None), record=False, **room):
    ours = reference(honest, device=devices[0])
    return on_gpu(ours, side(candidate, device=devices[1], **room), inputs(), eager_ms, lambda: 10.0, record=record)


def judged(candidate, **how):
    parts = parts_of(candidate, **how)
    return audit(
        parts.blocks, parts.theirs, parts.ours, lambda want, have: compare(want, have, Tolerance()), lambda: 10.0, random.Random(0)
    )  # fmt: skip


def test_an_honest_candidate_passes_and_its_time_is_near_the_references():
    found = judged(lambda x, a: (x * a).clamp_min(0))
    assert found.calls == 10 and len(found.candidate) == len(found.reference) == 4
    own, other = found.times_ms()
    assert 0 < own.median < 5 and 0 < other.median < 5


def test_recorded_calls_are_replayed_on_inputs_that_came_later():
    devices = Recorder(), Recorder()
    parts = parts_of(lambda x, a: (x * a).clamp_min(0), devices=devices, record=True)
    assert parts.recorded == "apart" and all(device.replays == 2 for device in devices)  # the trial with exchanged inputs
    judged(lambda x, a: (x * a).clamp_min(0), devices=devices, record=True)
    assert all(device.replays == 4 + 2 * len(parts.blocks) for device in devices)


class OneBuffer:
    """Honest, and returns the same memory from every call."""

    def __init__(self):
        self.out = torch.empty(SHAPE)

    def __call__(self, x, a):
        return torch.mul(x.clamp_min(0), a, out=self.out)


def test_calls_that_share_their_output_are_copied_one_by_one_on_both_sides():
    devices = Recorder(), Recorder()
    assert parts_of(OneBuffer(), devices=devices, record=True).recorded == "together"
    found = judged(OneBuffer(), devices=devices, record=True)
    assert len(found.candidate) == 4


def test_a_runner_has_no_say_in_how_much_is_believed_of_it():
    runner = side(honest, device=Recorder())
    outputs = ArenaOutputs(runner.call, runner.carrier, [{"dtype": "float32", "shape": list(SHAPE)}])
    [block, *_] = draw_blocks([{"tensor": 0}, 2.0], [[torch.randn(SHAPE)]], 4, seed=1)
    for said, asked, taken in (("apart", "", ""), ("apart", "together", ""), (True, "apart", ""), ("together", "apart", "together")):
        outputs = ArenaOutputs(lambda *a, said=said, **k: Message({"recorded": said}, []), runner.carrier, outputs.entries)
        assert outputs.prepare(block, 10.0, record=asked) == taken


def test_the_copies_are_no_part_of_the_time():
    class Slow(Recorder):
        """Copies take long here."""

        def record(self, work):
            replay = super().record(work)
            return lambda: (replay(), time.sleep(0.3 if "copy" in work.__name__ else 0.0))

    runner = side(honest, device=Slow())
    [block, *_] = draw_blocks([{"tensor": 0}, 2.0], [[torch.randn(SHAPE)]], 4, seed=1)
    outputs = ArenaOutputs(runner.call, runner.carrier, [{"dtype": "float32", "shape": list(SHAPE)}])
    assert outputs.prepare(block, 10.0, record="apart") == "apart"
    run = outputs.run(block, [torch.tensor([3])], 10.0)
    assert run.claim_ms < 150 and run.wall_ms > 300


def before_now(work):
    """The work went past the recording: a replay does nothing."""
    return lambda: None


@pytest.mark.parametrize("misses", [before_now, lambda work: None], ids=["goes past it", "refused"])
@pytest.mark.parametrize("whose", [0, 1], ids=["reference", "candidate"])
def test_a_recording_without_the_work_is_not_used_on_either_side(misses, whose):
    devices = [Recorder(), Recorder()]
    devices[whose].misses = misses
    parts = parts_of(lambda x, a: honest(x, a), devices=devices, record=True)
    assert not parts.recorded
    judged(lambda x, a: honest(x, a), devices=devices, record=True)
    assert devices[1 - whose].replays == (4 if whose else 0)  # twice to try the recordings, never to time


def test_outputs_that_say_nothing_of_the_inputs_prove_no_recording():
    device = Recorder()
    runner = side(lambda x, a: torch.ones(SHAPE), device=device)
    [block, *_] = draw_blocks([{"tensor": 0}, 2.0], [[torch.randn(SHAPE)]], 4, seed=1)
    outputs = ArenaOutputs(runner.call, runner.carrier, [{"dtype": "float32", "shape": list(SHAPE)}])
    assert not outputs.prepare(block, 10.0, record="apart")
    one = draw_blocks([{"tensor": 0}, 2.0], [[torch.randn(SHAPE)]], 1, seed=1)[0]
    assert not outputs.prepare(one, 10.0, record="apart")


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
    seen = {
        tuple(read(block.memory, call["tensors"])[0].tolist()) for block in blocks for call in block.calls
    }
    assert len(seen) == 3 * len(blocks)


@pytest.mark.parametrize(
    ("eager_ms", "sizes", "half", "calls"),
    [(0.01, (1000, 1000), 1 << 20, MAX_CALLS), (1.0, (1000, 1000), 1 << 20, 2), (30.0, (1000, 0), 1 << 20, 2),
     (0.01, (1 << 19, 10), 1 << 20, 2), (0.01, (10, 1 << 20), 1 << 20, 1), (0.01, (1 << 21, 10), 1 << 20, 0)],
)  # fmt: skip
def test_a_block_has_as_many_calls_as_time_and_room_allow(eager_ms, sizes, half, calls):
    assert calls_of_block(eager_ms, *sizes, half) == calls


def test_without_arenas_or_room_there_is_no_such_audit():
    plain = SimpleNamespace(call=None, carrier=HostCarrier())
    assert on_gpu(reference(honest), plain, inputs(), 0.1, lambda: 10.0, record=False) is None
    assert parts_of(honest, n_bytes=1 << 13) is None
