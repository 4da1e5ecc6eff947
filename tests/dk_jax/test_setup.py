"""What a config may say, and what is built from it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from configs.demo import get_config as demo
from configs.smollm2_triton import get_config as smollm2
from dk_jax.tasks.builtin import builtin_suite
from dk_jax.train import model as models
from dk_jax.train import setup
from dk_jax.train.admission import FILE, admitted
from dk_jax.train.checks import check_config, check_tasks
from dk_jax.train.cold_start import ColdStartData
from sandbox.protocol import Admission, Capabilities, CounterSupport, LanguageSupport


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
    models.check_modules(cfg)
    cfg.rl.only = ("mlp", "heads")
    models.check_modules(cfg)
    cfg.rl.only = ("mlp", "mlps")
    with pytest.raises(setup.ConfigError, match=r"rl\.only=.*belongs to mlps: modules are .*attention"):
        models.check_modules(cfg)
    cfg.rl.only = ("embed",)
    if cfg.model.train == "full":
        models.check_modules(cfg)
    else:
        with pytest.raises(setup.ConfigError, match="belongs to embed"):
            models.check_modules(cfg)


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


@pytest.fixture
def kernelbench(tmp_path):
    """A recipe for Triton whose tasks are a directory of nine KernelBench files."""
    (tmp_path / "level1").mkdir()
    reference = builtin_suite().get("softmax_wide").reference
    for number in range(9):
        (tmp_path / "level1" / f"{number}_Softmax{number}.py").write_text(f"# {number}\n{reference}")
    cfg = smollm2()
    cfg.tasks.update(dict(source="kernelbench", directory=str(tmp_path), levels=(1,), generated=30))
    return cfg


def test_a_directory_of_files_is_split_by_family_and_the_cold_start_writes_for_generated_tasks(kernelbench, tmp_path):
    tasks = setup.load_tasks(kernelbench)
    assert [t.name for t in tasks.held_out] == ["level1_3_Softmax3", "level1_7_Softmax7"] and len(tasks.train) == 7
    assert tasks.rl == tasks.train and all(t.spec is None and t.size == "gpu" for t in tasks.rl)
    assert setup.load_tasks(kernelbench) == tasks
    data = ColdStartData(kernelbench, tasks, tmp_path / "corpus.jsonl")
    chosen = data._chosen(data._trained)
    assert {c.task.name for c in chosen} == {t.name for t in tasks.generated} and any(c.timed for c in chosen)
    assert tasks.siblings(tasks.train[0]) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(generated=0), "tasks.generated is 0"),
        (dict(levels=(1, 2)), "level2: no task files"),
        (dict(kinds=("maps",)), r"tasks.kinds names \['maps'\]"),
    ],
)
def test_what_a_directory_lacks_is_named(kernelbench, changes, message):
    kernelbench.tasks.update(changes)
    with pytest.raises(ValueError, match=message):
        setup.load_tasks(kernelbench)


def test_bare_kernels_are_not_written_for_files(kernelbench):
    kernelbench.sandbox.form = "kernel"
    with pytest.raises(setup.ConfigError, match="Use sandbox.form='module'"):
        setup.load_tasks(kernelbench)


class Refusing:
    """A judge that refuses the tasks whose names contain one of `words`; counts those it is shown."""

    def __init__(self, *words):
        self.words, self.shown, self.limits = words, 0, {}

    def examinations(self, tasks, found):
        self.shown += len(tasks)
        for t in tasks:
            found(t, Admission(problem="zeros would pass" if any(word in t.name for word in self.words) else ""))


def test_files_that_the_sandbox_refuses_are_left_out_and_asked_about_once(kernelbench, tmp_path, caplog):
    tasks, path = setup.load_tasks(kernelbench), tmp_path / FILE
    judge = Refusing("Softmax3", "Softmax5")
    found = admitted(tasks, judge, path)
    assert [t.name for t in found.held_out] == ["level1_7_Softmax7"] and len(found.train) == 6 and judge.shown == 9
    assert found.generated == tasks.generated
    assert "level1_5_Softmax5 is left out, the sandbox refuses it: zeros would pass" in caplog.text
    assert admitted(tasks, Refusing(), path) == found
    changed = dataclasses.replace(tasks, held_out=tuple(dataclasses.replace(t, reference=t.reference + "#") for t in tasks.held_out))
    again = Refusing()
    assert len(admitted(changed, again, path).held_out) == 2 and again.shown == 2


def test_no_task_left_is_an_error(kernelbench, tmp_path):
    with pytest.raises(setup.ConfigError, match="refuses 2, which leaves 7 training and 0 held-out tasks; the first is .*zeros would pass"):
        admitted(setup.load_tasks(kernelbench), Refusing("Softmax3", "Softmax7"), tmp_path / FILE)


def test_a_recipe_that_lacks_a_key_is_told_which():
    cfg = demo()
    del cfg.rollout.cache_step
    with pytest.raises(setup.ConfigError, match="lacks a key that configs/demo.py has: .*cache_step"):
        check_config(cfg)


@pytest.mark.parametrize("get_config", [demo, smollm2])
def test_the_recipes_pass_their_checks(get_config):
    cfg = get_config()
    check_config(cfg)
    check_tasks(cfg, setup.load_tasks(cfg))


@pytest.mark.parametrize(
    ("device", "profile", "coverage", "asked"),
    [
        ("cuda:0", "", 0.5, True), ("cuda:0", "", 0.0, False), ("cuda:0", "ncu", 0.0, "ncu"), ("cpu", "ncu", 0.5, False),
    ],
)  # fmt: skip
def test_what_is_profiled_is_what_the_recipe_says_or_the_reward_needs(device, profile, coverage, asked):
    cfg = demo()
    cfg.sandbox.update(dict(device=device, profile=profile))
    cfg.reward.w_coverage = coverage
    assert setup.sandbox_options(cfg).profile == asked


@pytest.mark.parametrize("available", [True, False])
def test_counters_that_cannot_be_had_are_refused_at_the_start(monkeypatch, available):
    offered = Capabilities(
        devices=["cuda:0"], limits={}, kernel_form={},
        languages={"triton": LanguageSupport(available=True, forms=["module"], devices=["cuda:0"], timing=True)},
        counters=CounterSupport(available=available, problem="" if available else "the driver keeps them for administrators"),
    )  # fmt: skip
    monkeypatch.setattr(setup, "SandboxClient", lambda *args, **more: SimpleNamespace(capabilities=lambda: offered))
    cfg = smollm2()
    cfg.sandbox.update(dict(device="cuda:0", profile="ncu", language="triton", form="module"))
    if available:
        judge = setup.make_judge(cfg, "socket", None)
        assert judge.options.profile == "ncu" and judge.verify_options.profile is True
    else:
        with pytest.raises(setup.ConfigError, match="sandbox.profile is 'ncu': the driver keeps them .*profile= .in another workdir"):
            setup.make_judge(cfg, "socket", None)
