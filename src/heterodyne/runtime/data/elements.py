"""The elements of a stream, epoch after epoch, read where they are needed or ahead in a process.

A process that reads ahead sends chunks of elements, each with where the stream was at its beginning. The place of a run in the stream is
the chunk that it is in, and how many elements of that it has taken: what was read beyond counts for nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from torch.utils.data import IterableDataset

from heterodyne.errors import DataError, HeterodyneError
from heterodyne.factories import describe_error
from heterodyne.runtime.data.read_ahead import Failed, ReaderPool
from heterodyne.runtime.data.sample_draws import generators_kept, seed_generators

__all__ = ["END", "Elements", "ElementsAhead", "Stream"]

Stream: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]


class _End:
    pass


END = _End()
"""Stands between the elements of two epochs."""


class Elements:
    """The elements of a stream, epoch after epoch, and the number of the next one.

    While an element is read, the generators of random numbers are those of its place: an augmentation is the same on each rank. Whoever
    reads gives the generators back (`generators_kept`).
    """

    def __init__(self, stream: Stream, seed: int) -> None:
        self._stream = stream
        self._seed = seed
        self._iterator: Iterator[Any] | None = None
        self._read: Any = None
        self._loaded: Any = None
        self._has_moved = False
        self.epoch = 0
        self.index = 0

    def next(self) -> Any:
        """The next element; `END` after the last one of an epoch. Raises DataError."""
        try:
            seed_generators(self._seed, self.epoch, self.index)
            element = next(self._opened())
        except StopIteration:
            if not self.index:
                raise DataError("the stream has no samples: give one that has some") from None
            self.epoch, self.index, self._iterator = self.epoch + 1, 0, None
            return END
        except DataError:
            raise
        except Exception as error:  # whatever the user's own code raises, it is reported as such
            raise DataError(f"sample {self.index} of the stream cannot be read: {describe_error(error)}") from error
        self.index += 1
        self._has_moved = True
        return element

    def state(self) -> dict[str, Any] | None:
        """None if the stream cannot say where it is."""
        self._opened()
        if not _resumable(self._read):
            return None
        # Before it gives its first element, a stream may not know yet where it is.
        where = self._read.state_dict() if self._has_moved else self._loaded
        return {"epoch": self.epoch, "index": self.index, "stream": where}

    def load(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.index, self._iterator = state["epoch"], state["index"], None
        self._opened(state["stream"])
        self._loaded = state["stream"]
        with generators_kept():
            for _ in range(state.get("taken", 0)):
                self.next()

    def _opened(self, state: Any = None) -> Iterator[Any]:
        if self._iterator is None:
            stream: Any = self._stream() if callable(self._stream) else self._stream
            self._read = stream
            if iter(stream) is stream and not callable(self._stream):
                raise DataError(
                    "a generator can be read only once: pass the function that makes it, without calling it"
                )
            if hasattr(stream, "set_epoch"):
                stream.set_epoch(self.epoch)
            if state is not None:
                stream.load_state_dict(state)
            self._iterator = iter(stream)
            self._has_moved, self._loaded = False, None
        return self._iterator


def _resumable(stream: object) -> bool:
    return hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")


class _Chunks(IterableDataset[Any]):
    """Chunks of so many elements: where the stream is, the number of the first one, and they, pickled.

    They are pickled here, because torch would hand over each tensor as an open file, and a shuffle buffer holds many.
    """

    def __init__(self, elements: Elements, size: int, state: Mapping[str, Any] | None) -> None:
        self._elements = elements
        self._size = size
        self._state = state

    def __iter__(self) -> Iterator[bytes | Failed]:
        elements = self._elements
        found: list[Any] = []
        try:
            if self._state is not None:
                elements.load(self._state)
            while True:
                where, epoch, index = pickle.dumps(elements.state()), elements.epoch, elements.index
                found = []
                while len(found) < self._size:
                    element = elements.next()
                    found.append(None if element is END else (element,))
                yield pickle.dumps((where, epoch, index, found))
        except HeterodyneError as error:
            if found:
                yield pickle.dumps((where, epoch, index, found))
            yield Failed(str(error))
        except Exception as error:  # noqa: BLE001  # whatever pickling the user's own objects raises
            yield Failed(
                f"sample {elements.index} of the stream cannot be sent by the process that reads ahead: {describe_error(error)}"
            )


class ElementsAhead:
    """The same elements, read ahead by a process.

    Args:
        chunk: elements that are sent at once.
        prefetch: chunks that are ready.
    """

    def __init__(self, elements: Elements, *, chunk: int, prefetch: int) -> None:
        self._elements = elements
        self._chunk = chunk
        self._prefetch = prefetch
        self._pool: ReaderPool | None = None
        self._given: Mapping[str, Any] | None = None
        self._where = b""
        self._found: list[Any] = []
        self._taken = 0
        self.epoch = 0
        self.index = 0

    def next(self) -> Any:
        """See `Elements`."""
        if self._taken == len(self._found):
            self._fetch()
        element = self._found[self._taken]
        self._taken += 1
        if element is None:
            self.epoch, self.index = self.epoch + 1, 0
            return END
        self.index += 1
        return element[0]

    def state(self) -> dict[str, Any] | None:
        """Return where the next element is, as `Elements.load` finds it; None if the stream cannot say where it is."""
        if not self._found:
            self._fetch()
        where = pickle.loads(self._where)
        return None if where is None else {**where, "taken": self._taken}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.close()
        self._given = state
        self._found, self._taken = [], 0

    def close(self) -> None:
        """End the process. The next element is read by another one, which begins where the stream was."""
        if self._pool is None:
            return
        # A stream that cannot say where it is is read again from the beginning of the epoch.
        if self._found:
            self._given = self.state() or {"epoch": self.epoch, "index": 0, "stream": None, "taken": self.index}
        self._found, self._taken = [], 0
        self._pool.close()
        self._pool = None

    def _fetch(self) -> None:
        """Take the next chunk. Raises DataError."""
        if self._pool is None:
            chunks = _Chunks(self._elements, self._chunk, self._given)
            self._pool = ReaderPool(chunks, keys=None, workers=1, prefetch=self._prefetch)
            self._pool.restart()
        found = self._pool.next()
        if isinstance(found, Failed):
            raise DataError(found.words)
        self._where, self.epoch, self.index, self._found = pickle.loads(found)
        self._taken = 0
