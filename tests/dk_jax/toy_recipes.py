"""Recipes small enough to train in seconds: a tiny model, a few tasks, a judge and a sampler that follow a script.

Nothing that makes a recipe what it is changes: prompts, contexts, rewards, advantages, filters and losses are its own.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from dk_jax.agents import policy, selection, summary
from dk_jax.agents.text import TaskView
from dk_jax.generation import Sample
from dk_jax.generation.tokenizer import train_codec
from dk_jax.models import token_log_probs
from dk_jax.models.config import AGENTS
from dk_jax.rollout.judge import SandboxJudge
from dk_jax.skills.record import SkillDraft
from dk_jax.train import setup
from dk_jax.train.run import Run
from sandbox.protocol import EvaluationResult, Span, Timing, VerificationArm, VerificationResult
from sandbox.verdict.reward import reward

RECIPES = ("davinci_8b", "davinci_14b", "drkernel_14b", "kevin_32b", "cuda_agent")
LENGTH = 768
"""Tokens of the longest sequence."""
ROWS = 2
"""Rows that the sampler scores at once: it is often asked for two."""


_score = jax.jit(token_log_probs, static_argnums=(0,), static_argnames=("temperature",))


def recipe(name: str) -> ConfigDict:
    return import_module(f"configs.{name}").get_config()


def toy(name: str, **changes) -> ConfigDict:
    """The recipe with small sizes, and with `changes` by dotted keys."""
    c = recipe(name)
    c.model = ConfigDict(
        dict(
            init="scratch", source="", train=c.model.train, family="qwen3", d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8,
            d_ff=32, head_rank=c.model.head_rank, lora_rank=0, lora_alpha=16.0, compute_dtype="float32", attention="xla", init_std=0.02,
        )
    )  # fmt: skip
    c.codec = ConfigDict(dict(kind="train", vocab_size=1024, idioms=()))
    c.learner.mesh.update(dict(data=0, fsdp=1, tensor=1))
    c.tasks.update(dict(levels=(1,), generated=0))
    c.sft.steps = 0
    schemes = min(c.rollout.selections, 1) + 1
    c.rollout.update(dict(tasks=2, selections=schemes - 1, rollouts=4 // schemes, turns=2))
    c.rollout.update(dict(max_policy_tokens=200, max_selection_tokens=200, max_summary_tokens=300, max_context_tokens=LENGTH, max_rows=8))
    c.rl.update(dict(steps=2, lr=1e-3, microbatch=8, length_step=LENGTH, checkpoint_every=2))
    c.evaluation.update(dict(samples=1, turns=1, max_tasks=2))
    c.update_from_flattened_dict(changes)
    return c


class Client:
    """Judges by content, rewards as the recipe says."""

    def __init__(self):
        self.judged = 0

    def result(self, task, candidate, options) -> EvaluationResult:
        self.judged += 1
        digest = hashlib.sha256(f"{task.name}{candidate.source}".encode()).digest()
        if digest[0] < 80:
            return EvaluationResult(
                id="x", state="done", stage="built", outcome="incorrect", feedback="max abs err 1.0",
                reward=reward(options.reward, correct=False, speedup=None, coverage=None),
            )  # fmt: skip
        speedup, coverage = 0.5 + digest[1] / 64, (0.2, 0.9)[digest[2] % 2] if options.profile else None
        times = {"candidate": 1.0 / speedup, "eager": 1.0, "torch.compile": 0.5}
        spans = {name: Span(median_ms=ms, low_ms=ms, high_ms=ms, samples=9) for name, ms in times.items()}
        baselines = {name: spans[name] for name in options.baselines}
        timing = Timing(candidate=spans["candidate"], baselines=baselines, speedup=speedup, noisy=False, bound_by="wall")
        earned = reward(options.reward, correct=True, speedup=speedup, coverage=coverage, compile_speedup=timing.credited_against("torch.compile"))
        return EvaluationResult(
            id="x", state="done", stage="timed", outcome="ok", timing=timing, coverage=coverage, feedback="", reward=earned
        )  # fmt: skip

    def abort(self):
        """Nothing is ever waited for."""

    def evaluate(self, task, candidates, options=None, client_key=None, on_result=None):
        results = [self.result(task, candidate, options) for candidate in candidates]
        for i, found in enumerate(results):
            on_result(i, found)
        return results

    def verify(self, arms, options=None, client_key=None):
        def side(arm, candidates):
            return [self.result(arm.task, c, options) for c in candidates]

        judged = [VerificationArm(control=side(a, a.control), treated=side(a, a.treated)) for a in arms]
        return VerificationResult(id="v", state="done", arms=judged)


class Sampler:
    """Says what a script says for the row's key, with the model's own log-probs; notes what it was asked."""

    def __init__(self, codec, static, temperature: float, asked: list):
        self.codec, self.static, self.temperature, self.asked = codec, static, temperature, asked

    def rest(self):
        """Holds nothing."""

    def sample(self, params, prompts, agents, keys, max_new_tokens=None, temperature=None, *, conversations=None, keep=False):
        texts = [self.codec.decode(prompt) for prompt in prompts]
        self.asked += [(AGENTS[a], text) for a, text in zip(agents, texts, strict=True)]
        said = [[*self.codec.encode(says(AGENTS[a], t, int(k))), self.codec.eos_id] for a, t, k in zip(agents, texts, keys, strict=True)]
        size = -(-len(prompts) // ROWS) * ROWS
        tokens, lengths, ids = np.zeros((size, LENGTH), np.int32), np.ones(size, np.int32), np.zeros(size, np.int32)
        for i, (prompt, answer) in enumerate(zip(prompts, said, strict=True)):
            lengths[i], ids[i] = len(prompt) + len(answer), agents[i]
            tokens[i, : lengths[i]] = [*prompt, *answer]
        logp = np.concatenate(
            [np.asarray(_score(self.static, params, *(x[i : i + ROWS] for x in (tokens, lengths, ids)), temperature=self.temperature)[0])
             for i in range(0, size, ROWS)]
        )  # fmt: skip
        own = [logp[i, len(p) - 1 : len(p) - 1 + len(a)] for i, (p, a) in enumerate(zip(prompts, said, strict=True))]
        return [Sample(tokens=a, logp_sample=lp, logp_model=lp, stop="eos") for a, lp in zip(said, own, strict=True)]


def says(agent: str, prompt: str, key: int) -> str:
    """An agent's message."""
    number = key % 97
    if agent == "policy":
        taught = " # taught" if "## Skills" in prompt else ""
        return f"<think>secret {number}</think>\n```python\nclass ModelNew: pass # {number}{taught}\n```\nMy trick was {number}."
    if agent == "selection":
        offered = [line[2:].split(" (")[0] for line in prompt.splitlines() if line.startswith("- skill_")]
        return selection.format(offered[number % 2 : number % 2 + 1], style="chat", think="short", reasons=["fits"][: len(offered)])
    return summary.format([draft(number)], style="chat")


