"""Which of a task's generated kernels is the ceiling, which the floor: by the optimisation that its family stands for.

Of the built-in and generated tasks nothing is said here; there, the kernel with the most techniques is taken for the best.
"""

from __future__ import annotations

from collections.abc import Sequence

from dk_jax.sft.corpus import Variant

EXPERT: dict[str, frozenset[str]] = {
    "elementwise_chain": frozenset(("fused", "large_block", "many_warps")),
    "chain_row_reduction": frozenset(("fused", "row_in_registers", "many_warps")),
    "norm_with_neighbours": frozenset(("fused", "row_in_registers", "many_warps")),
    "online_long_rows": frozenset(("fused", "looped_row", "online", "many_warps")),
    "few_long_rows": frozenset(("fused", "two_stage", "many_warps")),
    "many_short_rows": frozenset(("fused", "many_rows", "large_block")),
    "column_reduction": frozenset(("fused", "tiled", "atomic")),
    "layout_change": frozenset(("fused", "tiled", "large_tiles")),
    "matmul_epilogue": frozenset(("fused", "tiled", "large_tiles", "tf32x3")),
    "window_chain": frozenset(("fused", "unrolled", "large_block")),
    "chain_scan": frozenset(("fused", "row_in_registers", "many_warps")),
    "norm_inside_residual": frozenset(("fused", "row_in_registers", "many_warps")),
    "norm_then_reduction": frozenset(("fused", "row_pipeline", "row_in_registers", "many_warps")),
    "norm_after_norm": frozenset(("fused", "row_pipeline", "row_in_registers", "many_warps")),
    "matmul_then_norm": frozenset(("fused", "row_pipeline", "tiled", "tf32x3")),
    "window_then_reduction": frozenset(("fused", "windows_fused")),
}
"""Techniques of the experts of each family of the learnable set."""

NAIVE = frozenset(("separate_kernels",))
"""Techniques of its naive kernels."""


def ranked(kind: str, family: str, variants: Sequence[Variant]) -> list[Variant]:
    """Kernels of one kind and of one task in the order in which they stand for it.

    Args:
      kind: "expert" or "naive".
      family: the task's, of the learnable set or any other.
      variants: its kernels of that kind, in the generator's order.

    Returns:
      Of the learnable set, first those with most of the techniques above (of one kernel an operation, for "naive"), the plainest of equals
      first; of other tasks, experts by the number of their techniques, and others as they were.
    """
    if family not in EXPERT:
        return sorted(variants, key=lambda v: -len(v.techniques)) if kind == "expert" else list(variants)
    wanted = EXPERT[family] if kind == "expert" else NAIVE
    return sorted(variants, key=lambda v: (-len(v.techniques & wanted), len(v.techniques - wanted)))
