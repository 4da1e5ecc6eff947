"""Killed at any instant and started again, a run continues bit for bit and judges nothing twice."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dk_jax.metrics import read_scalars
from dk_jax.train.state import Checkpoints
from tests.end_to_end.scripted import Killed, ScriptedClient, ScriptedRun, tiny_config


def finish(workdir, client):
    """Runs cold start and RL to the end; returns parameters, library version and the library's counts."""
    run = ScriptedRun(tiny_config(), workdir, client)
    try:
        state = run.rl(run.sft().trainable)
        return jax.tree.map(np.asarray, state.trainable), run.library.version, run.library.counts()
    finally:
        run.close()


def assert_same(found, wanted):
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert found[1:] == wanted[1:]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    client = ScriptedClient()
    workdir = tmp_path_factory.mktemp("whole")
    return finish(workdir, client), client.judged, workdir


def test_the_scripted_run_learns_and_verifies_skills(uninterrupted):
    (_, _, counts), judged, workdir = uninterrupted
    assert counts["proposed"] >= 1 and counts["verified"] >= 1, counts
    steps = read_scalars(workdir / "metrics.jsonl", "rl")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["grad_norm"] > 0 for line in steps)
    assert judged > 100


@pytest.mark.parametrize("share", [0.05, 0.35, 0.6, 0.75, 0.9, 0.98])
def test_a_run_killed_at_any_verdict_continues_bit_for_bit(uninterrupted, tmp_path, share):
    wanted, judged, _ = uninterrupted
    first = ScriptedClient(kill_at=int(share * judged))
    with pytest.raises(Killed):
        finish(tmp_path, first)
    second = ScriptedClient()
    assert_same(finish(tmp_path, second), wanted)
    # Each verdict that had arrived was kept; only a verification cut in its middle is asked for again, whole.
    assert first.judged + second.judged <= judged + 16


def test_skills_committed_before_a_lost_checkpoint_are_rolled_back_and_proposed_again(
    uninterrupted, tmp_path, monkeypatch
):
    wanted, _, _ = uninterrupted
    saved = Checkpoints.save

    def killed_before_the_second_step_is_saved(self, state):
        if "rl" in str(self.directory) and state.step == 2:
            raise Killed
        saved(self, state)

    monkeypatch.setattr(Checkpoints, "save", killed_before_the_second_step_is_saved)
    with pytest.raises(Killed):
        finish(tmp_path, ScriptedClient())
    monkeypatch.undo()
    assert_same(finish(tmp_path, ScriptedClient()), wanted)


def test_rollouts_written_to_a_file_train_as_if_they_had_just_been_made(tmp_path):
    run = ScriptedRun(tiny_config(), tmp_path / "a", ScriptedClient())
    assert run.rollout_only(tmp_path / "t.jsonl") == 2 * 3 * 2 + len(
        [line for line in open(tmp_path / "t.jsonl") if '"agent": "summary"' in line]
    )
    metrics = run.train_from(tmp_path / "t.jsonl")
    run.close()
    direct = ScriptedRun(tiny_config(), tmp_path / "b", ScriptedClient())
    state = direct.rl(direct.sft().trainable)
    first = read_scalars(tmp_path / "b" / "metrics.jsonl", "rl")[0]
    direct.close()
    assert state.step == 3
    assert metrics["loss"] == pytest.approx(first["loss"], abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-5)


def test_further_epochs_go_on_from_the_same_rollouts(tmp_path):
    cfg = tiny_config()
    cfg.rl.epochs = 3
    run = ScriptedRun(cfg, tmp_path, ScriptedClient())
    run.rollout_only(tmp_path / "t.jsonl")
    metrics = run.train_from(tmp_path / "t.jsonl")
    assert metrics["kl"] > 0 and metrics["ratio"] != 1  # the last epoch's policy is no longer the sampler's
    cfg.rl.epochs = 0
    with pytest.raises(ValueError, match="rl.epochs is 0"):
        run.rl_updater()
    run.close()


def test_a_corpus_checked_on_another_machine_is_taken_over(tmp_path):
    cfg = tiny_config()
    cfg.tasks.generated, cfg.corpus.timed_tasks = 12, 8
    checking = ScriptedRun(cfg, tmp_path / "a", ScriptedClient())
    journal = checking.check_corpus()
    checking.close()
    assert checking.client.judged > 20
    whole = ScriptedRun(cfg, tmp_path / "whole", ScriptedClient())
    wanted = whole.corpus()
    whole.close()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / journal.name).write_bytes(journal.read_bytes())
    training = ScriptedRun(cfg, tmp_path / "b", ScriptedClient())
    assert training.corpus() == wanted
    training.close()
    assert training.client.judged == whole.client.judged - checking.client.judged > 8


def test_the_papers_acceptance_rule_runs_in_the_place_of_the_paired_one(tmp_path):
    cfg = tiny_config()
    cfg.skills.verification = "paper"
    run = ScriptedRun(cfg, tmp_path, ScriptedClient())
    run.rl(run.sft().trainable)
    evidence = [e for skill in run.library.skills() for e in skill.evidence]
    run.close()
    assert evidence and all(e.rule == "paper" and e.n == 1 for e in evidence)
