"""An ablation of scripted runs: a preset of seconds, its tools, and pieces whose clock is the test's."""

from __future__ import annotations

from pathlib import Path

from dk_jax.reproduce.arms import Preset, chosen, jobs
from dk_jax.reproduce.pieces import Piece, PieceLog
from dk_jax.reproduce.work import PIECES, Ablation, Tools
from dk_jax.rollout.judge import SandboxJudge
from sandbox.protocol import Options
from tests.end_to_end.scripted import ScriptedClient, ScriptedRun, tiny_config

ARMS = ("full", "no_injection", "no_skills")


def toy_preset(**changes) -> Preset:
    c = tiny_config()
    c.tasks.update(dict(rl_checked=0))
    c.rollout.checked_tasks = 0
    c.rl.update(dict(decay=False, keep_best=""))
    c.evaluation.max_tasks = 6
    fields = dict(name="toy", base=c, candidates=90, tokens=10**6, shared_start=True, expert_samples=1, chunk=3)
    return Preset(**fields | changes)


def scripted_tools(client: ScriptedClient) -> Tools:
    def make_judge(cfg, journal):
        fields = dict(device="cpu", language="cpp", form="kernel", options=Options(), verify_options=Options(), max_parallel=1)
        return SandboxJudge(client=client, journal=journal, **fields)

    return Tools(make_run=lambda cfg, workdir: ScriptedRun(cfg, workdir, client), make_judge=make_judge)


class Boundaries(Piece):
    """A piece that ends at the `most`-th boundary."""

    def __init__(self, most: int):
        super().__init__(1.0, now=lambda: 0.0)
        self.most, self.asked = most, 0

    def over(self) -> bool:
        self.asked += 1
        return self.asked >= self.most


def piece(folder: Path, *, client: ScriptedClient | None = None, most: int = 10**6, preset: Preset | None = None, arms=ARMS):
    """One piece of the toy's work; returns the ablation, all jobs and those that are left."""
    ablation = Ablation(preset or toy_preset(), folder)
    wanted = jobs(ablation.preset, chosen(arms))
    pieces = PieceLog(folder / PIECES, device="cpu")
    left = ablation.work(wanted, scripted_tools(client or ScriptedClient()), Boundaries(most), pieces, say=lambda text: None)
    return ablation, wanted, left
