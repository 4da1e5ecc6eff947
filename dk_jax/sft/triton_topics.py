"""What the cold start's skills are about on a GPU: one topic a Triton technique, each in several phrasings.

The topics say what a technique does and show it; whether it pays on a task is what verification and RL find
out.
"""

from __future__ import annotations

from dk_jax.sft.skill_topics import SkillTopic
from dk_jax.sft.triton_topics_narrow import NARROW, Phrase, Row
from dk_jax.skills.record import SkillDraft


def triton_catalogue() -> list[SkillTopic]:
    """Topics for Triton modules, those of narrow use last."""
    return [_topic(*row) for row in (*_ROWS, *NARROW)]


def _topic(
    topic: str,
    techniques: tuple[str, ...],
    scope: str,
    tags: tuple[str, ...],
    example: str,
    phrases: tuple[Phrase, ...],
) -> SkillTopic:
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


_ROWS: tuple[Row, ...] = (
    (
        "fuse",
        ("fused",),
        "general",
        ("fusion", "memory", "elementwise"),
        (
            "v = tl.load(x_ptr + i, mask=mask)\n"
            "v = v + bias\n"
            "v = tl.maximum(v, 0.0)\n"
            "tl.store(out_ptr + i, v, mask=mask)"
        ),
        (
            (
                "fuse_neighbouring_operations",
                "compute neighbouring operations in one Triton kernel",
                (
                    "Every separate operation reads its whole input from device memory and writes its "
                    "whole result back, and that traffic is the cost."
                ),
                "Load each element once, apply all operations to the value in registers, store it once.",
            ),
            (
                "one_kernel_no_temporaries",
                "one kernel for the chain instead of a temporary tensor after each step",
                "Elementwise work is bound by memory bandwidth, so temporaries double or triple the time.",
                "Keep a running value v through all steps; no tensor is allocated in between.",
            ),
            (
                "epilogue_in_the_producer",
                "apply bias, scale and activation in the kernel that produces the value",
                (
                    "A matrix product or reduction that stores raw values forces a second kernel to read "
                    "them again."
                ),
                (
                    "Right before tl.store, load the operands of the following steps at the same offsets "
                    "and apply them to the result."
                ),
            ),
        ),
    ),
    (
        "large_block",
        ("large_block",),
        "general",
        ("block", "launch", "elementwise"),
        (
            "i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
            "kernel[(triton.cdiv(n, 1024),)](x, out, n, BLOCK=1024)"
        ),
        (
            (
                "large_elementwise_block",
                "give each program 1024 elements or more",
                (
                    "A program of 64 elements cannot keep enough loads in flight and costs as much to "
                    "start as a large one."
                ),
                (
                    "Choose BLOCK of 1024 to 4096, so that every thread loads several neighbouring "
                    "elements as one vector."
                ),
            ),
            (
                "wide_blocks_for_bandwidth",
                "wide blocks reach the memory bandwidth",
                "Bandwidth needs many bytes in flight on every multiprocessor.",
                "Raise BLOCK until each thread handles 8 to 16 elements; mask the last block.",
            ),
        ),
    ),
    (
        "many_warps",
        ("many_warps",),
        "general",
        ("warps", "registers", "occupancy"),
        "kernel[(rows,)](x, out, cols, BLOCK=4096, num_warps=8)",
        (
            (
                "more_warps_for_big_blocks",
                "num_warps=8 for blocks of 2048 elements and more",
                (
                    "With four warps a block of 4096 needs 32 registers a thread for one value, and each "
                    "value more adds as many."
                ),
                "Pass num_warps=8 at launch, so that the same block is spread over twice as many threads.",
            ),
            (
                "spread_long_rows_over_warps",
                "use eight warps when one program holds a long row or a large tile",
                "Few warps with much work each hide little of the memory latency.",
                "Let the number of warps grow with the block: 4 up to 1024 elements, 8 for a few thousand.",
            ),
        ),
    ),
    (
        "row_program",
        ("row_program",),
        "general",
        ("grid", "index", "bias"),
        (
            "row = tl.program_id(0)\n"
            "j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)\n"
            "bias = tl.load(bias_ptr + j, mask=j < cols)"
        ),
        (
            (
                "rows_in_the_grid",
                "put the row on grid axis 0 and column blocks on axis 1",
                (
                    "A flat index needs an integer modulus by the number of columns for every element, "
                    "just to find its bias."
                ),
                (
                    "Take the row from tl.program_id(0) and columns from a block, so that column operands "
                    "are plain contiguous loads."
                ),
            ),
            (
                "no_modulus_for_columns",
                "index one-per-column operands without a modulus",
                "Integer division is slow on a GPU and hides that the load is contiguous.",
                (
                    "Use a two-dimensional grid: one row a program, offsets row * cols + j, and load the "
                    "operand at j."
                ),
            ),
        ),
    ),
    (
        "row_in_registers",
        ("row_in_registers",),
        "task_specific/row",
        ("reduction", "softmax", "norm"),
        (
            "j = tl.arange(0, BLOCK)\n"
            "v = tl.load(x_ptr + row * cols + j, mask=j < cols, other=0.0)\n"
            "s = tl.sum(v * v, axis=0)\n"
            "BLOCK=triton.next_power_of_2(cols)"
        ),
        (
            (
                "whole_row_in_registers",
                "load a row once and keep it in registers",
                (
                    "A norm or softmax needs its row two or three times, and each sweep over memory costs "
                    "the same again."
                ),
                (
                    "Make BLOCK the next power of two of the row's length, one program a row; reduce with "
                    "tl.sum or tl.max and go on with the same v."
                ),
            ),
            (
                "one_program_one_row",
                "one program per row with a block that covers it",
                "Rows are independent, so they need no communication between programs.",
                (
                    "Load the row with a mask and the neutral element in other, reduce along axis 0, apply "
                    "the result and store."
                ),
            ),
            (
                "single_read_normalisation",
                "normalise a row with a single read of it",
                "The statistics and the result use the same values.",
                (
                    "Rows up to 16384 elements fit in registers: compute mean or maximum from v, then "
                    "transform v itself."
                ),
            ),
        ),
    ),
    (
        "many_rows",
        ("many_rows",),
        "task_specific/row",
        ("rows", "tile", "reduction"),
        (
            "row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)\n"
            "i = row[:, None] * cols + j[None, :]\n"
            "s = tl.sum(v, axis=1, keep_dims=True)"
        ),
        (
            (
                "several_rows_per_program",
                "let one program reduce two to four rows",
                (
                    "With short rows one program a row has too little to load and many threads idle in the "
                    "reduction."
                ),
                "Make a block of ROWS x BLOCK and reduce along axis=1 with keep_dims=True.",
            ),
            (
                "row_tiles",
                "treat a few rows as a two-dimensional block",
                (
                    "More independent loads in flight hide latency, and reductions of several rows share "
                    "their steps."
                ),
                "Offsets row[:, None] * cols + j[None, :], a mask on both, and results of shape [ROWS, 1].",
            ),
        ),
    ),
    (
        "block_accumulator",
        ("block_accumulator",),
        "task_specific/row",
        ("reduction", "loop", "accumulator"),
        (
            "acc = tl.zeros((BLOCK,), dtype=tl.float32)\n"
            "for start in range(0, cols, BLOCK):\n"
            "    acc += tl.load(x_ptr + row * cols + start + tl.arange(0, BLOCK))\n"
            "s = tl.sum(acc, axis=0)"
        ),
        (
            (
                "accumulate_blocks_then_reduce",
                "keep a block of partial sums in the loop and reduce it once",
                "A tl.sum inside the loop makes all threads wait for one another at every step.",
                "Add blocks elementwise into acc, and call tl.sum or tl.max once after the loop.",
            ),
            (
                "reduce_after_the_loop",
                "move tl.sum out of the loop over a row",
                "Cross-thread reductions are slow compared with additions in registers.",
                "Start acc with zeros (or -inf for a maximum), fold every block in, reduce at the end.",
            ),
        ),
    ),
    (
        "online",
        ("online",),
        "task_specific/row",
        ("softmax", "online", "passes"),
        (
            "new = tl.maximum(m, tl.max(v, axis=0))\n"
            "s = s * tl.exp(m - new) + tl.sum(tl.exp(v - new), axis=0)\n"
            "m = new"
        ),
        (
            (
                "online_softmax",
                "find maximum and sum of a row in one sweep",
                (
                    "Finding the maximum, then the sum, then writing takes three sweeps over a row that "
                    "does not fit in registers."
                ),
                (
                    "Carry m and s; when the maximum grows, multiply s by exp(m - new) before adding the "
                    "new block."
                ),
            ),
            (
                "single_sweep_statistics",
                "collect both statistics of a row in one pass",
                "Each sweep over a long row reads it from memory again.",
                (
                    "Keep a running maximum with a rescaled sum, or sums of v and v * v for mean and "
                    "variance, in the same loop."
                ),
            ),
        ),
    ),
    (
        "tiles",
        ("tiled",),
        "general",
        ("tiles", "transpose", "coalesced"),
        (
            "m = tl.program_id(0) * BM + tl.arange(0, BM)\n"
            "n = tl.program_id(1) * BN + tl.arange(0, BN)\n"
            "v = tl.load(x_ptr + m[:, None] * cols + n[None, :])"
        ),
        (
            (
                "tile_both_axes",
                "work on tiles over both axes, 32 to 64 on a side",
                (
                    "Blocks along one axis alone give strides of a whole row in one of the tensors, and "
                    "lanes that share no memory transaction."
                ),
                (
                    "Use offsets m[:, None] and n[None, :], so that reads and writes both run along rows; "
                    "tl.trans turns a tile on the chip."
                ),
            ),
            (
                "two_dimensional_tiles",
                "two-dimensional tiles for column sums, transposes and products",
                (
                    "A column of a matrix is spread over memory; read one column a program and most of "
                    "each transaction is wasted."
                ),
                (
                    "Let a program own a block of rows and columns, with a mask on both, and reduce or "
                    "turn the tile in registers."
                ),
            ),
        ),
    ),
)
