"""What a job does when the memory of a device ends: note what was lacked, keep what all ranks hold, and know of both when it goes on."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from heterodyne.api.learned_memory import infeasible
from heterodyne.api.session import Session
from heterodyne.api.settings import Prepared
from heterodyne.errors import HeterodyneError, InfeasibleError, OutOfMemoryError
from heterodyne.run_directory import RunDirectory
from heterodyne.runtime.checkpoint.rescue import rescued
from heterodyne.runtime.comm.disks import Disks
from heterodyne.runtime.out_of_memory import told_with_stage
from heterodyne.runtime.records.shortages import Shortage, note_shortage, read_shortages

__all__ = ["lacked_so_far", "noted_shortage", "rescued_if_memory_ends", "told_while_building", "told_with_shortages"]


@contextmanager
def noted_shortage(session: Session, run: RunDirectory) -> Iterator[None]:
    """Write what this rank lacks into the run directory, where the next plan looks for it. Collective."""
    attempt = session.agreement.on_rank0(lambda: secrets.token_hex(4))
    try:
        yield
    except OutOfMemoryError as error:
        if isinstance(error.shortage, Shortage):
            try:
                note_shortage(run.shortages, replace(error.shortage, attempt=attempt))
            except OSError as refused:
                raise HeterodyneError(
                    f"{error}. {run.shortages} cannot be written ({refused.strerror}), so the run does not go on by itself"
                ) from error
        raise


@contextmanager
def rescued_if_memory_ends(session: Session, rescue: Callable[[], None]) -> Iterator[None]:
    """If any rank is out of memory, this one writes what it holds; it may hang in an exchange, so that its watchdog does it."""
    if session.watchdog is not None:
        session.watchdog.before_out_of_memory(rescue)
        yield
        return
    try:
        yield
    except OutOfMemoryError:
        rescue()
        raise


@contextmanager
def told_while_building(session: Session, prepared: Prepared) -> Iterator[None]:
    """Out of memory while the model itself is placed is reported as in a step."""
    with told_with_stage(session.device, prepared.lowered, session.rank, None, lambda: "building the model"):
        yield


def lacked_so_far(session: Session, run: RunDirectory, disks: Disks) -> tuple[Shortage, ...]:
    """Return what devices have lacked in this run; and what its ranks held in memory at the last time becomes a checkpoint, if it is
    whole."""

    with session.phase("reading what the ranks held"):
        of_disks = disks.on_each(lambda: read_shortages(run.shortages))
        step, why_not = rescued(run.checkpoints, session.agreement)
    shortages = tuple(shortage for of_disk in of_disks for shortage in of_disk)
    done = None if not shortages or shortages[-1].step is None else shortages[-1].step
    if step is not None:
        session.say(f"all that the ranks held in memory after step {step} is kept as a checkpoint")
    elif why_not and done is not None:
        session.say(
            f"what the ranks held in memory is lost ({why_not}): steps are done again from the newest checkpoint on, up to step {done}"
        )
    return shortages


@contextmanager
def told_with_shortages(shortages: Sequence[Shortage]) -> Iterator[None]:
    """An InfeasibleError is extended by what devices ran out of before."""
    try:
        yield
    except InfeasibleError as error:
        if not shortages:
            raise
        raise infeasible(error, shortages) from error
