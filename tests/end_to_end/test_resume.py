"""Killed at any instant and started again, a run continues bit for bit and judges nothing twice."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest

from dk_jax.agents.policy import KEEP
from dk_jax.evaluation import heldout
from dk_jax.metrics import Metrics, is_clocked, read_scalars
from dk_jax.rollout.judge import Journal
from dk_jax.rollout.trajectory import load_trajectories
from dk_jax.skills.library import SkillLibrary
from dk_jax.tasks.builtin import builtin_suite
from dk_jax.train import rl_phase
from dk_jax.train.state import Checkpoints
from tests.end_to_end.scripted import Killed, ScriptedClient, ScriptedRun, tiny_config


def finish(workdir, client, cfg=None):
    """Runs cold start and RL to the end; returns parameters and optimiser state, library version and the library's counts."""
    run = ScriptedRun(cfg or tiny_config(), workdir, client)
    try:
        state = run.rl(run.sft().trainable)
        return jax.tree.map(np.asarray, (state.trainable, state.opt_state)), run.library.version, run.library.counts()
    finally:
        run.close()


def steps_written(workdir):
    """What a run has left of each RL step: its scalars but for times, and its rollouts."""
    scalars = [
        {k: v for k, v in line.items() if not is_clocked(k)}
        for line in read_scalars(workdir / "metrics.jsonl", "rl")
    ]
    rollouts = {path.name: path.read_text() for path in sorted((workdir / "rollouts").glob("step_*.jsonl"))}
    return scalars, rollouts


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
    rollouts = [t for path in (workdir / "rollouts").glob("step_*.jsonl") for t in load_trajectories(path) if t.agent == "policy"]
    kept = [t for t in rollouts if any(turn.text == KEEP for turn in t.turns)]
    assert kept and len(kept) < len(rollouts)
    for trajectory in kept:
        first, second = trajectory.turns
        assert second.source == first.source and second.verdict == first.verdict and second.reward == first.reward > 0


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


@pytest.mark.parametrize(
    ("where", "checkpoint_every"),
    [("commit", 1), ("rollouts", 1), ("scalars", 1), ("save", 1), ("forget", 1), ("scalars", 2), ("save", 2)],
)
def test_killed_around_its_commit_a_step_is_whole_after_the_resume(uninterrupted, tmp_path, monkeypatch, where, checkpoint_every):
    wanted, _, whole = uninterrupted
    cfg = tiny_config()
    cfg.rl.checkpoint_every = checkpoint_every
    owner, name = {
        "commit": (SkillLibrary, "commit"),
        "rollouts": (rl_phase, "save_trajectories"),
        "scalars": (Metrics, "scalars"),
        "save": (Checkpoints, "save"),
        "forget": (Journal, "forget"),
    }[where]
    done = getattr(owner, name)
    seen = []

    def killed_at_the_second_step(*arguments):
        seen.append(None) if _is_rl(where, arguments) else None
        if len(seen) == 2 and _is_rl(where, arguments):
            raise Killed
        return done(*arguments)

    monkeypatch.setattr(owner, name, killed_at_the_second_step)
    with pytest.raises(Killed):
        finish(tmp_path, ScriptedClient(), cfg)
    monkeypatch.undo()
    assert_same(finish(tmp_path, ScriptedClient(), cfg), wanted)
    assert steps_written(tmp_path) == steps_written(whole)


def test_where_a_damaged_checkpoints_verdicts_are_gone_too_that_is_said(uninterrupted, tmp_path, caplog):
    wanted, judged, whole = uninterrupted
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    (workdir / "journal_rl.jsonl").unlink()
    (workdir / "checkpoints" / "rl" / "3" / "record" / "metadata").write_text("{")
    client = ScriptedClient()
    assert_same(finish(workdir, client), wanted)
    assert "RL goes on from step 2, where it had come to step 3: the verdicts in between are not in the journal" in caplog.text
    assert 0 < client.judged < judged
    assert steps_written(workdir) == steps_written(whole)


def _is_rl(where, arguments):
    if where == "scalars":
        return arguments[1] == "rl"
    if where == "save":  # the first one is of step 0
        return "rl" in str(arguments[0].directory) and arguments[1].step > 0
    return True


