"""What the learnable set promises, on a card: the expert of each trained family beats eager clearly, and a kernel an operation does not."""

import pytest

from dk_jax.evaluation.scripted_policy import kernels_of
from dk_jax.sft.triton_kernels import triton_variants
from dk_jax.tasks.learnable import families, learnable_tasks
from sandbox.protocol import Candidate, Options, TaskSpec

EXPERTS = 2


@pytest.mark.parametrize("family", [family.name for family in families()])
def test_an_expert_beats_eager_and_a_kernel_an_operation_does_not(server, family):
    task = next(task for task in learnable_tasks("gpu") if task.family == family)
    variants = triton_variants(task)
    sources = [*kernels_of("expert", variants, family)[:EXPERTS], kernels_of("naive", variants, family)[0]]
    spec = TaskSpec(reference=task.reference, name=task.name, device="cuda:0")
    results = server.evaluate(spec, [Candidate(source=source, language="triton") for source in sources], Options(admit=True))
    print(task.name, [(r.outcome, r.timing and round(r.timing.speedup, 2), r.coverage) for r in results])
    assert all(result.outcome == "ok" for result in results), [result.feedback for result in results]
    *experts, naive = (result.timing.speedup for result in results)
    assert max(experts) > 1.5 and naive < 0.8 * max(experts)
