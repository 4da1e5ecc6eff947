"""The built-in suite: families of tasks over three levels, split into train and held out by family.

Level 1 is a single operator, level 2 a fused chain, level 3 a small block or model. Held-out families are compositions that no
train family has, made of operations that train families do have, so that they measure composing and not guessing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dk_jax.tasks.render import render_reference
from dk_jax.tasks.spec import (
    Binary,
    Branch,
    ColReduce,
    Cumsum,
    Draw,
    Linear,
    Matmul,
    OpSpec,
    RowNorm,
    RowReduce,
    Scalar,
    Stage,
    Tensor,
    Transpose,
    Unary,
    Vector,
    Window,
)
from dk_jax.tasks.task import Size, Split, Suite, Task

Dims = tuple[int, ...]  # rows, columns, then the widths that the family's stages need
Build = Callable[..., tuple[Stage, ...]]


@dataclass(frozen=True)
class _Member:
    """One task of a family: its label, its sizes on each machine, and its stages given the widths."""

    label: str
    cpu: Dims
    gpu: Dims
    build: Build
    draw: Draw = "normal"


def builtin_suite(size: Size = "cpu") -> Suite:
    """All built-in tasks.

    Args:
      size: `cpu` sizes take PyTorch eager about 0.1 to 3 ms on two threads; `gpu` sizes are those of real models, under 0.5 GB a task.

    Raises:
      ValueError: `size` is neither.
    """
    if size not in ("cpu", "gpu"):
        raise ValueError(f"size is {size!r}: give 'cpu' or 'gpu'")
    return Suite(tuple(_task(*family, member, size) for family in _families() for member in family[3]))


def held_out_structures() -> frozenset[tuple]:
    """Structures of the held-out tasks, for generators to avoid."""
    return frozenset(task.spec.structure for task in builtin_suite("cpu").held_out)


def _task(family: str, level: int, split: Split, _: list[_Member], member: _Member, size: Size) -> Task:
    rows, cols, *widths = member.cpu if size == "cpu" else member.gpu
    spec = OpSpec(rows=rows, cols=cols, stages=member.build(*widths), draw=member.draw)
    reference = render_reference(spec, f"{family.replace('_', ' ').capitalize()}: {member.label.replace('_', ' ')}.")
    name = f"{family}_{member.label}"
    return Task(name=name, level=level, family=family, split=split, reference=reference, size=size, spec=spec)


def _u(fn: str, *constants: float) -> Unary:
    return Unary(fn=fn, constants=constants)


def _c(op: Binary, value: float) -> Scalar:
    return Scalar(op=op, value=value)


def _v(op: Binary, name: str, draw: Draw = "normal") -> Vector:
    return Vector(op=op, name=name, draw=draw)


def _t(op: Binary, name: str, fn: str | None = None, factor: float | None = None, draw: Draw = "normal") -> Tensor:
    return Tensor(op=op, name=name, fn=fn, factor=factor, draw=draw)


def _scale() -> Vector:
    return _v("mul", "scale", "positive")


def _bias() -> Vector:
    return _v("add", "bias")


def _fixed(*stages: Stage) -> Build:
    """Stages that need no widths."""
    return lambda: stages


def _fc(name: str, width: int, bias: bool = True) -> Linear:
    return Linear(name=name, width=width, bias=bias)


def _families() -> list[tuple[str, int, Split, list[_Member]]]:
    return [*_maps(), *_reductions(), *_norms(), *_columns(), *_matmuls(), *_moves(), *_blocks()]


def _maps() -> list[tuple[str, int, Split, list[_Member]]]:
    M, wide, tall = _Member, (4096, 4096), (8192, 2048)
    return [
        ("smooth_activation", 1, "train", [
            M("silu", (1024, 1024), wide, _fixed(_u("silu"))),
            M("gelu_tanh", (1024, 1024), tall, _fixed(_u("gelu_tanh"))),
            M("softplus", (256, 2048), wide, _fixed(_u("softplus"))),
        ]),
        ("piecewise_activation", 1, "train", [
            M("leaky_relu", (1024, 1024), wide, _fixed(_u("leaky_relu", 0.1))),
            M("hardswish", (512, 2048), tall, _fixed(_u("hardswish"))),
        ]),
        ("gelu_activation", 1, "held_out", [
            M("wide", (512, 2048), wide, _fixed(_u("gelu"))),
            M("tall", (1024, 1024), tall, _fixed(_u("gelu"))),
        ]),
        ("bias_scale_activation", 2, "train", [
            M("relu", (512, 1024), wide, _fixed(_bias(), _scale(), _u("relu"))),
            M("gelu", (512, 1024), tall, _fixed(_bias(), _scale(), _u("gelu"))),
            M("tanh", (256, 2048), wide, _fixed(_bias(), _scale(), _u("tanh"))),
        ]),
        ("affine_clamp", 2, "train", [
            M("unit", (512, 1024), wide, _fixed(_c("mul", 2.0), _c("add", 0.5), _u("clamp", -1.0, 1.0))),
            M("wide", (1024, 1024), tall, _fixed(_c("mul", 3.0), _c("add", -1.0), _u("clamp", -2.0, 4.0))),
        ]),
        ("gated_product", 2, "train", [
            M("sigmoid", (512, 1024), wide, _fixed(_t("mul", "gate", "sigmoid"), _c("mul", 2.0))),
            M("tanh", (512, 1024), tall, _fixed(_t("mul", "gate", "tanh"), _c("mul", 0.5))),
        ]),
        ("residual_activation", 2, "train", [
            M("silu", (512, 1024), wide, _fixed(_t("add", "y"), _u("silu"), _c("mul", 1.5))),
            M("relu", (1024, 1024), tall, _fixed(_t("add", "y"), _u("relu"), _c("mul", 0.5))),
        ]),
        ("rooted_magnitude", 2, "train", [
            M("half", (512, 1024), wide, _fixed(_u("abs"), _c("add", 0.5), _u("sqrt"), _c("sub", 1.0))),
            M("tenth", (256, 2048), tall, _fixed(_u("abs"), _c("add", 0.1), _u("sqrt"), _c("sub", 0.5))),
        ]),
        ("weighted_blend", 2, "train", [
            M("half", (512, 1024), wide, _fixed(_c("mul", 0.5), _t("add", "y", factor=0.5), _u("tanh"))),
            M("third", (1024, 1024), tall, _fixed(_c("mul", 0.7), _t("add", "y", factor=0.3), _u("tanh"))),
        ]),
        ("bias_gated_residual", 2, "held_out", [
            M("silu", (512, 1024), wide, _fixed(_bias(), _u("silu"), _t("mul", "gate", "sigmoid"), _t("add", "y"))),
            M("relu", (512, 1024), tall, _fixed(_bias(), _u("relu"), _t("mul", "gate", "sigmoid"), _t("add", "y"))),
        ]),
        ("shift_square_mix", 2, "held_out", [
            M("half", (512, 1024), wide, _fixed(_c("sub", 0.5), _u("square"), _scale(), _t("add", "y", factor=0.5))),
            M("quarter", (1024, 512), tall, _fixed(_c("sub", 1.0), _u("square"), _scale(), _t("add", "y", factor=0.25))),
        ]),
    ]  # fmt: skip


def _reductions() -> list[tuple[str, int, Split, list[_Member]]]:
    M, wide, tall = _Member, (4096, 4096), (8192, 2048)
    return [
        ("row_sum", 1, "train", [
            M("sum", (1024, 2048), wide, _fixed(RowReduce(fn="sum")), "shifted"),
            M("mean", (2048, 1024), tall, _fixed(RowReduce(fn="mean")), "wide"),
        ]),
        ("row_extreme", 1, "train", [
            M("max", (1024, 2048), wide, _fixed(RowReduce(fn="amax"))),
            M("min", (2048, 1024), tall, _fixed(RowReduce(fn="amin"))),
        ]),
        ("row_logsumexp", 1, "train", [
            M("wide", (256, 2048), wide, _fixed(RowReduce(fn="logsumexp")), "wide"),
            M("tall", (1024, 512), tall, _fixed(RowReduce(fn="logsumexp")), "wide"),
        ]),
        ("row_length", 1, "held_out", [
            M("wide", (1024, 2048), wide, _fixed(RowReduce(fn="l2"))),
            M("tall", (4096, 512), tall, _fixed(RowReduce(fn="l2"))),
        ]),
        ("activation_sum", 2, "train", [
            M("relu", (512, 1024), wide, _fixed(_u("relu"), _bias(), RowReduce(fn="sum"), _c("mul", 0.1))),
            M("sigmoid", (512, 1024), tall, _fixed(_u("sigmoid"), _bias(), RowReduce(fn="sum"), _c("mul", 0.5))),
        ]),
        ("weighted_mean", 2, "train", [
            M("double", (512, 1024), wide, _fixed(_scale(), RowReduce(fn="mean"), _c("mul", 20.0))),
            M("triple", (1024, 1024), tall, _fixed(_scale(), RowReduce(fn="mean"), _c("mul", 30.0))),
        ]),
        ("mean_square_error", 2, "train", [
            M("wide", (512, 1024), wide, _fixed(_t("sub", "y"), _u("square"), RowReduce(fn="mean"), _c("mul", 0.5))),
            M("tall", (1024, 512), tall, _fixed(_t("sub", "y"), _u("square"), RowReduce(fn="mean"), _c("mul", 2.0))),
        ]),
        ("row_distance", 2, "train", [
            M("wide", (512, 1024), wide, _fixed(_t("sub", "y"), RowReduce(fn="l2"), _c("mul", 0.5))),
            M("tall", (1024, 512), tall, _fixed(_t("sub", "y"), RowReduce(fn="l2"), _c("mul", 2.0))),
        ]),
        ("product_extreme", 2, "held_out", [
            M("max", (512, 1024), wide, _fixed(_t("mul", "y"), _bias(), RowReduce(fn="amax"), _c("mul", 0.1))),
            M("tall", (1024, 512), tall, _fixed(_t("mul", "y"), _bias(), RowReduce(fn="amax"), _c("mul", 0.3))),
        ]),
        ("gated_sum", 2, "held_out", [
            M("sigmoid", (512, 1024), wide, _fixed(_t("mul", "gate", "sigmoid"), _scale(), RowReduce(fn="sum"))),
            M("tanh", (512, 1024), tall, _fixed(_t("mul", "gate", "tanh"), _scale(), RowReduce(fn="sum"))),
        ]),
    ]  # fmt: skip


def _norms() -> list[tuple[str, int, Split, list[_Member]]]:
    M, wide, tall = _Member, (4096, 4096), (8192, 2048)
    norm = lambda fn: RowNorm(fn=fn)  # noqa: E731
    return [
        ("softmax", 1, "train", [
            M("wide", (512, 1024), wide, _fixed(norm("softmax")), "wide"),
            M("tall", (2048, 256), tall, _fixed(norm("softmax")), "wide"),
        ]),
        ("log_softmax", 1, "train", [
            M("wide", (512, 1024), wide, _fixed(norm("log_softmax"))),
            M("tall", (1024, 512), tall, _fixed(norm("log_softmax"))),
        ]),
        ("layer_norm", 1, "train", [
            M("wide", (512, 1024), wide, _fixed(norm("layer_norm"), _scale(), _bias()), "shifted"),
            M("tall", (2048, 256), tall, _fixed(norm("layer_norm"), _scale(), _bias()), "shifted"),
        ]),
        ("row_normalize", 1, "train", [
            M("l2", (1024, 1024), wide, _fixed(norm("l2_normalize"))),
            M("l1", (1024, 256), tall, _fixed(norm("l1_normalize"), _c("mul", 10.0))),
        ]),
        ("rms_norm", 1, "held_out", [
            M("wide", (512, 1024), wide, _fixed(norm("rms_norm"), _scale()), "wide"),
            M("tall", (2048, 256), tall, _fixed(norm("rms_norm"), _scale()), "wide"),
        ]),
        ("scaled_softmax", 2, "train", [
            M("half", (512, 512), wide, _fixed(_c("mul", 0.5), _bias(), norm("softmax"))),
            M("double", (1024, 256), tall, _fixed(_c("mul", 2.0), _bias(), norm("softmax"))),
        ]),
        ("layer_norm_activation", 2, "train", [
            M("relu", (512, 1024), wide, _fixed(norm("layer_norm"), _scale(), _bias(), _u("relu"))),
            M("gelu", (512, 512), tall, _fixed(norm("layer_norm"), _scale(), _bias(), _u("gelu"))),
        ]),
        ("residual_rms_norm", 2, "train", [
            M("wide", (512, 1024), wide, _fixed(_t("add", "y"), norm("rms_norm"), _c("mul", 2.0))),
            M("tall", (2048, 256), tall, _fixed(_t("add", "y"), norm("rms_norm"), _c("mul", 0.5))),
        ]),
        ("center_scale", 2, "train", [
            M("scale", (512, 1024), wide, _fixed(_scale(), norm("center"), _c("mul", 2.0))),
            M("tall", (1024, 512), tall, _fixed(_scale(), norm("center"), _c("mul", 0.5))),
        ]),
        ("bias_silu_normalize", 2, "held_out", [
            M("wide", (512, 1024), wide, _fixed(_bias(), _u("silu"), norm("l2_normalize"), _scale())),
            M("tall", (1024, 256), tall, _fixed(_bias(), _u("silu"), norm("l2_normalize"), _scale())),
        ]),
        ("residual_softmax", 2, "held_out", [
            M("wide", (512, 512), wide, _fixed(_t("add", "y"), _c("mul", 2.0), norm("softmax"))),
            M("tall", (1024, 256), tall, _fixed(_t("add", "y"), _c("mul", 1.5), norm("softmax"))),
        ]),
    ]  # fmt: skip


def _columns() -> list[tuple[str, int, Split, list[_Member]]]:
    M, wide, tall = _Member, (4096, 4096), (8192, 2048)
    return [
        ("column_sum", 1, "train", [
            M("sum", (1024, 1024), wide, _fixed(ColReduce(fn="sum")), "shifted"),
            M("mean", (2048, 512), tall, _fixed(ColReduce(fn="mean")), "wide"),
        ]),
        ("column_max", 1, "held_out", [
            M("wide", (1024, 2048), wide, _fixed(ColReduce(fn="amax"))),
            M("tall", (4096, 512), tall, _fixed(ColReduce(fn="amax"))),
        ]),
        ("activation_column_mean", 2, "train", [
            M("relu", (1024, 512), wide, _fixed(_u("relu"), _scale(), ColReduce(fn="mean"), _c("mul", 10.0))),
            M("silu", (1024, 512), tall, _fixed(_u("silu"), _scale(), ColReduce(fn="mean"), _c("mul", 10.0))),
        ]),
        ("product_column_max", 2, "train", [
            M("wide", (512, 1024), wide, _fixed(_t("mul", "y"), ColReduce(fn="amax"), _c("add", 0.5))),
            M("tall", (1024, 512), tall, _fixed(_t("mul", "y"), ColReduce(fn="amax"), _c("add", -1.0))),
        ]),
        ("residual_column_sum", 2, "held_out", [
            M("relu", (1024, 512), wide, _fixed(_t("add", "y"), _u("relu"), ColReduce(fn="sum"), _c("mul", 0.1))),
            M("abs", (512, 1024), tall, _fixed(_t("add", "y"), _u("abs"), ColReduce(fn="sum"), _c("mul", 0.1))),
        ]),
    ]  # fmt: skip


def _matmuls() -> list[tuple[str, int, Split, list[_Member]]]:
    M = _Member
    w = lambda width, transposed=False, draw="small": Matmul(name="w", width=width, transposed=transposed, draw=draw)  # noqa: E731
    return [
        ("matmul", 1, "train", [
            M("square", (384, 384, 384), (2048, 2048, 2048), lambda n: (w(n),)),
            M("thin", (2048, 64, 128), (4096, 512, 2048), lambda n: (w(n),)),
        ]),
        ("linear", 1, "train", [
            M("small_batch", (64, 512, 1024), (64, 4096, 4096), lambda n: (_fc("fc", n),)),
            M("tall", (2048, 64, 128), (8192, 1024, 1024), lambda n: (_fc("fc", n),)),
        ]),
        ("matmul_transposed", 1, "held_out", [
            M("square", (384, 384, 384), (2048, 2048, 2048), lambda n: (w(n, True),)),
            M("thin", (2048, 64, 128), (4096, 512, 2048), lambda n: (w(n, True),)),
        ]),
        ("linear_activation", 2, "train", [
            M("relu", (4096, 16, 128), (4096, 1024, 2048), lambda n: (_fc("fc", n), _u("relu"), _c("mul", 2.0))),
            M("gelu", (2048, 16, 256), (8192, 512, 1024), lambda n: (_fc("fc", n), _u("gelu"), _c("mul", 0.5))),
        ]),
        ("matmul_scale_residual", 2, "train", [
            M("relu", (4096, 16, 128), (4096, 1024, 1024), lambda n: (w(n), _c("mul", 0.5), _t("add", "y"), _u("relu"))),
            M("tanh", (2048, 16, 256), (4096, 512, 2048), lambda n: (w(n), _c("mul", 2.0), _t("add", "y"), _u("tanh"))),
        ]),
        ("matmul_bias_activation", 2, "train", [
            M("leaky_relu", (2048, 16, 256), (4096, 1024, 2048), lambda n: (w(n), _bias(), _u("leaky_relu", 0.1))),
            M("sigmoid", (4096, 16, 128), (8192, 512, 1024), lambda n: (w(n), _bias(), _u("sigmoid"))),
        ]),
        ("linear_gate_residual", 2, "held_out", [
            M("silu", (4096, 16, 128), (4096, 1024, 1024), lambda n: (_fc("fc", n), _u("silu"), _scale(), _t("add", "y"))),
            M("tanh", (2048, 16, 256), (4096, 512, 2048), lambda n: (_fc("fc", n), _u("tanh"), _scale(), _t("add", "y"))),
        ]),
    ]  # fmt: skip


def _moves() -> list[tuple[str, int, Split, list[_Member]]]:
    M, wide, tall = _Member, (4096, 4096), (8192, 2048)
    pool = lambda fn, size, stride=1: Window(fn=fn, size=size, stride=stride)  # noqa: E731
    conv = lambda size: Window(fn="conv", size=size, name="w")  # noqa: E731
    return [
        ("transpose", 1, "train", [
            M("square", (1024, 1024), wide, _fixed(Transpose())),
            M("tall", (2048, 512), tall, _fixed(Transpose())),
        ]),
        ("transpose_scale", 2, "train", [
            M("relu", (1024, 512), wide, _fixed(_c("mul", 2.0), Transpose(), _u("relu"))),
            M("tanh", (512, 1024), tall, _fixed(_c("mul", 0.5), Transpose(), _u("tanh"))),
        ]),
        ("bias_transpose_residual", 2, "held_out", [
            M("wide", (512, 1024), wide, _fixed(_bias(), Transpose(), _t("add", "y"))),
            M("tall", (1024, 512), tall, _fixed(_bias(), Transpose(), _t("add", "y"))),
        ]),
        ("avg_pool", 1, "train", [
            M("four", (512, 2048), tall, _fixed(pool("avg", 4, 4)), "wide"),
            M("three", (512, 1024), wide, _fixed(pool("avg", 3)), "wide"),
        ]),
        ("depthwise_conv", 1, "train", [
            M("three", (512, 1024), wide, _fixed(conv(3))),
            M("five", (256, 2048), tall, _fixed(conv(5))),
        ]),
        ("max_pool", 1, "held_out", [
            M("four", (512, 2048), tall, _fixed(pool("max", 4, 4))),
            M("two", (1024, 1024), wide, _fixed(pool("max", 2, 2))),
        ]),
        ("conv_activation", 2, "train", [
            M("relu", (512, 1024), wide, _fixed(conv(3), _u("relu"), _c("mul", 2.0))),
            M("silu", (256, 2048), tall, _fixed(conv(5), _u("silu"), _c("mul", 0.5))),
        ]),
        ("pool_shift", 2, "train", [
            M("max", (512, 2048), tall, _fixed(_c("mul", 2.0), pool("max", 4, 4), _c("add", 0.5))),
            M("two", (512, 1024), wide, _fixed(_c("mul", 0.5), pool("max", 2, 2), _c("add", 1.0))),
        ]),
        ("scaled_conv_residual", 2, "held_out", [
            M("three", (512, 1024), wide, _fixed(_c("mul", 0.5), conv(3), _t("add", "y"))),
            M("five", (256, 2048), tall, _fixed(_c("mul", 2.0), conv(5), _t("add", "y"))),
        ]),
        ("cumsum", 1, "train", [
            M("wide", (512, 1024), wide, _fixed(Cumsum())),
            M("tall", (2048, 256), tall, _fixed(Cumsum())),
        ]),
        ("activation_cumsum", 2, "train", [
            M("relu", (256, 1024), wide, _fixed(_u("relu"), Cumsum(), _c("mul", 0.1))),
            M("sigmoid", (512, 512), tall, _fixed(_u("sigmoid"), Cumsum(), _c("mul", 0.5))),
        ]),
        ("gated_cumsum", 2, "held_out", [
            M("scale", (256, 1024), wide, _fixed(_t("mul", "y"), Cumsum(), _scale())),
            M("tall", (512, 512), tall, _fixed(_t("mul", "y"), Cumsum(), _scale())),
        ]),
    ]  # fmt: skip


def _blocks() -> list[tuple[str, int, Split, list[_Member]]]:
    M, N = _Member, lambda fn: RowNorm(fn=fn)  # noqa: N806
    return [
        ("mlp", 3, "train", [
            M("relu", (4096, 16, 64, 16), (2048, 1024, 4096, 1024), lambda f, d: (_fc("fc1", f), _u("relu"), _fc("fc2", d))),
            M("gelu", (4096, 16, 32, 16), (4096, 512, 2048, 512), lambda f, d: (_fc("fc1", f), _u("gelu"), _fc("fc2", d))),
        ]),
        ("residual_layer_norm", 3, "train", [
            M(fn, cpu, gpu, lambda d, fn=fn: (
                Branch(name="r"), _fc("fc", d), _u(fn), _t("add", "r"), N("layer_norm"), _scale(), _bias()))
            for fn, cpu, gpu in (("relu", (4096, 32, 32), (4096, 1024, 1024)), ("silu", (2048, 64, 64), (8192, 512, 512)))
        ]),
        ("attention", 3, "train", [
            M(label, cpu, gpu, lambda s, d, c=c: (
                Matmul(name="key", width=s, transposed=True), _c("mul", c), N("softmax"), Matmul(name="value", width=d)))
            for label, c, cpu, gpu in (
                ("narrow", 0.25, (512, 8, 256, 8), (4096, 64, 4096, 64)), ("wide", 0.125, (512, 32, 128, 32), (2048, 128, 2048, 128)))
        ]),
        ("classifier_head", 3, "train", [
            M("layer_norm", (2048, 32, 64), (4096, 1024, 2048), lambda n: (N("layer_norm"), _fc("fc", n), N("log_softmax"))),
            M("rms_norm", (4096, 16, 32), (8192, 512, 1024), lambda n: (N("rms_norm"), _fc("fc", n), N("log_softmax"))),
        ]),
        ("conv_pool_mean", 3, "train", [
            M(fn, cpu, gpu, lambda fn=fn: (
                Window(fn="conv", size=3, name="w"), _u(fn), Window(fn="max", size=2, stride=2), RowReduce(fn="mean"), _c("mul", 10.0)))
            for fn, cpu, gpu in (("relu", (512, 1026), (4096, 4098)), ("tanh", (256, 1026), (4096, 2050)))
        ]),
        ("attention_pooling", 3, "train", [
            M(label, cpu, gpu, lambda c=c: (_c("mul", c), N("softmax"), _t("mul", "y"), RowReduce(fn="sum"), _c("mul", 5.0)))
            for label, c, cpu, gpu in (("half", 0.5, (512, 1024), (4096, 4096)), ("double", 2.0, (1024, 512), (8192, 2048)))
        ]),
        ("norm_residual", 3, "train", [
            M(fn, cpu, gpu, lambda fn=fn: (Branch(name="r"), N("layer_norm"), _scale(), _bias(), _u(fn), _t("add", "r")))
            for fn, cpu, gpu in (("silu", (512, 1024), (4096, 4096)), ("relu", (1024, 512), (8192, 2048)))
        ]),
        ("norm_gate_pool", 3, "held_out", [
            M(fn, cpu, gpu, lambda fn=fn: (N("rms_norm"), _scale(), _t("mul", "gate", fn), RowReduce(fn="sum"), _c("mul", 0.1)))
            for fn, cpu, gpu in (("sigmoid", (512, 1024), (4096, 4096)), ("tanh", (1024, 512), (8192, 2048)))
        ]),
        ("gated_mlp", 3, "held_out", [
            M(fn, cpu, gpu, lambda f, d, fn=fn: (
                Branch(name="g", stages=(_fc("gate", f), _u(fn))), _fc("up", f), _t("mul", "g"), _fc("down", d)))
            for fn, cpu, gpu in (
                ("silu", (2048, 16, 64, 16), (2048, 1024, 2048, 1024)), ("sigmoid", (2048, 32, 32, 32), (4096, 512, 2048, 512)))
        ]),
        ("pre_norm_mlp", 3, "held_out", [
            M(fn, cpu, gpu, lambda f, d, fn=fn: (
                Branch(name="r"), N("rms_norm"), _scale(), _fc("fc1", f), _u(fn), _fc("fc2", d), _t("add", "r")))
            for fn, cpu, gpu in (
                ("relu", (2048, 32, 64, 32), (2048, 1024, 4096, 1024)), ("gelu", (4096, 16, 32, 16), (4096, 512, 2048, 512)))
        ]),
        ("projection_head", 3, "held_out", [
            M("relu", (4096, 16, 64), (4096, 1024, 1024), lambda n: (_fc("fc", n), _u("relu"), N("l2_normalize"), _scale())),
            M("silu", (2048, 32, 128), (8192, 512, 512), lambda n: (_fc("fc", n), _u("silu"), N("l2_normalize"), _scale())),
        ]),
    ]  # fmt: skip
