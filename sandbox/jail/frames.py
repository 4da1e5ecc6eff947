"""Length-prefixed messages between a trusted oracle and an untrusted runner: JSON header, then raw
buffers. No pickle.

    magic "DKF1" | header bytes (u32) | payload bytes (u64) | header (JSON) | payload

The header names the sizes of its buffers; each buffer starts on a 64-byte boundary of the payload. Both
ends quote a nonce that is drawn for each runner and a counter, so that a stray writer on the channel is
noticed. The receiver states how much it is willing to take before it allocates anything.

A header with "bulk": true says that the payload does not follow in the stream but lies in shared memory
(`sandbox.jail.bulk`), whose descriptor comes with the message, before those that the message carries for
purposes of its own. Descriptors that a receiver does not expect are closed and end the conversation.
"""

from __future__ import annotations

import array
import itertools
import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandbox.jail import bulk

MAGIC = b"DKF1"
PREFIX = struct.Struct("!4sIQ")
MAX_HEADER_BYTES = 4 << 20
ALIGN_BYTES = 64
SOCKET_BUFFER_BYTES = 4 << 20
_INT_BYTES = array.array("i").itemsize

Wait = Callable[[socket.socket, bool], None]
"""Blocks until the socket can be read (False) or written (True); raises to give up."""


class FrameError(RuntimeError):
    """The peer does not speak the protocol: wrong magic, nonce, order or sizes."""


class ChannelClosed(RuntimeError):
    """The peer closed its end."""


@dataclass(frozen=True)
class Message:
    """A received message: `buffers` are views into one allocation, `fds` now belong to the receiver."""

    header: dict[str, Any]
    buffers: list[memoryview]
    fds: list[int] = field(default_factory=list)


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets with buffers large enough for tensors."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    return ours, theirs


