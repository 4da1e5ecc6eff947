"""Length-prefixed messages between a trusted oracle and an untrusted runner: JSON header, then raw
buffers. No pickle.

    magic "DKF1" | header bytes (u32) | payload bytes (u64) | header (JSON) | payload

The header names the sizes of its buffers; each buffer starts on a 64-byte boundary of the payload. Both
ends quote a nonce that is drawn for each runner and a counter, so that a stray writer on the channel is
noticed. The receiver states how much it is willing to take before it allocates anything.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MAGIC = b"DKF1"
PREFIX = struct.Struct("!4sIQ")
MAX_HEADER_BYTES = 4 << 20
ALIGN_BYTES = 64
SOCKET_BUFFER_BYTES = 4 << 20

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
      max_fds: descriptors taken from the peer with a message; the trusted end takes none (the kernel closes
        them).
    """

    def __init__(self, sock: socket.socket, nonce: str, wait: Wait | None = None, max_fds: int = 0):
        self._sock, self._nonce, self._wait, self._max_fds = sock, nonce, wait, max_fds
        self._sequence = 0
        sock.setblocking(wait is None)

    def close(self) -> None:
        self._sock.close()

    def send(
        self, header: dict[str, Any], buffers: Sequence[memoryview] = (), fds: Sequence[int] = ()
    ) -> None:
        """Sends one message with copies of descriptors `fds`. Raises ChannelClosed when the peer has gone."""
        sizes = [buffer.nbytes for buffer in buffers]
        payload_bytes = sum(_padded(size) for size in sizes)
        envelope = {**header, "nonce": self._nonce, "sequence": self._sequence, "sizes": sizes}
        text = json.dumps(envelope).encode()
        if len(text) > MAX_HEADER_BYTES:
            raise FrameError(f"header of {len(text)} bytes exceeds {MAX_HEADER_BYTES}")
        self._sequence += 1
        parts = [memoryview(PREFIX.pack(MAGIC, len(text), payload_bytes) + text)]
        for buffer, size in zip(buffers, sizes, strict=True):
            parts.append(buffer.cast("B") if size else memoryview(b""))
            parts.append(memoryview(bytes(_padded(size) - size)))
        for part in parts:
            self._send_all(part, fds)
            fds = ()

    def receive(self, max_payload_bytes: int) -> Message:
        """Receives one message.

        Raises:
          ChannelClosed: the peer has gone.
          FrameError: the message breaks the protocol or is larger than `max_payload_bytes`.
        """
        fds: list[int] = []
        magic, header_bytes, payload_bytes = PREFIX.unpack(self._receive_exactly(PREFIX.size, fds))
        if magic != MAGIC or header_bytes > MAX_HEADER_BYTES:
            raise FrameError("the channel carries something that is not a message")
        if payload_bytes > max_payload_bytes:
            raise FrameError(
                f"message of {payload_bytes} bytes where at most {max_payload_bytes} are expected"
            )
        try:
            header = json.loads(bytes(self._receive_exactly(header_bytes)))
        except ValueError as error:
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
        self._sequence += 1
        payload = memoryview(self._receive_exactly(payload_bytes))
        buffers, offset = [], 0
        for size in sizes:
            buffers.append(payload[offset : offset + size])
            offset += _padded(size)
        return Message(header, buffers, fds)

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

    def _receive_exactly(self, size: int, fds: list[int] | None = None) -> bytearray:
        """Descriptors that come with the bytes are appended to `fds`, where this end takes any."""
        data = bytearray(size)
        view = memoryview(data)
        while view.nbytes:
            try:
                if fds is not None and self._max_fds:
                    got, new, _, _ = socket.recv_fds(self._sock, view.nbytes, self._max_fds)
                    view[: len(got)], received = got, len(got)
                    fds += new
                else:
                    received = self._sock.recv_into(view)
            except BlockingIOError:
                self._wait(self._sock, False)
                continue
            except ConnectionResetError as error:
                raise ChannelClosed("the other end of the channel is closed") from error
            if received == 0:
                raise ChannelClosed("the other end of the channel is closed")
            view = view[received:]
        return data


def _padded(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
