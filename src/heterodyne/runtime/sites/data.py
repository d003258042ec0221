"""The samples that a site has of every global batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from heterodyne.runtime.data.source import DataSource
from heterodyne.runtime.slices import BatchSource

__all__ = ["SiteData"]


@dataclass(frozen=True)
class _Part:
    """The samples ``[first, first + size)`` of a batch."""

    whole: BatchSource
    first: int
    size: int

    @property
    def digest(self) -> str | None:
        said: str | None = getattr(self.whole, "digest", None)
        return said

    @property
    def number_of(self) -> Callable[[int], int] | None:
        found: Callable[[int], int] | None = getattr(self.whole, "number_of", None)
        return None if found is None else lambda place: found(self.first + place)

    def samples(self, first: int, count: int) -> Mapping[str, Tensor]:
        if first < 0 or count < 0 or first + count > self.size:
            raise ValueError(f"samples {first} to {first + count} are not in a batch of {self.size}")
        return self.whole.samples(self.first + first, count)


@dataclass(frozen=True)
class SiteData:
    """Data of which a site trains on the samples ``[first, first + batch_size)`` of each global batch; it validates on all."""

    whole: DataSource
    first: int
    batch_size: int

    @property
    def sequence_length(self) -> int | None:
        return self.whole.sequence_length

    @property
    def identity(self) -> Mapping[str, str | int]:
        return self.whole.identity

    def batch(self, step: int) -> BatchSource:
        return _Part(self.whole.batch(step), self.first, self.batch_size)

    def validation_batches(self, samples: int) -> tuple[BatchSource, ...]:
        return self.whole.validation_batches(samples)

    def vocabulary(self) -> int | None:
        return self.whole.vocabulary()

    def state_dict(self) -> Mapping[str, Any] | None:
        return self.whole.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.whole.load_state_dict(state)

    def close(self) -> None:
        self.whole.close()
