"""Makes one HTML page of a run, of an evaluation, or of several side by side: scores with intervals, charts, and any rollout's conversation.

    python scripts/report.py runs/demo                                   # a run's report, finished or not
    python scripts/report.py evals/base evals/trained --output=page.html # a comparison, the first one is what others are measured against
    python scripts/report.py runs/a runs/b evals/endpoint --rollouts=best

Each PATH is the folder of a run (scripts/train.py) or of an evaluation (scripts/evaluate.py), up to eight. The page is one file that needs no
server, no network and no other file. It carries the rollouts that fit into --max_mb, the best of each task first.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"  # nothing is computed on an accelerator, which a run may be using

from absl import app, flags  # noqa: E402

_OUTPUT = flags.DEFINE_string("output", "", "The page; by default report.html in the folder, or in the working directory for several.")
_ROLLOUTS = flags.DEFINE_string("rollouts", "all", "all that fit, best (of each task), or so many.")
_MAX_MB = flags.DEFINE_integer("max_mb", 30, "Of rollouts in the page.", lower_bound=0)
_TASKS = flags.DEFINE_string("tasks", "", "KernelBench folder of the tasks that were evaluated: their prompts are then shown.")


def main(argv):
    if len(argv) < 2:
        raise app.UsageError("of which runs or evaluations? e.g. runs/demo")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)
    paths = [Path(name) for name in argv[1:]]
    output = Path(_OUTPUT.value) if _OUTPUT.value else (paths[0] if len(paths) == 1 else Path()) / "report.html"
    try:
        amount = _amount()
        from dk_jax.evaluation.report import write_comparison  # takes seconds

        page = write_comparison(paths, output, amount=amount, max_bytes=_MAX_MB.value * 1_000_000, tasks=_tasks())
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"report: {page} ({page.stat().st_size / 1e6:.1f} MB)")
    return 0


def _amount():
    value = _ROLLOUTS.value
    if value in ("all", "best"):
        return value
    if not value.isdigit():
        raise ValueError(f"--rollouts={value}: it is all, best or a number")
    return int(value)


def _tasks():
    from dk_jax.tasks.kernelbench import load_kernelbench

    if not _TASKS.value:
        return []
    levels = [level for level in (1, 2, 3, 4) if (Path(_TASKS.value) / f"level{level}").is_dir()]
    return load_kernelbench(_TASKS.value, levels or (1,))


if __name__ == "__main__":
    app.run(main)
