"""Built-in families of level 3: small blocks and models."""

from __future__ import annotations

from dk_jax.tasks.families import Build, Family, Member, bias, c, fc, norm, scale, t, u
from dk_jax.tasks.spec import Branch, Matmul, RowReduce, Window


def block_families() -> list[Family]:
    """Layers, norms and attention put together."""
    M, wide, tall = Member, (4096, 4096), (8192, 2048)
    return [
        ("mlp", 3, "train", [
            M("relu", (4096, 16, 64, 16), (2048, 1024, 4096, 1024), _mlp("relu")),
            M("gelu", (4096, 16, 32, 16), (4096, 512, 2048, 512), _mlp("gelu")),
        ]),
        ("residual_layer_norm", 3, "train", [
            M("relu", (4096, 32, 32), (4096, 1024, 1024), _residual_layer_norm("relu")),
            M("silu", (2048, 64, 64), (8192, 512, 512), _residual_layer_norm("silu")),
        ]),
        ("attention", 3, "train", [
            M("narrow", (512, 8, 256, 8), (4096, 64, 4096, 64), _attention(0.25)),
            M("wide", (512, 32, 128, 32), (2048, 128, 2048, 128), _attention(0.125)),
        ]),
        ("classifier_head", 3, "train", [
            M("layer_norm", (2048, 32, 64), (4096, 1024, 2048), _classifier_head("layer_norm")),
            M("rms_norm", (4096, 16, 32), (8192, 512, 1024), _classifier_head("rms_norm")),
        ]),
        ("conv_pool_mean", 3, "train", [
            M("relu", (512, 1026), (4096, 4098), _conv_pool_mean("relu")),
            M("tanh", (256, 1026), (4096, 2050), _conv_pool_mean("tanh")),
        ]),
        ("attention_pooling", 3, "train", [
            M("half", (512, 1024), wide, _attention_pooling(0.5)),
            M("double", (1024, 512), tall, _attention_pooling(2.0)),
        ]),
        ("norm_residual", 3, "train", [
            M("silu", (512, 1024), wide, _norm_residual("silu")),
            M("relu", (1024, 512), tall, _norm_residual("relu")),
        ]),
        ("norm_gate_pool", 3, "held_out", [
            M("sigmoid", (512, 1024), wide, _norm_gate_pool("sigmoid")),
            M("tanh", (1024, 512), tall, _norm_gate_pool("tanh")),
        ]),
        ("gated_mlp", 3, "held_out", [
            M("silu", (2048, 16, 64, 16), (2048, 1024, 2048, 1024), _gated_mlp("silu")),
            M("sigmoid", (2048, 32, 32, 32), (4096, 512, 2048, 512), _gated_mlp("sigmoid")),
        ]),
        ("pre_norm_mlp", 3, "held_out", [
            M("relu", (2048, 32, 64, 32), (2048, 1024, 4096, 1024), _pre_norm_mlp("relu")),
            M("gelu", (4096, 16, 32, 16), (4096, 512, 2048, 512), _pre_norm_mlp("gelu")),
        ]),
        ("projection_head", 3, "held_out", [
            M("relu", (4096, 16, 64), (4096, 1024, 1024), _projection_head("relu")),
            M("silu", (2048, 32, 128), (8192, 512, 512), _projection_head("silu")),
        ]),
    ]  # fmt: skip


def _mlp(fn: str) -> Build:
    return lambda hidden, width: (fc("fc1", hidden), u(fn), fc("fc2", width))


def _residual_layer_norm(fn: str) -> Build:
    return lambda width: (
        Branch(name="r"), fc("fc", width), u(fn), t("add", "r"), norm("layer_norm"), scale(), bias()
    )  # fmt: skip


def _attention(factor: float) -> Build:
    return lambda keys, width: (
        Matmul(name="key", width=keys, transposed=True),
        c("mul", factor),
        norm("softmax"),
        Matmul(name="value", width=width),
    )


def _classifier_head(fn: str) -> Build:
    return lambda classes: (norm(fn), fc("fc", classes), norm("log_softmax"))


def _conv_pool_mean(fn: str) -> Build:
    return lambda: (
        Window(fn="conv", size=3, name="w"),
        u(fn),
        Window(fn="max", size=2, stride=2),
        RowReduce(fn="mean"),
        c("mul", 10.0),
    )


def _attention_pooling(factor: float) -> Build:
    return lambda: (c("mul", factor), norm("softmax"), t("mul", "y"), RowReduce(fn="sum"), c("mul", 5.0))


def _norm_residual(fn: str) -> Build:
    return lambda: (Branch(name="r"), norm("layer_norm"), scale(), bias(), u(fn), t("add", "r"))


def _norm_gate_pool(fn: str) -> Build:
    return lambda: (norm("rms_norm"), scale(), t("mul", "gate", fn), RowReduce(fn="sum"), c("mul", 0.1))


def _gated_mlp(fn: str) -> Build:
    return lambda hidden, width: (
        Branch(name="g", stages=(fc("gate", hidden), u(fn))),
        fc("up", hidden),
        t("mul", "g"),
        fc("down", width),
    )


def _pre_norm_mlp(fn: str) -> Build:
    return lambda hidden, width: (
        Branch(name="r"),
        norm("rms_norm"),
        scale(),
        fc("fc1", hidden),
        u(fn),
        fc("fc2", width),
        t("add", "r"),
    )


def _projection_head(fn: str) -> Build:
    return lambda width: (fc("fc", width), u(fn), norm("l2_normalize"), scale())
