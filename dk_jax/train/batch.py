"""Trajectories -> padded microbatches of a few fixed shapes.

Sequences are sorted by length so that a microbatch pads little; lengths and rows are rounded up to buckets so that the number
of compiled shapes stays small. Order does not matter to the update: losses carry their weight with them and are summed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One token sequence of the loss.

    Attributes:
        tokens: the sequence.
        loss: for each token, 1.0 where it counts as a target (token t is predicted from tokens before t).
        advantage: for each token, its advantage (1.0 throughout in the cold start).
        old_logp: for each token, its log-probability when it was sampled (0.0 throughout in the cold start).
        agent: agent index.
        weight: weight of the sequence in the loss.
    """

    tokens: Sequence[int]
    loss: Sequence[float]
    advantage: Sequence[float]
    old_logp: Sequence[float]
    agent: int
    weight: float

    def __post_init__(self):
        n = len(self.tokens)
        if not (len(self.loss) == len(self.advantage) == len(self.old_logp) == n) or n < 2:
            raise ValueError(
                f"a row needs >= 2 tokens and as many loss, advantage and old_logp entries: "
                f"{n}, {len(self.loss)}, {len(self.advantage)}, {len(self.old_logp)}"
            )


def bucket(length: int, step: int = 128) -> int:
    """The padded length: multiples of `step` up to 8 steps, then of 2, 4, ... steps, so that buckets stay few."""
    size = step
    while length > 8 * size:
        size *= 2
    return -(-length // size) * size


def microbatches(rows: Sequence[Row], *, size: int, step: int = 128) -> list[dict[str, np.ndarray]]:
    """Pads rows into microbatches.

    Args:
        rows: sequences in any order.
        size: rows a microbatch; the last one is filled with empty rows of weight 0.
        step: length granularity, see `bucket`.

    Returns:
        Dicts of arrays: tokens i32[B, T], lengths i32[B], agents i32[B], weight f32[B], and for the targets
        tokens[:, 1:] mask, advantage, old_logp f32[B, T-1].
    """
    ordered = sorted(rows, key=lambda row: len(row.tokens))
    out = []
    for start in range(0, len(ordered), size):
        part = ordered[start : start + size]
        T = bucket(max(len(row.tokens) for row in part), step)
        batch = dict(
            tokens=np.zeros((size, T), np.int32),
            lengths=np.ones((size,), np.int32),
            agents=np.zeros((size,), np.int32),
            weight=np.zeros((size,), np.float32),
            mask=np.zeros((size, T - 1), np.float32),
            advantage=np.zeros((size, T - 1), np.float32),
            old_logp=np.zeros((size, T - 1), np.float32),
        )
        for b, row in enumerate(part):
            n = len(row.tokens)
            batch["tokens"][b, :n] = row.tokens
            batch["lengths"][b] = n
            batch["agents"][b] = row.agent
            batch["weight"][b] = row.weight
            for name, values in (("mask", row.loss), ("advantage", row.advantage), ("old_logp", row.old_logp)):
                batch[name][b, : n - 1] = np.asarray(values[1:], np.float32)
        out.append(batch)
    return out
