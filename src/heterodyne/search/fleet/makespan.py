"""Seconds of one pipeline of alike micro-batches, exactly as the clock of the schedules plays them, for every count at once.

1F1B goes in rounds: in round r stage i of p runs the forward r + p - i - 1 and the backward r. A round needs nothing but the round
before it, so once a round is the one before it, later, so are all that follow, and a thousand micro-batches cost no more than a few.
Only the last p - 1 rounds, in which the forwards run out, are played for each count. GPipe of alike micro-batches has a formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from heterodyne.search.fleet.plan import ScheduleName

__all__ = ["Makespans", "StageSeconds", "lines_of"]

_CLOSE = 1e-13


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSeconds:
    """Of one micro-batch. ``backward_s`` with what is recomputed; ``send_s``: to the next stage, and as much back."""

    forward_s: float
    backward_s: float
    send_s: float = 0.0


@dataclass(frozen=True)
class Makespans:
    """How long a pipeline takes, by its number of micro-batches."""

    stages: Sequence[StageSeconds]
    schedule: ScheduleName = "1F1B"
    _rounds: list[tuple[list[float], list[float]]] = field(default_factory=list, repr=False)
    _step: list[float] = field(default_factory=list, repr=False)  # seconds between rounds, once they are alike
    _known: dict[int, float] = field(default_factory=dict, repr=False)

    def seconds(self, micro_batches: int) -> float:
        """From the first forward to the last backward."""
        if micro_batches < 1:
            return 0.0
        if micro_batches not in self._known:
            played = self._gpipe if self.schedule == "GPipe" else self._one_f_one_b
            self._known[micro_batches] = played(micro_batches)
        return self._known[micro_batches]

    def bound_s(self, micro_batches: int) -> float:
        """Never more than `seconds`: a stage waits for its first forward, works, and the stages before it have its last backward to do."""
        if micro_batches < 1:
            return 0.0
        return max(around + micro_batches * each for around, each in self.lines)

    @cached_property
    def lines(self) -> list[tuple[float, float]]:
        """For each stage that can be the last one: seconds in which it cannot work, and seconds of work for one micro-batch."""
        return lines_of([(stage.forward_s + stage.backward_s, stage.send_s) for stage in self.stages])

    def most_within(self, seconds: float, at_most: int) -> int:
        """The most micro-batches that are done in so many seconds."""
        known, over = 0, self.most_bound(seconds, at_most) + 1
        tried = over - 1
        while over - known > 1:
            if self.seconds(tried) <= seconds * (1 + _CLOSE):
                known = tried
            else:
                over = tried
            tried = (known + over) // 2
        return known

    def most_bound(self, seconds: float, at_most: int) -> int:
        """Never less than `most_within`, by `bound_s`."""
        bound = min(
            (int((seconds - around) / each * (1 + _CLOSE)) if each > 0 else at_most) for around, each in self.lines
        )
        return max(0, min(at_most, bound))

    def _gpipe(self, micro_batches: int) -> float:
        once = sum(s.forward_s + s.backward_s for s in self.stages) + 2 * sum(s.send_s for s in self.stages[:-1])
        longest = max(s.forward_s for s in self.stages) + max(s.backward_s for s in self.stages)
        return once + (micro_batches - 1) * longest

    def _one_f_one_b(self, micro_batches: int) -> float:
        count = len(self.stages)
        if micro_batches < count:
            forward, backward = _first(self.stages, micro_batches)
            left = range(1, micro_batches)
        else:
            forward, backward = self._round(micro_batches - count)
            left = range(micro_batches - count + 1, micro_batches)
        for number in left:
            forward, backward = _next(self.stages, forward, backward, number, micro_batches)
        return backward[0]

    def _round(self, number: int) -> tuple[list[float], list[float]]:
        """When the forwards and backwards of a round end, if forwards never run out."""
        rounds = self._rounds
        if not rounds:
            rounds.append(_first(self.stages, len(self.stages)))
        while len(rounds) <= number and not self._step:
            forward, backward = rounds[-1]
            after = _next(self.stages, forward, backward, len(rounds), None)
            later = after[1][0] - backward[0]
            slack = _CLOSE * after[1][0]
            if all(
                abs(new - old - later) <= slack
                for now, then in zip(after, rounds[-1], strict=True)
                for new, old in zip(now, then, strict=True)
            ):
                self._step.append(later)
            rounds.append(after)
        if number < len(rounds):
            return rounds[number]
        more = (number - len(rounds) + 1) * self._step[0]
        forward, backward = rounds[-1]
        return [end + more for end in forward], [end + more for end in backward]


def lines_of(stages: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of stages with the seconds of a micro-batch and of a message (see `Makespans.lines`).

    A stage before one that is no faster waits less and works no more, so it is left out.
    """
    found: list[tuple[float, float]] = []
    around = 0.0
    for each, send_s in stages:
        while found and found[-1][1] <= each:
            found.pop()
        found.append((around, each))
        around += each + 2 * send_s
    return found


def _first(stages: Sequence[StageSeconds], micro_batches: int) -> tuple[list[float], list[float]]:
    """Round 0: all warm-up forwards, and the first backward of every stage. ``micro_batches``: the most that a stage begins with."""
    count = len(stages)
    ends = [0.0] * min(count, micro_batches)
    forward = []
    came = 0.0
    for place, stage in enumerate(stages):
        now = 0.0
        for index in range(min(micro_batches, count - place)):
            now = max(now, ends[index] + came) + stage.forward_s
            ends[index] = now
        forward.append(now)
        came = stage.send_s
    return forward, _backwards(stages, forward, forward)


def _next(
    stages: Sequence[StageSeconds],
    forward: Sequence[float],
    backward: Sequence[float],
    number: int,
    micro_batches: int | None,
) -> tuple[list[float], list[float]]:
    """The round after one. ``micro_batches``: how many forwards there are; None: they never run out."""
    count = len(stages)
    ends = []
    free = []
    for place, stage in enumerate(stages):
        held = count - place if micro_batches is None else min(count - place, micro_batches)
        if micro_batches is not None and number + held > micro_batches:
            ends.append(forward[place])
            free.append(backward[place])
            continue
        now = backward[place]
        if place:
            now = max(now, forward[place - 1] + stages[place - 1].send_s)
        now += stage.forward_s
        ends.append(now)
        free.append(now)
    return ends, _backwards(stages, ends, free)


def _backwards(stages: Sequence[StageSeconds], forward: Sequence[float], free: Sequence[float]) -> list[float]:
    """The backwards of a round, from the last stage to the first; ``free``: when each stage has ended what comes before."""
    ends = [0.0] * len(stages)
    came = 0.0
    for place in range(len(stages) - 1, -1, -1):
        start = max(free[place], forward[place])
        if place < len(stages) - 1:
            start = max(start, came + stages[place].send_s)
        came = ends[place] = start + stages[place].backward_s
    return ends
