"""What a recipe may say of rewards, advantages, filters and losses, looked at before anything is computed."""

from __future__ import annotations

import pytest

from configs.demo import get_config
from dk_jax.train import setup
from dk_jax.train.checks import check_config


def changed(changes: dict[str, object]):
    c = get_config()
    for key, value in changes.items():
        group, name = key.split(".")
        c[group][name] = value
    return c


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rl.advantage": "gae"}, r"rl\.advantage is 'gae': use one of 'leave_one_out', 'group_mean', 'all_turns'"),
        ({"rl.aggregate": "mean"}, r"rl\.aggregate is 'mean': use one of 'sequence_sum', 'token_mean', 'constant_length'"),
        ({"rollout.selections": 0, "rollout.rollouts": 1}, r"rollout\.selections=0 and rollout\.rollouts=1 make groups of one"),
        ({"rollout.selections": 0, "rollout.rollouts": 1, "rl.advantage": "group_mean"}, "'group_mean' can compare with nothing"),
        ({"rollout.selections": 0, "rollout.rollouts": 1, "rl.advantage": "all_turns", "rollout.turns": 1}, "groups of one"),
        ({"rollout.selections": -1}, r"rollout\.selections=-1"),
        ({"rollout.format_penalty": -0.5}, r"rollout\.format_penalty=-0\.5"),
        ({"rl.gamma": 1.2}, r"rl\.gamma is 1\.2"),
        ({"rl.clip_low": 1.0}, r"rl\.clip_low is 1\.0"),
        ({"rl.clip_high": -0.1}, r"rl\.clip_high is -0\.1"),
        ({"rl.dual_clip": 1.0}, r"rl\.dual_clip is 1\.0"),
        ({"rl.loss_scale": 0.0}, r"rl\.loss_scale is 0\.0"),
        ({"rl.min_group_std": -1.0}, r"rl\.min_group_std is -1\.0"),
        ({"rl.std_floor": -1.0}, r"rl\.std_floor is -1\.0"),
        ({"rl.profiling_low": 1.0}, r"rl\.profiling_low is 1\.0"),
        ({"rl.profiling_width": 0.0}, r"rl\.profiling_width is 0\.0"),
        ({"rl.mismatch_low": 1.1}, r"rl\.mismatch_low is 1\.1"),
        ({"rl.mismatch_high": 0.9}, r"rl\.mismatch_high is 0\.9"),
        ({"rl.mismatch_veto": 1.0}, r"rl\.mismatch_veto is 1\.0"),
        ({"rl.gamma": float("nan")}, r"rl\.gamma is nan"),
        ({"reward.kind": "milestones"}, r"sandbox or reward: .*'torch\.compile'"),
        ({"reward.kind": "points"}, r"sandbox or reward: .*kind.*'points'"),
    ],
)
def test_what_cannot_work_is_named(changes, said):
    with pytest.raises(setup.ConfigError, match=said):
        check_config(changed(changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rl.advantage": "all_turns", "rl.aggregate": "constant_length", "rl.gamma": 0.4},
        {"rollout.selections": 0, "rollout.rollouts": 1, "rl.advantage": "all_turns"},
        {"rl.mismatch_low": 0.999, "rl.mismatch_high": 1.001, "rl.mismatch_veto": 1e-4},
        {"reward.kind": "milestones", "sandbox.baselines": ("eager", "torch.compile")},
    ],
)
def test_what_works_passes(changes):
    check_config(changed(changes))


def test_the_credit_is_what_the_recipe_says():
    c = changed({"rl.advantage": "group_mean", "rl.aggregate": "token_mean", "rollout.turns": 4, "skills.alpha": 1.5})
    found = setup.credit_config(c)
    assert (found.advantage, found.aggregate, found.turns, found.alpha, found.worst) == ("group_mean", "token_mean", 4, 1.5, 0.0)
    c.reward.kind, c.sandbox.baselines = "milestones", ("eager", "torch.compile")
    assert setup.credit_config(c).worst == setup.rollout_config(c).failure_reward == -1.0
    assert setup.sandbox_options(c).baselines == ["eager", "torch.compile"] and setup.sandbox_options(c).reward.kind == "milestones"
