"""Streams as training data: V fixed virtual slots, each with a cursor, a shuffle buffer and what packing has left over.

Element i of an epoch of the stream belongs to slot ``i mod V``. A slot goes through its elements for itself, epoch after epoch: it
chooses among those in its buffer, packs what it chooses if wanted, and gives k samples a step. Sample p of the global
batch of V k samples comes from slot ``p div k``. V is the batch size unless it is given, and never a number of ranks, so the
samples of a step are the same under any plan. What is chosen is drawn from (seed, slot, number of the choice).

A plain stream cannot be asked for a part, so each rank goes through all of it, and makes batches only of its own samples. A stream
that has ``state_dict`` and ``load_state_dict`` is resumed by them; any other is read again up to its position.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

from heterodyne.errors import DataError
from heterodyne.runtime.data.collating import Collate, Collator, content_digest
from heterodyne.runtime.data.elements import END, Elements, ElementsAhead, Stream
from heterodyne.runtime.data.packing import row_of, tokens_of
from heterodyne.runtime.data.sample_draws import generators_kept

__all__ = ["Stream", "StreamBatch", "StreamSource"]


class _Slot:
    """One virtual slot: elements in, samples out. ``waiting``: elements that have come and were not looked at."""

    def __init__(self, *, key: tuple[int, int], buffer: int, length: int | None) -> None:
        self._key = key
        self._size = buffer
        self._length = length
        self.waiting: deque[Any] = deque()
        self._buffer: list[Any] = []
        self._chosen = 0
        self._left_over: list[int] = []
        self._ready: deque[Any] = deque()
        self._in_epoch = 0

    def sample(self, more: Callable[[], None]) -> Any:
        """The next sample; ``more`` brings elements."""
        while not self._ready:
            while not self.waiting:
                more()
            self._take(self.waiting.popleft())
        return self._ready.popleft()

    def _take(self, element: Any) -> None:
        if element is END:
            if not self._in_epoch:
                raise DataError(
                    "the stream has fewer samples than there are slots: take a smaller global batch or fewer slots, or give more"
                )
            self._in_epoch = 0
            while self._buffer:  # every element is seen once an epoch
                self._choose()
            return
        self._in_epoch += 1
        self._buffer.append(element)
        if len(self._buffer) > self._size:
            self._choose()

    def _choose(self) -> None:
        digest = hashlib.blake2b(repr((*self._key, self._chosen)).encode(), digest_size=8).digest()
        place = int.from_bytes(digest, "little") % len(self._buffer) if self._size else 0
        self._chosen += 1
        # The last one takes the place of the chosen one; nothing else moves.
        self._buffer[place], chosen = self._buffer[-1], self._buffer[place]
        self._buffer.pop()
        if self._length is None:
            self._ready.append(chosen)
            return
        self._left_over += tokens_of(chosen).tolist()
        while len(self._left_over) >= self._length:
            self._ready.append(row_of(np.array(self._left_over[: self._length], dtype=np.int64)))
            del self._left_over[: self._length]

    def state(self) -> dict[str, Any]:
        return {
            "waiting": [None if e is END else (e,) for e in self.waiting],
            "buffer": list(self._buffer),
            "chosen": self._chosen,
            "left_over": list(self._left_over),
            "ready": list(self._ready),
            "in_epoch": self._in_epoch,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.waiting = deque(END if e is None else e[0] for e in state["waiting"])
        self._buffer, self._left_over = list(state["buffer"]), list(state["left_over"])
        self._ready, self._chosen, self._in_epoch = deque(state["ready"]), state["chosen"], state["in_epoch"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamBatch:
    """A global batch whose samples have been read; only those that are asked for are collated."""

    elements: tuple[Any, ...]
    collator: Collator
    position: int

    @property
    def size(self) -> int:
        return len(self.elements)

    @property
    def digest(self) -> str:
        """The same for the same elements in the same order."""
        return content_digest(self.elements)

    def samples(self, first: int, count: int) -> Mapping[str, Tensor]:
        """Samples ``[first, first + count)``. Raises ValueError outside, DataError if they cannot be collated."""
        if first < 0 or count < 0 or first + count > self.size:
            raise ValueError(f"samples {first} to {first + count} are not in a batch of {self.size}")
        keys = [(0, self.position + place) for place in range(first, first + count)]
        found: Mapping[str, Tensor] = self.collator(self.elements[first : first + count], keys)
        return found


class StreamSource:
    """Training samples of a stream, and validation samples of another one.

    Args:
        stream: an iterable that can be gone through again and again, or a function that makes one. It gives the same elements in
            the same order on every rank and each time; its ``set_epoch`` is called if it has one.
        batch_size: of a training batch.
        seed: of the choices in the buffers, and of what the stream draws.
        slots: V, which divides the batch size; None: the batch size.
        shuffle_buffer: elements in the buffers of all slots together; 0: no shuffling.
        packed_length: tokens of a row into which documents are packed; None: elements are samples.
        collate: makes tensors of a list of samples.
        validation: the first elements of this stream, or of this dataset, are for validation.
        workers: 1: a process of this rank reads the stream ahead. A stream has no parts that several could read.
        prefetch: global batches that it has ready.

    Raises DataError if the slots do not divide the batch.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        batch_size: int,
        seed: int,
        slots: int | None = None,
        shuffle_buffer: int = 0,
        packed_length: int | None = None,
        collate: Collate = default_collate,
        validation: Stream | None = None,
        name: str = "stream",
        workers: int = 0,
        prefetch: int = 2,
    ) -> None:
        self.batch_size = batch_size
        self.sequence_length = packed_length
        self._stream = stream
        self._seed = seed
        self._slot_count = slots or batch_size
        self._buffer = -(-shuffle_buffer // self._slot_count)
        self._packed_length = packed_length
        self._collator = Collator(collate=collate, seed=seed)
        self._prefetch = prefetch if workers else 0
        self._validation = validation
        self._name = name
        self._current: tuple[Any, ...] = ()
        if batch_size % self._slot_count:
            raise DataError(f"{self._slot_count} slots do not divide a batch of {batch_size}: take a number that does")
        if workers > 1:
            raise DataError(
                f"a stream has no parts that {workers} workers could read: set workers to 1, or give a dataset with __len__ and __getitem__"
            )
        self._elements: Elements | ElementsAhead = Elements(stream, seed)
        self._begin()

    @property
    def identity(self) -> dict[str, str | int]:
        """Return what decides the samples at a step."""
        return {
            "stream": self._name,
            "slots": self._slot_count,
            "buffer": self._buffer,
            "packed": self._packed_length or 0,
            "seed": self._seed,
        }

    def batch(self, step: int) -> StreamBatch:
        """The global batch of a step. To go back is to read again from the beginning."""
        if step < 0:
            raise ValueError(f"there is no step {step}")
        if step < self._next - bool(self._current):
            self._begin()
        with generators_kept():
            while self._next <= step:
                self._current = tuple(
                    self._slots[p * self._slot_count // self.batch_size].sample(self._deal) for p in self._places
                )
                self._next += 1
        return StreamBatch(elements=self._current, collator=self._collator, position=step * self.batch_size)

    def validation_batches(self, samples: int) -> tuple[StreamBatch, ...]:
        """The first samples of the validation stream."""
        if self._validation is None:
            return ()
        source = StreamSource(
            self._validation,
            batch_size=1,
            seed=self._seed,
            packed_length=self._packed_length,
            collate=self._collator.collate,
        )
        found: list[Any] = []
        with generators_kept():
            while len(found) < samples and (sample := source.next_of_first_epoch()) is not None:
                found.append(sample)
        parts = [
            (first, tuple(found[first : first + self.batch_size])) for first in range(0, len(found), self.batch_size)
        ]
        return tuple(StreamBatch(elements=part, collator=self._collator, position=first) for first, part in parts)

    def next_of_first_epoch(self) -> Any | None:
        """The next sample of a source of one slot; None when the stream has been gone through once."""
        (slot,) = self._slots

        def more() -> None:
            self._deal()
            if slot.waiting[-1] is END:
                raise StopIteration

        try:
            return slot.sample(more)
        except StopIteration:
            return None

    def vocabulary(self) -> None:
        """A stream does not know what it will give."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return where the stream is, and what the slots hold; None for a stream that does not say where it is."""
        where = self._elements.state()
        if where is None:
            return None
        return {
            "step": self._next,
            "elements": where,
            "slots": {str(number): slot.state() for number, slot in enumerate(self._slots)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._begin()
        self._elements.load(state["elements"])
        for number, slot in enumerate(self._slots):
            slot.load(state["slots"][str(number)])
        self._next, self._current = state["step"], ()

    def close(self) -> None:
        """End the process that reads ahead."""
        if isinstance(self._elements, ElementsAhead):
            self._elements.close()

    def _begin(self) -> None:
        self.close()
        elements = Elements(self._stream, self._seed)
        self._elements = (
            ElementsAhead(elements, chunk=self.batch_size, prefetch=self._prefetch) if self._prefetch else elements
        )
        self._slots = [
            _Slot(key=(self._seed, number), buffer=self._buffer, length=self._packed_length)
            for number in range(self._slot_count)
        ]
        self._places = range(self.batch_size)
        self._current = ()
        self._next = 0

    def _deal(self) -> None:
        """Bring the next element to its slot, and the end of an epoch to all."""
        index = self._elements.index
        element = self._elements.next()
        for slot in self._slots if element is END else [self._slots[index % self._slot_count]]:
            slot.waiting.append(element)
