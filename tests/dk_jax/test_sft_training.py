"""The cold start's batches: rows of like length, every epoch a new order, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from dk_jax.sft.training import batch_indices

LENGTHS = [int(n) for n in np.random.default_rng(0).integers(50, 600, 330)]


def epoch(number: int, *, seed: int = 0, batch: int = 16) -> list[list[int]]:
    per_epoch = len(LENGTHS) // batch
    return [
        batch_indices(step, lengths=LENGTHS, batch=batch, seed=seed)
        for step in range(number * per_epoch, (number + 1) * per_epoch)
    ]


def test_an_epoch_shows_no_row_twice_and_leaves_out_less_than_a_batch():
    seen = [i for rows in epoch(0) for i in rows]
    assert len(seen) == len(set(seen)) == 320


def test_rows_of_a_batch_are_alike_in_length():
    spread = np.mean([max(LENGTHS[i] for i in rows) - min(LENGTHS[i] for i in rows) for rows in epoch(0)])
    assert spread < 60


def test_batches_do_not_come_in_order_of_length():
    means = [np.mean([LENGTHS[i] for i in rows]) for rows in epoch(0)]
    assert means != sorted(means)


def test_epochs_and_seeds_differ_and_equal_seeds_agree():
    assert epoch(0) == epoch(0)
    assert epoch(0) != epoch(1) and epoch(0) != epoch(0, seed=1)


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_fewer_rows_than_a_batch_still_make_one(rows):
    assert sorted(batch_indices(3, lengths=[10] * rows, batch=16, seed=0)) == list(range(rows))
