"""Evaluates a policy on tasks that a sandbox judges: Fast_p over eager and other baselines, with intervals.

    python scripts/evaluate.py --config=configs/demo.py --workdir=evals/demo --policy=run:runs/demo --library=runs/demo
    python scripts/evaluate.py --config=configs/davinci_8b.py --workdir=evals/base --policy=hf:Qwen3-8B-Base --split=all
    python scripts/evaluate.py ... --policy=endpoint --base_url=https://host/v1 --model=NAME --price_in=0.5 --price_out=1.5 --budget=10
    python scripts/evaluate.py ... --policy=kernels:DIR      # somebody else's kernels (dk_jax.evaluation.kernel_folder)
    python scripts/evaluate.py ... --policy=expert           # the generators' own (also naive, wrong): the right answer is known
    python scripts/evaluate.py ... --config.evaluation.search.name=memory --config.evaluation.turns=16 --config.evaluation.samples=1
    python scripts/evaluate.py ... --library=runs/demo --chunk=4 --config.evaluation.search.grow=True    # and learns while it evaluates
    python scripts/evaluate.py --workdir=evals/demo --summary_only --against=evals/base

Samples, turns, temperature, top_p and how they are spent (`search`) are the recipe's `evaluation`, baselines its `sandbox.baselines`: Fast_p
over torch.compile needs --config.sandbox.baselines="('eager','torch.compile')". Interrupted, the same command goes on where it stopped:
nothing is judged twice and no answer paid for twice. In the workdir: results.jsonl (a line a task and sample), summary.json, settings.json
(what is evaluated; anything else is refused there), sessions.json, the journals, and with evaluation.search.grow the library, library.sqlite.
A sandbox is started as a child process unless --sandbox names the socket of a running one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import app, flags  # noqa: E402
from ml_collections import ConfigDict, config_flags  # noqa: E402

from dk_jax.command_line import carried_out, loaded_recipe, parse_flags, sandbox_socket, take_folder  # noqa: E402
from dk_jax.interop.endpoint_flags import BASE_URL, MODEL, PARALLEL, endpoint_config  # noqa: E402
from dk_jax.run_log import run_log  # noqa: E402

_CONFIG = config_flags.DEFINE_config_file("config", None, "Recipe: a file with get_config().", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the evaluation; made if absent, gone on with if not.")
_POLICY = flags.DEFINE_string("policy", None, "run:RUNDIR (also RUNDIR@best, @sft, @STEP), hf:DIR, endpoint, kernels:DIR, expert, naive or wrong.")
_SPLIT = flags.DEFINE_enum("split", "held_out", ["held_out", "train", "all"], "Which of the recipe's tasks.")
_ONLY = flags.DEFINE_list("only", [], "Only the tasks of these names.")
_LIBRARY = flags.DEFINE_string("library", "", "Skills on offer: a run's folder, a library (.sqlite), a .jsonl, a .md file or a folder of these.")
_CHUNK = flags.DEFINE_integer("chunk", 0, "Tasks sampled and judged together; 0 for as many as fill the sampler's rows.", lower_bound=0)
_SUMMARY_ONLY = flags.DEFINE_bool("summary_only", False, "Computes the summary of what is there anew, and evaluates nothing.")
_AGAINST = flags.DEFINE_string("against", "", "Folder of another evaluation: prints the differences to it.")
_RESAMPLES = flags.DEFINE_integer("resamples", 2000, "Of the bootstrap that gives intervals.", lower_bound=1)
_SANDBOX = flags.DEFINE_string("sandbox", "", "Socket of a running sandbox; by default one is started.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 0, "Longest answer of the endpoint, with its reasoning; 0 for the recipe's.", lower_bound=0)
_OWN_SAMPLING = flags.DEFINE_bool("own_sampling", False, "The endpoint's own temperature and top_p instead of the recipe's.")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}: flags look like --workdir=DIR or --config.seed=1")
    for flag in (_WORKDIR,) if _SUMMARY_ONLY.value else (_CONFIG, _WORKDIR, _POLICY):
        if flag.value is None:
            raise app.UsageError(f"--{flag.name} is missing; see --help for an example")

    def work() -> int:
        if _SUMMARY_ONLY.value:
            return _summarise(Path(_WORKDIR.value))
        cfg = loaded_recipe(_CONFIG)
        _prepare_jax(cfg)
        return _run(cfg, Path(_WORKDIR.value))

    return carried_out(work)


def _prepare_jax(cfg) -> None:
    """Must run before jax is imported: a model gets what the recipe leaves it of a shared GPU, and where none is computed the sandbox has all."""
    from dk_jax.evaluation.policies import MODELS, kind_of

    if kind_of(_POLICY.value)[0] not in MODELS:
        os.environ["JAX_PLATFORMS"] = "cpu"
    elif cfg.learner.memory_fraction > 0:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(cfg.learner.memory_fraction))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str((Path(_WORKDIR.value) / "xla_cache").absolute()))


# --- evaluating -----------------------------------------------------------------------------------------------------------------------


def _run(cfg, workdir: Path) -> int:
    from dk_jax.evaluation import harness, policies
    from dk_jax.evaluation.results import RESULTS, ResultsFile
    from dk_jax.rollout.episode import task_view
    from dk_jax.search import strategy
    from dk_jax.train import setup

    kind, _ = policies.kind_of(_POLICY.value)  # what is quick to see first
    endpoint = _endpoint_config() if kind == "endpoint" else None
    if _LIBRARY.value and kind in (*policies.SCRIPTED, "kernels"):
        raise ValueError(f"--library={_LIBRARY.value}: the policy {kind} reads no prompts, so skills are of no use to it")
    cfg = _as_evaluated(cfg)
    search = strategy.make(cfg.evaluation.search)
    if kind in (*policies.SCRIPTED, "kernels") and search != strategy.Search():
        raise ValueError(f"evaluation.search {search.settings}: the policy {kind} reads no prompts: use name='turns' and grow=False with it")
    tasks, siblings = _tasks(cfg)
    views = {task.name: task_view(task, language=cfg.sandbox.language, form=cfg.sandbox.form) for task in tasks}
    described = policies.describe(_POLICY.value, cfg, tasks, views, endpoint=endpoint, own_sampling=_OWN_SAMPLING.value)
    config = setup.rollout_config(cfg)
    if kind == "endpoint" and _MAX_TOKENS.value:
        config = dataclasses.replace(config, max_policy_tokens=_MAX_TOKENS.value, max_selection_tokens=_MAX_TOKENS.value)
    skills, library = _skills(cfg, described)
    if search.name == "schemes" and not skills and not search.grow:
        raise ValueError("evaluation.search.name='schemes' chooses among skills, and none are on offer: give --library")
    workdir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        take_folder(workdir, stack)
        stack.enter_context(run_log(workdir))
        chunk = _chunk(cfg, kind, harness.read_settings(workdir))
        plan = harness.Plan(
            tasks=tuple(tasks), samples=cfg.evaluation.samples, turns=cfg.evaluation.turns, chunk=chunk, seed=cfg.seed, config=config,
            skills=tuple(skills), search=search,
        )  # fmt: skip
        if search.grow and len(plan.chunks) == 1:
            print("evaluation.search.grow: all tasks are one chunk, and nothing is learned for any of them; see --chunk")
        harness.remember_settings(workdir, harness.settings_of(cfg, plan, policy=described.facts, split=_SPLIT.value, library=library))
        results, growth = ResultsFile(workdir / RESULTS), _growth(cfg, workdir, stack, plan, siblings) if search.grow else None
        if len(results.results) < len(tasks) * plan.samples or growth is not None and not growth.knows(len(plan.chunks) - 1):
            _evaluate(cfg, workdir, stack, described, plan, views, results, growth)
    return _summarise(workdir)


def _growth(cfg, workdir: Path, stack: contextlib.ExitStack, plan, siblings):
    """The library of the folder, begun with the skills on offer."""
    from dk_jax.rollout.verify import Verifier
    from dk_jax.search.growth import LIBRARY, Growth
    from dk_jax.skills.library import SkillLibrary

    library = stack.enter_context(SkillLibrary(workdir / LIBRARY))
    growth = Growth(library=library, verifier=Verifier.from_config(cfg, siblings))
    growth.begin(plan.skills)
    return growth


def _evaluate(cfg, workdir: Path, stack: contextlib.ExitStack, described, plan, views, results, growth) -> None:
    from tqdm import tqdm

    from dk_jax.evaluation import harness, policies
    from dk_jax.evaluation.results import measured
    from dk_jax.train import setup

    started = time.monotonic()
    socket = sandbox_socket(cfg, workdir, _SANDBOX.value, stack)  # before a model: a sandbox is forked while JAX has no threads
    journal = harness.VerdictJournal(workdir / harness.VERDICTS)
    stack.callback(journal.close)
    judge = setup.make_judge(cfg, socket, journal)
    from_files = sum(task.spec is None for task in plan.tasks)
    with tqdm(total=from_files, desc="admission", unit="task", disable=not from_files) as bar:
        refused = harness.refusals(judge, plan.tasks, workdir / harness.ADMISSION, device=cfg.sandbox.device, progress=bar.update)
    policy = stack.enter_context(policies.opened(described, cfg, plan.tasks, views, config=plan.config, workdir=workdir))
    sessions, known = harness.Sessions(workdir / harness.SESSIONS, device=cfg.sandbox.device), len(journal)
    per_task = plan.samples * plan.turns
    with tqdm(total=len(plan.tasks) * per_task, desc=described.facts["policy"], unit="turn", initial=len(results.results) * plan.turns) as bar:

        def chunk_done() -> None:
            sessions.note(seconds=time.monotonic() - started, judged=len(journal) - known)
            last = measured(results.results.values(), "last_turn", "eager")
            bar.n = len(last) * plan.turns  # a trajectory may have ended before its last turn
            bar.set_postfix(Fast_1=f"{sum(m.speedup > 1 for m in last) / max(len(last), 1):.1%}")

        unfinished = harness.evaluate(
            policy, judge, plan, results, refused=refused, growth=growth, progress=bar.update, chunk_done=chunk_done
        )  # fmt: skip
    if unfinished[policies.OUT_OF_BUDGET]:
        print(f"the budget is spent after {len(results.results)} samples: with a larger one the same command goes on")
    elif unfinished:
        print(f"{unfinished.total()} samples have got no answer ({dict(unfinished)}): the same command asks again")


def _as_evaluated(cfg):
    """The recipe without what only training needs, checked."""
    from dk_jax.train.checks import check_config

    own = ConfigDict(cfg.to_dict())
    own.sft.steps, own.evaluation.call_samples = 0, 0
    own.tasks.update(dict(generated=0, rl_fresh=0, rl_checked=0, rl_generated=0))
    check_config(own)
    return own


def _tasks(cfg) -> tuple[list, Callable]:
    """The tasks to evaluate, and what gives the training tasks beside a task (dk_jax.train.setup.TaskSets.siblings)."""
    from dk_jax.train import setup

    sets = setup.load_tasks(cfg)
    tasks = {"held_out": sets.held_out, "train": sets.train, "all": (*sets.train, *sets.held_out)}[_SPLIT.value]
    if unknown := sorted(set(_ONLY.value) - {task.name for task in tasks}):
        raise ValueError(f"--only={','.join(unknown)}: no such task in --split={_SPLIT.value}, which has {', '.join(t.name for t in tasks[:8])}, ...")
    tasks = [task for task in tasks if not _ONLY.value or task.name in _ONLY.value]
    most = cfg.evaluation.max_tasks
    if most and most < len(tasks):
        print(f"evaluation.max_tasks={most}: the first {most} of {len(tasks)} tasks")
    return tasks[:most] if most else tasks, sets.siblings


def _endpoint_config():
    from dk_jax.interop.endpoint import Endpoint

    for flag in (BASE_URL, MODEL):
        if not flag.value:
            raise ValueError(f"--policy=endpoint: --{flag.name} is missing")
    config = endpoint_config()
    Endpoint(config, None).close()  # a key that is missing is told before a sandbox starts
    return config


def _chunk(cfg, kind: str, remembered) -> int:
    """Tasks of a chunk: what --chunk says, what the folder was started with, or as many as fill the sampler, the endpoint or the judge."""
    from dk_jax.evaluation.policies import MODELS

    if _CHUNK.value or remembered is not None:
        return _CHUNK.value or remembered["chunk"]
    if kind in MODELS:
        return max(cfg.rollout.max_rows * cfg.learner.streams // cfg.evaluation.samples, 1)
    return max(4 * PARALLEL.value // cfg.evaluation.samples, 1) if kind == "endpoint" else cfg.sandbox.parallel_tasks


def _skills(cfg, described) -> tuple[list, dict]:
    """The skills on offer, and where they are from. Of the run that is evaluated the library is that of the checkpoint's step."""
    from dk_jax.skills import exchange
    from dk_jax.skills.library import SkillLibrary

    path, inject = Path(_LIBRARY.value), cfg.evaluation.inject and cfg.skills.use
    if not _LIBRARY.value or not inject:
        return [], {"inject": inject}
    if not path.exists():
        raise FileNotFoundError(f"--library={path}: there is no such file or folder")
    file = path / "library.sqlite" if (path / "library.sqlite").exists() else path
    if file.suffix == ".sqlite":
        with SkillLibrary(file) as library:
            same = described.kind == "run" and file.resolve() == (described.path / "library.sqlite").resolve()
            view = library.at_step(min(described.step, library.step)) if same else library
            return view.active(), {"inject": inject, "step": min(described.step, library.step) if same else library.step}
    return exchange.read_offered(file), {"inject": inject}


# --- reporting ------------------------------------------------------------------------------------------------------------------------


def _summarise(workdir: Path) -> int:
    """Computes, saves and prints the summary of what is there, and differences."""
    from dk_jax.evaluation import harness
    from dk_jax.evaluation.results import SUMMARY, save_json
    from dk_jax.evaluation.results_table import comparison_table, table

    summary = harness.summary_of(workdir, resamples=_RESAMPLES.value)
    save_json(workdir / SUMMARY, summary)
    print(table(summary))
    if _AGAINST.value:
        found = harness.compared(workdir, Path(_AGAINST.value), resamples=_RESAMPLES.value)
        print("\n" + comparison_table(found, _AGAINST.value))
    print(f"\nsummary -> {workdir / SUMMARY}", flush=True)
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
