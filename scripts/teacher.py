"""Has a teacher behind an OpenAI-compatible endpoint make samples for the cold start; kernels are judged by the sandbox.

    python scripts/teacher.py --config=configs/smollm2_triton.py --workdir=runs/taught --base_url=https://host/v1 --model=NAME --tasks=20
    python scripts/teacher.py ... --price_in=0.5 --price_out=1.5 --budget=10 --rpm=60 --parallel=8
    python scripts/teacher.py ... --base_url=http://localhost:8000/v1 --api_key_env=          # a server of one's own that wants no key

The key is read from the environment variable that --api_key_env names, and is stored nowhere. Interrupted, the same command goes on where
it stopped, and pays for nothing twice; with a larger --tasks or --budget it goes on beyond. In the workdir: teacher_samples.jsonl (what
dk_jax.sft.teacher_samples.load_samples reads), teacher_skills.jsonl (skills that summaries proposed), and the journals of answers and
verdicts. A sandbox is started as a child process unless --sandbox names the socket of one that runs already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is computed with it here: an accelerator is left to the sandbox

from absl import app, flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from dk_jax.command_line import carried_out, loaded_recipe, parse_flags, sandbox_socket, take_folder  # noqa: E402
from dk_jax.interop.endpoint_flags import BASE_URL, MODEL, PARALLEL, endpoint_config  # noqa: E402

_CONFIG = config_flags.DEFINE_config_file("config", None, "Recipe: a file with get_config().", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the work; made if absent, gone on with if not.")
_TASKS = flags.DEFINE_integer("tasks", 0, "Only the first so many tasks of the cold start; 0 for all.", lower_bound=0)
_SAMPLES = flags.DEFINE_integer("samples", 0, "Conversations for a task and set of skills; 0 for the recipe's rollout.rollouts.", lower_bound=0)
_TURNS = flags.DEFINE_integer("turns", 0, "Turns of a conversation; 0 for the recipe's rollout.turns.", lower_bound=0)
_SELECTIONS = flags.DEFINE_integer("selections", -1, "Selection calls for a task; -1 for the recipe's rollout.selections.", lower_bound=-1)
_SUMMARIES = flags.DEFINE_integer("summaries", 0, "Summaries of a conversation that improved; 0 for the recipe's.", lower_bound=0)
_SKILLS = flags.DEFINE_string("skills", "", "Skills known from the beginning: a library (.sqlite), a .jsonl, a .md file or a folder of these.")
_GROW = flags.DEFINE_bool("grow", True, "Skills that summaries propose are on offer for later tasks.")
_ROUND_TASKS = flags.DEFINE_integer("round_tasks", 8, "Tasks of a round, after which proposed skills are on offer; not to be changed later.")
_ANSWERS = flags.DEFINE_enum(
    "answers", "code", ["code", "message"],
    "What is imitated: the code or the call alone, as in the generated corpus, or the whole message as the teacher wrote it.",
)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 8192, "Longest answer of the teacher, reasoning included.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Of all answers; by default the endpoint's own.")
_TOP_P = flags.DEFINE_float("top_p", None, "Of all answers; by default the endpoint's own.")
_SANDBOX = flags.DEFINE_string("sandbox", "", "Socket of a running sandbox; by default one is started.")
SAMPLES, SKILLS, ANSWERS, VERDICTS = "teacher_samples.jsonl", "teacher_skills.jsonl", "journal_teacher_answers.jsonl", "journal_teacher.jsonl"


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}: flags look like --workdir=DIR or --config.seed=1")
    for flag in (_CONFIG, _WORKDIR, BASE_URL, MODEL):
        if flag.value is None:
            raise app.UsageError(f"--{flag.name} is missing; see --help for an example")
    cfg = loaded_recipe(_CONFIG)
    return carried_out(lambda: _run(cfg, Path(_WORKDIR.value)))


def _run(cfg, workdir: Path) -> int:
    from dk_jax.interop.endpoint import AnswerJournal, Endpoint
    from dk_jax.rollout.judge import Journal
    from dk_jax.train import setup
    from dk_jax.train.admission import FILE, admitted
    from dk_jax.train.checks import check_config
    from dk_jax.train.workdir import remember_config

    limits = endpoint_config()
    check_config(cfg)
    config = _teacher_config(cfg)
    skills = _skills(_SKILLS.value)
    sets = setup.load_tasks(cfg)
    workdir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        take_folder(workdir, stack)
        remember_config(cfg, workdir)
        answers = AnswerJournal(workdir / ANSWERS)
        stack.callback(answers.close)
        endpoint = stack.enter_context(Endpoint(limits, answers))  # a key that is missing is told before a sandbox starts
        journal = Journal(workdir / VERDICTS)
        stack.callback(journal.close)
        judge = setup.make_judge(cfg, sandbox_socket(cfg, workdir, _SANDBOX.value, stack), journal)
        if any(task.spec is None for task in sets.all):
            sets = admitted(sets, judge, workdir / FILE)
        tasks = [*sets.train, *sets.generated]
        tasks = tasks[: _TASKS.value] if _TASKS.value else tasks
        timed = {task.name for task in tasks[: cfg.corpus.timed_tasks or len(tasks)]}
        return _teach(cfg, workdir, endpoint, judge, config, skills, tasks, timed)


def _teach(cfg, workdir: Path, endpoint, judge, config, skills, tasks, timed: set[str]) -> int:
    from tqdm import tqdm

    from dk_jax.sft.teacher import Teacher
    from dk_jax.sft.teacher_report import table
    from dk_jax.sft.teacher_samples import save_samples
    from dk_jax.skills.exchange import write_jsonl

    started = time.monotonic()
    teacher = Teacher(endpoint=endpoint, judge=judge, config=config, library=skills)

    def save() -> int:
        samples = teacher.samples()
        save_samples(workdir / SAMPLES, samples)
        write_jsonl(workdir / SKILLS, teacher.accepted)
        return len(samples)

    with tqdm(desc="teacher", unit="conversation", total=len(tasks) * config.rollout.rollouts) as bar:
        saved = 0

        def changed() -> None:
            nonlocal saved
            bar.n = sum(s.trajectory.agent == "policy" for s in list(teacher.spoken))
            bar.total = max(teacher.planned + max(len(tasks) - teacher.tasks_done - config.round_tasks, 0) * config.rollout.rollouts, bar.n)
            bar.set_postfix(tokens=endpoint.tally.spent_tokens, **({"cost": f"{endpoint.tally.spent:.2f}"} if endpoint.tally.spent else {}))
            if teacher.tasks_done > saved:
                saved = teacher.tasks_done
                save()

        teacher.changed = changed
        try:
            teacher.teach(tasks, timed=lambda task: task.name in timed)
        finally:
            teacher.changed = lambda: None
            kept = save()
            bar.close()
            print(table(teacher, seconds=time.monotonic() - started, max_tokens=cfg.sft.max_tokens))
            print(f"{kept} samples -> {workdir / SAMPLES}", flush=True)
    if teacher.budget_spent:
        print(f"the budget is spent after {teacher.tasks_done} of {len(tasks)} tasks: with a larger one the same command goes on")
    return 0


def _teacher_config(cfg):
    from dk_jax.sft.teacher import TeacherConfig
    from dk_jax.train import setup

    rollout = setup.rollout_config(cfg)
    wanted = {"rollouts": _SAMPLES.value, "turns": _TURNS.value, "summaries": _SUMMARIES.value}
    changes = {name: value for name, value in wanted.items() if value} | ({"selections": _SELECTIONS.value} if _SELECTIONS.value >= 0 else {})
    return TeacherConfig(
        rollout=dataclasses.replace(rollout, **changes), max_tokens=_MAX_TOKENS.value, temperature=_TEMPERATURE.value, top_p=_TOP_P.value,
        form=_ANSWERS.value, round_tasks=_ROUND_TASKS.value, grow=_GROW.value, workers=2 * PARALLEL.value,
    )  # fmt: skip


def _skills(path: str):
    """The skills of a library or of files that may be offered: not those at rest or retired."""
    from dk_jax.skills import exchange
    from dk_jax.skills.library import SkillLibrary

    if not path:
        return []
    if not Path(path).exists():
        raise FileNotFoundError(f"--skills={path}: there is no such file or folder")
    if path.endswith(".sqlite"):
        with SkillLibrary(path) as library:
            return library.active()
    return exchange.read_offered(Path(path))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
