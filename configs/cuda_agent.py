"""CUDA Agent (arXiv 2602.24286), as far as one model and this sandbox go: milestone rewards against eager and torch.compile.

Figures are the paper's unless their comment says "chosen"; what is not set here is as in configs/kevin_32b.py. Of the paper's agent loop
the turns are here, each a whole kernel that is judged; its file and shell tools are not, nor its static skill file, its task synthesis
and its own model.
"""

from ml_collections import ConfigDict

from configs.kevin_32b import get_config as kevin_32b


def get_config() -> ConfigDict:
    c = kevin_32b()
    # -1 fail, 1 correct, 2 faster than eager by 5 %, 3 faster than eager and torch.compile by 5 %
    c.reward.update(dict(kind="milestones"))
    c.sandbox.baselines = ("eager", "torch.compile")
    c.rollout.update(dict(tasks=16, rollouts=8, turns=4, temperature=1.0, context="full"))  # chosen
    c.rl.update(dict(gamma=1.0, advantage="leave_one_out", aggregate="token_mean", steps=150, lr=1e-6, clip_norm=1.0))  # chosen
    c.evaluation.update(dict(samples=4, turns=4, temperature=1.0, top_p=1.0))  # chosen
    return c
