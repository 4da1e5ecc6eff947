"""The ablation of scripts/reproduce.py: one base recipe, the arms' budgets and seeds (what the arms change: dk_jax.reproduce.arms).

Scales: "smollm2" (SmolLM2-135M writes Triton for the learnable tasks on one H100 or H200), "cpu" (the demo's model from scratch writes C++; no
GPU; its tasks hold out families only).
"""

from ml_collections import ConfigDict

from configs.demo import get_config as demo
from configs.learnable import get_config as learnable
from dk_jax.reproduce.arms import Preset

SEEDS = {"full": (0, 1, 2), "no_skills": (0, 1, 2)}


def get_config() -> ConfigDict:
    """The base recipe of the scale "smollm2"; scripts/train.py takes it as any other."""
    c = learnable()
    c.sft.checkpoint_every = 25  # what a piece's end may cost
    c.rl.update(dict(steps=60, checkpoint_every=1, keep_best=""))
    c.rollout.update(dict(selections=2, rollouts=2))  # two chosen schemes and the null scheme
    c.evaluation.update(dict(samples=4, call_samples=0, untrained=False))
    return c


def get_preset(scale: str) -> Preset:
    """Raises KeyError for a scale that is not there."""
    return {"smollm2": _smollm2, "cpu": _cpu}[scale]()


def _smollm2() -> Preset:
    # A step has 48 candidates of rollouts and up to 48 of verifications: 40 to 80 steps. Tokens: 500 for each candidate, so that they end an
    # arm only if it says much besides kernels.
    return Preset(name="smollm2", base=get_config(), candidates=3840, tokens=3840 * 500, seeds=SEEDS)


def _cpu() -> Preset:
    c = demo()
    c.tasks.update(dict(rl_checked=0))
    c.rollout.checked_tasks = 0
    c.rl.update(dict(decay=False, checkpoint_every=1, keep_best=""))
    c.corpus.diversity.on = True
    c.evaluation.update(dict(samples=4, max_tasks=0))
    return Preset(name="cpu", base=c, candidates=1200, tokens=1200 * 150, seeds=SEEDS, shared_start=False)
