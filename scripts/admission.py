"""Asks the sandbox what is to be known of a recipe's tasks before anything is trained or evaluated on them, and prints a report.

    python scripts/admission.py --config=configs/demo.py --workdir=admission/demo
    python scripts/admission.py --config=configs/davinci_8b.py --workdir=admission/kb --config.tasks.source=kernelbench \
        --config.tasks.directory=KernelBench --config.tasks.levels="(1,2,3)" --config.sandbox.device=cuda:0
    python scripts/admission.py ... --config.tasks.source=records --config.tasks.directory=drkernel-rl-data.parquet --config.tasks.rows=500

Which tasks would zeros, a constant or an input pass, which fail by themselves or draw random numbers, which are mostly launch overhead, what
memory and time does judging take? In the workdir: admission.jsonl (a line a task, by content), admission_summary.json. Interrupted, the same
command goes on. A run with this workdir takes what is found here; what is refused is not trained on, but evaluated all the same, marked.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import app, flags  # noqa: E402
from ml_collections import ConfigDict, config_flags  # noqa: E402

from dk_jax.command_line import carried_out, loaded_recipe, parse_flags, sandbox_socket, take_folder  # noqa: E402

_CONFIG = config_flags.DEFINE_config_file("config", None, "Recipe: a file with get_config().", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the report; made if absent, gone on with if not.")
_TASKS = flags.DEFINE_list("tasks", [], "Only the tasks of these names.")
_SPLIT = flags.DEFINE_enum("split", "all", ["held_out", "train", "all"], "Which of the recipe's tasks.")
_SANDBOX = flags.DEFINE_string("sandbox", "", "Socket of a running sandbox; by default one is started.")


def main(argv) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}: flags look like --workdir=DIR or --config.seed=1")
    for flag in (_CONFIG, _WORKDIR):
        if flag.value is None:
            raise app.UsageError(f"--{flag.name} is missing; see --help for an example")
    os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is computed here, and the sandbox has the card
    cfg = loaded_recipe(_CONFIG)
    return carried_out(lambda: _run(cfg, Path(_WORKDIR.value)))


def _run(cfg, workdir: Path) -> int:
    from tqdm import tqdm

    from dk_jax.evaluation.results import save_json
    from dk_jax.train import admission, admission_report, setup
    from dk_jax.train.checks import check_config
    from sandbox.protocol import limits_of

    own = ConfigDict(cfg.to_dict())
    own.sft.steps = 0
    own.tasks.update(dict(generated=0, rl_fresh=0, rl_checked=0, rl_generated=0))
    check_config(own)
    records = setup.read_source(own) if own.tasks.source == "records" else None
    sets = setup.load_tasks(own, records)
    tasks = _chosen(sets)
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / admission.FILE
    with contextlib.ExitStack() as stack:
        take_folder(workdir, stack)
        device, limits = own.sandbox.device, limits_of(setup.sandbox_options(own))
        known = admission.AdmissionFile(path, device=device, limits=limits)
        missing = len({admission.digest(task) for task in tasks if known.get(task) is None})
        try:
            if missing:
                judge = setup.make_judge(own, sandbox_socket(own, workdir, _SANDBOX.value, stack), None)
                with tqdm(total=missing, desc="admission", unit="task") as bar:
                    admission.examined(judge, tasks, path, device=device, progress=bar.update)
        finally:  # of what is there, also where it ends early
            known = admission.AdmissionFile(path, device=device, limits=limits)
            found = {task.name: one for task in tasks if (one := known.get(task)) is not None}
            data = admission_report.summary(tasks, found, records, device=own.sandbox.device, source=own.tasks.source)
            save_json(workdir / admission_report.SUMMARY, data)
    print(admission_report.table(tasks, found, data))
    print(f"\ntasks -> {path}\nsummary -> {workdir / admission_report.SUMMARY}", flush=True)
    return 0


def _chosen(sets) -> list:
    tasks = {"held_out": sets.held_out, "train": sets.train, "all": (*sets.train, *sets.held_out)}[_SPLIT.value]
    if unknown := sorted(set(_TASKS.value) - {task.name for task in tasks}):
        raise ValueError(f"--tasks={','.join(unknown)}: no such task; there are {', '.join(task.name for task in tasks[:8])}, ...")
    return [task for task in tasks if not _TASKS.value or task.name in _TASKS.value]


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
