"""Rules for the expressions of a package's functions: what names stand for, what is known beforehand, how calls are made.

Every global name is followed to the package's definition of it, which is needed too, or to torch or triton. Arguments that a call spells
out go into the function that is called. CUDA's device library and Python's math are replaced by what triton and torch have.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dk_jax.sft.open_source.configs import last_name
from dk_jax.sft.open_source.facts import DEVICE_NAMES, NARROW_TYPES, STANDS_FOR
from dk_jax.sft.open_source.fold import Folder
from dk_jax.sft.open_source.literals import Literal, bound_arguments, flag_arguments, is_flag, literal_arguments, strings_in, without_arguments
from dk_jax.sft.open_source.modules import ExtractError, ModuleIndex, SourceModule, Symbol
from dk_jax.sft.open_source.portable import in_device_library, portable, portable_power
from dk_jax.sft.open_source.values import TENSOR, NotConstant, Tensor

_CANONICAL = (("triton.language", "tl"), ("triton", "triton"), ("torch", "torch"))
_FACTORIES = frozenset("empty empty_like zeros zeros_like ones ones_like full full_like".split())
_METHODS = frozenset("contiguous view reshape transpose unsqueeze new_empty new_zeros new_ones new_full".split())
"""Functions of torch, and methods, whose result is a tensor."""


class Needs(Protocol):
    """Collects what functions refer to (`dk_jax.sft.open_source.assembly`)."""

    def settle(self, symbol: Symbol) -> Symbol:
        """The symbol that another one is but a name for."""

    def refer(self, symbol: Symbol, local: frozenset[str], given: Mapping[str, Literal] | None = None) -> ast.Name:
        """A name that stands for a symbol, in a function with these local names; `given`: of a function, the version of it that has
        these values for arguments."""

    def helper(self, definition: ast.FunctionDef, local: frozenset[str]) -> ast.Name:
        """A name that stands for a function of this project's own."""

    def heuristics(self, symbol: Symbol) -> tuple[str, ast.Dict | None]:
        """Of a kernel, a dictionary of functions that give some of its arguments from others, and the module that it is of."""

    def launched(self, symbol: Symbol, call: ast.Call, given: Mapping[str, Literal]) -> None:
        """Notes a launch of a kernel, of the version of it that has these values for arguments."""


