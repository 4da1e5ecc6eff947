"""Built-in families of column reductions, matrix products, transposes, windows and running sums."""

from __future__ import annotations

from dk_jax.tasks.families import Family, Member, bias, c, fc, fixed, scale, t, u
from dk_jax.tasks.spec import ColReduce, Cumsum, Matmul, Transpose, Window


def w(width: int, transposed: bool = False) -> Matmul:
    """A product with the argument w."""
    return Matmul(name="w", width=width, transposed=transposed, draw="small")


def pool(fn: str, size: int, stride: int = 1) -> Window:
    """A pooling window."""
    return Window(fn=fn, size=size, stride=stride)


def conv(size: int) -> Window:
    """A depthwise convolution with the argument w."""
    return Window(fn="conv", size=size, name="w")


def column_families() -> list[Family]:
    """Reductions of columns."""
    M, wide, tall = Member, (4096, 4096), (8192, 2048)
    return [
        ("column_sum", 1, "train", [
            M("sum", (1024, 1024), wide, fixed(ColReduce(fn="sum")), "shifted"),
            M("mean", (2048, 512), tall, fixed(ColReduce(fn="mean")), "wide"),
        ]),
        ("column_max", 1, "held_out", [
            M("wide", (1024, 2048), wide, fixed(ColReduce(fn="amax"))),
            M("tall", (4096, 512), tall, fixed(ColReduce(fn="amax"))),
        ]),
        ("activation_column_mean", 2, "train", [
            M("relu", (1024, 512), wide, fixed(u("relu"), scale(), ColReduce(fn="mean"), c("mul", 10.0))),
            M("silu", (1024, 512), tall, fixed(u("silu"), scale(), ColReduce(fn="mean"), c("mul", 10.0))),
        ]),
        ("product_column_max", 2, "train", [
            M("wide", (512, 1024), wide, fixed(t("mul", "y"), ColReduce(fn="amax"), c("add", 0.5))),
            M("tall", (1024, 512), tall, fixed(t("mul", "y"), ColReduce(fn="amax"), c("add", -1.0))),
        ]),
        ("residual_column_sum", 2, "held_out", [
            M("relu", (1024, 512), wide,
              fixed(t("add", "y"), u("relu"), ColReduce(fn="sum"), c("mul", 0.1))),
            M("abs", (512, 1024), tall,
              fixed(t("add", "y"), u("abs"), ColReduce(fn="sum"), c("mul", 0.1))),
        ]),
    ]  # fmt: skip


def matmul_families() -> list[Family]:
    """Matrix products and linear layers, with epilogues."""
    M = Member
    return [
        ("matmul", 1, "train", [
            M("square", (384, 384, 384), (2048, 2048, 2048), lambda n: (w(n),)),
            M("thin", (2048, 64, 128), (4096, 512, 2048), lambda n: (w(n),)),
        ]),
        ("linear", 1, "train", [
            M("small_batch", (64, 512, 1024), (64, 4096, 4096), lambda n: (fc("fc", n),)),
            M("tall", (2048, 64, 128), (8192, 1024, 1024), lambda n: (fc("fc", n),)),
        ]),
        ("matmul_transposed", 1, "held_out", [
            M("square", (384, 384, 384), (2048, 2048, 2048), lambda n: (w(n, True),)),
            M("thin", (2048, 64, 128), (4096, 512, 2048), lambda n: (w(n, True),)),
        ]),
        ("linear_activation", 2, "train", [
            M("relu", (4096, 16, 128), (4096, 1024, 2048),
              lambda n: (fc("fc", n), u("relu"), c("mul", 2.0))),
            M("gelu", (2048, 16, 256), (8192, 512, 1024),
              lambda n: (fc("fc", n), u("gelu"), c("mul", 0.5))),
        ]),
        ("matmul_scale_residual", 2, "train", [
            M("relu", (4096, 16, 128), (4096, 1024, 1024),
              lambda n: (w(n), c("mul", 0.5), t("add", "y"), u("relu"))),
            M("tanh", (2048, 16, 256), (4096, 512, 2048),
              lambda n: (w(n), c("mul", 2.0), t("add", "y"), u("tanh"))),
        ]),
        ("matmul_bias_activation", 2, "train", [
            M("leaky_relu", (2048, 16, 256), (4096, 1024, 2048),
              lambda n: (w(n), bias(), u("leaky_relu", 0.1))),
            M("sigmoid", (4096, 16, 128), (8192, 512, 1024), lambda n: (w(n), bias(), u("sigmoid"))),
        ]),
        ("linear_gate_residual", 2, "held_out", [
            M("silu", (4096, 16, 128), (4096, 1024, 1024),
              lambda n: (fc("fc", n), u("silu"), scale(), t("add", "y"))),
            M("tanh", (2048, 16, 256), (4096, 512, 2048),
              lambda n: (fc("fc", n), u("tanh"), scale(), t("add", "y"))),
        ]),
    ]  # fmt: skip


