"""The operations that a spec may name: their PyTorch text, which defines what they mean.

A text has the placeholder {x} for the value it is applied to, and {a}, {b} for an operation's own constants.
"""

from __future__ import annotations

from dk_jax.tasks.spec import (
    ColReduce,
    Cumsum,
    Linear,
    Matmul,
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

UNARY: dict[str, str] = {
    "relu": "torch.relu({x})",
    "leaky_relu": "F.leaky_relu({x}, {a})",
    "elu": "F.elu({x})",
    "clamp": "torch.clamp({x}, {a}, {b})",
    "abs": "torch.abs({x})",
    "square": "{x} * {x}",
    "neg": "-{x}",
    "sqrt": "torch.sqrt({x})",
    "exp": "torch.exp({x})",
    "log1p": "torch.log1p({x})",
    "sin": "torch.sin({x})",
    "cos": "torch.cos({x})",
    "sigmoid": "torch.sigmoid({x})",
    "tanh": "torch.tanh({x})",
    "silu": "F.silu({x})",
    "gelu": "F.gelu({x})",
    "gelu_tanh": 'F.gelu({x}, approximate="tanh")',
    "softplus": "F.softplus({x})",
    "softsign": "F.softsign({x})",
    "logsigmoid": "F.logsigmoid({x})",
    "mish": "F.mish({x})",
    "hardsigmoid": "F.hardsigmoid({x})",
    "hardswish": "F.hardswish({x})",
}

ROW_NORMS: dict[str, str] = {
    "softmax": "torch.softmax({x}, dim=-1)",
    "log_softmax": "torch.log_softmax({x}, dim=-1)",
    "layer_norm": "F.layer_norm({x}, {x}.shape[-1:], eps=1e-5)",
    "rms_norm": "F.rms_norm({x}, {x}.shape[-1:], eps=1e-5)",
    "l2_normalize": "F.normalize({x}, dim=-1)",
    "l1_normalize": "F.normalize({x}, p=1.0, dim=-1)",
    "center": "{x} - {x}.mean(dim=-1, keepdim=True)",
    "max_shift": "{x} - {x}.amax(dim=-1, keepdim=True)",
}

REDUCTIONS: dict[str, str] = {
    "sum": "{x}.sum(dim={dim})",
    "mean": "{x}.mean(dim={dim})",
    "amax": "{x}.amax(dim={dim})",
    "amin": "{x}.amin(dim={dim})",
    "l2": "{x}.norm(dim={dim})",
    "var": "{x}.var(dim={dim}, correction=0)",
    "logsumexp": "torch.logsumexp({x}, dim={dim})",
}

DRAWS: dict[str, str] = {
    "normal": "torch.randn({shape})",
    "shifted": "torch.randn({shape}) + 0.5",
    "wide": "torch.randn({shape}) * 3.0",
    "small": "torch.randn({shape}) * 0.1",
    "uniform": "torch.rand({shape})",
    "positive": "torch.rand({shape}) + 0.5",
}

_BINARY: dict[str, str] = {
    "add": "{x} + {y}",
    "sub": "{x} - {y}",
    "mul": "{x} * {y}",
    "div": "{x} / {y}",
    "rsub": "{y} - {x}",
    "maximum": "torch.maximum({x}, {y})",
}


def number(value: float) -> str:
    """A constant as both Python and C++ write it: the shortest text that reads back equal, always with a
    point."""
    return repr(float(value))


def torch_text(stage: Stage, x: str = "x") -> str:
    """Right-hand side of the reference line of any stage but Branch, with `x` as the running value.

    Raises:
      ValueError: the stage names a function that is not listed here.
    """
    if isinstance(stage, Unary):
        return _lookup(UNARY, stage.fn).format(
            x=x, **dict(zip("ab", map(number, stage.constants), strict=False))
        )
    if isinstance(stage, Scalar):
        if stage.op == "maximum":
            return f"torch.clamp({x}, min={number(stage.value)})"
        return _BINARY[stage.op].format(x=x, y=number(stage.value))
    if isinstance(stage, Vector):
        return _BINARY[stage.op].format(x=x, y=stage.name)
    if isinstance(stage, Tensor):
        operand = stage.name
        if stage.fn is not None:
            operand = _lookup(UNARY, stage.fn).format(x=operand)
        elif stage.factor is not None:
            operand = f"{number(stage.factor)} * {operand}"
        return _BINARY[stage.op].format(x=x, y=operand)
    if isinstance(stage, RowNorm):
        return _lookup(ROW_NORMS, stage.fn).format(x=x)
    if isinstance(stage, RowReduce):
        return _lookup(REDUCTIONS, stage.fn).format(x=x, dim=-1)
    if isinstance(stage, ColReduce):
        return _lookup(REDUCTIONS, stage.fn).format(x=x, dim=0)
    if isinstance(stage, Linear):
        return f"self.{stage.name}({x})"
    if isinstance(stage, Matmul):
        return f"{x} @ {stage.name}.t()" if stage.transposed else f"{x} @ {stage.name}"
    if isinstance(stage, Transpose):
        return f"{x}.t().contiguous()"
    if isinstance(stage, Cumsum):
        return f"torch.cumsum({x}, dim=-1)"
    if isinstance(stage, Window):
        if stage.fn == "conv":
            return f"F.conv1d({x}, {stage.name}, groups={x}.shape[0])"
        stride = "" if stage.stride == stage.size else f", stride={stage.stride}"
        return f"F.{stage.fn}_pool1d({x}, {stage.size}{stride})"
    raise ValueError(f"a {type(stage).__name__} stage has no right-hand side of its own")


def _lookup(table: dict[str, str], name: str) -> str:
    if name not in table:
        raise ValueError(f"unknown function {name!r}: tasks/ops.py lists {', '.join(table)}")
    return table[name]
