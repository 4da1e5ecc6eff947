"""Tries an RL recipe in a few minutes: from a finished cold start, with kernels that are built and checked but not timed.

    python scripts/bench/modelled_rl.py --config=configs/demo.py --run=runs/demo --workdir=/tmp/try --config.rl.lr=3e-4

The speed of a correct kernel comes from a model of the speeds that were measured when the run's corpus was judged: a ridge regression
of the logarithm on what the source shows (which loops carry threads and lanes, how many passes it makes, ...), by kind of task. So RL
can be compared under equal rewards on a machine that is busy with other things. What it says of correctness is executed; what it says
of speed holds for the model, whose error on tasks that it was not fitted to is printed. Nothing of it is a result about the demo.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np  # noqa: E402
from absl import app, flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from dk_jax.rollout.judge import Request, SandboxJudge  # noqa: E402
from dk_jax.rollout.supervise import SandboxProcess  # noqa: E402
from dk_jax.rollout.trajectory import Verdict  # noqa: E402
from dk_jax.sft.judged import JudgedKernel, load_kernels  # noqa: E402
from dk_jax.tasks.task import Task  # noqa: E402
from dk_jax.train import setup  # noqa: E402
from dk_jax.train.run import Run  # noqa: E402

_CONFIG = config_flags.DEFINE_config_file("config", None, "Recipe; its cold start must be that of --run.")
_RUN = flags.DEFINE_string("run", None, "Workdir of a run whose cold start is finished.")
_WORKDIR = flags.DEFINE_string("workdir", None, "New folder for the trial.")
NOISE = 0.08
"""Standard deviation of the logarithm of a modelled speed from one kernel to the next of the same looks."""


def features(source: str, kind: str) -> dict[str, float]:
    """What a C++ kernel's text shows of its speed, each once for all kinds of task and once for its own."""
    lines = [line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("//")]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    loops = [indent for line, indent in zip(lines, indents, strict=True) if re.match(r" *(?:\} )?for \(", line)]
    pragmas = [(line, after) for line, after in zip(lines, indents[1:], strict=False) if line.startswith("#pragma")]
    threads = [(line, indent) for line, indent in pragmas if "parallel" in line]
    lanes = [(line, indent) for line, indent in pragmas if "simd" in line]
    top = max(sum(indent <= 2 for indent in loops), 1)
    outer, inner = (sum(keep(indent) for _, indent in threads) for keep in (lambda i: i <= 2, lambda i: i > 2))
    text = "\n".join(lines)
    found = {
        "one": 1.0,
        "threads": float(outer > 0),
        "threads_share": outer / top,
        "inner_threads": float(inner > 0),
        "inner_threads_number": min(inner, 3) / 3,
        "lanes": float(bool(lanes)),
        "lanes_share": min(len(lanes) / top, 2.0),
        "lanes_outside": float(any(indent <= 2 for _, indent in lanes)),
        "dynamic": float("dynamic" in text),
        "collapse": float("collapse" in text),
        "reduction": float("reduction" in text),
        "passes": float(top),
        "loops": min(len(loops), 8) / 4,
        "depth": max(loops, default=0) / 2,
        "modulus": min(text.count("%"), 4) / 2,
        "expensive": min(len(re.findall(r"(?:exp|tanh|log|erf)f\(", text)), 6) / 3,
        "arrays": min(len(re.findall(r"float [ \w]*\[", text)), 4) / 2,
        "strided": float(bool(re.search(r"\* [a-z]+_d1", text))),
        "sums": min(len(re.findall(r"\b[a-z] \+= ", text)), 8) / 4,
        "stores": min(text.count("out["), 6) / 3,
        "length": len(text) / 600,
    }
    return found | {f"{kind}: {name}": value for name, value in found.items()}


@dataclasses.dataclass(frozen=True)
class SpeedModel:
    """log(speedup) = weights . features; `spread` is the standard deviation of what it leaves unexplained."""

    weights: dict[str, float]
    spread: float

    @classmethod
    def fit(cls, kernels: list[tuple[str, str, float]], ridge: float = 1.0) -> SpeedModel:
        """From (source, kind, speedup > 0)."""
        rows = [features(source, kind) for source, kind, _ in kernels]
        names = sorted({name for row in rows for name in row})
        x = np.array([[row.get(name, 0.0) for name in names] for row in rows])
        y = np.log([speedup for *_, speedup in kernels])
        weights = np.linalg.solve(x.T @ x + ridge * np.eye(len(names)), x.T @ y)
        return cls(dict(zip(names, weights.tolist(), strict=True)), float(np.std(y - x @ weights)))

    def log_speedup(self, source: str, kind: str) -> float:
        return sum(self.weights.get(name, 0.0) * value for name, value in features(source, kind).items())

    def draw(self, source: str, task: Task) -> float:
        """A speedup, always the same for equal arguments: the model's, an effect of the task and one of the source, and noise."""

        def normal(text: str) -> float:
            return float(np.random.default_rng(int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)).normal())

        unexplained = 0.3 * self.spread * (normal(task.name) + normal(task.name + source)) + NOISE * normal(source + task.name)
        return math.exp(self.log_speedup(source, task.spec.kind) + unexplained)


