"""Outputs that the oracle reads from where a runner's calls have left them, and what of an audit's time is forgiven."""

import os
import random
import struct
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from sandbox.jail import fresh
from sandbox.jail.frames import Message
from sandbox.jail.peek import gather, inside, may_read, read, write
from sandbox.jail.tensors import describe
from sandbox.oracle.fresh import LEAST_SHARE, Audit, Run, _sealed, sample_places
from sandbox.oracle.left import LeftOutputs, OutputsLost, checked_places
from sandbox.oracle.reference import Inputs

readable = pytest.mark.skipif(not may_read(os.getpid()), reason="this process may not read memory, not even its own")


HOLDING = """
import ctypes, sys
held = ctypes.create_string_buffer(bytes(range(200)) * 50, 10000)
print(ctypes.addressof(held), flush=True)
sys.stdin.read()
"""


JUDGING = """
import sys
import torch
import sandbox.oracle.evaluate
from sandbox.oracle.left import element_numbers
found = element_numbers(torch.arange(24), [2, 3, 4])
print(sum(name.startswith(("sympy", "torch._dynamo", "torch._inductor")) for name in sys.modules), flush=True)
assert torch.equal(found, torch.stack(torch.unravel_index(torch.arange(24), (2, 3, 4))))
assert element_numbers(torch.arange(3), [3]).tolist() == [[0, 1, 2]] and element_numbers(torch.arange(1), []).shape == (0, 1)
"""


