"""A map-style dataset as training data: anything with ``__len__`` and ``__getitem__``.

The order is a permutation for each epoch (`EpochOrder`), so the position is (epoch, cursor) and knows of no ranks. A rank reads
the samples that it is asked for and no others. What a dataset draws at random (crops, flips, masks) is drawn from
(seed, epoch, sample): the same under any plan, with any number of workers, and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from heterodyne.errors import DataError
from heterodyne.factories import told
from heterodyne.runtime.data.balance import balanced
from heterodyne.runtime.data.order import EpochOrder, Indices, held_out
from heterodyne.runtime.data.sample_draws import draws_of
from heterodyne.runtime.data.source import ByStep

__all__ = ["Collate", "DatasetBatch", "DatasetSource", "MapDataset", "Reader", "is_map_style"]

Collate: TypeAlias = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """``torch.utils.data.Dataset``, ``datasets.Dataset``, a list."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def is_map_style(dataset: object) -> bool:
    """Whether samples can be asked for by number. (torch's IterableDataset inherits a ``__getitem__`` that raises.)"""
    return not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


@dataclass(frozen=True, kw_only=True, eq=False)
class Reader:
    """Reads samples of one dataset and makes a batch of them.

    Args:
        collate: makes tensors of a list of samples.
        seed: of what the dataset draws.
    """

    dataset: MapDataset
    collate: Collate = default_collate
    seed: int = 0

    def read(self, indices: Indices, epochs: Indices) -> Any:
        """Raises DataError with the number of the sample that cannot be read."""
        return self.collated([self._sample(int(i), int(e)) for i, e in zip(indices, epochs, strict=True)], indices)

    def collated(self, samples: list[Any], indices: Indices) -> Any:
        try:
            return self.collate(samples)
        except Exception as error:  # whatever the user's own code raises, it is told as that
            shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
            raise DataError(f"samples {shown} cannot be collated: {told(error)}") from error

    def _sample(self, index: int, epoch: int) -> Any:
        try:
            with draws_of(self.seed, epoch, index):
                return self.dataset[index]
        except Exception as error:  # whatever the user's own code raises, it is told as that
            raise DataError(f"sample {index} of the dataset cannot be read: {told(error)}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetBatch:
    """A global batch, of which only those samples are read that are asked for.

    Args:
        indices: the number of each sample in the dataset.  # int64 [size]
        epochs: the epoch of each.  # int64 [size]
    """

    reader: Reader
    indices: Indices
    epochs: Indices

    @property
    def size(self) -> int:
        return len(self.indices)

    def samples(self, first: int, count: int) -> Mapping[str, Tensor]:
        """Samples ``[first, first + count)``, collated. Raises ValueError outside, DataError if one cannot be read."""
        if first < 0 or count < 0 or first + count > self.size:
            raise ValueError(f"samples {first} to {first + count} are not in a batch of {self.size}")
        chosen = slice(first, first + count)
        batch: Mapping[str, Tensor] = self.reader.read(self.indices[chosen], self.epochs[chosen])
        return batch


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetSource(ByStep):
    """Training and validation samples of a map-style dataset.

    Args:
        dataset: the samples.
        batch_size: of a training batch.
        seed: decides the order, and what the dataset draws.
        collate: makes tensors of a list of samples; torch's own if not given.
        shuffle: False: in the order of the dataset, epoch after epoch.
        validation: samples of its own; None: ``validation_fraction`` of the dataset.
        validation_fraction: share of the dataset that is kept apart, evenly spread, 0 for none.
        lengths: tokens of each sample. If given, the samples of a global batch are put into an order in which every part has its
            share of the tokens.
        sequence_length: tokens of a sample, where all have as many.
        name: of the dataset, for its identity.

    Raises DataError for a dataset without training samples, or without any of validation where some are wanted.
    """

    dataset: MapDataset
    batch_size: int
    seed: int
    collate: Collate = default_collate
    shuffle: bool = True
    validation: MapDataset | None = None
    validation_fraction: float = 0.0
    lengths: Sequence[int] | None = None
    sequence_length: int | None = None
    name: str = "dataset"

    def __post_init__(self) -> None:
        count = len(self.dataset)
        if not count:
            raise DataError("the dataset has no samples: give one that has some")
        if self.lengths is not None and len(self.lengths) != count:
            raise DataError(f"there are {len(self.lengths)} lengths for {count} samples: give one for each")
        if self._training is not None and not len(self._training):
            raise DataError(
                f"the dataset has {count} samples, of which validation takes all: give more, or a smaller data.validation_fraction"
            )
        if self._held_out is not None and not len(self._held_out):
            raise DataError(
                f"the dataset has {count} samples, too few to keep {self.validation_fraction:g} of them for validation: "
                "give more, a larger data.validation_fraction, or 0 for none"
            )

    @cached_property
    def _kept(self) -> Any:
        return held_out(len(self.dataset), self.validation_fraction)

    @cached_property
    def _training(self) -> Indices | None:
        """None: all samples."""
        return np.flatnonzero(~self._kept) if self.validation_fraction and self.validation is None else None

    @cached_property
    def _held_out(self) -> Indices | None:
        return np.flatnonzero(self._kept) if self.validation_fraction and self.validation is None else None

    @property
    def samples_per_epoch(self) -> int:
        return len(self.dataset) if self._training is None else len(self._training)

    @property
    def identity(self) -> dict[str, str | int]:
        """What decides the samples at a position."""
        return {"dataset": self.name, "samples": self.samples_per_epoch, "seed": self.seed}

    def batch(self, step: int) -> DatasetBatch:
        """The global batch of a step, counted from 0."""
        return self.batch_at(step * self.batch_size, self.batch_size)

    def batch_at(self, position: int, size: int) -> DatasetBatch:
        """The ``size`` samples from that position of the training run on."""
        if position < 0:
            raise ValueError(f"there is no position {position}")
        order = EpochOrder(count=self.samples_per_epoch, seed=self.seed, shuffle=self.shuffle)
        places = order.between(position, position + size)
        indices = places if self._training is None else self._training[places]
        epochs = np.arange(position, position + size) // self.samples_per_epoch
        if self.lengths is not None:
            even = balanced([int(self.lengths[index]) for index in indices])
            indices, epochs = indices[even], epochs[even]
        return DatasetBatch(reader=self._reader(self.dataset), indices=indices, epochs=epochs)

    def validation_batches(self, samples: int) -> tuple[DatasetBatch, ...]:
        """At most ``samples`` of the validation samples, evenly spread, always the same, in batches of `batch_size` or fewer."""
        dataset = self.dataset if self.validation is None else self.validation
        held = np.arange(len(dataset)) if self.validation is not None else self._held_out
        if held is None:
            return ()
        count = min(samples, len(held))
        chosen = held[np.arange(count, dtype=np.int64) * len(held) // max(1, count)]
        parts = [chosen[first : first + self.batch_size] for first in range(0, count, self.batch_size)]
        reader = self._reader(dataset)
        return tuple(DatasetBatch(reader=reader, indices=part, epochs=np.zeros_like(part)) for part in parts)

    def _reader(self, dataset: MapDataset) -> Reader:
        return Reader(dataset=dataset, collate=self.collate, seed=self.seed)
