"""Random chains of elementwise stages, grown one at a time while what is known of the values is tracked.

Two facts decide what may come next: whether values can be negative, and about how large they get. So no stage
is without effect (a ReLU of a square), none overflows, and results differ from zero and from a constant.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from dk_jax.tasks.spec import Scalar, Stage, Tensor, Unary, Vector

_GATES = ("sigmoid", "tanh")


@dataclass
class Chain:
    """A pipeline under construction and what is known of its values."""

    rng: random.Random
    negative: bool = True
    bound: float = 4.5  # of a standard normal draw
    names: set[str] = field(default_factory=set)
    stages: list[Stage] = field(default_factory=list)

    def take(self, stage: Stage, negative: bool, bound: float, name: str | None = None) -> bool:
        self.stages.append(stage)
        self.negative, self.bound = negative, bound
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
        squashed = self.bound <= 1.0
        if self._last(Unary) or (rule.signed and not self.negative) or (rule.unsigned and self.negative):
            return False
        if self.bound > rule.limit or (rule.squashes and squashed):
            return False
        constants = ()
        if fn == "leaky_relu":
            constants = (self.rng.choice((0.01, 0.1, 0.2, 0.3)),)
        elif fn == "clamp":
            low, high = self.rng.choice(
                ((-1.0, 1.0), (-0.5, 0.5), (-2.0, 2.0), (-1.0, 2.0), (0.0, 1.0), (-0.5, 1.5))
            )
            if self.bound < 2 * high:
                return False
            constants = (low, high)
        negative = self.negative and not rule.positive and not (fn == "clamp" and constants[0] == 0.0)
        bound = constants[1] if fn == "clamp" else rule.bound(self.bound)
        return self.take(Unary(fn=fn, constants=constants), negative, bound)

    def _scalar(self) -> bool:
        if self._last(Scalar):
            return False
        op = self.rng.choice(("mul", "mul", "add", "sub", "div", "rsub"))
        if op == "mul":
            value = self.rng.choice((0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 0.8, 1.5, 2.0, 2.5, 3.0, 4.0))
            return self.take(Scalar(op=op, value=value), self.negative, self.bound * value)
        if op == "div":
            value = self.rng.choice((2.0, 3.0, 4.0, 5.0))
            return self.take(Scalar(op=op, value=value), self.negative, self.bound / value)
        value = self.rng.choice((0.1, 0.2, 0.5, 1.0, 1.5, 2.0))
        return self.take(Scalar(op=op, value=value), self.negative or op != "add", self.bound + value)

    def _vector(self) -> bool:
        op, name = self.rng.choice(
            (("add", "bias"), ("add", "bias"), ("mul", "scale"), ("mul", "scale"), ("sub", "shift"))
        )
        if name in self.names:
            return False
        if op == "mul":
            return self.take(Vector(op=op, name=name, draw="positive"), self.negative, self.bound * 1.5, name)
        return self.take(Vector(op=op, name=name), True, self.bound + 4.0, name)

    def _tensor(self) -> bool:
        op, name = self.rng.choice(
            (("add", "y"), ("add", "y"), ("mul", "y"), ("sub", "y"), ("maximum", "y"), ("mul", "gate"))
        )
        if name in self.names or len(self.names & {"y", "gate"}) == 2:
            return False
        if name == "gate":
            fn = self.rng.choice(_GATES)
            return self.take(Tensor(op=op, name=name, fn=fn), self.negative or fn == "tanh", self.bound, name)
        factor = self.rng.choice((None, None, 0.1, 0.3, 0.5, 2.0)) if op in ("add", "sub") else None
        bound = self.bound * 4.5 if op == "mul" else self.bound + 4.5 * (factor or 1.0)
        return self.take(Tensor(op=op, name=name, factor=factor), True, bound, name)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When a unary function has an effect and is safe, and what its values are like.

    Attributes:
      bound: largest magnitude of the result, from that of the argument.
      limit: largest magnitude of the argument.
      signed, unsigned: whether it needs arguments of both signs, or none that is negative.
      positive: whether its values are never negative.
      squashes: whether it maps to a small range, and so should not follow another such function.
    """

    bound: Callable[[float], float] = lambda x: x
    limit: float = 60.0
    signed: bool = False
    unsigned: bool = False
    positive: bool = False
    squashes: bool = False


def _one(_: float) -> float:
    return 1.0


_UNARY: dict[str, Rule] = {
    "relu": Rule(signed=True, positive=True),
    "leaky_relu": Rule(signed=True),
    "elu": Rule(signed=True),
    "clamp": Rule(),
    "abs": Rule(signed=True, positive=True),
    "square": Rule(bound=lambda x: x * x, limit=8.0, positive=True),
    "neg": Rule(),
    "sqrt": Rule(bound=lambda x: max(1.0, x**0.5), unsigned=True, positive=True),
    "exp": Rule(bound=lambda x: 2.718**x, limit=3.5, positive=True),
    "log1p": Rule(unsigned=True, positive=True),
    "sin": Rule(bound=_one, limit=20.0, squashes=True),
    "cos": Rule(bound=_one, limit=20.0, squashes=True),
    "sigmoid": Rule(bound=_one, positive=True, squashes=True),
    "tanh": Rule(bound=_one, squashes=True),
    "silu": Rule(signed=True),
    "gelu": Rule(signed=True),
    "gelu_tanh": Rule(signed=True),
    "softplus": Rule(bound=lambda x: x + 0.7, limit=40.0, signed=True, positive=True),
    "softsign": Rule(bound=_one, squashes=True),
    "logsigmoid": Rule(bound=lambda x: x + 0.7, limit=40.0, signed=True),
    "mish": Rule(limit=40.0, signed=True),
    "hardsigmoid": Rule(bound=_one, positive=True, squashes=True),
    "hardswish": Rule(signed=True),
}
