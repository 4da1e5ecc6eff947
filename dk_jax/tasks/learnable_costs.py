"""What a task of the learnable set costs at least, from bytes and arithmetic: in PyTorch eager, and in a single kernel.

Both are floors, of a card that reaches its bandwidth in every pass and takes no time to launch: their ratio is an estimate of the best
speedup over eager, not a bound on it, since eager's passes may be slower than that (transposes, running sums, depthwise convolutions are).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dk_jax.tasks.spec import Branch, Linear, Matmul, OpSpec, RowNorm, RowReduce, Shape, Step, Tensor, Unary, walk

ITEM = 4  # bytes of a float32
REGISTER_ROW = 16384
"""Longest row that an expert keeps in registers (dk_jax.sft.triton_rows); of a longer one it reads twice what its normalisation needs."""

# How often eager reads and writes the running value in what is more than one kernel there, or does not write it.
_NORM_PASSES = {"l2_normalize": (2, 1), "l1_normalize": (2, 1), "center": (2, 1), "max_shift": (2, 1)}


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a GPU can do: bytes a second of its memory, and float32 operations a second without tensor cores."""

    name: str
    bytes_per_s: float
    flops_per_s: float


H100 = Card(name="H100 SXM", bytes_per_s=3.35e12, flops_per_s=67e12)
H200 = Card(name="H200 SXM", bytes_per_s=4.8e12, flops_per_s=67e12)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Floors of a task.

    Attributes:
      tensors_bytes: inputs, parameters and the result.
      eager_bytes, eager_kernels: what eager moves, in how many kernels.
      fused_bytes: what one kernel moves.
      flops: of matrix products, in both.
    """

    tensors_bytes: int
    eager_bytes: int
    eager_kernels: int
    fused_bytes: int
    flops: int

    def eager_s(self, card: Card) -> float:
        """Seconds: eager's product first, then its other passes."""
        return self.flops / card.flops_per_s + self.eager_bytes / card.bytes_per_s

    def fused_s(self, card: Card) -> float:
        """Seconds: arithmetic and memory at the same time."""
        return max(self.flops / card.flops_per_s, self.fused_bytes / card.bytes_per_s)

    def speedup(self, card: Card) -> float:
        """Estimate of the best speedup over eager."""
        return self.eager_s(card) / self.fused_s(card)


def costs(spec: OpSpec) -> Costs:
    """Floors of a pipeline."""
    steps = list(walk(spec))
    tensors = ITEM * (sum(math.prod(a.shape) for a in spec.arguments) + math.prod(spec.out_shape))
    eager = [ITEM * items for step in steps for items in _eager(step)]
    return Costs(
        tensors_bytes=tensors,
        eager_bytes=sum(eager),
        eager_kernels=len(eager),
        fused_bytes=tensors + ITEM * _again(steps),
        flops=sum(2 * math.prod(s.after) * s.before[1] for s in steps if isinstance(s.stage, Linear | Matmul)),
    )


def _eager(step: Step) -> list[int]:
    """Elements that each of eager's kernels for a step moves."""
    stage, own = step.stage, sum(math.prod(a.shape) for a in step.operands)
    before, after = _size(step.before), _size(step.after)
    if isinstance(stage, Branch):
        return []
    if isinstance(stage, Unary) and stage.fn == "softsign":
        return [2 * before, 2 * before, 3 * before]  # |x|, 1 + |x|, the quotient
    if isinstance(stage, Tensor):
        operation = 2 * before + after  # a branch's name is no argument of its own, but read all the same
        return [operation] if stage.fn is None and stage.factor is None else [2 * before, operation]
    if isinstance(stage, RowNorm):
        reads, writes = _NORM_PASSES.get(stage.fn, (1, 1))
        return [before] * (reads - 1) + [before + writes * before]
    if isinstance(stage, RowReduce) and stage.fn == "logsumexp":
        return [before, 2 * before, 2 * before, before + after]  # maximum, difference, its exponential in place, sum
    return [before + own + after]


def _again(steps: list[Step]) -> int:
    """Elements that a normalisation of a row too long for registers reads a second time: the row and what it meets before."""
    rows, own = _size(steps[0].before), 0
    for step in steps:
        if isinstance(step.stage, RowNorm):
            return rows + own if step.before[1] > REGISTER_ROW else 0
        own += sum(math.prod(a.shape) for a in step.operands)
    return 0


def _size(shape: Shape) -> int:
    return math.prod(shape)


