"""What is to be known of a task before kernels are written for it: would a trivial answer pass, what does it take?

A task that zeros would satisfy teaches nothing, one shorter than a launch can't be told apart from noise, and one that fills the card
fails whatever the candidate. All of it is found out, not only the first that speaks against a task.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from sandbox.jail.tensors import DTYPES
from sandbox.oracle.card import CardFacts
from sandbox.oracle.clock import GPU_PLANS, PLANS, PROCESS_MS, SLOW_CALL_MS, Plan, Side
from sandbox.oracle.reference import Inputs, Outputs, Reference, TaskRejected
from sandbox.oracle.roofline import needed_traffic
from sandbox.oracle.steady import Placement, steady
from sandbox.oracle.trials import MANY_BYTES, TIMED_SLOTS
from sandbox.protocol import TaskFacts
from sandbox.verdict.correctness import compare

ADMISSION_SLOT = 1001
OTHER_SLOT = 1002
USUAL_TRIALS = 3
_SIDES = 2
"""Whatever is timed is timed for the candidate and for the reference."""


def admission_problem(reference: Reference, seed: int) -> str:
    """Name of the first trivial answer that passes the task, or "" when the task is fit for training.

    Raises:
      TaskRejected: the reference fails.
    """
    first = next(_passing(reference, *_drawn(reference, seed)), "")
    return f"{first} would pass as the answer" if first else ""


@dataclass
class Examination:
    """Facts of a task in the making.

    Attributes:
      reference: of the task.
      known_s: that getting to know it has taken.
    """

    reference: Reference
    known_s: float
    _facts: dict[str, Any] = field(default_factory=dict)

    def look(self, seed: int, check_s: float) -> None:
        """Finds out what trivial answers pass, whether calls repeat themselves, and what memory is needed.

        Args:
          check_s: deadline of asking for the memory.

        Raises:
          TaskRejected: the reference fails.
        """
        reference, started = self.reference, time.monotonic()
        inputs, expected, other = _drawn(reference, seed)
        compare(expected.tensors, other.tensors, reference.tolerance)
        trial_s = (time.monotonic() - started) / 2
        trivial = tuple(_passing(reference, inputs, expected, other))
        repeats = bool(reference.changes) or _equal(reference.run(ADMISSION_SLOT, seed).tensors, reference.run(ADMISSION_SLOT, seed).tensors)
        memory = reference.order("memory", check_s).header
        state_bytes = sum(tensor.nbytes for tensor in reference.state)
        sets = 1 if inputs.bytes > MANY_BYTES else TIMED_SLOTS
        peak_bytes = _count(memory.get("peak_bytes"))
        self._facts = {
            "trivial": trivial,
            "repeats": repeats,
            "changes": tuple(sorted(reference.changes)),
            "aliases": tuple(sorted(reference.aliases)),
            "input_bytes": inputs.bytes,
            "output_bytes": expected.bytes,
            "state_bytes": state_bytes,
            "peak_bytes": peak_bytes,
            "needed_bytes": peak_bytes + state_bytes + sets * inputs.bytes + expected.bytes,
            "total_bytes": _count(memory.get("total_bytes")),
            "trial_s": trial_s,
            "judging_s": self.known_s + USUAL_TRIALS * _SIDES * trial_s,
        }

    def find_floor(self, seed: int, card: CardFacts) -> None:
        """Finds out what a GPU can't fall short of; the caller has it to itself.

        Raises:
          TaskRejected: the reference fails. BuildUnavailable: the card can't be measured.
        """
        device = self.reference.task.device
        if self.reference.traffic is None:
            self.reference.traffic = needed_traffic(self.reference, seed)
        self._facts["launch_ms"] = card.call_times(device).least_ms
        self._facts["floor_ms"] = card.bandwidth(device).floor_ms(self.reference.traffic)

    def clock(self, timing: str, time_s: float, gap_ms: float) -> None:
        """Times the reference's calls; the caller has the device to itself.

        Args:
          timing: name of the plan.
          time_s: deadline of all.
          gap_ms: see `Side`.

        Raises:
          TaskRejected: the reference fails, or took too long.
        """
        started, on_gpu = time.monotonic(), self.reference.task.device != "cpu"
        plan = (GPU_PLANS if on_gpu else PLANS)[timing]
        side = Side(
            order=self.reference.order, slots=[ADMISSION_SLOT, OTHER_SLOT], flushed=on_gpu, gap_ms=gap_ms,
            deadline=lambda: max(0.001, started + time_s - time.monotonic()),
        )  # fmt: skip
        try:
            if on_gpu:
                _sample(side, plan)
            else:
                with steady() as cores, Placement(self.reference.runner.pid, cores) as side.placement:
                    _sample(side, plan)
        except TaskRejected as error:
            if time.monotonic() - started < time_s:
                raise
            raise TaskRejected(f"its calls take too long to be timed within {time_s:g} s") from error
        span = side.span(side.times_ms(plan.trusted_share)[0], PROCESS_MS if on_gpu else 0.0)
        self._facts |= {"eager_ms": span.median_ms, "eager_low_ms": span.low_ms, "eager_high_ms": span.high_ms, "host_ms": span.host_ms}
        self._facts["judging_s"] += _SIDES * (time.monotonic() - started)

    @property
    def facts(self) -> TaskFacts:
        """What was found out; after `look`."""
        return TaskFacts(**self._facts)


def _sample(side: Side, plan: Plan) -> None:
    """Samples blocks until the budget is used up; few of slow calls."""
    side.prepare(plan.block_ms)
    side.settle()
    least = plan.min_pairs if side.call_ms < SLOW_CALL_MS else USUAL_TRIALS
    rng, started, taken = random.Random(secrets.randbits(64)), time.perf_counter(), 0
    while taken < least or 1000 * (time.perf_counter() - started) < plan.budget_ms:
        side.sample(rng)
        taken += 1


def _drawn(reference: Reference, seed: int) -> tuple[Inputs, Outputs, Outputs]:
    """Fresh inputs, the outputs for them, and those for others."""
    inputs = reference.inputs(seed, ADMISSION_SLOT)
    expected = reference.run(ADMISSION_SLOT, seed)
    reference.inputs(seed + 1, OTHER_SLOT)
    return inputs, expected, reference.run(OTHER_SLOT, seed)


def _passing(reference: Reference, inputs: Inputs, expected: Outputs, other: Outputs) -> Iterator[str]:
    """Names of the trivial answers that pass: zeros; a constant (ones, the expected output's mean); the output for other inputs; each
    input passed through, or a view of it."""
    tolerance = reference.tolerance
    for name, answer in _trivial_answers(inputs, expected.tensors, other):
        if compare(expected.tensors, answer, tolerance).ok:
            yield name


def _trivial_answers(inputs: Inputs, expected: list[torch.Tensor], other: Outputs) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Made one at a time, as they may be large."""
    yield "zeros", [torch.zeros_like(tensor) for tensor in expected]
    yield "ones", [torch.ones_like(tensor) for tensor in expected]
    yield "a constant", [_constant(tensor) for tensor in expected]
    yield "the output for other inputs", other.tensors
    for number, tensor in enumerate(inputs.tensors):
        if tensor.dtype not in DTYPES.values():
            continue
        for words, view in _VIEWS.items():
            seen = [view(tensor, want) if tensor.dtype == want.dtype else None for want in expected]
            if all(output is not None for output in seen):
                yield words.format(number), seen


def _itself(tensor: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    return tensor if tensor.shape == want.shape else None


def _transposed(tensor: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    return tensor.mT if tensor.dim() >= 2 and tensor.mT.shape == want.shape else None


def _reshaped(tensor: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    return tensor.reshape(want.shape) if tensor.numel() == want.numel() and tensor.shape != want.shape else None


def _broadcast(tensor: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.expand(want.shape) if tensor.numel() < want.numel() else None
    except RuntimeError:
        return None


def _beginning(tensor: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    if tensor.dim() != want.dim() or tensor.shape == want.shape:
        return None
    if any(have < need for have, need in zip(tensor.shape, want.shape, strict=True)):
        return None
    return tensor[tuple(slice(size) for size in want.shape)]


_VIEWS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]] = {
    "input {} passed through": _itself,
    "a view of input {} (transposed)": _transposed,
    "a view of input {} (reshaped)": _reshaped,
    "a view of input {} (broadcast)": _broadcast,
    "a view of input {} (its beginning)": _beginning,
}
"""Ways in which an input can be in the output's form without any work."""


def _constant(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is torch.bool:
        return torch.ones_like(tensor)
    if tensor.is_complex():
        return torch.full_like(tensor, tensor.mean().item())
    mean = tensor.to(torch.float64).mean().item()
    return torch.full_like(tensor, mean if tensor.is_floating_point() else round(mean))


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _count(value: Any) -> int:
    """A number of bytes as a runner states it; 0 for anything else."""
    return value if type(value) is int and value > 0 else 0
