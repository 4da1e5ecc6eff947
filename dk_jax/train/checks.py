"""Looks at all of a recipe that can be wrong before anything is computed or remembered of it.

A workdir remembers the config that it was started with and refuses others. So what a run would notice only after hours, at its
first RL step, has to be noticed here, where the recipe can still be corrected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ml_collections import ConfigDict
from pydantic import ValidationError

from dk_jax.models.config import AGENTS
from dk_jax.sft.batches import seats
from dk_jax.train import setup, updaters
from dk_jax.train.setup import ConfigError, TaskSets
from sandbox.protocol import Candidate

POSITIVE = {
    "sft": ("batch", "microbatch", "checkpoint_every", "max_tokens"),
    "rl": ("steps", "epochs", "microbatch", "checkpoint_every"),
    "rollout": ("tasks", "rollouts", "turns", "max_rows", "max_policy_tokens", "max_selection_tokens", "max_summary_tokens"),
    "evaluation": ("samples", "turns"),
    "learner": ("streams", "length_step"),
    "sandbox": ("workers", "threads", "correctness_trials", "parallel_tasks"),
}
"""Numbers of which there must be at least one."""
CHOICES = {
    "rollout.selector": ("llm", "bm25"),
    "rollout.context": ("full", "kernels"),
    "skills.use": (True, False),
    "evaluation.inject": (True, False),
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
    setup.rollout_config(cfg)
    if cfg.sft.steps < 0:
        raise ConfigError(f"sft.steps is {cfg.sft.steps}: give the steps of the cold start, or 0 for none")
    if cfg.sft.steps:
        setup.kernel_variants(cfg.sandbox.language)
    with _blaming("sandbox or reward"):
        setup.sandbox_options(cfg)
        Candidate(source="x", language=cfg.sandbox.language, form=cfg.sandbox.form)
    _check_model(cfg)
    for key, allowed in CHOICES.items():
        group, name = key.split(".")
        if cfg[group][name] not in allowed:
            raise ConfigError(f"{key} is {cfg[group][name]!r}: use one of {', '.join(map(repr, allowed))}")
    agents = cfg.rl.agents
    if isinstance(agents, str) or not agents or set(agents) - set(AGENTS):
        raise ConfigError(f"rl.agents is {agents!r}: name at least one of {', '.join(AGENTS)}, as a tuple")
    for group, names in POSITIVE.items():
        for name in names:
            if cfg[group][name] < 1:
                raise ConfigError(f"{group}.{name} is {cfg[group][name]}: it must be at least 1")
    for group in ("sft", "rl"):
        with _blaming(f"{group}.optimizer"):
            updaters.optimizer(cfg[group], epochs=1 if group == "sft" else cfg.rl.epochs)
    with _blaming("sft.shares"):
        seats(cfg.sft.shares.to_dict(), cfg.sft.batch)
    with _blaming("rollout"):
        setup.sampler_config(cfg, eos_id=0)


def check_tasks(cfg: ConfigDict, tasks: TaskSets) -> None:
    """Whether there are as many tasks as a step takes. Raises ConfigError."""
    setup.step_tasks(tasks.rl, 0, count=cfg.rollout.tasks, seed=cfg.seed)
    if cfg.rollout.checked_tasks:
        setup.step_tasks(tasks.checked, 0, count=cfg.rollout.checked_tasks, seed=cfg.seed, key="rollout.checked_tasks")


def _check_model(cfg: ConfigDict) -> None:
    if cfg.model.init not in ("scratch", "smollm2"):
        raise ConfigError(f"model.init is {cfg.model.init!r}: use 'scratch' or 'smollm2'")
    if (cfg.codec.kind, cfg.model.init) not in (("train", "scratch"), ("train", "smollm2"), ("model", "smollm2")):
        raise ConfigError(f"codec.kind={cfg.codec.kind!r} with model.init={cfg.model.init!r}: use 'train', or 'model' with 'smollm2'")
    if cfg.codec.kind == "train" and cfg.codec.vocab_size < 256:
        raise ConfigError(f"codec.vocab_size is {cfg.codec.vocab_size}: a codec has a token for each byte, so at least 256")
    with _blaming("model"):
        if cfg.model.init == "scratch":
            setup.scratch_config(cfg.model, max(cfg.codec.vocab_size, 1))
        setup.check_modules(cfg)


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
