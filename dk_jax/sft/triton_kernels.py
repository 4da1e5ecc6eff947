"""Triton modules for a task, from good to broken: the material of the cold start on a GPU.

`triton_variants` writes each candidate as a whole module in KernelBench form (kernels and a `ModelNew`). It
states an intent, no verdict: the sandbox compiles, checks and times each of them before any is learnt from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dk_jax.sft.cpp_ops import Variant, spec_of
from dk_jax.sft.expert_pipelines import product_rows, row_pipelines
from dk_jax.sft.expert_rows import SHORT_ROWS, SPLIT_ROWS
from dk_jax.sft.triton_columns import COLUMNS
from dk_jax.sft.triton_maps import MAPS, flat
from dk_jax.sft.triton_matmul import MATMULS, attention, attention_of
from dk_jax.sft.triton_mistakes import broken_variants, wrong_variants
from dk_jax.sft.triton_moves import TRANSPOSES, WINDOWS
from dk_jax.sft.triton_ops import Module
from dk_jax.sft.triton_plan import Segment, SegmentKind, plan
from dk_jax.sft.triton_rows import ROWS
from dk_jax.sft.triton_scans import SCANS
from dk_jax.sft.triton_schedules import Schedule
from dk_jax.tasks.render import forward_lines
from dk_jax.tasks.spec import Branch, OpSpec, Stage, is_map
from dk_jax.tasks.task import Task

TECHNIQUES: dict[str, str] = {
    "fused": "neighbouring operations in one kernel, their values kept in registers",
    "separate_kernels": "one kernel for each operation, with tensors in between",
    "partial": "only a small part in Triton, the rest left to PyTorch",
    "large_block": "a thousand elements or more a program",
    "small_block": "few elements a program, many programs",
    "many_warps": "eight warps a program",
    "few_warps": "one or two warps a program",
    "row_program": "a row, or a piece of one, a program: columns are indexed without a modulus",
    "row_in_registers": "a whole row is loaded once and kept in registers",
    "many_rows": "a two-dimensional block of several rows a program",
    "looped_row": "a loop over blocks of a row",
    "block_accumulator": "a block-wide accumulator in the loop, reduced once after it",
    "online": "maximum and sum (or both moments) in one sweep, rescaled as the maximum grows",
    "carry": "a loop that carries the running sum of what came before",
    "tiled": "a two-dimensional tile a program",
    "large_tiles": "tiles of 64 and more, larger than the plain kernel's",
    "small_tiles": "tiles of 32 or less",
    "two_stage": "parts in a first kernel, brought together by a second",
    "atomic": "programs add their parts with an atomic operation",
    "split_k": "the inner dimension of a matrix product split among programs",
    "grouped_order": "programs ordered in groups, so that neighbours share tiles in the L2 cache",
    "pipelined": "four stages of loads in flight in the loop",
    "tf32x3": "tl.dot on tensor cores in three TF32 products, as exact as float32",
    "no_dot": "a matrix product as sums of products, without tl.dot",
    "unrolled": "the loop over a window unrolled with tl.static_range",
    "windows_fused": "convolution and pooling computed inside the reduction that uses them",
    "row_pipeline": "several normalisations of a row, one and its reduction, or a product and its norm, in one kernel",
    "flash": "attention in one kernel that never writes the scores",
    "strided_access": "neighbouring lanes are a whole row apart in memory",
}

# Longer modules (three matrix products with a kernel an operation, say) are too much for a small model.
_LONGEST_LINES = 90

_SCHEDULES: dict[SegmentKind, tuple[Schedule, ...]] = {
    "map": MAPS,
    "reduce": (*SPLIT_ROWS, *SHORT_ROWS, *ROWS),
    "norm": (*SHORT_ROWS, *ROWS),
    "column": COLUMNS,
    "matmul": MATMULS,
    "transpose": TRANSPOSES,
    "window": WINDOWS,
    "scan": SCANS,
}


def triton_variants(task: Task) -> list[Variant]:
    """Distinct modules for a task in a fixed order: good and slow ones, then wrong ones, then broken ones.

    Args:
      task: one with a spec.

    Raises:
      ValueError: the task has no spec.
    """
    spec = spec_of(task)
    rights = _scheduled(task, plan(spec), _together(spec))
    if len(plan(spec, windows=True)) < len(plan(spec)):
        rights = _scheduled(task, plan(spec, windows=True), ("fused", "windows_fused")) + rights
    if attention_of(spec):
        rights = _attentions(task, spec) + rights
    rights = row_pipelines(task, spec) + product_rows(task, spec) + rights
    separate = plan(spec, fuse=False)
    if len(separate) > len(plan(spec)):
        rights += _scheduled(task, separate, ("separate_kernels",), at_most=3, intent="slow")
    rights += _partials(task, spec)
    rights = list(
        {
            variant.source: variant for variant in rights if variant.source.count("\n") <= _LONGEST_LINES
        }.values()
    )
    return [*rights, *wrong_variants(rights), *broken_variants(rights)]


def _together(spec: OpSpec) -> tuple[str, ...]:
    segments = plan(spec)
    return (
        ("fused",) if any(len(s.before) + len(s.after) + (s.core is not None) > 1 for s in segments) else ()
    )


def _scheduled(
    task: Task,
    segments: Sequence[Segment],
    techniques: Sequence[str],
    *,
    at_most: int | None = None,
    intent: str | None = None,
) -> list[Variant]:
    """A module for each rank of schedule: its first, second, ... schedule for every kind of segment in it.

    A kind with fewer schedules than the others starts again; a module is meant to be slow if any of its
    kernels is.
    """
    kinds = {segment.kind for segment in segments}
    fitting = {
        kind: [
            s
            for s in _SCHEDULES[kind]
            if all(s.fits(segment) for segment in segments if segment.kind == kind)
        ]
        for kind in kinds
    }
    found = []
    ranks = max(map(len, fitting.values()))
    for rank in range(min(ranks, at_most or ranks)):
        chosen = {kind: schedules[rank % len(schedules)] for kind, schedules in fitting.items()}
        module = Module(task)
        for segment in segments:
            chosen[segment.kind].write(module, segment)
        slow = any(schedule.intent == "slow" for schedule in chosen.values())
        used = frozenset(techniques).union(*(schedule.techniques for schedule in chosen.values()))
        found.append(
            Variant(source=module.text(), techniques=used, intent=intent or ("slow" if slow else "good"))
        )
    return found


def _attentions(task: Task, spec: OpSpec) -> list[Variant]:
    found = []
    for options, techniques in (
        ({"precision": "tf32x3"}, ("tf32x3",)),
        ({}, ()),
        ({"bm": 128, "bn": 32, "warps": 8, "precision": "tf32x3"}, ("tf32x3", "large_tiles", "many_warps")),
        ({"bm": 32, "bn": 64}, ("small_tiles",)),
    ):
        module = Module(task)
        attention(module, spec, **options)
        found.append(
            Variant(
                source=module.text(),
                techniques=frozenset(("fused", "flash", "tiled", *techniques)),
                intent="good",
            )
        )
    return found


def _partials(task: Task, spec: OpSpec) -> list[Variant]:
    """Modules that leave all but the last elementwise stages to PyTorch, down to a kernel that copies."""
    tail = 0
    while tail < len(spec.stages) and is_map(spec.stages[-1 - tail]):
        tail += 1
    found = []
    for kept in sorted({min(tail, 1), tail if tail < len(spec.stages) else 1}):
        head: tuple[Stage, ...] = spec.stages[: len(spec.stages) - kept]
        if not head:
            continue
        module = Module(task)
        module.run(*forward_lines(dataclasses.replace(spec, stages=head)))
        names = {argument.name: argument.name for argument in spec.arguments} | _branches(head)
        shape = spec.out_shape
        flat(
            module,
            Segment(
                before=spec.stages[len(head) :],
                core=None,
                after=(),
                in_shape=shape,
                widths=shape[-1:],
                out_shape=shape,
                source="x",
                target="out",
                expressions=names,
            ),
        )
        found.append(Variant(source=module.text(), techniques=frozenset(("partial",)), intent="slow"))
    return found


def _branches(stages: Sequence[Stage]) -> dict[str, str]:
    """In PyTorch's part of forward a branch has its own name."""
    return {stage.name: stage.name for stage in stages if isinstance(stage, Branch)}
