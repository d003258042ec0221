"""How one device best runs a number of samples: the micro-batch sizes, and their time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Stage

__all__ = ["MicroBatchChoice"]

_DOUBT = 0.03  # ways that are nearer to each other cannot be distinguished by what was measured


@dataclass(frozen=True, kw_only=True)
class MicroBatchChoice:
    """The ways of one device to run samples.

    The smaller micro-batch of the rest runs first: gradient sync overlaps with the last backward, so that should be long.

    Args:
        seconds: forward and backward of one micro-batch of that size; non-decreasing, 0 at 0.
        sizes: the micro-batch sizes that fit its memory.
        fixed_s: seconds of a step that do not depend on the share.
        stage: the model on it with blocks that it recomputes or offloads, included in ``seconds``; None: it keeps all activations.
    """

    seconds: Callable[[float], float]
    sizes: tuple[int, ...]
    fixed_s: float = 0.0
    stage: Stage | None = None

    @cached_property
    def _times(self) -> tuple[float, ...]:
        """Seconds of a micro-batch of each size from 0 to the largest; a table asks for each many times."""
        return tuple(self.seconds(size) for size in range(self.largest + 1))

    @property
    def largest(self) -> int:
        return max(self.sizes)

    @property
    def rate(self) -> float:
        """Samples per second of forward and backward at the best of the sizes."""
        return max(size / self.seconds(size) if self.seconds(size) > 0 else float("inf") for size in self.sizes)

    def micro_batches(self, samples: int) -> MicroBatches:
        """The fastest way: one size, and one smaller micro-batch for the rest. Of ways that are as good as equal, the one with the
        fewest micro-batches: each has costs of its own that show only in a whole step.
        """
        if samples == 0:
            return MicroBatches()
        return MicroBatches(tuple(sorted(MicroBatches.of_samples(samples, self._size(samples)).sizes)))

    def compute_s(self, micro_batches: MicroBatches) -> float:
        """Seconds of forward and backward of those micro-batches."""
        return sum(self._times[size] for size in micro_batches.sizes)

    def table(self, samples: int) -> list[float]:
        """Seconds of a step for 0 to ``samples`` samples, non-decreasing. A device without a share is left out, so 0 takes nothing."""
        return [0.0, *self._rising(self._of_size(n, self._size(n)) for n in range(1, samples + 1))]

    def table_of_count(self, count: int, samples: int) -> list[float]:
        """Seconds for ``count`` to ``samples`` samples in exactly ``count`` nearly equal micro-batches, as far as they fit its memory."""
        return self._rising(
            self.compute_s(MicroBatches.of_count(n, count))
            for n in range(count, min(samples, count * self.largest) + 1)
        )

    def _size(self, samples: int) -> int:
        seconds = {size: self._of_size(samples, size) for size in self.sizes}
        limit = min(seconds.values()) * (1 + _DOUBT)
        good = [size for size, needed in seconds.items() if needed <= limit]
        return min(good, key=lambda size: (-(-samples // size), seconds[size], size))

    def _of_size(self, samples: int, size: int) -> float:
        whole, rest = divmod(samples, size)
        return whole * self._times[size] + self._times[rest]

    def _rising(self, values: Iterable[float]) -> list[float]:
        """With the fixed seconds added, and without falls in the last digit, which the order of additions can make."""
        return [self.fixed_s + value for value in accumulate(values, max)]
