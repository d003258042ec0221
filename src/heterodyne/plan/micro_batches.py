"""How one pipeline cuts its share of the global batch into micro-batches: ``7x4``, ``3x4+1x2``, ``0``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

__all__ = ["MicroBatches"]

_RUN = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")
_MOST = 2**16


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """The sizes of the micro-batches in the order in which they run; none for a pipeline without a share.

    >>> str(MicroBatches((4, 4, 4, 2)))
    '3x4+1x2'
    >>> MicroBatches.parse("3x4+1x2").samples
    14
    """

    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"a micro-batch needs at least one sample: {self.sizes}")

    @classmethod
    def parse(cls, text: str) -> MicroBatches:
        """The inverse of `str`. Raises ValueError."""
        if text == "0":
            return cls()
        runs = [_RUN.fullmatch(part) for part in text.split("+")]
        if any(run is None for run in runs):
            raise ValueError(
                f"{text!r} is not a list of micro-batches; write COUNTxSIZE, as in '7x4' or '3x4+1x2', or '0' for none"
            )
        counts = [(int(run[1]), int(run[2])) for run in runs if run]
        if sum(count for count, _ in counts) > _MOST:
            raise ValueError(f"{text!r} has more than {_MOST:,} micro-batches")
        return cls(tuple(size for count, size in counts for _ in range(count)))

    @classmethod
    def of_samples(cls, samples: int, size: int) -> MicroBatches:
        """As many micro-batches of ``size`` as fit, and one smaller last one for the rest."""
        whole, rest = divmod(samples, size)
        return cls((size,) * whole + ((rest,) if rest else ()))

    @classmethod
    def of_count(cls, samples: int, count: int) -> MicroBatches:
        """``count`` micro-batches whose sizes differ by one sample at most, the larger ones first. Raises ValueError."""
        if count > samples:
            raise ValueError(f"{samples} samples cannot make {count} micro-batches")
        size, larger = divmod(samples, count) if count else (0, 0)
        return cls((size + 1,) * larger + (size,) * (count - larger))

    @property
    def samples(self) -> int:
        return sum(self.sizes)

    def offsets(self) -> Iterator[tuple[int, int]]:
        """``(first sample, size)`` of each micro-batch, counted from the first sample of the pipeline."""
        first = 0
        for size in self.sizes:
            yield first, size
            first += size

    def __len__(self) -> int:
        return len(self.sizes)

    def __str__(self) -> str:
        return "+".join(f"{len(list(run))}x{size}" for size, run in groupby(self.sizes)) or "0"
