"""What a call must move is found out from the reference alone, and a timing below it is impossible."""

import pytest
import torch

from sandbox.oracle.reference import Inputs, Outputs
from sandbox.oracle.roofline import PROBES, Bandwidth, Traffic, least_share, needed_traffic, too_fast
from sandbox.protocol import Span, Timing

SHAPE = (64, 96)
ALL = least_share(PROBES, PROBES)


class Reference:
    """A reference in this process."""

    def __init__(self, function, *tensors):
        self._function, self._tensors, self._slots = function, tensors, {}

    def inputs(self, seed, slot):
        return Inputs([{"tensor": n} for n in range(len(self._tensors))], [t.clone() for t in self._tensors])

    def set_inputs(self, slot, inputs):
        self._slots[slot] = inputs.tensors

    def outputs_of(self, slot, seed):
        tensors = [t.clone() for t in self._slots[slot]]
        out = self._function(*tensors)
        changed = [n for n, t in enumerate(tensors) if not torch.equal(t, self._slots[slot][n])]
        aliased = [n for n, t in enumerate(tensors) if out.data_ptr() == t.data_ptr()]
        return Outputs([out], False, frozenset(changed), frozenset(aliased))

    run = outputs_of


X, Y, ROW = torch.randn(SHAPE), torch.randn(SHAPE), torch.randn(SHAPE[1])
SIZE = 4 * X.numel()


@pytest.mark.parametrize(
    ("function", "tensors", "read", "written"),
    [
        (lambda x, y: x + y, (X, Y), 2 * ALL * SIZE, SIZE),
        (lambda x, y: torch.relu(x) * 2, (X, Y), ALL * SIZE, SIZE),
        (lambda x: x.amax(1), (X,), ALL * SIZE, 4 * SHAPE[0]),
        (lambda x: x.exp().sum(1), (X,), ALL * SIZE, 4 * SHAPE[0]),
        (lambda x: (x @ x.t()).to(torch.float16), (X,), ALL * SIZE, 2 * SHAPE[0] ** 2),
        (lambda row: row.expand(SHAPE), (ROW,), ALL * 4 * SHAPE[1], 0),
        (lambda x: torch.ones(SHAPE), (X,), 0, 0),
        (lambda x: x.mul_(2), (X,), ALL * SIZE, 0),
        (lambda x, i: x[i], (X, torch.arange(32)), None, 4 * 32 * SHAPE[1]),
    ],
    ids=["add", "one of two", "maximum", "overflows", "half", "expanded", "constant", "in place", "indexed"],
)
def test_only_what_changes_the_output_must_be_read(function, tensors, read, written):
    found = needed_traffic(Reference(function, *tensors), seed=3)
    assert found.written_bytes == written
    if read is None:  # half of the rows are never looked at
        assert found.read_bytes < 0.8 * SIZE
    else:
        assert found.read_bytes == pytest.approx(read)


def test_the_share_is_a_lower_bound():
    assert least_share(0, 12) == 0.0
    assert least_share(12, 12) == pytest.approx(0.05 ** (1 / 12), rel=1e-3)
    shares = [least_share(n, 12) for n in range(13)]
    assert shares == sorted(shares) and all(share < n / 12 for n, share in enumerate(shares) if n)


def timing(low, median, high):
    span = Span(median_ms=median, low_ms=low, high_ms=high, samples=9)
    return Timing(
        candidate=span, baselines={"eager": span}, speedup=1.0, speedup_low=1.0, speedup_high=1.0, noisy=True, bound_by="runner span"
    )  # fmt: skip


def test_a_timing_below_the_floor_with_all_of_its_interval_is_impossible():
    traffic = Traffic(read_bytes=4e9, written_bytes=4e6)
    card = Bandwidth(read=4e12, write=6e12)
    floor_ms = card.floor_ms(traffic)
    assert floor_ms == pytest.approx(0.8)
    assert too_fast(timing(0.7, 0.75, 0.81), floor_ms, traffic) is None
    evidence = too_fast(timing(0.1, 0.2, 0.3), floor_ms, traffic)
    assert "4e+03 MB" in evidence and "at least 0.8 ms" in evidence
    assert Bandwidth(read=8e12, write=5e9).floor_ms(traffic) == pytest.approx(0.64)


def test_what_a_call_likely_moves_counts_inputs_whole_whose_tried_elements_all_mattered():
    found = needed_traffic(Reference(lambda x, y: x + y, X, Y), seed=3)
    assert found.likely_bytes == 3 * SIZE > found.read_bytes + found.written_bytes
    assert needed_traffic(Reference(lambda x, y: torch.relu(x), X, Y), seed=3).likely_bytes == 2 * SIZE
    assert Bandwidth(read=4e12, write=6e12).likely_ms(Traffic(3e9, 1e9, 5e9)) == pytest.approx(1.25)
