"""A discrete-event engine: a clock, lanes, tasks. It knows nothing of training.

A *lane* does its tasks one after another, in the order in which they were added. A *task* has an amount of work, in seconds
at full speed; it may occupy several lanes at once (it then starts when all of them reach it) and may wait for other tasks.
A lane may be slowed while another lane is busy (`slow`).

Order on a lane is nothing but one more task to wait for. So the engine is a list of counters (how many tasks each task still
waits for) and a heap of ends; it is written with parallel lists rather than objects, because a plan search plays millions of
tasks. Ties are broken by the order in which tasks were added, so equal inputs give equal outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

__all__ = ["Deadlock", "Engine"]

_NEVER = float("inf")


class Deadlock(Exception):  # noqa: N818  # what it is called everywhere
    """Some tasks can never end. ``tasks``: those, in the order in which they were added."""

    def __init__(self, tasks: tuple[int, ...]) -> None:
        self.tasks = tasks
        super().__init__(f"{len(tasks)} tasks wait for each other: {', '.join(map(str, tasks[:8]))}")


class Engine:
    """Add tasks, `run` once, read ``start`` and ``end`` (seconds, by task). Raises ValueError for a lane or a task that is not there."""

    def __init__(self, lanes: int) -> None:
        self.start: list[float] = []
        self.end: list[float] = []
        self._work: list[float] = []
        self._lanes: list[tuple[int, ...]] = []
        self._missing: list[int] = []
        self._followers: list[list[int]] = []
        self._last: list[int] = [-1] * lanes
        self._slows: dict[int, list[tuple[int, float]]] = {}

    def task(self, work: float, lanes: Sequence[int], after: Iterable[int] = ()) -> int:
        """Add a task of ``work`` seconds on ``lanes``, behind all that was added to them, and after the tasks ``after``."""
        number = len(self._work)
        last, followers = self._last, self._followers
        if not lanes or not 0 <= min(lanes) <= max(lanes) < len(last) or not 0 <= work < _NEVER:
            raise ValueError(f"a task needs lanes among 0..{len(last) - 1} and finite work: {work} s on {tuple(lanes)}")
        missing = 0
        for lane in lanes:
            if last[lane] >= 0:
                followers[last[lane]].append(number)
                missing += 1
            last[lane] = number
        for earlier in after:
            followers[earlier].append(number)
            missing += 1
        self._work.append(work)
        self._lanes.append(tuple(lanes))
        self._missing.append(missing)
        followers.append([])
        return number

    def chain(self, works: Sequence[float], lane: int) -> range:
        """Add tasks that wait for nothing but each other and the lane; the same as `task` for each, in a quarter of the time."""
        first, count, last = len(self._work), len(works), self._last[lane]
        if not works:
            return range(first, first)
        if not 0 <= min(works) <= max(works) < _NEVER:
            raise ValueError(f"work must be finite and not negative: {min(works)} to {max(works)} s")
        self._work.extend(works)
        self._lanes.extend([(lane,)] * count)
        self._missing.extend([1] * count)
        if last >= 0:
            self._followers[last].append(first)
        else:
            self._missing[first] = 0
        self._followers.extend([number] for number in range(first + 1, first + count))
        self._followers.append([])
        self._last[lane] = first + count - 1
        return range(first, first + count)

    def wait(self, task: int, earlier: int) -> None:
        """Let a task wait for another one, which may have been added after it."""
        self._followers[earlier].append(task)
        self._missing[task] += 1

    def slow(self, lane: int, busy: int, loss: float) -> None:
        """While ``busy`` does a task, ``lane`` loses ``loss`` seconds of work per second (0: none, 1: it stands still)."""
        if not 0 <= loss <= 1:
            raise ValueError(f"a lane can lose between 0 and 1 seconds per second, not {loss}")
        if loss > 0:
            self._slows.setdefault(busy, []).append((lane, loss))

    def run(self) -> float:
        """Play everything; the time of the last end. Raises Deadlock if tasks are left that wait for each other."""
        count = len(self._work)
        missing, end = list(self._missing), [_NEVER] * count
        self.start, self.end = [0.0] * count, end
        first = [task for task in range(count) if missing[task] == 0]
        now, done = (self._play_slowed if self._slows else self._play)(first, missing)
        if done < count:
            raise Deadlock(tuple(task for task in range(count) if end[task] == _NEVER))
        return now

    def _play(self, first: list[int], missing: list[int]) -> tuple[float, int]:
        """Every task at full speed; the time of the last end, and how many ended. The loop that has to be fast."""
        start, end, work, all_followers = self.start, self.end, self._work, self._followers
        for task in first:
            end[task] = work[task]
        heap = [(work[task], task) for task in first]
        heapify(heap)
        now, done = 0.0, 0
        while heap:
            now, task = heap[0]
            done += 1
            replaced = False
            for follower in all_followers[task]:
                left = missing[follower] - 1
                missing[follower] = left
                if left == 0:
                    start[follower] = now
                    end[follower] = until = now + work[follower]
                    if replaced:
                        heappush(heap, (until, follower))
                    else:  # one sift instead of two, since most tasks free just one other
                        heapreplace(heap, (until, follower))
                        replaced = True
            if not replaced:
                heappop(heap)
        return now, done

    def _play_slowed(self, first: list[int], missing: list[int]) -> tuple[float, int]:
        """The same with lanes that slow others: ends move while a task runs, and the heap then holds outdated entries."""
        running = _Running(self._lanes, self._slows, self.start, self.end, self._work)
        ended = bytearray(len(missing))
        now, done = 0.0, 0
        for task in first:
            running.begin(task, now)
        while running.heap:
            moment, task = heappop(running.heap)
            if ended[task] or self.end[task] != moment:
                continue
            now = moment
            ended[task] = 1
            done += 1
            running.finish(task, now)
            for follower in self._followers[task]:
                missing[follower] -= 1
                if missing[follower] == 0:
                    running.begin(follower, now)
        return now, done


class _Running:
    """Tasks in progress, when some of them slow others."""

    def __init__(
        self,
        lanes: list[tuple[int, ...]],
        slows: dict[int, list[tuple[int, float]]],
        start: list[float],
        end: list[float],
        work: list[float],
    ) -> None:
        self.heap: list[tuple[float, int]] = []
        self._lanes, self._slows, self._start, self._end = lanes, slows, start, end
        self._left = list(work)
        self._alone = [
            on[0] if len(on) == 1 and on[0] not in slows else -1 for on in lanes
        ]  # its lane, if it can slow none
        self._since = [0.0] * len(work)
        self._current: dict[int, int] = {}  # lane: the task on it
        self._losses: dict[int, dict[int, float]] = {victim: {} for pairs in slows.values() for victim, _ in pairs}

    def begin(self, task: int, now: float) -> None:
        self._start[task] = self._since[task] = now
        lane = self._alone[task]
        if lane >= 0 and not self._losses.get(
            lane
        ):  # the common case, in few steps: nothing slows it, it slows nothing
            self._current[lane] = task
            self._end[task] = until = now + self._left[task]
            heappush(self.heap, (until, task))
            return
        for lane in self._lanes[task]:
            self._current[lane] = task
        self._schedule(task, now)
        for lane in self._lanes[task]:
            for victim, loss in self._slows.get(lane, ()):
                self._change(victim, lane, loss, now)

    def finish(self, task: int, now: float) -> None:
        if self._alone[task] >= 0:
            del self._current[self._alone[task]]
            return
        for lane in self._lanes[task]:
            del self._current[lane]
        for lane in self._lanes[task]:
            for victim, _ in self._slows.get(lane, ()):
                self._change(victim, lane, None, now)

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
            self._end[task] = _NEVER
            return
        self._end[task] = now + (self._left[task] / speed if self._left[task] > 0 else 0.0)
        heappush(self.heap, (self._end[task], task))

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
