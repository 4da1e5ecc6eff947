"""Values that a package's text comes to, and what functions from outside of the package do with them (`dk_jax.sft.open_source.fold`)."""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from dk_jax.sft.open_source.facts import NARROW_TYPES, VALUES, Dotted, Properties
from dk_jax.sft.open_source.modules import Symbol

LARGEST = 1 << 16
"""Of exponents, shifts and ranges that are evaluated."""


BINARY = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
COMPARE = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
UNARY = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert}
BUILTINS = {
    f.__name__: f for f in (min, max, len, range, int, float, bool, str, abs, round, sum, any, all, list, tuple, dict, set, sorted, zip, enumerate)
}
METHODS = {str: "startswith endswith lower upper split strip replace removeprefix".split(), dict: "get items keys values copy update".split()}
METHODS |= {list: "append extend copy index count".split(), tuple: "index count".split(), int: ["bit_length"]}


class NotConstant(Exception):
    """An expression depends on what is known at run time only."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One configuration of a tuned kernel: values of its constexpr parameters, and options of the launch."""

    meta: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of the package, to be evaluated by its text."""

    module: str
    node: ast.FunctionDef | ast.Lambda
    scope: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)


class Version(tuple):
    """A version's leading numbers, ordered as versions are."""

    def __new__(cls, text: str):
        return super().__new__(cls, (int(part) for part in re.findall(r"\d+", str(text))[:3]))

    @property
    def major(self) -> int:
        return self[0]

    @property
    def minor(self) -> int:
        return self[1]


class Tensor:
    """Stands for a tensor, or for a tensor's device, of which nothing is known but that it is one."""

    def __bool__(self) -> bool:
        raise NotConstant("a tensor or a device")


TENSOR, DEVICE = Tensor(), Tensor()


def guarded(node: ast.expr, function: Callable, *args: Any) -> Any:
    """A function's value, where the arguments are plain and it has one. Raises NotConstant."""
    if any(isinstance(arg, (Dotted, Function, Symbol, Properties, Tensor)) for arg in args) and function not in (operator.is_, operator.is_not):
        raise NotConstant(ast.unparse(node))
    if function in (operator.pow, operator.lshift, range) and any(isinstance(arg, int) and abs(arg) > LARGEST for arg in args):
        raise NotConstant(f"{ast.unparse(node)}: too large")
    try:
        return function(*args)
    except Exception as error:
        raise NotConstant(f"{ast.unparse(node)}: {error}") from error


def external(node: ast.Call, name: str, args: list, named: dict) -> Any:
    """What a call of something outside of the package comes to. Raises NotConstant."""
    root, _, last = name.rpartition(".")
    if name == "triton.Config" or (last == "Config" and root.startswith("triton")):
        meta = args[0] if args else named.pop("kwargs", {})
        options = dict(zip(("num_warps", "num_stages", "num_ctas"), args[1:], strict=False)) | named
        kept = {k: v for k, v in options.items() if k in ("num_warps", "num_stages", "maxnreg") and v is not None}
        return Config(tuple(meta.items()), tuple(kept.items()))
    if name == "triton.language.constexpr":
        return args[0]
    if name in ("os.environ.get", "os.getenv"):
        return args[1] if len(args) > 1 else named.get("default")
    if last in ("Version", "parse") and "version" in root:
        return Version(args[0])
    if name == "importlib.import_module" and args[0] in ("torch", "triton"):
        return Dotted(args[0])
    if name == "isinstance":
        return is_instance(node, *args)
    if name == "hasattr" and isinstance(args[0], Dotted):
        return not args[1].startswith("_") and args[0].name.split(".")[0] == "triton" or args[1] == "cuda"
    if name == "getattr" and isinstance(args[0], Dotted):
        found = f"{args[0].name}.{args[1]}"
        return VALUES.get(found, Dotted(found))
    if name == "triton.next_power_of_2":
        return guarded(node, lambda n: 1 << max(0, n - 1).bit_length(), *args)
    if name == "triton.cdiv":
        return guarded(node, lambda n, k: -(-n // k), *args)
    if root == "math" and hasattr(math, last):
        return guarded(node, getattr(math, last), *args)
    if root == "operator" and hasattr(operator, last):
        return guarded(node, getattr(operator, last), *args)
    raise NotConstant(ast.unparse(node))


def is_instance(node: ast.Call, value: Any, kinds: Any) -> bool:
    """Whether a tensor, or a plain value, is of one of these types."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    names = {kind.name for kind in kinds if isinstance(kind, Dotted)}
    plain = tuple(kind for kind in kinds if isinstance(kind, type))
    if not names <= {"torch.Tensor", "torch.dtype", "torch.device", "numbers.Number", "numbers.Real", "numbers.Integral"} or (
        len(names) + len(plain) < len(kinds)
    ):
        raise NotConstant(ast.unparse(node))
    if isinstance(value, Tensor):
        return ("torch.Tensor" if value is TENSOR else "torch.device") in names
    if isinstance(value, (Dotted, Function, Symbol, Properties)):
        raise NotConstant(ast.unparse(node))
    return isinstance(value, plain) or (isinstance(value, (bool, int, float)) and any(name.startswith("numbers.") for name in names))


def of_these_tasks(node: ast.Compare) -> bool | None:
    """What a comparison comes to for tensors that are never empty and of float32, or None where that does not decide it: with a type
    that these never have, or of a tensor's number of elements with 0."""
    if len(node.ops) != 1:
        return None
    op, left, right = node.ops[0], node.left, node.comparators[0]

    def narrow(part: ast.expr) -> bool:
        if isinstance(part, (ast.Tuple, ast.List, ast.Set)):
            return bool(part.elts) and all(map(narrow, part.elts))
        return isinstance(part, ast.Attribute) and part.attr in NARROW_TYPES and isinstance(part.value, ast.Name)

    if isinstance(op, (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot)) and (
        narrow(right) or (narrow(left) and not isinstance(op, (ast.In, ast.NotIn)))
    ):
        return isinstance(op, (ast.NotEq, ast.NotIn, ast.IsNot))
    counts = isinstance(left, ast.Call) and isinstance(left.func, ast.Attribute) and left.func.attr == "numel" and not left.args
    if counts and isinstance(right, ast.Constant) and right.value == 0 and isinstance(op, (ast.Eq, ast.NotEq, ast.Gt, ast.LtE)):
        return isinstance(op, (ast.NotEq, ast.Gt))
    return None
