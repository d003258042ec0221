"""The store of a run behind a door: only who knows the run's secret gets through to it.

torch's store has no password. So rank 0 keeps it at a `StorePort` and opens a `Gateway` where the workers meet, and each worker's client of
the store connects to a `Tunnel` of its own process, which goes through the gateway; that of rank 0, to its `StoreDoor`. Tunnels and doors
take connections of their own process only. The store itself and its clients are torch's: process groups may call them from threads that
must not run Python. The kernel keeps the connections of a worker
open as long as its process and its host exist, even if none of its threads runs: that tells a busy worker from a dead one.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from heterodyne.runtime.rendezvous.run_secret import HandshakeError, SilentError, as_client, as_server
from heterodyne.runtime.rendezvous.store_port import LOOPBACK, StorePort, is_own

__all__ = ["Gateway", "Listener", "StoreDoor", "Tunnel", "keep_alive"]

_DOOR = "127.0.0.2"  # on Linux, all of 127.0.0.0/8 is loopback
_HANDSHAKE_S = 5.0
_MOST_WAITING = 64  # connections that have not shown the secret
_AGAIN_S = 15.0  # in which a tunnel tries again: under a flood, a gateway may drop who knows the secret too
_MOST_NAMED = 8  # hosts of strangers that are named
_KEPT_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 15_000}
"""Options of a connection, as far as the system has them: it closes when the other host has not answered for about 15 s."""
_BLOCK = 2**16

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Entered = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
T = TypeVar("T")


class _Connection(asyncio.StreamReaderProtocol):
    """A stream that is in `kept` while its socket is open."""

    def __init__(self, kept: set[asyncio.BaseTransport], entered: Entered | None = None) -> None:
        self.reader = asyncio.StreamReader()
        super().__init__(self.reader, entered)
        self._kept = kept
        self._carrier: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._carrier = transport
        self._kept.add(transport)
        keep_alive(transport.get_extra_info("socket"))
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._carrier is not None:
            self._kept.discard(self._carrier)
        super().connection_lost(exc)


class Listener:
    """A socket that is served in a thread of its own until `close`."""

    def __init__(self, listening: socket.socket, name: str) -> None:
        self._listening = listening
        self._transports: set[asyncio.BaseTransport] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._server = self._run(self._serving())

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    def close(self) -> None:
        """Stop listening and end all connections."""
        if not self._loop.is_closed():
            self._run(self._ended())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError

    async def _serving(self) -> asyncio.Server:
        return await self._loop.create_server(
            lambda: _Connection(self._transports, self._entered), sock=self._listening
        )

    async def _connected(self, **where: Any) -> Streams:
        transport, protocol = await self._loop.create_connection(lambda: _Connection(self._transports), **where)
        return protocol.reader, asyncio.StreamWriter(transport, protocol, protocol.reader, self._loop)

    async def _entered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._served(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # either end is gone, or this one leaves, which the other one is told below
        finally:
            writer.close()

    async def _ended(self) -> None:
        self._server.close()
        # Connections end before the tasks that serve them: one that is cancelled before it began, or while it closes, leaves none open.
        while (tasks := asyncio.all_tasks() - {asyncio.current_task()}) or self._transports:
            for transport in list(self._transports):  # also with bytes that the other end does not take
                cast(asyncio.Transport, transport).abort()
            for task in tasks:  # a connection that is being accepted makes one more
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        done: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return done.result()


class Gateway(Listener):
    """Lets connections through to a store on loopback, if they show the run's secret; others are counted and closed.

    Args:
        listening: bound to where the workers meet.
        store: where the store is.
        say: is informed once of each host that tried without the secret.
    """

    def __init__(
        self, listening: socket.socket, *, secret: bytes, store: StorePort, say: Callable[[str], None]
    ) -> None:
        self._secret, self._store, self._say = secret, store, say
        self._waiting: dict[asyncio.StreamWriter, str] = {}
        self.strangers: Counter[str] = Counter()
        self._connections: Counter[int] = Counter()  # of each rank that was ever let in
        super().__init__(listening, "heterodyne-gateway")

    async def _served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._waiting[writer] = _host(writer)
        if len(self._waiting) > _MOST_WAITING:  # the oldest of the host that has the most
            most = Counter(self._waiting.values()).most_common(1)[0][0]
            next(one for one, host in self._waiting.items() if host == most).close()
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                rank, _ = await as_server(reader, writer, self._secret)
        except (HandshakeError, OSError, TimeoutError):
            self._count(_host(writer))
            return
        finally:
            del self._waiting[writer]
        self._connections[rank] += 1
        try:
            await _joined((reader, writer), await self._connected(sock=self._store.connect()))
        finally:
            self._connections[rank] -= 1

    def is_connected(self, rank: int) -> bool:
        """Return whether a connection of that rank's process is open."""
        return self._connections[rank] > 0

    def _count(self, host: str) -> None:
        self.strangers[host] += 1
        if self.strangers[host] == 1 and len(self.strangers) <= _MOST_NAMED:
            self._say(
                f"a connection from {host} did not show the secret of this run, and was closed; so will others be"
            )


