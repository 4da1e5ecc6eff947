"""Content-addressed store of built libraries: a key names what the compiler saw, a file appears complete
or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEFAULT_LIMIT_BYTES = 4 << 30
MAX_ARTIFACT_BYTES = 256 << 20
PRUNED_OF_256 = 4


class ArtifactStore:
    """Files under `root`, two levels deep, named by key. Safe for several processes at once.

    Args:
      root: made with mode 0700 if missing.
    """

    def __init__(self, root: Path):
        self.root = root
        root.mkdir(parents=True, exist_ok=True, mode=0o700)

    @staticmethod
    def key(*parts: str) -> str:
        """Key of an ordered list of texts; the lengths are hashed too, so no two lists share a key."""
        digest = hashlib.sha256()
        for part in parts:
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()

    def find(self, key: str) -> Path | None:
        """Path of the artifact, or None. Marks it as used."""
        path = self._path(key)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def publish(self, key: str, built: Path) -> Path:
        """Copies `built` under `key` in one step; the first of several publishers of a key is kept or
        replaced by an equal file.

        Raises:
          OSError: the disk is full, or `built` is no ordinary file (what a jail left is not followed
            elsewhere); nothing is left behind.
        """
        data = read_regular_file(built)
        path = self._path(key)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        return path

    def prune_now_and_then(self, key: str) -> None:
        """To be called for what was published: one in 64 also deletes what is held beyond the limit."""
        if int(key[:2], 16) < PRUNED_OF_256:
            self.prune()

    def prune(self, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> int:
        """Deletes the least recently used artifacts beyond `limit_bytes`; returns how many."""
        entries = []
        for path in self.root.glob("??/*"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            entries.append((status.st_mtime, status.st_size, path))
        entries.sort(reverse=True)
        total_bytes, deleted = 0, 0
        for _, size, path in entries:
            total_bytes += size
            if total_bytes > limit_bytes:
                path.unlink(missing_ok=True)
                deleted += 1
        return deleted

    def _path(self, key: str) -> Path:
        return self.root / key[:2] / key


@contextmanager
def published_whole(directory: Path) -> Iterator[Path]:
    """An empty directory beside `directory` to be filled, which takes that name when it is left, and is gone where that fails. Compilers
    run as other users, so all may read it."""
    staged = Path(tempfile.mkdtemp(prefix=".new-", dir=directory.parent))
    try:
        yield staged
        for path in (staged, *staged.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.rename(staged, directory)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def read_regular_file(path: Path, limit_bytes: int = MAX_ARTIFACT_BYTES) -> bytes:
    """Content of a file that untrusted code made. Raises OSError for a link, a device, a pipe, or too
    much."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit_bytes:
            raise OSError(errno.EINVAL, f"{path.name} is no ordinary file of at most {limit_bytes} bytes")
        return file.read(limit_bytes)


def sealed_copy(path: Path) -> int:
    """Descriptor of an anonymous, sealed copy of a file: what a jail gets instead of a path into the
    store."""
    fd = os.memfd_create("kernel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(path, "rb") as source, open(fd, "wb", closefd=False) as target:
            shutil.copyfileobj(source, target)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd
