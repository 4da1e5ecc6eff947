"""Looks at all of a recipe that can be wrong before anything is computed or remembered of it.

A workdir remembers the config that it was started with and refuses others. So what a run would notice only after hours, at its
first RL step, has to be noticed here, where the recipe can still be corrected.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ml_collections import ConfigDict
from pydantic import ValidationError

from dk_jax import distributed
from dk_jax.models.config import AGENTS
from dk_jax.models.presets import PRESETS
from dk_jax.rl.advantages import ESTIMATORS
from dk_jax.rl.losses import AGGREGATES
from dk_jax.search import strategy
from dk_jax.search.schemes import Halving
from dk_jax.sft.batches import seats
from dk_jax.train import model as models
from dk_jax.train import setup, updaters
from dk_jax.train.clean_samples import diversity_config
from dk_jax.train.setup import ConfigError, TaskSets
from sandbox.protocol import Candidate

POSITIVE = {
    "sft": ("batch", "microbatch", "checkpoint_every", "max_tokens"),
    "rl": ("steps", "epochs", "microbatch", "checkpoint_every", "keep_checkpoints"),
    "rollout": ("tasks", "rollouts", "turns", "max_rows", "max_policy_tokens", "max_selection_tokens", "max_summary_tokens"),
    "evaluation": ("samples", "turns"),
    "learner": ("streams", "length_step"),
    "tasks": ("held_out_every",),
    "sandbox": ("workers", "threads", "correctness_trials", "parallel_tasks"),
}
"""Numbers of which there must be at least one."""
CHOICES = {
    "rollout.selector": ("llm", "bm25"),
    "rollout.context": ("full", "kernels"),
    "skills.use": (True, False),
    "skills.statistic": ("differences", "ranks"),
    "skills.lifecycle.on": (True, False),
    "corpus.diversity.on": (True, False),
    "evaluation.inject": (True, False),
    "evaluation.untrained": (True, False),
    "sandbox.profile": ("", "ncu"),
    "rl.keep_best": ("", "reward", "correct", "correct_first_turn", "speedup", "fast_1", "fast_1.5", "compiled"),
}
"""Switches, and what they may be."""


def check_config(cfg: ConfigDict) -> None:
    """Whether the numbers and names of a recipe make sense together, whatever its tasks.

    Raises:
        ConfigError: names the key, or the group of keys.
    """
    try:
        _check(cfg)
    except AttributeError as error:  # of a ConfigDict, which says what it has instead
        raise ConfigError(f"the recipe lacks a key that configs/demo.py has: {error}") from error


def _check(cfg: ConfigDict) -> None:
    if cfg.sft.steps < 0:
        raise ConfigError(f"sft.steps is {cfg.sft.steps}: give the steps of the cold start, or 0 for none")
    if cfg.sft.steps:
        setup.kernel_variants(cfg.sandbox.language)
    with _blaming("sandbox or reward"):
        setup.sandbox_options(cfg)
        Candidate(source="x", language=cfg.sandbox.language, form=cfg.sandbox.form)
    setup.rollout_config(cfg)
    setup.lifecycle_rules(cfg)
    _check_credit(cfg)
    _check_model(cfg)
    for key, allowed in CHOICES.items():
        *groups, name = key.split(".")
        value = functools.reduce(lambda part, group: part[group], groups, cfg)[name]
        if value not in allowed:
            raise ConfigError(f"{key} is {value!r}: use one of {', '.join(map(repr, allowed))}")
    _check_staleness(cfg.rl.staleness)
    agents = cfg.rl.agents
    if isinstance(agents, str) or not agents or set(agents) - set(AGENTS):
        raise ConfigError(f"rl.agents is {agents!r}: name at least one of {', '.join(AGENTS)}, as a tuple")
    for group, names in POSITIVE.items():
        for name in names:
            if cfg[group][name] < 1:
                raise ConfigError(f"{group}.{name} is {cfg[group][name]}: it must be at least 1")
    if cfg.rl.max_grad_norm_spike and cfg.rl.max_grad_norm_spike <= 1.0:
        raise ConfigError(
            f"rl.max_grad_norm_spike is {cfg.rl.max_grad_norm_spike}: give a factor above 1 on the usual gradient norm, or 0 for no bound"
        )
    for group in ("sft", "rl"):
        with _blaming(f"{group}.optimizer"):
            updaters.optimizer(cfg[group], epochs=1 if group == "sft" else cfg.rl.epochs)
    with _blaming("sft.shares"):
        seats(cfg.sft.shares.to_dict(), cfg.sft.batch)
    for name in ("call_samples", "call_lessons"):
        if cfg.evaluation[name] < 0:
            raise ConfigError(f"evaluation.{name} is {cfg.evaluation[name]}: give how many, or 0 for none")
    if cfg.evaluation.call_samples:
        setup.kernel_variants(cfg.sandbox.language)
    _check_search(cfg)
    if cfg.tasks.rows < 0:
        raise ConfigError(f"tasks.rows is {cfg.tasks.rows}: give how many rows are read, or 0 for all")
    _check_sources(cfg)
    if not 0 <= cfg.sft.validation_share < 1:
        raise ConfigError(f"sft.validation_share is {cfg.sft.validation_share}: give a share of the tasks in [0, 1)")
    with _blaming("rollout"):
        setup.sampler_config(cfg, eos_id=0)


def _check_search(cfg: ConfigDict) -> None:
    """Whether evaluation.search goes with the rest of the recipe."""
    e, named = cfg.evaluation, f"evaluation.search.name={cfg.evaluation.search.name!r}"
    try:
        search = strategy.make(e.search)
    except ValueError as error:  # names the key
        raise ConfigError(str(error)) from error
    if isinstance(search.spend, Halving):
        if e.samples < search.spend.most:
            raise ConfigError(f"{named} has up to {search.spend.most} schemes a task: evaluation.samples={e.samples} are too few to try them all")
        if e.turns <= search.spend.first_turns:
            raise ConfigError(
                f"{named} has nothing left for the best schemes: evaluation.turns={e.turns} must be more than evaluation.search.first_turns"
            )
        if cfg.rollout.selector != "llm":
            raise ConfigError(f"{named} asks the selection agent: rollout.selector={cfg.rollout.selector!r} must be 'llm'")
    if (search.grow or isinstance(search.spend, Halving)) and not (e.inject and cfg.skills.use):
        what = "evaluation.search.grow=True" if search.grow else named
        raise ConfigError(f"{what} is for skills: evaluation.inject={e.inject} and skills.use={cfg.skills.use} must both be True")
    if search.grow and (e.turns < 2 or cfg.rollout.summaries < 1 or cfg.skills.max_triggers < 1):
        raise ConfigError(
            "evaluation.search.grow=True learns from samples that improve on themselves: evaluation.turns must be at least 2 (it is "
            f"{e.turns}), rollout.summaries ({cfg.rollout.summaries}) and skills.max_triggers ({cfg.skills.max_triggers}) at least 1"
        )


def _check_sources(cfg: ConfigDict) -> None:
    """Whether the cold start's files are there and of this recipe's kind: they would be read only after the corpus has been judged."""
    for name, maker in (("open_kernels", "scripts/open_kernels.py"), ("teacher", "scripts/teacher.py")):
        path = cfg.corpus[name]
        if path and not Path(path).is_file():
            raise ConfigError(f"corpus.{name} is {path!r}: there is no such file; {maker} writes one")
    for name in ("contaminated", "near_duplicates"):
        if not 0 <= cfg.corpus[name] <= 1:
            raise ConfigError(f"corpus.{name} is {cfg.corpus[name]}: give a similarity above 0 and at most 1, or 0 for off")
    with _blaming("corpus.diversity"):
        diversity_config(cfg)
    if cfg.corpus.open_kernels and (cfg.sandbox.language, cfg.sandbox.form) != ("triton", "module"):
        raise ConfigError(
            f"corpus.open_kernels holds Triton modules, but sandbox.language={cfg.sandbox.language!r} and sandbox.form={cfg.sandbox.form!r}"
        )
    if cfg.corpus.teacher and cfg.style != "chat":
        raise ConfigError(f"corpus.teacher holds conversations in chat style, but style={cfg.style!r}")


def _check_staleness(staleness: object) -> None:
    if isinstance(staleness, bool) or staleness not in (0, 1):
        raise ConfigError(
            f"rl.staleness is {staleness!r}: use 0 (a step's rollouts are made with the parameters that then learn from them) or 1 (they are "
            "made while the step before is learned from)"
        )
    if staleness and distributed.several():
        raise ConfigError(
            "rl.staleness=1 with several processes: two threads of each would give the devices their programs in orders of their own, and "
            "the processes would wait for each other for ever. Use rl.staleness=0, or one process"
        )


def _check_credit(cfg: ConfigDict) -> None:
    """Whether the numbers of rewards, advantages, filters and losses can work: they would be looked at in the first RL step only."""
    c, r = cfg.rl, cfg.rollout
    for key, value, allowed in (("advantage", c.advantage, ESTIMATORS), ("aggregate", c.aggregate, AGGREGATES)):
        if value not in allowed:
            raise ConfigError(f"rl.{key} is {value!r}: use one of {', '.join(map(repr, allowed))}")
    if r.selections < 0 or r.format_penalty < 0:
        raise ConfigError(f"rollout.selections={r.selections} and rollout.format_penalty={r.format_penalty} must not be negative")
    if (r.selections + 1) * r.rollouts == 1 and not (c.advantage == "all_turns" and r.turns > 1):
        raise ConfigError(
            f"rollout.selections=0 and rollout.rollouts=1 make groups of one rollout, which rl.advantage={c.advantage!r} can compare with "
            "nothing: every advantage would be 0. Raise rollout.rollouts"
        )
    wanted = (
        ("gamma", 0 <= c.gamma <= 1, "a discount per turn lies in [0, 1]"),
        ("clip_low", 0 <= c.clip_low < 1, "the ratio's lower bound is 1 - clip_low, so it lies in [0, 1)"),
        ("clip_high", c.clip_high >= 0, "the ratio's upper bound is 1 + clip_high, so it is at least 0"),
        ("dual_clip", c.dual_clip > 1, "the loss of a token is bounded by dual_clip * |A|, so it is above 1"),
        ("loss_scale", c.loss_scale > 0, "token losses are divided by it, so it is above 0"),
        ("min_group_std", c.min_group_std >= 0, "it is a deviation, so at least 0"),
        ("std_floor", c.std_floor >= 0, "it is a deviation, so at least 0"),
        ("profiling_low", 0 <= c.profiling_low < 1, "it is a share of device time in [0, 1)"),
        ("profiling_width", c.profiling_width > 0, "turns are thinned out over such a width, so it is above 0"),
        ("mismatch_low", 0 <= c.mismatch_low <= 1, "it bounds a ratio that is 1 without mismatch from below: give one in [0, 1]"),
        ("mismatch_high", c.mismatch_high == 0 or c.mismatch_high >= 1, "it bounds that ratio from above: at least 1, or 0 for no bound"),
        ("mismatch_veto", 0 <= c.mismatch_veto < 1, "it bounds a token's ratio from below: give one in [0, 1), 0 for no veto"),
    )
    for key, fits, why in wanted:
        if not fits:
            raise ConfigError(f"rl.{key} is {c[key]}: {why}")


def check_tasks(cfg: ConfigDict, tasks: TaskSets) -> None:
    """Whether there are as many tasks as a step takes, and some to evaluate on. Raises ConfigError."""
    setup.need_both_splits(tasks)
    setup.step_tasks(tasks.rl, 0, count=cfg.rollout.tasks, seed=cfg.seed)
    if cfg.rollout.checked_tasks:
        setup.step_tasks(tasks.checked, 0, count=cfg.rollout.checked_tasks, seed=cfg.seed, key="rollout.checked_tasks")


def _check_model(cfg: ConfigDict) -> None:
    m, named = cfg.model, cfg.model.init in PRESETS or cfg.model.init == "huggingface"
    if m.init not in ("scratch", "smollm2") and not named:
        raise ConfigError(f"model.init is {m.init!r}: use 'scratch', 'smollm2', 'huggingface' or one of {', '.join(PRESETS)}")
    if cfg.codec.kind != "train" and not (cfg.codec.kind == "model" and (named or m.init == "smollm2")):
        raise ConfigError(
            f"codec.kind={cfg.codec.kind!r} with model.init={m.init!r}: use 'train', or 'model' where the weights bring a tokenizer"
        )
    if cfg.codec.kind == "train" and cfg.codec.vocab_size < 256:
        raise ConfigError(f"codec.vocab_size is {cfg.codec.vocab_size}: a codec has a token for each byte, so at least 256")
    with _blaming("model"):
        if m.init == "scratch":
            models.scratch_config(m, max(cfg.codec.vocab_size, 1))
        elif m.init in PRESETS:
            models.named_config(m)
        models.check_modules(cfg)


@contextmanager
def _blaming(keys: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{keys}: {'.'.join(map(str, first['loc']))}: {first['msg']} (it is {first['input']!r})") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{keys}: {error}") from error
