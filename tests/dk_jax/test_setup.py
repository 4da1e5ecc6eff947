"""What a config may say, and what is built from it."""

from __future__ import annotations

import pytest

from configs.demo import get_config as demo
from configs.smollm2_triton import get_config as smollm2
from dk_jax.train import setup


@pytest.mark.parametrize("get_config", [demo, smollm2])
def test_rl_trains_on_training_and_some_generated_tasks_and_never_on_held_out_ones(get_config):
    cfg = get_config()
    cfg.tasks.generated, cfg.tasks.rl_generated, cfg.tasks.rl_fresh = 60, 10, 20
    tasks = setup.load_tasks(cfg)
    held_out = {t.name for t in tasks.held_out} | {t.family for t in tasks.held_out}
    assert len(tasks.rl) == len(tasks.train) + 10 + len(tasks.fresh) and 10 <= len(tasks.fresh) <= 20
    assert not held_out & ({t.name for t in tasks.rl} | {t.family for t in tasks.rl})
    structures = {t.spec.structure for t in tasks.held_out}
    assert not structures & {t.spec.structure for t in (*tasks.train, *tasks.generated, *tasks.fresh)}


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


@pytest.mark.parametrize("check_size", ["", "light"])
def test_fresh_tasks_are_of_the_timed_size_and_none_of_the_cold_starts(check_size):
    cfg = demo()
    cfg.tasks.update(dict(generated=300, full_size=40, rl_generated=0, rl_fresh=50, check_size=check_size))
    cfg.corpus.timed_tasks = 60
    tasks = setup.load_tasks(cfg)
    assert len(tasks.fresh) > 30 and {t.size for t in tasks.fresh} == {"cpu"} and {t.spec.kind for t in tasks.fresh} <= set(cfg.tasks.kinds)
    assert tasks.rl == tasks.train + tasks.fresh
    assert not {t.spec for t in tasks.fresh} & {t.spec for t in (*tasks.train, *tasks.generated)}
    assert len({t.name for t in tasks.all}) == len(tasks.all) == sum(
        map(len, (tasks.train, tasks.held_out, tasks.generated, tasks.fresh, tasks.checked))
    )
    cfg.tasks.rl_fresh = 20
    assert setup.load_tasks(cfg).fresh == tasks.fresh[: len(setup.load_tasks(cfg).fresh)]


def test_tasks_that_rl_only_checks_are_small_and_new():
    cfg = demo()
    cfg.tasks.update(dict(generated=300, full_size=40, rl_fresh=50, rl_checked=60))
    cfg.corpus.timed_tasks = 60
    tasks = setup.load_tasks(cfg)
    assert len(tasks.checked) > 30 and {t.size for t in tasks.checked} == {"light"} and {t.spec.kind for t in tasks.checked} <= set(cfg.tasks.kinds)
    known = {t.reference for t in tasks.all} - {t.reference for t in tasks.checked}
    assert not known & {t.reference for t in tasks.checked} and not {t.name for t in tasks.checked} & {t.name for t in tasks.rl}
    assert len({t.name for t in tasks.all}) == len(tasks.all)
    cfg.tasks.rl_checked = 0
    without = setup.load_tasks(cfg)
    assert (without.generated, without.fresh, without.checked) == (tasks.generated, tasks.fresh, ())
    cfg.tasks.update(dict(rl_checked=60, check_size=""))
    large = setup.load_tasks(cfg)
    assert {t.size for t in large.checked} == {"cpu"} and len({t.name for t in large.all}) == len(large.all)


def test_a_step_wants_no_more_tasks_than_there_are():
    with pytest.raises(setup.ConfigError, match=r"rollout\.checked_tasks=8 but there are only 3"):
        setup.step_tasks(setup.load_tasks(demo()).train[:3], 0, count=8, seed=0, key="rollout.checked_tasks")


@pytest.mark.parametrize("get_config", [demo, smollm2])
def test_modules_that_rl_would_train_nothing_of_are_named(get_config):
    cfg = get_config()
    setup.check_modules(cfg)
    cfg.rl.only = ("mlp", "heads")
    setup.check_modules(cfg)
    cfg.rl.only = ("mlp", "mlps")
    with pytest.raises(setup.ConfigError, match=r"rl\.only=.*belongs to mlps: modules are .*attention"):
        setup.check_modules(cfg)
    cfg.rl.only = ("embed",)
    if cfg.model.train == "full":
        setup.check_modules(cfg)
    else:
        with pytest.raises(setup.ConfigError, match="belongs to embed"):
            setup.check_modules(cfg)


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


def test_tasks_beyond_those_that_are_timed_are_light_and_all_names_differ():
    cfg = demo()
    cfg.tasks.update(dict(generated=300, full_size=40, rl_generated=40, check_size="light"))
    cfg.corpus.timed_tasks = 60
    tasks = setup.load_tasks(cfg)
    assert [t.size for t in tasks.generated[:40]] == ["cpu"] * 40 and {t.size for t in tasks.generated[40:]} == {"light"}
    assert len({t.name for t in (*tasks.train, *tasks.generated)}) == len(tasks.train) + len(tasks.generated)
    assert all(t.size == "cpu" for t in tasks.rl)
    cfg.tasks.check_size = ""
    plain = setup.load_tasks(cfg).generated
    assert plain[:40] == tasks.generated[:40] and {t.size for t in plain} == {"cpu"}
    assert abs(len(plain) - len(tasks.generated)) < 20  # other kinds are left out of both lists


@pytest.mark.parametrize(("timed_tasks", "rl_generated"), [(0, 10), (400, 10), (60, 41)])
def test_light_tasks_are_never_timed(timed_tasks, rl_generated):
    cfg = demo()
    cfg.tasks.update(dict(generated=300, full_size=40, rl_generated=rl_generated, check_size="light"))
    cfg.corpus.timed_tasks = timed_tasks
    with pytest.raises(setup.ConfigError, match="tasks.full_size=40, but"):
        setup.load_tasks(cfg)
