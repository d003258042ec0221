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
    ) -> None:
        count = len(work)
        self.start = [0.0] * count
        self.end = [_NEVER] * count
        self.released = [_NEVER] * count
        self._lanes, self._lag, self._slows = lanes, lag, slows
        self._left = list(work)
        self._since = [0.0] * count
        self._current: dict[int, int] = {}  # lane: the task on it
        self._losses: dict[int, dict[int, float]] = {victim: {} for pairs in slows.values() for victim, _ in pairs}
        # Its lane, if it can slow none and has no queue: most tasks, and in few steps.
        special = shared | slows.keys()
        self._alone = [on[0] if len(on) == 1 and on[0] not in special else -1 for on in lanes]
        self._queues: dict[int, list[tuple[float, int]]] = {lane: [] for lane in shared}
        self._heap: list[tuple[float, int]] = []
        self._next: list[tuple[int, ...]] = [()] * count  # on the same lanes
        self._waiting: list[list[int]] = [[] for _ in range(count)]
        self._missing = [len(before) for before in waits]
        self._link(waits)

    def _link(self, waits: Sequence[Sequence[int]]) -> None:
        """Turn what a task waits for into who waits for a task."""
        last: dict[int, int] = {}
        for task, (on, before) in enumerate(zip(self._lanes, waits, strict=True)):
            for earlier in before:
                self._waiting[earlier].append(task)
            for lane in on:
                if lane in self._queues:
                    continue
                if lane in last:
                    self._next[last[lane]] += (task,)
                    self._missing[task] += 1
                last[lane] = task

    def play(self) -> list[int]:
        """Play everything; the tasks that could not be played to their end."""
        count = len(self._left)
        done = bytearray(count)
        for task in [task for task in range(count) if self._missing[task] == 0]:
            self._offer(task, 0.0)
        while self._heap:
            now, entry = heappop(self._heap)
            if entry >= count:
                self._release(self._waiting[entry - count], now)
                continue
            if done[entry] or self.end[entry] != now:
                continue
            done[entry] = 1
            self._finish(entry, now)
            self._release(self._next[entry], now)
            self.released[entry] = until = now + self._lag[entry]
            if until > now:
                heappush(self._heap, (until, count + entry))
            else:
                self._release(self._waiting[entry], now)
        return [task for task in range(count) if not done[task]]

    def _release(self, tasks: Sequence[int], now: float) -> None:
        for task in tasks:
            self._missing[task] -= 1
            if self._missing[task] == 0:
                self._offer(task, now)

    def _offer(self, task: int, now: float) -> None:
        """A task has all that it waits for: it begins, or queues for its lane."""
        lane = self._alone[task]
        if lane >= 0 and not self._losses.get(lane):
            self.start[task] = self._since[task] = now
            self._current[lane] = task
            self.end[task] = until = now + self._left[task]
            heappush(self._heap, (until, task))
            return
        lane = self._lanes[task][0]
        if lane in self._queues and lane in self._current:
            heappush(self._queues[lane], (now, task))
            return
        self._begin(task, now)

    def _begin(self, task: int, now: float) -> None:
        self.start[task] = self._since[task] = now
        for lane in self._lanes[task]:
            self._current[lane] = task
        self._schedule(task, now)
        for lane in self._lanes[task]:
            for victim, loss in self._slows.get(lane, ()):
                self._change(victim, lane, loss, now)

    def _finish(self, task: int, now: float) -> None:
        if self._alone[task] >= 0:
            del self._current[self._alone[task]]
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
