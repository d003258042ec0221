"""The problem that a search for orders solves: what there is to do, what it takes, and who needs what of whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from heterodyne.plan.schedules.clock import AGAIN, KINDS, Clock
from heterodyne.plan.schedules.held import running_bytes, taken_and_freed
from heterodyne.plan.schedules.times import Read, StageBytes, StageTimes

__all__ = ["PipelineWork"]


@dataclass(frozen=True, kw_only=True)
class PipelineWork:
    """Stages with their times and bytes, on places with so much room, and a number of micro-batches.

    ``free_bytes``: by place. ``joined``: no backward of the last stage begins before all its forwards are done. ``clock`` and the tables
    behind it follow from the rest.
    """

    times: Sequence[StageTimes]
    places: Sequence[int]
    micro_batches: int
    reads: Sequence[Read]
    held: Sequence[StageBytes]
    free_bytes: Sequence[int]
    joined: bool = False
    clock: Clock = field(init=False)
    taken: list[int] = field(init=False)  # bytes by code
    freed: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "clock", Clock(self.times, self.places, self.micro_batches, self.reads))
        kinds = [(kind, False) for kind in KINDS] + [(kind, True) for kind in AGAIN]
        pairs = [
            taken_and_freed(kind, stage, again=again)
            for kind, again in kinds
            for stage in self.held
            for _ in range(self.micro_batches)
        ]
        object.__setattr__(self, "taken", [taken for taken, _ in pairs])
        object.__setattr__(self, "freed", [freed for _, freed in pairs])

    def fits(self, row: Sequence[int], place: int) -> bool:
        """Return whether a place has the room for its row of codes, and turns back when it may."""
        if self.joined and place == self.places[-1] and self._turns_early(row):
            return False
        along = running_bytes([self.taken[code] for code in row], [self.freed[code] for code in row])
        return max(along, default=0) <= self.free_bytes[place]

    def _turns_early(self, row: Sequence[int]) -> bool:
        last = (len(self.places) - 1) * self.micro_batches
        forwards = 0
        for code in row:
            kind, cell = divmod(code, self.clock.cells)
            if cell >= last and kind == KINDS["F"]:
                forwards += 1
            elif cell >= last and forwards < self.micro_batches:
                return True
        return False

    def stages_of(self, place: int) -> list[int]:
        return [stage for stage, where in enumerate(self.places) if where == place]

    def period_s(self) -> float:
        """Seconds a micro-batch of the place that has the most to do."""
        return max(sum(self.times[stage].total_s for stage in self.stages_of(place)) for place in set(self.places))

    def lag_s(self, read: Read, *, backward: bool = False) -> float:
        """Seconds of a transfer: none within a place."""
        if self.places[read.source] == self.places[read.reader]:
            return 0.0
        return (read.backward_s or 0.0) if backward else read.forward_s

    def arrivals_s(self) -> list[float]:
        """By stage, when the first micro-batch can be there at the earliest."""
        came = [0.0] * len(self.times)
        for read in sorted(self.reads, key=lambda read: read.source):
            came[read.reader] = max(
                came[read.reader], came[read.source] + self.times[read.source].forward_s + self.lag_s(read)
            )
        return came

    def returns_s(self) -> list[float]:
        """By stage, the shortest time from the start of a forward to the moment when its gradient has come back."""
        back = [time.forward_s for time in self.times]
        for read in sorted(self.reads, key=lambda read: read.reader, reverse=True):
            if read.backward_s is not None:
                there = self.times[read.source].forward_s + self.lag_s(read) + back[read.reader]
                again = there + self.times[read.reader].input_s + self.lag_s(read, backward=True)
                back[read.source] = max(back[read.source], again)
        return back

    def bound_s(self) -> float:
        """No orders take less: a place cannot start before its first input comes, and then has all its work to do."""
        if not self.micro_batches:
            return 0.0
        arrivals, returns = self.arrivals_s(), self.returns_s()
        whole = max(
            came + back + time.input_s + time.weight_s
            for came, back, time in zip(arrivals, returns, self.times, strict=True)
        )
        work = [
            min(arrivals[stage] for stage in stages)
            + self.micro_batches * sum(self.times[stage].total_s for stage in stages)
            for stages in map(self.stages_of, set(self.places))
        ]
        return max(whole, *work)
