"""Partial modes do what the step does; what must not be learnt from stops the run and is saved; each agent and the clock are told of."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time

import jax
import numpy as np
import pytest

from dk_jax.metrics import read_scalars
from dk_jax.rollout.episode import StepRollouts
from dk_jax.rollout.judge import Arms, Request
from dk_jax.rollout.trajectory import Trajectory, Turn, load_trajectories, save_trajectories
from dk_jax.train.agent_metrics import agent_metrics
from dk_jax.train.bad_batch import FEWEST_NORMS, NORM_WINDOW, BadBatch, largest_norm, remembered
from dk_jax.train.batch import Row
from dk_jax.train.clock import StepClock, TimedJudge, TimedSampler
from dk_jax.train.rl_phase import RLPhase
from dk_jax.train.setup import ConfigError
from dk_jax.train.state import TrainState
from dk_jax.train.update import Updater
from tests.dk_jax.fake_sandbox import A, FakeClient, make_judge
from tests.end_to_end.scripted import ScriptedClient, ScriptedRun, cold_started, tiny_config


def small_config():
    cfg = tiny_config()
    cfg.rl.update(dict(steps=2, decay=False))
    return cfg


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A workdir with the cold start done."""
    return cold_started(tmp_path_factory.mktemp("started") / "run", small_config())


@pytest.fixture
def make_run(started, tmp_path):
    """Makes runs that go on from the cold start, each in a folder of its own."""
    made = []

    def make(name="run", cfg=None):
        if not (tmp_path / name).exists():
            shutil.copytree(started, tmp_path / name)
        made.append(ScriptedRun(cfg or small_config(), tmp_path / name, ScriptedClient()))
        return made[-1]

    yield make
    for run in made:
        run.close()


def arrays(state):
    return jax.tree.map(np.asarray, (state.trainable, state.opt_state))


def test_rollouts_read_from_a_file_make_the_steps_own_update_bit_for_bit(make_run):
    cfg = small_config()
    cfg.rl.steps = 1
    whole = make_run("whole", cfg)
    wanted = whole.rl(whole.sft().trainable)
    parts = make_run("parts")
    path = parts.workdir / "t.jsonl"
    summaries = sum(t.agent == "summary" for t in load_trajectories(path)) if parts.rollout_only(path) else 0
    assert len(load_trajectories(path)) == (2 + 1) * 3 * 2 + summaries and summaries > 0
    metrics = parts.train_from(path)
    with RLPhase(parts) as phase:
        found = phase.newest(parts.sft().trainable)
    assert found.step == wanted.step == 1
    for a, b in zip(jax.tree.leaves(arrays(found)), jax.tree.leaves(arrays(wanted)), strict=True):
        np.testing.assert_array_equal(a, b)
    [line] = read_scalars(whole.workdir / "metrics.jsonl", "rl")
    for name in ("loss", "grad_norm", "tokens", "reward", "entropy_policy", "gap_policy", "sequences_policy", "drop_share_policy"):
        assert metrics[name] == line[name], name
    written = load_trajectories(whole.workdir / "rollouts" / "step_00001.jsonl")
    assert [t.tokens for t in load_trajectories(path)] == [t.tokens for t in written]


def test_overfitting_one_task_says_a_line_a_step_and_leaves_the_run_as_it_was(make_run, capsys):
    run = make_run()
    before = {p: p.read_bytes() for p in (run.workdir / "checkpoints").rglob("*") if p.is_file()}
    name = run.tasks.rl[3].name
    done = run.overfit_one(name)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"2 steps on task {name}" and [line.split("  ")[0] for line in lines[1:]] == ["step 1/2", "step 2/2"]
    assert f"reward {done[0]['reward']:.3f}" in lines[1] and len(done) == 2
    rollouts = load_trajectories(run.workdir / "rollouts" / "overfit_one_00002.jsonl")
    assert {t.task for t in rollouts} == {name} and {t.agent for t in rollouts} == {"policy"}
    assert {p: p.read_bytes() for p in (run.workdir / "checkpoints").rglob("*") if p.is_file()} == before
    assert run.library.step == -1 and [e["step"] for e in read_scalars(run.workdir / "metrics.jsonl", "overfit_one")] == [1, 2]
    run.overfit_one(name)
    assert len((run.workdir / "metrics.jsonl").read_text().split('"overfit_one"')) == 3, "those of the last time alone"
    with pytest.raises(ConfigError, match="--task=nothing: RL trains on no task of that name"):
        run.overfit_one("nothing")


