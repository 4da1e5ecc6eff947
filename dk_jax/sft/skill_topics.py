"""What the cold start's skills are about: one topic a technique, each in several phrasings, so that a skill
is text and not a label.

The topics say what a technique does and shows it; whether it pays on a task is what verification and RL find
out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dk_jax.skills.record import SkillDraft


@dataclass(frozen=True, kw_only=True)
class SkillTopic:
    """A subject that skills may be written about.

    Attributes:
      topic: its name.
      techniques: techniques that a skill on it teaches (keys of a kernel generator's TECHNIQUES).
      phrasings: drafts that say the same in different words; names are unique over the catalogue.
    """

    topic: str
    techniques: frozenset[str]
    phrasings: tuple[SkillDraft, ...]


def skill_catalogue() -> list[SkillTopic]:
    """Topics for C++ kernels, those of narrow use last."""
    return [_topic(*row) for row in _ROWS]


def topic_for(techniques: Collection[str]) -> SkillTopic | None:
    """The most telling topic about a kernel with these techniques: the last in the catalogue that they cover,
    or None."""
    found = [topic for topic in skill_catalogue() if topic.techniques <= frozenset(techniques)]
    return found[-1] if found else None


# topic, techniques, scope, tags, example, then (name, description, motivation, key idea) for each phrasing
_Phrase = tuple[str, str, str, str]
_Row = tuple[str, tuple[str, ...], str, tuple[str, ...], str, tuple[_Phrase, ...]]


def _topic(
    topic: str,
    techniques: tuple[str, ...],
    scope: str,
    tags: tuple[str, ...],
    example: str,
    phrases: tuple[_Phrase, ...],
):
    drafts = tuple(
        SkillDraft(
            name=name,
            description=description,
            scope=scope,
            tags=tags,
            content=f"Motivation: {motivation}\nKey Idea: {idea}\nExample:\n{example}",
        )
        for name, description, motivation, idea in phrases
    )
    return SkillTopic(topic=topic, techniques=frozenset(techniques), phrasings=drafts)


_ROWS: tuple[_Row, ...] = (
    (
        "fuse",
        ("fused",),
        "general",
        ("fusion", "memory", "elementwise"),
        "float v = x[i];\nv = v * 2.0f;\nout[i] = v;",
        (
            (
                "fuse_elementwise",
                "do all elementwise steps in one loop",
                "each pass over memory costs time",
                "keep a running value v",
            ),
            (
                "one_loop_for_all_steps",
                "one loop instead of one pass a step",
                "temporaries are slow",
                "load once, compute, store once",
            ),
            (
                "no_temporaries",
                "avoid temporary arrays between steps",
                "memory is slower than arithmetic",
                "chain the steps on v",
            ),
        ),
    ),
    (
        "simd",
        ("simd",),
        "general",
        ("simd", "vector", "openmp"),
        "#pragma omp simd\nfor (long j = 0; j < x_d1; ++j) {",
        (
            (
                "simd_inner_loop",
                "vectorize the inner loop with omp simd",
                "plain loops run on one lane",
                "put omp simd on the inner loop",
            ),
            (
                "use_vector_lanes",
                "use all vector lanes of the core",
                "scalar code wastes lanes",
                "a pragma makes the loop vector code",
            ),
            ("vectorize_row", "omp simd over the columns of a row", "columns are contiguous", "simd over j"),
        ),
    ),
    (
        "parallel",
        ("parallel",),
        "general",
        ("threads", "openmp", "parallel"),
        "#pragma omp parallel for\nfor (long i = 0; i < x_d0; ++i) {",
        (
            (
                "parallel_rows",
                "spread rows over threads",
                "rows are independent",
                "omp parallel for on the outer loop",
            ),
            (
                "use_all_threads",
                "use every thread with omp parallel for",
                "one thread leaves cores idle",
                "share the outer loop",
            ),
            (
                "thread_outer_loop",
                "threads outside, not inside",
                "a fork for each row is slow",
                "one parallel loop outside",
            ),
        ),
    ),
    (
        "row_loop",
        ("row_loop",),
        "task_specific/map",
        ("rows", "bias", "index"),
        "long r = i * x_d1;\nfloat v = x[r + j];\nv = v + bias[j];",
        (
            (
                "row_and_column_loops",
                "two loops give the column index",
                "a modulus for each element is slow",
                "loop i and j, read bias[j]",
            ),
            (
                "avoid_modulus",
                "no modulus for column operands",
                "bias[i % bias_n] blocks vector loads",
                "nest rows and columns",
            ),
        ),
    ),
    (
        "hoist",
        ("hoisted",),
        "task_specific/norm",
        ("division", "hoist", "invariant"),
        "float q = 1.0f / s;\nv = v * q;",
        (
            (
                "hoist_division",
                "divide once a row, then multiply",
                "division is slow",
                "compute the reciprocal before the loop",
            ),
            (
                "reciprocal_before_loop",
                "move invariant work out of the loop",
                "s does not change in the loop",
                "multiply by q",
            ),
        ),
    ),
    (
        "cached_row",
        ("cached_row",),
        "general",
        ("cache", "rows", "reuse"),
        "v = expf(v - m);\ns += v;\nout[r + j] = v;",
        (
            (
                "keep_row_values",
                "keep values of the first pass in out",
                "computing them again is slow",
                "store v, read it in the next pass",
            ),
            (
                "reuse_first_pass",
                "do not compute the same row twice",
                "expf costs more than a load",
                "write to out and scale it later",
            ),
        ),
    ),
    (
        "accumulators",
        ("multi_accumulator",),
        "task_specific/reduce",
        ("sum", "accumulators", "latency"),
        "float t[16];\nt[k] += v;",
        (
            (
                "many_accumulators",
                "several accumulators for one sum",
                "one chain of adds waits",
                "sixteen sums, folded at the end",
            ),
            (
                "break_sum_chain",
                "split a long sum into lanes",
                "each add waits for the last",
                "use an array t of partial sums",
            ),
        ),
    ),
    (
        "one_pass",
        ("one_pass",),
        "task_specific/norm",
        ("norm", "statistics", "passes"),
        "s += v;\nt += v * v;",
        (
            (
                "single_pass_stats",
                "mean and variance in one pass",
                "each pass reads the row again",
                "sum v and v * v together",
            ),
            (
                "fewer_row_passes",
                "merge passes over a row",
                "a row is read too often",
                "take all sums in one loop",
            ),
        ),
    ),
    (
        "interchange",
        ("loop_interchange",),
        "general",
        ("loops", "order", "stride"),
        "for (long i = 0; i < x_d0; ++i)\nfor (long j = 0; j < x_d1; ++j) t[j] += x[i * x_d1 + j];",
        (
            (
                "swap_loops",
                "inner loop along memory",
                "jumps by a row miss the cache",
                "swap the loops, accumulate a row",
            ),
            ("walk_contiguous", "make the inner loop contiguous", "strided loads are slow", "put j inside"),
        ),
    ),
    (
        "blocked",
        ("blocked",),
        "general",
        ("blocking", "cache", "tiles"),
        "for (long b = 0; b < x_d1; b += 64)\nfor (long j = b; j < b + 64; ++j) {",
        (
            (
                "block_for_cache",
                "work in blocks that fit the cache",
                "whole rows do not stay in cache",
                "loop over blocks, then inside",
            ),
            (
                "tile_loops",
                "tile the loops",
                "data is loaded again and again",
                "finish one tile before the next",
            ),
        ),
    ),
    (
        "thread_private",
        ("thread_private",),
        "task_specific/column",
        ("columns", "threads", "reduction"),
        "#pragma omp parallel for reduction(+:t[:x_d1])",
        (
            (
                "private_column_sums",
                "each thread has its own column sums",
                "shared sums race",
                "a reduction clause on the array",
            ),
            (
                "reduce_array_clause",
                "array reduction for column sums",
                "threads must not share t",
                "openmp adds the copies",
            ),
        ),
    ),
    (
        "register_tile",
        ("register_tile",),
        "task_specific/matmul",
        ("matmul", "registers", "tiles"),
        "float t[64] = {0.0f};\nt[c] += a * w[k * out_d1 + b + c];",
        (
            (
                "register_tile",
                "accumulate a tile in registers",
                "storing sums each step is slow",
                "a small array t over columns",
            ),
            (
                "tile_columns",
                "column tiles for matmul",
                "out is read and written each k",
                "keep 64 sums, store once",
            ),
        ),
    ),
    (
        "packed",
        ("packed",),
        "task_specific/matmul",
        ("matmul", "packing", "linear"),
        "p[k * out_d1 + j] = fc_weight[j * x_d1 + k];",
        (
            (
                "pack_weight",
                "transpose the weight once",
                "a linear weight is stored by output",
                "pack it, then add rows of p",
            ),
            (
                "transposed_copy",
                "copy the weight for contiguous rows",
                "sums over k do not vectorize well",
                "walk rows of the copy",
            ),
        ),
    ),
    (
        "unrolled",
        ("unrolled",),
        "task_specific/window",
        ("window", "unroll", "stencil"),
        "v = x[r + j];\ns += v * w[i * 3 + 0];\nv = x[r + j + 1];",
        (
            (
                "unroll_window",
                "write out the window loop",
                "a short loop stops vector code",
                "one statement for each place",
            ),
            (
                "no_inner_window_loop",
                "unroll short stencils",
                "loop overhead is large here",
                "repeat the statement",
            ),
        ),
    ),
    (
        "simd_scan",
        ("simd_scan",),
        "task_specific/scan",
        ("scan", "cumsum", "simd"),
        "#pragma omp simd reduction(inscan, +:s)\ns += v;\n#pragma omp scan inclusive(s)",
        (
            (
                "simd_prefix_sum",
                "vectorize a running sum",
                "a running sum is serial",
                "use an inclusive scan",
            ),
            ("inclusive_scan", "omp scan for cumsum", "each step needs the last", "let openmp scan in lanes"),
        ),
    ),
    (
        "row_buffer",
        ("row_buffer",),
        "task_specific/block",
        ("block", "buffers", "fusion"),
        "float a[x_d1];\na[j] = v;",
        (
            (
                "row_buffers",
                "take a row through all stages",
                "whole temporaries leave the cache",
                "small local arrays for one row",
            ),
            (
                "stage_by_row",
                "all stages for one row at a time",
                "each stage swept all rows",
                "keep the row in a local array",
            ),
        ),
    ),
)
