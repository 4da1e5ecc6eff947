"""TensorBoard's event files: records of (length u64, checksum u32, event, checksum u32), little-endian.

What a run needs that goes on from a checkpoint: that all events written are on disk when it asks for that (tensorboardX's SummaryWriter
has them wait in a queue, which its flush leaves as it is), and dropping the events of steps that are done again.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_HEADER, _FOOTER = 12, 4


class EventFile:
    """A new event file in the folder; what is written is on disk after `flush`."""

    def __init__(self, directory: Path):
        # Imported here: it takes seconds, and reading metrics does not need it.
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event

        directory.mkdir(parents=True, exist_ok=True)
        # A name of its own: two files begun in one second would be one.
        self._writer = EventsWriter(str(directory / "events"), f".{os.getpid()}.{time.time_ns()}")
        self._summary, self._event = summary, Event

    def scalar(self, tag: str, value: float, step: int) -> None:
        self._write(self._summary.scalar(tag, value), step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._write(self._summary.text(tag, text), step)

    def _write(self, summary: Any, step: int) -> None:
        self._writer.write_event(self._event(summary=summary, step=step, wall_time=time.time()))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


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
