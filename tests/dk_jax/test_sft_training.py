"""The cold start's batches: rows of like length, every epoch a new order, the same for the same seed, and shares of the agents."""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest

from dk_jax.metrics import read_scalars
from dk_jax.sft.batches import batch_indices, seats, shared_indices
from dk_jax.sft.samples import Sample
from dk_jax.sft.validation import Validation, split
from dk_jax.train.setup import ConfigError
from dk_jax.train.state import Checkpoints
from tests.end_to_end.scripted import Killed, ScriptedClient, ScriptedRun, tiny_config

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


SHARES = {"policy": 0.7, "selection": 0.1, "summary": 0.2}


@pytest.mark.parametrize(
    ("shares", "batch", "wanted"),
    [
        (SHARES, 16, {"policy": 11, "selection": 2, "summary": 3}),
        (SHARES, 10, {"policy": 7, "selection": 1, "summary": 2}),
        (SHARES, 3, {"policy": 1, "selection": 1, "summary": 1}),
        ({"policy": 98, "selection": 1, "summary": 1}, 16, {"policy": 14, "selection": 1, "summary": 1}),
        ({"policy": 1.0, "selection": 0.0, "summary": 0.0}, 16, {"policy": 16}),
        ({"policy": 0.0, "selection": 0.0, "summary": 0.0}, 16, {}),
        ({}, 16, {}),
    ],
)
def test_a_batch_is_divided_by_the_shares(shares, batch, wanted):
    assert seats(shares, batch) == wanted


def test_shares_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"sft\.shares must be numbers >= 0: {'summary': -1}"):
        seats({"policy": 1, "summary": -1}, 16)
    with pytest.raises(ValueError, match=r"3 agents, but sft\.batch=2"):
        seats(SHARES, 2)
    with pytest.raises(ValueError, match=r"sft\.shares\.summary is above 0, but there is no sample"):
        shared_indices(0, lengths=[9, 9], agents=["policy"] * 2, counts={"policy": 1, "summary": 1}, seed=0)


AGENTS = ["policy"] * 290 + ["selection"] * 33 + ["summary"] * 7
COUNTS = seats(SHARES, 16)


def shared(step: int, seed: int = 0) -> list[int]:
    return shared_indices(step, lengths=LENGTHS, agents=AGENTS, counts=COUNTS, seed=seed)


def test_every_batch_has_its_rows_of_each_agent_and_an_agents_rows_are_seen_equally_often():
    seen: Counter[int] = Counter()
    for step in range(60):
        assert Counter(AGENTS[i] for i in shared(step)) == COUNTS
        seen.update(shared(step))
        for agent in COUNTS:
            times = [seen[i] for i, name in enumerate(AGENTS) if name == agent]
            assert max(times) - min(times) <= 1
    assert seen[len(AGENTS) - 1] == pytest.approx(60 * 3 / 7, abs=1)


def test_shared_batches_depend_on_step_and_seed_alone_and_change_from_epoch_to_epoch():
    later = shared(17)
    assert later == shared(17) != shared(17, seed=1)
    # The summary's 7 rows: an epoch is 7 draws, 21 draws are 7 steps of 3; not the same order three times.
    draws = [i for step in range(7) for i in shared(step) if AGENTS[i] == "summary"]
    epochs = [tuple(draws[at : at + 7]) for at in (0, 7, 14)]
    assert len(set(epochs)) == 3 and {tuple(sorted(e)) for e in epochs} == {tuple(range(323, 330))}


def test_policy_rows_of_a_shared_batch_are_alike_in_length():
    rows = [[LENGTHS[i] for i in shared(step) if AGENTS[i] == "policy"] for step in range(26 * 3)]
    assert np.mean([max(r) - min(r) for r in rows]) < 80


def _cold_start(workdir, **sft):
    cfg = tiny_config()
    cfg.sft.update(dict(steps=4, batch=4, microbatch=4, checkpoint_every=1, validation_share=0.2, **sft))
    cfg.sft.shares.update(dict(policy=0.5, selection=0.25, summary=0.25))
    run = ScriptedRun(cfg, workdir, ScriptedClient())
    try:
        return jax.tree.map(np.asarray, run.sft().trainable)
    finally:
        run.close()


