"""Builds the parts of a run from its config: tasks, judge, sizes of rollouts and sampling (the model: dk_jax.train.model). Only names
and numbers are read here."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from ml_collections import ConfigDict

from dk_jax.generation.sampler import SamplerConfig
from dk_jax.rollout.episode import RolloutConfig
from dk_jax.rollout.judge import Journal, SandboxJudge
from dk_jax.rollout.trajectory import derive_seed
from dk_jax.sft.corpus import Variant
from dk_jax.skills.lifecycle import LifecycleRules
from dk_jax.tasks.builtin import builtin_suite
from dk_jax.tasks.generate import generate_tasks
from dk_jax.tasks.kernelbench import split_by_family
from dk_jax.tasks.learnable import learnable_tasks, reserved
from dk_jax.tasks.records import Fields, Records
from dk_jax.tasks.sources import SOURCES, load_source
from dk_jax.tasks.task import Task
from dk_jax.train.credit import CreditConfig
from sandbox.client import SandboxClient
from sandbox.protocol import Options, RewardSpec

log = logging.getLogger(__name__)
_TOLD_ROWS = 10


class ConfigError(ValueError):
    """A config that can't work; the message names the key."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSets:
    """Tasks of a run: the cold start trains on `train` and `generated`, RL on `train`, the first `rl_generated` of `generated`, and
    `fresh`, which the cold start has not seen, and for correctness alone on `checked`, which it has not seen either; evaluation
    is on `held_out`.
    """

    train: tuple[Task, ...]
    held_out: tuple[Task, ...]
    generated: tuple[Task, ...]
    rl_generated: int = 0
    fresh: tuple[Task, ...] = ()
    checked: tuple[Task, ...] = ()

    @property
    def rl(self) -> tuple[Task, ...]:
        """Tasks of the RL phase whose kernels are timed."""
        return self.train + self.generated[: self.rl_generated] + self.fresh

    @property
    def all(self) -> tuple[Task, ...]:
        """Every task of the run, each once."""
        return self.train + self.held_out + self.generated + self.fresh + self.checked

    def siblings(self, task: Task) -> tuple[Task, ...]:
        """Other training tasks of the same family or, for a task alone in its family, of the same kind."""
        others = [t for t in self.train if t.name != task.name]
        family = tuple(t for t in others if t.family == task.family)
        return family or tuple(t for t in others if task.spec is not None and t.spec is not None and t.spec.kind == task.spec.kind)


def load_tasks(cfg: ConfigDict, read: Records | None = None) -> TaskSets:
    """Tasks by config: `builtin`; `learnable`, whose generated tasks hold nothing of the held-out ones; or from files (`read_source`), which
    RL and evaluation use; the cold start then has the generated tasks alone, since it can write kernels for no others. `read`: what
    `read_source` gives, where that was called already."""
    levels = set(cfg.tasks.levels)
    kinds = set(cfg.tasks.kinds)
    learnable = cfg.tasks.source == "learnable"
    known = learnable_tasks(cfg.tasks.size) if learnable else builtin_suite(cfg.tasks.size).tasks
    if unknown := kinds - {t.spec.kind for t in known}:
        raise ConfigError(f"tasks.kinds names {sorted(unknown)}: there are {sorted({t.spec.kind for t in known})}")
    if cfg.tasks.source in ("builtin", "learnable"):
        tasks = [t for t in known if t.level in levels and (not kinds or t.spec.kind in kinds)]
    else:
        found = read or read_source(cfg)
        if cfg.sft.steps and not cfg.tasks.generated:
            raise ConfigError(f"tasks.generated is 0 with tasks.source={cfg.tasks.source!r}: the cold start has no task to write kernels for")
        for row in found.bad[:_TOLD_ROWS]:
            log.warning("no task: %s", row)
        if found.bad or found.merged:
            log.warning("%s: %s", cfg.tasks.directory, found.summary)
        tasks = split_by_family(found.tasks, cfg.tasks.held_out_every)
    generated, fresh, checked = _generated(cfg.seed, cfg.tasks, kinds)
    if learnable:
        generated, fresh, checked = ([t for t in made if not reserved(t.spec)] for made in (generated, fresh, checked))
    train = tuple(t for t in tasks if t.split == "train")
    held_out = tuple(t for t in tasks if t.split == "held_out")
    if not train and not held_out:
        raise ConfigError(f"tasks.levels={tuple(sorted(levels))} leaves no task at all")
    if generated and cfg.tasks.check_size:
        first = sum(t.spec is not None for t in train)  # these come first in the corpus
        timed = max(cfg.tasks.rl_generated, (cfg.corpus.timed_tasks or first + len(generated)) - first)
        if timed > cfg.tasks.full_size:
            raise ConfigError(
                f"tasks.full_size={cfg.tasks.full_size}, but RL or the corpus (corpus.timed_tasks, tasks.rl_generated) times {timed} "
                "generated tasks: raise it, or set tasks.check_size=''"
            )
    return TaskSets(
        train=train,
        held_out=held_out,
        generated=tuple(generated),
        rl_generated=cfg.tasks.rl_generated,
        fresh=tuple(fresh),
        checked=tuple(checked),
    )


