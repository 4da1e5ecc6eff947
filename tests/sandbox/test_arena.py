"""Shared device memory: what an area holds is described exactly, and lies about it are refused.

The driver's part is tested on a GPU (tests/gpu/test_arena.py); areas here are memory of the host.
"""

import pytest
import torch

from sandbox.jail.arena import ALIGN_BYTES, part, read, write
from sandbox.jail.carrier import ArenaCarrier, HostCarrier
from sandbox.jail.device import CpuDevice
from sandbox.jail.frames import Message
from sandbox.jail.runner import Runner
from sandbox.oracle.variants import varied
from sandbox.verdict import correctness
from sandbox.verdict.correctness import Tolerance, compare

TENSORS = [
    torch.randn(3, 5),
    torch.randn(4, 6).t(),
    torch.randint(-9, 9, (7,)),
    torch.tensor(2.5, dtype=torch.float64),
    torch.randn(6).to(torch.bfloat16),
    torch.tensor([True, False, True]),
    torch.randn(5, dtype=torch.complex64),
    torch.empty(0, 4),
]


def test_tensors_come_out_of_an_area_as_they_went_in():
    area = torch.zeros(4096, dtype=torch.uint8)
    entries = write(area, TENSORS)
    assert [entry["offset"] % ALIGN_BYTES for entry in entries] == [0] * len(TENSORS)
    for before, after in zip(TENSORS, read(area, entries), strict=True):
        assert after.dtype == before.dtype and after.shape == before.shape and torch.equal(after, before)
        assert after.is_contiguous()


