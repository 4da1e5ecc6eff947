"""What a reference computes, as a sequence of operations that does not tell how it is written. Sources are read, never executed."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dk_jax.sft.normal_form import arguments_of

_MOST_OPERATIONS, _MOST_CALLS, _DEEPEST = 5000, 10_000, 40
_VIEWS = frozenset(
    "view reshape flatten unflatten ravel squeeze unsqueeze expand expandas broadcastto repeat contiguous to float half double bfloat16 type "
    "typeas detach clone cuda cpu identity requiresgrad register hook print isinstance".split()
)
"""What computes nothing: the same numbers in another shape, place or type."""
_CONSTANTS = frozenset(
    "zeros ones empty full randn rand randint arange linspace eye tensor scalartensor zeroslike oneslike emptylike fulllike randnlike device "
    "size dim numel item len int bool list tuple range super".split()
)
_SAME = {
    "max": "amax", "min": "amin", "mm": "matmul", "bmm": "matmul", "mv": "matmul", "dot": "matmul", "multiply": "mul", "divide": "div",
    "truedivide": "div", "subtract": "sub", "negative": "neg", "absolute": "abs", "clip": "clamp", "hardtanh": "clamp", "swish": "silu",
    "t": "transpose", "mt": "transpose", "permute": "transpose", "movedim": "transpose", "swapaxes": "transpose", "concat": "cat",
    "concatenate": "cat", "vectornorm": "norm",
}  # fmt: skip
_REDUCTIONS = frozenset("sum mean amax amin norm var std prod logsumexp argmax argmin any all median".split())
_ALONG = _REDUCTIONS | frozenset("softmax logsoftmax softmin cumsum cumprod normalize flip".split())
_OPERATORS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "matmul", ast.Pow: "pow", ast.Mod: "mod", ast.FloorDiv: "div"
}  # fmt: skip


@functools.lru_cache(maxsize=1 << 14)
def operations(reference: str, entry: str = "Model") -> tuple[str, ...]:
    """What the class `entry` of a source computes, in the order in which it does: `("add:tt", "silu:p", "normalize:p", "mul:pt")`.

    Names, sizes, constants and views are left out, and so is how an operation is called: of torch, of torch.nn.functional, as a method, an
    operator or a layer. A keyword that is a word, such as approximate="tanh", belongs to the operation's name. Behind the colon stands what
    it works on: p what the one before it gave, r what an earlier one gave, t a tensor that is given or a parameter, a such a one again, c a
    constant. Of dimensions it is kept whether they are the first (0), another, or all (*). Layers, submodules, methods and functions of the
    file are followed; the body of a loop over something unknown is read once, both sides of a branch are. A square, silu and mish are one
    operation each however they are written; subtracting a constant is adding one, dividing by it multiplying.

    Raises:
        ValueError: there is no such class with a forward to read, or it is too long.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Operations(ast.parse(reference)).read(entry)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"it can't be read: {error}") from error


class _Tensor:
    """A tensor from outside: an argument or a parameter."""


@dataclasses.dataclass(frozen=True)
class _Layer:
    operation: str


@dataclasses.dataclass(frozen=True, eq=False)
class _Model:
    """An instance of a class of the file."""

    of: ast.ClassDef
    attributes: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Function:
    node: ast.FunctionDef
    me: _Model | None = None


