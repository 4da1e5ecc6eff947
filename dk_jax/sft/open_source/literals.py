"""Arguments whose values a call spells out, written into the function that is called, and what becomes superfluous by that.

Launchers of packages serve many cases by options; a kernel that is taken out of a package serves one. With the options' values in
place the other cases' branches fall away (`dk_jax.sft.open_source.rewrite`).
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Collection

from dk_jax.sft.open_source.values import TENSOR, Tensor

Literal = bool | int | float | str | None | Tensor
"""What is known of an argument: its value, or that it is a tensor."""


def literal_arguments(call: ast.Call, function: ast.FunctionDef, is_tensor: Callable[[ast.expr], bool]) -> dict[str, Literal]:
    """Of a call's arguments those that are literals, by name, with defaults that are literals and not overridden, and those that are
    known to be tensors.

    None at all of a call that unpacks, and of a function that unpacks, calls itself or is a kernel.
    """
    spec = function.args
    unpacks = spec.vararg or spec.kwarg or spec.posonlyargs or any(isinstance(a, ast.Starred) for a in call.args)
    decorators = " ".join(ast.unparse(d) for d in function.decorator_list)
    if unpacks or any(k.arg is None for k in call.keywords) or "jit" in decorators or "pointwise" in decorators:
        return {}
    if any(isinstance(node, ast.Name) and node.id == function.name for node in ast.walk(function)):
        return {}
    names = [a.arg for a in spec.args]
    if names and names[0] == "ctx":
        names = names[1:]
    bound = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
    bound |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
    bound |= dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords}
    out = {}
    for name, value in bound.items():
        if is_tensor(value):
            out[name] = TENSOR
        elif isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, (bool, int, float, str))):
            out[name] = value.value
        elif isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub) and isinstance(value.operand, ast.Constant):
            if isinstance(value.operand.value, (int, float)):
                out[name] = -value.operand.value
    return out


def bound_arguments(call: ast.Call, function: ast.FunctionDef) -> dict[str, ast.expr] | None:
    """A call's arguments by name, with defaults, or without these where the call unpacks a dictionary, which may give others than those
    that are written out; None where it or the function unpacks more."""
    spec = function.args
    if spec.vararg or spec.kwarg or any(isinstance(a, ast.Starred) for a in call.args):
        return None
    names = [a.arg for a in spec.args]
    bound = dict(zip(reversed(names), reversed(spec.defaults), strict=False)) if all(k.arg is not None for k in call.keywords) else {}
    return bound | dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg is not None}


def is_flag(value: object) -> bool:
    """Whether a value chooses among cases: `True`, `False`, `None` or a string. Sizes do not."""
    return value is None or isinstance(value, (bool, str))


def only_tested(function: ast.FunctionDef) -> set[str]:
    """Arguments that a function does nothing with but ask about them in tests: numbers that stand for cases."""
    tested, loaded = Counter(), Counter()
    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.IfExp)):
            tested.update(n.id for n in ast.walk(node.test) if isinstance(n, ast.Name))
        elif isinstance(node, ast.Name):
            loaded[node.id] += 1
    return {a.arg for a in function.args.args if tested[a.arg] and tested[a.arg] == loaded[a.arg]}


def flag_arguments(call: ast.Call, function: ast.FunctionDef, spoken: Collection[str]) -> dict[str, Literal]:
    """Of the arguments of a launch, or of a call on the GPU, those that are flags, or numbers that stand for cases, by name.

    Sizes stay arguments, as grids and callers speak of them.

    Args:
        spoken: names that the caller, or a decorator, mentions as strings; what these say is not looked into, so they stay arguments.
    """
    cases = only_tested(function)
    names = {a.arg for a in function.args.args} - set(spoken)
    bound = {n: v.value for n, v in (bound_arguments(call, function) or {}).items() if n in names and isinstance(v, ast.Constant)}
    return {name: value for name, value in bound.items() if is_flag(value) or (name in cases and isinstance(value, int))}


def without_arguments(call: ast.Call, names: list[str], given: Collection[str]) -> None:
    """Takes arguments out of a call; `names`: of all arguments by position."""
    call.args = [a for name, a in zip(names, call.args, strict=False) if name not in given] + call.args[len(names) :]
    call.keywords = [k for k in call.keywords if k.arg not in given]


def does_nothing(node: ast.stmt) -> bool:
    """Whether a statement is a loop without a body."""
    return isinstance(node, ast.For) and not node.orelse and all(isinstance(n, ast.Pass) for n in node.body)


def strings_in(*nodes: ast.AST) -> set[str]:
    """All string literals in syntax trees."""
    return {n.value for node in nodes for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def drop_arguments(spec: ast.arguments, names: Collection[str]) -> None:
    """Takes arguments out of a signature, with their defaults."""
    defaults = dict(zip(reversed([a.arg for a in spec.args]), reversed(spec.defaults), strict=False))
    spec.args = [a for a in spec.args if a.arg not in names]
    kept = [defaults.get(a.arg) for a in spec.args]
    # An argument without a default behind one with a default: all are given where the function is called.
    first = next((i + 1 for i in reversed(range(len(kept))) if kept[i] is None), 0)
    spec.defaults = [d for d in kept[first:] if d is not None]
    pairs = [(a, d) for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if a.arg not in names]
    spec.kwonlyargs, spec.kw_defaults = [a for a, _ in pairs], [d for _, d in pairs]


def needs_first_value(body: list[ast.stmt], name: str) -> bool:
    """Whether a body may read a name before it assigns to it."""
    for node in body:
        stores = isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
        if stores:
            return _loads(node.value, name)
        if any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node)):
            return _loads(node, name) or _read_later(body, node, name)
    return False


def _loads(node: ast.AST, name: str) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id == name and isinstance(inner.ctx, ast.Load) for inner in ast.walk(node))


def _read_later(body: list[ast.stmt], node: ast.stmt, name: str) -> bool:
    return any(_loads(later, name) for later in body[body.index(node) + 1 :])


def without_dead_stores(node: ast.FunctionDef) -> None:
    """Takes assignments out of a function to names that nothing reads, of values that take no call to compute, and empty dictionaries that
    are only ever unpacked."""
    _without_empty_unpacking(node)
    while True:
        read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, (ast.Load, ast.Del))}
        read |= {n.target.id for n in ast.walk(node) if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}
        read |= {name for n in ast.walk(node) if isinstance(n, ast.Nonlocal) for name in n.names}
        dropped = False
        for inner in ast.walk(node):
            for body in (getattr(inner, part, None) for part in ("body", "orelse")):
                if isinstance(body, list) and any(_is_dead(n, read) for n in body):
                    body[:] = [n for n in body if not _is_dead(n, read)]
                    if not body and body is inner.body:
                        body.append(ast.Pass())
                    dropped = True
        if not dropped:
            return


def _without_empty_unpacking(node: ast.FunctionDef) -> None:
    loads = Counter(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    stores = Counter(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))
    made = [n for n in node.body if isinstance(n, ast.Assign) and len(n.targets) == 1 and isinstance(n.targets[0], ast.Name)]
    empty = {n.targets[0].id for n in made if isinstance(n.value, ast.Dict) and not n.value.keys}
    unpacked = [(c, k) for c in ast.walk(node) if isinstance(c, ast.Call) for k in c.keywords if k.arg is None and isinstance(k.value, ast.Name)]
    times = Counter(k.value.id for _, k in unpacked)
    for call, keyword in unpacked:
        name = keyword.value.id
        if name in empty and stores[name] == 1 and times[name] == loads[name]:
            call.keywords.remove(keyword)


def _is_dead(node: ast.stmt, read: set[str]) -> bool:
    if not isinstance(node, ast.Assign) or not all(isinstance(t, ast.Name) and t.id not in read for t in node.targets):
        return False
    return isinstance(node.value, ast.Lambda) or not any(isinstance(n, (ast.Call, ast.Subscript)) for n in ast.walk(node.value))
