"""Rows become padded microbatches of few shapes; nothing of a row is lost, shifted or doubled on the way."""

import numpy as np
import pytest

from dk_jax.train.batch import Row, bucket, microbatches


def row(length: int, *, agent: int = 1, weight: float = 1.0, prompt: int = 1) -> Row:
    """A row whose tokens, advantages and log-probs name the position that they belong to."""
    return Row(
        tokens=[1000 * length + t for t in range(length)],
        loss=[float(t >= prompt) for t in range(length)],
        advantage=[t + 0.5 for t in range(length)],
        old_logp=[-float(t) for t in range(length)],
        agent=agent,
        weight=weight,
    )


def unpadded(batches):
    """The rows that are in batches, by their length."""
    found = {}
    for batch in batches:
        for b, n in enumerate(batch["lengths"]):
            if batch["weight"][b]:
                found[int(n)] = {name: values[b] for name, values in batch.items()}
    return found


def test_every_row_arrives_once_with_all_that_belongs_to_it():
    rows = [row(n, agent=n % 3, weight=n / 100, prompt=n // 2) for n in (40, 3, 77, 130, 20, 9, 300)]
    batches = microbatches(rows, size=3, step=32)
    assert sum(int((batch["weight"] > 0).sum()) for batch in batches) == len(rows)
    for r in rows:
        n = len(r.tokens)
        got = unpadded(batches)[n]
        np.testing.assert_array_equal(got["tokens"][:n], r.tokens)
        assert got["agents"] == r.agent and got["weight"] == np.float32(r.weight)
        assert not got["tokens"][n:].any() and not got["mask"][n - 1 :].any()


def test_entry_t_of_a_target_array_belongs_to_token_t_plus_one():
    (batch,) = microbatches([row(6, prompt=3)], size=1, step=8)
    np.testing.assert_array_equal(batch["mask"][0], [0, 0, 1, 1, 1, 0, 0])
    np.testing.assert_array_equal(batch["advantage"][0], [1.5, 2.5, 3.5, 4.5, 5.5, 0, 0])
    np.testing.assert_array_equal(batch["old_logp"][0], [-1, -2, -3, -4, -5, 0, 0])


def test_shapes_and_types_are_those_of_the_update():
    for batch in microbatches([row(n) for n in (5, 70, 9)], size=2, step=16):
        B, T = batch["tokens"].shape
        assert B == 2 and T % 16 == 0
        assert batch["lengths"].shape == batch["agents"].shape == batch["weight"].shape == (B,)
        assert batch["mask"].shape == batch["advantage"].shape == batch["old_logp"].shape == (B, T - 1)
        assert all(batch[k].dtype == np.int32 for k in ("tokens", "lengths", "agents"))
        assert all(batch[k].dtype == np.float32 for k in ("weight", "mask", "advantage", "old_logp"))


def test_the_last_microbatch_is_filled_with_rows_that_count_nothing():
    batches = microbatches([row(10) for _ in range(5)], size=4)
    assert [int((batch["weight"] > 0).sum()) for batch in batches] == [4, 1]
    filler = batches[-1]
    assert filler["tokens"].shape[0] == 4
    assert not filler["weight"][1:].any() and not filler["mask"][1:].any()
    assert (filler["lengths"][1:] == 1).all(), "a length of 0 would leave attention nothing to look at"


def test_rows_of_like_length_share_a_microbatch_so_that_little_is_padded():
    rows = [row(n) for n in (500, 10, 490, 12, 480, 14)]
    assert [batch["tokens"].shape[1] for batch in microbatches(rows, size=3, step=64)] == [64, 512]


def test_the_order_of_rows_changes_nothing():
    rows = [row(n) for n in (40, 3, 77, 130, 20)]
    for a, b in zip(microbatches(rows, size=2), microbatches(rows[::-1], size=2), strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_no_rows_give_no_microbatches():
    assert microbatches([], size=4) == []


@pytest.mark.parametrize("step", [16, 64, 128])
def test_buckets_hold_the_length_waste_less_than_half_and_are_few(step):
    sizes = {n: bucket(n, step) for n in range(1, 40 * step)}
    assert all(size >= n for n, size in sizes.items())
    assert all(size - n < max(step, n / 2) for n, size in sizes.items())
    assert all(bucket(size, step) == size for size in sizes.values()), "a bucket's size is its own bucket"
    assert len(set(sizes.values())) <= 8 + 4 * 3
    assert [bucket(n, step) for n in (1, step, step + 1, 8 * step, 8 * step + 1)] == [
        step, step, 2 * step, 8 * step, 10 * step,
    ]  # fmt: skip


@pytest.mark.parametrize("field", ["loss", "advantage", "old_logp"])
def test_a_row_with_a_missing_entry_is_refused(field):
    fields = dict(
        tokens=[1, 2, 3], loss=[0, 1, 1], advantage=[0, 1, 1], old_logp=[0, 0, 0], agent=0, weight=1.0
    )
    Row(**fields)
    with pytest.raises(ValueError, match="as many loss, advantage and old_logp entries"):
        Row(**(fields | {field: [0, 1]}))


def test_a_row_of_one_token_predicts_nothing_and_is_refused():
    with pytest.raises(ValueError, match=">= 2 tokens"):
        Row(tokens=[1], loss=[1], advantage=[1], old_logp=[0], agent=0, weight=1.0)


LENGTHS = (3, 300, 41, 44, 60, 9, 12, 130, 128, 20, 21, 77, 90, 100, 11, 33, 250)


@pytest.mark.parametrize("tokens", [256, 512, 4096])
def test_by_tokens_short_sequences_come_many_at_once_and_each_length_has_one_shape(tokens):
    rows = [row(n, agent=n % 3, weight=n / 100, prompt=n // 2) for n in LENGTHS]
    batches = microbatches(rows, size=2, step=32, tokens=tokens)
    assert sorted(unpadded(batches)) == sorted(LENGTHS) and sum(int((b["weight"] > 0).sum()) for b in batches) == len(rows)
    shapes = {batch["tokens"].shape for batch in batches}
    assert len({T for _, T in shapes}) == len(shapes) and all(B % 2 == 0 for B, _ in shapes)
    assert all(B * T <= tokens or B == 2 for B, T in shapes)
    assert all((batch["weight"] > 0).all() for batch in batches[1:]), "only the one of the shortest may have room"
    assert all(2 * B * T > tokens or 2 * T > tokens for B, T in shapes), "as many as there is room for"
    alone = unpadded(microbatches(rows, size=1, step=512))
    for n, values in unpadded(batches).items():
        np.testing.assert_array_equal(values["advantage"][: n - 1], alone[n]["advantage"][: n - 1])


def test_by_tokens_a_step_of_long_tailed_lengths_takes_fewer_programs_runs_and_pads_about_as_little():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 0.9, 400), 16, 4096).astype(int)
    rows = [row(int(n)) for n in lengths]
    by_rows, by_tokens = (microbatches(rows, size=4, step=128, tokens=tokens) for tokens in (0, 4 * 4096))
    assert len(by_tokens) < len(by_rows) / 4
    padded = [sum(batch["tokens"].size for batch in batches) / lengths.sum() for batches in (by_rows, by_tokens)]
    assert padded[1] < 1.5 and padded[0] < 1.3
