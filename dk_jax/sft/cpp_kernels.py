"""C++ kernels for a task, from good to broken: the material of the cold start.

`cpp_variants` writes each kernel in the bare form (one extern "C" function, sizes as constexpr names such as
x_d1 and out_n). It states an
intent, no verdict: the sandbox compiles, checks and times each of them before any is learnt from.
"""

from __future__ import annotations

from dataclasses import replace

from dk_jax.sft.cpp_blocks import block_variants
from dk_jax.sft.cpp_columns import column_variants, transpose_variants
from dk_jax.sft.cpp_maps import map_variants
from dk_jax.sft.cpp_matmul import matmul_variants
from dk_jax.sft.cpp_mistakes import broken_variants, wrong_variants
from dk_jax.sft.cpp_ops import Generator, Variant, quoting, spec_of
from dk_jax.sft.cpp_rows import norm_variants, reduce_variants
from dk_jax.sft.cpp_windows import scan_variants, window_variants
from dk_jax.tasks.spec import Kind
from dk_jax.tasks.task import Task

TECHNIQUES: dict[str, str] = {
    "fused": "all elementwise steps in one loop on a running value, no temporaries",
    "separate_passes": "several passes over memory, a few steps in each",
    "simd": "#pragma omp simd on the inner loop",
    "parallel": "#pragma omp parallel for on the outer loop",
    "row_loop": "rows outside, columns inside, so that a column's operand is indexed without a modulus",
    "blocked": "loops over blocks that stay in cache",
    "dynamic_schedule": "schedule(dynamic): threads take iterations as they finish",
    "inner_parallel": "threads on the inner loop: one fork and join a row",
    "strided_access": "the inner loop jumps a whole row in memory",
    "hoisted": "what the inner loop does not change is computed before it; a division becomes a product",
    "cached_row": "values of a first pass are kept in the output row for the next pass",
    "multi_accumulator": "several independent accumulators, folded at the end",
    "one_pass": "two passes of a row algorithm made one by algebra",
    "online": "maximum and sum in one sweep, rescaled as the maximum grows",
    "loop_interchange": "loops swapped so that the inner one walks along memory",
    "thread_private": "each thread accumulates into an array of its own, merged at the end",
    "collapse": "collapse(2): both block loops are shared among threads",
    "unrolled": "a short inner loop written out",
    "simd_scan": "#pragma omp scan inside a simd loop",
    "recomputed": "work that an earlier step did is done again",
    "register_tile": "a strip of accumulators that stays in registers while the sum runs",
    "row_tile": "several rows at a time share each weight that is loaded",
    "packed": "the weight is transposed once into a buffer that the inner loop walks along",
    "row_buffer": "each row goes through all stages at once, its values in small local arrays",
}

_GENERATORS: dict[Kind, Generator] = {
    "map": map_variants,
    "reduce": reduce_variants,
    "norm": norm_variants,
    "column": column_variants,
    "matmul": matmul_variants,
    "transpose": transpose_variants,
    "window": window_variants,
    "scan": scan_variants,
    "block": block_variants,
}


def cpp_variants(task: Task) -> list[Variant]:
    """Distinct kernels for a task in a fixed order: good and slow ones, then wrong ones, then broken ones.

    Args:
      task: one with a spec.

    Raises:
      ValueError: the task has no spec.
    """
    spec = spec_of(task)
    generate = _GENERATORS[spec.kind]
    if spec.kind == "matmul" and spec.split()[0]:
        generate = block_variants  # the maps before the product need a buffer
    distinct: dict[str, Variant] = {}
    for variant in generate(task):
        distinct.setdefault(variant.source, variant)
    rights = list(distinct.values())
    variants = [*rights, *wrong_variants(rights), *broken_variants(rights)]
    return [replace(variant, source=quoting(variant.source, task.statements)) for variant in variants]
