"""A run without a machine's accidents: verdicts are a function of the candidate, messages of the row's key.

The sandbox and the sampler are replaced; journal, rollouts, credit, update, library and checkpoints are the real ones.
"""

from __future__ import annotations

import hashlib
import json
import re

import jax
import numpy as np

from configs.demo import get_config
from dk_jax.agents.policy import KEEP
from dk_jax.generation import Sample
from dk_jax.models.config import AGENTS
from dk_jax.rollout.judge import SandboxJudge
from dk_jax.train.run import Run
from sandbox.protocol import (
    EvaluationResult,
    Options,
    Reward,
    Span,
    Timing,
    VerificationArm,
    VerificationResult,
)


def cold_started(workdir, cfg):
    """The workdir, with the cold start of a scripted run done in it."""
    run = ScriptedRun(cfg, workdir, ScriptedClient())
    run.sft()
    run.close()
    return workdir


class Killed(BaseException):
    """Stands for SIGKILL: no handler of the run may catch it."""


class ScriptedClient:
    """Judges by content; raises Killed at the `kill_at`-th judged candidate."""

    def __init__(self, kill_at: int | None = None):
        self.judged = 0
        self.kill_at = kill_at

    def _result(self, task, candidate, options=None) -> EvaluationResult:
        if self.kill_at is not None and self.judged >= self.kill_at:
            raise Killed
        self.judged += 1
        digest = hashlib.sha256(f"{task.name}{candidate.source}".encode()).digest()
        untimed = options is not None and options.timing == "none"
        ok = digest[0] > (150 if untimed else 60)
        speedup = 0.5 + digest[1] / 64 + (4.0 if "skilled" in candidate.source else 0.0)
        if not ok:
            return EvaluationResult(id="x", state="done", stage="built", outcome="incorrect", feedback="incorrect max err 1.0")
        if untimed:
            return EvaluationResult(id="x", state="done", stage="correct", outcome="ok", feedback="correct", reward=Reward(total=0.5))
        span = Span(median_ms=1.0, low_ms=0.9, high_ms=1.1, samples=5)
        timing = Timing(candidate=span, baselines={"eager": span}, speedup=speedup, noisy=False, bound_by="wall")
        return EvaluationResult(
            id="x", state="done", stage="timed", outcome="ok", timing=timing, feedback="correct",
            reward=Reward(total=0.5 + 0.5 * min(speedup, 6.0)),
        )  # fmt: skip

    def abort(self):
        """Nothing is ever waited for."""

    def evaluate(self, task, candidates, options=None, client_key=None, on_result=None):
        results = []
        for i, candidate in enumerate(candidates):
            results.append(self._result(task, candidate, options))
            if on_result is not None:
                on_result(i, results[-1])
        return results

    def verify(self, arms, options=None, client_key=None):
        return VerificationResult(
            id="v",
            state="done",
            arms=[
                VerificationArm(
                    control=[self._result(arm.task, c) for c in arm.control],
                    treated=[self._result(arm.task, c) for c in arm.treated],
                )
                for arm in arms
            ],
        )


class ScriptedSampler:
    """Writes a message that depends on the row's key, agent and prompt, on every parameter, and on the temperature alone."""

    def __init__(self, codec):
        self.codec = codec

    def sample(self, params, prompts, agents, keys, max_new_tokens=None, temperature=None, *, conversations=None, keep=False):
        digest = hashlib.sha256(repr(temperature).encode())
        for leaf in jax.tree.leaves(params):
            digest.update(np.asarray(leaf).tobytes())
        model = int.from_bytes(digest.digest()[:4], "big")
        return [self._one(list(p), AGENTS[a], [int(k), model]) for p, a, k in zip(prompts, agents, keys, strict=True)]

    def rest(self):
        """Holds nothing."""

    def _one(self, prompt, agent, key):
        rng = np.random.default_rng(key)
        text = self.codec.decode(prompt)
        if agent == "policy":
            skilled = " // skilled" if "\nskills:" in text else ""
            said = f"void kernel() {{}} // {rng.integers(6)}{skilled}"
            if re.search(r"ok [0-9.]+x", text) and rng.random() < 0.3:  # a later turn
                said = KEEP
        elif agent == "selection":
            offered = [line.split(" | ")[0] for line in text.split("\nskills:\n")[-1].splitlines() if " | " in line]
            said = json.dumps({"select": offered[: int(rng.integers(0, 2))]}) if rng.random() < 0.9 else "{broken"
        else:
            number = rng.integers(10_000)
            draft = {
                "name": f"skill_{number}",
                "description": "threads and lanes together",
                "scope": "general",
                "tags": ["threads", "lanes", "loop"],
                "content": f"Motivation: slow loops.\nKey Idea: use threads.\nExample: #pragma omp parallel for simd num_threads({number})",
            }
            said = json.dumps({"add": [draft]})
        tokens = [*self.codec.encode(said), self.codec.eos_id]
        logp = np.full(len(tokens), -1.0, np.float32)
        return Sample(tokens=tokens, logp_sample=logp, logp_model=logp, stop="eos")


class ScriptedRun(Run):
    """A Run whose sandbox and sampler are scripted; `client` counts what was judged."""

    def __init__(self, cfg, workdir, client: ScriptedClient):
        self.client = client
        super().__init__(cfg, workdir, socket="", make_judge=self._scripted_judge)

    def _scripted_judge(self, cfg, socket, journal):
        return SandboxJudge(
            client=self.client, device="cpu", language="cpp", form="kernel", options=Options(), verify_options=Options(),
            journal=journal, max_parallel=1,
        )  # fmt: skip

    def sampler(self, *, temperature, top_p=1.0):
        return ScriptedSampler(self.model.codec)


def tiny_config():
    """The demo recipe with everything small; what is left takes seconds."""
    c = get_config()
    c.tasks.generated, c.tasks.rl_fresh, c.tasks.rl_checked = 0, 0, 8
    c.model.update(dict(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=32, head_rank=2))
    c.codec.vocab_size = 400
    c.corpus.update(dict(variants_per_task=2, samples_per_task=2))
    c.sft.update(dict(steps=2, batch=4, microbatch=4, checkpoint_every=1))
    c.rollout.update(dict(tasks=2, checked_tasks=1, max_context_tokens=2048))
    c.rl.update(dict(steps=3, microbatch=8))
    c.skills.update(dict(pairs_per_look=2))
    c.evaluation.update(dict(samples=1, max_tasks=2))
    return c
