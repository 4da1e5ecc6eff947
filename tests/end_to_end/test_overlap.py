"""Whole runs whose rollouts, judging and updates overlap: what they come to is given by the steps, not by who was faster."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time

import jax
import numpy as np
import pytest

from dk_jax.metrics import Metrics, is_clocked, read_scalars
from dk_jax.rollout.judge import Journal
from dk_jax.rollout.trajectory import load_trajectories
from dk_jax.skills.library import SkillLibrary
from dk_jax.train import rl_phase
from dk_jax.train.bad_batch import BadBatch
from dk_jax.train.mismatch import score
from dk_jax.train.overlap import Behaviour, OneStepAhead
from dk_jax.train.rl_phase import RLPhase
from dk_jax.train.setup import ConfigError
from dk_jax.train.state import Checkpoints
from dk_jax.train.update import Updater
from sandbox.client import SandboxUnavailable
from tests.dk_jax.toy_recipes import LENGTH, ToyRun, toy
from tests.end_to_end.scripted import Killed, ScriptedClient, ScriptedRun, cold_started, tiny_config

STEPS = 4
LIMIT_S = 60.0
"""No wait of these tests takes so long unless something is broken."""


def config(staleness: int = 1, **rl):
    cfg = tiny_config()
    cfg.rl.update(dict(steps=STEPS, decay=False, staleness=staleness, lr=1e-2, keep_checkpoints=9, **rl))
    return cfg


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A workdir with the cold start done, of which no config is remembered."""
    workdir = cold_started(tmp_path_factory.mktemp("started") / "run", config())
    (workdir / "config.json").unlink()
    return workdir


@pytest.fixture
def begin(started, tmp_path):
    """Makes workdirs that go on from the cold start."""

    def make(name: str = "run"):
        if not (tmp_path / name).exists():
            shutil.copytree(started, tmp_path / name)
        return tmp_path / name

    return make


def finish(workdir, client=None, cfg=None):
    """Runs RL to its end, or raises; returns `outcome` of the last state."""
    run = ScriptedRun(cfg or config(), workdir, client or ScriptedClient())
    try:
        return outcome(run, run.rl(run.sft().trainable))
    finally:
        run.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("rollouts-of-step")], "no thread is left behind"


def outcome(run, state):
    """Arrays, record, library, and what was written of each step but for times."""
    scalars = [{k: v for k, v in line.items() if not is_clocked(k)} for line in read_scalars(run.workdir / "metrics.jsonl", "rl")]
    rollouts = {path.name: path.read_text() for path in sorted((run.workdir / "rollouts").glob("step_*.jsonl"))}
    arrays = jax.tree.map(np.asarray, (state.trainable, state.opt_state))
    return arrays, state.record, run.library.version, run.library.counts(), scalars, rollouts


def assert_same(found, wanted):
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert found[1:] == wanted[1:]


def by_hand(workdir, staleness: int):
    """What a run has to come to: one thing after the other, in one thread."""
    run = ScriptedRun(config(staleness), workdir, ScriptedClient())
    start = run.sft().trainable
    with RLPhase(run) as phase:
        state = phase.newest(start)
        judge, sampler = run.judge("rl"), run.sampler(temperature=1.0)
        seen = []
        for step in range(STEPS):
            seen.append((jax.tree.map(lambda leaf: leaf.copy(), state.trainable), run.library.active()))
            made_at = max(step - staleness, 0)

            def behaviour(at=made_at, seen=seen):
                return Behaviour(step=at, trainable=seen[at][0], active=seen[at][1])

            rollouts = phase.collect(behaviour(), step, sampler, judge, run.verifier)
            state, metrics = phase.learn(state, rollouts, behaviour())
            metrics |= phase._make_final(state, rollouts)
            run.metrics.scalars("rl", state.step, metrics)
            state.record = phase._with_best(state)
    found = outcome(run, state)
    run.close()
    return found


@pytest.fixture(scope="module")
def whole(started, tmp_path_factory):
    """An undisturbed run with staleness 1: its outcome, what was judged, its folder."""
    workdir, client = tmp_path_factory.mktemp("whole") / "run", ScriptedClient()
    shutil.copytree(started, workdir)
    return finish(workdir, client), client.judged, workdir


# --- what makes which rollouts ---------------------------------------------------------------------------------------------------


