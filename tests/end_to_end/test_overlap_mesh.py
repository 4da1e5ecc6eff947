"""Rollouts and updates that overlap on a mesh: no two programs wait for each other's collectives, and delays change nothing.

Eight devices are emulated by a process of its own, which is this file run as a script: it writes what it measured as JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

from dk_jax.metrics import read_scalars
from dk_jax.models.config import AGENTS
from dk_jax.train.run import Run
from tests.dk_jax.emulated import on_eight_devices
from tests.end_to_end.scripted import ScriptedClient, ScriptedRun, ScriptedSampler, tiny_config

POLICY = AGENTS.index("policy")


class Slow(ScriptedClient):
    """Takes its time over a candidate."""

    def __init__(self, pause_s: float):
        super().__init__()
        self.pause_s = pause_s

    def _result(self, *arguments):
        time.sleep(self.pause_s)
        return super()._result(*arguments)


class PolicySampler(ScriptedSampler):
    """The run's own sampler for the policy, scripted messages for the other agents."""

    def __init__(self, codec, own):
        super().__init__(codec)
        self.own = own

    def sample(self, params, prompts, agents, keys, max_new_tokens=None, temperature=None, **kept):
        sampler = self.own.sample if agents[0] == POLICY else super().sample
        return sampler(params, prompts, agents, keys, max_new_tokens, temperature, **kept)

    def rest(self):
        self.own.rest()


class MeshRun(ScriptedRun):
    def sampler(self, *, temperature, top_p=1.0):
        return PolicySampler(self.model.codec, Run.sampler(self, temperature=temperature, top_p=top_p))


def measure(out: str) -> None:
    """On eight devices: two runs, one with a slow judge."""
    found = []
    for pause_s in (0.0, 0.01):
        cfg = tiny_config()
        cfg.learner.streams = 1
        cfg.learner.mesh.update(dict(data=0, fsdp=2, tensor=1))
        cfg.sft.update(dict(steps=0, microbatch=8))
        cfg.rollout.update(dict(max_policy_tokens=64, max_rows=16, max_context_tokens=1024, checked_tasks=0, tasks=1))
        cfg.rl.update(dict(steps=3, staleness=1, decay=False, lr=1e-2, microbatch=8, length_step=512))
        workdir = Path(out).parent / f"run{len(found)}"
        run = MeshRun(cfg, workdir, Slow(pause_s))
        state = run.rl(run.sft().trainable)
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves((state.trainable, state.opt_state)):
            digest.update(np.asarray(leaf).tobytes())
        run.close()
        lines = read_scalars(workdir / "metrics.jsonl", "rl")
        found.append({"arrays": digest.hexdigest(), "mesh": dict(run.model.mesh.shape), "lines": lines})
    Path(out).write_text(json.dumps(found))


def test_on_eight_devices_a_slow_judge_and_a_fast_one_come_to_the_same(tmp_path):
    fast, slow = on_eight_devices(__file__, tmp_path)
    assert fast["arrays"] == slow["arrays"] and fast["mesh"] == {"data": 4, "fsdp": 2, "tensor": 1}
    assert [line["staleness"] for line in slow["lines"]] == [0.0, 1.0, 1.0]
    assert all(line["gap_policy"] > 1e-4 for line in slow["lines"][1:]) and all(line["overlap_s"] > 0 for line in slow["lines"][:2])


if __name__ == "__main__":
    measure(sys.argv[1])