def read_source(cfg: ConfigDict) -> Records:
    """Tasks of files, not split yet: `kernelbench` (a checkout), `modules` (a directory of the user's own), `records` (.jsonl or .parquet).

    Raises:
        ConfigError: of a key. TaskFileError: of the files.
    """
    c = cfg.tasks
    if c.source not in SOURCES:
        raise ConfigError(f"tasks.source is {c.source!r}: use 'builtin', 'learnable', {', '.join(map(repr, SOURCES))}")
    if cfg.sandbox.form == "kernel":
        raise ConfigError(
            f"sandbox.form='kernel' with tasks.source={c.source!r}: which tensors such a kernel gets is known of built-in tasks alone. Use "
            "sandbox.form='module'."
        )
    fields = Fields(**{name: tuple(paths) for name, paths in c.fields.to_dict().items() if paths})
    return load_source(c.source, c.directory, levels=set(c.levels), size=c.size, fields=fields, rows=c.rows)


def need_both_splits(tasks: TaskSets) -> None:
    """Raises ConfigError where there is nothing to train on, or nothing to evaluate on."""
    if not tasks.train or not tasks.held_out:
        raise ConfigError(
            f"tasks.levels and tasks.source leave {len(tasks.train)} training and {len(tasks.held_out)} held-out tasks: both must be > 0. Of "
            "tasks from files every tasks.held_out_every-th family by name is held out"
        )


def _generated(seed: int, c: ConfigDict, kinds: Collection[str]) -> tuple[list[Task], list[Task], list[Task]]:
    """`generated` tasks of `generated_size`, less those of other kinds, all but the first `full_size` of the size `check_size`; and
    `rl_fresh` more of `generated_size`, and `rl_checked` more of `check_size`, likewise. Without a `check_size` all are of
    `generated_size`."""

    def of_kinds(tasks: Sequence[Task]) -> list[Task]:
        return [t for t in tasks if not kinds or t.spec.kind in kinds]

    new = c.generated + c.rl_fresh  # where the checked ones begin
    made = generate_tasks(seed, new + (0 if c.check_size else c.rl_checked), c.generated_size)
    generated, fresh = of_kinds(made[: c.generated]), of_kinds(made[c.generated : new])
    if not c.check_size:
        return generated, fresh, of_kinds(made[new:])
    first = generated[: c.full_size]
    small = [
        dataclasses.replace(t, name=f"{t.name}_{c.check_size}") for t in generate_tasks(seed, new + c.rl_checked, c.check_size)
    ]
    return first + of_kinds(small[: c.generated])[len(first) :], fresh, of_kinds(small[new:])


def step_tasks(tasks: Sequence[Task], step: int, *, count: int, seed: int, key: str = "rollout.tasks") -> list[Task]:
    """The tasks of a step: `count` next ones in an endless sequence of shuffled epochs, distinct within the step."""
    if count > len(tasks):
        raise ConfigError(f"{key}={count} but there are only {len(tasks)} training tasks for it")
    per_epoch = len(tasks) // count
    epoch, offset = divmod(step, per_epoch)
    order = sorted(range(len(tasks)), key=lambda i: derive_seed(seed, "epoch", epoch, tasks[i].name))
    return [tasks[i] for i in order[offset * count : (offset + 1) * count]]


def kernel_variants(language: str) -> tuple[Callable[[Task], Sequence[Variant]], Callable[[], Sequence[Any]]]:
    """The cold start's kernel generator and skill topics of a language."""
    if language == "cpp":
        from dk_jax.sft.cpp_kernels import cpp_variants
        from dk_jax.sft.skill_topics import skill_catalogue

        return cpp_variants, skill_catalogue
    if language == "triton":
        from dk_jax.sft.triton_kernels import triton_variants
        from dk_jax.sft.triton_topics import triton_catalogue

        return triton_variants, triton_catalogue
    raise ConfigError(f"sandbox.language is {language!r}: the cold start can write 'cpp' and 'triton' kernels")


def _profile(cfg: ConfigDict) -> bool | Literal["ncu"]:
    """What `sandbox.profile` and the reward ask for; a CPU has no profiler."""
    if cfg.sandbox.device == "cpu":
        return False
    return "ncu" if cfg.sandbox.profile == "ncu" else cfg.reward.w_coverage > 0


