"""Open the store through which the workers of a run meet, and keep it open while they train.

The store is torch's own. Rank 0 keeps it behind a `Gateway` at the master address. Where a launcher keeps a store there (torchrun does),
that one only says where the gateway is.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs do not declare it
from torch.distributed.distributed_c10d import PrefixStore, Store

from heterodyne.errors import WorkerError
from heterodyne.processes import to_standard_error
from heterodyne.runtime.liveness.signing import SignedStore
from heterodyne.runtime.rendezvous.environment import SECRET_VARIABLE, WorkerEnvironment
from heterodyne.runtime.rendezvous.gateway import Gateway, StoreDoor, Tunnel
from heterodyne.runtime.rendezvous.run_secret import HandshakeError, SecretError, SilentError, secret_of_user
from heterodyne.runtime.rendezvous.store_port import LOOPBACK, StorePort, is_loopback, listening_socket
from heterodyne.runtime.rendezvous.waiting import WAITING_EVERY_S, Waiting

__all__ = ["RunStore", "kept_store", "open_store"]

_POLL_S = 0.1
_STORE_TIMEOUT_S = 30.0  # of one request
_ANSWER_S = 10.0  # in which a store answers a client
_RESOLVED_S = 5.0  # in which a name service answers
_FAREWELL_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RunStore:
    """The store of one meeting of the workers.

    Args:
        store: torch's, with keys of this meeting only.
        key: signs what is of this meeting.
        tunnel: the way to the store, where it is behind a gateway of another process; ``gateway``: that of this process.
    """

    store: Store
    key: bytes
    tunnel: Tunnel | None
    gateway: Gateway | None

    def signed(self, *, timeout_s: float) -> SignedStore:
        """A connection of its own that writes and believes only signed entries. One request takes at most ``timeout_s``."""
        return SignedStore(self.store, self.key, timeout_s=timeout_s)

    def is_connected(self, rank: int) -> bool:
        """Return whether the process of a rank is connected with the store, as far as is seen here: rank 0 sees all, others rank 0."""
        if self.gateway is not None:
            return self.gateway.is_connected(rank)
        return rank != 0 or self.tunnel is None or self.tunnel.is_connected

    def wait_until_closed(self) -> None:
        """Wait until rank 0 has closed its gateway, so that a next meeting is not taken for this one; at most half a minute."""
        if self.tunnel is not None:
            self.tunnel.wait_until_closed(_FAREWELL_S)


@contextmanager
def open_store(
    environment: WorkerEnvironment,
    *,
    timeout_s: float,
    say: Callable[[str], None] = to_standard_error,
    every_s: float = WAITING_EVERY_S,
) -> Iterator[RunStore]:
    """A connection to the store of the run while the block runs.

    Args:
        say: is informed every ``every_s`` seconds who is waited for, on one rank of each machine; and on rank 0 of hosts that were
            turned away.

    Raises:
        WorkerError: the address does not resolve, there is no store within the time, it belongs to a run with another secret, rank 0
            cannot open it, or there is no secret.
    """
    _require_resolved(environment, min(timeout_s, _RESOLVED_S))
    waiting = Waiting(timeout_s, every_s=every_s, say=say if environment.local_rank == 0 else None)
    with ExitStack() as stack:
        opening = _Opening(environment, waiting, say, stack)
        try:
            found = opening.behind_gateway()
        except (RuntimeError, OSError) as error:
            raise WorkerError(
                f"rank {environment.rank} on {socket.gethostname()} cannot use {opening.where} as the meeting point: "
                f"{str(error).splitlines()[0]}; is another program at that port? Set another MASTER_PORT",
                rank=environment.rank,
            ) from error
        yield found


@contextmanager
def kept_store(timeout: timedelta) -> Iterator[tuple[TCPStore, StorePort]]:
    """A store that this process keeps and uses, and where others are let in. Raises OSError and RuntimeError."""
    with closing(StorePort()) as port, closing(StoreDoor(port)) if port.guarded else nullcontext() as door:
        store = TCPStore(
            LOOPBACK if door is None else door.address,
            port.number,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=port.descriptor(),  # the store closes it
        )
        yield store, port


class _Opening:
    """The ways to a store, each of which raises RuntimeError, OSError or WorkerError. ``where``: the address that is tried."""

    def __init__(
        self, environment: WorkerEnvironment, waiting: Waiting, say: Callable[[str], None], stack: ExitStack
    ) -> None:
        self._environment, self._waiting, self._say, self._stack = environment, waiting, say, stack
        self._address, self._port = environment.master_address, environment.master_port
        self._secret = (environment.secret or secret_of_user()).encode()
        self._timeout = timedelta(seconds=max(1.0, min(waiting.most_s, _STORE_TIMEOUT_S)))
        self._gateway: Gateway | None = None

    @property
    def where(self) -> str:
        return f"{self._address}:{self._port}"

    def behind_gateway(self) -> RunStore:
        """torch's store, which rank 0 keeps behind a gateway. A second rank 0 comes as a client, and `meet` names it."""
        if not self._environment.store_is_hosted:
            return self._through_tunnel(keep=self._guarded if self._environment.rank == 0 else None)
        # The launcher's store is open to anybody: it only says where the gateway is, signed.
        while not self._answers():
            self._wait(f"at {self.where}, where nobody listens yet")
        board = self.of_this_meeting(self._client(self._address, self._port)).signed(timeout_s=_STORE_TIMEOUT_S)
        if self._environment.rank == 0:
            self._address, self._port = _own_address(self._environment), 0
            store = self._guarded()
            board.set("gateway", self.where)
            return self.of_this_meeting(store)
        forged_at = None
        while (gateway := board.get("gateway")) is None:
            forged_at = forged_at or (time.monotonic() if board.forged else None)
            if forged_at is not None and time.monotonic() - forged_at > _ANSWER_S:
                raise _refused(self._environment, self.where, SecretError("the way from there has another secret"))
            self._wait("to tell its address")
        self._address, _, port = gateway.rpartition(":")
        self._port = int(port)
        return self._through_tunnel()

    def of_this_meeting(self, store: Store, tunnel: Tunnel | None = None) -> RunStore:
        """With keys that no other attempt of the run and no other trainer of these processes has."""
        environment = self._environment
        ours = PrefixStore(f"heterodyne/{environment.attempt}", store)
        times = str(ours.add(f"times/{environment.rank}/{socket.gethostname()}/{os.getpid()}", 1))
        store = PrefixStore(times, ours)
        # What was signed in another meeting, of this run or of another one with the same secret, is not believed in this one.
        meeting = store.compare_set("meeting", "", secrets.token_hex(16))
        key = hmac.digest(self._secret, f"{environment.attempt}/{times}/".encode() + meeting, "sha256")
        return RunStore(store=store, key=key, tunnel=tunnel, gateway=self._gateway)

    def _guarded(self) -> TCPStore:
        one_machine = self._environment.local_world_size == self._environment.world_size
        bound = listening_socket(self._address, self._port, one_machine=one_machine, say=self._say)
        bound = bound or socket.create_server(("", self._port), family=socket.AF_INET6, dualstack_ipv6=True)
        try:
            store, port = self._stack.enter_context(kept_store(self._timeout))
            if not port.guarded:
                self._say(
                    "this system cannot close the store's port to other programs of this machine, so they can end or stall the run"
                )
        except BaseException:
            bound.close()
            raise
        self._gateway = Gateway(bound, secret=self._secret, store=port, say=self._say)
        self._stack.enter_context(closing(self._gateway))
        self._port = self._gateway.port
        return store

    def _through_tunnel(self, *, keep: Callable[[], TCPStore] | None = None) -> RunStore:
        """By the gateway at the address; ``keep`` opens it where nobody has yet."""
        tunnel = Tunnel(self._address, self._port, secret=self._secret, rank=self._environment.rank)
        self._stack.enter_context(closing(tunnel))
        refused_at: float | None = None
        while True:
            try:
                tunnel.knock()
                return self.of_this_meeting(self._client(LOOPBACK, tunnel.port), tunnel)
            except SilentError as error:
                self._wait(f"at {self.where}, where nothing answers: {error}")
            except HandshakeError as error:
                # Another run may be about to leave the port, and a gateway under a flood may not have answered.
                refused_at = refused_at or time.monotonic()
                if time.monotonic() - refused_at > _ANSWER_S:
                    raise _refused(self._environment, self.where, error) from error
                self._wait(f"at {self.where}, which does not let it in ({error})")
            except OSError:
                if keep is not None:
                    try:
                        return self.of_this_meeting(keep())
                    except OSError as error:
                        if error.errno != errno.EADDRINUSE:
                            raise
                self._wait(f"at {self.where}, where nobody listens yet")

    def _client(self, address: str, port: int) -> TCPStore:
        def connect() -> TCPStore:
            return TCPStore(address, port, is_master=False, timeout=self._timeout, wait_for_workers=False)

        return _within(_ANSWER_S, connect)

    def _wait(self, words: str) -> None:
        """A moment. Raises WorkerError when the time is over."""
        rank = self._environment.rank
        if self._waiting.is_over(f"rank {rank} waits for rank 0 {words}"):
            raise WorkerError(
                f"rank {rank} on {socket.gethostname()} found nobody at MASTER_ADDR:MASTER_PORT "
                f"{self.where} for {self._waiting.most_s:.0f} s: rank 0 never came, or the address or a firewall is wrong",
                rank=0,
            ) from None
        time.sleep(_POLL_S)

    def _answers(self) -> bool:
        """Return whether anybody listens there. Asked apart from torch, whose client fills the terminal while it waits."""
        with suppress(OSError), socket.create_connection((self._address, self._port), timeout=5.0):
            return True
        return False


