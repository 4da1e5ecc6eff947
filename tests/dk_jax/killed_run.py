"""A small run that ends itself by SIGKILL, as a script: python killed_run.py WORKDIR STALENESS [PLACE COUNT DELAY_S].

The policy's messages come from the real sampler, those of the other agents are scripted, so that skills come about; verdicts are a function
of the candidate. DELAY_S after the process has come to PLACE for the COUNT-th time it is killed. What it goes through is written to
WORKDIR/marks as it happens, one line a place, and what it has come to, at the end, to WORKDIR/result.json.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before anything else is imported
    sys.modules["torch"] = None  # tensorboardX would load it, which takes seconds, and nothing here needs it
    gc.set_threshold(100_000)  # looking for cycles takes a sixth of what is left

import jax
import numpy as np

from dk_jax.metrics import Metrics, is_clocked, read_scalars
from dk_jax.metrics_events import read_events
from dk_jax.models.config import AGENTS
from dk_jax.rollout.judge import Journal
from dk_jax.skills.library import SkillLibrary
from dk_jax.train.run import Run
from dk_jax.train.state import Checkpoints
from dk_jax.train.update import Updater
from tests.end_to_end.scripted import ScriptedClient, ScriptedRun, ScriptedSampler, tiny_config

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("sample", "judge", "verify", "update", "commit", "scalars", "save", "seal", "sealed", "committed", "settle")
"""Sampling, a candidate's judging, an update, the library's commit, the step's scalars; a checkpoint's start, its files being there, its
manifest being there, its being committed; the journal's cleaning."""
_POLICY = AGENTS.index("policy")


def config(staleness: int = 0):
    c = tiny_config()
    c.seed = 3  # of those tried one with which every step has something to learn, and skills hold
    c.rollout.update(dict(max_policy_tokens=64, max_rows=16))
    c.rl.update(dict(steps=4, staleness=staleness))
    return c


class Marks:
    """Writes down where the process is, and ends it."""

    def __init__(self, path: Path, kill: tuple[str, int, float] | None):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._kill, self._seen = kill, Counter()

    def at(self, place: str, detail: str = "") -> None:
        os.write(self._file, f"{place} {detail}\n".encode())
        self._seen[place] += 1
        if self._kill and self._kill[:2] == (place, self._seen[place]):
            threading.Thread(target=self._end, args=(self._kill[2],), daemon=True).start()
            if not self._kill[2]:
                time.sleep(60)  # the end comes at once

    def _end(self, delay_s: float) -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str, before: str = "", after: str = "", when=lambda *_: True) -> None:
        done = getattr(owner, name)

        def marked(*arguments, **options):
            here = when(*arguments)
            if before and here:
                self.at(before)
            found = done(*arguments, **options)
            if after and here:
                self.at(after)
            return found

        setattr(owner, name, marked)


class SlowClient(ScriptedClient):
    """Takes its time, as judging does."""

    def __init__(self, marks: Marks):
        super().__init__()
        self._marks = marks

    def _result(self, task, candidate, options=None):
        self._marks.at("judge", f"{task.name} {hashlib.sha256(candidate.source.encode()).hexdigest()[:12]} {getattr(options, 'timing', '')}")
        time.sleep(0.002)
        return super()._result(task, candidate, options)

    def verify(self, arms, options=None, client_key=None):
        """What was written with a skill is the faster for it."""
        self._marks.at("verify")
        skilled = lambda c: c.model_copy(update={"source": f"{c.source} // skilled"})  # noqa: E731
        return super().verify([a.model_copy(update={"treated": [skilled(c) for c in a.treated]}) for a in arms], options, client_key)


class MixedSampler(ScriptedSampler):
    """The run's own sampler for the policy, scripted messages for the other agents."""

    def __init__(self, codec, own, marks: Marks):
        super().__init__(codec)
        self._own, self._marks = own, marks

    def sample(self, params, prompts, agents, keys, max_new_tokens=None, temperature=None, *, conversations=None, keep=False):
        self._marks.at("sample")
        if agents[0] == _POLICY:
            return self._own.sample(params, prompts, agents, keys, max_new_tokens, temperature, conversations=conversations, keep=keep)
        return super().sample(params, prompts, agents, keys, max_new_tokens, temperature)

    def rest(self):
        self._own.rest()


class MarkedRun(ScriptedRun):
    def __init__(self, cfg, workdir, marks: Marks):
        self._marks = marks
        super().__init__(cfg, workdir, SlowClient(marks))

    def sampler(self, *, temperature, top_p=1.0):
        return MixedSampler(self.model.codec, Run.sampler(self, temperature=temperature, top_p=top_p), self._marks)


