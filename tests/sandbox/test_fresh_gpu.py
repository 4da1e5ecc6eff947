"""The audit on shared device memory, with memory of the host in its place: what is cached, skipped or late shows."""

import itertools
import random
import time
from types import SimpleNamespace

import pytest
import torch

from sandbox.jail.arena import read
from sandbox.jail.arena_calls import LAUNCHES
from sandbox.jail.arena_pool import Segments
from sandbox.jail.carrier import ArenaCarrier, HostCarrier
from sandbox.jail.device import CpuDevice
from sandbox.jail.frames import Message
from sandbox.jail.jitter import jittered
from sandbox.jail.runner import Runner
from sandbox.oracle.audit import AuditFailed, audit, on_gpu, rule
from sandbox.oracle.clock import GPU_PLANS
from sandbox.oracle.fresh import Audit, Run
from sandbox.oracle.fresh_gpu import BLOCK_MS, MAX_CALLS, ArenaOutputs, calls_of_block, draw_blocks
from sandbox.oracle.left import OutputsLost
from sandbox.oracle.reference import Inputs
from sandbox.protocol import Span, Timing
from sandbox.verdict.correctness import Tolerance, compare
from tests.sandbox.test_arena import FakeArena

SHAPE = (64, 32)
BLOCKS = GPU_PLANS["full"].audit_blocks


class HostPool:
    """Memory that a test's candidates may take for their outputs, as a GPU's allocator does by itself."""

    def __init__(self, area):
        self.area, self.used, self.copied = area, 0, 0

    def holds(self, tensor):
        first = self.area.data_ptr()
        inside = first <= tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize < first + len(self.area)
        self.copied += not inside
        return inside

    def renew(self):
        self.used = 0

    def take(self, shape):
        n_bytes = 4 * torch.Size(shape).numel()
        if self.used + n_bytes > len(self.area):
            self.used = 0
        self.used += n_bytes
        return self.area[self.used - n_bytes : self.used].view(torch.float32).view(shape)


class Recorder(CpuDevice):
    """A device that records: a replay is the work done again, into the memory that it left its results in when it was
    recorded. What `misses` says is not part of the recording."""

    def __init__(self, misses=lambda work: work):
        super().__init__(language="cpp")
        self.misses, self.replays, self.tries = misses, 0, 0
        self.pool = None

    def open_pool(self, area):
        self.pool = HostPool(area)
        return self.pool

    def record(self, work, pool=None):
        self.tries += 1
        pool = pool or HostPool(torch.empty(0))
        used = pool.used
        work()
        recorded = self.misses(work)

        def replay():
            self.replays, pool.used = self.replays + 1, used
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


def parts_of(candidate, eager_ms=0.2, devices=(None, None), record=False, one=False, **room):
    ours = reference(honest, device=devices[0])
    if one:  # room for a single call
        room["n_bytes"] = 4 * 12 * 1024
    return on_gpu(ours, side(candidate, device=devices[1], **room), inputs(), eager_ms, lambda: 10.0, record=record)


def judged(candidate, **how):
    parts = parts_of(candidate, **how)
    return audit(
        parts.blocks, parts.theirs, parts.ours, lambda want, have: compare(want, have, Tolerance()), lambda: 10.0, random.Random(0)
    )  # fmt: skip


def test_an_honest_candidate_passes_and_its_time_is_near_the_references():
    found = judged(lambda x, a: (x * a).clamp_min(0))
    assert found.calls == BLOCK_MS / 0.2 and len(found.candidate) == len(found.reference) == BLOCKS - 1
    own, other = found.times_ms()
    assert 0 < own.median < 5 and 0 < other.median < 5


