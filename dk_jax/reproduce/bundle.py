"""What an ablation needs to go on elsewhere, as a few small files: everything that is decided, and of what is not, the newest checkpoint.

    NAME                   one file of at most 16 MiB (a tar, compressed by gzip), or
    NAME.1of3, ...         its consecutive parts, at most eight

In it manifest.json, which gives each path of the ablation's folder the SHA-256 of its content, and each content once. Of an arm that is trained
and evaluated no parameters travel, only what the write-up needs; rollouts, logs and compiled programs never do.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from dk_jax.reproduce import digests, starts
from dk_jax.reproduce.arms import AblationError, Job
from dk_jax.reproduce.work import PIECES, SETTINGS, Ablation, newest

PART_BYTES, MOST_PARTS = 16 << 20, 8
FORMAT = 1
_RUN = ("config.json", "metrics.jsonl", "library.sqlite", "library.sqlite-wal", "weights.json", "admission.jsonl", starts.MARK, digests.FILE)
_EVALUATION = ("results.jsonl", "settings.json", "done")


def files(ablation: Ablation, jobs: Sequence[Job]) -> list[Path]:
    """What another machine needs for these jobs and for the write-up of all that is there."""
    open_ = [job for job in jobs if not ablation.is_done(job)]
    found = [ablation.folder / name for name in (SETTINGS, PIECES)]
    for folder in _folders(ablation.folder / "starts"):
        found += _all(folder) if starts.is_kept(folder) else []
    kept = {folder.name for folder in _folders(ablation.folder / "starts") if starts.is_kept(folder)}
    for folder in _folders(ablation.folder / "sft"):
        found.append(folder / "corpus.jsonl")
        if folder.name not in kept:
            found += [folder / name for name in (*_RUN, "sft_kept.json", "journal_corpus.jsonl")] + _all(folder / "codec")
            found += _all(newest(folder / "checkpoints" / "sft")) + _all(newest(folder / "checkpoints" / "sft_best"))
    needed = {ablation.run_folder(job) for job in open_ if job.kind in ("train", "evaluate", "evaluate_start")}
    for folder in _folders(ablation.folder / "runs"):
        found += [folder / name for name in _RUN]
        if folder in needed:
            found += [folder / "journal_rl.jsonl", *_all(folder / "codec"), *_all(newest(folder / "checkpoints" / "rl"))]
    for folder in _folders(ablation.folder / "eval"):
        found += [folder / name for name in _EVALUATION]
        if not (folder / "done").exists():
            found.append(folder / "journal.jsonl")
    return [path for path in dict.fromkeys(found) if path.is_file()]


def export(ablation: Ablation, jobs: Sequence[Job], target: Path) -> list[Path]:
    """Writes the bundle; returns its files.

    Raises:
        AblationError: it is larger than eight parts; names what is largest. Nothing is written then.
        FileExistsError: the target, or a part of another bundle of its name, is there.
    """
    if there := [target, *_parts_of(target)] if target.exists() else _parts_of(target):
        raise FileExistsError(f"{there[0]} is there already: give another name, or remove it")
    ablation.digest_runs(jobs)  # a kill may have come between a step and its digest, and rollouts stay here
    paths = files(ablation, jobs)
    data = _packed(ablation.folder, paths)
    count = -(-len(data) // PART_BYTES)
    if count > MOST_PARTS:
        largest = sorted(paths, key=lambda path: -path.stat().st_size)[:4]
        said = ", ".join(f"{path.relative_to(ablation.folder)} {path.stat().st_size >> 20} MiB" for path in largest)
        raise AblationError(
            f"the bundle has {len(data) >> 20} MiB, more than {MOST_PARTS} files of {PART_BYTES >> 20} MiB hold. The largest: {said}. Evaluate the "
            "arms that are trained first: then their parameters need not travel"
        )
    names = [target] if count == 1 else [_part(target, i, count) for i in range(1, count + 1)]
    target.parent.mkdir(parents=True, exist_ok=True)
    for i, path in enumerate(names):
        partial = path.with_name(f"{path.name}.part")
        partial.write_bytes(data[i * PART_BYTES : (i + 1) * PART_BYTES])
        partial.replace(path)
    return names


def import_(source: Path, folder: Path) -> list[str]:
    """Unpacks a bundle into a folder that holds no ablation yet; returns the paths in it.

    Raises:
        FileNotFoundError: the bundle, or one of its parts, is not there.
        AblationError: it is damaged, or the folder holds an ablation. The folder is no ablation then.
    """
    if (folder / SETTINGS).exists():
        raise AblationError(f"{folder} holds an ablation already: import into another --workdir")
    data = b"".join(path.read_bytes() for path in _whole(source))
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
            contents = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
        manifest = json.loads(contents["manifest.json"])
        listed = {str(name): str(digest) for name, digest in manifest["files"].items()}
    except (tarfile.TarError, OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AblationError(f"{source} is no whole bundle ({error}): copy all of its parts again") from error
    if manifest.get("format") != FORMAT:
        raise AblationError(f"{source} is a bundle of format {manifest.get('format')}, this version reads {FORMAT}")
    for name, digest in listed.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise AblationError(f"{source} names {name!r}, which lies outside of the folder")
        if hashlib.sha256(contents.get(f"content/{digest}", b"")).hexdigest() != digest:
            raise AblationError(f"{source}: the content of {name} is damaged or missing")
    for name in sorted(listed, key=lambda name: name == SETTINGS):  # the settings last: with them the folder is an ablation
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.part")
        partial.write_bytes(contents[f"content/{listed[name]}"])
        partial.replace(path)
    return sorted(listed)


def _packed(folder: Path, paths: Sequence[Path]) -> bytes:
    listed: dict[str, str] = {}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        for path in paths:
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            if digest not in listed.values():
                _add(tar, f"content/{digest}", content)
            listed[str(path.relative_to(folder))] = digest
        _add(tar, "manifest.json", json.dumps({"format": FORMAT, "files": listed}, indent=1).encode())
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []


def _all(folder: Path | None) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder is not None and folder.is_dir() else []


def _part(target: Path, number: int, count: int) -> Path:
    return target.with_name(f"{target.name}.{number}of{count}")


def _parts_of(target: Path) -> list[Path]:
    return sorted(path for path in target.parent.glob(f"{target.name}.*") if re.fullmatch(r"\.\d+of\d+", path.name[len(target.name) :]))


def _whole(source: Path) -> Iterator[Path]:
    """The files of a bundle in order."""
    if source.exists():
        yield source
        return
    parts = _parts_of(source)
    counts = {path.name.rpartition("of")[2] for path in parts}
    if not parts:
        raise FileNotFoundError(f"{source}: there is no such file, nor parts of it ({source.name}.1of2, ...)")
    if len(counts) > 1:
        raise AblationError(f"{source}: there are parts of several bundles: {', '.join(path.name for path in parts)}")
    for number in range(1, int(counts.pop()) + 1):
        path = _part(source, number, int(parts[0].name.rpartition("of")[2]))
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: a bundle needs all of its parts")
        yield path
