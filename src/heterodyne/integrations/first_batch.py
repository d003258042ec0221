"""The first batch of a loader, taken such that a loop over the loader still begins with it and draws the same random numbers."""

from __future__ import annotations

import copy
import random
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from heterodyne.code_read import is_filled
from heterodyne.errors import DataError
from heterodyne.runtime.checkpoint.random_state import advance_random_state, taken, unchanged_random_state

__all__ = ["Resumed", "first_batch", "resumed"]


def first_batch(loader: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """Return the first batch, and what to iterate over in place of the loader.

    A sequence is returned itself, and so is a DataLoader over a dataset with an index or over a `Resumed` stream: it is read through a
    copy of its sampler. Of anything else the iterator that gave the batch is kept: the next iteration gives the batch again, and goes on.

    Raises DataError for a loader without batches.
    """
    with unchanged_random_state():
        twin = _twin(loader)
        if twin is not None:
            with _unchanged_generators(twin.dataset, twin.collate_fn), _look(twin.dataset):
                return _first(twin), loader
        if isinstance(loader, Sequence):
            return _first(loader), loader
        kept = Resumed(loader)
        with kept.look():
            batch = _first(kept)
        return batch, iter(kept) if isinstance(loader, Generator) else kept  # so that next() goes on, too


def resumed(dataset: Any) -> Any:
    """Return a stream as `Resumed`, so that a look takes nothing from it; any other dataset as it is."""
    return Resumed(dataset) if isinstance(dataset, IterableDataset) and not isinstance(dataset, Resumed) else dataset


@dataclass(frozen=True)
class _Item:
    """``before`` and ``after``: the states of the generators of random numbers around the making of it."""

    value: Any
    before: tuple[Any, ...]
    after: tuple[Any, ...]


class Resumed(IterableDataset[Any]):
    """An iterable whose first items were looked at: the next iteration gives them again, and goes on where the look has ended.

    A generator of random numbers that is in the state in which it was before an item was made is brought to that afterwards when the item
    is given again, so that later items get the numbers that they would have got without the look.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self._looking = False
        self._epoch = 0
        self._begun: tuple[list[_Item], Iterator[Any]] | None = None

    @contextmanager
    def look(self) -> Iterator[None]:
        """An iteration that begins in this block is a look."""
        self._looking = True
        try:
            yield
        finally:
            self._looking = False

    def __iter__(self) -> Iterator[Any]:
        if self._looking:
            return self._look()
        begun, self._begun = self._begun, None
        return iter(self._source) if begun is None else _again(*begun)

    def _look(self) -> Iterator[Any]:
        before = taken()
        seen, rest = self._begun = self._begun or ([], iter(self._source))
        yield from (copy.copy(item.value) for item in seen)
        for value in rest:
            seen.append(_Item(value, before, taken()))
            yield copy.copy(value)  # who looks may take entries out of it
            before = taken()

    def set_epoch(self, epoch: int) -> None:
        """Pass it on to a source that has epochs; what was looked at belongs to the epoch of then."""
        if epoch != self._epoch:
            self._begun, self._epoch = None, epoch
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)

    def __len__(self) -> int:
        """Raise TypeError for a source without a length."""
        return len(self._source)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)


def _again(seen: Sequence[_Item], rest: Iterator[Any]) -> Iterator[Any]:
    for item in seen:
        advance_random_state(item.before, item.after)
        yield item.value
    yield from rest


def _twin(loader: Any) -> DataLoader[Any] | None:
    """Return a DataLoader of the same batches, of which an iteration changes nothing in this one; None where there is none."""
    loader = getattr(
        loader, "base_dataloader", loader
    )  # of Accelerate, whose loaders note that they are being iterated over
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return None
    options: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": min(loader.num_workers, 1),
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context if loader.num_workers else None,
    }
    if isinstance(loader.dataset, IterableDataset):
        if not isinstance(loader.dataset, Resumed):
            return None
        return DataLoader(loader.dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, **options)
    shared = {id(loader.dataset): loader.dataset}
    try:
        if loader.batch_sampler is None:
            return DataLoader(loader.dataset, batch_size=None, sampler=copy.deepcopy(loader.sampler, shared), **options)
        return DataLoader(loader.dataset, batch_sampler=copy.deepcopy(loader.batch_sampler, shared), **options)
    except TypeError:  # a sampler that cannot be copied, such as a generator
        return None


@contextmanager
def _look(dataset: Any) -> Iterator[None]:
    if isinstance(dataset, Resumed):
        with dataset.look():
            yield
    else:
        yield


def _first(batches: Iterable[Any]) -> Any:
    for batch in batches:
        return batch
    raise DataError("the loader has no batches: give it data")


_DEEPEST = 4
_MOST_ENTRIES = 64  # longer lists hold data


@contextmanager
def _unchanged_generators(*roots: Any) -> Iterator[None]:
    """Give each generator that is found in the attributes of these objects the state again that it has now."""
    with ExitStack() as restored:
        for root in roots:
            for generator in _found(root, _DEEPEST, set()):
                restored.callback(_restoring(generator))
        yield


def _restoring(generator: Any) -> Any:
    """Return what brings a generator back to its present state."""
    if isinstance(generator, random.Random):
        now = generator.getstate()
        return lambda: generator.setstate(now)
    if isinstance(generator, np.random.Generator):
        of_bits = generator.bit_generator.state
        return lambda: setattr(generator.bit_generator, "state", of_bits)
    if isinstance(generator, np.random.RandomState):
        legacy = generator.get_state()
        return lambda: generator.set_state(legacy)
    words = generator.get_state()
    return lambda: generator.set_state(words)


def _found(holder: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    if id(holder) in seen or depth < 0 or isinstance(holder, (torch.Tensor, np.ndarray, type, str, bytes)):
        return
    seen.add(id(holder))
    if isinstance(holder, (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)):
        yield holder
        return
    for entry in _entries(holder):
        yield from _found(entry, depth - 1, seen)


def _entries(holder: Any) -> list[Any]:
    """Return what an object refers to: attributes, entries, and the variables that a function closes over."""
    if isinstance(holder, Mapping):
        return list(holder.values()) if len(holder) <= _MOST_ENTRIES else []
    if isinstance(holder, (list, tuple, set)):
        return list(holder) if len(holder) <= _MOST_ENTRIES else []
    found = list(vars(holder).values()) if hasattr(holder, "__dict__") else []
    found += [cell.cell_contents for cell in getattr(holder, "__closure__", None) or () if is_filled(cell)]
    bound = getattr(holder, "__self__", None)
    return [*found, *getattr(holder, "args", ()), bound] if callable(holder) else found