@pytest.mark.parametrize(("misses", "recorded"), [(lambda work: work, True), (lambda work: lambda: None, False)])
def test_a_single_call_is_recorded_if_it_follows_its_inputs(misses, recorded):
    parts = parts_of(lambda x, a: (x * a).clamp_min(0), devices=(Recorder(), Recorder(misses)), record=True, eager_ms=1e3, one=True)
    assert len(parts.blocks[0].calls) == 1 and parts.recorded is recorded
    found = audit(
        parts.blocks, parts.theirs, parts.ours, lambda want, have: compare(want, have, Tolerance()), lambda: 10.0, random.Random(0)
    )  # fmt: skip
    assert found.calls == 1 and len(found.candidate) == BLOCKS - 1


def test_a_single_call_without_room_for_other_inputs_is_done_anew():
    class Full(Recorder):
        trimmed = False

        def record(self, work, pool=None):
            raise torch.OutOfMemoryError("CUDA out of memory")

        def trim(self):
            self.trimmed = True

    devices = Recorder(), Full()
    parts = parts_of(honest, devices=devices, record=True, one=True)
    assert not parts.recorded and devices[1].trimmed


def test_recorded_calls_are_replayed_on_inputs_that_came_later():
    devices = Recorder(), Recorder()
    parts = parts_of(lambda x, a: (x * a).clamp_min(0), devices=devices, record=True)
    assert parts.recorded and [device.replays for device in devices] == [1, 1]  # the trial with exchanged inputs
    judged(lambda x, a: (x * a).clamp_min(0), devices=devices, record=True)
    assert [device.replays for device in devices] == [2 + LAUNCHES + 2 * BLOCKS, 2 + BLOCKS]


class OneBuffer:
    """Honest, and returns the same memory from every call."""

    def __init__(self):
        self.out = torch.empty(SHAPE)

    def __call__(self, x, a):
        return torch.mul(x.clamp_min(0), a, out=self.out)


@pytest.mark.parametrize("record", [True, False])
def test_calls_that_share_their_output_copy_it_and_pay_for_that(record):
    devices = Recorder(), Recorder()
    assert parts_of(OneBuffer(), devices=devices, record=record).recorded == record
    found = judged(OneBuffer(), devices=devices, record=record)
    assert len(found.candidate) == BLOCKS - 1

    class OneBufferInThePool(OneBuffer):
        def __call__(self, x, a):
            self.out = devices[1].pool.take(SHAPE) if devices[1].pool and not self.pooled else self.out
            self.pooled = self.pooled or devices[1].pool is not None
            return super().__call__(x, a)

        pooled = False

    found = judged(OneBufferInThePool(), devices=devices, record=record)
    assert len(found.candidate) == BLOCKS - 1


@pytest.mark.parametrize("record", [True, False])
def test_outputs_in_the_pool_are_read_where_they_are(record):
    devices = Recorder(), Recorder()

    def pooled(x, a):
        out = devices[1].pool.take((SHAPE[1], SHAPE[0])).t()  # with strides of its own
        return torch.mul(x.clamp_min(0), a, out=out)

    found = judged(pooled, devices=devices, record=record, n_bytes=1 << 21)
    assert len(found.candidate) == BLOCKS - 1 and devices[1].pool.copied == 0 < devices[0].pool.copied
    with pytest.raises(AuditFailed):
        judged(lambda x, a: pooled(x, a).mul_(1.1), devices=devices, record=record, n_bytes=1 << 21)


def test_a_runner_has_no_say_in_how_much_is_believed_of_it():
    runner = side(honest, device=Recorder())
    outputs = ArenaOutputs(runner.call, runner.carrier, [{"dtype": "float32", "shape": list(SHAPE)}])
    [block, *_] = draw_blocks([{"tensor": 0}, 2.0], [[torch.randn(SHAPE)]], 4, seed=1, blocks=2)
    for said, asked, taken in ((True, False, False), ("yes", True, False), (1, True, False), (True, True, True)):
        outputs = ArenaOutputs(lambda *a, said=said, **k: Message({"recorded": said}, []), runner.carrier, outputs.entries)
        assert outputs.prepare(block, 10.0, record=asked) is taken


FOUR = [[[0, [32, 1]]]] * 4