# --- what must not be learnt from --------------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_stops_the_run_with_its_batch_saved(make_run, monkeypatch):
    run = make_run()
    start = run.sft().trainable
    gradient = Updater.gradient

    def broken(self, trainable, frozen, batches):
        total, sums = gradient(self, trainable, frozen, batches)
        return jax.tree.map(lambda leaf: leaf * np.nan, total), sums

    monkeypatch.setattr(Updater, "gradient", broken)
    with pytest.raises(BadBatch, match="RL step 1 was not made: the gradient is not finite") as error:
        run.rl(start)
    monkeypatch.undo()
    rollouts, batch = (run.workdir / f"bad_batch_step_00001.{kind}" for kind in ("jsonl", "npz"))
    assert f"--train_from={rollouts}" in str(error.value) and str(batch) in str(error.value)
    with np.load(batch) as saved:
        numbers = {name.split("/")[0] for name in saved}
        assert {name.split("/")[1] for name in saved} == {"tokens", "lengths", "agents", "weight", "mask", "advantage", "old_logp"}
        assert sum(saved[f"{n}/mask"].sum() for n in numbers) > 0
    with RLPhase(run) as phase:
        kept = phase.newest(start)
    assert kept.step == 0 and run.library.step <= 0
    for a, b in zip(jax.tree.leaves(kept.trainable), jax.tree.leaves(start), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert run.train_from(rollouts)["grad_norm"] > 0, "the saved rollouts make the update"
    assert run.rl(start).step == 2, "the same command goes on from the checkpoint"


def test_a_reward_that_is_not_a_number_is_named_and_its_rollouts_are_saved(make_run):
    run = make_run()
    path = run.workdir / "t.jsonl"
    run.rollout_only(path)
    trajectories = load_trajectories(path)
    wrong = next(t for t in trajectories if t.agent == "policy")
    wrong.rewards[0] = math.nan
    save_trajectories(path, trajectories)
    with pytest.raises(BadBatch, match=f"reward of task '{wrong.task}'.* is nan"):
        run.train_from(path)
    saved = load_trajectories(run.workdir / "bad_batch_step_00001.jsonl")
    assert [math.isnan(t.rewards[0]) for t in saved if t.rewards].count(True) == 1  # a summary whose skills were not tried has none


def test_a_spike_is_refused_and_nothing_of_it_applied_until_it_is_let_pass(make_run):
    run = make_run()
    path = run.workdir / "t.jsonl"
    run.rollout_only(path)
    rollouts = load_trajectories(path)
    start = run.sft().trainable
    run.cfg.unlock()
    with RLPhase(run) as phase:
        state = phase.newest(start)
        state.record["norms"] = [1e-6] * FEWEST_NORMS
        before = jax.tree.map(lambda leaf: np.array(leaf), (state.trainable, state.opt_state))
        run.cfg.rl.max_grad_norm_spike = 5.0
        step = StepRollouts(trajectories=rollouts, proposals=[])
        with pytest.raises(BadBatch, match=r"norm is .*, above 5e-06\. .* larger rl\.max_grad_norm_spike, or 0, it is let pass"):
            phase.learn(state, step, phase.present(state))
        for a, b in zip(jax.tree.leaves(arrays(state)), jax.tree.leaves(before), strict=True):
            np.testing.assert_array_equal(a, b)
        run.cfg.rl.max_grad_norm_spike = 0.0
        after, metrics = phase.learn(state, step, phase.present(state))
    assert after.record["norms"] == [1e-6] * FEWEST_NORMS + [metrics["grad_norm"]]


def test_the_bound_on_a_gradient_is_a_multiple_of_the_last_ones_median():
    record = {}
    for norm in [1.0, 2.0, 3.0, 100.0]:
        record = remembered(record, {"grad_norm": norm, "reward": norm}, keep_best="reward", window=3)
        assert largest_norm(record, 10.0) is None, "too few to tell"
    record = remembered(record, {"grad_norm": 2.5, "reward": 7.0}, keep_best="reward", window=3)
    assert largest_norm(record, 10.0) == 25.0 and largest_norm(record, 0.0) is None
    assert record["recent"] == {"metric": "reward", "values": [3.0, 100.0, 7.0]}
    assert remembered(record, {"reward": 1.0, "speedup": 2.0}, keep_best="speedup", window=3)["recent"]["values"] == [2.0]
    for _ in range(NORM_WINDOW):
        record = remembered(record, {"grad_norm": 4.0}, keep_best="", window=3)
    assert record["norms"] == [4.0] * NORM_WINDOW


def test_the_best_checkpoint_is_by_the_mean_over_the_last_steps(make_run):
    run = make_run()
    with RLPhase(run) as phase:
        record, best = {}, []
        for step, reward in enumerate([1, 5, 1, 1, 1, 1, 9, 1, 1, 1, 1, 1], 1):
            record = remembered(record, {"reward": float(reward)}, keep_best="reward", window=5)
            record = phase._with_best(TrainState(step=step, trainable={}, opt_state={}, record=record))
            best.append(record["best"]["step"])
    assert best == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11], "the first ones as they come, then the highest mean of five"


# --- what is told ------------------------------------------------------------------------------------------------------------


