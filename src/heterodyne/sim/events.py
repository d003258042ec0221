"""Tasks played event by event: what the engine does where tasks slow each other, or take turns on a lane as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

__all__ = ["Events"]

_NEVER = float("inf")


class Events:
    """One play; for each task its lanes, its work, its lag and what it waits for. See `sim.engine` for what the words mean.

    The heap holds two kinds of entries: that task t ends (t), and that those who wait for it are released (count + t). The end of a
    task moves while something slows it, so an entry whose moment is not that of ``end`` any more is skipped.
    """

    def __init__(
        self,
        *,
        lanes: Sequence[tuple[int, ...]],
        work: Sequence[float],
        lag: Sequence[float],
        waits: Sequence[Sequence[int]],
        shared: frozenset[int],
        slows: Mapping[int, Sequence[tuple[int, float]]],
        rounds: int = 1,
    ) -> None:
        count = rounds * len(work)
        self.start = [0.0] * count
        self.end = [_NEVER] * count
        self.released = [_NEVER] * count
        self._lanes, self._lag, self._slows = [*lanes] * rounds, [*lag] * rounds, slows
        self._left = [*work] * rounds
        self._since = [0.0] * count
        self._current: dict[int, int] = {}  # lane: the task on it
        self._losses: dict[int, dict[int, float]] = {victim: {} for pairs in slows.values() for victim, _ in pairs}
        # Its lane, if that can slow none: most tasks, and in few steps.
        self._alone = [on[0] if len(on) == 1 and on[0] not in slows else -1 for on in lanes] * rounds
        self._queues: dict[int, list[tuple[float, int]]] = {lane: [] for lane in shared}
        self._heap: list[tuple[float, int]] = []
        self._missing = [len(before) for before in waits]
        # Who may go on when a task ends, and when its lag is over: within a round, and from the last task of a lane to its first.
        self._at_end: list[list[int]] = [[] for _ in lanes]
        self._at_release: list[list[int]] = [[] for _ in lanes]
        self._next_round: dict[int, list[int]] = {}
        self._link(waits, rounds)

    def _link(self, waits: Sequence[Sequence[int]], rounds: int) -> None:
        """Turn what a task waits for into who waits for a task."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for task, (on, before) in enumerate(zip(self._lanes, waits, strict=False)):
            for earlier in before:
                (self._at_release if self._lag[earlier] > 0 else self._at_end)[earlier].append(task)
            for lane in on:
                if lane in self._queues:
                    continue
                if lane in last:
                    self._at_end[last[lane]].append(task)
                    self._missing[task] += 1
                else:
                    first[lane] = task
                last[lane] = task
        self._missing *= rounds
        for lane, task in first.items():
            self._next_round.setdefault(last[lane], []).append(task)
            for again in range(1, rounds):
                self._missing[again * len(waits) + task] += 1

    def play(self) -> list[int]:
        """Play everything; the tasks that could not be played to their end."""
        count, a_round = len(self._left), len(self._at_end)
        done = bytearray(count)
        heap, at_end, at_release, lag = self._heap, self._at_end, self._at_release, self._lag
        end, released, next_round = self.end, self.released, self._next_round
        self._release([task for task in range(count) if self._missing[task] == 0], 0, 0.0, by=0)
        while heap:
            now, entry = heappop(heap)
            if entry >= count:
                within = (entry - count) % a_round
                self._release(at_release[within], entry - count - within, now)
                continue
            if done[entry] or end[entry] != now:
                continue
            done[entry] = 1
            self._finish(entry, now)
            within = entry % a_round
            released[entry] = now + lag[within]
            if at_release[within]:
                heappush(heap, (released[entry], count + entry))
            if at_end[within]:
                self._release(at_end[within], entry - within, now)
            if within in next_round and entry + a_round - within < count:
                self._release(next_round[within], entry + a_round - within, now)
        return [task for task in range(count) if not done[task]]

    def _release(self, tasks: Sequence[int], base: int, now: float, by: int = 1) -> None:
        """Tasks have one thing less to wait for; those that wait for nothing more begin, or queue for their lane."""
        missing = self._missing
        for within in tasks:
            task = base + within
            missing[task] -= by
            if missing[task] == 0:
                lane = self._lanes[task][0]
                if lane in self._queues and lane in self._current:
                    heappush(self._queues[lane], (now, task))
                else:
                    self._begin(task, now)

    def _begin(self, task: int, now: float) -> None:
        self.start[task] = self._since[task] = now
        lane = self._alone[task]
        if lane >= 0 and not self._losses.get(lane):
            self._current[lane] = task
            self.end[task] = until = now + self._left[task]
            heappush(self._heap, (until, task))
            return
        for lane in self._lanes[task]:
            self._current[lane] = task
        self._schedule(task, now)
        for lane in self._lanes[task]:
            for victim, loss in self._slows.get(lane, ()):
                self._change(victim, lane, loss, now)

    def _finish(self, task: int, now: float) -> None:
        lane = self._alone[task]
        if lane >= 0:
            del self._current[lane]
            if self._queues.get(lane):
                self._begin(heappop(self._queues[lane])[1], now)
            return
        for lane in self._lanes[task]:
            del self._current[lane]
        for lane in self._lanes[task]:
            for victim, _ in self._slows.get(lane, ()):
                self._change(victim, lane, None, now)
            if self._queues.get(lane):
                self._begin(heappop(self._queues[lane])[1], now)

    def _speed(self, task: int) -> float:
        mine = self._lanes[task]  # a task does not slow itself
        lost = [
            sum(loss for busy, loss in self._losses[lane].items() if busy not in mine)
            for lane in mine
            if lane in self._losses
        ]
        return max(0.0, 1.0 - max(lost, default=0.0))

    def _schedule(self, task: int, now: float) -> None:
        speed = self._speed(task)
        if speed <= 0 and self._left[task] > 0:
            self.end[task] = _NEVER
            return
        self.end[task] = now + (self._left[task] / speed if self._left[task] > 0 else 0.0)
        heappush(self._heap, (self.end[task], task))

    def _change(self, victim: int, busy: int, loss: float | None, now: float) -> None:
        """Settle what the victim's task has done so far at its old speed, then go on at the new one."""
        task = self._current.get(victim)
        if task is not None:
            self._left[task] = max(0.0, self._left[task] - (now - self._since[task]) * self._speed(task))
            self._since[task] = now
        if loss is None:
            del self._losses[victim][busy]
        else:
            self._losses[victim][busy] = loss
        if task is not None:
            self._schedule(task, now)
