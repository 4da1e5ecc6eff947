"""TensorBoard's event files as they lie on disk: records of (length u64, checksum u32, event, checksum u32), little-endian.

Only what a run needs of them that goes on from a checkpoint: dropping the events of steps that are done again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_HEADER, _FOOTER = 12, 4


def drop_events(directory: Path, prefix: str, gone: Callable[[int], bool]) -> int:
    """Rewrites the event files in a folder, which nobody may be writing, without the events of tags that begin with `prefix` whose
    step is `gone`, and without a record that a crash cut short at a file's end. Returns how many events were dropped."""
    dropped = 0
    for path in sorted(directory.glob("events.*")):
        raw = path.read_bytes()
        kept, found = [], 0
        for record, event in _records(raw):
            if gone(event.step) and any(value.tag.startswith(prefix) for value in event.summary.value):
                found += 1
            else:
                kept.append(record)
        if found:
            partial = path.with_name(f"part.{path.name}")
            partial.write_bytes(b"".join(kept))
            partial.replace(path)
            dropped += found
    return dropped


def read_events(directory: Path) -> list[tuple[str, int]]:
    """(tag, step) of every event in a folder's files, in the order of writing."""
    found = []
    for path in sorted(directory.glob("events.*")):
        found += [(value.tag, event.step) for _, event in _records(path.read_bytes()) for value in event.summary.value]
    return found


def _records(raw: bytes) -> Iterator[tuple[bytes, Any]]:
    """Whole records and their events; what is behind the first that is not whole is left out."""
    from tensorboardX.proto.event_pb2 import Event

    at = 0
    while at + _HEADER <= len(raw):
        (length,) = struct.unpack_from("<Q", raw, at)
        end = at + _HEADER + length + _FOOTER
        if end > len(raw):
            return
        yield raw[at:end], Event.FromString(raw[at + _HEADER : end - _FOOTER])
        at = end
