"""A clock for orders: when each action starts and ends, if every place obeys its list and waits only for what it needs.

The order on every place is given, so nothing has to be decided and no queue of events is needed: an action starts when the one
before it on its place has ended and what it reads has come, which is a longest path. Each place is followed until it has to
wait for another one, and taken up again when that has got so far. Transfers take their time but do not wait for each other; the
simulator knows more about links. Actions are whole numbers here, since a search plays millions of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterodyne.errors import PlanError
from heterodyne.plan.program import Action
from heterodyne.plan.schedules.held import peak_bytes
from heterodyne.plan.schedules.schedule import Orders
from heterodyne.plan.schedules.times import Read, StageBytes, StageTimes, chain

__all__ = ["Clock", "Played", "play"]

_NOTHING, _SEVERAL = -1, -2  # what an action waits for, when it is not one other action
KINDS = {"F": 0, "I": 1, "W": 2, "R": 3, "B": 4}
AGAIN = {"I": 5, "B": 6}  # a backward that has to recompute first
_SLOT_OF = (0, 1, 2, 3, 1, 1, 1)  # the gradients of a stage's inputs are there after I or after B


@dataclass(frozen=True, kw_only=True)
class Played:
    """What happened. ``starts`` and ``ends`` in seconds, for each place and each of its actions, in order.

    ``bubble``: for each place the share of the whole time in which it does nothing. ``peak_bytes``: zeros if no bytes were given.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    makespan_s: float
    bubble: tuple[float, ...]
    peak_bytes: tuple[int, ...]


def play(
    orders: Orders,
    times: Sequence[StageTimes],
    *,
    reads: Sequence[Read] | None = None,
    held: Sequence[StageBytes] | None = None,
) -> Played:
    """Play orders with one `StageTimes` a stage. ``reads``: by default each stage reads from the one before it.

    Raises PlanError if some actions can never run; `check.order_faults` tells why.
    """
    micro_batches = 1 + max((action.index or 0 for row in orders for action in row), default=-1)
    clock = Clock(times, place_of_stage(orders, len(times)), micro_batches, reads)
    rows = clock.encode(orders)
    starts, ends = clock.run(rows)
    stuck = [str(row[len(done)]) for row, done in zip(orders, ends, strict=True) if len(done) < len(row)]
    if stuck:
        raise PlanError(f"the orders stop at {', '.join(stuck)}, which wait forever: check them with order_faults")
    makespan = max((done[-1] for done in ends if done), default=0.0)
    busy = [sum(map(clock.duration.__getitem__, row)) for row in rows]
    return Played(
        starts=tuple(map(tuple, starts)),
        ends=tuple(map(tuple, ends)),
        makespan_s=makespan,
        bubble=tuple(1 - work / makespan if makespan else 0.0 for work in busy),
        peak_bytes=peak_bytes(orders, held) if held is not None else (0,) * len(orders),
    )


def place_of_stage(orders: Orders, stages: int) -> tuple[int, ...]:
    """Return where each stage runs, read off the orders; -1 for a stage without any action."""
    places = [-1] * stages
    for place, row in enumerate(orders):
        for action in row:
            if action.stage >= stages:
                raise PlanError(f"{action} is of stage {action.stage}, but there are {stages} stages: remove it")
            places[action.stage] = place
    return tuple(places)