def main(workdir: Path, staleness: int, kill: tuple[str, int, float] | None) -> None:
    marks = Marks(workdir / "marks", kill)
    of_rl = lambda checkpoints, *_: checkpoints.directory.name == "rl"  # noqa: E731
    marks.around(Updater, "update", "update")
    marks.around(SkillLibrary, "commit", "commit")
    marks.around(Metrics, "scalars", "scalars", when=lambda _, phase, *__: phase == "rl")
    marks.around(Checkpoints, "save", "save", when=of_rl)
    marks.around(Checkpoints, "_seal", "seal", "sealed", when=of_rl)
    marks.around(Checkpoints, "wait", after="committed", when=of_rl)
    marks.around(Journal, "forget", "settle")
    run = MarkedRun(config(staleness), workdir, marks)
    start = run.sft().trainable
    marks.at("rl")
    state = run.rl(start)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((state.trainable, state.opt_state)):
        digest.update(np.asarray(leaf).tobytes())
    found = {
        "step": state.step, "arrays": digest.hexdigest(), "record": state.record, "library": run.library.version,
        "skills": run.library.counts(), "best": sorted(p.name for p in (workdir / "checkpoints" / "rl_best").iterdir()),
    }  # fmt: skip
    run.close()
    (workdir / "result.json").write_text(json.dumps(found))


def spawn(workdir: Path, kill: tuple[str, int, float] | None = None, timeout_s: float = 280, staleness: int = 0) -> int:
    """Runs it in a process of its own, killed as said; returns its status. What it printed is in WORKDIR/output."""
    workdir.mkdir(parents=True, exist_ok=True)
    arguments = [str(a) for a in (staleness, *(kill or ()))]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with open(workdir / "output", "ab") as output:
        done = subprocess.run(
            [sys.executable, __file__, str(workdir), *arguments], cwd=ROOT, env=env, stdout=output, stderr=output, timeout=timeout_s
        )
    if done.returncode == -signal.SIGKILL:
        # Not by the process itself: its other threads would go on marking between that and its end.
        with open(workdir / "marks", "ab") as marks:
            marks.write(b"KILLED\n")
    return done.returncode


def without_rl(workdir: Path, new: Path) -> Path:
    """A copy of a run's folder from before its RL began, but for the scalars of it."""
    shutil.copytree(workdir, new, ignore=shutil.ignore_patterns("rl", "rl_*", "library.sqlite*", "journal_*", "rollouts", "marks", "result.json"))
    return new


def marks_of(workdir: Path) -> list[list[str]]:
    """The places of each process in turn."""
    processes = (workdir / "marks").read_text().split("KILLED\n")
    return [[line for line in text.splitlines() if line] for text in processes]


def outcome(workdir: Path) -> dict[str, Any]:
    """All that a run leaves that does not tell of the clock: result, scalars, TensorBoard's events, rollouts."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        "result": json.loads((workdir / "result.json").read_text()),
        "scalars": [{k: v for k, v in line.items() if not is_clocked(k)} for line in read_scalars(workdir / "metrics.jsonl", "rl")],
        "lines": sorted((line["phase"], line["step"]) for line in lines),
        "events": sorted(read_events(workdir / "tensorboard")),
        "rollouts": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted((workdir / "rollouts").glob("step_*.jsonl"))},
    }


def judged(workdir: Path) -> Counter:
    """How often each candidate was judged, by all processes of the workdir together."""
    return Counter(line for process in marks_of(workdir) for line in process if line.startswith("judge "))


def judged_again(workdir: Path, whole: Counter, staleness: int = 0) -> Counter:
    """Candidates that were judged more often than in the undisturbed run, less those whose verdict had not arrived at a kill: the one that
    was being judged, or all of a verification, whose verdicts arrive together."""
    extra = judged(workdir) - whole
    # What the thread went through that judges; with staleness 1 updates and commits are another's.
    places = ("sample", "judge", "verify") if staleness else ("sample", "judge", "verify", "update", "commit")
    for process in marks_of(workdir)[:-1]:
        own = [line for line in process if line.split()[0] in places]
        while own and own[-1].startswith("judge "):
            extra -= Counter([own.pop()])
            if "verify" not in _last_group(own):
                break
    return extra


def _last_group(own: list[str]) -> str:
    """What the judged candidates at the end were judged for."""
    return next((line for line in reversed(own) if not line.startswith("judge ")), "")


if __name__ == "__main__":
    _, where, staleness, *how = sys.argv
    main(Path(where), int(staleness), (how[0], int(how[1]), float(how[2])) if how else None)
