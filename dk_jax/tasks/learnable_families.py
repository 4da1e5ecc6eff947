"""The tables of the learnable set: families of tasks whose members share one optimisation, with siblings held out.

A member's first sizes are small ones, which an interpreter checks in seconds and no block divides; the second are those of a GPU, where
tensors are larger than its L2 cache (64 MiB and more), or as large together, and PyTorch eager takes 50 us to 2 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

from dk_jax.tasks.families import Member, bias, c, fc, fixed, norm, scale, t, u, v
from dk_jax.tasks.families_layers import conv, pool, w
from dk_jax.tasks.spec import Branch, ColReduce, Cumsum, RowReduce, Transpose


@dataclass(frozen=True, kw_only=True)
class LearnableFamily:
    """Tasks that one optimisation makes fast.

    Attributes:
      name: of the family.
      optimisation: what its experts do, in one line.
      train: members to learn from; none in a family that is held out as a whole.
      held_out: siblings of these, other compositions; or all members of a held-out family.
    """

    name: str
    optimisation: str
    train: tuple[Member, ...] = ()
    held_out: tuple[Member, ...]


def total(fn: str) -> RowReduce:
    """A reduction of rows."""
    return RowReduce(fn=fn)


def column(fn: str) -> ColReduce:
    """A reduction of columns."""
    return ColReduce(fn=fn)


def trained_families() -> list[LearnableFamily]:
    """Families with training members and held-out siblings."""
    return [
        _chains(), _row_reductions(), _norms(), _long_rows(), _split_rows(), _short_rows(), _columns(), _layouts(), _matmuls(), _windows(),
        _scans(),
    ]  # fmt: skip


def _chains() -> LearnableFamily:
    M, wide, tall, small = Member, (4096, 4096), (8192, 2048), (5, 300)
    return LearnableFamily(
        name="elementwise_chain",
        optimisation="one kernel for the chain: every tensor is read or written once",
        train=(
            M("silu_gate", small, wide, fixed(bias(), u("silu"), t("mul", "gate", "sigmoid"), c("mul", 2.0))),
            M("residual_tanh", small, tall, fixed(t("add", "y"), u("tanh"), scale(), c("add", 0.5))),
            M("blend_gelu", small, wide, fixed(c("mul", 0.7), t("add", "y", factor=0.3), u("gelu"), bias())),
            M("clamped_difference", small, tall, fixed(scale(), u("clamp", -1.0, 1.5), t("sub", "y"), u("abs"), c("mul", 0.5))),
            M("rooted", small, wide, fixed(u("square"), c("add", 1.0), u("sqrt"), t("mul", "y"))),
        ),
        held_out=(
            M("relu_residual", small, wide, fixed(scale(), u("relu"), t("add", "y"), u("sigmoid"), c("mul", 3.0))),
            M("gated_softplus", small, tall, fixed(t("mul", "gate", "tanh"), bias(), u("softplus"), c("sub", 0.5))),
        ),
    )  # fmt: skip


def _row_reductions() -> LearnableFamily:
    M, wide, tall, small = Member, (4096, 4096), (8192, 2048), (5, 300)
    return LearnableFamily(
        name="chain_row_reduction",
        optimisation="the chain inside the kernel that reduces the row: nothing of the input's size is written",
        train=(
            M("squared_error", small, wide, fixed(t("sub", "y"), u("square"), scale(), total("sum"), c("mul", 0.1))),
            M("silu_product", small, tall, fixed(u("silu"), t("mul", "y"), bias(), total("sum"))),
            M("gated_max", small, wide, fixed(bias(), t("mul", "gate", "sigmoid"), total("amax"), c("sub", 1.0))),
            M("blend_logsumexp", small, tall, fixed(c("mul", 0.5), t("add", "y", factor=0.5), total("logsumexp"))),
        ),
        held_out=(
            M("softsign_length", small, wide, fixed(scale(), u("softsign"), t("add", "y"), total("l2"))),
            M("tanh_distance", small, tall, fixed(u("tanh"), t("sub", "y"), u("abs"), total("sum"), c("mul", 0.5))),
        ),
    )  # fmt: skip


def _norms() -> LearnableFamily:
    M, wide, tall, small = Member, (4096, 4096), (8192, 2048), (5, 300)
    return LearnableFamily(
        name="norm_with_neighbours",
        optimisation="the row stays in registers from what precedes its normalisation to what follows it",
        train=(
            M("add_rms_scale", small, tall, fixed(t("add", "y"), norm("rms_norm"), scale(), u("silu"))),
            M("layer_norm_gelu", small, wide, fixed(norm("layer_norm"), scale(), bias(), u("gelu"))),
            M("bias_softmax_gate", small, tall, fixed(bias(), norm("softmax"), t("mul", "gate"), c("mul", 50.0))),
            M("silu_l2", small, wide, fixed(u("silu"), norm("l2_normalize"), c("mul", 20.0), t("add", "y"))),
        ),
        held_out=(
            M("product_layer_norm", small, tall, fixed(t("mul", "y"), norm("layer_norm"), bias(), u("relu"))),
            M("scaled_log_softmax", small, wide, fixed(scale(), c("mul", 2.0), norm("log_softmax"), t("add", "y"))),
        ),
    )  # fmt: skip


def _long_rows() -> LearnableFamily:
    M, gpu, longer, small = Member, (512, 32768), (256, 65536), (3, 2500)
    return LearnableFamily(
        name="online_long_rows",
        optimisation="rows too long for registers: statistics in one sweep over blocks (maximum and sum rescaled together), then one to write",
        train=(
            M("bias_softmax", small, gpu, fixed(bias(), norm("softmax"), c("mul", 10000.0), t("mul", "y"))),
            M("sigmoid_softmax", small, longer, fixed(scale(), u("sigmoid"), c("mul", 4.0), norm("softmax"), c("mul", 10000.0))),
            M("log_softmax_gate", small, gpu, fixed(c("mul", 2.0), norm("log_softmax"), scale(), t("mul", "gate", "sigmoid"))),
            M("rms_relu", small, longer, fixed(bias(), norm("rms_norm"), u("relu"), scale())),
        ),
        held_out=(
            M("tanh_softmax", small, gpu, fixed(u("tanh"), norm("softmax"), t("mul", "y"), c("mul", 10000.0), u("abs"))),
            M("shifted_log_softmax", small, longer, fixed(u("softplus"), bias(), norm("log_softmax"), c("mul", 0.5))),
        ),
    )  # fmt: skip


def _split_rows() -> LearnableFamily:
    # Sums of values of one sign: of others, the sum of a million would be nothing but rounding.
    M, gpu, fewer, small = Member, (16, 1 << 20), (4, 1 << 22), (3, 40000)
    return LearnableFamily(
        name="few_long_rows",
        optimisation="each row split among many programs, whose parts a second kernel or an atomic operation brings together",
        train=(
            M("absolute_error", small, gpu, fixed(t("sub", "y"), u("abs"), total("sum"), c("mul", 0.001))),
            M("weighted_square", small, fewer, fixed(scale(), u("square"), c("mul", 0.001), total("sum"))),
            M("length", small, gpu, fixed(bias(), u("relu"), total("l2"), c("mul", 0.5))),
            M("blend_max", small, gpu, fixed(c("mul", 0.5), t("add", "y"), total("amax"), c("mul", 2.0))),
        ),
        held_out=(
            M("softplus_product", small, gpu, fixed(u("softplus"), t("mul", "y", draw="positive"), total("sum"), c("mul", 0.001))),
            M("gated_min", small, fewer, fixed(scale(), bias(), u("leaky_relu", 0.1), c("mul", 3.0), total("amin"))),
        ),
    )  # fmt: skip


def _short_rows() -> LearnableFamily:
    M, narrow, wider, small = Member, (262144, 64), (131072, 128), (600, 40)
    return LearnableFamily(
        name="many_short_rows",
        optimisation="a two-dimensional block of many short rows a program",
        train=(
            M("bias_softmax_relu", small, narrow, fixed(bias(), u("relu"), norm("softmax"), c("mul", 10.0))),
            M("residual_layer_norm", small, wider, fixed(t("add", "y"), norm("layer_norm"), u("silu"), c("mul", 1.5))),
            M("gelu_sum", small, narrow, fixed(u("gelu"), scale(), total("sum"), c("mul", 0.5))),
            M("rms_tanh", small, wider, fixed(c("mul", 2.0), norm("rms_norm"), t("mul", "y"), u("tanh"))),
        ),
        held_out=(
            M("gated_l2", small, narrow, fixed(t("mul", "gate", "sigmoid"), norm("l2_normalize"), scale(), bias())),
            M("difference_logsumexp", small, wider, fixed(t("sub", "y"), c("mul", 0.5), bias(), total("logsumexp"))),
        ),
    )  # fmt: skip


def _columns() -> LearnableFamily:
    M, wide, tall = Member, (8192, 2048), (300, 70)
    return LearnableFamily(
        name="column_reduction",
        optimisation="tiles that run along rows while columns are reduced, rows split among programs",
        train=(
            M("relu_sum", tall, (16384, 1024), fixed(scale(), u("relu"), c("mul", 0.1), column("sum"))),
            M("product_max", tall, wide, fixed(t("mul", "y"), bias(), column("amax"))),
            M("squared_error", tall, (16384, 1024), fixed(t("sub", "y"), u("square"), c("mul", 0.01), column("sum"))),
            M("sigmoid_gate", tall, wide, fixed(bias(), u("sigmoid"), t("mul", "gate", draw="positive"), column("sum"))),
        ),
        held_out=(
            M("softplus_sum", tall, wide, fixed(u("softplus"), scale(), bias(), column("sum"))),
            M("gated_max", tall, (16384, 1024), fixed(t("mul", "gate", "tanh"), c("mul", 2.0), t("add", "y"), column("amax"))),
        ),
    )  # fmt: skip


def _layouts() -> LearnableFamily:
    M, wide, tall, small = Member, (4096, 4096), (8192, 2048), (70, 45)
    return LearnableFamily(
        name="layout_change",
        optimisation="tiles turned on the chip, with the operations on both sides of the transpose: reads and writes both run along rows",
        train=(
            M("scale_relu", small, wide, fixed(scale(), Transpose(), u("relu"), c("mul", 2.0))),
            M("tanh_residual", small, tall, fixed(u("tanh"), Transpose(), t("add", "y"), bias())),
            M("gated", small, wide, fixed(t("mul", "gate", "sigmoid"), Transpose(), v("add", "shift"))),
            M("bias_silu", small, tall, fixed(bias(), u("silu"), c("mul", 0.5), Transpose())),
        ),
        held_out=(
            M("sum_gelu", small, wide, fixed(t("add", "y"), u("gelu"), Transpose(), scale())),
            M("clamped_product", small, tall, fixed(c("mul", 1.5), Transpose(), t("mul", "y"), u("clamp", -2.0, 2.0))),
        ),
    )  # fmt: skip


def _matmuls() -> LearnableFamily:
    M, gpu, wider, small = Member, (16384, 64, 1024), (8192, 128, 2048), (70, 20, 48)
    return LearnableFamily(
        name="matmul_epilogue",
        optimisation="tiles of the product in registers, finished there before they are stored",
        train=(
            M("gelu", small, gpu, lambda n: (fc("fc", n), u("gelu"), scale(), c("mul", 2.0))),
            M("residual_relu", small, wider, lambda n: (w(n), t("add", "y"), u("relu"), c("mul", 0.5))),
            M("bias_sigmoid_gate", small, gpu, lambda n: (w(n), bias(), u("sigmoid"), t("mul", "gate"))),
            M("clamped", small, wider, lambda n: (fc("fc", n), c("mul", 1.5), u("clamp", -1.0, 1.0), t("sub", "y"))),
        ),
        held_out=(
            M("silu_scale_residual", small, gpu, lambda n: (fc("fc", n), u("silu"), t("mul", "gate"), bias())),
            M("scaled_tanh", small, wider, lambda n: (w(n), scale(), t("add", "y"), u("tanh"), u("square"))),
        ),
    )  # fmt: skip


def _windows() -> LearnableFamily:
    M, wide, tall, small = Member, (4096, 4096), (8192, 2048), (5, 300)
    return LearnableFamily(
        name="window_chain",
        optimisation="windows read from the row itself, unrolled, with the chain around them in registers",
        train=(
            M("conv_silu", small, wide, fixed(conv(3), u("silu"), scale())),
            M("conv_residual", small, tall, fixed(c("mul", 0.5), conv(5), t("add", "y"), u("relu"))),
            M("max_pool", small, wide, fixed(bias(), pool("max", 4, 4), c("mul", 2.0), u("tanh"))),
            M("avg_pool", small, tall, fixed(u("gelu"), t("mul", "y"), pool("avg", 4, 4))),
        ),
        held_out=(
            M("conv_gate", small, wide, fixed(u("tanh"), conv(4), bias(), t("mul", "gate", "sigmoid"))),
            M("pool_softplus", small, tall, fixed(t("add", "y"), pool("max", 2, 2), u("softplus"), scale())),
        ),
    )  # fmt: skip


def _scans() -> LearnableFamily:
    M, wide, tall, small = Member, (8192, 2048), (16384, 1024), (5, 300)
    return LearnableFamily(
        name="chain_scan",
        optimisation="the running sum of a row in registers, with the chain on both sides of it",
        train=(
            M("relu", small, wide, fixed(bias(), u("relu"), Cumsum(), c("mul", 0.1))),
            M("product", small, tall, fixed(t("mul", "y"), Cumsum(), c("mul", 0.02), u("tanh"))),
            M("square", small, wide, fixed(u("square"), scale(), Cumsum(), c("mul", 0.1))),
            M("residual", small, tall, fixed(u("sigmoid"), Cumsum(), c("mul", 0.1), t("add", "y"))),
        ),
        held_out=(
            M("gated", small, wide, fixed(t("mul", "gate", "sigmoid"), c("mul", 0.5), Cumsum(), bias())),
            M("silu_difference", small, tall, fixed(u("silu"), t("sub", "y"), Cumsum(), scale())),
        ),
    )  # fmt: skip


def held_out_families() -> list[LearnableFamily]:
    """Families without training members: compositions that nothing in training has, of operations that it has."""
    M, wide, tall, small = Member, (4096, 4096), (8192, 2048), (5, 300)
    many, short = (131072, 64, 128), (600, 20, 24)
    return [
        LearnableFamily(
            name="norm_inside_residual",
            optimisation="one kernel for a block whose input is needed at both ends",
            held_out=(
                M("layer_norm", small, tall, fixed(Branch(name="r"), norm("layer_norm"), scale(), u("silu"), t("add", "r"))),
                M("rms_norm", small, wide, fixed(Branch(name="r"), bias(), norm("rms_norm"), u("tanh"), t("add", "r"))),
                M("softmax", small, tall, fixed(Branch(name="r"), norm("softmax"), c("mul", 50.0), t("mul", "r"))),
            ),
        ),
        LearnableFamily(
            name="norm_then_reduction",
            optimisation="normalised and reduced without leaving registers: no row is written",
            held_out=(
                M("softmax_pooling", small, tall, fixed(scale(), norm("softmax"), t("mul", "y"), total("sum"), c("mul", 10.0))),
                M("layer_norm_max", small, wide, fixed(norm("layer_norm"), bias(), u("gelu"), total("amax"))),
                M("rms_gate_sum", small, tall, fixed(norm("rms_norm"), t("mul", "gate", "sigmoid"), scale(), total("sum"), c("mul", 0.1))),
            ),
        ),
        LearnableFamily(
            name="norm_after_norm",
            optimisation="two normalisations of a row that stays in registers",
            held_out=(
                M("rms_softmax", small, tall, fixed(norm("rms_norm"), scale(), norm("softmax"), c("mul", 50.0))),
                M("layer_norm_l2", small, wide, fixed(norm("layer_norm"), u("relu"), norm("l2_normalize"), c("mul", 20.0))),
                M("residual_rms_log", small, tall, fixed(t("add", "y"), norm("rms_norm"), bias(), norm("log_softmax"))),
            ),
        ),
        LearnableFamily(
            name="matmul_then_norm",
            optimisation="tiles of the product that hold whole rows, normalised before they are stored",
            held_out=(
                M("gelu_l2", short, many, lambda n: (fc("fc", n), u("gelu"), norm("l2_normalize"), scale())),
                M("bias_softmax", short, many, lambda n: (w(n), c("mul", 2.0), bias(), norm("softmax"), c("mul", 10.0))),
                M("relu_layer_norm", short, many, lambda n: (w(n), t("add", "y"), u("relu"), norm("layer_norm"))),
            ),
        ),
        LearnableFamily(
            name="window_then_reduction",
            optimisation="windows computed inside the kernel that reduces the row",
            held_out=(
                M("conv_silu_sum", small, wide, fixed(conv(3), u("silu"), scale(), total("sum"))),
                M("pool_length", small, tall, fixed(t("add", "y"), pool("max", 2, 2), u("tanh"), total("l2"))),
                M("conv_softmax", small, tall, fixed(conv(4), bias(), norm("softmax"), c("mul", 50.0))),
            ),
        ),
    ]  # fmt: skip
