"""Samples read ahead in processes of their own: torch's DataLoader, which is given what this rank will ask for.

A rank asks for the same places of every global batch, so what it asked for in one step is what it will ask for in the next ones. Its
processes read those, and no other samples. What was not expected (the first step, another plan) is read where it is asked for. Which
sample belongs to a place is computed from the step alone, so what was read ahead and never used counts for nothing: the position
of a run is the number of its steps.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from heterodyne.errors import DataError, HeterodyneError
from heterodyne.factories import describe_error
from heterodyne.processes import describe_exit
from heterodyne.runtime.data.shared_room import no_shared_room
from heterodyne.runtime.slices import BatchSource

__all__ = ["Failed", "Noted", "ReadAhead", "ReaderPool"]

Span: TypeAlias = tuple[int, int]
Slices: TypeAlias = list[Mapping[str, Tensor]]
_SETTLE_S = 5.0  # how long after its last words the end of a process may be seen


@dataclass(frozen=True)
class Failed:
    """What a process says instead of a result: torch would put its whole traceback into the message."""

    words: str


class ReaderPool:
    """Processes of this rank that read for it, and the iterator over what they have read.

    Args:
        dataset: read by the processes, with the keys of ``keys``; an iterable one goes through itself, and ``keys`` is None.
        prefetch: results that each process has ready.
        start_method: of the processes. None: fork on Linux, where nothing has to be pickled, else that of the platform.

    Raises DataError if the processes cannot be started.
    """

    def __init__(
        self, dataset: Any, *, keys: Any, workers: int, prefetch: int, start_method: str | None = None
    ) -> None:
        try:
            # By process: its id, and the number of the sample that it reads.
            self._notes: Tensor = torch.full((workers, 2), -1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise DataError(
                f"the processes that read ahead (workers) cannot be started: {describe_error(error)}{no_shared_room(error)}"
            ) from error
        self._loader: DataLoader[Any] | None = DataLoader(
            dataset,
            batch_size=None,
            sampler=keys,
            num_workers=workers,
            prefetch_factor=prefetch,
            persistent_workers=True,
            worker_init_fn=partial(_begin, self._notes),
            generator=torch.Generator(),  # of the seeds of the processes: that of the run stays as it is
            multiprocessing_context=start_method or ("fork" if sys.platform == "linux" else None),
        )
        self._iterator: Iterator[Any] = iter(())
        self._processes: list[Any] = []

    def restart(self) -> None:
        """Begin again with the keys as they are now."""
        assert self._loader is not None
        before = set(multiprocessing.active_children())
        collects = gc.isenabled()
        gc.disable()  # until `_begin` has set aside what a new process inherits
        try:
            with _handler_set_aside():
                self._iterator = iter(self._loader)
        except Exception as error:  # whatever pickling the user's own objects raises
            raise DataError(
                f"the processes that read ahead (workers) cannot be started: {describe_error(error)}. Where they are not forked, the "
                "dataset and its collator are pickled: define their classes and functions at the top of a module, or set workers to 0"
            ) from error
        finally:
            if collects:
                gc.enable()
        self._processes += [child for child in multiprocessing.active_children() if child not in before]

    def next(self) -> Any:
        """The next result. Raises DataError if a process has died."""
        try:
            with _handler_set_aside():
                return next(self._iterator)
        except (
            RuntimeError,
            OSError,
            EOFError,
        ) as error:  # the last two: it died with tensors that were not fetched yet
            raise DataError(
                self._deaths() or f"reading ahead failed: {describe_error(error)}{no_shared_room(error)}"
            ) from error

    def close(self) -> None:
        """End the processes."""
        self._iterator, self._loader = iter(()), None

    def _deaths(self) -> str:
        until = time.monotonic() + _SETTLE_S
        while not any(child.exitcode for child in self._processes):
            alive = [child.sentinel for child in self._processes if child.exitcode is None]
            with _handler_set_aside():
                if not wait(alive, timeout=max(0.0, until - time.monotonic())):
                    break
        samples = dict(self._notes.tolist())
        found = [
            f"a process that reads ahead (workers) {describe_exit(child.exitcode)}{_at(samples.get(child.pid, -1))}"
            for child in self._processes
            if child.exitcode
        ]
        if not found:
            return ""
        return "; ".join(found) + (
            ". What it wrote stands above; one that was killed may have had too little memory, or too little shared memory (/dev/shm): "
            "set workers to 0 to read in the process of the rank"
        )


@contextmanager
def _handler_set_aside() -> Iterator[None]:
    """Keep a handler of SIGCHLD from running: torch's own, which a DataLoader sets, raises wherever this rank is.

    `ReaderPool.next` finds a dead process by itself.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if handler is None or threading.current_thread() is not threading.main_thread():  # None: set by another library
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


