"""A discrete-event engine: a clock, lanes, tasks. It knows nothing of training.

A *lane* does one task at a time, in the order in which they were added; a *shared* lane in the order in which they become ready.
A *task* has an amount of work, in seconds at full speed. It may occupy several lanes at once (it then starts when all of them
reach it), and may wait for other tasks; those who wait for it are released ``lag`` seconds after its end, while its lane is free
at once (a message that has left the wire and is still under way). A lane may be slowed while another lane is busy (`slow`).

The whole set of tasks can be played several times in a row (`run`), each round behind the one before on every lane of its own.

Where nothing is slowed or shared, every order is known beforehand, and each start is the longest path that leads to it: one pass
over the tasks, no heap. Everything else is played event by event (`sim.events`). Both keep parallel lists rather than objects,
because a plan search plays millions of tasks, and break ties by the order in which tasks were added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heterodyne.sim.events import Events

__all__ = ["Deadlock", "Engine"]

_NEVER = float("inf")


class Deadlock(Exception):  # noqa: N818  # what it is called everywhere
    """Some tasks can never end. ``tasks``: those, in the order in which they were added."""

    def __init__(self, tasks: tuple[int, ...]) -> None:
        self.tasks = tasks
        super().__init__(f"{len(tasks)} tasks wait for each other: {', '.join(map(str, tasks[:8]))}")


class Engine:
    """Add tasks, `run` once, read the times (seconds). Raises ValueError for a lane or a task that is not there.

    ``start`` and ``end`` hold the times of all tasks of round 0, then those of round 1, and so on. ``released`` is when those who
    wait for a task may go: its end plus its lag.
    """

    def __init__(self, lanes: int) -> None:
        self.start: list[float] = []
        self.end: list[float] = []
        self.released: list[float] = []
        self._lanes = lanes
        self._work: list[float] = []
        self._lane: list[int] = []  # -1: several, in `_several`
        self._several: dict[int, tuple[int, ...]] = {}
        self._waits: list[tuple[int, ...]] = []
        self._lag: list[float] = []
        self._slows: dict[int, list[tuple[int, float]]] = {}
        self._shared: set[int] = set()
        self._backwards = False  # whether some task waits for one that was added after it

    def __len__(self) -> int:
        return len(self._work)

    def task(self, work: float, lanes: Sequence[int], after: Iterable[int] = (), *, lag: float = 0.0) -> int:
        """Add a task of ``work`` seconds on ``lanes``, behind all that was added to them, and after the tasks ``after``."""
        number = len(self._work)
        if len(lanes) == 1:
            self.extend([work], [lanes[0]], [tuple(after)], [lag])
            return number
        if not lanes or not 0 <= min(lanes) <= max(lanes) < self._lanes or not 0 <= work < _NEVER:
            raise ValueError(
                f"a task needs lanes among 0..{self._lanes - 1} and finite work: {work} s on {tuple(lanes)}"
            )
        if not self._shared.isdisjoint(lanes):
            raise ValueError(f"a task on several lanes cannot use a shared one: {tuple(lanes)}")
        self._several[number] = tuple(lanes)
        self._append([work], [-1], [tuple(after)], [lag])
        return number

    def chain(self, works: Sequence[float], lane: int) -> range:
        """Add tasks that wait for nothing but each other and the lane; the same as `task` for each."""
        count = len(works)
        return self.extend(works, [lane] * count, [()] * count, [0.0] * count)

    def extend(
        self,
        works: Sequence[float],
        lanes: Sequence[int],
        waits: Sequence[tuple[int, ...]],
        lags: Sequence[float],
    ) -> range:
        """Add many tasks of one lane each, given as parallel lists; the same as `task` for each, in a tenth of the time."""
        first, count = len(self._work), len(works)
        if count:
            if not 0 <= min(lanes) <= max(lanes) < self._lanes or not (min(works) >= 0 and sum(works) < _NEVER):
                raise ValueError(
                    f"a task needs lanes among 0..{self._lanes - 1} and finite work: "
                    f"{min(works)} to {max(works)} s on {sorted(set(lanes))}"
                )
            self._append(works, lanes, waits, lags)
        return range(first, first + count)

    def _append(
        self, works: Sequence[float], lanes: Sequence[int], waits: Sequence[tuple[int, ...]], lags: Sequence[float]
    ) -> None:
        if not (min(lags) >= 0 and sum(lags) < _NEVER):
            raise ValueError(f"a lag must be finite and not negative: {min(lags)} to {max(lags)} s")
        first = len(self._work)
        self._work += works
        self._lane += lanes
        self._waits += waits
        self._lag += lags
        if not self._backwards:
            self._backwards = any(before and max(before) >= task for task, before in enumerate(waits, start=first))

    def wait(self, task: int, earlier: int) -> None:
        """Let a task wait for another one, which may have been added after it."""
        self._waits[task] = (*self._waits[task], earlier)
        self._backwards = self._backwards or earlier >= task

    def slow(self, lane: int, busy: int, loss: float) -> None:
        """While ``busy`` does a task, ``lane`` loses ``loss`` seconds of work per second (0: none, 1: it stands still)."""
        if not 0 <= loss <= 1:
            raise ValueError(f"a lane can lose between 0 and 1 seconds per second, not {loss}")
        if loss > 0:
            self._slows.setdefault(busy, []).append((lane, loss))

    def share(self, lane: int) -> None:
        """Let the tasks of a lane take their turns in the order in which they become ready."""
        if any(lane in lanes for lanes in self._several.values()):
            raise ValueError(f"lane {lane} has a task that occupies several lanes, so it cannot be shared")
        self._shared.add(lane)

    def run(self, rounds: int = 1) -> float:
        """Play everything; the time of the last end. Raises Deadlock if tasks are left that wait for each other."""
        if any(not 0 <= earlier < len(self._work) for before in self._waits for earlier in before):
            raise ValueError(f"a task waits for one that is not among 0..{len(self._work) - 1}")
        if self._slows or self._shared:
            self._play_events(rounds)
        else:
            self._play(self._order(), rounds)
        return max(self.end, default=0.0)

    def load(self, round_: int) -> list[float]:
        """For each lane, the seconds in which it was occupied by tasks of a round, slow-down included."""
        load = [0.0] * self._lanes
        first = round_ * len(self._work)
        start, end = self.start[first:], self.end[first:]
        for task, lane in enumerate(self._lane):
            for one in (lane,) if lane >= 0 else self._several[task]:
                load[one] += end[task] - start[task]
        return load

    def _play(self, order: Sequence[int], rounds: int) -> None:
        """Every task at full speed, each behind all that it waits for. The loop that has to be fast."""
        count = len(self._work)
        lane_of, several, waits, work, lag = self._lane, self._several, self._waits, self._work, self._lag
        free = [0.0] * self._lanes
        self.start, self.end, self.released = [], [], []
        for _ in range(rounds):
            start, end, released = [0.0] * count, [0.0] * count, [0.0] * count
            for task in order:
                lane = lane_of[task]
                moment = free[lane] if lane >= 0 else max([free[one] for one in several[task]])
                for earlier in waits[task]:
                    if released[earlier] > moment:
                        moment = released[earlier]
                start[task] = moment
                end[task] = moment = moment + work[task]
                released[task] = moment + lag[task]
                if lane >= 0:
                    free[lane] = moment
                else:
                    for one in several[task]:
                        free[one] = moment
            self.start += start
            self.end += end
            self.released += released

    def _order(self) -> Sequence[int]:
        """The tasks, each behind those that it waits for. Raises Deadlock."""
        count = len(self._work)
        if not self._backwards:
            return range(count)
        missing, followers = [0] * count, [[] for _ in range(count)]  # type: tuple[list[int], list[list[int]]]
        for task, before in enumerate(self._before()):
            missing[task] = len(before)
            for earlier in before:
                followers[earlier].append(task)
        order = [task for task in range(count) if missing[task] == 0]
        for task in order:  # grows meanwhile
            for follower in followers[task]:
                missing[follower] -= 1
                if missing[follower] == 0:
                    order.append(follower)
        if len(order) < count:
            raise Deadlock(tuple(task for task in range(count) if missing[task]))
        return order

    def _before(self) -> list[tuple[int, ...]]:
        """For each task those that it waits for, its lanes included."""
        last = [-1] * self._lanes
        before = []
        for task, lane in enumerate(self._lane):
            lanes = (lane,) if lane >= 0 else self._several[task]
            before.append((*(last[one] for one in lanes if last[one] >= 0), *self._waits[task]))
            for one in lanes:
                last[one] = task
        return before

    def _play_events(self, rounds: int) -> None:
        events = Events(
            lanes=[(lane,) if lane >= 0 else self._several[task] for task, lane in enumerate(self._lane)],
            work=self._work,
            lag=self._lag,
            waits=self._waits,
            shared=frozenset(self._shared),
            slows=self._slows,
            rounds=rounds,
        )
        left = events.play()
        if left:
            raise Deadlock(tuple(left))
        self.start, self.end, self.released = events.start, events.end, events.released