def _killed_at_the_third_step(monkeypatch, workdir):
    saved = Checkpoints.save

    def save(self, state):
        if state.step == 3:
            raise Killed
        saved(self, state)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Checkpoints, "save", save)
        _cold_start(workdir)


def test_a_cold_start_tells_losses_by_agent_resumes_bit_for_bit_and_ends_with_its_best_checkpoint(tmp_path, monkeypatch):
    told = {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.5}
    seen, measured, losses = [], [], Validation.losses

    def scripted(self, trainable):
        seen.append(jax.tree.map(np.asarray, trainable))
        measured.append(losses(self, trainable))
        return measured[-1] | {"validation_loss": told[len(seen)]}

    monkeypatch.setattr(Validation, "losses", scripted)
    found = _cold_start(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, found, seen[1])
    assert [p.name for p in (tmp_path / "whole" / "checkpoints" / "sft_best").iterdir()] == ["2"]
    jax.tree.map(np.testing.assert_array_equal, _cold_start(tmp_path / "whole"), found)
    assert len(seen) == 4, "a cold start that has ended is read back"

    lines = read_scalars(tmp_path / "whole" / "metrics.jsonl", "sft")
    for line, real in zip(lines, measured, strict=True):
        assert [line[f"rows_{a}"] for a in SHARES] == [2, 1, 1]
        assert sum(line[f"tokens_{a}"] for a in SHARES) == line["tokens"]
        mean = sum(line[f"tokens_{a}"] * line[f"loss_{a}"] for a in SHARES) / line["tokens"]
        assert mean == pytest.approx(line["loss"], rel=1e-5)
        weighted = sum(share * line[f"validation_loss_{a}"] for a, share in (("policy", 0.5), ("selection", 0.25), ("summary", 0.25)))
        assert weighted == pytest.approx(real["validation_loss"], rel=1e-6)
    assert measured[-1]["validation_loss"] < measured[0]["validation_loss"]

    # Killed in the third step, after the best checkpoint was written and before it was kept: it is kept all the same.
    whole = list(seen)
    seen.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "keep_as_best", lambda self, step: None)
        _killed_at_the_third_step(monkeypatch, tmp_path / "killed")
    assert not (tmp_path / "killed" / "checkpoints" / "sft_best").exists()
    del seen[2:]  # the third step is done again
    jax.tree.map(np.testing.assert_array_equal, _cold_start(tmp_path / "killed"), found)
    jax.tree.map(np.testing.assert_array_equal, seen, whole)


def _samples(**agents):
    return [
        Sample(agent=agent, kind=agent, task=f"{agent}{i}", turns=((f"{number}", "y", True),))
        for agent, tasks in agents.items()
        for i in range(tasks)
        for number in range(3)
    ]


def test_a_task_is_on_one_side_of_the_validation_split_and_every_agent_on_both():
    samples = _samples(policy=40, selection=7, summary=2)
    trained, kept = split(samples, 0.1, seed=0)
    assert not {s.task for s in trained} & {s.task for s in kept}
    assert Counter(s.agent for s in kept) == {"policy": 12, "selection": 3, "summary": 3}
    assert sorted(map(str, trained + kept)) == sorted(map(str, samples))
    assert split(samples, 0.1, seed=0) == (trained, kept) and split(samples, 0.1, seed=1)[1] != kept
    assert split(samples, 0.0, seed=0) == (samples, [])
    assert split(_samples(policy=1), 0.5, seed=0)[1] == [], "the only task of its sort is trained on"
    with pytest.raises(ValueError, match=r"sft\.validation_share is 1\.0"):
        split(samples, 1.0, seed=0)


def test_a_split_that_leaves_nothing_to_validate_with_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"sft\.validation_share=0\.2 of the tasks leaves no sample that fits sft\.max_tokens=8"):
        _cold_start(tmp_path, max_tokens=8)
