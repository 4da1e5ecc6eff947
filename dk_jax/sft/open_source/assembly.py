"""The parts of one extracted kernel: collected as they are referred to, named, ordered and written out as a module.

Names stay those of the package unless two collide, or one means something else in a function that refers to it. Versions of a function
for other literal arguments are definitions of their own. What nothing refers to in the end is left out.
"""

from __future__ import annotations

import ast
import builtins
import copy
import dataclasses
import re
import symtable
from collections.abc import Mapping

from dk_jax.sft.open_source.configs import Registries, chosen_config, is_heuristics_lookup, is_tuner, last_name
from dk_jax.sft.open_source.facts import DROPPED_DECORATORS, LIBDEVICE, LIKE_LIBDEVICE, Dotted
from dk_jax.sft.open_source.fold import Folder
from dk_jax.sft.open_source.literals import Literal
from dk_jax.sft.open_source.modules import ExtractError, ModuleIndex, SourceModule, Symbol
from dk_jax.sft.open_source.packages import permissive
from dk_jax.sft.open_source.pointwise import DECORATOR as POINTWISE
from dk_jax.sft.open_source.pointwise import Pointwise, launcher_text, signature
from dk_jax.sft.open_source.rewrite import Rewriter
from dk_jax.sft.open_source.values import Config, Function, NotConstant