def test_every_step_tells_of_each_agent_and_of_the_clock(make_run):
    cfg = small_config()
    cfg.rl.steps = 3
    run = make_run(cfg=cfg)
    run.rl(run.sft().trainable)
    lines = read_scalars(run.workdir / "metrics.jsonl", "rl")
    assert len(lines) == 3
    for line in lines:
        shares = [line[f"share_{name}"] for name in ("rollouts", "judging", "training", "other")]
        assert sum(shares) == pytest.approx(1.0) and min(shares) >= 0.0
        assert line["step_s"] >= line["collect_s"] + line["update_s"] and line["collect_s"] >= line["judging_s"] + line["sampling_s"]
        assert line["tokens_per_s"] > 0 and line["episodes_per_s"] > 0 and line["evaluations_per_s"] > 0
        rollouts = load_trajectories(run.workdir / "rollouts" / f"step_{line['step']:05d}.jsonl")
        assert {t.agent for t in rollouts} >= {"policy", "summary"}
        for agent in {t.agent for t in rollouts}:
            own = [t for t in rollouts if t.agent == agent]
            assert line[f"length_{agent}"] == pytest.approx(np.mean([t.turn_index.count(i) for t in own for i in range(len(t.turns))]))
            assert line[f"drop_share_{agent}"] == pytest.approx(1 - line[f"sequences_{agent}"] / len(own))
            if rewards := [r for t in own for r in t.rewards]:
                assert line[f"reward_{agent}"] == pytest.approx(np.mean(rewards))
            if line[f"sequences_{agent}"]:
                assert line[f"entropy_{agent}"] > 0 and 0 <= line[f"clip_fraction_{agent}"] <= 1 and line[f"gap_{agent}"] > 0
    tokens = sum(line[f"tokens_{agent}"] for agent in ("policy", "selection", "summary") if f"tokens_{agent}" in line)
    assert tokens == line["tokens"], "the agents' tokens are all tokens"


def test_agents_that_did_not_speak_have_no_metrics_but_their_number():
    spoke = Trajectory(agent="policy", task="t", group="t", rewards=[1.0, 0.0], starts=(4,))
    spoke.append_prompt([1, 2])
    spoke.append_sample([3, 4], [-1.0, -1.0])
    spoke.turns.append(Turn(text="", stop="eos"))
    spoke.append_prompt([1])
    spoke.append_sample([5], [-1.0])
    spoke.turns.append(Turn(text="", stop="eos"))
    row = Row(tokens=[1, 2], loss=[0.0, 1.0], advantage=[0.0, 1.0], old_logp=[0.0, -1.0], agent=1, weight=1.0)
    found = agent_metrics([spoke], [row])
    assert found == {
        "reward_policy": 0.5, "length_policy": 1.5, "drop_share_policy": 0.5, "sequences_policy": 1.0,
        "sequences_selection": 0.0, "sequences_summary": 0.0,
    }  # fmt: skip


def test_how_calls_are_written_and_how_many_say_nothing_of_use_are_metrics():
    said = [("xml", ""), ("xml", "chosen twice"), ("python", ""), ("", "not JSON")]
    calls = [Trajectory(agent="selection", task="t", group="t", turns=[Turn(text="", stop="eos", form=f, error=e)]) for f, e in said]
    found = agent_metrics(calls, [])
    assert {k: v for k, v in found.items() if "form" in k or "unread" in k} == {
        "form_xml_selection": 0.5, "form_python_selection": 0.25, "unread_selection": 0.5,
    }  # fmt: skip


def test_the_clock_adds_up_where_time_goes_and_counts_from_one_reading_to_the_next(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = StepClock()

    def passing(seconds):
        now[0] += seconds

    class Slow:
        def sample(self, prompts):
            passing(2.0)
            return [dataclasses.make_dataclass("S", ["tokens"])([1, 2, 3]) for _ in prompts]

    judge = TimedJudge(make_judge(FakeClient()), clock)
    evaluate = judge._judge.evaluate
    judge._judge.evaluate = lambda *a, **k: passing(3.0) or evaluate(*a, **k)
    with clock.during("collect"):
        TimedSampler(Slow(), clock).sample(["a", "b"])
        passing(1.0)
        assert len(judge.evaluate([Request(task=A, source="x"), Request(task=A, source="y")], phase="p")) == 2
        judge.verify([Arms(task=A, control=("x",), treated=("y",))], phase="v")
    clock.count("episodes", 5)
    with clock.during("update"):
        passing(3.0)
    passing(1.0)
    assert clock.read() == {
        "step_s": 10.0, "collect_s": 6.0, "sampling_s": 2.0, "judging_s": 3.0, "update_s": 3.0, "overlap_s": 0.0, "device_wait_s": 0.0,
        "share_rollouts": pytest.approx(0.3), "share_judging": pytest.approx(0.3), "share_training": pytest.approx(0.3),
        "share_overlap": 0.0, "share_other": pytest.approx(0.1),
        "tokens_per_s": 3.0, "evaluations_per_s": pytest.approx(4 / 3), "episodes_per_s": 0.5,
    }  # fmt: skip
    assert judge.journal is None, "what is not timed is the judge's own"
    passing(4.0)
    assert clock.read()["share_other"] == 1.0
