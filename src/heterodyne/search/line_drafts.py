"""Drafts of pipelines: for some devices the best order of pipeline ranks, the best cut and the best number of micro-batches.

Drafts cost table look-ups. All orders of up to five devices are drawn; beyond that five seeds and one round of swaps. Devices of one
class in one node are interchangeable (``kinds``: for each device a number, the same for those), so lines that differ only by which of
them stands where are one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations, product
from math import inf

from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.search.classes import first_of, interchangeable
from heterodyne.search.drafts import Draft, Drafting, Line
from heterodyne.search.points import MOST_CROSSING, points_of
from heterodyne.search.tables import Tables

__all__ = ["LineDrafts", "orders"]

_MOST_POINTS = 220
_MOST_INSIDE = 4
_FINER = 0.99  # cuts inside blocks are taken if they are so much shorter
_CLOSE = 1e-9
_ALL_ORDERS = 5


@dataclass(frozen=True, kw_only=True)
class LineDrafts:
    """Args:
    sizes: the micro-batch sizes that may be taken.
    count: the number of micro-batches that the mathematics asks for, None where it is free.
    """

    model: CostModel
    samples: int
    sizes: tuple[int, ...]
    count: int | None = None

    @cached_property
    def drafting(self) -> Drafting:
        return self._drafting(0, MOST_CROSSING)

    @cached_property
    def _finer(self) -> Drafting:
        """With cuts inside the blocks as well."""
        return self._drafting(self._inside, MOST_CROSSING)

    @property
    def _inside(self) -> int:
        """Cuts in each block."""
        blocks = len(self.model.graph.blocks)
        return max(0, min(_MOST_INSIDE, (_MOST_POINTS - blocks) // max(1, blocks)))

    def _drafting(self, inside: int, most_crossing: float) -> Drafting:
        points = points_of(self.model.graph, inside=inside, most_crossing=most_crossing)
        return Drafting(model=self.model, tables=Tables(model=self.model, points=points, like=first_of(self.kinds)))

    @cached_property
    def usable(self) -> tuple[str, ...]:
        """The devices that can hold at least some stage."""
        tables = self._finer.tables
        return tuple(d.id for d in self.model.cluster.devices if tables.holds_any(d.id, min(self.sizes)))

    @cached_property
    def kinds(self) -> dict[str, int]:
        return interchangeable(self.model)

    @cached_property
    def rate(self) -> dict[str, float]:
        """Samples/s of the whole model on each device, at the best of the sizes."""
        return {d.id: self.model.compute[d.id].rate(self.sizes) for d in self.model.cluster.devices}

    def best(self, devices: Sequence[str], samples: int | None = None) -> Draft:
        """The best draft of any line and size of micro-batch. Raises InfeasibleError if none fits."""
        samples = self.samples if samples is None else samples
        lines = self._lines(devices)
        failure: InfeasibleError | None = None
        for drafting in (self.drafting, self._finer):  # where memory is short, cuts inside blocks may be what helps
            best: Draft | None = None
            for micro_batches, line in product(self._micro_batches(samples), lines):
                try:
                    draft = drafting.draft(line, micro_batches)
                except InfeasibleError as error:
                    failure = error
                    continue
                if best is None or draft.estimate_s < best.estimate_s * (1 - _CLOSE):
                    best = draft
            if best is not None:
                return self._swapped(drafting, best)
        raise failure or InfeasibleError(
            f"{samples} samples cannot be cut into {self.count} micro-batches of at most {max(self.sizes)}"
        )

    @cached_property
    def finest(self) -> Drafting:
        """With cuts inside the blocks wherever they may be, whatever crosses there: for what fits no other way."""
        return self._drafting(self._inside, inf)

    def roomiest(self, devices: Sequence[str]) -> list[Draft]:
        """Of every line and micro-batches the draft with most memory left on the device that has least of it, however long it takes;
        none that lacks any. Most room first.
        """
        found: list[tuple[float, Draft]] = []
        for micro_batches in self._micro_batches(self.samples):
            for line in self._lines(devices):
                with suppress(InfeasibleError):
                    found.append(self.finest.roomiest(line, micro_batches))
        return [draft for lacks, draft in sorted(found, key=lambda each: each[0]) if lacks <= 0]

    def fine(self, draft: Draft) -> tuple[Draft, Drafting]:
        """The same line cut with more care: inside blocks if that pays."""
        options: list[tuple[Draft, Drafting]] = []
        for drafting in (self.drafting, self._finer) if len(draft.line) > 1 else (self.drafting,):
            try:
                cut = drafting.draft(draft.line, draft.micro_batches, exact=True)
            except InfeasibleError:
                continue  # the other cuts are those that the draft was drawn with
            if not options or cut.estimate_s < options[0][0].estimate_s * _FINER:
                options.insert(0, (cut, drafting))
        return options[0]

    def _lines(self, devices: Sequence[str]) -> list[Line]:
        memory = {d.id: d.memory_bytes for d in self.model.cluster.devices}
        most = len(self.drafting.points) - 1
        kept = sorted(sorted(devices, key=lambda d: -self.rate[d])[:most], key=list(devices).index)
        return list(orders(kept, self.kinds, memory, self.rate))

    def _swapped(self, drafting: Drafting, draft: Draft) -> Draft:
        """One round of swaps of two places."""
        best = draft
        for line in _swaps(draft.line, self.kinds):
            try:
                tried = drafting.draft(line, draft.micro_batches)
            except InfeasibleError:
                continue
            if tried.estimate_s < best.estimate_s * (1 - _CLOSE):
                best = tried
        return best

    def _micro_batches(self, samples: int) -> list[MicroBatches]:
        if self.count is not None:
            fits = self.count <= samples <= self.count * max(self.sizes)
            counts = [self.count] if fits else []
        else:
            counts = sorted({-(-samples // min(size, samples)) for size in self.sizes}, reverse=True)
        return [MicroBatches(tuple(sorted(MicroBatches.of_count(samples, count).sizes))) for count in counts]


def orders(
    devices: Sequence[str], kinds: Mapping[str, int], memory: Mapping[str, int], rate: Mapping[str, float]
) -> list[Line]:
    """Orders of the devices, larger memory first at the head, since early stages hold more activations."""
    by_memory = sorted(devices, key=lambda d: (-memory[d], -rate[d]))
    by_rate = sorted(devices, key=lambda d: -rate[d])
    found: dict[tuple[int, ...], Line] = {}
    for order in (by_memory, by_rate, by_rate[::-1], devices, devices[::-1]):
        found.setdefault(tuple(kinds[d] for d in order), tuple(order))
    for line in permutations(by_memory) if len(devices) <= _ALL_ORDERS else ():
        found.setdefault(tuple(kinds[d] for d in line), line)
    return list(found.values())


def _swaps(line: Line, kinds: Mapping[str, int]) -> Iterator[Line]:
    """Lines in which two devices have changed their places, neighbours first."""
    for a, b in sorted(combinations(range(len(line)), 2), key=lambda pair: pair[1] - pair[0]):
        if kinds[line[a]] != kinds[line[b]]:
            changed = list(line)
            changed[a], changed[b] = line[b], line[a]
            yield tuple(changed)