_HEADER = "import torch\nimport triton\nimport triton.language as tl\n"
_RESERVED = frozenset({"torch", "triton", "tl", "ModelNew", *dir(builtins)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extracted:
    """A self-contained kernel.

    Attributes:
        source: module text with a class `ModelNew`.
        files: of the package, that parts of it come from.
        functions: of the package, that are in it, as "module:name".
        own: names of functions in it that this project wrote: kernels of elementwise functions with their launchers, stand-ins for CUDA's
            device library.
        notices: lines of those files that say whose they are and under which licence.
        configs: of tuned kernels, by name: what was kept.
    """

    source: str
    files: tuple[str, ...]
    functions: tuple[str, ...]
    own: tuple[str, ...]
    notices: tuple[str, ...]
    configs: tuple[tuple[str, str], ...]


_Key = tuple[str, str, tuple[tuple[str, Literal], ...]]
"""Module and name of a definition, and the values of arguments that are written into it."""


class Assembly:
    """What one kernel is put together of (`dk_jax.sft.open_source.expressions.Needs`).

    Args:
        index, folder, registries: of the package.
    """

    def __init__(self, index: ModuleIndex, folder: Folder, registries: Registries):
        self._index, self._folder, self._registries = index, folder, registries
        self._definitions: dict[_Key, list[ast.stmt]] = {}
        self._order: list[_Key] = []
        self._references: list[tuple[_Key, ast.Name, frozenset[str]]] = []
        self._launches: dict[_Key, list[ast.Call]] = {}
        self._configs: dict[_Key, Config] = {}
        self._ours: set[_Key] = set()
        self._written: set[_Key] = set()
        """Beside elementwise functions: definitions under keys that are not of the package; definitions whose text is this project's."""
        self._contents: dict[tuple, _Key] = {}
        self._same: dict[_Key, _Key] = {}
        """Versions of a function for other arguments that came out as one that was there."""
        self._settled: dict[tuple[str, str, str], Symbol] = {}

    # What `Rewriter` asks

    def settle(self, symbol: Symbol) -> Symbol:
        key = (symbol.kind, symbol.module, symbol.name)
        if key not in self._settled:
            self._settled[key] = self._settle(symbol)
        return self._settled[key]

    def refer(self, symbol: Symbol, local: frozenset[str], given: Mapping[str, Literal] | None = None) -> ast.Name:
        key = (symbol.module, symbol.name, tuple((given or {}).items()))
        if key not in self._definitions and key not in self._same:
            self._definitions[key] = []
            try:
                self._definitions[key] = self._function(symbol, key) if symbol.kind == "function" else self._value(symbol)
            except ExtractError:
                del self._definitions[key]
                raise
            if (same := self._contents.setdefault(self._content(key), key)) != key:
                del self._definitions[key]
                self._same[key] = same
            else:
                self._order.append(key)
        return self._name(self._same.get(key, key), local)

    def _content(self, key: _Key) -> tuple:
        """What a definition says, with what it refers to."""
        body = ast.Module(self._definitions[key], [])
        referred = {id(node): to for to, node, _ in self._references}
        return key[0], ast.dump(body), tuple(referred.get(id(node)) for node in ast.walk(body) if isinstance(node, ast.Name))

    def helper(self, definition: ast.FunctionDef, local: frozenset[str]) -> ast.Name:
        key = ("", definition.name, ())
        if key not in self._definitions:
            self._definitions[key] = [definition]
            self._order.append(key)
        return self._name(key, local)

    def launched(self, symbol: Symbol, call: ast.Call, given: Mapping[str, Literal]) -> None:
        key = (symbol.module, symbol.name, tuple(given.items()))
        self._launches.setdefault(self._same.get(key, key), []).append(call)

    def _name(self, key: _Key, local: frozenset[str]) -> ast.Name:
        node = ast.Name(key[1], ast.Load())
        self._references.append((key, node, local))
        return node

    def _settle(self, symbol: Symbol) -> Symbol:
        if symbol.kind == "function" and any(last_name(d) == LIKE_LIBDEVICE for d in symbol.node.decorator_list):
            return Symbol("external", LIBDEVICE[0] + symbol.name)
        if symbol.kind != "value":
            return symbol
        try:
            value = self._folder.symbol(symbol)
        except (NotConstant, ExtractError):
            return symbol
        if isinstance(value, Dotted):
            return Symbol("external", value.name)
        if isinstance(value, Function) and isinstance(value.node, ast.FunctionDef):
            return Symbol("function", value.module, value.node.name, value.node)
        return symbol

    # Definitions

    def _rewriter(self, module: str) -> Rewriter:
        source = self._index.module(module)
        _check_notices(source)
        return Rewriter(self._index, self._folder, source, self)

    def _value(self, symbol: Symbol) -> list[ast.stmt]:
        if symbol.kind != "value":
            raise ExtractError(f"needs {symbol.path}, which is a {symbol.kind}")
        node = copy.deepcopy(symbol.node)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if len(targets) != 1 or not isinstance(targets[0], ast.Name):
            raise ExtractError(f"needs {symbol.path}, which is not assigned plainly")
        try:
            value = self._folder.symbol(symbol)
            literal = ast.parse(repr(value), mode="eval").body if _is_literal(value) else None
        except (NotConstant, ExtractError):
            literal = None
        new = literal or self._rewriter(symbol.module).expression(node.value)
        name = self._name((symbol.module, symbol.name, ()), frozenset())
        name.ctx = ast.Store()
        if literal is not None and last_name(node.value) == "constexpr":
            new = ast.Call(ast.parse("tl.constexpr", mode="eval").body, [literal], [])
        elif isinstance(node, ast.AnnAssign) and last_name(node.annotation) == "constexpr":
            return [ast.AnnAssign(name, ast.parse("tl.constexpr", mode="eval").body, new, simple=1)]
        return [ast.Assign([name], new)]

    def _function(self, symbol: Symbol, key: _Key) -> list[ast.stmt]:
        node = copy.deepcopy(symbol.node)
        kept: list[ast.expr] = []
        jit, pointwise = False, None
        for decorator in node.decorator_list:
            name = last_name(decorator)
            if name == POINTWISE:
                pointwise = signature(node, decorator)
            elif is_tuner(decorator):
                self._configs[key] = chosen_config(self._folder, symbol, decorator)
            elif name == "heuristics":
                kept += self._heuristics(symbol, dict(key[2]))
            elif name in ("jit", "constexpr", "constexpr_function"):
                jit = True
                kept.append(self._rewriter(symbol.module).expression(decorator))
                if not re.match(r"(triton\.jit|tl\.constexpr|triton\.constexpr_function)", ast.unparse(kept[-1])):
                    raise ExtractError(f"{symbol.path} is a kernel of {ast.unparse(decorator)}")
            elif name not in DROPPED_DECORATORS:
                raise ExtractError(f"{symbol.path} is decorated with {ast.unparse(decorator).split('(')[0]}, of which no rule says what it does")
        method = "." in symbol.name
        context = node.args.args[0].arg if method else None
        new = self._rewriter(symbol.module).function(node, jit=jit, context=context, given=dict(key[2]))
        new.decorator_list = kept
        if method:
            new.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", symbol.name.split(".")[0]).lower()
        return [new] if pointwise is None else self._pointwise(symbol, new, pointwise)

    def heuristics(self, symbol: Symbol) -> tuple[str, ast.Dict | None]:
        for decorator in symbol.node.decorator_list:
            if last_name(decorator) != "heuristics":
                continue
            given = decorator.args[0] if decorator.args else decorator.keywords[0].value
            if is_heuristics_lookup(given):
                try:
                    return self._registries.heuristics(self._folder.value(symbol.module, given.args[0]))
                except NotConstant as error:
                    raise ExtractError(f"{symbol.path}: its heuristics are known at run time only") from error
            if not isinstance(given, ast.Dict) or not all(isinstance(key, ast.Constant) for key in given.keys):
                raise ExtractError(f"{symbol.path}: its heuristics are not written out as a dictionary")
            return symbol.module, given
        return "", None

    def _heuristics(self, symbol: Symbol, decided: Mapping[str, Literal]) -> list[ast.expr]:
        """The decorator for what heuristics give beyond what is decided, if anything."""
        module, table = self.heuristics(symbol)
        pairs = [(k, v) for k, v in zip(table.keys, table.values, strict=True) if k.value not in decided]
        if not pairs:
            return []
        new = self._rewriter(module).expression(copy.deepcopy(ast.Dict([k for k, _ in pairs], [v for _, v in pairs])))
        return [ast.Call(ast.parse("triton.heuristics", mode="eval").body, [new], [])]

    def _pointwise(self, symbol: Symbol, scalar: ast.FunctionDef, shape: Pointwise) -> list[ast.stmt]:
        names = [argument.arg for argument in scalar.args.args]
        taken = {*names, *(f"{n}_ptr" for n in names)}
        kernel, launcher = ast.parse(launcher_text(names, shape)).body
        inner, outer = (symbol.module, f"{symbol.name}_scalar", ()), (symbol.module, f"{symbol.name}_kernel", ())
        self._definitions[inner], self._definitions[outer] = [scalar], [kernel]
        self._order += [inner, outer]
        self._ours |= {inner, outer}
        self._written |= {outer, (symbol.module, symbol.name, ())}
        local = frozenset(taken)
        stand_ins = {"SCALAR": inner, "KERNEL": outer}

        class Name(ast.NodeTransformer):
            def visit_Name(_, node: ast.Name) -> ast.expr:  # noqa: N805
                return self._name(stand_ins[node.id], local) if node.id in stand_ins else node

        Name().visit(kernel)
        Name().visit(launcher)
        self._launches[outer] = [n for n in ast.walk(launcher) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)]
        return [launcher]

    # The module

    def finished(self, model: ast.ClassDef) -> Extracted:
        """The module, with `ModelNew` at its end.

        Raises:
            ExtractError: it would need a name that nothing defines.
        """
        self._keep_needed(model)
        if not any(key in self._definitions for key in self._launches):
            raise ExtractError("it launches no kernel")
        self._place_configs()
        names = self._names()
        for key, node, _ in self._references:
            node.id = names[key]
        parts = []
        for key in self._order:
            for node in self._definitions[key]:
                if isinstance(node, ast.FunctionDef):
                    node.name = names[key]
                parts.append(ast.unparse(ast.fix_missing_locations(node)))
        source = _HEADER + _tidied(_joined([*parts, ast.unparse(ast.fix_missing_locations(model))]))
        _check(source)
        functions = [key for key in self._order if key[0] and isinstance(self._definitions[key][0], ast.FunctionDef)]
        functions = [key for key in functions if key not in self._ours]
        modules = [self._index.module(name) for name in dict.fromkeys(key[0] for key in self._order if key[0])]
        return Extracted(
            source=source,
            files=tuple(self._index.package.name_of(module.path) for module in modules),
            functions=tuple(dict.fromkeys(":".join(key[:2]) for key in functions)),
            own=tuple(names[key] for key in self._order if not key[0] or key in self._written),
            notices=tuple(dict.fromkeys(line for module in modules for line in _notices(module))),
            configs=tuple((key[1], _described(config)) for key, config in self._configs.items() if key in self._definitions),
        )

    def _keep_needed(self, model: ast.ClassDef) -> None:
        """Forgets definitions that nothing refers to any more, as those of a branch that could not be had."""
        owners = {id(node): key for key in self._order for part in self._definitions[key] for node in ast.walk(part)}
        owners |= {id(node): None for node in ast.walk(model)}
        needed: set[_Key | None] = {None}
        while True:
            more = {key for key, node, _ in self._references if owners.get(id(node), "") in needed} | needed
            if more == needed:
                break
            needed = more
        self._order = [key for key in self._order if key in needed]
        self._definitions = {key: self._definitions[key] for key in self._order}
        self._references = [r for r in self._references if owners.get(id(r[1]), "") in needed]
        self._launches = {key: [c for c in calls if owners.get(id(c), "") in needed] for key, calls in self._launches.items() if key in needed}

    def _place_configs(self) -> None:
        """Writes the values of configurations into the launches, or, where a kernel is not only launched, into a decorator."""
        for key, config in self._configs.items():
            launches = self._launches.get(key, [])
            values = [ast.keyword(k, ast.parse(repr(v), mode="eval").body) for k, v in (*config.meta, *config.options)]
            if len(launches) == sum(reference[0] == key for reference in self._references):
                for call in launches:
                    given = {k.arg for k in call.keywords}
                    call.keywords += [copy.deepcopy(k) for k in values if k.arg not in given]
            else:
                options = ", ".join(f"{k}={v!r}" for k, v in config.options)
                text = f"triton.autotune(configs=[triton.Config({dict(config.meta)!r}, {options})], key=[])"
                self._definitions[key][0].decorator_list.insert(0, ast.parse(text, mode="eval").body)

    def _names(self) -> Mapping[_Key, str]:
        """Names that are unique, and that no function which refers to them uses for something of its own."""
        forbidden: dict[_Key, set[str]] = {key: set(_RESERVED) for key in self._order}
        for key, _, local in self._references:
            forbidden[key] |= local
        names: dict[_Key, str] = {}
        for key in self._order:
            first = self._definitions[key][0]
            base = first.name if isinstance(first, ast.FunctionDef) and "." in key[1] else key[1]
            last = key[0].rpartition(".")[2] or "own"
            tries = [base, f"{last}_{base}".replace("__", "_"), *(f"{base}_{i}" for i in range(2, 100))]
            names[key] = next(name for name in tries if name not in forbidden[key] and name not in names.values())
        return names


def _joined(parts: list[str]) -> str:
    """Definitions with two blank lines around functions and classes, and constants that follow one another together."""
    groups: list[str] = []
    follows = False
    for part in parts:
        plain = not part.startswith(("def ", "@", "class "))
        if plain and follows:
            groups[-1] += f"\n{part}"
        else:
            groups.append(part)
        follows = plain
    return "".join(f"\n\n{group}\n" for group in groups)


def _tidied(text: str) -> str:
    """Text as people write it where `ast.unparse` does not: kernel[(n,)](x), and no blank line at the head of a class."""
    text = re.sub(r"\[([^\[\]\n]+),\]\(", r"[(\1,)](", text)
    return re.sub(r"(?m)^(class .*:)\n\n", r"\1\n", text)


def _is_literal(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_literal, value))
    if isinstance(value, dict):
        return all(map(_is_literal, value)) and all(map(_is_literal, value.values()))
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and abs(value) < float("inf"))