def test_on_policy_nothing_is_made_ahead_and_nothing_kept(begin, monkeypatch):
    wanted = by_hand(begin("by_hand"), 0)
    monkeypatch.setattr(OneStepAhead, "__init__", lambda *_, **__: pytest.fail("no thread is needed"))
    found = finish(begin(), cfg=config(0))
    assert_same(found, wanted)
    assert [line["staleness"] for line in found[4]] == [0.0] * STEPS and found[3]["active"] > 0
    for line in read_scalars(begin() / "metrics.jsonl", "rl"):
        assert line["overlap_s"] == line["share_overlap"] == line["device_wait_s"] == 0.0
    folders = {p.name for p in (begin() / "checkpoints" / "rl" / str(STEPS)).iterdir()}
    assert "arrays" in folders and "behind" not in folders


def test_ahead_each_step_is_made_by_the_parameters_and_library_of_the_step_before(whole, begin):
    found, _, _ = whole
    assert_same(found, by_hand(begin("by_hand"), 1))
    assert [line["staleness"] for line in found[4]] == [0.0, 1.0, 1.0, 1.0] and found[3]["active"] > 0
    assert found[5] != by_hand(begin("on_policy"), 0)[5], "on-policy other rollouts are made"
    offered = [json.loads(line)["shown"] for text in found[5].values() for line in text.splitlines()]
    assert any(offered), "skills came about in time to be offered"


def test_tokens_carry_the_log_probs_of_the_parameters_that_sampled_them(tmp_path):
    """A toy of daVinci's, whose bounds on the mismatch are 0.999 and 1.001: only under the sampler's parameters do its tokens pass."""
    run = ToyRun(toy("davinci_14b", **{"rl.steps": 3, "rl.staleness": 1, "rl.lr": 3e-3, "rl.checkpoint_every": 1, "rl.keep_checkpoints": 9}),
                 tmp_path, skills=3)  # fmt: skip
    start = run.sft().trainable
    run.rl(start)
    lines = read_scalars(tmp_path / "metrics.jsonl", "rl")
    with RLPhase(run) as phase:
        like = run.fresh_state(phase.updater, start)
        theta = [phase.checkpoints.restore(like, step, behind=True) for step in range(4)]
    assert theta[0].behind is None
    sizes = dict(temperature=run.cfg.rollout.temperature, microbatch=8, length_step=LENGTH)
    for step, line in enumerate(lines, 1):
        rollouts = load_trajectories(tmp_path / "rollouts" / f"step_{step:05d}.jsonl")
        sampler, learner = max(step - 2, 0), step - 1
        gaps = {}
        for of in {sampler, learner}:
            ours = score(run.model, theta[of].trainable, rollouts, **sizes)
            gaps[of] = max(np.abs(p - np.where(np.array(t.turn_index) >= 0, t.logp_sample, 0.0)).max() for p, t in zip(ours, rollouts, strict=True))
        assert gaps[sampler] < 1e-5
        if step == 1:
            assert line["staleness"] == 0.0 and line["gap_policy"] < 1e-5 and line["kl_policy"] < 1e-9
        else:
            assert gaps[learner] > 1e-3, "an update lies between"
            assert line["staleness"] == 1.0 and line["gap_policy"] > 1e-3 and line["kl_policy"] > 1e-7 and line["ratio_policy"] != 1.0
            for a, b in zip(jax.tree.leaves(theta[step].behind), jax.tree.leaves(theta[step - 1].trainable), strict=True):
                np.testing.assert_array_equal(a, b)
        assert line["mismatch_gap_policy"] < 1e-5 and line["dropped_mismatch_policy"] == 0, "trainer and sampler agree on equal parameters"
        assert 0.0 <= line["clip_fraction_policy"] <= 1.0
    run.close()


class Slow(ScriptedClient):
    """Takes its time over some candidates, by their content."""

    def _result(self, task, candidate, options=None):
        time.sleep(0.02 * (len(candidate.source) % 3))
        return super()._result(task, candidate, options)


def test_a_slow_judge_and_a_slow_learner_come_to_the_same(whole, begin, monkeypatch):
    wanted, _, _ = whole
    assert_same(finish(begin("slow_judge"), Slow()), wanted)
    update = Updater.update

    def slow(*arguments, **options):
        time.sleep(0.5)
        return update(*arguments, **options)

    monkeypatch.setattr(Updater, "update", slow)
    assert_same(finish(begin("slow_learner")), wanted)