def sandbox_options(cfg: ConfigDict) -> Options:
    """What evaluations of the run ask for. Raises ValidationError, naming the option."""
    s = cfg.sandbox
    return Options(
        correctness_trials=s.correctness_trials,
        timing=s.timing,
        profile=_profile(cfg),
        target_arch=s.target_arch or None if s.device == "cpu" else None,
        baselines=list(s.baselines),
        reward=RewardSpec(**cfg.reward.to_dict()),
        build_s=s.build_s,
        load_s=s.load_s,
        check_s=s.check_s,
        time_s=s.time_s,
    )


def make_judge(cfg: ConfigDict, socket: str, journal: Journal | None) -> SandboxJudge:
    """A judge on a running sandbox. Raises ConfigError where that sandbox can't judge this config's language or count what it asks for."""
    s = cfg.sandbox
    options = sandbox_options(cfg)
    client = SandboxClient(socket, retry_for_s=s.retry_for_s)
    offered = client.capabilities()
    support = offered.languages.get(s.language)
    if support is None or not support.available or s.form not in support.forms:
        problem = support.problem if support is not None and support.problem else f"no form {s.form!r}"
        raise ConfigError(f"the sandbox can't judge language {s.language!r}, form {s.form!r}: {problem}")
    if options.profile == "ncu" and not offered.counters.available:
        raise ConfigError(f"sandbox.profile is 'ncu': {offered.counters.problem}; --config.sandbox.profile= (in another workdir) does without")
    return SandboxJudge(
        client=client,
        device=s.device,
        language=s.language,
        form=s.form,
        options=options,
        verify_options=options.model_copy(update={"profile": bool(options.profile)}),  # which look at speeds alone
        journal=journal,
        max_parallel=s.parallel_tasks,
        retry_for_s=s.retry_for_s,
    )


def rollout_config(cfg: ConfigDict) -> RolloutConfig:
    r = cfg.rollout
    if not r.temperature > 0:
        raise ConfigError(f"rollout.temperature is {r.temperature}: RL learns from samples, which need a temperature above 0")
    return RolloutConfig(
        selections=r.selections,
        rollouts=r.rollouts,
        turns=r.turns,
        summaries=r.summaries,
        style=cfg.style,
        language=cfg.sandbox.language,
        form=cfg.sandbox.form,
        max_policy_tokens=r.max_policy_tokens,
        max_selection_tokens=r.max_selection_tokens,
        max_summary_tokens=r.max_summary_tokens,
        max_context_tokens=r.max_context_tokens,
        headers=r.headers,
        max_skills=r.max_skills,
        format_penalty=r.format_penalty,
        alpha=cfg.skills.alpha,
        beta=cfg.skills.beta,
        max_triggers=cfg.skills.max_triggers,
        selector=r.selector,
        context=r.context,
        use_skills=cfg.skills.use,
        failure_reward=RewardSpec(**cfg.reward.to_dict()).failure,
    )


def sampler_config(cfg: ConfigDict, eos_id: int, share: int = 1) -> SamplerConfig:
    """Sizes of the run's sampler: all three agents share its compiled programs. `share`: parts that rows are spread over."""
    r = cfg.rollout
    chunks = tuple(n for n in (128, 256, 512) if n < r.max_context_tokens)
    return SamplerConfig(
        max_new_tokens=max(r.max_policy_tokens, r.max_selection_tokens, r.max_summary_tokens),
        eos_id=eos_id,
        max_length_tokens=r.max_context_tokens,
        cache_step=r.cache_step,
        prefill_tokens=r.prefill_tokens,
        batch_buckets=(*(n for n in (8, 32, 64, 128, 256) if 2 * n <= r.max_rows and n % share == 0), r.max_rows),
        chunks=chunks or (r.max_context_tokens,),
        streams=cfg.learner.streams,
    )


def lifecycle_rules(cfg: ConfigDict) -> LifecycleRules | None:
    """When the library's skills rest, come back and retire; None where all of them stay.

    Raises:
        ConfigError: a number out of its range.
    """
    fields = cfg.skills.lifecycle.to_dict()
    on = fields.pop("on")
    try:
        rules = LifecycleRules(**fields)
        return rules if on else None
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def credit_config(cfg: ConfigDict) -> CreditConfig:
    return CreditConfig(
        gamma=cfg.rl.gamma,
        min_group_std=cfg.rl.min_group_std,
        format_penalty=cfg.rollout.format_penalty,
        summary_cap=cfg.skills.summary_cap,
        weights=(cfg.rl.weight_selection, cfg.rl.weight_policy, cfg.rl.weight_summary),
        loss_scale=cfg.rl.loss_scale,
        profiling_low=cfg.rl.profiling_low,
        profiling_width=cfg.rl.profiling_width,
        std_floor=cfg.rl.std_floor,
        agents=tuple(cfg.rl.agents),
        advantage=cfg.rl.advantage,
        aggregate=cfg.rl.aggregate,
        worst=RewardSpec(**cfg.reward.to_dict()).failure,
        turns=cfg.rollout.turns,
        alpha=cfg.skills.alpha,
        beta=cfg.skills.beta,
    )
