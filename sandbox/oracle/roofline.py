"""No kernel is faster than the traffic that its task can't do without: a floor under a GPU's timings.

What must be read is found out, not assumed: single elements of the inputs, drawn at random, are replaced by something
large, and those that change the reference's output had to be read. From how many of them did follows, with 95 %
confidence, the least share of the tensor that a call depends on. What must be written are the outputs, but for those
that repeat themselves (an expanded view writes next to nothing) and those that are inputs. Arithmetic is left out:
algebra may honestly save it. The card's speed is measured once, by the oracle itself, and taken with a margin in the
candidate's favour; writes are held against the speed of the cache, which may still hold them when the clock stops.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sandbox.oracle.reference import Inputs, Reference
from sandbox.protocol import Timing

PROBES = 12
"""Elements of each input that are tried."""
PROBE_SLOT = 1004
MISSED = 0.05
"""Chance that the share of needed elements is smaller than taken."""
MARGIN = 1.25
"""A card may be so much faster than it was when it was measured."""
READ_BYTES, CACHED_BYTES = 512 << 20, 16 << 20
REPEATS, ROUNDS = 8, 5


@dataclass(frozen=True)
class Traffic:
    """Bytes that every call of a task must at least read (from the device's memory) and write; `likely_bytes`: what both are together
    where all of an input counts whose tried elements all did."""

    read_bytes: float
    written_bytes: float
    likely_bytes: float = 0.0


@dataclass(frozen=True)
class Bandwidth:
    """What a card reaches, in bytes a second: reading its memory, writing to its cache."""

    read: float
    write: float

    def floor_ms(self, traffic: Traffic) -> float:
        """Time below which no call can be, in ms."""
        return 1000 * max(traffic.read_bytes / self.read, traffic.written_bytes / self.write) / MARGIN

    def likely_ms(self, traffic: Traffic) -> float:
        """Time that memory needs for what a call moves, in ms, as far as is known: for comparison, no bound."""
        return 1000 * traffic.likely_bytes / self.read


def least_share(found: int, tried: int, missed: float = MISSED) -> float:
    """Lower bound of a share of which `found` of `tried` draws were part (Clopper and Pearson, one-sided).

    The share p at which at least `found` hits would come with chance `missed`; 0 for no hit.
    """
    if not found:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if _tail(found, tried, middle) < missed:
            low = middle
        else:
            high = middle
    return low


def _tail(found: int, tried: int, p: float) -> float:
    return sum(math.comb(tried, k) * p**k * (1 - p) ** (tried - k) for k in range(found, tried + 1))


def needed_traffic(reference: Reference, seed: int) -> Traffic:
    """What a call of the reference's task must move.

    Raises:
      TaskRejected: the reference fails.
    """
    rng = random.Random(seed)
    inputs = reference.inputs(seed, PROBE_SLOT)
    reference.set_inputs(PROBE_SLOT, inputs)
    outputs = reference.run(PROBE_SLOT, seed)
    read_bytes, likely_bytes = 0.0, 0.0
    for number, tensor in enumerate(inputs.tensors):
        if not tensor.is_floating_point() or not tensor.numel():
            likely_bytes += tensor.nbytes
            continue  # other values of an index may not be valid
        found = sum(_matters(reference, inputs, number, outputs.tensors, seed, rng) for _ in range(PROBES))
        read_bytes += least_share(found, PROBES) * tensor.nbytes
        likely_bytes += found / PROBES * tensor.nbytes
    written = [tensor for tensor in outputs.tensors if not _repeats(tensor)]
    written_bytes = 0.0 if outputs.aliased or outputs.changed else float(sum(tensor.nbytes for tensor in written))
    return Traffic(read_bytes, written_bytes, likely_bytes + written_bytes)


def _matters(
    reference: Reference, inputs: Inputs, number: int, outputs: list[torch.Tensor], seed: int, rng: random.Random
) -> bool:
    """Whether some other value of one random element of an input changes the reference's output."""
    tensor = inputs.tensors[number]
    place = rng.randrange(tensor.numel())
    size = 8 * float(tensor.abs().max()) + 1
    for value in (size, -size):
        other = tensor.clone()
        other.view(-1)[place] = value
        tensors = [*inputs.tensors]
        tensors[number] = other
        reference.set_inputs(PROBE_SLOT, Inputs(inputs.args, tensors))
        got = reference.outputs_of(PROBE_SLOT, seed).tensors
        if any(not torch.equal(one, before) for one, before in zip(got, outputs, strict=True)):
            return True
    return False


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether the tensor is the same all along one of its dimensions."""
    return any(
        size > 1 and bool((tensor == tensor.narrow(dim, 0, 1)).all()) for dim, size in enumerate(tensor.shape)
    )


def measure_bandwidth(device: str) -> Bandwidth:
    """What this process reaches on a GPU that it has to itself.

    Raises:
      RuntimeError: there is no such device, or no memory left.
    """
    large = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    small = torch.empty(CACHED_BYTES // 4, dtype=torch.float32, device=device)
    read = max(_rate(large.nbytes, large.sum, device), _rate(2 * large.nbytes, large.clone, device))
    write = _rate(small.nbytes, small.zero_, device)
    del large, small
    torch.cuda.empty_cache()
    return Bandwidth(read=read, write=max(read, write))


def _rate(n_bytes: int, work: Callable[[], object], device: str) -> float:
    work()
    rates = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(REPEATS):
            work()
        end.record()
        torch.cuda.synchronize(device)
        rates.append(n_bytes * REPEATS / (start.elapsed_time(end) / 1000))
    return max(rates)


def too_fast(timing: Timing, floor_ms: float, traffic: Traffic) -> str | None:
    """Evidence that a timing is below the floor, with all of its interval, or None."""
    if timing.candidate.high_ms >= floor_ms:
        return None
    return (
        f"{timing.candidate.median_ms:.3g} ms a call, but reading {traffic.read_bytes / 1e6:.3g} MB and writing "
        f"{traffic.written_bytes / 1e6:.3g} MB, which every call must, takes at least {floor_ms:.3g} ms on this card"
    )