class Waiting(ScriptedClient):
    """Judges nothing of a step after the first before the update of the step before has been made."""

    def __init__(self, updated: threading.Event):
        super().__init__()
        self.updated, self.waits, self.waited = updated, False, []

    def evaluate(self, *arguments, **options):
        if self.waits:
            self.waited.append(self.updated.wait(LIMIT_S / 2))
            self.waits = False
        return super().evaluate(*arguments, **options)


def test_judging_and_learning_overlap_and_the_clock_tells_how_much(whole, begin, monkeypatch):
    updated = threading.Event()
    client = Waiting(updated)
    collect, update = rl_phase.collect, Updater.update

    def begun(*arguments, **options):
        client.waits = options["step"] > 0
        return collect(*arguments, **options)

    def made(*arguments, **options):
        found = update(*arguments, **options)
        updated.set()
        return found

    monkeypatch.setattr(rl_phase, "collect", begun)
    monkeypatch.setattr(Updater, "update", made)
    assert_same(finish(begin(), client), whole[0])
    assert client.waited == [True] * (STEPS - 1), "with a judge that waits for the update, a run one after the other would stand still"
    lines = read_scalars(begin() / "metrics.jsonl", "rl")
    assert lines[0]["overlap_s"] > 0 and sum(line["overlap_s"] for line in lines) > 0
    for line in lines:
        shares = [line[f"share_{name}"] for name in ("rollouts", "judging", "training", "other")]
        assert sum(shares) - line["share_overlap"] == pytest.approx(1.0) and min(shares) >= 0.0
        assert line["overlap_s"] <= min(line["collect_s"], line["update_s"])
        assert line["share_overlap"] * line["step_s"] == pytest.approx(line["overlap_s"])
    assert lines[-1]["overlap_s"] == 0.0, "beside the last update nothing is made"


# --- killed and resumed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_run_killed_at_any_verdict_continues_bit_for_bit(whole, begin, share):
    wanted, judged, _ = whole
    first, second = ScriptedClient(kill_at=int(share * judged)), ScriptedClient()
    with pytest.raises(Killed):
        finish(begin(), first)
    assert_same(finish(begin(), second), wanted)
    assert first.judged + second.judged <= judged + 16, "but for a verification that was cut in its middle, nothing is judged again"


@pytest.mark.parametrize(
    ("owner", "name", "checkpoint_every", "time"),
    [(Updater, "update", 1, 3), (SkillLibrary, "commit", 1, 3), (Journal, "forget", 1, 3), (Metrics, "scalars", 3, 3),
     (Checkpoints, "save", 2, 2)],
)  # fmt: skip
def test_killed_around_a_commit_a_run_continues_bit_for_bit(whole, begin, monkeypatch, owner, name, checkpoint_every, time):
    wanted, _, _ = whole
    done, seen, here = getattr(owner, name), [], threading.current_thread()

    def killed(*arguments, **options):
        rl = {"scalars": lambda: arguments[1] == "rl", "save": lambda: arguments[1].step > 0}.get(name, lambda: True)()
        seen.append(None) if rl else None
        if rl and len(seen) == time:
            assert threading.current_thread() is here
            raise Killed
        return done(*arguments, **options)

    cfg = config(checkpoint_every=checkpoint_every)
    ready = begin()  # nothing of the cold start is done again
    monkeypatch.setattr(owner, name, killed)
    with pytest.raises(Killed):
        finish(ready, cfg=cfg)
    monkeypatch.undo()
    assert_same(finish(ready, cfg=cfg), wanted)


def test_more_steps_may_be_asked_for_and_are_those_of_a_longer_run(whole, begin):
    cfg = config()
    cfg.rl.steps = 2
    finish(begin(), cfg=cfg)
    assert_same(finish(begin()), whole[0])


