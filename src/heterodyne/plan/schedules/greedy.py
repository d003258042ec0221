"""Orders made greedily, for stages that are unlike: whenever a place is free it takes the most useful thing that it can do now.

Forwards run ahead until the first gradients come back, as far as a multiple of the pipeline's depth and the memory allow; then
backwards go before forwards, or in turn with them. Weight gradients (W) and recomputation (R) go into waits, or are done at once
where memory is short. What is best depends on the times, so several policies are tried by the caller and judged by the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf

from heterodyne.plan.schedules.clock import KINDS
from heterodyne.plan.schedules.pipeline_work import PipelineWork

__all__ = ["Policy", "greedy_rows"]

_F, _I, _W, _R, _B = (KINDS[kind] for kind in ("F", "I", "W", "R", "B"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What a place does when it could do several things.

    Args:
        depth: how many micro-batches a stage takes before their backwards, as a multiple of those that are on the way while it
            waits for one gradient to come back; infinite: as many as fit.
        in_turn: a forward and a backward in turn where both are ready; else the backward first.
        split: backwards come in halves.
        patience: a wait that is known to be shorter than this multiple of W is waited for, not filled.
        forward_deep, backward_deep: of several stages on a place the later one first; else the earlier one.
    """

    depth: float = 1.0
    in_turn: bool = True
    split: bool = True
    patience: float = 0.0
    forward_deep: bool = True
    backward_deep: bool = True


def greedy_rows(work: PipelineWork, policy: Policy) -> list[list[int]] | None:
    """Rows of codes for ``work.clock``; None if the policy comes to a stop, since it would not leave room for what comes first."""
    state = _State(work, policy)
    heap = [(0.0, place) for place in range(len(work.free_bytes))]
    while heap:
        now, place = heappop(heap)
        if state.free_at[place] <= now and not state.finished(place):
            for moment, other in state.step(place, now):
                heappush(heap, (moment, other))
    return state.rows if all(map(state.finished, range(len(state.rows)))) else None


