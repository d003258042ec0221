"""Streams dealt by shares: every rank reads the same stream, and makes batches of its own samples of it.

Each global batch is the next G samples that the dataset yields in a worker process, as in one process with a batch size of G. Ranks read
all samples and collate only their own, since samples of a stream cannot be skipped without reading them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from heterodyne.drop_in.sampler import Dealt, DistributedSampler
from heterodyne.errors import CheckpointError
from heterodyne.graph.sharding.dealing import dealt_by_speed
from heterodyne.runtime.comm.communicator import Communicator

__all__ = ["StreamDealer"]

_NEVER = float("inf")
_MOST_CHANGES = 256  # of the shares in one pass; later ones are left out


class StreamDealer(DistributedSampler):
    """Deals the samples of a stream. It is no sampler of indices: batches come from `dataset`, each with what was dealt of it.

    Args:
        stream: yields the same samples on every rank.
        batch_size: of a rank where all have as much.
        workers: processes that read it.
        prefetched: batches that each may have made before they are handed out.
    """

    def __init__(
        self,
        stream: IterableDataset[Any],
        communicator: Communicator,
        *,
        batch_size: int,
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
        workers: int,
        prefetched: int,
        shares: Sequence[float] | None,
    ) -> None:
        super().__init__(
            range(0),
            communicator.world_size,
            communicator.rank,
            shuffle=False,
            drop_last=drop_last,
            batch_size=batch_size,
            shares=shares,
        )
        self.read_ahead()
        self.stream = stream
        # Numbers of batches of a worker are ``workers`` apart, and the last one that reads has all places of those that have ended.
        self._reach = workers * (1 + workers * prefetched)
        self._last = -1  # the number of the batch that was handed out last
        # Rows of the number of the batch from which on shares hold, and these; worker processes read them.
        self._settings = torch.full((_MOST_CHANGES, 1 + self.num_replicas), _NEVER, dtype=torch.float64)
        self._settings.share_memory_()  # type: ignore[no-untyped-call]
        self._set([0.0, *self.shares], 0)
        self.batches_of_rank = _OwnBatches(
            stream, self._settings, self.rank, self.global_batch_size, drop_last=drop_last, collate=collate
        )

    def __len__(self) -> int:
        """Raise TypeError for a stream without a length."""
        batches, rest = divmod(len(self.stream), self.global_batch_size)  # type: ignore[arg-type]
        return batches + (rest > 0 and not self.drop_last)

    def begin(self) -> None:
        """Called as an iteration begins."""
        self._set([0.0, *self.shares], 0)
        self._settings[1:] = _NEVER
        skips = self._done[1] // self.global_batch_size if self._resumes else 0
        self.batches_of_rank.skips.fill_(skips)
        self._resumes = False
        self._ahead.clear()
        self.digest = None
        self.handed_out, self._last = 0, skips - 1

    def note(self, made: tuple[int, Dealt, str]) -> None:
        """Called for each batch as it is to be handed out."""
        number, dealt, digest = made
        self._last = max(self._last, number)
        self._ahead.append(dealt)
        self.digest = hashlib.sha256(f"{self.digest} {digest}".encode()).hexdigest()

    @property
    def drawn(self) -> int:
        """A number above that of each batch that may have been made."""
        return self._last + self._reach + 1

    @drawn.setter
    def drawn(self, batches: int) -> None:
        pass  # the numbers of batches tell

    def renew(self, shares: Sequence[float], begin: int) -> None:
        row = int((self._settings[:, 0] < _NEVER).sum())
        if row < _MOST_CHANGES:
            self._set([begin, *shares], row)
            self.shares = tuple(shares)

    def _set(self, setting: Sequence[float], row: int) -> None:
        self._settings[row, 1:] = torch.tensor(setting[1:], dtype=torch.float64)
        self._settings[row, 0] = setting[0]  # last: a row that has it is whole

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._done[1] % self.global_batch_size:
            raise CheckpointError(
                f"{self._done[1]} samples of the stream were trained on, which are no whole number of batches of {self.global_batch_size}: "
                "resume with the same global batch size"
            )


class _OwnBatches(IterableDataset[Any]):
    """Yields (number, what was dealt, digest of its first sample) and this rank's batch, for each global batch."""

    def __init__(
        self,
        stream: IterableDataset[Any],
        settings: Tensor,
        rank: int,
        size: int,
        *,
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self._stream, self._settings, self._rank, self._size = stream, settings, rank, size
        self._drop_last, self._collate = drop_last, collate
        self.skips = torch.tensor(0)  # batches; shared with worker processes, which may outlive a pass
        self.skips.share_memory_()  # type: ignore[no-untyped-call]

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        samples = iter(self._stream)
        skips = int(self.skips)
        while group := list(islice(samples, self._size)):
            if len(group) == self._size or not self._drop_last:
                if number >= skips:
                    yield self._own(number, group)
                number += stride

    def _own(self, number: int, group: list[Any]) -> tuple[tuple[int, Dealt, str], Any]:
        counts = dealt_at(self._settings, number, len(group))
        before = sum(counts[: self._rank])
        own = group[before : before + counts[self._rank]]
        dealt = Dealt(len(own), len(group), (number + 1) * self._size)
        return (number, dealt, _digest(group[0])), self._collate(own or group[:1])


def dealt_at(settings: Tensor, number: int, samples: int) -> tuple[int, ...]:
    """Return how many of the samples of a batch each rank takes, under the latest setting that holds for it."""
    row = int((settings[:, 0] <= number).sum()) - 1
    return dealt_by_speed(settings[row, 1:].tolist(), samples)


def _digest(value: Any) -> str:
    found = hashlib.sha256()
    _add(found, value)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() if value.numel() else None
    if isinstance(value, np.ndarray):
        found.update(value.tobytes())
    elif isinstance(value, Mapping):
        for name, part in value.items():
            _add(found, (str(name), part))
    elif isinstance(value, list | tuple):
        for part in value:
            _add(found, part)
    elif isinstance(value, str | bytes | int | float | None):
        found.update(repr(value).encode())
    elif hasattr(value, "__array_interface__"):  # an image
        _add(found, np.asarray(value))
    elif hasattr(value, "__dict__"):  # a pickle of it would have addresses
        _add(found, vars(value))
