"""Dr.Kernel on Qwen3-14B-Base (arXiv 2602.05885): the policy alone, turn-level REINFORCE with leave-one-out baselines (TRLOO).

Its two filters are mismatch rejection (MRS) and profiling-based rejection sampling (PRS); PR, the share of device time in the
candidate's own kernels, is a third of the reward. Figures are the paper's unless their comment says "chosen"; what is not set here is
as in configs/davinci_8b.py.
"""

from ml_collections import ConfigDict

from configs.davinci_14b import get_config as davinci_14b


def get_config() -> ConfigDict:
    c = davinci_14b()
    c.reward.update(dict(w_correct=1.0, w_speed=1.0, w_coverage=1.0, speedup_cap=3.0))  # C + C * min(speedup, 3) + C * PR
    c.skills.use = False
    c.rollout.update(dict(tasks=16, selections=0, rollouts=16, turns=3))
    c.rl.update(dict(steps=300, agents=("policy",), gamma=1.0, advantage="leave_one_out"))
    c.rl.update(dict(mismatch_low=0.999, mismatch_high=1.001, mismatch_veto=1e-4))  # MRS
    c.rl.update(dict(profiling_low=0.3, profiling_width=0.1))  # PRS
    c.corpus.update(dict(selection_samples=0, summary_samples=0, skill_share=0.0, untimed_skill_share=0.0))
    return c
