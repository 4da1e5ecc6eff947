"""Skill topics of narrow use on a GPU: techniques for one kind of task each."""

from __future__ import annotations

# topic, techniques, scope, tags, example, then (name, description, motivation, key idea) for each phrasing
Phrase = tuple[str, str, str, str]
Row = tuple[str, tuple[str, ...], str, tuple[str, ...], str, tuple[Phrase, ...]]

NARROW: tuple[Row, ...] = (
    (
        "matmul_tiles",
        ("large_tiles",),
        "task_specific/matmul",
        ("matmul", "tiles", "dot"),
        (
            "a = tl.load(x_ptr + m[:, None] * K + k[None, :])\n"
            "b = tl.load(w_ptr + k[:, None] * N + n[None, :])\n"
            'acc = tl.dot(a, b, acc, input_precision="ieee")'
        ),
        (
            (
                "large_matmul_tiles",
                "matrix products in tiles of 128x64 with tl.dot",
                (
                    "Each element of a tile is used as often as the other side of the tile is long, so "
                    "small tiles read the inputs many times."
                ),
                (
                    "One program computes a BM x BN tile of the result, looping over K in steps of 32; 64 "
                    "to 128 on a side."
                ),
            ),
            (
                "dot_on_two_dimensional_tiles",
                "let a program own a large tile and accumulate with tl.dot",
                "Sums of products row by row use neither shared memory nor the arithmetic units well.",
                "Load a tile of each input a step, acc = tl.dot(a, b, acc), and store acc once at the end.",
            ),
        ),
    ),
    (
        "tf32x3",
        ("tf32x3",),
        "task_specific/matmul",
        ("matmul", "precision", "tf32x3"),
        'acc = tl.dot(a, b, acc, input_precision="tf32x3")',
        (
            (
                "tf32x3_on_tensor_cores",
                "float32-exact products on tensor cores with tf32x3",
                (
                    "Products in ieee precision do not use the tensor cores at all, and plain tf32 is too "
                    "inexact for float32 results."
                ),
                (
                    'Pass input_precision="tf32x3": three TF32 products recover float32 accuracy and are '
                    "still several times faster."
                ),
            ),
            (
                "three_tf32_products",
                "use input_precision tf32x3 in tl.dot for float32 inputs",
                "The default precision of tl.dot loses ten bits of float32 and fails the check.",
                "Split each product into three of TF32, which Triton does by itself when asked.",
            ),
        ),
    ),
    (
        "grouped_order",
        ("grouped_order",),
        "task_specific/matmul",
        ("matmul", "cache", "order"),
        (
            "rows, cols = tl.num_programs(1), tl.num_programs(0)\n"
            "pm, pn = tl.swizzle2d(tl.program_id(1), tl.program_id(0), rows, cols, 8)\n"
            "m = pm * BM + tl.arange(0, BM)"
        ),
        (
            (
                "grouped_tile_order",
                "order tiles in groups so that neighbours share inputs in L2",
                (
                    "Programs that run together in plain order use one row of tiles of one input but all "
                    "of the other."
                ),
                (
                    "tl.swizzle2d renumbers programs so that eight rows of tiles go together and reuse "
                    "what L2 holds."
                ),
            ),
            (
                "swizzle_programs_for_l2",
                "renumber programs with tl.swizzle2d",
                "For large matrices the inputs do not fit in the L2 cache, and are read again and again.",
                "Visit the result in blocks of 8 tile rows instead of one long row after another.",
            ),
        ),
    ),
    (
        "split_k",
        ("split_k",),
        "task_specific/matmul",
        ("matmul", "split", "atomic"),
        (
            "first = tl.program_id(2) * SPLIT\n"
            "for start in range(first, first + SPLIT, BK):\n"
            "    acc = tl.dot(a, b, acc)\n"
            "tl.atomic_add(out_ptr + i, acc, mask=mask)"
        ),
        (
            (
                "split_the_inner_dimension",
                "split K among programs when the result has few tiles",
                "A small batch gives fewer tiles than the GPU has multiprocessors, and most of them idle.",
                (
                    "A third grid axis takes a part of K each; parts are added with tl.atomic_add into "
                    "zeros, bias and activation follow."
                ),
            ),
            (
                "split_k_for_small_batches",
                "more programs for thin matrix products with a long K",
                "64 rows make 64 tiles of a 4096-wide result, but the inner loop is long.",
                "Cut the loop over K into 4 or 8 parts, one a program, and sum them atomically.",
            ),
        ),
    ),
    (
        "split_rows",
        ("two_stage", "atomic"),
        "task_specific/column",
        ("column", "reduction", "split"),
        (
            "first = tl.program_id(1) * CHUNK\n"
            "for start in range(first, first + CHUNK, BM):\n"
            "    acc += v\n"
            "tl.store(part_ptr + tl.program_id(1) * cols + n, tl.sum(acc, axis=0), mask=n < cols)"
        ),
        (
            (
                "split_rows_of_column_reduction",
                "split the rows of a column reduction among programs",
                "One program for each block of columns gives a few dozen programs, too few for the GPU.",
                (
                    "A second grid axis takes 128 to 256 rows each and writes partial results, which a "
                    "small second kernel brings together."
                ),
            ),
            (
                "partial_column_sums",
                "reduce columns in two stages",
                "Going down all rows in one program leaves most multiprocessors without work.",
                (
                    "First kernel: partial sums of a chunk of rows. Second kernel: reduce the parts. Or "
                    "add the parts with tl.atomic_add."
                ),
            ),
        ),
    ),
    (
        "unrolled",
        ("unrolled",),
        "task_specific/window",
        ("window", "pool", "unroll"),
        (
            "for t in tl.static_range(4):\n"
            "    v = tl.load(x_ptr + row * cols + j * 4 + t, mask=mask)\n"
            "    u = tl.maximum(u, v)"
        ),
        (
            (
                "unroll_the_window",
                "unroll loops over a pooling window or filter with tl.static_range",
                (
                    "A loop of three or four steps spends its time on the counter and waits for each load "
                    "in turn."
                ),
                (
                    "tl.static_range is unrolled at compile time: all loads of the window are in flight "
                    "together."
                ),
            ),
            (
                "static_range_for_taps",
                "tl.static_range over the taps of a convolution",
                "The number of taps is known when the kernel is compiled.",
                (
                    "Write the taps as a static loop over contiguous blocks j + t, which hit the cache "
                    "after the first."
                ),
            ),
        ),
    ),
    (
        "windows_fused",
        ("windows_fused",),
        "task_specific/window",
        ("window", "fusion", "reduction"),
        (
            "for t in tl.static_range(2):\n"
            "    c = j * 2 + t\n"
            "    v = tl.load(x_ptr + row * cols + c, mask=mask)\n"
            "    u = tl.maximum(u, v)\n"
            "s = tl.sum(tl.where(mask, u, 0.0), axis=0)"
        ),
        (
            (
                "pool_inside_the_reduction",
                "compute convolution and pooling inside the reduction that reads them",
                "Convolution, pooling and mean as three kernels write two tensors that are read only once.",
                "In the row kernel compute each pooled value from its window of x, and reduce at once.",
            ),
            (
                "recompute_windows_on_the_fly",
                "one row kernel for windows and the reduction after them",
                "Window results are cheap to compute and expensive to store.",
                "Nest static loops over windows, load from x with a computed column, sum in registers.",
            ),
        ),
    ),
    (
        "carry",
        ("carry",),
        "task_specific/scan",
        ("cumsum", "scan", "carry"),
        "s = tl.sum(v, axis=0)\nv = tl.cumsum(v, axis=0) + carry\ncarry += s",
        (
            (
                "running_sum_with_carry",
                "cumsum in blocks with a carried total",
                "A running sum depends on everything before it, so a row cannot simply be cut into programs.",
                (
                    "Loop over blocks of the row: tl.cumsum inside the block plus the carried sum of "
                    "earlier blocks."
                ),
            ),
            (
                "blockwise_cumsum",
                "tl.cumsum on blocks of a row in one program",
                "A serial loop over columns uses one lane a row, with strided access.",
                "Scan whole contiguous blocks with tl.cumsum and carry their sums.",
            ),
        ),
    ),
    (
        "flash",
        ("flash",),
        "task_specific/attention",
        ("attention", "softmax", "fusion"),
        (
            "new = tl.maximum(top, tl.max(p, axis=1))\n"
            "old = tl.exp(top - new)\n"
            "p = tl.exp(p - new[:, None])\n"
            "s = s * old + tl.sum(p, axis=1)\n"
            "acc = acc * old[:, None] + tl.dot(p, value)"
        ),
        (
            (
                "attention_without_scores",
                "attention in one kernel that never stores the scores",
                (
                    "The score matrix is far larger than keys, queries and values together, and three "
                    "kernels read and write it."
                ),
                (
                    "Loop over blocks of keys with an online softmax, and rescale the accumulator whenever "
                    "the maximum grows."
                ),
            ),
            (
                "streamed_attention",
                "stream keys and values past a block of queries",
                "Scores are needed only until they have weighted the values.",
                (
                    "Hold a block of queries, a running maximum, sum and output; update them for each "
                    "block of keys; divide by the sum at the end."
                ),
            ),
        ),
    ),
)