class ExpressionRewriter(ast.NodeTransformer):
    """Rewrites expressions of one function of a module, or at its top.

    Args:
        index, folder: of the package.
        source: the module.
        needs: collects what is referred to.
        known: names that stand for something other than in the module.
    """

    def __init__(self, index: ModuleIndex, folder: Folder, source: SourceModule, needs: Needs, known: dict[str, Symbol] | None = None):
        self._index, self._folder, self._source, self._needs = index, folder, source, needs
        self._known = dict(known or {})
        self._local: frozenset[str] = frozenset()
        self._given: dict[str, Literal] = {}
        self._stored: frozenset[str] = frozenset()
        self._parameters: frozenset[str] = frozenset()
        self._unsafe: frozenset[str] = frozenset()
        self._strings: set[str] = set()
        self._jit = self._of_model = self._in_test = False
        self._context: str | None = None

    def expression(self, node: ast.expr) -> ast.expr:
        """An expression at the top of the module, rewritten.

        Raises:
            ExtractError: it needs something that cannot be had.
        """
        self._local = local_names(node)
        return self.visit(node)

    def _inside(self, rewrite: Callable[[], Any]) -> Any:
        """What an inner function comes to, which may run after any assignment of the outer one."""
        before, self._given = self._given, {k: v for k, v in self._given.items() if k not in self._stored}
        try:
            return rewrite()
        finally:
            self._given = before

    def _test(self, node: ast.expr) -> ast.expr:
        before, self._in_test = self._in_test, True
        try:
            return self.visit(node)
        finally:
            self._in_test = before

    def _truth(self, node: ast.expr) -> bool | None:
        return self._folder.truth(self._source.name, node, self._local, self._given)

    def _is_parameter(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._parameters

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        return self._inside(lambda: self.generic_visit(node))

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._chain(node, node, [])

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        root, attributes = node, []
        while isinstance(root, ast.Attribute):
            attributes.insert(0, root.attr)
            root = root.value
        if isinstance(root, ast.Name) and isinstance(node.ctx, ast.Load):
            return self._chain(node, root, attributes)
        return self._constant(node) or self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        return (self._constant(node) if isinstance(node.ctx, ast.Load) else None) or self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        holds = self._truth(node.test)
        if holds is not None:
            return self.visit(node.body if holds else node.orelse)
        node.test, node.body, node.orelse = self._test(node.test), self.visit(node.body), self.visit(node.orelse)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        return self._constant(node) or self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        if (value := self._constant(node)) is not None:
            return value
        neutral = isinstance(node.op, ast.And)
        parts = [part for part in node.values if self._truth(part) is not neutral]
        node.values = [self.visit(part) for part in parts]
        if len(node.values) == 1:
            return node.values[0]
        return bitwise(node) if self._jit and not self._in_test else node

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        # Tables from types to something: entries for types that never occur would keep their other side needed.
        pairs = [(k, v) for k, v in zip(node.keys, node.values, strict=True) if not (isinstance(k, ast.Attribute) and _is_narrow(k))]
        node.keys, node.values = [k and self.visit(k) for k, _ in pairs], [self.visit(v) for _, v in pairs]
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if (value := self._constant(node)) is not None:
            return value
        target = self._resolve(node.func)
        if target is not None and target.kind == "external":
            name = in_device_library(target.module)
            if name == "pow":
                node.args = [self.visit(arg) for arg in node.args]
                return portable_power(node, lambda definition: self._needs.helper(definition, self._local))
            if target.module.startswith("math."):
                return self._math(node, target.module.removeprefix("math."))
            if target.module == "functools.reduce" and self._multiplies(node.args[0]):
                return _filled("torch.Size(A).numel()", {"A": self.visit(node.args[1])})
        if isinstance(node.func, ast.Attribute) and node.func.attr == "apply":
            owner = self._resolve(node.func.value)
            if owner is not None and owner.kind == "class" and (target := forward_of(owner)) is not None:
                return self._call(node, target)
        if self._jit and isinstance(node.func, ast.Attribute) and node.func.attr == "to" and self._is_parameter(node.func.value):
            # A number that is passed to a kernel is a plain one in Triton's interpreter; `tl.cast` takes both.
            return self.visit(ast.Call(ast.parse("triton.language.cast", mode="eval").body, [node.func.value, *node.args], node.keywords))
        if isinstance(node.func, ast.Subscript) and (kernel := self._resolve(node.func.value)) is not None and kernel.kind == "function":
            node.args, node.keywords = [self.visit(a) for a in node.args], [self.visit(k) for k in node.keywords]
            flags = self._launch_flags(node, kernel)
            node.func.value = self._needs.refer(kernel, self._local, flags)
            node.func.slice = self.visit(node.func.slice)
            without_arguments(node, [a.arg for a in kernel.node.args.args], flags)
            self._needs.launched(kernel, node, flags)
            return node
        if target is not None and target.kind == "function" and target.name in STANDS_FOR:
            return ast.parse(STANDS_FOR[target.name], mode="eval").body
        if target is not None and target.kind == "function":
            return self._call_on_gpu(node, target) if self._jit else self._call(node, target)
        return self.generic_visit(node)

    def _call(self, node: ast.Call, target: Symbol) -> ast.expr:
        """A call of the package's function: arguments that are literals, or left at their literal defaults, go into the function."""
        node.args, node.keywords = [self.visit(a) for a in node.args], [self.visit(k) for k in node.keywords]
        known = literal_arguments(node, target.node, self._is_tensor)
        given = {name for name, value in known.items() if not isinstance(value, Tensor)}
        node.func = self._needs.refer(target, self._local, known)
        names = [a.arg for a in target.node.args.args][len(target.name.split(".")) - 1 :]
        without_arguments(node, names, given)
        return node

    def _launch_flags(self, node: ast.Call, kernel: Symbol) -> dict[str, Literal]:
        """Of a launch's arguments, and of those that heuristics add to them, the flags that are known here."""
        module, table = self._needs.heuristics(kernel)
        bound = bound_arguments(node, kernel.node)
        decided, open_rules = {}, []
        if table is not None and bound is not None:
            values: dict[str, Any] = {name: v.value for name, v in bound.items() if isinstance(v, ast.Constant)}
            values |= {name: TENSOR for name, v in bound.items() if self._is_tensor(v)}
            for key, rule in zip(table.keys, table.values, strict=True):
                try:
                    value = self._folder.apply(module, rule, values)
                except NotConstant:
                    value = TENSOR
                if is_flag(value):
                    decided[key.value] = value
                else:
                    open_rules.append(rule)
        elif table is not None:
            open_rules.append(table)
        kept = [d for d in kernel.node.decorator_list if last_name(d) in ("jit", "constexpr")]
        return flag_arguments(node, kernel.node, self._strings | strings_in(*kept, *open_rules)) | decided

    def _call_on_gpu(self, node: ast.Call, target: Symbol) -> ast.expr:
        """A call of one `@triton.jit` function by another: flags go into the function."""
        node.args, node.keywords = [self.visit(a) for a in node.args], [self.visit(k) for k in node.keywords]
        flags = flag_arguments(node, target.node, strings_in(*target.node.decorator_list)) if self._is_jit(node) else {}
        node.func = self._needs.refer(target, self._local, flags)
        without_arguments(node, [a.arg for a in target.node.args.args], flags)
        return node

    def _is_tensor(self, node: ast.expr) -> bool:
        """Whether an expression is known to be a tensor: an argument that is, a parameter of the model, one that is being made."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            return node.func.attr in (_FACTORIES if of_torch else _METHODS)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node.value.id == "self" and self._of_model
        return isinstance(node, ast.Name) and self._given.get(node.id) is TENSOR

    def _math(self, node: ast.Call, name: str) -> ast.expr:
        args = [self.visit(arg) for arg in node.args]
        if name == "ceil" and isinstance(args[0], ast.BinOp) and isinstance(args[0].op, ast.Div):
            text, parts = "triton.cdiv(A, B)", {"A": args[0].left, "B": args[0].right}
        elif name == "ceil":
            text, parts = "int(-(-A // 1))", {"A": args[0]}
        elif name == "sqrt":
            text, parts = "A ** 0.5", {"A": args[0]}
        elif name == "prod":
            text, parts = "torch.Size(A).numel()", {"A": args[0]}
        elif name == "floor":
            text, parts = "int(A // 1)", {"A": args[0]}
        else:
            raise ExtractError(f"{self._source.name}:{node.lineno}: needs math.{name} of what is known at run time only")
        return _filled(text, parts)

    def _multiplies(self, node: ast.expr) -> bool:
        """Whether a function is the product of its two arguments."""
        if isinstance(node, ast.Lambda):
            return isinstance(node.body, ast.BinOp) and isinstance(node.body.op, ast.Mult)
        target = self._resolve(node)
        return target is not None and target.module == "operator.mul"

    def _resolve(self, node: ast.expr) -> Symbol | None:
        """What a dotted name stands for, or None for anything local or more than a dotted name."""
        if isinstance(node, ast.Attribute):
            owner = self._resolve(node.value)
            found = None if owner is None else self._index.attribute(owner, node.attr)
        elif isinstance(node, ast.Name) and node.id not in self._local:
            found = self._known.get(node.id) or self._index.lookup(self._source.name, node.id)
        else:
            return None
        return None if found is None else self._needs.settle(found)

    def _constant(self, node: ast.expr) -> ast.Constant | None:
        """The expression's value, where it depends on the machine and the package alone and is a plain number, string or None."""
        root = node
        while isinstance(root, (ast.Attribute, ast.Call, ast.Subscript)):
            root = root.func if isinstance(root, ast.Call) else root.value
        asked = isinstance(node, (ast.Compare, ast.BoolOp)) or (isinstance(node, ast.Attribute) and node.attr in DEVICE_NAMES)
        if not asked and (self._resolve(root) is None or (isinstance(node, ast.Call) and self._is_jit(node))):
            return None
        try:
            value = self._folder.value(self._source.name, node, self._local, self._given)
        except NotConstant:
            return None
        if isinstance(value, (bool, int, str)) or value is None or (isinstance(value, float) and abs(value) < float("inf")):
            return ast.copy_location(ast.Constant(value), node)
        return None

    def _is_jit(self, node: ast.Call) -> bool:
        target = self._resolve(node.func)
        return target is not None and target.kind == "function" and any("jit" in last_name(d) for d in target.node.decorator_list)

    def _chain(self, node: ast.expr, root: ast.Name, attributes: list[str]) -> ast.expr:
        """A dotted name, with its root followed to what it stands for."""
        if not isinstance(root.ctx, ast.Load):
            return node
        if not attributes and not isinstance(self._given.get(root.id, TENSOR), Tensor):
            return ast.copy_location(ast.Constant(self._given[root.id]), node)
        if root.id in self._local:
            return (self._constant(node) or node) if attributes else node
        symbol = self._known.get(root.id) or self._index.lookup(self._source.name, root.id)
        if symbol is None:
            if hasattr(builtins, root.id):
                return node
            raise ExtractError(f"{self._source.name}:{getattr(node, 'lineno', 0)}: nothing in the module defines {root.id}")
        symbol, rest = self._needs.settle(symbol), list(attributes)
        while rest and symbol.kind in ("module", "external"):
            found = self._index.attribute(symbol, rest[0])
            if found is None:
                raise ExtractError(f"{self._source.name}: {symbol.module} has no {rest[0]}")
            symbol = self._needs.settle(found)
            rest.pop(0)
        if symbol.kind == "module":
            raise ExtractError(f"{self._source.name}: uses the module {symbol.module} itself")
        if (value := self._constant(node) if rest or symbol.kind == "external" else None) is not None:
            return value
        out = self._external(symbol.module) if symbol.kind == "external" else self._needs.refer(symbol, self._local)
        for name in rest:
            out = ast.Attribute(out, name, ast.Load())
        return out

    def _external(self, dotted: str) -> ast.expr:
        if (name := in_device_library(dotted)) is not None:
            return portable(name, lambda definition: self._needs.helper(definition, self._local))
        if dotted.startswith("torch.ops.aten."):
            raise ExtractError(f"{self._source.name}: falls back to PyTorch's own {dotted}")
        for prefix, alias in _CANONICAL:
            if dotted == prefix or dotted.startswith(prefix + "."):
                if alias in self._local:
                    raise ExtractError(f"{self._source.name}: a local variable is called {alias}")
                return ast.parse(alias + dotted.removeprefix(prefix), mode="eval").body
        if dotted.startswith("math."):
            raise ExtractError(f"{self._source.name}: needs {dotted}")
        raise ExtractError(f"{self._source.name}: needs {dotted}, which is of neither torch nor triton")


def _is_narrow(node: ast.Attribute) -> bool:
    return node.attr in NARROW_TYPES and isinstance(node.value, ast.Name)


def bitwise(node: ast.expr) -> ast.expr:
    """`and`, `or` and `not` of blocks as &, | and ~, which Triton's compiler takes for the same and its interpreter computes."""
    if isinstance(node, ast.BoolOp):
        parts = [bitwise(part) for part in node.values]
        op = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        out = parts[0]
        for part in parts[1:]:
            out = ast.BinOp(out, op, part)
        return out
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ast.UnaryOp(ast.Invert(), bitwise(node.operand))
    return node


def forward_of(symbol: Symbol, method: str = "forward") -> Symbol | None:
    """The method of an autograd function that computes it, or None."""
    found = next((n for n in symbol.node.body if isinstance(n, ast.FunctionDef) and n.name == method), None)
    return Symbol("function", symbol.module, f"{symbol.name}.{method}", found) if found is not None else None


def local_names(node: ast.AST) -> frozenset[str]:
    """All names that a function, or an expression, and the functions inside of it bind."""
    out = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.arg):
            out.add(inner.arg)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, (ast.Store, ast.Del)):
            out.add(inner.id)
        elif isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and inner is not node:
            out.add(inner.name)
        elif isinstance(inner, ast.ExceptHandler) and inner.name:
            out.add(inner.name)
    return frozenset(out)


def bound_inside(node: ast.FunctionDef) -> frozenset[str]:
    """Names that functions or comprehensions inside of a function bind for themselves, or for it: what they stand for depends on where."""
    out = set()
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.Lambda)) and inner is not node:
            out |= {a.arg for a in ast.walk(inner.args) if isinstance(a, ast.arg)}
        elif isinstance(inner, ast.comprehension):
            out |= {n.id for n in ast.walk(inner.target) if isinstance(n, ast.Name)}
        elif isinstance(inner, ast.Nonlocal):
            out |= set(inner.names)
    return frozenset(out)


def _filled(text: str, parts: dict[str, ast.expr]) -> ast.expr:
    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return parts.get(node.id, node)

    return Fill().visit(ast.parse(text, mode="eval").body)