class StoreDoor(Listener):
    """A port of loopback, of the same number as the store's, that leads this process to the store it keeps."""

    def __init__(self, store: StorePort) -> None:
        self._store = store
        bound = socket.socket()
        try:
            bound.bind((self.address, store.number))
        except BaseException:
            bound.close()
            raise
        super().__init__(bound, "heterodyne-store-door")

    address = _DOOR

    async def _served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if _is_own(writer):
            await _joined((reader, writer), await self._connected(sock=self._store.connect()))


class Tunnel(Listener):
    """A port of loopback that leads this process through the gateway of the run to its store."""

    def __init__(self, address: str, port: int, *, secret: bytes, rank: int) -> None:
        self._where, self._secret, self._rank = (address, port), secret, rank
        bound = socket.socket()
        bound.bind((LOOPBACK, 0))
        self._none_open = threading.Event()
        self._open = 0
        super().__init__(bound, "heterodyne-tunnel")

    def knock(self) -> None:
        """Show the secret at the gateway, once. Raises OSError where nobody listens, HandshakeError where it is not let in."""

        async def once() -> None:
            _, writer = await self._through()
            writer.close()

        self._run(once())

    async def _served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not _is_own(writer):
            return
        self._open += 1
        self._none_open.clear()
        try:
            until = time.monotonic() + _AGAIN_S
            while True:
                try:
                    through = await self._through()
                    break
                except HandshakeError:
                    if time.monotonic() > until:
                        return
            await _joined((reader, writer), through)
        finally:
            self._open -= 1
            if self._open == 0:
                self._none_open.set()

    @property
    def is_connected(self) -> bool:
        """Return whether a connection through the gateway is open."""
        return self._open > 0

    def wait_until_closed(self, seconds: float) -> bool:
        """Wait until no connection is left, at most that long. Returns whether none is."""
        return self._none_open.wait(seconds)

    async def _through(self) -> Streams:
        reader = None
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                reader, writer = await self._connected(host=self._where[0], port=self._where[1])
                try:
                    await as_client(reader, writer, self._secret, self._rank)
                except BaseException:
                    writer.close()
                    raise
        except TimeoutError:
            if reader is None:
                raise SilentError("its host is not up, or a firewall drops what is sent there") from None
            raise HandshakeError(f"what listens there does not answer within {_HANDSHAKE_S:.0f} s") from None
        return reader, writer


def keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEPT_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _host(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return "an unknown host" if peer is None else str(peer[0])


def _is_own(writer: asyncio.StreamWriter) -> bool:
    peer = writer.get_extra_info("peername")
    return peer is not None and is_own(peer, writer.get_extra_info("sockname"))


async def _joined(one: Streams, other: Streams) -> None:
    """Carry bytes both ways until either end closes."""
    ways: list[Awaitable[None]] = [_carried(one[0], other[1]), _carried(other[0], one[1])]
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        other[1].close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _carried(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while block := await reader.read(_BLOCK):
        writer.write(block)
        await writer.drain()
