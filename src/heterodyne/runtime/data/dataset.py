"""A map-style dataset as training data: anything with ``__len__`` and ``__getitem__``.

The order is a permutation for each epoch (`EpochOrder`), so the position is (epoch, cursor) and knows of no ranks. A rank reads
the samples that it is asked for and no others. What a dataset draws at random (crops, flips, masks) is drawn from
(seed, epoch, sample): the same under any plan, with any number of workers, and after a resume.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from heterodyne.errors import DataError, HeterodyneError
from heterodyne.factories import describe_error
from heterodyne.runtime.data.collating import Collate, Collator
from heterodyne.runtime.data.order import EpochOrder, Indices, held_out
from heterodyne.runtime.data.read_ahead import Noted, ReadAhead
from heterodyne.runtime.data.sample_draws import generators_kept, seed_generators
from heterodyne.runtime.data.source import ByStep
from heterodyne.runtime.slices import BatchSource

__all__ = ["DatasetBatch", "DatasetSource", "MapDataset", "balanced", "is_map_style", "length_of"]


class MapDataset(Protocol):
    """``torch.utils.data.Dataset``, ``datasets.Dataset``, a list."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def is_map_style(dataset: object) -> bool:
    """Return whether samples can be asked for by number. (torch's IterableDataset inherits a ``__getitem__`` that raises.)"""
    return not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def length_of(dataset: MapDataset) -> int:
    """Samples of a dataset. Raises DataError if it cannot say."""
    try:
        return len(dataset)
    except HeterodyneError:
        raise
    except Exception as error:  # whatever the user's own code raises, it is reported as such
        raise DataError(f"the __len__ of the dataset fails: {describe_error(error)}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetBatch:
    """A global batch, of which only those samples are read that are asked for.

    Args:
        indices: the number of each sample in the dataset.  # int64 [size]
        epochs: the epoch of each.  # int64 [size]
        longest: the place of the sample to whose length all are padded; None: the collator pads each slice by itself, or not at all.
    """

    dataset: MapDataset
    collator: Collator
    indices: Indices
    epochs: Indices
    longest: int | None = None

    @property
    def size(self) -> int:
        return len(self.indices)

    @property
    def digest(self) -> str:
        """The same for the same samples in the same order."""
        return hashlib.blake2b(self.indices.tobytes() + self.epochs.tobytes(), digest_size=16).hexdigest()

    def number_of(self, place: int) -> int:
        """Return which sample of the dataset is at a place of the batch."""
        return int(self.indices[place])

    def samples(self, first: int, count: int) -> Mapping[str, Tensor]:
        """Samples ``[first, first + count)``, collated. Raises ValueError outside, DataError if one cannot be read."""
        if first < 0 or count < 0 or first + count > self.size:
            raise ValueError(f"samples {first} to {first + count} are not in a batch of {self.size}")
        places = range(first, first + count)
        keys = [(int(self.epochs[place]), int(self.indices[place])) for place in places]
        with generators_kept():
            samples = [self._sample(place) for place in places]
        beside = None
        if self.longest is not None:
            beside = samples[self.longest - first] if self.longest in places else self._longest
        found: Mapping[str, Tensor] = self.collator(samples, keys, beside)
        return found

    @cached_property
    def _longest(self) -> Any:
        assert self.longest is not None
        with generators_kept():
            return self._sample(self.longest)

    def _sample(self, place: int) -> Any:
        index = int(self.indices[place])
        try:
            seed_generators(self.collator.seed, int(self.epochs[place]), index)
            return self.dataset[index]
        except DataError as error:
            raise DataError(f"sample {index} of the dataset: {error}") from error
        except Exception as error:  # whatever the user's own code raises, it is reported as such
            lies = isinstance(error, IndexError)
            hint = f"\n(its __len__ is {len(self.dataset)}: is that true?)" if lies else ""
            raise DataError(f"sample {index} of the dataset cannot be read: {describe_error(error)}{hint}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetSource(ByStep):
    """Training and validation samples of a map-style dataset.

    Args:
        dataset: the samples.
        batch_size: of a training batch.
        seed: decides the order, and what the dataset draws.
        collate: makes tensors of a list of samples; torch's own if not given.
        shuffle: False: in the order of the dataset, epoch after epoch.
        validation, validation_lengths: samples of its own; None: ``validation_fraction`` of the dataset.
        validation_fraction: share of the dataset that is kept apart, evenly spread, 0 for none.
        lengths: tokens of each sample. If given, a collator that pads to the longest sample pads to that of the global batch: it is
            called with that sample beside those of each slice.
        balance: put the samples of a global batch into an order in which every part has its share of the ``lengths``.
        sequence_length: tokens of a sample, where all have as many.
        name: of the dataset, for its identity.
        workers: processes of this rank that read its training samples ahead; 0: they are read where they are asked for.
        prefetch: global batches of which each process has this rank's samples ready.
        start_method: of the processes, see `read_ahead.Pool`.

    Raises DataError for a dataset without training samples, or without any of validation where some are wanted.
    """

    dataset: MapDataset
    batch_size: int
    seed: int
    collate: Collate = default_collate
    shuffle: bool = True
    validation: MapDataset | None = None
    validation_lengths: Sequence[int] | None = None
    validation_fraction: float = 0.0
    lengths: Sequence[int] | None = None
    balance: bool = True
    sequence_length: int | None = None
    name: str = "dataset"
    workers: int = 0
    prefetch: int = 2
    start_method: str | None = None

    def __post_init__(self) -> None:
        count = length_of(self.dataset)
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
        """Return what decides the samples at a position."""
        return {"dataset": self.name, "samples": self.samples_per_epoch, "seed": self.seed}

    def batch(self, step: int) -> BatchSource:
        """The global batch of a step, counted from 0."""
        plain = self.batch_at(step * self.batch_size, self.batch_size)
        return plain if self._ahead is None else self._ahead.batch(step, plain)

    def close(self) -> None:
        """End the processes that read ahead."""
        if self._ahead is not None:
            self._ahead.close()

    @cached_property
    def _ahead(self) -> ReadAhead | None:
        if not self.workers:
            return None
        # A copy without processes of its own, which may be pickled.
        opening = partial(_opened_in_a_process, replace(self, workers=0))
        return ReadAhead(opening, workers=self.workers, prefetch=self.prefetch, start_method=self.start_method)

    def batch_at(self, position: int, size: int) -> DatasetBatch:
        """The ``size`` samples from that position of the training run on."""
        if position < 0:
            raise ValueError(f"there is no position {position}")
        order = EpochOrder(count=self.samples_per_epoch, seed=self.seed, shuffle=self.shuffle)
        places = order.between(position, position + size)
        indices = places if self._training is None else self._training[places]
        epochs = np.arange(position, position + size) // self.samples_per_epoch
        longest = None
        if self.lengths is not None:
            lengths = [int(self.lengths[index]) for index in indices]
            if self.balance:
                even = balanced(lengths)
                indices, epochs, lengths = indices[even], epochs[even], [lengths[place] for place in even]
            longest = self._longest(lengths)
        return DatasetBatch(
            dataset=self.dataset, collator=self._collator, indices=indices, epochs=epochs, longest=longest
        )

    def validation_batches(self, samples: int) -> tuple[DatasetBatch, ...]:
        """At most ``samples`` of the validation samples, evenly spread, always the same, in batches of `batch_size` or fewer."""
        dataset = self.dataset if self.validation is None else self.validation
        lengths = self.lengths if self.validation is None else self.validation_lengths
        held = np.arange(len(dataset)) if self.validation is not None else self._held_out
        if held is None:
            return ()
        count = min(samples, len(held))
        chosen = held[np.arange(count, dtype=np.int64) * len(held) // max(1, count)]
        parts = [chosen[first : first + self.batch_size] for first in range(0, count, self.batch_size)]
        return tuple(
            DatasetBatch(
                dataset=dataset,
                collator=self._collator,
                indices=part,
                epochs=np.zeros_like(part),
                longest=None if lengths is None else self._longest([int(lengths[index]) for index in part]),
            )
            for part in parts
        )

    def _longest(self, lengths: Sequence[int]) -> int | None:
        """The place of the longest sample, if the collator is to pad to it."""
        return None if self._collator.pads_alike else lengths.index(max(lengths))

    @cached_property
    def _collator(self) -> Collator:
        return Collator(collate=self.collate, seed=self.seed)


def _opened_in_a_process(source: DatasetSource, note: Tensor) -> Callable[[int], DatasetBatch]:
    """The batches by step, of a source that notes which sample it reads."""
    noted = replace(source, dataset=Noted(source.dataset, note))
    return lambda step: noted.batch_at(step * noted.batch_size, noted.batch_size)


# The samples of a global batch in an order in which every contiguous part has its share of the tokens.
#
# A rank takes a contiguous part of the global batch. Where lengths differ, an order by chance gives one rank long samples and
# another one short ones. Here the tokens of the first k samples are as near to k mean lengths as a greedy choice gets
# them, so a part of any size, at any place, has tokens in proportion to its samples. The order is a function of the lengths
# alone and not of the plan: places in the batch, on which dropout masks depend, are the same under every plan.
def balanced(lengths: Sequence[int]) -> list[int]:
    """The places of the samples in the new order, a permutation.  # [G] -> [G]

    The tokens of the first k samples differ from k times the mean by at most the largest length: where they are above, there
    is a sample left that is no longer than the mean, where below, one that is no shorter.
    """
    left = sorted(range(len(lengths)), key=lambda place: (lengths[place], place))
    values = [lengths[place] for place in left]
    mean = sum(lengths) / max(1, len(lengths))
    order: list[int] = []
    given = 0
    while left:
        wanted = mean * (len(order) + 1) - given
        at = bisect_left(values, wanted)
        if at == len(values) or (at and wanted - values[at - 1] <= values[at] - wanted):
            at -= 1
        given += values.pop(at)
        order.append(left.pop(at))
    return order
