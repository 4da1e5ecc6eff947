"""Tuned kernels without their tuner: the configurations that a package would measure, and the one that is kept of them.

An autotuner tries configurations when a kernel first runs. An extracted kernel has one, the middle of the list as it stands in the text
(lists run from small to large, so that is neither end), and each launch names its values, as hand-written launches do.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from dk_jax.sft.open_source.facts import HEURISTICS, TUNED, TUNERS
from dk_jax.sft.open_source.fold import Folder
from dk_jax.sft.open_source.modules import ExtractError, ModuleIndex, Symbol
from dk_jax.sft.open_source.values import Config, NotConstant

_DEFAULTS = {"num_warps": 4, "num_stages": 2}
"""Of configurations in files that do not say."""


def last_name(node: ast.expr) -> str:
    """The last part of a dotted name, or of the dotted name that is called."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_tuner(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and last_name(decorator) in TUNERS


def chosen_config(folder: Folder, symbol: Symbol, decorator: ast.Call) -> Config:
    """The one configuration that stands for all that a decorator lists.

    Raises:
        ExtractError: what it lists is known at run time only.
    """
    node = next((k.value for k in decorator.keywords if k.arg == "configs"), decorator.args[0] if decorator.args else None)
    if node is None:
        raise ExtractError(f"{symbol.path}: its tuner lists no configurations")
    try:
        configs = folder.value(symbol.module, node)
    except NotConstant as error:
        raise ExtractError(f"{symbol.path}: its configurations are known at run time only ({error})") from error
    configs = [config for config in configs if isinstance(config, Config)]
    if not configs:
        raise ExtractError(f"{symbol.path}: its tuner lists no configurations")
    return configs[len(configs) // 2]


class Registries:
    """What a package looks up by name in its own files: tuned configurations (YAML) and heuristics (a dictionary of functions).

    Args:
        index: of the package.
    """

    def __init__(self, index: ModuleIndex):
        self._index = index
        self._tuned: list[dict[str, Any]] | None = None

    def __call__(self, name: str, args: Sequence[Any]) -> Any:
        """The answer of a lookup function. Raises NotConstant: the name is in none of the files."""
        if name == TUNED and args and isinstance(args[0], str):
            return self.tuned(args[0])
        raise NotConstant(f"{name} of {args}")

    def tuned(self, operation: str) -> list[Config]:
        """Configurations of an operation, those for the target's architecture before those for the vendor."""
        for table in self._tables():
            if table.get(operation):
                return [config for entry in table[operation] for config in _configs(entry)]
        raise NotConstant(f"no configurations of {operation!r} in the package's files")

    def heuristics(self, operation: str) -> tuple[str, ast.Dict]:
        """Module and dictionary of an operation's heuristics: name of a constexpr parameter -> function of the launch's arguments.

        Raises:
            ExtractError: there are none.
        """
        for name in self._modules_for_nvidia("heuristics"):
            module = self._index.module(name)
            for node in module.tree.body if module is not None else []:
                if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
                    continue
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == operation and isinstance(value, ast.Dict):
                        return name, value
        raise ExtractError(f"no heuristics of {operation!r} in the package's files")

    def _tables(self) -> list[dict[str, Any]]:
        if self._tuned is None:
            import yaml

            folder = self._index.package.folder
            paths = sorted(folder.rglob("tune_configs.yaml"), key=lambda path: (0 if "hopper" in path.parts else 1, str(path)))
            paths = [path for path in paths if any("nvidia" in part for part in path.parts) and "ampere" not in path.parts]
            self._tuned = [yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {} for path in paths]
        return self._tuned

    def _modules_for_nvidia(self, word: str) -> list[str]:
        folder = self._index.package.folder
        paths = [path for path in folder.rglob(f"*{word}*.py") if any("nvidia" in part for part in path.parts) and "ampere" not in path.parts]
        paths.sort(key=lambda path: (0 if "hopper" in path.parts else 1, str(path)))
        return [".".join([self._index.package.module, *path.relative_to(folder).with_suffix("").parts]) for path in paths]


def is_heuristics_lookup(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and last_name(node) == HEURISTICS


def _configs(entry: dict[str, Any]) -> list[Config]:
    """Configurations of one entry of a file: one that is written out, or the product of lists that `param_map` names."""
    if "param_map" not in entry:
        meta = entry.get("META") or {}
        return [Config(tuple(meta.items()), tuple((k, entry.get(k, v)) for k, v in _DEFAULTS.items()))]

    def values(source: Any) -> list[Any]:
        return list(source) if isinstance(source, list) else [source] if isinstance(source, int) else list(entry[source])

    meta = entry["param_map"].get("META") or {}
    metas: list[dict[str, Any]] = [{}] if isinstance(meta, dict) else values(meta)
    if isinstance(meta, dict):
        for key, source in meta.items():
            metas = [{**known, key: value} for known in metas for value in values(source)]
    options = [dict(_DEFAULTS)]
    for key, source in entry["param_map"].items():
        if key in _DEFAULTS:
            options = [{**known, key: value} for known in options for value in values(source)]
    return [Config(tuple(m.items()), tuple(o.items())) for m in metas for o in options]