def test_scores_are_read_back_only_for_what_they_were_made_of(tmp_path, monkeypatch):
    made = []
    evaluate = heldout.evaluate
    monkeypatch.setattr(heldout, "evaluate", lambda *a, **k: made.append([t.name for t in a[2]]) or evaluate(*a, **k))

    def scores(steps, max_tasks=2):
        cfg = tiny_config()
        cfg.rl.decay, cfg.rl.steps, cfg.evaluation.max_tasks = False, steps, max_tasks
        run = ScriptedRun(cfg, tmp_path, ScriptedClient())
        found = run.all()
        run.close()
        return found

    first = scores(2)
    assert len(made) == 2 and scores(2)["after"] == first["after"] and len(made) == 2
    later = scores(3)
    assert len(made) == 3, "the cold start's scores stand, those of step 2 are not those of step 3"
    assert (later["before"], later["after"]["of"]["step"]) == (first["before"], 3)
    more = scores(3, max_tasks=3)
    assert [len(tasks) for tasks in made] == [2, 2, 2, 3, 3] and more["before"]["last_turn"]["samples"] == 3


def test_the_cold_start_is_evaluated_without_the_skills_that_came_after_it(tmp_path):
    run = ScriptedRun(tiny_config(), tmp_path, ScriptedClient())
    run.rl(run.sft().trainable)
    assert run.library.active()
    run.all()
    run.close()
    before, after = (load_trajectories(tmp_path / "rollouts" / f"eval_{phase}.jsonl") for phase in ("sft", "rl"))
    assert not any(t.skills for t in before) and len(before) == len(after) == 2


def test_a_config_that_can_not_work_is_not_remembered(tmp_path):
    wrong = {
        "rl.epochs": 0, "rl.only": ("mlps",), "rl.keep_checkpoints": 0, "rl.keep_best": "luck", "rl.max_grad_norm_spike": 0.5,
        "skills.verification": "guess", "tasks.kinds": ("maps",),
        "rollout.tasks": 10_000, "rollout.checked_tasks": 10_000, "rollout.temperature": 0.0, "rollout.max_rows": 0,
        "model.init": "luck", "model.family": "gpt", "model.head_dim": 7, "codec.kind": "bytes", "codec.vocab_size": 100,
        "sft.optimizer": "sgd", "sft.shares.policy": -1.0, "rl.optimizer": "sgd", "rl.steps": 0, "sft.microbatch": 0,
        "sandbox.language": "rust", "sandbox.form": "binary", "sandbox.timing": "guess", "sandbox.check_s": -1.0, "reward.w_speed": -1.0,
    }  # fmt: skip
    for key, value in wrong.items():
        cfg = tiny_config()
        cfg.update_from_flattened_dict({key: value})
        with pytest.raises(ValueError, match=key.split(".")[-1]):
            ScriptedRun(cfg, tmp_path, ScriptedClient())
        ScriptedRun(tiny_config(), tmp_path, ScriptedClient()).close()
        (tmp_path / "config.json").unlink()


@pytest.mark.parametrize("mode", ["train_from", "rollout_only"])
def test_other_modes_take_the_library_of_their_checkpoint(uninterrupted, tmp_path, monkeypatch, mode):
    maker = ScriptedRun(tiny_config(), tmp_path / "maker", ScriptedClient())
    maker.rollout_only(tmp_path / "t.jsonl")
    maker.close()
    saved = Checkpoints.save

    def killed_before_a_step_is_saved(self, state):
        if "rl" in str(self.directory) and state.step > 0:
            raise Killed
        saved(self, state)

    monkeypatch.setattr(Checkpoints, "save", killed_before_a_step_is_saved)
    with pytest.raises(Killed):
        finish(tmp_path / "a", ScriptedClient())
    monkeypatch.undo()
    run = ScriptedRun(tiny_config(), tmp_path / "a", ScriptedClient())
    assert run.library.skills(), "step 1 was committed, and its checkpoint lost"
    if mode == "train_from":
        run.train_from(tmp_path / "t.jsonl")
        assert (run.library.step, run.library.skills()) == (1, [])
    else:
        run.rollout_only(tmp_path / "again.jsonl")
        assert run.library.skills() == []
        assert (tmp_path / "again.jsonl").read_text() == (tmp_path / "t.jsonl").read_text()
    run.close()


