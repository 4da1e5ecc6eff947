"""SmolLM2-135M-Instruct on tasks on which there is something to learn: families that share an optimisation, with siblings and whole families
held out (dk_jax.tasks.learnable). Otherwise configs/smollm2_triton.py, on one NVIDIA GPU.

What the tasks and the experts are worth on a card: python scripts/bench/learnable_tasks.py --device cuda:0 --out learnable_tasks.json
"""

from ml_collections import ConfigDict

from configs.smollm2_triton import get_config as smollm2_triton


def get_config() -> ConfigDict:
    c = smollm2_triton()
    c.tasks.update(dict(source="learnable", levels=(2, 3), kinds=()))
    # All 45 training members are timed, and shown often enough that techniques which generated tasks have no use for (long rows split, many
    # short rows in a block) are seen: which of them pays is left for RL.
    c.corpus.update(dict(timed_tasks=45, variants_per_task=4, samples_per_task=8))
    c.evaluation.max_tasks = 0  # all 22 siblings and 15 tasks of held-out families
    return c
