"""Notices that steps take longer than they did, and which rank or link it is.

Each rank keeps what its passes took in the first steps, by what it read in them. Rank 0 compares each step's seconds with theirs. When
some in a row are off, all ranks compare their latest passes with the first ones that read as much, and time a message to the next rank;
what has become slower for one of them and not for most is at fault. Uneven lengths, or a loop that does more on all ranks alike, lead to
such a look, and to no word.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any

import torch

from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.units import format_seconds

__all__ = ["Slowdowns"]

WARMING = 2
"""Steps at the beginning that tell nothing: memory and threads are made in them."""
FIRST = 64
"""Steps after these that later ones are compared with."""
IN_A_ROW = 4
"""Steps that are off in a row before all ranks look."""
OFF = 1.25
"""By what factor."""
AT_FAULT = 1.5
"""How much slower one is than most where it is at fault."""
APART = 6
"""Steps from one look to the next."""
_NEAREST = 5  # of the first steps, by what was read
_LINK_FAULT = 2.0
_LEAST_PASSES_S = 0.01  # that passes must have become slower by: shorter ones vary with whatever else a host does
_LEAST_S = 0.002  # that a message must have become slower by
_MESSAGE = 2**19  # bytes
_PASSES = frozenset({"F", "B", "I", "W", "R"})


@dataclass(frozen=True)
class _Look:
    """Of each rank, what its latest passes took over what they should have (the least of them, and in the middle), by how many seconds
    they were longer, whether as much was read in first steps, and the seconds of a message to the next rank."""

    least: Sequence[float]
    slower: Sequence[float]
    longer_s: Sequence[float]
    known: Sequence[float]
    link_s: Sequence[float]


class Slowdowns:
    """Of one rank.

    Args:
        recorder: of its passes; where it is off, nothing is noticed.
        devices: the name of that of each rank, with its host.
    """

    def __init__(self, communicator: Communicator, recorder: Recorder, devices: Sequence[str]) -> None:
        self._communicator = communicator
        self._recorder = recorder
        self._devices = devices
        self._known: Set[int] = frozenset()
        self.reset()

    def reset(self) -> None:
        """Take the steps from here on as the first ones, since what a step does is another. Every rank calls it before the same step."""
        self._steps = 0
        self._first: list[tuple[int, float]] = []  # elements that were read, and seconds of passes
        self._latest: deque[tuple[int, float]] = deque(maxlen=IN_A_ROW + 1)
        self._paces: deque[float] = deque(maxlen=IN_A_ROW)
        self._pace_s: float | None = None
        self._links_s: Sequence[float] = ()
        self._looked = 0
        self._before: tuple[float, int] | None = None  # seconds and elements of the step before the latest

    def usual(self) -> Mapping[str, Any]:
        """Return what steps of this rank take, as JSON has it, for `expect`; nothing is known in the first ones."""
        if self._pace_s is None or self._known or not self._first:
            return {}
        return {"pace_s": self._pace_s, "passes": self._first, "links_s": list(self._links_s)}

    def expect(self, usual: Mapping[str, Any]) -> None:
        """Compare with what steps took when they were last done under the same plan. Raises ValueError for what is not from `usual`."""
        try:
            passes = [(int(elements), float(passes_s)) for elements, passes_s in usual["passes"]]
            pace_s, links_s = float(usual["pace_s"]), list(map(float, usual["links_s"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"it is none of speeds: {error}") from error
        if len(links_s) != self._communicator.world_size or not min(pace_s, *links_s) > 0:
            raise ValueError("it is of other ranks")
        self._first, self._pace_s, self._links_s = passes[:FIRST], pace_s, links_s

    @property
    def suspects(self) -> bool:
        """Return whether this rank, which is the first, has seen steps in a row that are off."""
        if self._communicator.rank or self._pace_s is None or self._steps < self._looked + APART:
            return False
        if len(self._paces) < IN_A_ROW:
            return False
        return min(self._paces) > OFF * self._pace_s or max(self._paces) * OFF < self._pace_s

    def note(self, step: int, seconds: float, elements: int, *, look: bool) -> str | None:
        """A step is over: look at the one before it, whose passes a device has ended by now. Collective where ``look``, which any rank has
        suspected before this step, as all ranks know.

        ``elements``: that this rank has read.

        Returns what is slower now, the same on every rank, "" if nothing is any more; None where that is as it was known before.
        """
        before, self._before = self._before, (seconds, elements)
        if before is None:
            return None
        seconds, elements = before
        self._steps += 1
        if not self._recorder.on or self._communicator.world_size < 2 or self._steps <= WARMING:
            return None
        passes_s = self._recorder.computed_s(_PASSES)
        if len(self._latest) == self._latest.maxlen and len(self._first) < FIRST and not self._known and not look:
            self._first.append(self._latest[0])
        self._latest.append((elements, passes_s))
        self._paces.append(seconds / max(1, elements))
        if self._steps == WARMING + IN_A_ROW and self._pace_s is None:
            self._links_s = self._gathered().link_s
            self._pace_s, self._looked = median(self._paces), self._steps
        elif look and self._pace_s is not None:
            self._pace_s, self._looked = median(self._paces), self._steps
            return self._compare(step - 1)
        return None

    def _compare(self, step: int) -> str | None:
        known, at_fault = self._known, self._at_fault(self._gathered())
        self._known = at_fault.keys()
        if at_fault.keys() == known:
            return None
        return f"{', '.join(at_fault.values())} since about step {max(1, step + 1 - IN_A_ROW)}" if at_fault else ""

    def _gathered(self) -> _Look:
        latest = list(self._latest)[-IN_A_ROW:]
        pairs = [(passes_s, usual) for elements, passes_s in latest if (usual := self._usual_s(elements))] or [
            (0.0, 1.0)
        ]
        slower = [passes_s / usual for passes_s, usual in pairs]
        longer_s = median(passes_s - usual for passes_s, usual in pairs)
        first = [elements for elements, _ in self._first]
        known = bool(first) and all(min(first) <= elements <= max(first) for elements, _ in latest)
        rows = torch.zeros(self._communicator.world_size, 5, dtype=torch.float64)
        rows[self._communicator.rank] = torch.tensor([min(slower), median(slower), longer_s, known, self._message_s()])
        self._communicator.control.all_reduce(rows).wait()
        return _Look(*(rows[:, column].tolist() for column in range(5)))

    def _usual_s(self, elements: int) -> float:
        """Seconds of passes that read so much, by the first steps that read nearly as much; 0.0 if that is not known."""
        if not elements:
            return 0.0
        near = sorted((of for of in self._first if of[0]), key=lambda of: abs(math.log(of[0] / elements)))[:_NEAREST]
        return elements * median(passes_s / read for read, passes_s in near) if near else 0.0

    def _at_fault(self, now: _Look) -> dict[int, str]:
        """Return, in words, which ranks compute slower, by rank; else which links have become slower, by -1 - rank, or that all ranks have,
        by their number."""
        typical = max(1.0, median_low(list(filter(None, now.slower)) or [1.0]))
        ranks = {
            rank: f"{self._named(rank)} computes {now.slower[rank]:.1f} times slower than in the first steps"
            for rank, least in enumerate(now.least)
            if least > AT_FAULT * typical and now.longer_s[rank] > _LEAST_PASSES_S
        }
        if ranks:  # the messages of a slow rank are slow, too
            return ranks
        longer = [after / first for after, first in zip(now.link_s, self._links_s, strict=True)]
        typical = max(1.0, median_low(longer))
        links = {}
        for rank, factor in enumerate(longer):
            if factor > _LINK_FAULT * typical and now.link_s[rank] - self._links_s[rank] > _LEAST_S:
                ends = f"from {self._named(rank)} to {self._named((rank + 1) % len(longer))}"
                taken = f"{factor:.1f} times longer than in the first steps ({format_seconds(now.link_s[rank])} for 512 KiB)"
                links[-1 - rank] = f"messages {ends} take {taken}"
        if not links and all(now.known) and min(now.least) > AT_FAULT and min(now.longer_s) > _LEAST_PASSES_S:
            words = f"all ranks compute {median(now.slower):.1f} times slower than in the first steps: are the machines busy?"
            return {len(now.least): words}
        return links

    def _named(self, rank: int) -> str:
        return f"rank {rank} ({self._devices[rank]})"

    def _message_s(self) -> float:
        """Seconds of a message to the next rank and of its answer; ranks that are neighbours do it one after the other. Collective."""
        ring, rank, best_s = self._communicator.world_size, self._communicator.rank, float("inf")
        message, answer = torch.zeros(_MESSAGE // 8, dtype=torch.float64), torch.zeros(1)
        for _ in range(2):
            for turn in range(3):
                if _turn(rank, ring) == turn:
                    started_s = time.perf_counter()
                    self._communicator.send(message, (rank + 1) % ring)
                    self._communicator.receive(answer, (rank + 1) % ring)
                    best_s = min(best_s, time.perf_counter() - started_s)
                elif _turn((rank - 1) % ring, ring) == turn:
                    self._communicator.receive(message, (rank - 1) % ring)
                    self._communicator.send(answer, (rank - 1) % ring)
        return best_s


def _turn(rank: int, ring: int) -> int:
    return 2 if ring % 2 and rank == ring - 1 else rank % 2