def test_a_damaged_checkpoint_is_made_again_from_the_one_before_and_the_journal(whole, tmp_path, caplog):
    wanted, _, folder = whole
    shutil.copytree(folder, tmp_path / "run")
    behind = tmp_path / "run" / "checkpoints" / "rl" / str(STEPS) / "behind"
    largest = max((p for p in behind.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    client = ScriptedClient()
    with caplog.at_level(logging.WARNING):
        assert_same(finish(tmp_path / "run", client), wanted)
    assert f"rl/{STEPS} is damaged" in caplog.text and "are judged again" not in caplog.text and client.judged == 0


def test_parts_of_a_step_are_those_of_the_step_itself(whole, begin):
    """The next step's rollouts, written to a file and learnt from, are the step's own."""
    wanted, _, folder = whole
    cfg = config()
    cfg.rl.steps = STEPS - 1
    finish(begin(), cfg=cfg)
    run = ScriptedRun(config(), begin(), ScriptedClient())
    path = run.workdir / "t.jsonl"
    run.rollout_only(path)
    step = load_trajectories(folder / "rollouts" / f"step_{STEPS:05d}.jsonl")
    assert [(t.tokens, t.logp_sample, t.skills) for t in load_trajectories(path)] == [(t.tokens, t.logp_sample, t.skills) for t in step]
    assert run.train_from(path)["staleness"] == 1.0
    with RLPhase(run) as phase:
        found = phase.newest(run.sft().trainable)
    run.close()
    for a, b in zip(jax.tree.leaves((found.trainable, found.opt_state)), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)
    assert found.behind is not None


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0)])
def test_a_workdir_may_go_on_with_another_staleness_when_its_config_is_put_aside(begin, before, after):
    cfg, other = config(before), config(after)
    cfg.rl.steps = 2
    finish(begin(), cfg=cfg)
    with pytest.raises(ConfigError, match=f"rl.staleness: {before} -> {after}"):
        finish(begin(), cfg=other)
    (begin() / "config.json").unlink()
    found = finish(begin(), cfg=other)
    wanted = [0.0, 0.0, 0.0, 1.0] if after else [0.0, 1.0, 0.0, 0.0]
    assert [line["staleness"] for line in found[4]] == wanted, "what sampled the first step is not there, or not asked for"
    assert [(begin() / "checkpoints" / "rl" / str(step) / "behind").exists() for step in (1, 2, 3, 4)] == [bool(before)] * 2 + [bool(after)] * 2


# --- errors ----------------------------------------------------------------------------------------------------------------------


class Lost(ScriptedClient):
    """A sandbox that is gone after so many verdicts."""

    def __init__(self, after: int):
        super().__init__()
        self.after = after

    def _result(self, task, candidate, options=None):
        if self.judged >= self.after:
            raise SandboxUnavailable("nobody answers")
        return super()._result(task, candidate, options)


def test_a_sandbox_that_is_lost_ends_the_run_when_the_step_in_work_is_final(whole, begin):
    with pytest.raises(SandboxUnavailable, match="nobody answers"):
        finish(begin(), Lost(int(0.6 * whole[1])))
    lines = read_scalars(begin() / "metrics.jsonl", "rl")
    with Checkpoints(begin() / "checkpoints" / "rl") as checkpoints:
        assert checkpoints.latest_step == len(lines) and 1 <= len(lines) < STEPS
    assert_same(finish(begin()), whole[0])


class Hanging(ScriptedClient):
    """Does not answer for a later step's candidates until it is told to abort."""

    def __init__(self):
        super().__init__()
        self.hangs, self.asked, self.aborted = False, threading.Event(), threading.Event()

    def abort(self):
        self.aborted.set()

    def evaluate(self, *arguments, **options):
        if self.hangs:
            self.asked.set()
            assert self.aborted.wait(LIMIT_S)
            raise SandboxUnavailable("the call was given up")
        return super().evaluate(*arguments, **options)


@pytest.mark.parametrize("error", [FloatingPointError("the gradient is not finite"), KeyboardInterrupt()])
def test_an_error_of_the_learner_ends_what_waits_for_the_judge(whole, begin, monkeypatch, error):
    wanted, client, update, updates = whole[0], Hanging(), Updater.update, []

    def fails(*arguments, **options):
        updates.append(None)
        if len(updates) == 2:
            assert client.asked.wait(LIMIT_S), "the next step's candidates are being judged meanwhile"
            raise error
        return update(*arguments, **options)

    def ready(*arguments, **options):
        client.hangs = options["step"] == 2  # the rollouts that are made beside the second update
        return collect(*arguments, **options)

    collect, workdir = rl_phase.collect, begin()
    monkeypatch.setattr(Updater, "update", fails)
    monkeypatch.setattr(rl_phase, "collect", ready)
    began = time.monotonic()
    with pytest.raises(BadBatch if isinstance(error, FloatingPointError) else KeyboardInterrupt):
        finish(workdir, client)
    assert client.aborted.is_set() and time.monotonic() - began < LIMIT_S
    monkeypatch.undo()
    assert_same(finish(workdir), wanted)
