"""Safetensors in a directory: one file, or several with model.safetensors.index.json that says which tensor is in which.

Reading opens headers only; `read` then copies the asked slice out of the memory-mapped file and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class TensorFiles:
    """The tensors of a checkpoint directory, by name.

    Attributes:
      shapes: name -> shape.
      types: name -> type as numpy names it; the file's own word for what numpy lacks or we do not read.
    """

    def __init__(self, directory: str | Path):
        """Reads the index and every header.

        Raises:
          FileNotFoundError: if there are no safetensors, or a shard that the index names is missing.
          ValueError: for an index or a file that is broken, an index that names a tensor which its file lacks, and files of
            which it is unclear which to read.
        """
        self.directory = Path(directory)
        self._slices = {}
        located = self._indexed() if (self.directory / INDEX).is_file() else self._unindexed()
        for file, wanted in located.items():
            reader = _open(self.directory / file)
            held = set(reader.keys())
            if wanted is None:
                wanted = sorted(held)
            absent = sorted(set(wanted) - held)
            if absent:
                raise ValueError(
                    f"{self.directory / INDEX} puts {len(absent)} tensors into {file} which that file lacks, e.g. {absent[:3]}; "
                    "the download is damaged or mixes two exports"
                )
            for name in wanted:
                if name in self._slices:
                    raise ValueError(f"{self.directory}: tensor {name!r} is in more than one file and there is no {INDEX}")
                self._slices[name] = reader.get_slice(name)
        self.shapes = {name: tuple(found.get_shape()) for name, found in self._slices.items()}
        self.types = {name: _TYPES.get(found.get_dtype(), found.get_dtype()) for name, found in self._slices.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A copy of one slice of one tensor, in the file's type."""
        return self._slices[name][index]

    def _indexed(self) -> dict[str, list[str] | None]:
        path = self.directory / INDEX
        try:
            files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            by_file: dict[str, list[str] | None] = {}
            for name, file in files.items():
                by_file.setdefault(file, []).append(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not an index of safetensors: {type(error).__name__}: {error}") from error
        strays = [file for file in by_file if Path(file).name != file]
        if strays or not by_file:
            raise ValueError(f"{path} has to name files beside it: {strays or 'it names none'}")
        missing = [file for file in by_file if not (self.directory / file).is_file()]
        if missing:
            raise FileNotFoundError(f"{path} names {len(missing)} files that are missing, e.g. {missing[:3]}; fetch them again")
        if SINGLE not in by_file and (self.directory / SINGLE).exists():
            raise ValueError(f"{self.directory} holds both {SINGLE} and {INDEX}, which does not name it; remove the one that is stale")
        return by_file

    def _unindexed(self) -> dict[str, list[str] | None]:
        files = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{self.directory} has no *.safetensors; convert the checkpoint to safetensors first")
        return dict.fromkeys(files)


def write_tensors(
    directory: Path, sizes_bytes: Mapping[str, int], make: Callable[[str], np.ndarray], max_shard_bytes: int
) -> None:
    """Writes tensors in order, into one file or into shards with an index. In memory is one shard at a time.

    Args:
      directory: holds no safetensors yet.
      sizes_bytes: of every tensor, by name.
      make: gives a tensor by its name.
      max_shard_bytes: of one file; a tensor that is larger gets a file of its own.

    Raises:
      FileExistsError: if there are safetensors already, which a reader would mix up with these.
    """
    check_free(directory)
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, size in sizes_bytes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    directory.mkdir(parents=True, exist_ok=True)
    files = [SINGLE] if len(shards) == 1 else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, names in zip(files, shards, strict=True):
        save_file({name: make(name) for name in names}, directory / file, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes_bytes.values())}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def check_free(directory: Path) -> None:
    """Raises FileExistsError if a directory holds safetensors already."""
    found: Iterable[Path] = [*directory.glob("*.safetensors"), *directory.glob(INDEX)]
    names = sorted(path.name for path in found)
    if names:
        raise FileExistsError(f"{directory} already holds {names[:3]}; export to an empty directory, or remove these first")


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