def _refused(environment: WorkerEnvironment, where: str, error: HandshakeError) -> Exception:
    if not isinstance(error, SecretError):
        return RuntimeError(str(error))
    mixed = (
        f"the workers of this run were given different values of {SECRET_VARIABLE}"
        if environment.secret
        else f"this worker has no {SECRET_VARIABLE}, so it took the secret of its user on this machine, and rank 0 has another one: set "
        "the variable to the same value for all workers"
    )
    return WorkerError(
        f"rank {environment.rank} on {socket.gethostname()} is not let in at {where}: {error}. Either {mixed}, or another run is at that "
        "port: set another MASTER_PORT",
        rank=environment.rank,
    )


def _own_address(environment: WorkerEnvironment) -> str:
    """The address of this machine by which it reaches the master address; that one itself if all workers are here."""
    address, port = environment.master_address, environment.master_port
    if environment.local_world_size == environment.world_size:
        return address
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)  # which sends nothing
        own = str(probe.getsockname()[0])
    return address if is_loopback(own) else own


def _require_resolved(environment: WorkerEnvironment, patience_s: float) -> None:
    """Raises WorkerError for an address that no name service knows. A service that just starts has a moment."""
    until = time.monotonic() + patience_s
    while True:
        try:
            socket.getaddrinfo(environment.master_address, environment.master_port)
            return
        except (OSError, UnicodeError) as error:  # the latter for labels that no name can have
            if time.monotonic() > until:
                raise WorkerError(
                    f"MASTER_ADDR={environment.master_address!r} does not resolve on {socket.gethostname()} ({error}): set it to the name "
                    "or the address of the machine of rank 0",
                    rank=environment.rank,
                ) from error
        time.sleep(_POLL_S)


def _within(seconds: float, make: Callable[[], TCPStore]) -> TCPStore:
    """Return what it makes. Raises RuntimeError if that takes longer: before a program that is no store, torch's client waits forever."""
    made: Future[TCPStore] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:  # noqa: BLE001  # it is raised where the result is asked for
            made.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return made.result(seconds)
    except TimeoutError:
        raise RuntimeError(f"what listens there does not answer as a store of torch within {seconds:.0f} s") from None
