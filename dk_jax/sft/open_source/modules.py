"""The modules of a package as syntax trees, and what each of their names stands for.

A name at the top of a module is a function, a class, a value, another module of the package, or something from outside it; names that
are imported from siblings are followed to where they are defined. Nothing is imported or executed, so a name that is defined in the
branches of an `if` is asked of a callback that knows which branch holds (`dk_jax.sft.open_source.fold`).
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Literal

from dk_jax.sft.open_source.packages import SourcePackage

Kind = Literal["function", "class", "value", "module", "external"]


class ExtractError(RuntimeError):
    """Something that a kernel needs cannot be had as plain text; the message says what, and where it is."""


@dataclasses.dataclass(frozen=True)
class Symbol:
    """What a name stands for.

    Attributes:
        kind: see the module.
        module: dotted name of the module that defines it; for "external" the whole dotted name, such as "triton.language.exp".
        name: its name there; empty for "module" and "external".
        node: its definition: a def, a class, or the statement that assigns a value.
    """

    kind: Kind
    module: str
    name: str = ""
    node: ast.stmt | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def path(self) -> str:
        """Such as "liger_kernel.ops.utils:calculate_settings"."""
        return f"{self.module}:{self.name}" if self.name else self.module


@dataclasses.dataclass(frozen=True)
class SourceModule:
    """A module's text and tree."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        try:
            return ast.parse(self.text)
        except (SyntaxError, ValueError) as error:
            raise ExtractError(f"{self.path}: not valid Python ({error})") from error

    @property
    def package(self) -> str:
        """What relative imports start from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    def imported_from(self, node: ast.ImportFrom) -> str:
        """The absolute dotted name of the module that an import statement names."""
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        base = parts[: len(parts) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])


class ModuleIndex:
    """The modules of one package, parsed when they are first asked for.

    Args:
        package: whose text.
        holds: whether the test of an `if` at the top of a module holds, or None where that is not known beforehand.
    """

    def __init__(self, package: SourcePackage, holds: Callable[[str, ast.If], bool | None]):
        self.package = package
        self._holds = holds
        self._modules: dict[str, SourceModule | None] = {}
        self._found: dict[tuple[str, str], Symbol] = {}

    def module(self, name: str) -> SourceModule | None:
        """A module by its dotted name, or None if the package has none of that name."""
        if name not in self._modules:
            path = self.package.file_of(name)
            text = path.read_text(encoding="utf-8", errors="replace") if path is not None else ""
            self._modules[name] = SourceModule(name, path, text) if path is not None else None
        return self._modules[name]

    def modules(self) -> Iterator[SourceModule]:
        """All modules of the package, by name."""
        for path in sorted(self.package.folder.rglob("*.py")):
            parts = path.relative_to(self.package.folder).with_suffix("").parts
            name = ".".join([self.package.module, *(parts[:-1] if parts[-1] == "__init__" else parts)])
            if (module := self.module(name)) is not None and module.path == path:
                yield module

    def lookup(
        self, module: str, name: str, *, before: ast.stmt | None = None, _seen: frozenset[tuple[str, str]] = frozenset()
    ) -> Symbol | None:
        """What a name stands for at the top of a module, followed to its definition; None if it is not bound there.

        Args:
            before: a statement of the module; asked for is what the name stands for until then.

        Raises:
            ExtractError: it is bound in a way that cannot be decided from the text alone.
        """
        source = self.module(module)
        if source is None:
            return None
        if (module, name) in _seen:  # a package that imports its own submodule from itself
            if self.module(f"{module}.{name}") is not None:
                return Symbol("module", f"{module}.{name}")
            raise ExtractError(f"{module}: {name} is imported in a circle")
        if before is None and (module, name) in self._found:
            return self._found[module, name]
        found = self._in_body(source, source.tree.body, name, _seen | {(module, name)}, before)
        if found is not None:
            if before is None:
                self._found[module, name] = found
            return found
        if self.module(f"{module}.{name}") is not None and source.path.name == "__init__.py":
            return Symbol("module", f"{module}.{name}")
        return None

    def attribute(self, symbol: Symbol, name: str) -> Symbol | None:
        """What an attribute of a module, or of something from outside, stands for."""
        if symbol.kind == "external":
            return Symbol("external", f"{symbol.module}.{name}")
        if symbol.kind == "module":
            found = self.lookup(symbol.module, name)
            return found or (Symbol("module", f"{symbol.module}.{name}") if self.module(f"{symbol.module}.{name}") is not None else None)
        return None

    def imported(self, source: SourceModule, node: ast.Import | ast.ImportFrom, name: str, _seen: frozenset = frozenset()) -> Symbol | None:
        """What `name` stands for after an import statement, or None if the statement does not bind it."""
        for alias in node.names:
            if isinstance(node, ast.Import):
                if (alias.asname or alias.name.split(".")[0]) == name:
                    return self._dotted(alias.name if alias.asname else name)
                continue
            origin = source.imported_from(node)
            if alias.name == "*":
                if self.module(origin) is not None and (found := self.lookup(origin, name, _seen=_seen)) is not None:
                    return found
            elif (alias.asname or alias.name) == name:
                if self.module(origin) is None:
                    if origin.split(".")[0] == self.package.module:
                        raise ExtractError(f"{source.name} imports {origin}, which the package does not hold")
                    return self._dotted(f"{origin}.{alias.name}")
                if (found := self.lookup(origin, alias.name, _seen=_seen)) is not None:
                    return found
                if self.module(f"{origin}.{alias.name}") is not None:
                    return Symbol("module", f"{origin}.{alias.name}")
                raise ExtractError(f"{source.name} imports {alias.name} from {origin}, which does not define it")
        return None

    def taken(self, module: str, node: ast.Try) -> list[ast.stmt]:
        """The statements of a `try` that run where torch and triton are at hand, and no third package is."""
        source = self.module(module)
        if all(_is_at_hand(self.package.module, source, inner) for inner in node.body):
            return [*node.body, *node.orelse, *node.finalbody]
        return [*(node.handlers[0].body if node.handlers else []), *node.finalbody]

    def _dotted(self, name: str) -> Symbol:
        return Symbol("module" if self.module(name) is not None else "external", name)

    def _in_body(
        self, source: SourceModule, body: list[ast.stmt], name: str, seen: frozenset, before: ast.stmt | None
    ) -> Symbol | None:
        """The last binding of a name in statements, of those `before` a statement."""
        for node in reversed(body):
            if before is not None and node.lineno >= before.lineno:
                continue
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return Symbol("function", source.name, name, node)
            if isinstance(node, ast.ClassDef) and node.name == name:
                return Symbol("class", source.name, name, node)
            if isinstance(node, ast.Assign) and any(name in _stored(target) for target in node.targets):
                return Symbol("value", source.name, name, node)
            if isinstance(node, ast.AnnAssign) and node.value is not None and name in _stored(node.target):
                return Symbol("value", source.name, name, node)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                if (found := self.imported(source, node, name, seen)) is not None:
                    return found
            if isinstance(node, (ast.If, ast.Try, ast.With)) and _binds(node, name):
                if (found := self._in_branches(source, node, name, seen, before)) is not None:
                    return found
        return None

    def _in_branches(
        self, source: SourceModule, node: ast.If | ast.Try | ast.With, name: str, seen: frozenset, before: ast.stmt | None
    ) -> Symbol | None:
        if isinstance(node, ast.With):
            return self._in_body(source, node.body, name, seen, before)
        if isinstance(node, ast.Try):
            return self._in_body(source, self.taken(source.name, node), name, seen, before)
        holds = self._holds(source.name, node)
        if holds is None:
            raise ExtractError(f"{source.name}:{node.lineno}: {name} depends on {ast.unparse(node.test)!r}, which is known at run time only")
        return self._in_body(source, node.body if holds else node.orelse, name, seen, before)


def _is_at_hand(package: str, source: SourceModule, node: ast.stmt) -> bool:
    """Whether an import in a `try` succeeds on a machine that has torch and triton alone."""
    if isinstance(node, ast.Import):
        roots = [alias.name.split(".")[0] for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        roots = [source.imported_from(node).split(".")[0]]
    else:
        return True
    return all(root in ("torch", "triton", package) for root in roots)


def _stored(target: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _binds(node: ast.stmt, name: str) -> bool:
    """Whether a compound statement may bind a name, outside of functions and classes in it."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if inner.name == name:
                return True
        elif isinstance(inner, (ast.Import, ast.ImportFrom)):
            if any(alias.name == "*" or (alias.asname or alias.name.split(".")[0]) == name for alias in inner.names):
                return True
        elif isinstance(inner, ast.Name):
            if inner.id == name and isinstance(inner.ctx, ast.Store):
                return True
        elif _binds(inner, name):
            return True
    return False