def draft(number: int) -> SkillDraft:
    return SkillDraft(
        name=f"skill_{number}", description="fewer passes over memory", scope="general", tags=("fuse", "memory", f"n{number}"),
        content=f"Motivation: memory.\nKey Idea: one pass instead of {number}.\nExample: tl.load",
    )  # fmt: skip


class ToyRun(Run):
    """A run of a toy; `asked` holds (agent, prompt) of every sampled message. Its codec has read prompts of the recipe's own kind."""

    def __init__(self, cfg: ConfigDict, workdir: Path, skills: int = 0):
        self.client, self.asked = Client(), []
        super().__init__(cfg, workdir, socket="", make_judge=self._toy_judge)
        view = next(iter(self.views.values()))
        codec = train_codec(texts(view), cfg.codec.vocab_size, ())
        (workdir / "codec").mkdir()
        codec.save(workdir / "codec")
        (workdir / "codec" / "done").touch()
        if skills:
            for number in range(100, 100 + skills):
                self.library.activate(self.library.propose(draft(number), language=cfg.sandbox.language))
            self.library.commit(0)

    def _toy_judge(self, cfg, socket, journal):
        options = setup.sandbox_options(cfg)
        fields = dict(device=cfg.sandbox.device, language=cfg.sandbox.language, form=cfg.sandbox.form, max_parallel=1)
        return SandboxJudge(client=self.client, options=options, verify_options=options, journal=journal, **fields)

    def sampler(self, *, temperature, top_p=1.0):
        return Sampler(self.model.codec, self.model.static, temperature or 1.0, self.asked)


def texts(view: TaskView) -> list[str]:
    """Prompts of all agents, for a codec to learn from."""
    return [
        policy.render_first(view, [draft(1)], style="chat", summarise=True),
        selection.render(view, [draft(1)], style="chat"),
        summary.render(view, [draft(1)], first_code="x", first_speedup=1.0, best_code="y", best_speedup=2.0, style="chat"),
        says("policy", "", 1),
        says("summary", "", 1),
    ]
