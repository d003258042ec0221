"""The workers meet: each claims its rank in the store of the run, and all wait until nobody is missing.

A rank that two workers claim, and a rank that nobody claims, are told with names instead of a hanging start.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from heterodyne.errors import WorkerError
from heterodyne.processes import to_standard_error
from heterodyne.runtime.liveness.failure_detector import Failure
from heterodyne.runtime.liveness.members import Member
from heterodyne.runtime.liveness.signing import SignedStore
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from heterodyne.runtime.rendezvous.waiting import Waiting

__all__ = ["meet"]

_POLL_S = 0.1
_CONFLICT = "conflict"


def meet(
    store: SignedStore,
    environment: WorkerEnvironment,
    *,
    timeout_s: float,
    linger_s: float = 2.0,
) -> tuple[Member, ...]:
    """Claim this worker's rank and wait for the others; rank 0 tells who is waited for. Returns all workers in order of rank.

    Args:
        linger_s: how long the worker that keeps the store stays after a failed start, to let the others read why.

    Raises:
        WorkerError: the rank is claimed already, or ranks are missing when the time is over; every worker that waits
            raises it.
    """
    me = Member.myself(environment.rank)
    holder = Member.load(store.set_first(f"rank/{me.rank}", me.dump()))
    if holder != me:
        text = f"rank {me.rank} is claimed twice: by {holder} and by {me}; give each worker its own RANK"
        store.set_first(_CONFLICT, Failure(rank=me.rank, host=me.host, text=text).dump())
        raise WorkerError(text, rank=me.rank, host=me.host)
    try:
        return _wait_for_all(store, environment, Waiting(timeout_s, say=to_standard_error if me.rank == 0 else None))
    except WorkerError:
        if me.rank == 0:
            time.sleep(linger_s)
        raise


def _wait_for_all(store: SignedStore, environment: WorkerEnvironment, waiting: Waiting) -> tuple[Member, ...]:
    """Raises WorkerError."""
    missing = list(range(environment.world_size))
    try:
        while True:
            if (conflict := store.get(_CONFLICT)) is not None:
                failure = Failure.load(conflict)
                raise WorkerError(failure.text, rank=failure.rank, host=failure.host)
            members = store.get_all([f"rank/{rank}" for rank in range(environment.world_size)])
            missing = [rank for rank, member in enumerate(members) if member is None]
            if not missing:
                return tuple(Member.load(member) for member in members if member is not None)
            if waiting.is_over(f"waiting for {_ranks(missing)} of {environment.world_size} to start"):
                store.set_first(_CONFLICT, _never_came(missing, environment.world_size, waiting.most_s).dump())
            time.sleep(_POLL_S)
    except WorkerError:
        raise
    except (RuntimeError, ValueError) as error:  # what torch raises for a connection that is gone
        raise WorkerError(
            f"rank 0 at {environment.master_address}:{environment.master_port} went away while the workers were "
            f"still meeting: {str(error).splitlines()[0]}",
            rank=0,
        ) from error


def _never_came(missing: Sequence[int], world_size: int, timeout_s: float) -> Failure:
    text = (
        f"{_ranks(missing)} of {world_size} never came within {timeout_s:.0f} s: "
        "start one worker for each rank, and see the logs of those that are missing"
    )
    return Failure(rank=missing[0], host=None, text=text)


def _ranks(numbers: Sequence[int]) -> str:
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"
