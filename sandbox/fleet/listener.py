"""The broker's TCP port for oracles on other hosts: who shows a token that is expected is let in, once, and nobody else."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket

from sandbox.logs import fields

log = logging.getLogger("sandbox.fleet")
TOKEN_BYTES = 32
HELLO_S = 10.0
"""So long a stranger may take to show its token."""
MAX_STRANGERS = 256
"""Most connections that may be about to show one."""
PROBE_AFTER_S, PROBE_EVERY_S, PROBES = 4, 2, 3
"""A connection over which nothing comes is probed after so long, so often, before it counts as broken."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def keep_alive(connection: socket.socket) -> None:
    """Has the kernel send small messages at once, and notice within 10 s that the host at the other end has gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    # Of what was sent and never acknowledged.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (PROBE_AFTER_S + PROBE_EVERY_S * PROBES))


class Listener:
    """A port, and the connections that are expected on it.

    Args:
      limit_bytes: longest line of a connection.
    """

    def __init__(self, limit_bytes: int):
        self._limit_bytes = limit_bytes
        self._expected: dict[bytes, asyncio.Future[Connection]] = {}
        self._server: asyncio.Server | None = None
        self._strangers = 0

    async def open(self, host: str) -> tuple[str, int]:
        """Listens on any free port of the address `host`; returns both. Raises OSError."""
        self._server = await asyncio.start_server(self._arrived, host, 0, limit=self._limit_bytes)
        return host, self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Lets nobody in any more; connections stay as they are."""
        if self._server is not None:
            self._server.close()

    def expect(self) -> tuple[str, asyncio.Future[Connection]]:
        """A new token, and the connection that will have shown it. Cancelling the future makes the token void."""
        token = secrets.token_hex(TOKEN_BYTES)
        key, arrival = _key(token.encode()), asyncio.get_running_loop().create_future()
        self._expected[key] = arrival
        arrival.add_done_callback(lambda _: self._expected.pop(key, None))
        return token, arrival

    async def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str(writer.get_extra_info("peername"))
        if self._strangers >= MAX_STRANGERS:
            return self._refuse(writer, peer, "too many connections without a token yet")
        self._strangers += 1
        try:
            line = await asyncio.wait_for(reader.readexactly(2 * TOKEN_BYTES + 1), HELLO_S)
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            return self._refuse(writer, peer, "it showed no token")
        finally:
            self._strangers -= 1
        arrival = self._expected.get(_key(line[:-1])) if line.endswith(b"\n") else None
        if arrival is None or arrival.done():
            return self._refuse(writer, peer, "its token is not expected")
        keep_alive(writer.get_extra_info("socket"))
        arrival.set_result((reader, writer))

    @staticmethod
    def _refuse(writer: asyncio.StreamWriter, peer: str, why: str) -> None:
        log.warning("a connection is refused: %s", why, extra=fields(peer=peer))
        writer.transport.abort()


def _key(token: bytes) -> bytes:
    """Tokens are found by their digest: how long that takes tells nothing about how much of a guess is right."""
    return hashlib.sha256(token).digest()
