"""Installed packages of open Triton kernels: where their text lies, their version, and the licence that lets it be used.

A package is found without being imported, and nothing of it is ever executed: its files are read as text. Which packages there are
is a table (`PACKAGES`); each is optional (`pip install --no-deps liger-kernel flag-gems fla-core`).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

PACKAGES = {"liger-kernel": "liger_kernel", "flag-gems": "flag_gems", "fla-core": "fla"}
"""Distribution -> the module that it installs."""

_PERMISSIVE = {
    "mit": "MIT",
    "mitlicense": "MIT",
    "apache20": "Apache-2.0",
    "apachelicense20": "Apache-2.0",
    "apachelicenseversion20": "Apache-2.0",
    "apachesoftwarelicense": "Apache-2.0",
    "bsd2clause": "BSD-2-Clause",
    "bsd2clauselicense": "BSD-2-Clause",
    "bsd3clause": "BSD-3-Clause",
    "bsd3clauselicense": "BSD-3-Clause",
}
"""What metadata calls a permissive licence, without case and punctuation -> its SPDX identifier."""


class PackageError(RuntimeError):
    """A package is missing, empty or not free to use; the message says which and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourcePackage:
    """The text of one installed package.

    Attributes:
        distribution: its name in the package index, such as "liger-kernel".
        module: the module that it installs, such as "liger_kernel".
        version: from its metadata.
        licence: SPDX identifier, always a permissive one.
        copyright: the lines of its licence files that say whose it is.
        folder: of the module's source files.
    """

    distribution: str
    module: str
    version: str
    licence: str
    copyright: tuple[str, ...]
    folder: Path

    def file_of(self, module: str) -> Path | None:
        """The source file of a dotted module of this package, or None."""
        parts = module.split(".")
        if parts[0] != self.module:
            return None
        path = self.folder.joinpath(*parts[1:])
        for candidate in (path.with_suffix(".py") if len(parts) > 1 else None, path / "__init__.py"):
            if candidate is not None and candidate.is_file():
                return candidate
        return None

    def name_of(self, path: Path) -> str:
        """A file's path as it stands in the package, such as "liger_kernel/ops/softmax.py"."""
        return f"{self.module}/{path.relative_to(self.folder).as_posix()}"


def permissive(name: str) -> str | None:
    """SPDX identifier of the permissive licence of that name, or None if it is not known to be one."""
    return _PERMISSIVE.get(re.sub(r"[^a-z0-9]", "", name.lower()))


def licence_of(metadata: importlib.metadata.PackageMetadata) -> str:
    """SPDX identifier of a distribution's licence.

    Raises:
        PackageError: it names none, or one that is not known to be permissive.
    """
    said = [metadata.get("License-Expression") or (metadata.get("License") or "").strip().split("\n")[0]]
    said += [line.split("::")[-1] for line in metadata.get_all("Classifier") or [] if line.startswith("License ::")]
    said = [text.strip() for text in said if text.strip() not in ("", "OSI Approved")]
    known = [permissive(text) for text in said]
    if known and all(known):
        return known[0]
    raise PackageError(
        f"package {metadata.get('Name')} names {' and '.join(map(repr, said)) or 'no licence'}, which is not a licence known to be permissive "
        f"({', '.join(sorted(set(_PERMISSIVE.values())))}): its kernels are not used"
    )


def find_package(distribution: str, roots: Sequence[Path] = ()) -> SourcePackage | None:
    """The package, or None if it is not installed.

    Args:
        distribution: a key of `PACKAGES`.
        roots: folders that hold packages beside their metadata, as `pip install --target` makes them; none: where Python looks for modules.

    Raises:
        PackageError: it is there, but without source files, metadata or a permissive licence.
    """
    module = PACKAGES[distribution]
    if roots:
        folder = next((root / module for root in roots if (root / module).is_dir()), None)
        where = [str(folder.parent)] if folder else []
    else:
        spec = importlib.util.find_spec(module)
        folder = Path(next(iter(spec.submodule_search_locations))) if spec is not None and spec.submodule_search_locations else None
        where = [str(folder.parent)] if folder else []
    if folder is None:
        return None
    if not any(path.stat().st_size for path in folder.rglob("*.py")):
        raise PackageError(f"{folder}: package {distribution} holds no source text; install it again (pip install --no-deps {distribution})")
    # Asked by its folder, as a package of the same name may be installed elsewhere too.
    found = next(iter(importlib.metadata.distributions(name=distribution, path=where)), None)
    if found is None:
        raise PackageError(
            f"{folder}: there is no metadata of {distribution} beside it, so its version and licence are not known; install it with pip "
            f"(pip install --no-deps {distribution})"
        )
    return SourcePackage(
        distribution=distribution,
        module=module,
        version=found.version,
        licence=licence_of(found.metadata),
        copyright=_copyright(found),
        folder=folder,
    )


def find_packages(roots: Sequence[Path] = ()) -> list[SourcePackage]:
    """All packages of `PACKAGES` that are installed.

    Raises:
        PackageError: a root is no folder, none of the packages is there, or one of them cannot be used (see `find_package`).
    """
    for root in roots:
        if not root.is_dir():
            raise PackageError(f"{root}: no such folder; give one that holds {' or '.join(PACKAGES.values())}")
    found = [package for name in PACKAGES if (package := find_package(name, roots)) is not None]
    if not found:
        places = ", ".join(map(str, roots)) or "Python's module path"
        raise PackageError(
            f"no package of open kernels in {places}: pip install --no-deps {' '.join(PACKAGES)} (one of them is enough), or name the folder that "
            "holds them with --root"
        )
    return found


def _copyright(found: importlib.metadata.Distribution) -> tuple[str, ...]:
    lines = []
    for path in found.files or []:
        if ".dist-info" in str(path.parts[0]) and re.match(r"(LICEN[CS]E|NOTICE|COPYING)", path.name, re.IGNORECASE):
            text = Path(found.locate_file(path)).read_text(encoding="utf-8", errors="replace")
            lines += [line.strip() for line in text.splitlines() if re.match(r"\s*Copyright\s+(\(c\)|©|\d)", line, re.IGNORECASE)]
    return tuple(dict.fromkeys(lines))
