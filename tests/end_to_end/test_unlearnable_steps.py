"""Steps that teach nothing: a reward that is no number ends the run with all of it kept, and a step without a token to learn from is
counted and passed by."""

from __future__ import annotations

import json
import logging
import math

import jax
import numpy as np
import pytest

from dk_jax.metrics import read_scalars
from dk_jax.train.state import Checkpoints
from sandbox.protocol import Reward
from tests.end_to_end.scripted import ScriptedClient, ScriptedRun, tiny_config


class NoNumber(ScriptedClient):
    """Gives the first timed candidate of the second RL step a reward of NaN."""

    def __init__(self, workdir):
        super().__init__()
        self.workdir, self.broken = workdir, 0

    def _result(self, task, candidate, options=None):
        result = super()._result(task, candidate, options)
        second = (self.workdir / "rollouts" / "step_00001.jsonl").exists()
        if second and result.timing is not None and not self.broken:
            self.broken += 1
            result = result.model_copy(update={"reward": Reward(total=math.nan)})
        return result


def config(steps: int, **rl):
    cfg = tiny_config()
    cfg.sft.steps = 0
    cfg.rl.update(dict(steps=steps, decay=False, **rl))
    return cfg


def learn(workdir, client, cfg):
    """(parameters before RL, parameters after it)."""
    run = ScriptedRun(cfg, workdir, client)
    try:
        start = jax.tree.map(np.asarray, run.sft().trainable)
        return start, jax.tree.map(np.asarray, run.rl(run.sft().trainable).trainable)
    finally:
        run.close()


def assert_same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_reward_that_is_no_number_is_named_and_without_it_the_run_goes_on_as_if_it_had_not_been(tmp_path):
    _, wanted = learn(tmp_path / "sound", ScriptedClient(), config(2))
    workdir = tmp_path / "broken"
    with pytest.raises(FloatingPointError, match=r"reward of task '\w+', policy, scheme \d, rollout \d, turn \d, is nan at RL step 2"):
        learn(workdir, NoNumber(workdir), config(2))
    checkpoints = Checkpoints(workdir / "checkpoints" / "rl")
    assert checkpoints.latest_step == 1
    checkpoints.close()
    journal = workdir / "journal_rl.jsonl"
    lines = journal.read_text().splitlines()
    sound = [line for line in lines if not math.isnan(json.loads(line).get("verdict", {"reward": 0.0})["reward"])]
    assert len(lines) > len(sound) > 0
    journal.write_text("".join(line + "\n" for line in sound))
    assert_same(learn(workdir, ScriptedClient(), config(2))[1], wanted)


def test_a_step_without_a_token_to_learn_from_is_counted_and_changes_nothing(tmp_path, caplog):
    # The scripted sampler claims a log-prob of -1 for every token, which the trainer does not see.
    with caplog.at_level(logging.WARNING, logger="dk_jax"):
        start, end = learn(tmp_path, ScriptedClient(), config(2, mismatch_low=0.999, mismatch_high=1.001))
    assert_same(end, start)
    steps = read_scalars(tmp_path / "metrics.jsonl", "rl")
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["dropped_mismatch_policy"] > 0 and line["mismatch_rejected_policy"] == 1.0 and line["mismatch_gap_policy"] > 0.5
        assert "grad_norm" not in line and line["sequences_policy"] == 0.0
    said = [record.getMessage() for record in caplog.records if "nothing to learn" in record.getMessage()]
    assert len(said) == 2 and "rl.mismatch_low" in said[0]
