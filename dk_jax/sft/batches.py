"""Which rows a cold-start step sees: a function of the step and the seed alone, so that a resumed run goes on as it would have.

Either the rows as they come, in shuffled epochs, or with a fixed number of rows of each agent in every batch, each agent in
epochs of its own: an agent with few rows then repeats them more often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from dk_jax.rollout.trajectory import derive_seed

POOL = 16  # batches whose rows are sorted by length together


def batch_indices(step: int, *, lengths: Sequence[int], batch: int, seed: int) -> list[int]:
    """Rows of a step: batches of rows of like length, so that little is padded, in an endless sequence of shuffled epochs.

    An epoch is shuffled, cut into pools of 16 batches, each pool sorted by length and cut into batches, and the batches
    shuffled. What does not fill a batch is left to other epochs.
    """
    per_epoch = max(len(lengths) // batch, 1)
    epoch, offset = divmod(step, per_epoch)
    rng = np.random.default_rng(derive_seed(seed, "sft-epoch", epoch))
    order = rng.permutation(len(lengths))
    batches = []
    for start in range(0, len(order), POOL * batch):
        pool = sorted(order[start : start + POOL * batch], key=lambda i: (lengths[i], i))
        batches += [pool[at : at + batch] for at in range(0, len(pool), batch) if len(pool) - at >= min(batch, len(order))]
    return [int(i) for i in batches[int(rng.permutation(len(batches))[offset])]]


def seats(shares: Mapping[str, float], batch: int) -> dict[str, int]:
    """Rows of each agent in a batch of `batch` rows, by largest remainders, at least one where the share is above 0.

    Args:
        shares: weights >= 0 by agent; they need not add up to 1. An agent with 0 or not named gets no rows.
        batch: rows to divide.

    Returns:
        Agents with rows, in the order of `shares`; the numbers add up to `batch`. Empty if all shares are 0: not divided.

    Raises:
        ValueError: a share below 0 or not finite, or more agents than rows.
    """
    if bad := {agent: share for agent, share in shares.items() if not (math.isfinite(share) and share >= 0)}:
        raise ValueError(f"sft.shares must be numbers >= 0: {bad}")
    wanted = {agent: share for agent, share in shares.items() if share > 0}
    if not wanted:
        return {}
    if len(wanted) > batch:
        raise ValueError(f"sft.shares names {len(wanted)} agents, but sft.batch={batch} has no row for each of them")
    quota = {agent: batch * share / sum(wanted.values()) for agent, share in wanted.items()}
    found = {agent: max(int(q), 1) for agent, q in quota.items()}
    while sum(found.values()) < batch:
        found[max(found, key=lambda agent: quota[agent] - found[agent])] += 1
    while sum(found.values()) > batch:  # a small share was rounded up to one row: the best served gives one
        found[min((a for a in found if found[a] > 1), key=lambda agent: quota[agent] - found[agent])] -= 1
    return found


def shared_indices(
    step: int, *, lengths: Sequence[int], agents: Sequence[str], counts: Mapping[str, int], seed: int
) -> list[int]:
    """Rows of a step with `counts[agent]` rows of each agent, agent by agent.

    Every epoch of an agent's rows is a permutation of its own (see `_epoch`), and epochs follow one another without a gap: at
    any time the rows of an agent have been seen equally often, give or take one.

    Args:
        step: from 0.
        lengths, agents: tokens and agent of every row.
        counts: see `seats`.

    Raises:
        ValueError: an agent that is to get rows has none.
    """
    out: list[int] = []
    for agent, count in counts.items():
        own = [i for i, name in enumerate(agents) if name == agent]
        if not own:
            raise ValueError(f"sft.shares.{agent} is above 0, but there is no sample of that agent: set it to 0, or make samples")
        first = step * count
        orders: dict[int, list[int]] = {}
        for position in range(first, first + count):
            epoch, offset = divmod(position, len(own))
            if epoch not in orders:
                left = -epoch * len(own) % count  # what the last batch of the epoch before takes of this one
                orders[epoch] = _epoch(own, lengths, count, left, seed=derive_seed(seed, "sft-epoch", agent, epoch))
            out.append(orders[epoch][offset])
    return out


def _epoch(rows: Sequence[int], lengths: Sequence[int], count: int, left: int, *, seed: int) -> list[int]:
    """A permutation of `rows`: any `left` rows, then runs of `count` rows of like length in random order, then what is over."""
    rng = np.random.default_rng(seed)
    order = [rows[i] for i in rng.permutation(len(rows))]
    runs = []
    for start in range(left, len(order), POOL * count):
        pool = sorted(order[start : start + POOL * count], key=lambda i: (lengths[i], i))
        runs += [pool[at : at + count] for at in range(0, len(pool), count)]
    runs = sorted((runs[i] for i in rng.permutation(len(runs))), key=lambda run: len(run) < count)
    return order[:left] + [i for run in runs for i in run]
