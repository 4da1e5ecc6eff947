"""Random chains of elementwise stages, grown one at a time while the range of the values is tracked.

The range, from about the least to about the greatest of many values, decides what may come next. So no
stage is without effect (a ReLU of a square), none overflows, and results differ from zero and a constant.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from dk_jax.tasks.spec import Scalar, Stage, Tensor, Unary, Vector

NORMAL = 4.5  # a standard normal draw of a million values stays about within this
_GATES = ("sigmoid", "tanh")
_CLAMPS = ((-1.0, 1.0), (-0.5, 0.5), (-2.0, 2.0), (-1.0, 2.0), (0.0, 1.0), (-0.5, 1.5))


@dataclass
class Chain:
    """A pipeline under construction and the range [low, high] of its values."""

    rng: random.Random
    low: float = -NORMAL
    high: float = NORMAL
    names: set[str] = field(default_factory=set)
    stages: list[Stage] = field(default_factory=list)

    @property
    def bound(self) -> float:
        """Largest magnitude."""
        return max(-self.low, self.high)

    def take(self, stage: Stage, low: float, high: float, name: str | None = None) -> bool:
        """Append a stage whose values lie in [low, high]; `name` is an operand that it uses up."""
        self.stages.append(stage)
        self.low, self.high = low, high
        if name:
            self.names.add(name)
        return True

    def grow(self, length: int, columns: bool = True) -> None:
        """Add `length` elementwise stages; `columns` allows operands of the value's shape or one a column."""
        makers = [self._unary, self._unary, self._scalar] + ([self._vector, self._tensor] if columns else [])
        added = 0
        while added < length:
            added += bool(self.rng.choice(makers)())

    def _last(self, kind: type) -> bool:
        return bool(self.stages) and isinstance(self.stages[-1], kind)

    def _unary(self) -> bool:
        fn = self.rng.choice(list(_UNARY))
        rule = _UNARY[fn]
        margin = 0.1 * (self.high - self.low)
        signed = self.low < -margin and self.high > margin
        if (
            self._last(Unary)
            or self.bound > rule.limit
            or (rule.signed and not signed)
            or (rule.unsigned and self.low < 0)
        ):
            return False
        if rule.squashes and (self.bound <= 1.0 or self.low > 2.0 or self.high < -2.0):
            return False
        if fn == "clamp":
            return self._clamp()
        constants = (self.rng.choice((0.01, 0.1, 0.2, 0.3)),) if fn == "leaky_relu" else ()
        return self.take(Unary(fn=fn, constants=constants), *rule.range(self.low, self.high))

    def _clamp(self) -> bool:
        least, most = self.rng.choice(_CLAMPS)
        low, high = max(self.low, least), min(self.high, most)
        if (low, high) == (self.low, self.high) or high - low < 0.5 * (most - least):
            return False
        return self.take(Unary(fn="clamp", constants=(least, most)), low, high)

    def _scalar(self) -> bool:
        if self._last(Scalar):
            return False
        op = self.rng.choice(("mul", "mul", "add", "sub", "div", "rsub"))
        if op == "mul":
            value = self.rng.choice((0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 0.8, 1.5, 2.0, 2.5, 3.0, 4.0))
            return self.take(Scalar(op=op, value=value), self.low * value, self.high * value)
        if op == "div":
            value = self.rng.choice((2.0, 3.0, 4.0, 5.0))
            return self.take(Scalar(op=op, value=value), self.low / value, self.high / value)
        value = self.rng.choice((0.1, 0.2, 0.5, 1.0, 1.5, 2.0))
        if op == "rsub":
            return self.take(Scalar(op=op, value=value), value - self.high, value - self.low)
        shift = value if op == "add" else -value
        return self.take(Scalar(op=op, value=value), self.low + shift, self.high + shift)

    def _vector(self) -> bool:
        op, name = self.rng.choice(
            (("add", "bias"), ("add", "bias"), ("mul", "scale"), ("mul", "scale"), ("sub", "shift"))
        )
        if name in self.names:
            return False
        if op == "mul":  # by 0.5 to 1.5
            low, high = self.low * (1.5 if self.low < 0 else 0.5), self.high * (0.5 if self.high < 0 else 1.5)
            return self.take(Vector(op=op, name=name, draw="positive"), low, high, name)
        return self.take(Vector(op=op, name=name), self.low - 3.5, self.high + 3.5, name)

    def _tensor(self) -> bool:
        op, name = self.rng.choice(
            (("add", "y"), ("add", "y"), ("mul", "y"), ("sub", "y"), ("maximum", "y"), ("mul", "gate"))
        )
        if name in self.names:
            return False
        if name == "gate":
            fn = self.rng.choice(_GATES)
            low, high = (
                (-self.bound, self.bound) if fn == "tanh" else (min(self.low, 0.0), max(self.high, 0.0))
            )
            return self.take(Tensor(op=op, name=name, fn=fn), low, high, name)
        if op == "maximum":
            return self.take(Tensor(op=op, name=name), self.low, max(self.high, NORMAL), name)
        if op == "mul":
            return self.take(Tensor(op=op, name=name), -NORMAL * self.bound, NORMAL * self.bound, name)
        factor = self.rng.choice((None, None, 0.1, 0.3, 0.5, 2.0))
        spread = NORMAL * (factor or 1.0)
        return self.take(Tensor(op=op, name=name, factor=factor), self.low - spread, self.high + spread, name)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When a unary function has an effect and is safe, and what its values are like.

    Attributes:
      range: range of the result, from that of the argument.
      limit: largest magnitude of the argument.
      signed, unsigned: whether it needs arguments of both signs, or none that is negative.
      squashes: whether it flattens large arguments, and so should not follow another such function.
    """

    range: Callable[[float, float], tuple[float, float]]
    limit: float = 60.0
    signed: bool = False
    unsigned: bool = False
    squashes: bool = False


def _rising(fn: Callable[[float], float]) -> Callable[[float, float], tuple[float, float]]:
    return lambda low, high: (fn(low), fn(high))


def _wave(low: float, high: float) -> tuple[float, float]:
    return -1.0, 1.0


def _gated(low: float, high: float) -> tuple[float, float]:
    return -0.4, high  # SiLU and its like: a shallow dip below zero


_UNARY: dict[str, Rule] = {
    "relu": Rule(range=lambda low, high: (0.0, high), signed=True),
    "leaky_relu": Rule(range=lambda low, high: (0.3 * low, high), signed=True),
    "elu": Rule(range=lambda low, high: (-1.0, high), signed=True),
    "clamp": Rule(range=lambda low, high: (low, high)),
    "abs": Rule(range=lambda low, high: (0.0, max(-low, high)), signed=True),
    "square": Rule(range=lambda low, high: (0.0, max(low * low, high * high)), limit=8.0, signed=True),
    "neg": Rule(range=lambda low, high: (-high, -low)),
    "sqrt": Rule(range=_rising(math.sqrt), unsigned=True),
    "exp": Rule(range=_rising(math.exp), limit=3.5),
    "log1p": Rule(range=_rising(math.log1p), unsigned=True),
    "sin": Rule(range=_wave, limit=20.0, squashes=True),
    "cos": Rule(range=_wave, limit=20.0, squashes=True),
    "sigmoid": Rule(range=_rising(lambda v: 1.0 / (1.0 + math.exp(-v))), squashes=True),
    "tanh": Rule(range=_rising(math.tanh), squashes=True),
    "silu": Rule(range=_gated, signed=True),
    "gelu": Rule(range=_gated, signed=True),
    "gelu_tanh": Rule(range=_gated, signed=True),
    "softplus": Rule(range=_rising(lambda v: math.log1p(math.exp(v))), limit=40.0, signed=True),
    "softsign": Rule(range=_rising(lambda v: v / (1.0 + abs(v))), squashes=True),
    "logsigmoid": Rule(range=_rising(lambda v: -math.log1p(math.exp(-v))), limit=40.0, signed=True),
    "mish": Rule(range=_gated, limit=40.0, signed=True),
    "hardsigmoid": Rule(range=_rising(lambda v: min(max(v + 3.0, 0.0), 6.0) / 6.0), squashes=True),
    "hardswish": Rule(range=_gated, signed=True),
}
