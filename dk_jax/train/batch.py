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


def microbatches(rows: Sequence[Row], *, size: int, step: int = 128, tokens: int = 0) -> list[dict[str, np.ndarray]]:
    """Pads rows into microbatches, shortest first.

    Args:
        rows: sequences in any order.
        size: rows a microbatch; the shortest one is filled with empty rows of weight 0.
        step: length granularity, see `bucket`.
        tokens: about how many tokens a microbatch has, padding included: of short sequences as many times `size` rows as that takes.
            0 for `size` rows whatever their length. Either way all microbatches of a length have one shape.

    Returns:
        Dicts of arrays: tokens i32[B, T], lengths i32[B], agents i32[B], weight f32[B], and for the targets
        tokens[:, 1:] mask, advantage, old_logp f32[B, T-1].
    """
    waiting = sorted(rows, key=lambda row: len(row.tokens))
    parts: list[tuple[int, int, list[Row]]] = []
    if not tokens:
        for start in range(0, len(waiting), size):
            part = waiting[start : start + size]
            parts.append((size, bucket(len(part[-1].tokens), step), part))
    while tokens and waiting:  # the longest first, so that only the last one, of the shortest, is not full
        T = bucket(len(waiting[-1].tokens), step)
        B = size * max(1, tokens // (size * T))
        parts.insert(0, (B, T, waiting[-B:]))
        del waiting[-B:]
    out = []
    for B, T, part in parts:
        batch = dict(
            tokens=np.zeros((B, T), np.int32),
            lengths=np.ones((B,), np.int32),
            agents=np.zeros((B,), np.int32),
            weight=np.zeros((B,), np.float32),
            mask=np.zeros((B, T - 1), np.float32),
            advantage=np.zeros((B, T - 1), np.float32),
            old_logp=np.zeros((B, T - 1), np.float32),
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