def test_what_does_not_fit_is_not_written():
    area = torch.zeros(ALIGN_BYTES, dtype=torch.uint8)
    assert write(area, [torch.ones(10), torch.ones(10)]) is None
    assert not area.any()
    assert write(area, [torch.ones(ALIGN_BYTES // 4)]) is not None


GOOD = {"dtype": "float32", "shape": [8], "offset": 0}


@pytest.mark.parametrize(
    "entries",
    [
        None, {}, "x", [None], [[]], [{}],
        [{**GOOD, "dtype": "float31"}], [{**GOOD, "dtype": None}],
        [{**GOOD, "shape": 8}], [{**GOOD, "shape": [-8]}], [{**GOOD, "shape": [True]}], [{**GOOD, "shape": [8.0]}],
        [{**GOOD, "shape": [1 << 50]}], [{**GOOD, "shape": [1 << 39, 1 << 39]}], [{**GOOD, "shape": [257]}],
        [{**GOOD, "offset": -256}], [{**GOOD, "offset": 1024}], [{**GOOD, "offset": 4}], [{**GOOD, "offset": 1 << 60}],
        [{**GOOD, "offset": 0.0}], [{**GOOD, "offset": None}],
        [{**GOOD, "shape": [256]}, {**GOOD, "shape": [256]}],
    ],
)  # fmt: skip
def test_a_description_that_lies_is_refused(entries):
    with pytest.raises(ValueError, match=r"malformed|does not lie|overlap"):
        read(torch.zeros(1024, dtype=torch.uint8), entries)


class FakeArena:
    """An arena in the host's memory."""

    def __init__(self, n_bytes):
        self.memory, self.closed = torch.zeros(n_bytes, dtype=torch.uint8), False

    def part(self, name):
        return part(self.memory, name)

    def close(self):
        self.closed = True


def test_the_oracle_judges_copies_that_the_runner_cannot_change():
    arena = FakeArena(4096)
    carrier = ArenaCarrier(arena)
    fields, buffers = carrier.give([torch.arange(4.0)])
    assert fields["arena"] is True and not buffers
    assert torch.equal(read(arena.part("inputs"), fields["tensors"])[0], torch.arange(4.0))
    entries = write(arena.part("outputs"), [torch.ones(4)])
    (got,) = carrier.take(Message({"arena": True, "tensors": entries}, []))
    arena.memory.fill_(7)
    assert torch.equal(got, torch.ones(4))
    carrier.close()
    carrier.close()
    assert arena.closed


def test_too_much_for_the_arena_goes_through_the_host():
    carrier = ArenaCarrier(FakeArena(1024))
    fields, buffers = carrier.give([torch.arange(1000.0)])
    assert "arena" not in fields and len(buffers) == 1
    (got,) = carrier.take(Message(fields, buffers))
    assert torch.equal(got, torch.arange(1000.0))
    fields, buffers = HostCarrier().give([torch.arange(3)])
    assert torch.equal(HostCarrier().take(Message(fields, buffers))[0], torch.arange(3))


def test_a_runner_that_says_arena_without_one_is_malformed():
    with pytest.raises(ValueError, match="do not agree|differ|malformed"):
        HostCarrier().take(Message({"arena": True, "tensors": [GOOD]}, []))


def test_variants_lie_where_the_inputs_lie_and_depend_on_the_seed_alone():
    tensors = [torch.randn(40, 40), torch.randn(7, 5)]
    for variant in ("scaled", "sparse", "shifted"):
        one, other = (varied(tensors, variant, 3) for _ in range(2))
        assert all(torch.equal(a, b) and a.device == t.device for a, b, t in zip(one, other, tensors, strict=True))


def test_comparing_in_one_piece_gives_what_many_pieces_give(monkeypatch):
    want = torch.randn(1000)
    have = want + 1e-6 * torch.randn(1000)
    whole = compare([want], [have], Tolerance())
    monkeypatch.setattr(correctness, "_PIECE", 7)
    pieces = compare([want], [have], Tolerance())
    assert whole.ok and pieces.ok
    assert whole.max_abs_err == pieces.max_abs_err and whole.max_rel_err == pieces.max_rel_err


def answer(runner, carrier, command, tensors=(), **order):
    """An order and its reply as `main` of the runner and the oracle would carry them."""
    fields, buffers = carrier.give(tensors) if tensors else ({}, [])
    message = Message({**order, **carrier.wanted, **fields}, buffers)
    reply, out = getattr(runner, f"do_{command}")(message)
    sent, buffers = runner.carry(out, wanted=message.header.get("reply_in_arena") is True)
    return carrier.take(Message({**reply, **sent}, buffers)), {**reply, **sent}


@pytest.mark.parametrize("n_bytes", [1 << 16, 1 << 9])
def test_a_runner_takes_and_leaves_tensors_in_the_arena_or_where_they_do_not_fit_in_messages(n_bytes):
    runner, arena = Runner(), FakeArena(n_bytes)
    runner.device, runner.arena = CpuDevice(language="cpp"), arena
    runner.call = runner.module = torch.nn.Linear(8, 8)
    runner.get_inputs = lambda: [torch.randn(16, 8), 3]
    runner.call = lambda x, n: (x * n, x.sum())
    carrier = ArenaCarrier(arena)
    drawn, reply = answer(runner, carrier, "inputs", seed=1, slot=0)
    assert reply.get("arena", False) is (n_bytes > 1 << 10) and reply["args"] == [{"tensor": 0}, 3]
    assert torch.equal(drawn[0], runner.slots[0][0])
    given = [torch.full((16, 8), 2.0)]
    answer(runner, carrier, "set_inputs", given, slot=1, args=reply["args"])
    arena.memory.fill_(0)
    (product, total), reply = answer(runner, carrier, "run", slot=1, seed=1, check=True, max_bytes=1 << 20)
    assert torch.equal(product, torch.full((16, 8), 6.0)) and total.item() == 256.0
    assert reply["changed"] == [] and reply["aliased"] == []
    answer(runner, carrier, "overwrite", [torch.ones(1, 8)], slot=1, tensor=0, row=3)
    assert runner.slots[1][0][3].sum() == 8 and runner.slots[1][0].sum() == 15 * 16 + 8
    answer(runner, carrier, "forget")
    assert not runner.slots
