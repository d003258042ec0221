"""The workers meet: each claims its rank in a store, and all wait until nobody is missing.

The store is torch's own, kept by rank 0 (or by the launcher, which torchrun does). A rank that two workers claim, and a
rank that nobody claims, are told with names instead of a hanging start.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs do not declare it
from torch.distributed.distributed_c10d import PrefixStore, Store

from heterodyne.errors import WorkerError
from heterodyne.processes import to_standard_error
from heterodyne.runtime.meeting.environment import WorkerEnvironment
from heterodyne.runtime.meeting.judge import Verdict
from heterodyne.runtime.meeting.listening import listening_socket
from heterodyne.runtime.meeting.members import Member
from heterodyne.runtime.meeting.waiting import WAITING_EVERY_S, Waiting

__all__ = ["meet", "open_store"]

_POLL_S = 0.1
_STORE_TIMEOUT_S = 30.0  # of one request
_ANSWER_S = 10.0  # in which a store answers a client
_RESOLVED_S = 5.0  # in which a name service answers
_CONFLICT = "conflict"


def open_store(
    environment: WorkerEnvironment,
    *,
    timeout_s: float,
    say: Callable[[str], None] = to_standard_error,
    every_s: float = WAITING_EVERY_S,
) -> Store:
    """A connection to the store at the master address; rank 0 opens the store, unless the launcher keeps it.

    Args:
        say: is told every ``every_s`` seconds who is waited for, on one rank of each machine.

    Raises:
        WorkerError: the address does not resolve, there is no store within the time, or rank 0 cannot open it.
    """
    address, port = environment.master_address, environment.master_port
    keeps_it = environment.rank == 0 and not environment.store_is_hosted
    waiting = Waiting(timeout_s, every_s=every_s, say=say if environment.local_rank == 0 else None)
    _require_resolved(environment, min(timeout_s, _RESOLVED_S))
    if keeps_it and _answers(address, port):
        # Either a second rank 0, which `meet` will name, or a program that is not ours.
        keeps_it = False
    while not keeps_it and not _answers(address, port):
        if waiting.is_over(f"rank {environment.rank} waits for rank 0 at {address}:{port}, where nobody listens yet"):
            raise WorkerError(
                f"rank {environment.rank} on {socket.gethostname()} found nobody at MASTER_ADDR:MASTER_PORT "
                f"{address}:{port} for {timeout_s:.0f} s: rank 0 never came, or the address or a firewall is wrong",
                rank=0,
            )
        time.sleep(_POLL_S)
    try:
        store = _connect(environment, keeps_it=keeps_it, timeout_s=timeout_s, say=say)
    except (RuntimeError, OSError) as error:
        raise WorkerError(
            f"rank {environment.rank} on {socket.gethostname()} cannot use {address}:{port} as the meeting point: "
            f"{str(error).splitlines()[0]}; is another program at that port? Set another MASTER_PORT",
            rank=environment.rank,
        ) from error
    ours = PrefixStore(f"heterodyne/{environment.attempt}", store)
    # torchrun's store outlives a trainer: the next one of these processes must not read what this one has left there.
    times = ours.add(f"times/{environment.rank}/{socket.gethostname()}/{os.getpid()}", 1)
    return PrefixStore(str(times), ours)


def _connect(
    environment: WorkerEnvironment, *, keeps_it: bool, timeout_s: float, say: Callable[[str], None]
) -> TCPStore:
    """Raises RuntimeError or OSError."""
    address, port = environment.master_address, environment.master_port
    timeout = timedelta(seconds=max(1.0, min(timeout_s, _STORE_TIMEOUT_S)))

    def connect() -> TCPStore:
        bound = None
        if keeps_it:
            one_machine = environment.local_world_size == environment.world_size
            bound = listening_socket(address, port, one_machine=one_machine, say=say)
        return TCPStore(
            address,
            port,
            environment.world_size,
            is_master=keeps_it,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=None if bound is None else bound.detach(),  # the store closes it
        )

    try:
        return connect() if keeps_it else _within(_ANSWER_S, connect)
    except (RuntimeError, OSError):
        if keeps_it and _answers(address, port):  # another rank 0 was faster by a moment
            return _connect(environment, keeps_it=False, timeout_s=timeout_s, say=say)
        raise


def meet(
    store: Store,
    environment: WorkerEnvironment,
    *,
    timeout_s: float,
    linger_s: float = 2.0,
    say: Callable[[str], None] = to_standard_error,
    every_s: float = WAITING_EVERY_S,
) -> tuple[Member, ...]:
    """Claim this worker's rank and wait for the others. Returns all workers in order of rank.

    Args:
        say: is told every ``every_s`` seconds who is waited for, on rank 0.
        linger_s: how long the worker that keeps the store stays after a failed start, to let the others read why.

    Raises:
        WorkerError: the rank is claimed already, or ranks are missing when the time is over; every worker that waits
            raises it.
    """
    me = Member.myself(environment.rank)
    holder = Member.load(store.compare_set(f"rank/{me.rank}", "", me.dump()))
    if holder != me:
        text = f"rank {me.rank} is claimed twice: by {holder} and by {me}; give each worker its own RANK"
        store.compare_set(_CONFLICT, "", Verdict(rank=me.rank, host=me.host, text=text).dump())
        raise WorkerError(text, rank=me.rank, host=me.host)
    try:
        return _wait_for_all(store, environment, Waiting(timeout_s, every_s=every_s, say=say if me.rank == 0 else None))
    except WorkerError:
        if me.rank == 0 and not environment.store_is_hosted:
            time.sleep(linger_s)
        raise


def _wait_for_all(store: Store, environment: WorkerEnvironment, waiting: Waiting) -> tuple[Member, ...]:
    """Raises WorkerError."""
    missing = list(range(environment.world_size))
    try:
        while True:
            if store.check([_CONFLICT]):
                verdict = Verdict.load(store.get(_CONFLICT))
                raise WorkerError(verdict.text, rank=verdict.rank, host=verdict.host)
            missing = [rank for rank in missing if not store.check([f"rank/{rank}"])]
            if not missing:
                return tuple(Member.load(store.get(f"rank/{rank}")) for rank in range(environment.world_size))
            if waiting.is_over(f"waiting for {_ranks(missing)} of {environment.world_size} to start"):
                store.compare_set(_CONFLICT, "", _never_came(missing, environment.world_size, waiting.most_s).dump())
            time.sleep(_POLL_S)
    except WorkerError:
        raise
    except (RuntimeError, ValueError) as error:  # what torch raises for a connection that is gone
        raise WorkerError(
            f"rank 0 at {environment.master_address}:{environment.master_port} went away while the workers were "
            f"still meeting: {str(error).splitlines()[0]}",
            rank=0,
        ) from error


def _never_came(missing: Sequence[int], world_size: int, timeout_s: float) -> Verdict:
    text = (
        f"{_ranks(missing)} of {world_size} never came within {timeout_s:.0f} s: "
        "start one worker for each rank, and see the logs of those that are missing"
    )
    return Verdict(rank=missing[0], host=None, text=text)


def _ranks(numbers: Sequence[int]) -> str:
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"


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
    """What it makes. Raises RuntimeError if that takes longer: before a program that is no store, torch's client waits for ever."""
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


def _answers(address: str, port: int) -> bool:
    """Whether anybody listens there. Asked apart from torch, whose client fills the terminal while it waits."""
    try:
        with socket.create_connection((address, port), timeout=5.0):
            return True
    except OSError:
        return False
