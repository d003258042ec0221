"""The frame around a worker's life: _meet, watch, connect, and leave in good order or say who is at fault."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from heterodyne.errors import OutOfMemoryError, WorkerError
from heterodyne.processes import to_standard_error
from heterodyne.runtime.liveness.failure_detector import Failure, WatchLimits
from heterodyne.runtime.liveness.members import Member
from heterodyne.runtime.liveness.signing import SignedStore
from heterodyne.runtime.liveness.watchdog import Watchdog
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from heterodyne.runtime.rendezvous.file_handles import TOO_MANY_OPEN, require_file_handles
from heterodyne.runtime.rendezvous.interfaces import listening, require_interfaces, require_reachable
from heterodyne.runtime.rendezvous.software import REQUIRED, software, unlike
from heterodyne.runtime.rendezvous.store import RunStore, open_store
from heterodyne.runtime.rendezvous.waiting import Waiting

__all__ = ["WorkerSession", "blamed", "init_distributed"]

_COLLECTIVE_TIMEOUT = timedelta(hours=24)  # the watchdog is the one who gives up, and knows on whom
_DESTROY_S = 5.0
_STORE_S = 3600.0  # of one request: the detector is the one who gives up, and knows how busy the machine is
_FAREWELL_S = 30.0
_BROKE_OFF = threading.Event()  # a meeting of this process has ended by an error
_NETWORK_WORDS = ("gloo", "nccl", "connection", "socket", "timed out", "timeout", "broken pipe", "c10d")


class _WentAwayError(WorkerError):
    """Rank 0 has left before all had met."""


@dataclass(frozen=True, kw_only=True)
class WorkerSession:
    """What a worker has while it is connected: who it is, who the others are, the store, the watchdog, and what signs `Objects`."""

    environment: WorkerEnvironment
    members: tuple[Member, ...]
    store: Store
    watchdog: Watchdog
    key: bytes = field(repr=False)


@contextmanager
def init_distributed(
    environment: WorkerEnvironment,
    *,
    backend: str,
    device_id: torch.device | None = None,
    timeout_s: float = 300.0,
    limits: WatchLimits | None = None,
    required: Collection[str] = REQUIRED,
) -> Iterator[WorkerSession]:
    """Connect this worker with the others while the block runs, under a watchdog.

    The default process group of torch is up inside. If the block fails because a peer is gone, the error that leaves it
    is a WorkerError about that peer; the rest leaves as it is.

    Args:
        backend: as torch names it: ``gloo``, ``nccl``, ``cpu:gloo,cuda:nccl``.
        device_id: binds NCCL to this rank's device.
        timeout_s: how long to wait for ranks that have not come.
        required: the software of which all ranks must have one version.

    Raises:
        WorkerError: a rank came twice or never, expects another number of ranks or has other software, hosts do not reach each
            other, a peer died or hangs, or this process may open too few files.
    """
    if dist.is_initialized():
        raise WorkerError(
            "torch's default process group is in use in this process: by another trainer that is still open, or by a call of "
            "torch.distributed.init_process_group. Heterodyne makes it: leave that call out, and close one trainer (or leave its 'with') "
            "before the next one is made"
        )
    require_file_handles(environment.world_size, to_standard_error if environment.rank == 0 else lambda _: None)
    limits = limits or WatchLimits()
    with _met(environment, required, limits, timeout_s) as (run_store, signed, me, members):
        store = run_store.store
        with Watchdog(
            signed,
            rank=environment.rank,
            members=members,
            limits=limits,
            is_connected=run_store.is_connected,
        ) as watchdog:
            try:
                require_interfaces(me)
                require_reachable(signed, members, me)
                dist.init_process_group(
                    backend,
                    store=PrefixStore("process_group", store),
                    rank=environment.rank,
                    world_size=environment.world_size,
                    timeout=_COLLECTIVE_TIMEOUT,
                    device_id=device_id,
                )
                key = hmac.digest(run_store.key, b"objects", "sha256")
                yield WorkerSession(environment=environment, members=members, store=store, watchdog=watchdog, key=key)
            except BaseException as error:
                _BROKE_OFF.set()
                if not _is_of_the_network(error):
                    # First: the calls of the others fail as soon as this one's connections close, and a backend may end them.
                    watchdog.tell(error)
                _destroy_in_bounded_time()
                if isinstance(error, RuntimeError | WorkerError) and "Too many open files" in str(error):
                    raise WorkerError(
                        f"rank {environment.rank} cannot open another connection: {TOO_MANY_OPEN}",
                        rank=environment.rank,
                    ) from error
                with blamed(watchdog):
                    raise
        dist.destroy_process_group()
        if environment.world_size > 1:
            _farewell(run_store, environment, members)


@contextmanager
def _met(
    environment: WorkerEnvironment, required: Collection[str], limits: WatchLimits, timeout_s: float
) -> Iterator[tuple[RunStore, SignedStore, Member, tuple[Member, ...]]]:
    """All workers have met while the block runs. A script that goes on behind an error may come to the store of the meeting that broke
    off, just before rank 0 closes it: it comes again then. Raises WorkerError."""
    until = time.monotonic() + timeout_s
    while True:
        left_s = max(1.0, until - time.monotonic())
        with open_store(environment, timeout_s=left_s) as run_store, listening() as listens:
            signed = run_store.signed(timeout_s=_STORE_S)
            me = Member.myself(
                environment.rank, world_size=environment.world_size, listens=listens, software=software()
            )
            try:
                members = _meet(signed, me, environment, required, timeout_s=left_s, linger_s=limits.publish_s)
            except _WentAwayError:
                if environment.rank == 0 or not _BROKE_OFF.is_set() or time.monotonic() > until:
                    raise
                continue
            yield run_store, signed, me, members
            return


@contextmanager
def blamed(watchdog: Watchdog) -> Iterator[None]:
    """An error of the network that leaves the block becomes a WorkerError about the worker that is the cause of it."""
    try:
        yield
    except (RuntimeError, WorkerError) as error:
        if _is_of_the_network(error) and (culprit := watchdog.blame()) is not None:
            raise culprit from error
        raise


def _is_of_the_network(error: BaseException) -> bool:
    """Collectives fail with subclasses of RuntimeError or, in gloo, with a plain one that only its text tells apart; process groups make a
    WorkerError of it that names nobody.
    """
    if isinstance(error, WorkerError):
        return error.rank is None and not isinstance(error, OutOfMemoryError)
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(word in text for word in _NETWORK_WORDS)


def _destroy_in_bounded_time() -> None:
    """Close the connections, so that the peers notice; a collective that still runs must not keep us from leaving."""
    if dist.is_initialized():
        thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
        thread.start()
        thread.join(_DESTROY_S)


def _farewell(run_store: RunStore, environment: WorkerEnvironment, members: tuple[Member, ...]) -> None:
    """Rank 0 takes the store with it, so it leaves last; the others wait until it has closed its gateway."""
    store = run_store.store
    store.set(f"farewell/{environment.rank}", "")
    if environment.rank != 0:
        run_store.wait_until_closed()
        return
    missing = [member for member in members if member.rank != 0]
    until = time.monotonic() + _FAREWELL_S
    while missing and time.monotonic() < until:
        missing = [
            member
            for member in missing
            if not store.check([f"farewell/{member.rank}"])
            and (member.machine != members[0].machine or member.process_status() is not None)
        ]
        time.sleep(0.02)


# The workers meet: each claims its rank in the store of the run, and all wait until nobody is missing.
#
# A rank that two workers claim, and a rank that nobody claims, are told with names instead of a hanging start.
_POLL_S = 0.1
_CONFLICT = "conflict"
_MOST_NAMED = 8


def _meet(
    store: SignedStore,
    me: Member,
    environment: WorkerEnvironment,
    required: Collection[str],
    *,
    timeout_s: float,
    linger_s: float = 2.0,
) -> tuple[Member, ...]:
    """Claim this worker's rank and wait for the others; rank 0 tells who is waited for. Returns all workers in order of rank.

    Args:
        linger_s: how long the worker that keeps the store stays after a failed start, to let the others read why.

    Raises:
        WorkerError: the rank is claimed already, ranks are missing when the time is over, or are not alike; every worker that waits
            raises it.
    """
    holder = Member.load(store.set_first(f"rank/{me.rank}", me.dump()))
    if holder != me:
        text = (
            f"rank {me.rank} is claimed twice: by {holder} and by {me}; give each worker its own RANK (torchrun: each host its own "
            "--node-rank)"
        )
        store.set_first(_CONFLICT, Failure(rank=me.rank, host=me.host, text=text).dump())
        raise WorkerError(text, rank=me.rank, host=me.host)
    try:
        waiting = Waiting(timeout_s, say=to_standard_error if me.rank == 0 else None)
        return _wait_for_all(store, me, environment, required, waiting)
    except WorkerError:
        if me.rank == 0:
            time.sleep(linger_s)
        raise


def _wait_for_all(
    store: SignedStore, me: Member, environment: WorkerEnvironment, required: Collection[str], waiting: Waiting
) -> tuple[Member, ...]:
    """Raises WorkerError."""
    missing = list(range(environment.world_size))
    try:
        while True:
            if (conflict := store.get(_CONFLICT)) is not None:
                failure = Failure.load(conflict)
                raise WorkerError(failure.text, rank=failure.rank, host=failure.host)
            entries = store.get_all([f"rank/{rank}" for rank in range(environment.world_size)])
            members = tuple(Member.load(entry) for entry in entries if entry is not None)
            if (contradiction := next(_contradictions(me, members, required), None)) is not None:
                store.set_first(_CONFLICT, contradiction.dump())
                continue
            missing = [rank for rank, entry in enumerate(entries) if entry is None]
            if not missing:
                return members
            if waiting.is_over(f"waiting for {_ranks(missing)} of {environment.world_size} to start; {_here(members)}"):
                store.set_first(_CONFLICT, _never_came(missing, members, environment, waiting.most_s).dump())
            time.sleep(_POLL_S)
    except WorkerError:
        raise
    except (RuntimeError, ValueError) as error:  # what torch raises for a connection that is gone
        raise _WentAwayError(
            f"rank 0 at {environment.master_address}:{environment.master_port} went away while the workers were "
            f"still meeting: {str(error).splitlines()[0]}",
            rank=0,
        ) from error


def _contradictions(me: Member, members: Sequence[Member], required: Collection[str]) -> Iterator[Failure]:
    """Yield what other members have that cannot be if all are to train one model."""
    for other in members:
        rank, host = max((me.rank, me.host), (other.rank, other.host))
        for name, version, of_other in unlike(me.software, other.software):
            if name in required:
                text = (
                    f"{me} has {name} {version}, and {other} has {of_other}: install one state of {name} on both hosts, or they would "
                    "compute different things"
                )
                yield Failure(rank=rank, host=host, text=text)
        if other.world_size != me.world_size:
            text = (
                f"{me} expects {me.world_size} workers, and {other} expects {other.world_size}: give all the same WORLD_SIZE (torchrun: "
                "the same --nnodes, and each host the number of its own devices as --nproc-per-node)"
            )
            yield Failure(rank=rank, host=host, text=text)


def _never_came(
    missing: Sequence[int], members: Sequence[Member], environment: WorkerEnvironment, timeout_s: float
) -> Failure:
    text = (
        f"{_ranks(missing)} of {environment.world_size} never came within {timeout_s:.0f} s ({_here(members)}): start one worker for each "
        f"rank, and see the logs of those that are missing, and whether their hosts reach {environment.master_address} at port "
        f"{environment.master_port}"
    )
    return Failure(rank=missing[0], host=None, text=text)


def _here(members: Sequence[Member]) -> str:
    """Return which hosts have come, with their ranks."""
    hosts: dict[str, list[int]] = {}
    for member in members:
        hosts.setdefault(member.host, []).append(member.rank)
    told = [f"{_ranks(ranks[:_MOST_NAMED])} on {host}" for host, ranks in hosts.items()]
    return f"here are {', '.join(told[:_MOST_NAMED])}{', ...' if len(told) > _MOST_NAMED else ''}"


def _ranks(numbers: Sequence[int]) -> str:
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"
