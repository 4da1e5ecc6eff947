"""What a config may say, and what is built from it."""

from __future__ import annotations

import pytest

from configs.demo import get_config as demo
from configs.smollm2_triton import get_config as smollm2
from dk_jax.train import setup


@pytest.mark.parametrize("get_config", [demo, smollm2])
def test_rl_trains_on_training_and_some_generated_tasks_and_never_on_held_out_ones(get_config):
    cfg = get_config()
    cfg.tasks.generated, cfg.tasks.rl_generated = 60, 10
    tasks = setup.load_tasks(cfg)
    held_out = {t.name for t in tasks.held_out} | {t.family for t in tasks.held_out}
    assert len(tasks.rl) == len(tasks.train) + 10
    assert not held_out & ({t.name for t in tasks.rl} | {t.family for t in tasks.rl})
    structures = {t.spec.structure for t in tasks.held_out}
    assert not structures & {t.spec.structure for t in (*tasks.train, *tasks.generated)}


def test_a_task_alone_in_its_family_has_siblings_of_its_kind():
    cfg = demo()
    cfg.tasks.generated = 60
    tasks = setup.load_tasks(cfg)
    generated = next(t for t in tasks.generated if t.spec.kind == "norm")
    siblings = tasks.siblings(generated)
    assert siblings and {t.spec.kind for t in siblings} == {"norm"} and not set(siblings) & set(tasks.held_out)
    known = tasks.train[0]
    assert {t.family for t in tasks.siblings(known)} == {known.family}
    assert known.name not in {t.name for t in tasks.siblings(known)}


def test_an_unknown_kind_is_named():
    cfg = demo()
    cfg.tasks.kinds = ("map", "quantum")
    with pytest.raises(setup.ConfigError, match=r"tasks\.kinds names \['quantum'\]"):
        setup.load_tasks(cfg)


def test_a_policy_that_never_samples_is_refused():
    cfg = demo()
    cfg.rollout.temperature = 0.0
    with pytest.raises(setup.ConfigError, match="rollout.temperature is 0.0"):
        setup.rollout_config(cfg)