def test_an_oracle_imports_no_compiler_while_it_judges():
    """Two seconds, and that in the middle of a timing."""
    done = subprocess.run([sys.executable, "-c", JUDGING], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "0", done.stdout + done.stderr


class Runner:
    """A runner in this very process; `lie` changes what it replies, `places` what it says of its outputs' places."""

    def __init__(self, call, lie=lambda reply: reply, places=lambda said: said):
        self._call, self._lie, self._places = call, lie, places

    def order(self, command, timeout_s, **order):
        if command == "open_outputs":
            self.fresh = fresh.FreshCalls(inputs_bytes=order["inputs_bytes"], twice=order["twice"])
            return Message(self._lie({"pid": os.getpid(), "inputs": self.fresh.inputs.data_ptr()}), [])
        if command == "prepare_fresh":
            self.fresh.prepare(order["calls"], order["outputs"])
            return Message({}, [])
        self._said, self._failed = fresh.READY, None
        order["meanwhile"](self)
        if self._failed is not None:
            raise self._failed
        self.fresh.again(self._call)
        return Message(self._lie({"span_ms": self._span_ms, "warm_ms": self.fresh.warm_ms}), [])

    def put(self, data):
        """The oracle says go: the calls are done, and what is to be said of them lies ready."""
        try:
            self._span_ms = self.fresh.time(self._call)
            self._said += fresh.DONE + self._places(self.fresh.places())
        except ArithmeticError as error:
            self._failed = error
            self._said += fresh.FAILED

    def take(self, size):
        taken, self._said = self._said[:size], self._said[size:]
        assert len(taken) == size, "the oracle waits for more than is said"
        return taken

    def outputs(self, entries, **more):
        return LeftOutputs(self.order, os.getpid(), entries, 5.0, inputs_bytes=4096, stopped=nullcontext, **more)


def block_of(tensors):
    sets = [Inputs([{"tensor": 0}], [tensor]) for tensor in tensors]
    return _sealed(sets)


@readable
def test_memory_of_another_process_is_read_in_pieces_or_refused():
    with subprocess.Popen([sys.executable, "-c", HOLDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        start = int(child.stdout.readline())
        pieces = gather(child.pid, start + 200 * torch.arange(40) + 7, 3)
        assert pieces.tolist() == [7, 8, 9] * 40
        assert gather(child.pid, start + torch.arange(5000), 1).tolist() == [*range(200)] * 25
        assert read(child.pid, start + 100, 200).tolist() == [*range(100, 200), *range(100)]
        with pytest.raises(OSError, match="cannot be read"):
            gather(child.pid, torch.tensor([start, 4096]), 1)
        write(child.pid, start + 5, torch.arange(3, dtype=torch.uint8) + 250)
        assert read(child.pid, start + 4, 5).tolist() == [4, 250, 251, 252, 8]
        with pytest.raises(OSError, match="cannot be written"):
            write(child.pid, 4096, torch.zeros(3, dtype=torch.uint8))
        assert may_read(child.pid) and inside([child.pid, os.getpid()], child.pid) == child.pid
        assert inside([child.pid], 1 << 30) is None
        child.stdin.close()
    with pytest.raises(OSError, match="cannot be read"):
        gather(child.pid, torch.tensor([start]), 1)


@readable
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + 1,
        lambda x: (x + 1).t().contiguous().t(),  # strides of its own
        lambda x: [x + 1, (x > 0).expand(7, 3, 5)[2]],
        lambda x: torch._neg_view(-(x + 1)),
        lambda x: (x[0, 0] + 1, x[:0]),
    ],
)
def test_outputs_are_read_as_they_are(call):
    torch.manual_seed(1)
    tensors = [torch.randn(3, 5) for _ in range(4)]
    right = [fresh.outputs_of(call(tensor), [(o.shape, o.dtype) for o in _list(call(tensor))]) for tensor in tensors]
    entries = [describe(output) for output in right[0]]
    left = Runner(call).outputs(entries)
    places = sample_places(entries, random.Random(3))
    block = block_of(tensors)
    for _ in range(2):
        run = left.run(block, places, 5.0)
        for number, outputs in enumerate(right):
            assert all(map(torch.equal, left.of_call(number), outputs))
            for output, place, sample in zip(outputs, places, run.samples[number], strict=True):
                assert torch.equal(sample, output.reshape(-1)[place])
    os.close(block.fd)


def _list(result):
    return list(result) if isinstance(result, (list, tuple)) else [result]


@pytest.mark.parametrize(
    "left",
    [
        None,
        [],
        [[]],
        [[[0, None]]],
        [[[0, [5, 1]]]],
        [[[-5, [5, 1]]]],
        [[[1 << 70, [5, 1]]]],
        [[["8", [5, 1]]]],
        [[[8, [1]]]],
        [[[8, [1, -1]]]],
        [[[8, [True, 1]]]],
        [[{"address": 8}]],
    ],
)
def test_places_that_cannot_be_are_refused(left):
    entries = [{"dtype": "float32", "shape": [3, 5]}]
    if left != [[[0, [5, 1]]]]:
        with pytest.raises(OutputsLost):
            checked_places(left, entries, 1, OutputsLost)
    else:
        assert checked_places(left, entries, 1, OutputsLost) == [[(0, [5, 1])]]


@readable
@pytest.mark.parametrize("numbers", [(0, 5, 1), (-5, 5, 1), (1 << 62, 5, 1), (8, 1, -1)])
def test_a_runner_that_says_its_outputs_lie_where_nothing_is_has_failed(numbers):
    runner = Runner(lambda x: x + 1, places=lambda said: struct.pack("=3q", *numbers))
    outputs = runner.outputs([{"dtype": "float32", "shape": [3, 5]}])
    block = block_of([torch.ones(3, 5)])
    with pytest.raises(OutputsLost, match="no address|cannot be read"):
        outputs.run(block, [torch.tensor([3])], 5.0)
    os.close(block.fd)


@readable
def test_a_call_that_fails_in_an_audited_block_fails_as_any_other():
    outputs = Runner(lambda x: x / (1 // 0)).outputs([{"dtype": "float32", "shape": [3, 5]}])
    block = block_of([torch.ones(3, 5)])
    with pytest.raises(ZeroDivisionError):
        outputs.run(block, [torch.tensor([3])], 5.0)
    os.close(block.fd)


@readable
def test_an_output_spread_over_all_memory_is_not_read():
    outputs = Runner(lambda x: torch.empty_strided((3, 5), (1 << 22, 1)).copy_(x)).outputs(
        [{"dtype": "float32", "shape": [3, 5]}]
    )
    block = block_of([torch.ones(3, 5)])
    assert outputs.run(block, [torch.tensor([14])], 5.0).samples[0][0].tolist() == [1.0]
    with pytest.raises(OutputsLost, match="spread over"):
        outputs.of_call(0)
    os.close(block.fd)


@pytest.mark.parametrize("pid", [None, "1", 1 << 40, True])
def test_a_runner_that_is_no_process_of_its_own_has_failed(pid):
    with pytest.raises(OutputsLost, match="no process of its own"):
        Runner(lambda x: x, lambda reply: {"pid": pid}).outputs([])


@readable
@pytest.mark.parametrize("place", [None, "8", -1, 1 << 62, 4096])
def test_a_runner_that_does_not_say_where_inputs_go_has_failed(place):
    runner = Runner(lambda x: x, lambda reply: reply | {"inputs": place})
    block = block_of([torch.ones(3, 5)])
    with pytest.raises(OutputsLost, match="place for inputs|cannot be written"):
        runner.outputs([{"dtype": "float32", "shape": [3, 5]}]).run(block, [torch.tensor([3])], 5.0)
    os.close(block.fd)


@readable
def test_a_call_s_outputs_are_kept_until_the_same_call_of_the_next_block_and_second_calls_are_timed():
    made = []

    def call(x):
        made.append(x)
        return x + len(made)

    runner = Runner(call)
    outputs = runner.outputs([{"dtype": "float32", "shape": [2]}], twice=True)
    block = block_of([torch.zeros(2), torch.zeros(2)])
    run = outputs.run(block, [torch.tensor([0])], 5.0)
    assert len(made) == 6 and run.warm_ms > 0
    assert [sample[0].item() for sample in run.samples] == [1.0, 2.0], "the first calls count"
    outputs.run(block, [torch.tensor([0])], 5.0)
    assert outputs.of_call(0)[0].tolist() == [7.0, 7.0]
    os.close(block.fd)


def runs(claims, walls, warm=0.0):
    return [Run(claim_ms=c, wall_ms=w, samples=[], warm_ms=warm) for c, w in zip(claims, walls, strict=True)]


def test_what_far_memory_costs_the_reference_is_forgiven_and_no_more():
    # ten calls a block: the reference takes 1.0 ms near, 1.4 ms far; messages take 0.2 ms
    reference = runs([14.0] * 5, [14.2 + 10.0] * 5, warm=10.0)
    honest = Audit(calls=10, candidate=runs([9.0] * 5, [9.2] * 5), reference=reference)
    assert honest.cold_ms == pytest.approx(0.4)
    mine, theirs = honest.times_ms()
    assert mine.median == pytest.approx(0.5) and theirs.median == pytest.approx(1.0)
    # The same work with a claim of nothing: the oracle's clock says what it took.
    lying = Audit(calls=10, candidate=runs([0.0] * 5, [9.2] * 5), reference=reference)
    assert lying.times_ms()[0].median == pytest.approx(0.5)
    quick = Audit(calls=10, candidate=runs([1.0] * 5, [1.2] * 5), reference=reference)
    assert quick.times_ms()[0].median == pytest.approx(LEAST_SHARE * 0.1)


def test_copied_outputs_forgive_nothing():
    found = Audit(calls=10, candidate=runs([9.0] * 5, [9.2] * 5), reference=runs([14.0] * 5, [14.2] * 5))
    assert found.cold_ms == 0.0
    assert [interval.median for interval in found.times_ms()] == pytest.approx([0.9, 1.4])