class Clock:
    """Tables for one pipeline, to play many orders. An action is a number (see `code`), a row is a list of them.

    ``duration``: seconds by code. `run` does not look at the order of one micro-batch's actions on its own place: whoever makes
    rows keeps F before R before I or B before W, and `check.order_faults` sees to it.
    """

    def __init__(
        self,
        times: Sequence[StageTimes],
        places: Sequence[int],
        micro_batches: int,
        reads: Sequence[Read] | None = None,
    ) -> None:
        self.stages, self.micro_batches = len(times), micro_batches
        self.cells = self.stages * micro_batches
        by_kind = [
            [t.forward_s for t in times],
            [t.input_s for t in times],
            [t.weight_s for t in times],
            [t.recompute_s for t in times],
            [t.input_s + t.weight_s for t in times],
            [t.recompute_s + t.input_s for t in times],
            [t.recompute_s + t.input_s + t.weight_s for t in times],
        ]
        self.duration = [seconds for kind in by_kind for seconds in kind for _ in range(micro_batches)]
        self.slot = [base * self.cells + cell for base in _SLOT_OF for cell in range(self.cells)]
        self._before: list[int] = []
        self._lag: list[float] = []
        self._several: dict[int, list[tuple[int, float]]] = {}
        self._connect(times, places, chain(self.stages) if reads is None else reads)

    def code(self, action: Action, *, again: bool = False) -> int:
        """``again``: a backward that recomputes first."""
        kind = AGAIN[action.kind] if again else KINDS[action.kind]
        return kind * self.cells + action.stage * self.micro_batches + (action.index or 0)

    def encode(self, orders: Orders) -> list[list[int]]:
        """Rows of codes. Raises KeyError for a kind that is not computing."""
        ready = {(a.stage, a.index) for row in orders for a in row if a.kind == "R"}
        return [
            [self.code(a, again=a.kind in ("I", "B") and (a.stage, a.index) not in ready) for a in row]
            for row in orders
        ]

    def decode(self, rows: Sequence[Sequence[int]]) -> Orders:
        """The inverse of `encode`."""
        names = [*KINDS, *AGAIN]
        orders = []
        for row in rows:
            actions = []
            for code in row:
                kind, cell = divmod(code, self.cells)
                actions.append(Action(cell // self.micro_batches, names[kind], cell % self.micro_batches))  # type: ignore[arg-type]
            orders.append(tuple(actions))
        return tuple(orders)

    def run(self, rows: Sequence[Sequence[int]]) -> tuple[list[list[float]], list[list[float]]]:
        """Starts and ends of each place's actions, as far as they can run; shorter than the row where one waits forever."""
        before, lag, several = self._before, self._lag, self._several
        duration, slot = self.duration, self.slot
        end: list[float] = [-1.0] * (4 * self.cells)
        starts: list[list[float]] = [[] for _ in rows]
        ends: list[list[float]] = [[] for _ in rows]
        waiting: dict[int, list[int]] = {}
        now_at = [0.0] * len(rows)
        todo = list(range(len(rows)))
        while todo:
            place = todo.pop()
            row, mine_start, mine_end, now = rows[place], starts[place], ends[place], now_at[place]
            for code in row[len(mine_end) :] if mine_end else row:
                source = before[code]
                if source >= 0:
                    came = end[source]
                    if came < 0:
                        waiting.setdefault(source, []).append(place)
                        break
                    came += lag[code]
                    if came > now:
                        now = came
                elif source == _SEVERAL:
                    for source, delay in several[code]:
                        came = end[source]
                        if came < 0:
                            waiting.setdefault(source, []).append(place)
                            break
                        if came + delay > now:
                            now = came + delay
                    else:
                        source = _NOTHING
                    if source != _NOTHING:
                        break
                mine_start.append(now)
                now += duration[code]
                mine_end.append(now)
                made = slot[code]
                end[made] = now
                if made in waiting:
                    todo += waiting.pop(made)
            now_at[place] = mine_end[-1] if mine_end else 0.0
        return starts, ends

    def makespan(self, rows: Sequence[Sequence[int]]) -> float:
        """The end of the last action; infinity if some can never run."""
        _, ends = self.run(rows)
        if any(len(done) < len(row) for done, row in zip(ends, rows, strict=True)):
            return float("inf")
        return max((done[-1] for done in ends if done), default=0.0)

    def sources(self, code: int) -> list[tuple[int, float]]:
        """Return what an action waits for on any place: slots, and the seconds that the transfer takes."""
        source = self._before[code]
        if source >= 0:
            return [(source, self._lag[code])]
        return self._several.get(code, []) if source == _SEVERAL else []

    def _connect(self, times: Sequence[StageTimes], places: Sequence[int], reads: Sequence[Read]) -> None:
        forward: list[list[tuple[int, float]]] = [[] for _ in times]
        backward: list[list[tuple[int, float]]] = [[] for _ in times]
        for read in reads:
            near = places[read.source] == places[read.reader]
            forward[read.reader].append((read.source, 0.0 if near else read.forward_s))
            if read.backward_s is not None:
                backward[read.source].append((read.reader, 0.0 if near else read.backward_s))
        alone: list[list[tuple[int, float]]] = [[] for _ in times]
        for waits in (forward, backward, alone, alone, backward, backward, backward):
            base = 0 if waits is forward else self.cells
            for stage in range(self.stages):
                for index in range(self.micro_batches):
                    self._add([(base + s * self.micro_batches + index, lag) for s, lag in waits[stage]])

    def _add(self, sources: list[tuple[int, float]]) -> None:
        code = len(self._before)
        if len(sources) > 1:
            self._several[code] = sources
        self._before.append(_SEVERAL if len(sources) > 1 else sources[0][0] if sources else _NOTHING)
        self._lag.append(sources[0][1] if len(sources) == 1 else 0.0)
