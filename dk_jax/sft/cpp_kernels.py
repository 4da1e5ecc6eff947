"""C++ kernels for a task, from good to broken: the material of the cold start.

`cpp_variants` writes each kernel in the bare form (one extern "C" function, sizes as constexpr names such as x_d1 and out_n). It states an
intent, no verdict: the sandbox compiles, checks and times each of them before any is learnt from.
"""

from __future__ import annotations

from dk_jax.sft.cpp_maps import map_variants
from dk_jax.sft.cpp_mistakes import broken_variants, wrong_variants
from dk_jax.sft.cpp_ops import Generator, Variant, spec_of
from dk_jax.sft.cpp_rows import norm_variants, reduce_variants
from dk_jax.tasks.spec import Kind
from dk_jax.tasks.task import Task

TECHNIQUES: dict[str, str] = {
    "fused": "all elementwise steps in one loop on a running value, no temporaries",
    "separate_passes": "one pass over memory for each step",
    "simd": "#pragma omp simd on the inner loop",
    "parallel": "#pragma omp parallel for on the outer loop",
    "row_loop": "rows outside, columns inside, so that a column's operand is indexed without a modulus",
    "blocked": "loops over blocks that stay in cache",
    "dynamic_schedule": "schedule(dynamic): threads take iterations as they finish",
    "inner_parallel": "threads on the inner loop: one fork and join a row",
    "strided_access": "the inner loop jumps a whole row in memory",
    "hoisted": "what does not change in the inner loop is computed before it, a division becomes a multiplication",
    "cached_row": "values of a first pass are kept in the output row for the next pass",
    "multi_accumulator": "several independent accumulators, folded at the end",
    "one_pass": "two passes of a row algorithm made one by algebra",
    "online": "maximum and sum in one sweep, rescaled as the maximum grows",
}

_GENERATORS: dict[Kind, Generator] = {
    "map": map_variants,
    "reduce": reduce_variants,
    "norm": norm_variants,
}


def cpp_variants(task: Task) -> list[Variant]:
    """Distinct kernels for a task in a fixed order: good and slow ones, then wrong ones, then broken ones.

    Args:
      task: one with a spec.

    Raises:
      ValueError: the task has no spec.
    """
    rights = list({variant.source: variant for variant in _GENERATORS[spec_of(task).kind](task)}.values())
    return [*rights, *wrong_variants(rights), *broken_variants(rights)]
