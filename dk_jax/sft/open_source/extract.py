"""A launcher of a package with all that it needs, as one self-contained module that ends in `class ModelNew`.

The launcher's functions, helpers, kernels and constants are collected from its module and the package's others, each rewritten by the
rules of `dk_jax.sft.open_source.rewrite`, and put in an order in which each name is defined before it is needed. Imports are torch and triton.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from dk_jax.sft.open_source.assembly import Assembly, Extracted
from dk_jax.sft.open_source.configs import Registries
from dk_jax.sft.open_source.expressions import forward_of
from dk_jax.sft.open_source.fold import Folder
from dk_jax.sft.open_source.modules import ExtractError, ModuleIndex, Symbol
from dk_jax.sft.open_source.packages import SourcePackage
from dk_jax.sft.open_source.rewrite import Rewriter
from dk_jax.sft.open_source.values import TENSOR

_TORCH = {"torch": "torch", "nn": "torch.nn", "F": "torch.nn.functional", "triton": "triton", "tl": "triton.language"}


class Extractor:
    """Extracts launchers of one package.

    Args:
        package: whose text.
    """

    def __init__(self, package: SourcePackage):
        self.package = package
        self.index = ModuleIndex(package, lambda module, node: self.folder.holds(module, node))
        self.registries = Registries(self.index)
        self.folder = Folder(self.index, self.registries)

    def extract(self, launchers: Sequence[str], call: str, *, arguments: Sequence[str], init: str = "") -> Extracted:
        """A module whose `ModelNew.forward` runs `call`.

        Args:
            launchers: functions of the package that `call` refers to by name, as "module:function", or "module:Class.forward" of an
                autograd function, which `call` refers to by the class's name.
            call: the body of forward: statements of them, of forward's arguments and of `self`.
            arguments: of forward.
            init: the text of ModelNew's constructor, or empty.

        Raises:
            ExtractError: something in it cannot be had as plain text of torch and triton.
        """
        try:
            return self._extract(launchers, call, arguments, init)
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ExtractError(f"{launchers[0]} is written in a way that the rules do not take ({type(error).__name__}: {error})") from error

    def _extract(self, launchers: Sequence[str], call: str, arguments: Sequence[str], init: str) -> Extracted:
        assembly = Assembly(self.index, self.folder, self.registries)
        known = {name: Symbol("external", dotted) for name, dotted in _TORCH.items()}
        for path in launchers:
            name, symbol = self.launcher(path)
            known[name] = symbol
        method = "\n".join(f"    {line}" for line in init.splitlines())
        body = "\n".join(f"        {line}" for line in call.splitlines())
        text = f"class ModelNew(torch.nn.Module):\n{method}\n    def forward(self, {', '.join(arguments)}):\n{body}\n"
        model = ast.parse(text).body[0]
        source = self.index.module(launchers[0].partition(":")[0])
        for node in model.body:
            of_model = node.name == "forward"
            rewriter = Rewriter(self.index, self.folder, source, assembly, known)
            rewriter.function(node, jit=False, given=dict.fromkeys(arguments, TENSOR) if of_model else {}, of_model=of_model)
        return assembly.finished(model)

    def launcher(self, path: str) -> tuple[str, Symbol]:
        """Name and symbol of a launcher.

        Raises:
            ExtractError: the package has none of that path.
        """
        module, _, name = path.partition(":")
        first, _, method = name.partition(".")
        symbol = self.index.lookup(module, first) if self.index.module(module) is not None else None
        if symbol is None:
            raise ExtractError(f"{self.package.distribution} {self.package.version} has no {path}")
        if method:
            if symbol.kind != "class" or (found := forward_of(symbol, method)) is None:
                raise ExtractError(f"{self.package.distribution} {self.package.version} has no {path}")
            return first, found
        if symbol.kind != "function":
            raise ExtractError(f"{path} is a {symbol.kind}, no function")
        return first, symbol