def _at(sample: int) -> str:
    return "" if sample < 0 else f" while it read sample {sample} of the dataset"


def _begin(notes: Tensor, number: int) -> None:
    """In a new process: out of the group that is sent the signals of the run, which its rank answers.

    What it has inherited is never collected: a process group that its rank has dropped would end threads that are not there.
    """
    gc.freeze()
    gc.enable()
    notes[number, 0] = os.getpid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    info = get_worker_info()
    assert info is not None
    if isinstance(info.dataset, _Slices):
        info.dataset.notes = notes[number]


class Noted:
    """A dataset that notes which sample it is asked for, so that the death of a process can be traced to one."""

    def __init__(self, dataset: Any, note: Tensor) -> None:
        self._dataset = dataset
        self._note = note

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        self._note[1] = index
        return self._dataset[index]


class _Slices:
    """Slices of global batches, by step. ``open``: the batches by step, with a note for the samples that are read."""

    notes: Tensor

    def __init__(self, open: Callable[[Tensor], Callable[[int], BatchSource]]) -> None:
        self._open = open
        self._batch_of: Callable[[int], BatchSource] | None = None

    def __getitem__(self, wanted: tuple[int, tuple[Span, ...]]) -> Slices | Failed:
        step, spans = wanted
        try:
            if self._batch_of is None:
                self._batch_of = self._open(self.notes)
            batch = self._batch_of(step)
            return [batch.samples(*span) for span in spans]
        except HeterodyneError as error:
            return Failed(str(error))


class _Keys:
    """From which step on which spans are read, forever."""

    step = 0
    spans: tuple[Span, ...] = ()

    def __iter__(self) -> Iterator[tuple[int, tuple[Span, ...]]]:
        step, spans = self.step, self.spans
        while True:
            yield step, spans
            step += 1


class ReadAhead:
    """Reads the batches of one source ahead.

    Args:
        open: gives the batches by step, in a process of its own, with the note that `Noted` writes.
        workers: processes of this rank.
        prefetch: global batches of which each process has this rank's samples ready.
        start_method: see `ReaderPool`.
    """

    def __init__(
        self,
        open: Callable[[Tensor], Callable[[int], BatchSource]],
        *,
        workers: int,
        prefetch: int,
        start_method: str | None = None,
    ) -> None:
        self._keys = _Keys()
        self._make = partial(
            ReaderPool, _Slices(open), keys=self._keys, workers=workers, prefetch=prefetch, start_method=start_method
        )
        self._pool: ReaderPool | None = None
        self._step = -1
        self._next = -1
        self._asked: dict[Span, None] = {}
        self._ready: Mapping[Span, Mapping[str, Tensor]] | Failed = {}

    def batch(self, step: int, plain: BatchSource) -> BatchSource:
        """The batch of a step, which is ``plain`` where nothing was read ahead."""
        if step == self._step:  # whoever had it before took samples for another purpose, as an example
            self._asked = {}
        return _Batch(ahead=self, step=step, plain=plain)

    def samples(self, step: int, span: Span, plain: BatchSource) -> Mapping[str, Tensor]:
        if step != self._step:
            self._turn_to(step)
        self._asked[span] = None
        if isinstance(self._ready, Failed):
            raise DataError(self._ready.words)
        return dict(self._ready[span]) if span in self._ready else plain.samples(*span)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()
        self._pool, self._next = None, -1

    def _turn_to(self, step: int) -> None:
        spans = tuple(self._asked)
        self._step, self._asked, self._ready = step, {}, {}
        if not spans:
            return
        if step != self._next or spans != self._keys.spans:
            self._keys.step, self._keys.spans, self._next = step, spans, step
            self._pool = self._pool or self._make()
            self._pool.restart()
        assert self._pool is not None
        found = self._pool.next()
        self._ready = found if isinstance(found, Failed) else dict(zip(spans, found, strict=True))
        self._next = step + 1


@dataclass(frozen=True, kw_only=True, eq=False)
class _Batch:
    """A global batch of which this rank's samples may be there already."""

    ahead: ReadAhead
    step: int
    plain: BatchSource

    @property
    def size(self) -> int:
        return self.plain.size

    @property
    def digest(self) -> str | None:
        found: str | None = getattr(self.plain, "digest", None)
        return found

    @property
    def number_of(self) -> Callable[[int], int] | None:
        found: Callable[[int], int] | None = getattr(self.plain, "number_of", None)
        return found

    def samples(self, first: int, count: int) -> Mapping[str, Tensor]:
        """Samples ``[first, first + count)``. Raises ValueError outside, DataError if they cannot be read."""
        return self.ahead.samples(self.step, (first, count), self.plain)
