"""CudaForge (arXiv 2511.01884): a Coder and a Judge, both the model that is evaluated; nothing is trained.

    python scripts/evaluate.py --config=configs/cudaforge.py --workdir=evals/forge --policy=endpoint --base_url=https://host/v1 --model=NAME
    python scripts/evaluate.py --config=configs/cudaforge.py --workdir=evals/forge --policy=hf:Qwen3-8B --library=runs/davinci

Figures are the paper's unless their comment says "chosen"; what is not set here is as in configs/davinci_8b.py. The algorithm is in
dk_jax/search/cudaforge.py; the number that counts is Fast_p of the best turn.
"""

from ml_collections import ConfigDict

from configs.davinci_8b import get_config as davinci_8b


def get_config() -> ConfigDict:
    c = davinci_8b()
    c.sft.steps = 0
    c.tasks.generated = 0
    # Any checkpoint, on one card beside the sandbox's (hf:DIR); weights are only read.
    c.model.update(dict(init="huggingface", param_dtype="bfloat16", attention="xla"))
    c.learner.mesh.fsdp = 1
    c.sandbox.language = "cuda"
    c.sandbox.profile = "ncu"  # the Judge reads hardware counters; "" where a GPU does not permit them
    c.sandbox.build_s = 240.0  # chosen: CUDA sources compile for longer
    # Chosen: a message may reason. A later prompt holds task, one kernel, its verdict and one instruction.
    c.rollout.update(dict(max_policy_tokens=16_384, max_context_tokens=32_768, max_rows=16))
    c.evaluation.update(dict(samples=1, turns=10, temperature=1.0, top_p=1.0, max_tasks=0))  # 10 rounds; temperature chosen
    c.evaluation.search = ConfigDict(
        dict(
            name="cudaforge",
            grow=False,  # True: what rollouts teach goes into a library of the workdir, for later tasks
            card="h100",  # whose data sheet the Judge reads (dk_jax.search.cudaforge_cards); "" for none
            judge_tokens=0,  # longest judgement; 0: as long as a kernel's message
        )
    )
    return c
