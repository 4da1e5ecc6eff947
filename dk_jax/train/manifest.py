"""What files a folder holds, with sizes and SHA-256, written when it is complete: whether all is still there can be told later."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAME = "manifest.json"
_THREADS = 8


def write(folder: Path, *, changing: tuple[str, ...] = ()) -> None:
    """Writes the manifest of all files in the folder and below, into it; complete or not at all.

    Args:
        changing: names of files that will be written again; they have to be there, with whatever they hold.
    """
    files = [(name, path) for name, path in _files(folder) if name not in changing]
    entries = {name: {"bytes": path.stat().st_size, "sha256": digest} for (name, path), digest in zip(files, _digests(files), strict=True)}
    entries |= {name: {} for name in changing}
    partial = folder / f"{NAME}.part"
    partial.write_text(json.dumps({"files": entries}, indent=1), encoding="utf-8")
    partial.replace(folder / NAME)


def problem(folder: Path) -> str:
    """How the folder differs from its manifest, or ""; files that came later do not matter."""
    try:
        wanted = json.loads((folder / NAME).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"it has no {NAME}"
    except (ValueError, KeyError, TypeError) as error:
        return f"its {NAME} can't be read: {error}"
    found = dict(_files(folder))
    for name, entry in wanted.items():  # what is quick to see first
        if name not in found:
            return f"{name} is missing"
        if entry and (size := found[name].stat().st_size) != entry["bytes"]:
            return f"{name} has {size} bytes instead of {entry['bytes']}"
    files = [(name, found[name]) for name, entry in wanted.items() if entry]
    for (name, _), digest in zip(files, _digests(files), strict=True):
        if digest != wanted[name]["sha256"]:
            return f"{name} has other content than was written"
    return ""


def link(source: str, target: str) -> None:
    """A second name of a file, or a copy where there are no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _files(folder: Path) -> list[tuple[str, Path]]:
    return sorted((str(p.relative_to(folder)), p) for p in folder.rglob("*") if p.is_file() and not p.name.startswith(NAME))


def _digests(files: list[tuple[str, Path]]) -> list[str]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda entry: _digest(entry[1]), files))


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
