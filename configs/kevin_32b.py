"""Kevin on a 32B model (arXiv 2507.11948): CUDA, short contexts over many turns, one baseline for all turns of a task.

Figures are the paper's unless their comment says "chosen"; what is not set here is as in configs/drkernel_14b.py. A later turn sees the
kernels so far, the model's own short summaries and the feedback, none of the reasoning. The paper starts from QwQ-32B, of the
Qwen2.5 family, which is not among dk_jax.models.presets; Qwen3-32B is its successor of the same size. There is no cold start.
"""

from ml_collections import ConfigDict

from configs.drkernel_14b import get_config as drkernel_14b


def get_config() -> ConfigDict:
    c = drkernel_14b()
    c.model.init = "qwen3-32b"  # chosen, see above
    c.learner.mesh.fsdp = 16  # chosen: two hosts of eight cards hold it
    c.tasks.generated = 0
    c.sft.steps = 0
    c.sandbox.language = "cuda"
    c.sandbox.build_s = 240.0  # chosen: CUDA sources compile for longer
    # S = 0.3 C + C * T_ref / T_kernel, without a cap (here 1000); fallbacks to PyTorch get nothing, which the sandbox sees to.
    c.reward.update(dict(w_correct=0.3, w_speed=1.0, w_coverage=0.0, speedup_cap=1000.0))
    c.rollout.update(dict(tasks=8, rollouts=16, turns=4, temperature=0.9, context="kernels"))
    c.rollout.update(dict(max_policy_tokens=16_384, max_context_tokens=32_768))  # chosen
    c.rl.update(
        dict(
            gamma=0.4,
            advantage="all_turns",  # (R - mean) / std over all turns of all 16 rollouts of a task
            aggregate="constant_length",
            loss_scale=16_384.0,  # the longest answer
            clip_low=0.2,
            clip_high=0.28,
            clip_norm=0.05,
            steps=100,  # chosen
            lr=2e-6,  # chosen
            microbatch=16,  # chosen
            mismatch_low=0.0,  # no mismatch rejection
            mismatch_high=0.0,
            mismatch_veto=0.0,
            profiling_low=0.0,  # no profiling rejection
        )
    )
    c.sft.microbatch = 16  # of no use here but checked; as rl.microbatch
    c.evaluation.update(dict(samples=16, turns=8, temperature=0.9, top_p=1.0))  # best of 16; temperature as in training
    return c
