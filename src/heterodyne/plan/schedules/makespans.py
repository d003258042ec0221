"""Seconds of one pipeline of alike micro-batches, exactly as the clock of the schedules plays them, for every count at once.

1F1B goes in rounds: in round r stage i of p runs the forward r + p - i - 1 and the backward r. A round needs nothing but the round
before it, so once a round is the one before it, later, so are all that follow, and a thousand micro-batches cost no more than a few.
Only the last p - 1 rounds, in which the forwards run out, are played for each count. GPipe of alike micro-batches has a formula.

ZB-H1 and ZB-H2 go in such rounds too. The other schedules are played by their own orders (`steps`), of many micro-batches only
as many as it takes until they come again. An action waits for none that is more than `_reach` micro-batches before it; so once all
between begin and end of the orders are the ones of a round before, later, over as many micro-batches, so are all that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf

from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.bounds import place_lines
from heterodyne.plan.schedules.interleaved import round_size
from heterodyne.plan.schedules.steps import Steps, steps_of
from heterodyne.plan.schedules.times import StageTimes

__all__ = ["Makespans"]

_CLOSE = 1e-13
_PERIODIC = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
"""Their orders, but for begin and end, are those of some micro-batches again and again, and each kind of work is there for all of them."""


@dataclass(frozen=True)
class Makespans:
    """How long a pipeline takes, by its number of micro-batches.

    Args:
        stages: seconds of one micro-batch, in the order of the layers. Where the orders have no R, what is recomputed is so in the
            backward, right before the gradients of the inputs.
        sends: seconds of a message from each stage to the next one, and as much back. One less than there are stages.
        schedule: a name in `plan.schedules.SCHEDULES`.
        chunks: stages on each place.
        busy: seconds that each of these messages keeps its link from others; (): none.
        played: the number of actions that were played is added to its one entry.
    """

    stages: Sequence[StageTimes]
    sends: Sequence[float]
    schedule: str = "1F1B"
    chunks: int = 1
    busy: Sequence[float] = ()
    played: list[int] = field(default_factory=lambda: [0], repr=False)
    _rounds: list[tuple[list[float], list[float]]] = field(default_factory=list, repr=False)
    _step: list[float] = field(default_factory=list, repr=False)  # seconds between rounds, once they are alike
    _steady: list[tuple[int, float]] = field(default_factory=list, repr=False)  # see `_zero_bubble`
    _known: dict[int, float] = field(default_factory=dict, repr=False)
    _periods: dict[tuple[int, int], tuple[int, int, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def _forward(self) -> list[float]:
        return [stage.forward_s for stage in self.stages]

    @cached_property
    def _backward(self) -> list[float]:
        return [stage.backward_s for stage in self.stages]

    @cached_property
    def _backward_back(self) -> list[float]:
        """The backwards of all stages but the last one, from the last to the first."""
        return self._backward[-2::-1]

    @cached_property
    def _sends_back(self) -> list[float]:
        return list(self.sends)[::-1]

    @cached_property
    def _input(self) -> list[float]:
        return [stage.recompute_s + stage.input_s for stage in self.stages]

    @cached_property
    def _weight(self) -> list[float]:
        return [stage.weight_s for stage in self.stages]

    @property
    def places(self) -> int:
        return len(self.stages) // self.chunks

    def seconds(self, micro_batches: int) -> float:
        """From the first forward to the last backward: as the schedule has it, or as long as a link is busy with all messages."""
        if micro_batches < 1:
            return 0.0
        played_s = self._played_s(micro_batches)
        return max([played_s, *(around + micro_batches * each for around, each in self._link_lines)])

    def _played_s(self, micro_batches: int) -> float:
        if micro_batches not in self._known:
            if len(self.stages) == 1 or (self.schedule == "1F1B" and self.chunks == 1):
                self._known[micro_batches] = self._one_f_one_b(micro_batches)
            elif self.schedule == "GPipe" and self.chunks == 1:
                self._known[micro_batches] = self._gpipe(micro_batches)
            elif self.schedule in ("ZBH1", "ZBH2") and self.chunks == 1:
                self._known[micro_batches] = self._zero_bubble(micro_batches)
            elif self.schedule in _PERIODIC:
                self._known[micro_batches] = self._by_orders(micro_batches)
            else:
                self._known[micro_batches] = max(self._ends(micro_batches)[0])
        return self._known[micro_batches]

    def bound_s(self, micro_batches: int) -> float:
        """Never more than `seconds`: a place waits for its first forward, works, and the stages before it have its last backward to do."""
        if micro_batches < 1:
            return 0.0
        return max(around + micro_batches * each for around, each in self.lines)

    @cached_property
    def lines(self) -> list[tuple[float, float]]:
        """See `place_lines`: for schedules whose placement is a loop. Links have lines too."""
        of_places = place_lines(self.stages, self.sends, self.places, split=SCHEDULES[self.schedule].halves)
        return [*of_places, *self._link_lines]

    @cached_property
    def _link_lines(self) -> list[tuple[float, float]]:
        """Return for each link the seconds around its first and last message, and those of one micro-batch.

        Before the first message a micro-batch has been computed up to the link; behind the last one it goes on from there and comes back.
        Of places with several stages each link has the messages of all of them.
        """
        if self.chunks > 1:
            return [(0.0, sum(self.busy[place :: self.places])) for place in range(min(self.places, len(self.busy)))]
        back = self._input if SCHEDULES[self.schedule].halves else self._backward
        once = sum(self._forward) + sum(back) + 2 * sum(self.sends)
        return [(once - send, busy) for send, busy in zip(self.sends, self.busy, strict=False)]

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
        """Never less than `most_within`, by `bound_s`; none where a place never comes to its first forward."""

        def of_place(around: float, each: float) -> float:
            left = seconds - around
            if not left > 0:  # nor is what is left of an infinite time
                return 0.0
            return left / each * (1 + _CLOSE) if each > 0 else at_most

        return int(min(at_most, *(of_place(around, each) for around, each in self.lines)))

    def fewest_actions(self, micro_batches: int) -> int:
        """Return the fewest actions of the orders that `seconds` plays, where it has to play orders: until they may have come to repeat
        themselves.
        """
        if micro_batches < 1:
            return 0
        kinds = 3 if SCHEDULES[self.schedule].halves else 2
        return kinds * len(self.stages) * min(micro_batches, self._least(micro_batches, self._size(micro_batches)))

    def _gpipe(self, micro_batches: int) -> float:
        once = sum(self._forward) + sum(self._backward) + 2 * sum(self.sends)
        return once + (micro_batches - 1) * (max(self._forward) + max(self._backward))

    def _zero_bubble(self, micro_batches: int) -> float:
        """ZB-H1 and ZB-H2 in rounds of I, F and a W that is owed; a round needs forwards of the round before it, or of the one before that.

        Where a round has come to be the one before, later, those in which there still are forwards for all stages are passed over. It
        comes to be so for more micro-batches too, so of them each more takes as long.

        `_by_orders` gives the same, and takes 13 to 35 times as long on 16 places and more.
        """
        if self._steady and micro_batches > self._steady[0][0]:
            few, later = self._steady[0]
            return self._played_s(few) + (micro_batches - few) * later
        sends, count, early = self.sends, len(self.stages), self.schedule == "ZBH2"
        inputs, weights = self._input, self._weight
        ahead = [2 * (count - place) - 1 if early else count - 1 - place for place in range(count)]
        owed = [2 * place if early else place for place in range(count)]
        free = [0.0] * count
        forwards: list[list[float]] = [[] for _ in range(count)]
        skipped = 0
        each = list(zip(range(count), ahead, self._forward, [0.0, *sends], strict=True))
        back = list(zip(range(count), inputs, [*sends, 0.0], strict=True))[::-1]

        def forward(number: int) -> None:
            """Those of a round, as far as there are such micro-batches; the rounds before 0 are the warm-up."""
            for place, first, own, send in each:
                index = first + number
                if 0 <= index < micro_batches:
                    start = free[place]
                    if place:
                        came = forwards[place - 1][index - skipped] + send
                        if came > start:
                            start = came
                    free[place] = start = start + own
                    forwards[place].append(start)

        for number in range(-ahead[0], 0):
            forward(number)
        before: list[float] = []
        number = 0
        while number < micro_batches:
            if not early:
                forward(number)
            came = -inf
            for place, own, send in back:
                came += send
                start = free[place]
                free[place] = came = (start if start > came else came) + own
            if early:
                forward(number)
            for place in range(count):
                if number >= owed[place]:
                    free[place] += weights[place]
            self.played[0] += count
            number += 1
            left = micro_batches - ahead[0] - number
            if number > owed[-1] and left > 1:
                now = [*free, *(end for own in forwards for end in own[-2:])]
                later = now[0] - before[0] if before else 0.0
                if before and all(abs(a - b - later) <= _CLOSE * now[0] for a, b in zip(now, before, strict=True)):
                    self._steady.append((micro_batches - left + 2, later))
                    free = [end + (left - 1) * later for end in free]
                    forwards = [[end + (left - 1) * later for end in own] for own in forwards]
                    skipped += left - 1
                    number += left - 1
                before = now
        return max(free[n] + min(owed[n], micro_batches) * weights[n] for n in range(count))

    def _by_orders(self, micro_batches: int) -> float:
        """As the schedule's orders are played: whole, or where they have come to repeat themselves, some periods less."""
        size = self._size(micro_batches)
        few, period, later = self._periodic(micro_batches, size)
        if few >= micro_batches:
            return max(self._ends(micro_batches)[0])
        few += (micro_batches - few) % period
        while few < micro_batches and self._size(few) != size:
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

    def _size(self, micro_batches: int) -> int:
        """Micro-batches after which the orders begin again."""
        interleaved = SCHEDULES[self.schedule].placement == "loop" and self.chunks > 1
        return round_size(self.places, micro_batches) if interleaved else 1

    def _reach(self, size: int) -> int:
        """In micro-batches, at least what is between an action and what it waits for, and how long the orders begin and end."""
        return 2 * self.places * (1 if size > 1 or self.chunks == 1 else 2) + (2 * size if self.chunks > 1 else 0)

    def _least(self, micro_batches: int, size: int, least: int = 0) -> int:
        """So many that they may show a period, in rounds of the same size with the same rest."""
        few = max(least, 3 * self._reach(size) + 2 * size)
        few += (micro_batches - few) % size
        while few < micro_batches and self._size(few) != size:
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
        """Return when each action ends."""
        steps = steps_of(self.schedule, self.places, self.chunks, micro_batches)
        self.played[0] += len(steps.rows)
        seconds = [
            part
            for s in self.stages
            for part in (
                s.forward_s,
                s.backward_s,
                s.recompute_s + s.input_s,
                s.weight_s,
                s.recompute_s,
                s.input_s + s.weight_s,
                s.input_s,
            )
        ]  # in the order of `WORKS`
        sends = self.sends
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
            forward, backward = self._first(micro_batches)
            left = range(1, micro_batches)
        else:
            forward, backward = self._round(micro_batches - count)
            few = len(self._rounds) - 1 + count
            if micro_batches > few:  # what follows is that of the last known round, later
                return self._played_s(few) + (micro_batches - few) * self._step[0]
            left = range(micro_batches - count + 1, micro_batches)
        for number in left:
            forward, backward = self._next(forward, backward, number, micro_batches)
        return backward[0]

    def _round(self, number: int) -> tuple[list[float], list[float]]:
        """Return when the forwards and backwards of a round end, if forwards never run out."""
        rounds = self._rounds
        if not rounds:
            rounds.append(self._first(len(self.stages)))
        while len(rounds) <= number and not self._step:
            forward, backward = rounds[-1]
            after = self._next(forward, backward, len(rounds), None)
            later = after[1][0] - backward[0]
            slack = _CLOSE * after[1][0]
            if all(
                -slack <= new - old - later <= slack
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

    def _first(self, micro_batches: int) -> tuple[list[float], list[float]]:
        """Round 0: all warm-up forwards, and the first backward of every stage. ``micro_batches``: the most that a stage begins with."""
        count = len(self.stages)
        ends = [0.0] * min(count, micro_batches)
        forward = []
        for place, own in enumerate(self._forward):
            came = self.sends[place - 1] if place else 0.0
            now = 0.0
            for index in range(min(micro_batches, count - place)):
                now = max(now, ends[index] + came) + own
                ends[index] = now
            forward.append(now)
        return forward, self._backwards(forward)

    def _next(
        self, forward: Sequence[float], backward: Sequence[float], number: int, micro_batches: int | None
    ) -> tuple[list[float], list[float]]:
        """The round after one. ``micro_batches``: how many forwards there are; None: they never run out.

        A stage whose forwards have run out has backwards only. A search spends much of its time here.
        """
        done = 0 if micro_batches is None else max(0, len(self.stages) + number - micro_batches)
        ends = list(forward[:done]) if done else [backward[0] + self._forward[0]]
        first = max(1, done)
        for own, then, before, send in zip(
            self._forward[first:], backward[first:], forward[first - 1 :], self.sends[first - 1 :], strict=False
        ):
            came = before + send
            ends.append((then if then > came else came) + own)
        return ends, self._backwards([*backward[:done], *ends[done:]])

    def _backwards(self, free: Sequence[float]) -> list[float]:
        """The backwards of a round, from the last stage to the first; ``free``: when each stage has ended what comes before."""
        came = free[-1] + self._backward[-1]
        ends = [came]
        for then, send, own in zip(free[-2::-1], self._sends_back, self._backward_back, strict=True):
            came += send
            came = (then if then > came else came) + own
            ends.append(came)
        ends.reverse()
        return ends
