"""Seconds of one pipeline of alike micro-batches, exactly as the clock of the schedules plays them, for every count at once.

1F1B goes in rounds: in round r stage i of p runs the forward r + p - i - 1 and the backward r. A round needs nothing but the round
before it, so once a round is the one before it, later, so are all that follow, and a thousand micro-batches cost no more than a few.
Only the last p - 1 rounds, in which the forwards run out, are played for each count. GPipe of alike micro-batches has a formula.

ZB-H1 and ZB-H2 go in such rounds too. The interleaved schedules are played by their own orders (`orders`), of many micro-batches only
as many as it takes until they come again. An action waits for none that lies more than `_reach` micro-batches before it; so once all
between begin and end of the orders are the ones of a round before, later, over as many micro-batches, so are all that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from heterodyne.search.fleet.orders import Steps, round_size, steps_of
from heterodyne.search.fleet.plan import SPLIT, ScheduleName

__all__ = ["Makespans", "StageSeconds", "place_lines"]

_CLOSE = 1e-13


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSeconds:
    """Of one micro-batch. ``backward_s`` with what is recomputed, which alone takes ``again_s``; ``send_s``: to the next stage, and as
    much back.

    The gradients of the weights are taken to be half of the backward: a matrix product has two of its size there, dx = dy w' and
    dw = x' dy. What else there is (attention, norms) has hardly weights, so they are rather less; the tables do not tell. What is
    recomputed comes before the gradients of the inputs.
    """

    forward_s: float
    backward_s: float
    send_s: float = 0.0
    again_s: float = 0.0

    @property
    def weight_s(self) -> float:
        """The half W of the backward."""
        return (self.backward_s - self.again_s) / 2

    @property
    def input_s(self) -> float:
        """The half I of the backward, with what is recomputed."""
        return self.backward_s - self.weight_s


@dataclass(frozen=True)
class Makespans:
    """How long a pipeline takes, by its number of micro-batches.

    Args:
        stages: in the order of the layers; with ``chunks`` on each place, stage i is on place i modulo their number.
        played: the number of actions that were played is added to its one entry.
    """

    stages: Sequence[StageSeconds]
    schedule: ScheduleName = "1F1B"
    chunks: int = 1
    played: list[int] = field(default_factory=lambda: [0], repr=False)
    _rounds: list[tuple[list[float], list[float]]] = field(default_factory=list, repr=False)
    _step: list[float] = field(default_factory=list, repr=False)  # seconds between rounds, once they are alike
    _known: dict[int, float] = field(default_factory=dict, repr=False)
    _periods: dict[tuple[int, int], tuple[int, int, float]] = field(default_factory=dict, repr=False)

    @property
    def places(self) -> int:
        return len(self.stages) // self.chunks

    def seconds(self, micro_batches: int) -> float:
        """From the first forward to the last backward."""
        if micro_batches < 1:
            return 0.0
        if micro_batches not in self._known:
            if len(self.stages) == 1 or self.schedule == "1F1B":
                self._known[micro_batches] = self._one_f_one_b(micro_batches)
            elif self.schedule == "GPipe":
                self._known[micro_batches] = self._gpipe(micro_batches)
            elif self.schedule in ("ZBH1", "ZBH2"):
                self._known[micro_batches] = self._zero_bubble(micro_batches)
            else:
                self._known[micro_batches] = self._by_orders(micro_batches)
        return self._known[micro_batches]

    def bound_s(self, micro_batches: int) -> float:
        """Never more than `seconds`: a place waits for its first forward, works, and the stages before it have its last backward to do."""
        if micro_batches < 1:
            return 0.0
        return max(around + micro_batches * each for around, each in self.lines)

    @cached_property
    def lines(self) -> list[tuple[float, float]]:
        """For each place that can be the last one: seconds in which it cannot work, and seconds of work for one micro-batch."""
        return place_lines(self.stages, self.places, split=self.schedule in SPLIT)

    def most_within(self, seconds: float, at_most: int) -> int:
        """The most micro-batches that are done in so many seconds."""
        known, over = 0, self.most_bound(seconds, at_most) + 1
        tried = over - 1
        each = max(each for _, each in self.lines)
        while over - known > 1:
            late = self.seconds(tried) - seconds
            if late <= seconds * _CLOSE:
                known = tried
                tried = (known + over) // 2
            else:
                over = tried
                # One more takes about as long as the slowest place works on it.
                fewer = tried - ceil(late / each) if each > 0 else known
                tried = fewer if fewer > known else (known + over) // 2
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

    def _zero_bubble(self, micro_batches: int) -> float:
        """ZB-H1 and ZB-H2 in rounds of I, F and a W that is owed; a round needs forwards of the round before it, or of the one before that.

        Where a round has come to be the one before, later, those in which there still are forwards for all stages are passed over.
        """
        stages, count, early = self.stages, len(self.stages), self.schedule == "ZBH2"
        ahead = [2 * (count - place) - 1 if early else count - 1 - place for place in range(count)]
        owed = [2 * place if early else place for place in range(count)]
        free = [0.0] * count
        forwards: list[list[float]] = [[] for _ in stages]
        skipped = 0

        def forward(place: int, index: int) -> None:
            """Of a micro-batch, if it is there."""
            if index < micro_batches:
                start = free[place]
                if place:
                    start = max(start, forwards[place - 1][index - skipped] + stages[place - 1].send_s)
                free[place] = start + stages[place].forward_s
                forwards[place].append(free[place])

        for place in range(count):
            for index in range(ahead[place]):
                forward(place, index)
        before: list[float] = []
        number = 0
        while number < micro_batches:
            if not early:
                for place in range(count):
                    forward(place, ahead[place] + number)
            came = 0.0
            for place in range(count - 1, -1, -1):
                came = max(free[place], came + stages[place].send_s) if place < count - 1 else free[place]
                came += stages[place].input_s
                free[place] = came
            for place in range(count):
                if early:
                    forward(place, ahead[place] + number)
                if number >= owed[place]:
                    free[place] += stages[place].weight_s
            self.played[0] += count
            number += 1
            left = micro_batches - ahead[0] - number
            if number > owed[-1] and left > 1:
                now = [*free, *(end for own in forwards for end in own[-2:])]
                later = now[0] - before[0] if before else 0.0
                if before and all(abs(a - b - later) <= _CLOSE * now[0] for a, b in zip(now, before, strict=True)):
                    free = [end + (left - 1) * later for end in free]
                    forwards = [[end + (left - 1) * later for end in own] for own in forwards]
                    skipped += left - 1
                    number += left - 1
                before = now
        return max(free[n] + min(owed[n], micro_batches) * stages[n].weight_s for n in range(count))

    def _by_orders(self, micro_batches: int) -> float:
        """As the schedule's orders are played: whole, or where they have come to repeat themselves, some periods less."""
        size = round_size(self.places, self.chunks, micro_batches)
        few, period, later = self._periodic(micro_batches, size)
        if few >= micro_batches:
            return max(self._ends(micro_batches)[0])
        few += (micro_batches - few) % period
        while few < micro_batches and round_size(self.places, self.chunks, few) != size:
            few += period
        if few not in self._known:
            self._known[few] = max(self._ends(few)[0])
        return self._known[few] + (micro_batches - few) // period * later

    def _periodic(self, micro_batches: int, size: int) -> tuple[int, int, float]:
        """From how many micro-batches on, in rounds of a size with the same rest, another so many take another so many seconds."""
        key = size, micro_batches % size
        if key in self._periods and self._periods[key][0] < micro_batches:
            return self._periods[key]
        few = self._least(micro_batches, size)
        while few < micro_batches:
            ends, steps = self._ends(few)
            self._known[few] = max(ends)
            for period in range(size, few - 3 * self._reach(size) + 1, size):
                later = self._later(ends, steps, few, period, size)
                if later is not None:
                    self._periods[key] = few, period, later
                    return self._periods[key]
            few = self._least(micro_batches, size, 2 * few)
        return micro_batches, size, 0.0

    def _reach(self, size: int) -> int:
        """In micro-batches, at least what lies between an action and what it waits for, and how long the orders begin and end."""
        return 2 * self.places + (2 * size if self.chunks > 1 else 0)

    def _least(self, micro_batches: int, size: int, least: int = 0) -> int:
        """So many that they may show a period, in rounds of the same size with the same rest."""
        few = max(least, 3 * self._reach(size) + 2 * size)
        few += (micro_batches - few) % size
        while few < micro_batches and round_size(self.places, self.chunks, few) != size:
            few += size
        return few

    def _later(self, ends: Sequence[float], steps: Steps, micro_batches: int, period: int, size: int) -> float | None:
        """By how much all between begin and end of the orders are later than those of a period before, if that is the same for all."""
        reach = self._reach(size)
        first, last = micro_batches - 2 * reach - period, micro_batches - reach - period
        at = steps.series[0]
        later = ends[at[last]] - ends[at[last - period]]
        slack = _CLOSE * max(ends)
        for series in steps.series:
            if series:
                for index in range(first, last):
                    if abs(ends[series[index + period]] - ends[series[index]] - later) > slack:
                        return None
        return later

    def _ends(self, micro_batches: int) -> tuple[list[float], Steps]:
        """When each action ends."""
        steps = steps_of(self.schedule, self.places, self.chunks, micro_batches)
        self.played[0] += len(steps.rows)
        seconds = [part for s in self.stages for part in (s.forward_s, s.backward_s, s.input_s, s.weight_s)]
        sends = [stage.send_s for stage in self.stages]
        free = [0.0] * self.places
        ends: list[float] = []
        for place, work, source, link in steps.rows:
            now = free[place]
            if source >= 0:
                came = ends[source] + sends[link]
                if came > now:
                    now = came
            now += seconds[work]
            free[place] = now
            ends.append(now)
        return ends, steps

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


