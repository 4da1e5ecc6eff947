"""EvoEngineer (arXiv 2510.03760): an evolution of each task's kernels by the model that is evaluated; nothing is trained.

    python scripts/evaluate.py --config=configs/evoengineer.py --workdir=evals/evo --policy=endpoint --base_url=https://host/v1 --model=NAME

Figures are the paper's or its authors' published code's unless their comment says "chosen"; what is not set here is as in
configs/cudaforge.py. The algorithm is in dk_jax/search/evoengineer.py; the number that counts is Fast_p of the best turn. This is the
paper's EvoEngineer-Full. Its other variants:

    --config.evaluation.search.technique=free --config.evaluation.search.population=single         EvoEngineer-Free
    --config.evaluation.search.technique=insight --config.evaluation.search.population=single      EvoEngineer-Insight
    --config.evaluation.search.population=islands                                                  full, with diversity kept by islands
"""

from ml_collections import ConfigDict

from configs.cudaforge import get_config as cudaforge


def get_config() -> ConfigDict:
    c = cudaforge()
    c.sandbox.profile = ""  # its prompts tell times and verdicts
    c.rollout.context = "kernels"  # every trial answers a prompt of its own
    c.evaluation.turns = 45  # trials
    c.evaluation.search = ConfigDict(
        dict(
            name="evoengineer",
            grow=False,  # True: what rollouts teach goes into a library of the workdir, for later tasks
            technique="full",  # what a prompt carries: "free", "insight" or "full"
            population="elites",  # "single", "elites" or "islands"
            size=5,  # kernels that a population keeps (elites and islands)
            initial=5,  # trials from scratch ...
            generation=4,  # ... and trials of each of the 10 generations after them
            islands=3,  # chosen
            migrate_every=3,  # generations; chosen
            insights=3,  # told in a prompt (insight and full)
            elites_shown=1,  # best kernels in a full prompt, beside one or two parents
        )
    )
    return c