@pytest.mark.parametrize(
    "left",
    [None, [], FOUR[:3], [[]] * 4, [[[0]]] * 4, [[[0, [32]]]] * 4, [[[0.0, [32, 1]]]] * 4, [[[-4, [32, 1]]]] * 4, [[[0, [-32, 1]]]] * 4,
     [[[2, [32, 1]]]] * 4, [[[1 << 20, [32, 1]]]] * 4, [*FOUR[:3], [[(1 << 20) - 64, [32, 1]]]], [*FOUR[:3], [[0, [1 << 16, 1]]]],
     [*FOUR[:3], [[(1 << 62) - 4, [(1 << 62) - 1, 1]]]], [*FOUR[:3], [[0, [(1 << 62) // 63, 1 << 61]]]]],
)  # fmt: skip
def test_places_that_are_none_are_refused_and_never_read(left):
    runner = side(honest)
    outputs = ArenaOutputs(
        lambda *a, **k: Message({"span_ms": 1.0, "left": left}, []), runner.carrier, [{"dtype": "float32", "shape": list(SHAPE)}]
    )
    [block, *_] = draw_blocks([{"tensor": 0}, 2.0], [[torch.randn(SHAPE)]], 4, seed=1, blocks=2)
    with pytest.raises(OutputsLost):
        outputs.run(block, [torch.tensor([3])], 10.0)


def test_what_a_launch_takes_is_found_out_while_nobody_else_works_on_the_device():
    """Others' work at the time of the preparation must not be forgiven: it would leave nothing of short calls."""

    class Shared(Recorder):
        others = True

        def record(self, work, pool=None):
            replay = super().record(work, pool)
            return lambda: (replay(), time.sleep(0.05 if self.others else 0.0))

    devices = Shared(), Recorder()
    parts = parts_of(honest, devices=devices, record=True)
    devices[0].others = False  # the device is this evaluation's alone
    found = audit(
        parts.blocks, parts.theirs, parts.ours, lambda want, have: compare(want, have, Tolerance()), lambda: 10.0, random.Random(0)
    )  # fmt: skip
    own, eager = found.times_ms()
    assert 0 < found.launch_ms < 10 and min(own.median, eager.median) * found.calls > 1e-3


def test_who_need_not_copy_gains_nothing_by_it():
    """Work that takes as long as a copy would shows, as nobody's copies are forgiven."""

    class Slow(Recorder):
        def record(self, work, pool=None):
            replay = super().record(work, pool)
            return lambda: (replay(), time.sleep(0.05))

    devices = Recorder(), Slow()
    found = judged(honest, devices=devices, record=True)
    own, eager = found.times_ms()
    assert own.median > 0.8 * 50 / found.calls > eager.median


def test_what_memory_that_is_not_near_costs_is_taken_from_the_references_second_calls():
    class FarAtFirst(Recorder):
        """Every other replay takes longer: that of new inputs."""

        def record(self, work, pool=None):
            replay, turns = super().record(work, pool), itertools.count()
            return lambda: (replay(), time.sleep(0.05 if next(turns) % 2 else 0.0))  # the first replay is the trial

    found = judged(honest, devices=(FarAtFirst(), Recorder()), record=True)
    assert found.cold_ms * found.calls == pytest.approx(50, rel=0.5)
    own, eager = found.times_ms()
    assert eager.median < 25 / found.calls


def test_segments_are_given_back_and_found_again():
    segments = Segments(100, 10_000)
    first, second = segments.take(1000), segments.take(2000)
    assert first == 512 and second == 1536 and segments.take(7000) is None
    assert segments.take(6000) == 3584 and segments.take(1000) is None
    assert segments.give_back(first) and not segments.give_back(first) and not segments.give_back(513)
    assert segments.take(2000) is None and segments.take(1024) == 512


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
    assert devices[1 - whose].replays == (2 if whose else 0)  # to try the recordings, never to time


def test_who_could_not_record_is_not_asked_to_try_again():
    devices = Recorder(lambda work: None), Recorder()
    ours, theirs = reference(honest, device=devices[0]), side(honest, device=devices[1])
    for _ in range(2):
        parts = on_gpu(ours, theirs, inputs(), 0.2, lambda: 10.0, record=True)
        assert not parts.recorded and parts.refused.startswith("the reference's: ") and len(parts.refused) > 20
    assert devices[0].tries == 1


def test_outputs_that_say_nothing_of_the_inputs_prove_no_recording():
    device = Recorder()
    runner = side(lambda x, a: torch.ones(SHAPE), device=device)
    [block, *_] = draw_blocks([{"tensor": 0}, 2.0], [[torch.randn(SHAPE)]], 4, seed=1, blocks=2)
    outputs = ArenaOutputs(runner.call, runner.carrier, [{"dtype": "float32", "shape": list(SHAPE)}])
    assert not outputs.prepare(block, 10.0, record=True)
    one = draw_blocks([{"tensor": 0}, 2.0], [[torch.randn(SHAPE)]], 1, seed=1, blocks=1)[0]
    assert not outputs.prepare(one, 10.0, record=True)


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


def test_rounds_have_inputs_that_no_other_has():
    parts = parts_of(honest)
    blocks = [*parts.blocks, *parts.draw(3), *parts.draw(3)]
    seen = {tuple(read(block.memory, call["tensors"])[0].flatten().tolist()) for block in blocks for call in block.calls}
    assert len(seen) == len(blocks) * len(blocks[0].calls)
    assert all(block.calls == blocks[0].calls for block in blocks)
    compared = audit(parts.draw(4), parts.theirs, parts.ours, lambda want, have: compare(want, have, Tolerance()), lambda: 10.0, random.Random(0))
    assert len(compared.candidate) == 3


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
    blocks = draw_blocks([{"tensor": 0}], [[torch.rand(9)], [torch.rand(9)]], 3, seed=1, blocks=BLOCKS)
    seen = {
        tuple(read(block.memory, call["tensors"])[0].tolist()) for block in blocks for call in block.calls
    }
    assert len(seen) == 3 * len(blocks)


@pytest.mark.parametrize(
    ("eager_ms", "sizes", "half", "calls"),
    [(0.001, (1000, 1000), 1 << 21, MAX_CALLS), (1.0, (1000, 1000), 1 << 20, 4), (30.0, (1000, 0), 1 << 20, 2),
     (0.01, (1 << 19, 10), 1 << 20, 2), (0.01, (10, 1 << 20), 1 << 20, 1), (0.01, (1 << 21, 10), 1 << 20, 0)],
)  # fmt: skip
def test_a_block_has_as_many_calls_as_time_and_room_allow(eager_ms, sizes, half, calls):
    assert calls_of_block(eager_ms, *sizes, half) == calls


def test_without_arenas_or_room_there_is_no_such_audit():
    plain = SimpleNamespace(call=None, carrier=HostCarrier())
    assert on_gpu(reference(honest), plain, inputs(), 0.1, lambda: 10.0, record=False) is None
    assert parts_of(honest, n_bytes=1 << 13) is None


@pytest.mark.parametrize(("gap_ms", "own_ms"), [(1.0, 0.1), (1.25, 0.1), (0.9, 0.1), (1.8, 0.2)])
def test_what_two_processes_differ_in_between_calls_is_not_held_against_the_candidate(gap_ms, own_ms):
    theirs = [Run(claim_ms=0.5, wall_ms=0.5 + gap_ms, samples=[]) for _ in range(5)]
    ours = [Run(claim_ms=1.0, wall_ms=3.0 + gap, samples=[], warm_ms=1.0) for gap in (0.0, 0.05, 0.1, 0.15, 0.3)]
    own, eager = Audit(calls=5, apart_ms=0.2, candidate=theirs, reference=ours).times_ms()
    assert own.median == pytest.approx(own_ms) and eager.median == pytest.approx(0.2)