class _State:
    """How far everything is. Micro-batches go through each stage in order, so counters say what is next."""

    def __init__(self, work: PipelineWork, policy: Policy) -> None:
        stages, places, count = len(work.times), len(work.free_bytes), work.micro_batches
        self.work, self.policy = work, policy
        self.stages_of = [work.stages_of(place) for place in range(places)]
        self.rows: list[list[int]] = [[] for _ in range(places)]
        self.free_at = [0.0] * places
        self.forwards, self.agains, self.backwards, self.weights = ([0] * stages for _ in range(4))
        self.held = [0] * places
        self.turn_of_backward = [True] * places
        period = work.period_s()
        self.most = [
            count if policy.depth == inf or not period else max(1, ceil(policy.depth * back / period - 1e-9))
            for back in work.returns_s()
        ]
        self.first = [bytes_.activation - bytes_.again for bytes_ in work.held]
        self.recomputes = [t.recompute_s > 0 or b.again > 0 for t, b in zip(work.times, work.held, strict=True)]
        self.spare = [max((work.held[s].again for s in mine), default=0) for mine in self.stages_of]
        self._connect(stages, count)

    def _connect(self, stages: int, count: int) -> None:
        """Note what each forward and each backward still waits for, and when what has come came."""
        work = self.work
        self.readers: list[list[tuple[int, float]]] = [[] for _ in range(stages)]
        self.sources: list[list[tuple[int, float]]] = [[] for _ in range(stages)]
        inputs, gradients = [0] * stages, [0] * stages
        for read in work.reads:
            self.readers[read.source].append((read.reader, work.lag_s(read)))
            inputs[read.reader] += 1
            if read.backward_s is not None:
                self.sources[read.reader].append((read.source, work.lag_s(read, backward=True)))
                gradients[read.source] += 1
        self.lacks_forward = [[number] * count for number in inputs]
        self.lacks_backward = [[number] * count for number in gradients]
        self.forward_at = [[0.0] * count for _ in range(stages)]
        self.backward_at = [[0.0] * count for _ in range(stages)]

    def finished(self, place: int) -> bool:
        return all(self.weights[stage] == self.work.micro_batches for stage in self.stages_of[place])

    def step(self, place: int, now: float) -> list[tuple[float, int]]:
        """Let a free place begin something; the moments at which places should look again."""
        backward, forward, soon = self._ready(place, now)
        if forward >= 0 and (backward < 0 or (self.policy.in_turn and not self.turn_of_backward[place])):
            self.turn_of_backward[place] = True
            return self._forward(forward, place, now)
        if backward >= 0:
            self.turn_of_backward[place] = False
            return self._backward(backward, place, now)
        return self._fill(place, now, soon)

    def _ready(self, place: int, now: float) -> tuple[int, int, float]:
        """The stages of the backward and of the forward that could start now (-1: none), and when the next one is known to be ready."""
        backward, forward, soon = -1, -1, inf
        for stage in self.stages_of[place]:
            index = self.backwards[stage]
            done = self.forwards[stage]
            joined = self.work.joined and stage == len(self.forwards) - 1 and done < self.work.micro_batches
            if index < done and not joined and not self.lacks_backward[stage][index]:
                if self.backward_at[stage][index] > now:
                    soon = min(soon, self.backward_at[stage][index])
                elif backward < 0 or self.policy.backward_deep:
                    backward = stage
            index = self.forwards[stage]
            if index >= self.work.micro_batches or self.lacks_forward[stage][index]:
                continue
            if index - self.backwards[stage] >= self.most[stage]:
                continue
            if self.forward_at[stage][index] > now:
                soon = min(soon, self.forward_at[stage][index])
            elif (forward < 0 or self.policy.forward_deep) and self._room(place, stage):
                forward = stage
        return backward, forward, soon

    def _room(self, place: int, stage: int) -> bool:
        """Return whether a forward fits, and leaves it possible to end all micro-batches, the oldest first (the banker's algorithm)."""
        left = self.work.free_bytes[place] - self.spare[place] - self.held[place] - self.first[stage]
        mine = self.stages_of[place]
        if left < 0 or len(mine) == 1:
            return left >= 0
        oldest, newest = min(self.weights[s] for s in mine), max(self.forwards[s] for s in mine)
        if left >= (newest + 1 - oldest) * sum(self.first[s] for s in mine):
            return True  # plenty
        for index in range(oldest, newest + 1):
            held = needed = 0
            for other in mine:
                if index < self.forwards[other] or (other == stage and index == self.forwards[stage]):
                    held += self._held_of(other, index) if index < self.forwards[other] else self.first[other]
                else:
                    needed += self.first[other]
            if needed > left and index < self.work.micro_batches:
                return False
            left += held
        return True

    def _held_of(self, stage: int, index: int) -> int:
        """Return what a stage holds of a micro-batch that has run forward."""
        if index < self.weights[stage]:
            return 0
        bytes_ = self.work.held[stage]
        if index < self.backwards[stage]:
            return bytes_.activation - bytes_.input_frees
        return bytes_.activation if index < self.agains[stage] else self.first[stage]

    def _forward(self, stage: int, place: int, now: float) -> list[tuple[float, int]]:
        index = self.forwards[stage]
        self.forwards[stage] += 1
        end = self._do(_F, stage, index, place, now)
        looks = [(end, place)]
        for reader, lag in self.readers[stage]:
            self.forward_at[reader][index] = max(self.forward_at[reader][index], end + lag)
            self.lacks_forward[reader][index] -= 1
            if not self.lacks_forward[reader][index]:
                looks.append((self.forward_at[reader][index], self.work.places[reader]))
        return looks

    def _backward(self, stage: int, place: int, now: float) -> list[tuple[float, int]]:
        """I or B, after R where there was no wait for it, after a W where there is no room for it."""
        index = self.backwards[stage]
        if self.agains[stage] <= index and self.recomputes[stage]:
            room = self.work.free_bytes[place] - self.held[place]
            if self.work.held[stage].again > room and (owes := self._owed(place)) >= 0:
                return self._weight(owes, place, now)
            return self._again(stage, place, now)
        self.backwards[stage] += 1
        if not self.policy.split:
            self.weights[stage] += 1
        end = self._do(_I if self.policy.split else _B, stage, index, place, now)
        looks = [(end, place)]
        for source, lag in self.sources[stage]:
            self.backward_at[source][index] = max(self.backward_at[source][index], end + lag)
            self.lacks_backward[source][index] -= 1
            if not self.lacks_backward[source][index]:
                looks.append((self.backward_at[source][index], self.work.places[source]))
        return looks

    def _fill(self, place: int, now: float, soon: float) -> list[tuple[float, int]]:
        """Nothing that others wait for can be done now: recompute, or pay a W that is owed, or wait."""
        for stage in reversed(self.stages_of[place]):
            index = self.backwards[stage]
            ahead = index < self.forwards[stage] and self.agains[stage] <= index
            if (
                ahead
                and self.recomputes[stage]
                and self.held[place] + self._early(stage) <= self.work.free_bytes[place]
            ):
                return self._again(stage, place, now)
        owes = self._owed(place)
        if owes >= 0 and soon - now >= self.policy.patience * self.work.times[owes].weight_s:
            return self._weight(owes, place, now)
        return []

    def _early(self, stage: int) -> int:
        """The room that R needs ahead of its gradient: the other stages of the place must not be kept from going on."""
        place = self.work.places[stage]
        others = [other for other in self.stages_of[place] if other != stage]
        return self.work.held[stage].again + sum(self.first[s] for s in others) + (self.spare[place] if others else 0)

    def _owed(self, place: int) -> int:
        """The stage whose W has been owed for longest; -1 if none is."""
        owing = [stage for stage in self.stages_of[place] if self.weights[stage] < self.backwards[stage]]
        return min(owing, key=self.weights.__getitem__, default=-1)

    def _weight(self, stage: int, place: int, now: float) -> list[tuple[float, int]]:
        index = self.weights[stage]
        self.weights[stage] += 1
        return [(self._do(_W, stage, index, place, now), place)]

    def _again(self, stage: int, place: int, now: float) -> list[tuple[float, int]]:
        index = self.backwards[stage]
        self.agains[stage] = index + 1
        return [(self._do(_R, stage, index, place, now), place)]

    def _do(self, kind: int, stage: int, index: int, place: int, now: float) -> float:
        clock = self.work.clock
        code = kind * clock.cells + stage * clock.micro_batches + index
        self.rows[place].append(code)
        self.held[place] += self.work.taken[code] - self.work.freed[code]
        self.free_at[place] = now + clock.duration[code]
        return self.free_at[place]
