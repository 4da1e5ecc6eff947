"""Constants of a package's text: what its expressions come to when the machine is known (`dk_jax.sft.open_source.facts`).

A small interpreter over syntax trees. It evaluates what depends on literals, on questions about the machine and on the package's own
functions of such, and nothing else: no file is opened, no module imported, no code of the package run. What it cannot evaluate is
`NotConstant`, never a guess.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from dk_jax.sft.open_source.facts import CALLS, DEVICE_NAMES, LOOKUPS, PLATFORM_OBJECTS, VALUES, Dotted, Properties
from dk_jax.sft.open_source.modules import ExtractError, ModuleIndex, Symbol
from dk_jax.sft.open_source.values import (
    BINARY,
    BUILTINS,
    COMPARE,
    DEVICE,
    METHODS,
    UNARY,
    Function,
    NotConstant,
    Tensor,
    Version,
    external,
    guarded,
    of_these_tasks,
)

MAX_STEPS = 50_000
_UNKNOWN = object()
_BEFORE = "\0before"
"""In a scope: the statement at the top of a module that is being evaluated, before which its names were bound."""


class _Return(Exception):
    def __init__(self, value: Any):
        self.value = value


class Folder:
    """Evaluates expressions of the modules of an index.

    Args:
        index: of the package.
        registries: answers the calls of the package's lookup functions, by their name and arguments.
    """

    def __init__(self, index: ModuleIndex, registries: Callable[[str, list[Any]], Any] | None = None):
        self._index = index
        self._registries = registries
        self._steps = self._depth = 0
        self._inside: set[str] = set()

    def value(self, module: str, node: ast.expr, local: frozenset[str] = frozenset(), given: Mapping[str, Any] | None = None) -> Any:
        """What an expression of a module comes to.

        Args:
            local: names in it that hold values known at run time only.
            given: values of others.

        Raises:
            NotConstant: it depends on more.
        """
        return self._counted(lambda: self._eval(module, node, dict.fromkeys(local, _UNKNOWN) | dict(given or {})))

    def truth(
        self, module: str, node: ast.expr, local: frozenset[str] = frozenset(), given: Mapping[str, Any] | None = None
    ) -> bool | None:
        """Whether a test holds, or None where that is not known; arguments as in `value`."""
        try:
            return bool(self.value(module, node, local, given))
        except NotConstant:
            return None

    def apply(self, module: str, rule: ast.expr, arguments: Mapping[str, Any]) -> Any:
        """What a heuristic, a function of a launch's arguments by name, comes to; arguments that are not given are not known.

        Raises:
            NotConstant: it depends on those.
        """
        return self._counted(lambda: self._call(self._eval(module, rule, {}), [dict(arguments)], {}))

    def holds(self, module: str, node: ast.If) -> bool | None:
        """Whether the test of an `if` at the top of a module holds, by what its names stand for there."""
        try:
            return bool(self._counted(lambda: self._eval(module, node.test, {_BEFORE: node})))
        except NotConstant:
            return None

    def symbol(self, symbol: Symbol) -> Any:
        """The value of a symbol. Raises NotConstant."""
        return self._counted(lambda: self._symbol(symbol))

    def _counted(self, evaluate: Callable[[], Any]) -> Any:
        """Evaluates in no more than MAX_STEPS."""
        self._depth += 1
        try:
            return evaluate()
        except (ExtractError, RecursionError) as error:
            raise NotConstant(str(error)) from error
        finally:
            self._depth -= 1
            if not self._depth:
                self._steps = 0

    def _symbol(self, symbol: Symbol) -> Any:
        if symbol.kind == "external":
            return VALUES.get(symbol.module, Dotted(symbol.module))
        if symbol.kind == "function":
            return Function(symbol.module, symbol.node)
        if symbol.kind == "value":
            if symbol.name in VALUES:
                return VALUES[symbol.name]
            if (known := PLATFORM_OBJECTS.get(symbol.module, {}).get(symbol.name)) is not None:
                return known
            if not isinstance(symbol.node, (ast.Assign, ast.AnnAssign)):
                raise NotConstant(symbol.path)
            targets = symbol.node.targets if isinstance(symbol.node, ast.Assign) else [symbol.node.target]
            if len(targets) != 1 or not isinstance(targets[0], ast.Name) or symbol.path in self._inside:
                raise NotConstant(f"{symbol.path} is not a plain assignment")
            self._inside.add(symbol.path)
            try:
                return self._eval(symbol.module, symbol.node.value, {_BEFORE: symbol.node})
            finally:
                self._inside.discard(symbol.path)
        raise NotConstant(f"{symbol.path} is a {symbol.kind}")

    def _eval(self, module: str, node: ast.expr, scope: dict[str, Any]) -> Any:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise NotConstant("too long")
        method = getattr(self, f"_eval_{type(node).__name__}", None)
        if method is None:
            raise NotConstant(ast.unparse(node))
        return method(module, node, scope)

    def _eval_Constant(self, module, node, scope):
        return node.value

    def _eval_Name(self, module, node, scope):
        if node.id in scope:
            if scope[node.id] is _UNKNOWN:
                raise NotConstant(node.id)
            return scope[node.id]
        found = self._index.lookup(module, node.id, before=scope.get(_BEFORE))
        if found is None:
            if node.id in BUILTINS:
                return BUILTINS[node.id]
            if node.id in ("hasattr", "getattr", "isinstance"):
                return Dotted(node.id)
            raise NotConstant(node.id)
        return found if found.kind in ("module", "class") else self._symbol(found)

    def _eval_Attribute(self, module, node, scope):
        if node.attr in DEVICE_NAMES and (node.attr != "type" or (isinstance(node.value, ast.Attribute) and node.value.attr == "device")):
            return DEVICE_NAMES[node.attr]
        owner = self._eval(module, node.value, scope)
        if owner is DEVICE and node.attr in DEVICE_NAMES:
            return DEVICE_NAMES[node.attr]
        if isinstance(owner, Symbol) and owner.kind == "class":
            return self._member(owner, node.attr)
        if isinstance(owner, Symbol):
            found = self._index.attribute(owner, node.attr)
            if found is None:
                raise NotConstant(ast.unparse(node))
            return found if found.kind in ("module", "class") else self._symbol(found)
        if isinstance(owner, (bool, int, float, str)) and node.attr == "value":  # of a tl.constexpr
            return owner
        if isinstance(owner, Dotted):
            name = f"{owner.name}.{node.attr}"
            return VALUES.get(name, Dotted(name))
        if isinstance(owner, Properties):
            for name, value in owner.fields:
                if name == node.attr:
                    return value
        if isinstance(owner, Version) and node.attr in ("major", "minor"):
            return getattr(owner, node.attr)
        for kind, methods in METHODS.items():
            if isinstance(owner, kind) and node.attr in methods:
                return getattr(owner, node.attr)
        raise NotConstant(ast.unparse(node))

    def _member(self, owner: Symbol, name: str) -> Any:
        """What a class assigns to a name in its body; of an enumeration, the member."""
        for node in owner.node.body:
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                value = self._eval(owner.module, node.value, {})
                enumeration = any("Enum" in ast.unparse(base) for base in owner.node.bases)
                return Properties((("value", value), ("name", name))) if enumeration else value
        raise NotConstant(f"{owner.path}.{name}")

    def _eval_Subscript(self, module, node, scope):
        owner = self._eval(module, node.value, scope)
        if isinstance(owner, (list, tuple, dict, str, range)):
            try:
                return owner[self._eval(module, node.slice, scope)]
            except (KeyError, IndexError, TypeError) as error:
                raise NotConstant(ast.unparse(node)) from error
        raise NotConstant(ast.unparse(node))

    def _eval_Slice(self, module, node, scope):
        return slice(*(None if part is None else self._eval(module, part, scope) for part in (node.lower, node.upper, node.step)))

    def _eval_Tuple(self, module, node, scope):
        return tuple(self._items(module, node, scope))

    def _eval_List(self, module, node, scope):
        return list(self._items(module, node, scope))

    def _items(self, module, node, scope):
        for item in node.elts:
            if isinstance(item, ast.Starred):
                yield from self._eval(module, item.value, scope)
            else:
                yield self._eval(module, item, scope)

    def _eval_Dict(self, module, node, scope):
        out: dict = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                out |= self._eval(module, value, scope)
            else:
                out[self._eval(module, key, scope)] = self._eval(module, value, scope)
        return out

    def _eval_JoinedStr(self, module, node, scope):
        return "".join(str(part.value if isinstance(part, ast.Constant) else self._eval(module, part.value, scope)) for part in node.values)

    def _eval_IfExp(self, module, node, scope):
        return self._eval(module, node.body if self._eval(module, node.test, scope) else node.orelse, scope)

    def _eval_UnaryOp(self, module, node, scope):
        return guarded(node, UNARY[type(node.op)], self._eval(module, node.operand, scope))

    def _eval_BinOp(self, module, node, scope):
        if type(node.op) not in BINARY:
            raise NotConstant(ast.unparse(node))
        return guarded(node, BINARY[type(node.op)], self._eval(module, node.left, scope), self._eval(module, node.right, scope))

    def _eval_BoolOp(self, module, node, scope):
        # One operand decides, also where those before it are unknown: what is asked here has no side effects.
        decisive, unknown, value = isinstance(node.op, ast.Or), None, None
        for part in node.values:
            try:
                value = self._eval(module, part, scope)
            except NotConstant as error:
                unknown = error
                continue
            if bool(value) == decisive:
                return value
        if unknown is not None:
            raise unknown
        return value

    def _eval_Compare(self, module, node, scope):
        if (decided := of_these_tasks(node)) is not None:
            return decided
        left = self._eval(module, node.left, scope)
        for op, part in zip(node.ops, node.comparators, strict=True):
            right = self._eval(module, part, scope)
            if isinstance(left, (Dotted, Function, Tensor)) or isinstance(right, (Dotted, Function, Tensor)):
                if not isinstance(op, (ast.Is, ast.IsNot)) or (left is not None and right is not None):
                    raise NotConstant(ast.unparse(node))
            if not guarded(node, COMPARE[type(op)], left, right):
                return False
            left = right
        return True

    def _eval_Lambda(self, module, node, scope):
        return Function(module, node, dict(scope))

    def _eval_ListComp(self, module, node, scope):
        return list(self._comprehension(module, node, [node.elt], dict(scope), 0))

    _eval_GeneratorExp = _eval_ListComp

    def _eval_DictComp(self, module, node, scope):
        return dict(self._comprehension(module, node, [node.key, node.value], dict(scope), 0))

    def _comprehension(self, module, node, parts, scope, depth):
        if depth == len(node.generators):
            values = tuple(self._eval(module, part, scope) for part in parts)
            yield values[0] if len(parts) == 1 else values
            return
        loop = node.generators[depth]
        for item in self._iterable(self._eval(module, loop.iter, scope)):
            self._assign(loop.target, item, scope)
            if all(self._eval(module, test, scope) for test in loop.ifs):
                yield from self._comprehension(module, node, parts, scope, depth + 1)

    def _iterable(self, value):
        if not hasattr(value, "__iter__"):
            raise NotConstant("not iterable")
        return value

    def _assign(self, target: ast.expr, value: Any, scope: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (list, tuple)) and len(value) == len(target.elts):
            for part, item in zip(target.elts, value, strict=True):
                self._assign(part, item, scope)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and isinstance(scope.get(target.value.id), (dict, list)):
            scope[target.value.id][self._eval("", target.slice, scope)] = value
        else:
            raise NotConstant(ast.unparse(target))

    def _eval_Call(self, module, node, scope):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "is_complex":
            return False
        function = self._eval(module, node.func, scope)
        if isinstance(function, Dotted) and (function.name in CALLS):
            return CALLS[function.name]
        args = [self._argument(module, arg, scope) for arg in node.args]
        named = {k.arg: self._argument(module, k.value, scope) for k in node.keywords if k.arg is not None}
        for extra in (self._eval(module, k.value, scope) for k in node.keywords if k.arg is None):
            named |= extra
        if isinstance(function, Function):
            name = getattr(function.node, "name", "")
            if name in CALLS:
                return CALLS[name]
            if name in LOOKUPS and self._registries is not None:
                return self._registries(name, args)
            return self._call(function, args, named)
        if any(arg is _UNKNOWN for arg in (*args, *named.values())):
            raise NotConstant(ast.unparse(node))
        if isinstance(function, Dotted):
            try:
                return external(node, function.name, args, named)
            except (IndexError, TypeError, ValueError, AttributeError) as error:
                raise NotConstant(f"{ast.unparse(node)}: {error}") from error
        if not callable(function):
            raise NotConstant(ast.unparse(node))
        return guarded(node, lambda: function(*args, **named))

    def _argument(self, module, node, scope):
        try:
            return self._eval(module, node, scope)
        except NotConstant:
            return _UNKNOWN

    def _call(self, function: Function, args: list, named: dict) -> Any:
        if not isinstance(function, Function):
            raise NotConstant("not a function of the package")
        spec = function.node.args
        scope = dict(function.scope or {})
        names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        if len(args) > len(names) and spec.vararg is None:
            raise NotConstant("too many arguments")
        defaults = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
        defaults |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
        for name in [*names, *(a.arg for a in spec.kwonlyargs)]:
            scope[name] = self._argument(function.module, defaults[name], {}) if name in defaults else _UNKNOWN
        scope |= dict(zip(names, args, strict=False)) | {k: v for k, v in named.items()}
        if isinstance(function.node, ast.Lambda):
            return self._eval(function.module, function.node.body, scope)
        try:
            self._run(function.module, function.node.body, scope)
        except _Return as returned:
            return returned.value

    def _run(self, module: str, body: list[ast.stmt], scope: dict[str, Any]) -> None:
        for node in body:
            self._steps += 1
            if isinstance(node, ast.Return):
                raise _Return(None if node.value is None else self._eval(module, node.value, scope))
            elif isinstance(node, ast.Assign):
                value = self._argument(module, node.value, scope)
                for target in node.targets:
                    self._assign(target, value, scope)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assign(node.target, self._argument(module, node.value, scope), scope)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and type(node.op) in BINARY:
                value = self._eval(module, ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value), scope)
                scope[node.target.id] = value
            elif isinstance(node, ast.If):
                self._run(module, node.body if self._eval(module, node.test, scope) else node.orelse, scope)
            elif isinstance(node, ast.For) and not node.orelse:
                for item in list(self._iterable(self._eval(module, node.iter, scope))):
                    self._assign(node.target, item, scope)
                    self._run(module, node.body, scope)
            elif isinstance(node, ast.Try):
                self._run(module, self._index.taken(module, node), scope)
            elif isinstance(node, ast.Expr):
                if not isinstance(node.value, ast.Constant):
                    self._eval(module, node.value, scope)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self._import(module, node, scope)
            elif not isinstance(node, ast.Pass):
                raise NotConstant(ast.unparse(node).split("\n")[0])

    def _import(self, module: str, node: ast.Import | ast.ImportFrom, scope: dict[str, Any]) -> None:
        source = self._index.module(module)
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            found = self._index.imported(source, node, name)
            if found is not None:
                scope[name] = found if found.kind == "module" else self._symbol(found)
