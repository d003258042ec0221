"""The first site's door: who knows the secret of the run is led to the meeting."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from heterodyne.errors import WorkerError
from heterodyne.runtime.rendezvous.gateway import Listener
from heterodyne.runtime.rendezvous.run_secret import HandshakeError, as_server
from heterodyne.runtime.rendezvous.store_port import listening_socket
from heterodyne.runtime.sites.frames import read_message, write_message
from heterodyne.runtime.sites.meeting import Meeting

__all__ = ["MeetingServer"]

_HANDSHAKE_S = 5.0
_STRANGERS = 64  # that are named, and connections at a time besides two of each site
_SENT_S = 60.0


class MeetingServer(Listener):
    """Carries the messages of sites to a meeting, and its answers back, one of each for a connection.

    Args:
        say: is informed once of each host that tried without the secret.

    ``traffic``: bytes that came and that went. Raises WorkerError where nobody can listen at that address.
    """

    def __init__(
        self, meeting: Meeting, address: tuple[str, int], *, secret: bytes, say: Callable[[str], None]
    ) -> None:
        self._meeting, self._secret, self._say = meeting, secret, say
        self._strangers: set[str] = set()
        self._open = 0
        self._idle = threading.Event()
        self._idle.set()
        self.came = self.went = 0
        self._most = 2 * meeting.sites + _STRANGERS
        self._threads = ThreadPoolExecutor(self._most, "heterodyne-meeting")
        host, port = address
        try:
            bound = listening_socket(host, port, one_machine=False, say=lambda _: None)
            bound = bound or socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            raise WorkerError(
                f"sites cannot meet at {host}:{port} ({error.strerror or error}): is another program at that port? Set another "
                "training.sync.at, the same for all sites"
            ) from error
        super().__init__(bound, "heterodyne-meeting")

    def close(self) -> None:
        """Let answers that are on their way arrive, and stop listening."""
        self._meeting.close()
        self._idle.wait(_SENT_S)
        super().close()
        self._threads.shutdown(wait=False)

    async def _served(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open >= self._most:
            return
        self._open += 1
        self._idle.clear()
        try:
            await self._answered(reader, writer)
        except (EOFError, OSError):
            pass  # the site tries again
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                _, key = await as_server(reader, writer, self._secret)
            message, came = await read_message(reader, key, "site")
        except HandshakeError:
            self._name(writer)
            return
        self.came += came
        answer = await self._loop.run_in_executor(self._threads, self._meeting.answer, message)
        self.went += await write_message(writer, answer, key, "meeting")

    def _name(self, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        host = "an unknown host" if peer is None else str(peer[0])
        if host not in self._strangers and len(self._strangers) < _STRANGERS:
            self._strangers.add(host)
            self._say(
                f"a connection from {host} did not show the secret of this run, and was closed; so will others be"
            )