def place_lines(stages: Sequence[StageSeconds], places: int, *, split: bool) -> list[tuple[float, float]]:
    """Of a pipeline with some stages on each place (see `Makespans.lines`). ``split``: the halves of a backward may run apart.

    The first stage of a place waits for its first forward, and no other stage of the place runs before. The last whole backward of a
    place is of that stage too, and goes on through all before it. With halves, what a place does last may be the gradients of weights,
    for which no one waits; then the forwards before it and all its work count, or its work but those, and the inputs' gradients of
    the stages before it.
    """
    if not split:
        own = [s.forward_s + s.backward_s for s in stages]
        return _lines([(sum(own[r::places]), own[r], stages[r].send_s) for r in range(places)])
    halves = [(s.forward_s, s.input_s) for s in stages]
    whole = [sum(s.forward_s + s.backward_s for s in stages[r::places]) for r in range(places)]
    found, before, back = [], 0.0, stages[0].weight_s
    for place in range(places):
        found.append((before, whole[place]))
        if place:
            found.append((before + back, sum(f + i for f, i in halves[place::places])))
        before += stages[place].forward_s + stages[place].send_s
        back += stages[place].input_s + stages[place].send_s
    return [line for line in found if not any(_above(other, line) for other in found)]


def _above(other: tuple[float, float], line: tuple[float, float]) -> bool:
    return other != line and other[0] >= line[0] and other[1] >= line[1]


def _lines(places: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """Of places with the seconds of a micro-batch, those of it in the first stage, and of a message (see `Makespans.lines`).

    A place before one that is no faster waits less and works no more, so it is left out.
    """
    found: list[tuple[float, float]] = []
    around = 0.0
    for each, first, send_s in places:
        while found and found[-1][1] <= each:
            found.pop()
        found.append((around, each))
        around += first + 2 * send_s
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