class Channel:
    """One end of a conversation. Calls and replies alternate, so one counter serves both directions.

    Args:
      sock: a stream socket; with `wait` it is used non-blocking.
      nonce: text that every header must quote.
      wait: how to wait for the peer; None blocks for ever.
      max_fds: descriptors taken from the peer with a message, besides that of its payload.
      max_bulk_bytes: largest payload that is sent in shared memory; larger ones go through the stream.
      max_held_bytes: most memory of the peer that stays mapped here (see `bulk.Mappings`).
    """

    def __init__(
        self,
        sock: socket.socket,
        nonce: str,
        wait: Wait | None = None,
        max_fds: int = 0,
        *,
        max_bulk_bytes: int = bulk.MAX_JAIL_BYTES,
        max_held_bytes: int = bulk.MAX_JAIL_BYTES,
    ):
        self._sock, self._nonce, self._wait, self._max_fds = sock, nonce, wait, max_fds
        self._max_bulk_bytes, self._mappings = max_bulk_bytes, bulk.Mappings(max_held_bytes)
        self._sequence = 0
        sock.setblocking(wait is None)

    def close(self) -> None:
        self._sock.close()

    def send(
        self, header: dict[str, Any], buffers: Sequence[memoryview] = (), fds: Sequence[int] = ()
    ) -> None:
        """Sends one message with copies of descriptors `fds`.

        Raises:
          ChannelClosed: the peer has gone.
          FrameError: the header is too large.
        """
        sizes = [buffer.nbytes for buffer in buffers]
        flat = [buffer.cast("B") if size else memoryview(b"") for buffer, size in zip(buffers, sizes, strict=True)]
        payload_bytes = sum(map(_padded, sizes))
        shared = None
        if bulk.MIN_BYTES <= payload_bytes <= self._max_bulk_bytes:
            shared = bulk.share(zip(_offsets(sizes), flat, strict=True), payload_bytes)
        try:
            envelope = {
                **header,
                "nonce": self._nonce,
                "sequence": self._sequence,
                "sizes": sizes,
                "bulk": shared is not None,
            }
            text = json.dumps(envelope).encode()
            if len(text) > MAX_HEADER_BYTES:
                raise FrameError(f"header of {len(text)} bytes exceeds {MAX_HEADER_BYTES}")
            self._sequence += 1
            start = memoryview(PREFIX.pack(MAGIC, len(text), payload_bytes) + text)
            self._send_all(start, [*fds] if shared is None else [shared, *fds])
        finally:
            if shared is not None:
                os.close(shared)
        if shared is None:
            for buffer, size in zip(flat, sizes, strict=True):
                self._send_all(buffer)
                self._send_all(memoryview(bytes(_padded(size) - size)))

    def put(self, data: bytes) -> None:
        """Sends bytes without a frame, where the peer knows what comes. Raises ChannelClosed."""
        self._send_all(memoryview(data))

    def take(self, size: int) -> bytes:
        """Receives `size` bytes without a frame. Raises ChannelClosed, FrameError."""
        data = bytearray(size)
        self._receive_into(memoryview(data))
        return bytes(data)

    def receive(self, max_payload_bytes: int) -> Message:
        """Receives one message. Whatever it raises, it leaves no descriptor open.

        Raises:
          ChannelClosed: the peer has gone.
          FrameError: the message breaks the protocol or is larger than `max_payload_bytes`.
        """
        fds: list[int] = []
        try:
            return self._receive(max_payload_bytes, fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _receive(self, max_payload_bytes: int, fds: list[int]) -> Message:
        start = bytearray(PREFIX.size)
        self._receive_into(memoryview(start), fds, self._max_fds + 1)
        magic, header_bytes, payload_bytes = PREFIX.unpack(start)
        if magic != MAGIC or header_bytes > MAX_HEADER_BYTES:
            raise FrameError("the channel carries something that is not a message")
        if payload_bytes > max_payload_bytes:
            raise FrameError(
                f"message of {payload_bytes} bytes where at most {max_payload_bytes} are expected"
            )
        text = bytearray(header_bytes)
        self._receive_into(memoryview(text))
        try:
            header = json.loads(bytes(text), parse_constant=_refused)
        except (ValueError, RecursionError) as error:
            raise FrameError("message header is not JSON") from error
        if not isinstance(header, dict) or not isinstance(header.get("sizes"), list):
            raise FrameError("message header lacks its sizes")
        if header.get("nonce") != self._nonce or header.get("sequence") != self._sequence:
            raise FrameError("message does not belong to this conversation")
        sizes = header["sizes"]
        if (
            not all(type(size) is int and size >= 0 for size in sizes)
            or sum(map(_padded, sizes)) != payload_bytes
        ):
            raise FrameError("buffer sizes do not add up to the payload")
        in_memory = header.get("bulk") is True
        if len(fds) - in_memory > self._max_fds or (in_memory and not (fds and payload_bytes)):
            raise FrameError(f"message with {len(fds)} descriptors, which is not what it announces or may carry")
        self._sequence += 1
        payload = self._mapped(fds.pop(0), payload_bytes) if in_memory else self._streamed(payload_bytes)
        views = [payload[at : at + size] for at, size in zip(_offsets(sizes), sizes, strict=True)]
        return Message(header, views, fds)

    def _mapped(self, fd: int, payload_bytes: int) -> memoryview:
        try:
            return self._mappings.take(fd, payload_bytes)
        except bulk.BulkError as error:
            raise FrameError(f"the payload's memory is refused: {error}") from error

    def _streamed(self, payload_bytes: int) -> memoryview:
        payload = memoryview(bytearray(payload_bytes))
        self._receive_into(payload)
        return payload

    def _send_all(self, data: memoryview, fds: Sequence[int] = ()) -> None:
        while data.nbytes:
            try:
                sent = socket.send_fds(self._sock, [data], fds) if fds else self._sock.send(data)
            except BlockingIOError:
                self._wait(self._sock, True)
                continue
            except (BrokenPipeError, ConnectionResetError) as error:
                raise ChannelClosed("the other end of the channel is closed") from error
            data, fds = data[sent:], ()

    def _receive_into(self, view: memoryview, fds: list[int] | None = None, most: int = 0) -> None:
        """Fills `view`. Descriptors that come with the bytes, `most` at a time, are appended to `fds`; the kernel closes
        the others, and says so."""
        room = socket.CMSG_LEN(most * _INT_BYTES) if most else 0
        while view.nbytes:
            try:
                received, ancillary, flags, _ = self._sock.recvmsg_into([view], room, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                self._wait(self._sock, False)
                continue
            except ConnectionResetError as error:
                raise ChannelClosed("the other end of the channel is closed") from error
            for level, kind, data in ancillary:
                if fds is not None and (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds += array.array("i", data[: len(data) - len(data) % _INT_BYTES])
            if flags & socket.MSG_CTRUNC:
                raise FrameError("the message carries descriptors that nobody expects")
            if received == 0:
                raise ChannelClosed("the other end of the channel is closed")
            view = view[received:]


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each buffer starts in the payload."""
    return [0, *itertools.accumulate(map(_padded, sizes))][: len(sizes)]


def _padded(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")