def _described(config: Config) -> str:
    return ", ".join(f"{k}={v}" for k, v in (*config.meta, *config.options))


def _notices(module: SourceModule) -> list[str]:
    lines = [line.strip("# \t") for line in module.text.splitlines()[:40] if line.startswith("#")]
    return [line for line in lines if re.search(r"copyright|licen[cs]e|spdx|adapted from|based on", line, re.IGNORECASE)]


def _check_notices(module: SourceModule) -> None:
    """Raises ExtractError for a file that says of itself that it is under a licence not known to be permissive."""
    for line in _notices(module):
        said = re.search(r"SPDX-License-Identifier:\s*([\w.+-]+)", line)
        if said is not None and permissive(said.group(1)) is None:
            raise ExtractError(f"{module.name} is under {said.group(1)}, which is not a licence known to be permissive")


def _check(source: str) -> None:
    """Raises ExtractError for a module that uses a name which it does not define, or imports more than torch and triton."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if any(name.split(".")[0] not in ("torch", "triton") for name in names):
                raise ExtractError(f"it would import {', '.join(names)}")
    top = symtable.symtable(source, "kernel.py", "exec")
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()}

    def used(table: symtable.SymbolTable) -> set[str]:
        out = {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
        return out.union(*map(used, table.get_children()))

    if missing := sorted(used(top) - defined - set(dir(builtins))):
        raise ExtractError(f"it would need {', '.join(missing)}, which nothing defines")
