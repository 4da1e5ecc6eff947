"""Built-in families of elementwise and row-wise tasks, and the short words that the tables of families are
written in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dk_jax.tasks.spec import Binary, Draw, Linear, RowNorm, RowReduce, Scalar, Stage, Tensor, Unary, Vector
from dk_jax.tasks.task import Split

Dims = tuple[int, ...]
Build = Callable[..., tuple[Stage, ...]]


@dataclass(frozen=True)
class Member:
    """One task of a family.

    Attributes:
      label: what sets it apart; the task is called FAMILY_LABEL.
      cpu, gpu: rows, columns and the widths that `build` needs, on each machine.
      build: widths -> stages.
      draw: how x is drawn.
    """

    label: str
    cpu: Dims
    gpu: Dims
    build: Build
    draw: Draw = "normal"


Family = tuple[str, int, Split, list[Member]]  # name, level, split, tasks


def u(fn: str, *constants: float) -> Unary:
    """A unary function."""
    return Unary(fn=fn, constants=constants)


def c(op: Binary, value: float) -> Scalar:
    """An operation with a constant."""
    return Scalar(op=op, value=value)


def v(op: Binary, name: str, draw: Draw = "normal") -> Vector:
    """An operation with an operand of one value a column."""
    return Vector(op=op, name=name, draw=draw)


def t(
    op: Binary, name: str, fn: str | None = None, factor: float | None = None, draw: Draw = "normal"
) -> Tensor:
    """An operation with an operand of the same shape, or with a branch."""
    return Tensor(op=op, name=name, fn=fn, factor=factor, draw=draw)


def scale() -> Vector:
    """x = x * scale."""
    return v("mul", "scale", "positive")


def bias() -> Vector:
    """x = x + bias."""
    return v("add", "bias")


def fixed(*stages: Stage) -> Build:
    """Stages that need no widths."""
    return lambda: stages


def fc(name: str, width: int, bias: bool = True) -> Linear:
    """A linear layer."""
    return Linear(name=name, width=width, bias=bias)


def norm(fn: str) -> RowNorm:
    """A normalisation of rows."""
    return RowNorm(fn=fn)


def map_families() -> list[Family]:
    """Elementwise operations and chains of them."""
    M, wide, tall = Member, (4096, 4096), (8192, 2048)
    return [
        ("smooth_activation", 1, "train", [
            M("silu", (1024, 1024), wide, fixed(u("silu"))),
            M("gelu_tanh", (1024, 1024), tall, fixed(u("gelu_tanh"))),
            M("softplus", (256, 2048), wide, fixed(u("softplus"))),
        ]),
        ("piecewise_activation", 1, "train", [
            M("leaky_relu", (1024, 1024), wide, fixed(u("leaky_relu", 0.1))),
            M("hardswish", (512, 2048), tall, fixed(u("hardswish"))),
        ]),
        ("gelu_activation", 1, "held_out", [
            M("wide", (512, 2048), wide, fixed(u("gelu"))),
            M("tall", (1024, 1024), tall, fixed(u("gelu"))),
        ]),
        ("bias_scale_activation", 2, "train", [
            M("relu", (512, 1024), wide, fixed(bias(), scale(), u("relu"))),
            M("gelu", (512, 1024), tall, fixed(bias(), scale(), u("gelu"))),
            M("tanh", (256, 2048), wide, fixed(bias(), scale(), u("tanh"))),
        ]),
        ("affine_clamp", 2, "train", [
            M("unit", (512, 1024), wide, fixed(c("mul", 2.0), c("add", 0.5), u("clamp", -1.0, 1.0))),
            M("wide", (1024, 1024), tall, fixed(c("mul", 3.0), c("add", -1.0), u("clamp", -2.0, 4.0))),
        ]),
        ("gated_product", 2, "train", [
            M("sigmoid", (512, 1024), wide, fixed(t("mul", "gate", "sigmoid"), c("mul", 2.0))),
            M("tanh", (512, 1024), tall, fixed(t("mul", "gate", "tanh"), c("mul", 0.5))),
        ]),
        ("residual_activation", 2, "train", [
            M("silu", (512, 1024), wide, fixed(t("add", "y"), u("silu"), c("mul", 1.5))),
            M("relu", (1024, 1024), tall, fixed(t("add", "y"), u("relu"), c("mul", 0.5))),
        ]),
        ("rooted_magnitude", 2, "train", [
            M("half", (512, 1024), wide, fixed(u("abs"), c("add", 0.5), u("sqrt"), c("sub", 1.0))),
            M("tenth", (256, 2048), tall, fixed(u("abs"), c("add", 0.1), u("sqrt"), c("sub", 0.5))),
        ]),
        ("weighted_blend", 2, "train", [
            M("half", (512, 1024), wide, fixed(c("mul", 0.5), t("add", "y", factor=0.5), u("tanh"))),
            M("third", (1024, 1024), tall, fixed(c("mul", 0.7), t("add", "y", factor=0.3), u("tanh"))),
        ]),
        ("bias_gated_residual", 2, "held_out", [
            M("silu", (512, 1024), wide,
              fixed(bias(), u("silu"), t("mul", "gate", "sigmoid"), t("add", "y"))),
            M("relu", (512, 1024), tall,
              fixed(bias(), u("relu"), t("mul", "gate", "sigmoid"), t("add", "y"))),
        ]),
        ("shift_square_mix", 2, "held_out", [
            M("half", (512, 1024), wide,
              fixed(c("sub", 0.5), u("square"), scale(), t("add", "y", factor=0.5))),
            M("quarter", (1024, 512), tall,
              fixed(c("sub", 1.0), u("square"), scale(), t("add", "y", factor=0.25))),
        ]),
    ]  # fmt: skip


def reduction_families() -> list[Family]:
    """Reductions of rows, with maps before and after."""
    M, wide, tall = Member, (4096, 4096), (8192, 2048)
    return [
        ("row_sum", 1, "train", [
            M("sum", (1024, 2048), wide, fixed(RowReduce(fn="sum")), "shifted"),
            M("mean", (2048, 1024), tall, fixed(RowReduce(fn="mean")), "wide"),
        ]),
        ("row_extreme", 1, "train", [
            M("max", (1024, 2048), wide, fixed(RowReduce(fn="amax"))),
            M("min", (2048, 1024), tall, fixed(RowReduce(fn="amin"))),
        ]),
        ("row_logsumexp", 1, "train", [
            M("wide", (256, 2048), wide, fixed(RowReduce(fn="logsumexp")), "wide"),
            M("tall", (1024, 512), tall, fixed(RowReduce(fn="logsumexp")), "wide"),
        ]),
        ("row_length", 1, "held_out", [
            M("wide", (1024, 2048), wide, fixed(RowReduce(fn="l2"))),
            M("tall", (4096, 512), tall, fixed(RowReduce(fn="l2"))),
        ]),
        ("activation_sum", 2, "train", [
            M("relu", (512, 1024), wide, fixed(u("relu"), bias(), RowReduce(fn="sum"), c("mul", 0.1))),
            M("sigmoid", (512, 1024), tall,
              fixed(u("sigmoid"), bias(), RowReduce(fn="sum"), c("mul", 0.5))),
        ]),
        ("weighted_mean", 2, "train", [
            M("double", (512, 1024), wide, fixed(scale(), RowReduce(fn="mean"), c("mul", 20.0))),
            M("triple", (1024, 1024), tall, fixed(scale(), RowReduce(fn="mean"), c("mul", 30.0))),
        ]),
        ("mean_square_error", 2, "train", [
            M("wide", (512, 1024), wide,
              fixed(t("sub", "y"), u("square"), RowReduce(fn="mean"), c("mul", 0.5))),
            M("tall", (1024, 512), tall,
              fixed(t("sub", "y"), u("square"), RowReduce(fn="mean"), c("mul", 2.0))),
        ]),
        ("row_distance", 2, "train", [
            M("wide", (512, 1024), wide, fixed(t("sub", "y"), RowReduce(fn="l2"), c("mul", 0.5))),
            M("tall", (1024, 512), tall, fixed(t("sub", "y"), RowReduce(fn="l2"), c("mul", 2.0))),
        ]),
        ("product_extreme", 2, "held_out", [
            M("max", (512, 1024), wide,
              fixed(t("mul", "y"), bias(), RowReduce(fn="amax"), c("mul", 0.1))),
            M("tall", (1024, 512), tall,
              fixed(t("mul", "y"), bias(), RowReduce(fn="amax"), c("mul", 0.3))),
        ]),
        ("gated_sum", 2, "held_out", [
            M("sigmoid", (512, 1024), wide,
              fixed(t("mul", "gate", "sigmoid"), scale(), RowReduce(fn="sum"))),
            M("tanh", (512, 1024), tall, fixed(t("mul", "gate", "tanh"), scale(), RowReduce(fn="sum"))),
        ]),
    ]  # fmt: skip


def norm_families() -> list[Family]:
    """Normalisations of rows, with maps before and after."""
    M, wide, tall = Member, (4096, 4096), (8192, 2048)
    return [
        ("softmax", 1, "train", [
            M("wide", (512, 1024), wide, fixed(norm("softmax")), "wide"),
            M("tall", (2048, 256), tall, fixed(norm("softmax")), "wide"),
        ]),
        ("log_softmax", 1, "train", [
            M("wide", (512, 1024), wide, fixed(norm("log_softmax"))),
            M("tall", (1024, 512), tall, fixed(norm("log_softmax"))),
        ]),
        ("layer_norm", 1, "train", [
            M("wide", (512, 1024), wide, fixed(norm("layer_norm"), scale(), bias()), "shifted"),
            M("tall", (2048, 256), tall, fixed(norm("layer_norm"), scale(), bias()), "shifted"),
        ]),
        ("row_normalize", 1, "train", [
            M("l2", (1024, 1024), wide, fixed(norm("l2_normalize"))),
            M("l1", (1024, 256), tall, fixed(norm("l1_normalize"), c("mul", 10.0))),
        ]),
        ("rms_norm", 1, "held_out", [
            M("wide", (512, 1024), wide, fixed(norm("rms_norm"), scale()), "wide"),
            M("tall", (2048, 256), tall, fixed(norm("rms_norm"), scale()), "wide"),
        ]),
        ("scaled_softmax", 2, "train", [
            M("half", (512, 512), wide, fixed(c("mul", 0.5), bias(), norm("softmax"))),
            M("double", (1024, 256), tall, fixed(c("mul", 2.0), bias(), norm("softmax"))),
        ]),
        ("layer_norm_activation", 2, "train", [
            M("relu", (512, 1024), wide, fixed(norm("layer_norm"), scale(), bias(), u("relu"))),
            M("gelu", (512, 512), tall, fixed(norm("layer_norm"), scale(), bias(), u("gelu"))),
        ]),
        ("residual_rms_norm", 2, "train", [
            M("wide", (512, 1024), wide, fixed(t("add", "y"), norm("rms_norm"), c("mul", 2.0))),
            M("tall", (2048, 256), tall, fixed(t("add", "y"), norm("rms_norm"), c("mul", 0.5))),
        ]),
        ("center_scale", 2, "train", [
            M("scale", (512, 1024), wide, fixed(scale(), norm("center"), c("mul", 2.0))),
            M("tall", (1024, 512), tall, fixed(scale(), norm("center"), c("mul", 0.5))),
        ]),
        ("bias_silu_normalize", 2, "held_out", [
            M("wide", (512, 1024), wide, fixed(bias(), u("silu"), norm("l2_normalize"), scale())),
            M("tall", (1024, 256), tall, fixed(bias(), u("silu"), norm("l2_normalize"), scale())),
        ]),
        ("residual_softmax", 2, "held_out", [
            M("wide", (512, 512), wide, fixed(t("add", "y"), c("mul", 2.0), norm("softmax"))),
            M("tall", (1024, 256), tall, fixed(t("add", "y"), c("mul", 1.5), norm("softmax"))),
        ]),
    ]  # fmt: skip