def timed_kernels(kernels: list[JudgedKernel], tasks: dict[str, Task]) -> list[tuple[str, str, float, str]]:
    """(source, kind, speedup, task) of what was timed."""
    return [(k.source, tasks[k.task].spec.kind, k.verdict.speedup, k.task) for k in kernels if k.verdict.speedup > 0]


def error_on_new_tasks(timed: list[tuple[str, str, float, str]]) -> tuple[float, float]:
    """Root mean square error of log(speedup) on a quarter of the tasks by a model of the others, and the spread there."""
    names = sorted({task for *_, task in timed})
    kept_out = set(names[::4])
    model = SpeedModel.fit([row[:3] for row in timed if row[3] not in kept_out])
    rest = [row for row in timed if row[3] in kept_out]
    errors = [math.log(speedup) - model.log_speedup(source, kind) for source, kind, speedup, _ in rest]
    return float(np.sqrt(np.mean(np.square(errors)))), float(np.std([math.log(row[2]) for row in rest]))


@dataclasses.dataclass(kw_only=True)
class ModelledJudge(SandboxJudge):
    """Correctness from the sandbox, speeds from a model."""

    model: SpeedModel

    def evaluate(self, requests, *, phase, progress=None, timed=True, trusted=False):
        verdicts = super().evaluate(requests, phase=phase, progress=progress, timed=False, trusted=True)
        return [self._with_speed(v, r.task, r.source) for v, r in zip(verdicts, requests, strict=True)] if timed else verdicts

    def verify(self, arms, *, phase):
        def side(task, sources, name):
            return self.evaluate([Request(task=task, source=s) for s in sources], phase=f"{phase}/{name}")

        return [(side(a.task, a.control, f"{i}/control"), side(a.task, a.treated, f"{i}/treated")) for i, a in enumerate(arms)]

    def _with_speed(self, verdict: Verdict, task: Task, source: str) -> Verdict:
        if not verdict.correct:
            return verdict
        speedup, reward = self.model.draw(source, task), self.options.reward
        total = reward.w_correct + reward.w_speed * min(speedup, reward.speedup_cap)
        return dataclasses.replace(verdict, stage="timed", speedup=speedup, reward=total, feedback=f"correct; {speedup:.2f}x faster than eager")


def main(argv) -> None:
    logging.basicConfig(level=logging.WARNING, force=True)  # not a line for each request
    if len(argv) > 1 or not (_CONFIG.value and _RUN.value and _WORKDIR.value):
        raise app.UsageError("--config, --run and --workdir are needed, and nothing else but --config.KEY=VALUE")
    cfg, run_dir, workdir = _CONFIG.value, Path(_RUN.value), Path(_WORKDIR.value)
    cold = run_dir / "checkpoints" / "sft"
    if not cold.is_dir() or not (run_dir / "corpus.jsonl").is_file():
        raise SystemExit(f"{run_dir} holds no finished cold start: run scripts/train.py --mode=sft --workdir={run_dir} first")
    if workdir.exists():
        raise SystemExit(f"{workdir} is there already: give a new folder, each trial starts from the cold start")
    cfg.seed = json.loads((run_dir / "config.json").read_text())["seed"]
    workdir.mkdir(parents=True)
    shutil.copytree(run_dir / "codec", workdir / "codec")
    shutil.copytree(cold, workdir / "checkpoints" / "sft")
    shutil.copy(run_dir / "corpus.jsonl", workdir)
    tasks = {task.name: task for task in setup.load_tasks(cfg).all}
    timed = timed_kernels(load_kernels(workdir / "corpus.jsonl"), tasks)
    model = SpeedModel.fit([row[:3] for row in timed])
    print("speed model: {} kernels, error {:.2f} of a spread of {:.2f} (log, new tasks)".format(len(timed), *error_on_new_tasks(timed)), flush=True)

    def make_judge(cfg, socket, journal):
        plain = setup.make_judge(cfg, socket, journal)
        return ModelledJudge(**{field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}, model=model)

    with SandboxProcess(["--device", "cpu", "--workers", "2", "--threads", "1"], log_path=workdir / "sandbox.log") as sandbox:
        run = Run(cfg, workdir, sandbox.socket, make_judge=make_judge)
        try:
            found = run.all()
        finally:
            run.close()
    for name in ("before", "after"):
        for number, turn in enumerate(found[name]["turns"], 1):
            shown = f"correct {turn['correct']:6.1%}  Fast_1 {turn['fast']['1.0']:6.1%}  speedup {turn['mean_speedup']:.2f}x"
            print(f"{name:6} turn {number}  {shown}  ({turn['samples']} samples)", flush=True)


if __name__ == "__main__":
    app.run(main)