def test_further_epochs_go_on_from_the_same_rollouts(tmp_path):
    cfg = tiny_config()
    cfg.rl.epochs = 3
    run = ScriptedRun(cfg, tmp_path, ScriptedClient())
    run.rollout_only(tmp_path / "t.jsonl")
    metrics = run.train_from(tmp_path / "t.jsonl")
    assert metrics["kl"] > 0 and metrics["ratio"] != 1  # the last epoch's policy is no longer the sampler's
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


def test_rl_changes_the_modules_that_it_is_told_to_and_no_others(tmp_path):
    cfg = tiny_config()
    cfg.rl.only = ("mlp",)
    run = ScriptedRun(cfg, tmp_path, ScriptedClient())
    cold = run.sft()
    trained = run.rl(cold.trainable)
    run.close()
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(cold.trainable)]
    for path, a, b in zip(paths, jax.tree.leaves(cold.trainable), jax.tree.leaves(trained.trainable), strict=True):
        assert bool((np.asarray(a) != np.asarray(b)).any()) == any(entry.key == "mlp" for entry in path), path


def test_tasks_that_are_only_checked_train_the_policy_on_correctness_alone(uninterrupted):
    _, _, workdir = uninterrupted
    cfg = tiny_config()
    members = (cfg.rollout.selections + 1) * cfg.rollout.rollouts
    rollouts = [t for path in (workdir / "rollouts").glob("step_*.jsonl") for t in load_trajectories(path) if t.agent == "policy"]
    checked = [t for t in rollouts if not t.timed]
    assert len(checked) == 3 * members and len(rollouts) == len(checked) * (1 + cfg.rollout.tasks)
    assert {t.task for t in checked}.isdisjoint(t.task for t in rollouts if t.timed)
    assert all(len(t.turns) == 1 and not t.skills and t.task.endswith("_light") for t in checked)
    assert {t.rewards[0] for t in checked} == {0.0, 0.5} and any(t.advantages[0] for t in checked)
    for line in read_scalars(workdir / "metrics.jsonl", "rl"):
        step = load_trajectories(workdir / "rollouts" / f"step_{line['step']:05d}.jsonl")
        right = [v.correct for t in step if t.agent == "policy" and not t.timed for v in t.verdicts]
        timed = [v.earned_speedup for t in step if t.agent == "policy" and t.timed for v in t.verdicts]
        assert line["checked_correct"] == pytest.approx(np.mean(right)) and line["speedup"] == pytest.approx(np.mean(timed))


def test_a_run_on_a_directory_of_kernelbench_files(tmp_path):
    """The cold start writes kernels for generated tasks; RL and evaluation use the files."""
    (tmp_path / "level1").mkdir()
    for task in builtin_suite("cpu").tasks[:8]:
        (tmp_path / "level1" / f"1_{task.name}.py").write_text(task.reference)
    cfg = tiny_config()
    cfg.tasks.update(dict(source="kernelbench", directory=str(tmp_path), levels=(1,), generated=12, check_size=""))
    cfg.sandbox.update(dict(language="triton", form="module"))
    cfg.rollout.update(dict(checked_tasks=0, max_policy_tokens=512, max_context_tokens=4096))
    cfg.rl.steps = 2
    run = ScriptedRun(cfg, tmp_path / "run", ScriptedClient())
    scores = run.all()
    run.close()
    assert scores["after"]["last_turn"]["samples"] == 2 and len(run.tasks.train) == 6
    rollouts = [t for path in (tmp_path / "run" / "rollouts").glob("step_*.jsonl") for t in load_trajectories(path)]
    assert {t.task for t in rollouts} <= {t.name for t in run.tasks.train} and any(t.advantages for t in rollouts)
    assert not {k.task for k in run.corpus()} & {t.task for t in rollouts}