class _Operations:
    """Goes through a reference's forward with stand-ins for its values: the place of the operation that gave it, a tensor from outside, "c"
    for a constant, lists, layers, modules, functions."""

    def __init__(self, tree: ast.Module):
        self._classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self._names = self._classes | {node.name: _Function(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
        self._out: list[str] = []
        self._operands: list[list] = []
        self._used: set[_Tensor] = set()
        self._quiet = self._depth = self._calls = 0

    def read(self, entry: str) -> tuple[str, ...]:
        if entry not in self._classes or self._method(self._classes[entry], "forward") is None:
            raise ValueError(f"it has no class {entry} with a forward")
        self._apply(self._instance(self._classes[entry], []), None)
        return tuple(self._out)

    def _method(self, of: ast.ClassDef, name: str, *, of_bases: bool = False) -> ast.FunctionDef | None:
        own = [node for node in of.body if isinstance(node, ast.FunctionDef) and node.name == name]
        bases = (self._classes[base.id] for base in of.bases if isinstance(base, ast.Name) and base.id in self._classes and base.id != of.name)
        return own[0] if own and not of_bases else next(filter(None, (self._method(base, name) for base in bases)), None)

    def _instance(self, of: ast.ClassDef, arguments: list) -> _Model:
        model = _Model(of, {})
        init = self._method(of, "__init__")
        if init is not None:
            self._quiet += 1
            self._run(_Function(init, model), arguments)
            self._quiet -= 1
        return model

    def _run(self, function: _Function, arguments: list | None) -> Any:
        """Calls a function of the file; None for arguments gives it tensors."""
        names = [a.arg for a in arguments_of(function.node.args)]
        local: dict[str, Any] = {}
        if function.me is not None and names:
            local[names.pop(0)] = function.me
        local |= {name: _Tensor() if arguments is None else arguments[i] if i < len(arguments) else "c" for i, name in enumerate(names)}
        self._depth += 1
        self._calls += 1
        if self._depth > _DEEPEST or self._calls > _MOST_CALLS:
            raise ValueError(f"its functions call each other more than {_DEEPEST} deep or {_MOST_CALLS} times, at {function.node.name}")
        result = self._do(function.node.body, local)
        self._depth -= 1
        return "c" if result is None else result

    def _do(self, body: Sequence[ast.stmt], local: dict[str, Any]) -> Any:
        """Statements one after another; what they return, None if they go on."""
        for node in body:
            result = None
            if isinstance(node, ast.Return):
                return self._of(node.value, local) if node.value is not None else "c"
            if isinstance(node, ast.Assign):
                value = self._of(node.value, local)
                for target in node.targets:
                    self._bind(target, value, local)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._bind(node.target, self._of(node.value, local), local)
            elif isinstance(node, ast.AugAssign):
                value = self._binary(_OPERATORS.get(type(node.op), "bitwise"), self._of(node.target, local), self._of(node.value, local))
                self._bind(node.target, value, local)
            elif isinstance(node, ast.Expr):
                self._of(node.value, local)
            elif isinstance(node, ast.For):
                for value in self._items(self._of(node.iter, local)):
                    self._bind(node.target, value, local)
                    result = self._do(node.body, local)
            elif isinstance(node, ast.If):
                sides = self._do(node.body, local), self._do(node.orelse, local)
                result = None if None in sides else sides[0]
            elif isinstance(node, ast.While | ast.With | ast.Try):
                result = self._do(node.body, local)
            elif isinstance(node, ast.FunctionDef):
                local[node.name] = _Function(node)
            if result is not None:
                return result
        return None

    def _items(self, value: Any) -> list:
        if isinstance(value, list):
            return list(value)
        if not self._quiet:
            self._out.append("loop")
            self._operands.append([])
        return [value]

    def _bind(self, target: ast.expr, value: Any, local: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            local[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            values = value if isinstance(value, list) and len(value) == len(target.elts) else [value] * len(target.elts)
            for each, one in zip(target.elts, values, strict=True):
                self._bind(each, one, local)
        elif isinstance(target, ast.Attribute) and isinstance(owner := self._of(target.value, local), _Model):
            owner.attributes[target.attr] = value

    def _of(self, node: ast.expr, local: dict[str, Any]) -> Any:
        """The stand-in for an expression's value."""
        if isinstance(node, ast.Name):
            return local[node.id] if node.id in local else self._names.get(node.id, "c")
        if isinstance(node, ast.Attribute):
            return self._attribute(self._of(node.value, local), node.attr)
        if isinstance(node, ast.Call):
            return self._call(node, local)
        if isinstance(node, ast.BinOp):
            return self._binary(_OPERATORS.get(type(node.op), "bitwise"), self._of(node.left, local), self._of(node.right, local), node.right)
        if isinstance(node, ast.UnaryOp):
            return self._emit("neg" if isinstance(node.op, ast.USub) else "not", [self._of(node.operand, local)])
        if isinstance(node, ast.Compare | ast.BoolOp):
            parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else node.values
            return self._emit("compare", [self._of(part, local) for part in parts])
        if isinstance(node, ast.IfExp):
            sides = [self._of(side, local) for side in (node.body, node.orelse)]
            return sides[1] if sides[0] == "c" else sides[0]
        if isinstance(node, ast.Tuple | ast.List):
            return self._values(node.elts, local)
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            out = []
            self._quiet += 1  # of unknown length: not a loop of forward's
            items = self._items(self._of(node.generators[0].iter, local))
            self._quiet -= 1
            for value in items:
                self._bind(node.generators[0].target, value, local)
                out.append(self._of(node.elt, local))
            return out
        if isinstance(node, ast.Subscript):
            value, index = self._of(node.value, local), self._of(node.slice, local)
            if isinstance(value, list):
                at = _literal(node.slice)
                return value[at] if isinstance(at, int) and -len(value) <= at < len(value) else value if isinstance(node.slice, ast.Slice) else "c"
            return self._emit("index", [value, index]) if _is_tensor(index) else value
        if isinstance(node, ast.NamedExpr):
            self._bind(node.target, value := self._of(node.value, local), local)
            return value
        return "c"

    def _values(self, nodes: Sequence[ast.expr], local: dict[str, Any]) -> list:
        out = []
        for node in nodes:
            value = self._of(node.value if isinstance(node, ast.Starred) else node, local)
            out += value if isinstance(node, ast.Starred) and isinstance(value, list) else [value]
        return out

    def _attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, _Model):
            method = self._method(owner.of, name)
            return owner.attributes.get(name, "c") if method is None else _Function(method, owner)
        if not _is_tensor(owner) or name in ("shape", "device", "dtype", "ndim"):
            return "c"
        return self._emit("transpose", [owner]) if name in ("T", "mT", "H") else owner

    def _call(self, node: ast.Call, local: dict[str, Any]) -> Any:
        given = self._values(node.args, local) + [self._of(keyword.value, local) for keyword in node.keywords]
        called = node.func
        if isinstance(called, ast.Name):
            if (value := self._of(called, local)) != "c":
                return self._apply(value, given)
            return self._named(called.id, given, node, 1)
        if not isinstance(called, ast.Attribute):
            return self._apply(self._of(called, local), given)
        owner = self._of(called.value, local)
        if isinstance(owner, _Model):
            if called.attr in ("register_buffer", "register_parameter", "add_module") and node.args and len(given) > 1:
                owner.attributes[str(_literal(node.args[0]))] = given[1] if called.attr == "add_module" else _Tensor()
                return "c"
            return self._apply(self._attribute(owner, called.attr), given)
        if called.attr == "__init__" and local and isinstance(me := next(iter(local.values())), _Model):  # super().__init__(...)
            base = self._method(me.of, "__init__", of_bases=True)
            return self._run(_Function(base, me), given) if base is not None else "c"
        if isinstance(owner, list):
            if called.attr in ("append", "extend") and given:
                owner += given[0] if called.attr == "extend" and isinstance(given[0], list) else given
            return "c"
        return self._named(called.attr, [owner, *given], node, 0) if _is_tensor(owner) else self._named(called.attr, given, node, 1)

    def _named(self, name: str, given: list, node: ast.Call, along_at: int) -> Any:
        """A function of torch, a method of a tensor or a layer, by name alone; `along_at`: which positional argument its dimension is."""
        if name in ("Sequential", "ModuleList", "OrderedDict"):
            layers = given[0] if len(given) == 1 and isinstance(given[0], list) else given
            return [layer[1] if isinstance(layer, list) and len(layer) == 2 and layer[0] == "c" else layer for layer in layers]
        if name in ("zip", "enumerate") and given and all(isinstance(value, list) for value in given):
            columns = [["c"] * len(given[0]), *given] if name == "enumerate" else given
            return [list(row) for row in zip(*columns, strict=False)]
        if name == "Parameter":
            return _Tensor()
        operation = name.lower().replace("_", "")
        operation = re.sub(r"(?<=norm|pout)[123]d$", "", _SAME.get(operation, operation))
        operation += "".join(sorted(k.value.value for k in node.keywords if isinstance(k.value, ast.Constant) and isinstance(k.value.value, str)))
        tensors = [value for value in _flat(given) if _is_tensor(value)]
        if name[0].isupper():
            return _Layer(operation + _along(operation, node, 0))
        if operation in _CONSTANTS or not tensors:
            return "c"
        if operation in _VIEWS:
            return tensors[0]
        if operation in _OPERATORS.values() and len(given) > 1:
            return self._binary(operation, given[0], given[1], node.args[-1] if node.args else None)
        if operation in ("amax", "amin") and len(tensors) == 2:
            operation = "maximum" if operation == "amax" else "minimum"
        return self._emit(operation + _along(operation, node, along_at), tensors)

    def _apply(self, value: Any, given: list | None) -> Any:
        """Calls a layer, a module or a list of them one after another, or a function of the file."""
        if isinstance(value, _Function):
            return self._run(value, given)
        if isinstance(value, ast.ClassDef):
            return self._instance(value, given or [])
        if isinstance(value, _Model):
            forward = self._method(value.of, "forward")
            return self._run(_Function(forward, value), given) if forward is not None else "c"
        if isinstance(value, list):
            for layer in value:
                given = [self._apply(layer, given)]
            return given[0] if given else "c"
        tensors = [one for one in _flat(given) if _is_tensor(one)]
        if isinstance(value, _Layer):
            return tensors[0] if value.operation in _VIEWS and tensors else self._emit(value.operation, tensors)
        return self._emit("call", tensors)

    def _binary(self, operation: str, left: Any, right: Any, exponent: ast.expr | None = None) -> Any:
        if operation == "mul" and left is right or operation == "pow" and exponent is not None and _literal(exponent) == 2:
            return self._emit("square", [left])
        if operation == "mul":
            for gate, x in ((left, right), (right, left)):
                if (folded := self._folded(gate, x)) is not None:
                    return folded
        if not _is_tensor(right):
            operation = {"sub": "add", "div": "mul"}.get(operation, operation)
        elif not _is_tensor(left):
            operation = {"sub": "rsub", "div": "rdiv", "pow": "rpow"}.get(operation, operation)
        return self._emit(operation, [left, right])

    def _folded(self, gate: Any, x: Any) -> Any:
        """x * sigmoid(x) as silu, x * tanh(softplus(x)) as mish; None for another product."""
        for name, parts in (("silu", ["sigmoid"]), ("mish", ["softplus", "tanh"])):
            at = len(self._out) - len(parts)
            chained = gate == len(self._out) - 1 and at >= 0 and [one.partition(":")[0] for one in self._out[at:]] == parts
            if chained and self._operands[at] == [x] and (len(parts) == 1 or self._operands[at + 1] == [at]):
                del self._out[at:], self._operands[at:]
                self._used = {value for values in self._operands for value in values if isinstance(value, _Tensor)}
                return self._emit(name, [x])
        return None

    def _emit(self, operation: str, values: list) -> Any:
        values = [value if _is_tensor(value) else "c" for value in values]
        if self._quiet or not any(map(_is_tensor, values)):
            return "c"
        if len(self._out) == _MOST_OPERATIONS:
            raise ValueError(f"it has more than {_MOST_OPERATIONS} operations")
        kinds = [self._kind(value) for value in values]
        ordered = operation in ("sub", "div", "matmul", "pow", "rsub", "rdiv", "rpow", "index")
        self._out.append(f"{operation}:{''.join(kinds if ordered else sorted(kinds))}")
        self._operands.append(values)
        self._used |= {value for value in values if isinstance(value, _Tensor)}
        return len(self._out) - 1

    def _kind(self, value: Any) -> str:
        if isinstance(value, _Tensor):
            return "a" if value in self._used else "t"
        return "c" if value == "c" else "p" if value == len(self._out) - 1 else "r"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, _Tensor | int)


def _flat(values: Iterable[Any] | None) -> Iterator[Any]:
    for value in values if values is not None else (_Tensor(),):
        if isinstance(value, list):
            yield from _flat(value)
        else:
            yield value


def _literal(node: ast.AST | None) -> Any:
    try:
        return ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None


def _along(operation: str, node: ast.Call, at: int) -> str:
    """What of a dimension, and of a norm's order, belongs to an operation's name."""
    if operation not in _ALONG:
        return ""
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    one = "1" if operation in ("norm", "normalize") and _literal(named.get("p")) == 1 else ""
    where = named.get("dim", named.get("axis", node.args[at] if at < len(node.args) else None))
    if where is None:
        return one + ("*" if operation in _REDUCTIONS else "")
    return one + ("0" if _literal(where) in (0, (0,), [0]) else "")