def move_families() -> list[Family]:
    """Transposes, windows along rows, and running sums."""
    M, wide, tall = Member, (4096, 4096), (8192, 2048)
    return [
        ("transpose", 1, "train", [
            M("square", (1024, 1024), wide, fixed(Transpose())),
            M("tall", (2048, 512), tall, fixed(Transpose())),
        ]),
        ("transpose_scale", 2, "train", [
            M("relu", (1024, 512), wide, fixed(c("mul", 2.0), Transpose(), u("relu"))),
            M("tanh", (512, 1024), tall, fixed(c("mul", 0.5), Transpose(), u("tanh"))),
        ]),
        ("bias_transpose_residual", 2, "held_out", [
            M("wide", (512, 1024), wide, fixed(bias(), Transpose(), t("add", "y"))),
            M("tall", (1024, 512), tall, fixed(bias(), Transpose(), t("add", "y"))),
        ]),
        ("avg_pool", 1, "train", [
            M("four", (512, 2048), tall, fixed(pool("avg", 4, 4)), "wide"),
            M("three", (512, 1024), wide, fixed(pool("avg", 3)), "wide"),
        ]),
        ("depthwise_conv", 1, "train", [
            M("three", (512, 1024), wide, fixed(conv(3))),
            M("five", (256, 2048), tall, fixed(conv(5))),
        ]),
        ("max_pool", 1, "held_out", [
            M("four", (512, 2048), tall, fixed(pool("max", 4, 4))),
            M("two", (1024, 1024), wide, fixed(pool("max", 2, 2))),
        ]),
        ("conv_activation", 2, "train", [
            M("relu", (512, 1024), wide, fixed(conv(3), u("relu"), c("mul", 2.0))),
            M("silu", (256, 2048), tall, fixed(conv(5), u("silu"), c("mul", 0.5))),
        ]),
        ("pool_shift", 2, "train", [
            M("max", (512, 2048), tall, fixed(c("mul", 2.0), pool("max", 4, 4), c("add", 0.5))),
            M("two", (512, 1024), wide, fixed(c("mul", 0.5), pool("max", 2, 2), c("add", 1.0))),
        ]),
        ("scaled_conv_residual", 2, "held_out", [
            M("three", (512, 1024), wide, fixed(c("mul", 0.5), conv(3), t("add", "y"))),
            M("five", (256, 2048), tall, fixed(c("mul", 2.0), conv(5), t("add", "y"))),
        ]),
        ("cumsum", 1, "train", [
            M("wide", (512, 1024), wide, fixed(Cumsum())),
            M("tall", (2048, 256), tall, fixed(Cumsum())),
        ]),
        ("activation_cumsum", 2, "train", [
            M("relu", (256, 1024), wide, fixed(u("relu"), Cumsum(), c("mul", 0.1))),
            M("sigmoid", (512, 512), tall, fixed(u("sigmoid"), Cumsum(), c("mul", 0.5))),
        ]),
        ("gated_cumsum", 2, "held_out", [
            M("scale", (256, 1024), wide, fixed(t("mul", "y"), Cumsum(), scale())),
            M("tall", (512, 512), tall, fixed(t("mul", "y"), Cumsum(), scale())),
        ]),
    ]  # fmt: skip
