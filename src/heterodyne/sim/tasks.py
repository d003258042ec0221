"""A program and its costs become tasks on lanes: what the engine plays.

Each rank has a lane for what it computes, one for its collectives and one for copies between its device and the host; each link has a
lane for each direction. What several ranks do
together, each with its part of a stage, is one task on the lanes of all of them. Every rank's list is walked once, as far as it can
go: it stops at a RECV whose message has not been sent, at a pass to which the others of its stage have not come, and at a CLIP whose
collectives have not been joined by all. So tasks come in an order in which each is behind all that it waits for, and a program in which
ranks would wait for each other for ever is found here, before anything is played.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from heterodyne.cost.step import StepCosts
from heterodyne.errors import PlanError
from heterodyne.plan.program import COLLECTIVES, REDUCTIONS, Action, Program
from heterodyne.sim.copies import Copies
from heterodyne.sim.engine import Engine
from heterodyne.sim.passes import completes, cuts_of, seconds_of

__all__ = ["Tasks"]

_NOT_YET, _NOTHING = -1, -2  # in place of the task that carries a message
Sent = tuple[int, Sequence[int], Sequence[float], float, list[int], Sequence[float]]
"""Lane, bytes, seconds, latency, tasks, seconds of the sender."""
_TOGETHER = frozenset({"F", "B", "I", "R"})  # in W nothing is exchanged


class _Meeting:
    """A pass of a sharded stage: what each of its ranks brings, and the tasks, once all have come."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.waits: dict[int, tuple[int, ...]] = {}  # by rank
        self.cuts: set[float] = set()
        self.first = self.last = _NOT_YET
        self.ends: dict[float, int] = {}


class Tasks:
    """The tasks of one step, and what they stand for. Raises PlanError for a program that cannot be played.

    ``compute`` holds ``(rank, action, first task, last task)``: a backward inside which a bucket becomes complete is cut into several
    tasks; ``sends`` ``(rank, action, messages)``; ``receives`` ``(rank, action, task before it, messages)``; ``reduces``
    ``(rank, action, task)``; ``copies`` ``(rank, action, first task, last task)`` of OFFLOAD and RELOAD. ``engine`` is ready to run;
    ``lanes`` is the lane of each task, that of a rank's computing its number.
    """

    def __init__(self, program: Program, costs: StepCosts) -> None:
        self.compute: list[tuple[int, Action, int, int]] = []
        self.sends: list[tuple[int, Action, tuple[int, ...]]] = []
        self.receives: list[tuple[int, Action, int, tuple[int, ...]]] = []
        self.reduces: list[tuple[int, Action, int]] = []
        self.copies: list[tuple[int, Action, int, int]] = []
        self.lanes: list[int] = []
        self._work: list[float] = []
        self._waits: list[tuple[int, ...]] = []
        self._lag: list[float] = []
        self._several: dict[int, tuple[int, ...]] = {}
        self._ranks, self._costs = len(program.ranks), costs
        self._links = {name: 2 * self._ranks + n for n, name in enumerate(dict.fromkeys(r.link for r in costs.routes))}
        self._into: dict[tuple[int, str], dict[int, list[tuple[list[int], Sequence[float]]]]] = {}
        self._out: dict[tuple[int, str], dict[int, list[Sent]]] = {}
        self._lay_routes()
        reductions = [[a for a in actions if a.kind in REDUCTIONS] for actions in program.ranks]
        self._members = Counter(a for actions in program.ranks for a in actions if a.kind in COLLECTIVES)
        self._joined: dict[Action, dict[int, tuple[int, ...]]] = {}  # by rank
        self._queues: list[deque[Action]] = [deque() for _ in program.ranks]
        self._reduced: list[list[int]] = [[] for _ in program.ranks]
        self._clips = sum(any(a.kind == "CLIP" for a in actions) for actions in program.ranks)
        self._at_clip: list[int] = []
        self._norm = self._met = _NOT_YET
        self._unsharded: dict[tuple[int, Action], int] = {}  # by rank
        self._passed: dict[int, int] = {}  # rank: its last task before it updates
        self._meetings: dict[tuple[tuple[int, ...], Action], _Meeting] = {}
        self._begins = self._begin(program)
        self._walk_all(program, reductions)
        if costs.ranks_meet:
            self._end_together(program)
        self.engine = self._engine(program)

    def _lay_routes(self) -> None:
        for route in self._costs.routes:
            tasks = [_NOT_YET if size else _NOTHING for size in route.bytes]
            sent = (self._links[route.link], route.bytes, route.seconds, route.latency_s, tasks, route.source_s)
            (rank, stage), (to_rank, to_stage) = route.source, route.destination
            self._out.setdefault((rank, f"SEND_{route.kind}"), {}).setdefault(stage, []).append(sent)
            self._into.setdefault((to_rank, f"RECV_{route.kind}"), {}).setdefault(to_stage, []).append(
                (tasks, route.destination_s)
            )

    def _walk_all(self, program: Program, reductions: Sequence[Sequence[Action]]) -> None:
        """Let every rank go as far as it can, in turns, until all are through."""
        walks = [
            (rank, self._walk(rank, actions, cuts_of(actions, self._costs.ranks[rank], reductions[rank])))
            for rank, actions in enumerate(program.ranks)
            if actions
        ]
        at: dict[int, Action] = {}  # where each rank has stopped
        while walks:
            before = len(self._work)
            stopped = [(rank, walk, next(walk, None)) for rank, walk in walks]
            left = [(rank, walk, action) for rank, walk, action in stopped if action is not None]
            reached = {rank: action for rank, _, action in left}
            if len(self._work) == before and reached == at:
                raise PlanError(self._say_deadlock(list(reached.items())))
            at = reached
            walks = [(rank, walk) for rank, walk, _ in reversed(left)]  # gradients go the other way

    def _walk(self, rank: int, actions: Sequence[Action], cuts: Mapping[int, Sequence[float]]) -> Iterator[Action]:
        """Add the tasks of one rank; yields the action at which it has to wait for others."""
        costs = self._costs.ranks[rank]
        if costs is None:
            raise PlanError(f"rank {rank} has actions but no costs: it is idle in the plan")
        table = seconds_of(actions, costs)
        into = {kind: self._into.get((rank, kind), {}) for kind in ("RECV_F", "RECV_B")}
        out = {kind: self._out.get((rank, kind), {}) for kind in ("SEND_F", "SEND_B")}
        together = {number: stage.together for number, stage in costs.stages.items() if len(stage.together) > 1}
        work, lanes, waits, lag, compute = self._work, self.lanes, self._waits, self._lag, self.compute
        begin = last = self._begins[rank]
        pending: tuple[int, ...] = ()  # messages that the next task waits for
        ends: dict[tuple[int, float], int] = {}  # (stage, fraction of its last backward): the task that reaches it
        gathering: dict[int, Action] = {}  # by bucket
        copies = Copies(costs)
        action = actions[0]
        try:
            for position, action in enumerate(actions):
                kind, stage, index = action.kind, action.stage, action.index
                if kind in table:
                    for bucket in costs.gathered_bytes.get(stage, ()) if gathering else ():
                        if bucket in gathering:
                            while (rank, gathering[bucket]) not in self._unsharded:
                                yield action
                            pending += (self._unsharded[rank, gathering.pop(bucket)],)
                    pending += copies.awaited(action)
                    seconds = table[kind][stage][index]  # type: ignore[index]  # only CLIP and STEP have none
                    if stage in together and kind in _TOGETHER:
                        meeting = self._come(rank, action, together[stage], seconds, pending, cuts.get(position, ()))
                        while meeting.last == _NOT_YET:
                            yield action
                        ends[stage, 0.0], last = last, meeting.last
                        ends.update({(stage, fraction): task for fraction, task in meeting.ends.items()})
                        compute.append((rank, action, meeting.first, last))
                    elif position in cuts:
                        first, last = self._add_cut(seconds, rank, pending, cuts[position], stage, ends, last)
                        compute.append((rank, action, first, last))
                    else:
                        last = len(work)
                        work.append(seconds)
                        lanes.append(rank)
                        waits.append(pending)
                        lag.append(0.0)
                        compute.append((rank, action, last, last))
                    pending = ()
                    if kind == "F" and (rest := copies.leaving_s(action)):
                        copies.left[stage, index] = self._add(rest, self._copying(rank), (last,))
                elif kind in ("OFFLOAD", "RELOAD"):
                    pending += self._copy(rank, action, last, copies)
                elif kind in into:
                    came, busy_s = [], 0.0
                    for tasks, carried_s in into[kind].get(stage, ()):
                        while (message := tasks[index]) == _NOT_YET:  # type: ignore[index]
                            yield action
                        if message >= 0:
                            came.append(message)
                            busy_s += carried_s[index] if carried_s else 0.0  # type: ignore[index]
                    self.receives.append((rank, action, last, tuple(came)))
                    if busy_s:  # takes from computing what is not done while the rank waits anyway
                        last = self._add(busy_s, rank)
                    pending += tuple(came)
                elif kind in out:
                    sent = out[kind].get(stage, ())
                    self.sends.append((rank, action, self._send(sent, index, (last, *pending))))
                    carried = [of[-1] for of in sent if of[-1]]
                    if busy_s := sum(seconds[index] for seconds in carried):  # type: ignore[index,misc]
                        last = self._add(busy_s, rank, pending)
                elif kind in REDUCTIONS:
                    self._join(rank, action, completes(costs, action, ends, begin))
                elif kind in ("GATHER", "UNSHARD"):
                    if kind == "UNSHARD" and index is not None:
                        gathering[index] = action
                    self._join(rank, action, (last,))
                elif kind == "RESHARD":
                    continue
                else:
                    self._passed.setdefault(rank, last)
                    while self._queues[rank] or not (self._agree(rank) if kind == "CLIP" else self._meet()):
                        yield action
                    together_at = (self._norm, self._met if kind == "STEP" else _NOT_YET)
                    behind = (*pending, *self._reduced[rank], *(task for task in together_at if task >= 0))
                    last = self._add(costs.clip_s if kind == "CLIP" else costs.step_s, rank, behind)
                    compute.append((rank, action, last, last))
                    pending = ()
        except (KeyError, IndexError):
            raise PlanError(f"rank {rank} has no cost of {action}: the program is not that of the plan") from None
        self._passed.setdefault(rank, last)
        if action.kind == "GATHER":  # the next step computes with the weights that it brings
            while self._queues[rank]:
                yield action
            self._add(0.0, rank, tuple(self._reduced[rank]))

    def _copying(self, rank: int) -> int:
        return 2 * self._ranks + len(self._links) + 1 + rank

    def _copy(self, rank: int, action: Action, last: int, copies: Copies) -> tuple[int, ...]:
        """Play OFFLOAD or RELOAD; the tasks that the next pass has to wait for."""
        if action.kind == "OFFLOAD":
            left = copies.left.get((action.stage, action.index))
            if left is None:
                return ()
            self.copies.append((rank, action, left, left))
            return (left,)
        first = len(self._work)
        for seconds in copies.reload_s(action):
            task = self._add(seconds, self._copying(rank), (last,) if len(self._work) == first else ())
        copies.lead[action.stage, action.index] = first
        self.copies.append((rank, action, first, task))
        return ()

    def _send(self, sent: Sequence[Sent], index: int | None, waits: tuple[int, ...]) -> tuple[int, ...]:
        """Add the messages of one SEND."""
        first = len(self._work)
        for link, sizes, durations, latency, tasks, _ in sent:
            if sizes[index]:  # type: ignore[index]  # only CLIP and STEP have none
                tasks[index] = len(self._work)  # type: ignore[index]
                self._work.append(durations[index])  # type: ignore[index]
                self.lanes.append(link)
                self._waits.append(waits)
                self._lag.append(latency)
        return tuple(range(first, len(self._work)))

    def _add(self, seconds: float, lane: int, waits: tuple[int, ...] = ()) -> int:
        self._work.append(seconds)
        self.lanes.append(lane)
        self._waits.append(waits)
        self._lag.append(0.0)
        return len(self._work) - 1

    def _add_cut(
        self,
        seconds: float,
        rank: int,
        waits: tuple[int, ...],
        cuts: Sequence[float],
        stage: int,
        ends: dict[tuple[int, float], int],
        before: int,
    ) -> tuple[int, int]:
        """Add one pass in pieces that end at the fractions ``cuts``, the last of which is 1."""
        first, low = len(self._work), 0.0
        ends[stage, 0.0] = before
        for high in cuts:
            ends[stage, high] = self._add(seconds * (high - low), rank, waits)
            waits, low = (), high
        return first, len(self._work) - 1

    def _come(
        self,
        rank: int,
        action: Action,
        ranks: tuple[int, ...],
        seconds: float,
        waits: tuple[int, ...],
        cuts: Sequence[float],
    ) -> _Meeting:
        """A rank comes to a pass that it does together with others; the last of them adds its tasks, on the lanes of all."""
        meeting = self._meetings.setdefault((ranks, action), _Meeting())
        meeting.seconds = max(meeting.seconds, seconds)
        meeting.waits[rank] = waits
        meeting.cuts.update(cuts)
        if len(meeting.waits) == len(ranks):
            before, low = tuple(sorted({task for own in meeting.waits.values() for task in own})), 0.0
            meeting.first = len(self._work)
            for high in sorted(meeting.cuts | {1.0}):
                task = self._add(meeting.seconds * (high - low), ranks[0], before)
                self._several[task] = ranks
                meeting.ends[high] = meeting.last = task
                before, low = (), high
        return meeting

    def _join(self, rank: int, action: Action, ready: tuple[int, ...]) -> None:
        """A rank is ready for a collective, which starts when all its ranks are, and is the next one for all of them."""
        self._costs.collective_s(action)  # raises KeyError
        self._queues[rank].append(action)
        self._joined.setdefault(action, {})[rank] = ready
        ahead = {action}
        while ahead:
            action = ahead.pop()
            joined = self._joined[action]
            if len(joined) < self._members[action] or any(self._queues[r][0] != action for r in joined):
                continue
            task = self._add_collective(
                self._costs.collective_s(action),
                tuple(joined),
                {earlier for before in joined.values() for earlier in before},
            )
            for member in joined:
                self._queues[member].popleft()
                self._reduced[member].append(task)
                self.reduces.append((member, action, task))
                if action.kind == "UNSHARD":
                    self._unsharded[member, action] = task
                if self._queues[member]:
                    ahead.add(self._queues[member][0])

    def _add_collective(self, seconds: float, ranks: tuple[int, ...], waits: set[int]) -> int:
        lanes = tuple(self._ranks + rank for rank in ranks)
        task = self._add(seconds, lanes[0], tuple(sorted(waits)))
        if len(lanes) > 1:
            self._several[task] = lanes
        return task

    def _agree(self, rank: int) -> bool:
        """At CLIP: whether all ranks have come, where they have to agree on the norm."""
        if self._costs.norm_s is None or self._norm >= 0:
            return True
        if rank not in self._at_clip:
            self._at_clip.append(rank)
        if len(self._at_clip) == self._clips:
            waits = {task for member in self._at_clip for task in (self._passed[member], *self._reduced[member])}
            self._norm = self._add_collective(self._costs.norm_s, tuple(sorted(self._at_clip)), waits)
        return self._norm >= 0

    def _begin(self, program: Program) -> dict[int, int]:
        """What a step takes besides its actions, on each rank that has any; where they begin together the last one begins for all."""
        costs = {rank: own for rank, own in enumerate(self._costs.ranks) if own is not None and program.ranks[rank]}
        begins = {rank: self._add(own.overhead_s, rank) for rank, own in costs.items()}
        if not self._costs.ranks_begin_together:
            return begins
        everyone = self._add(self._costs.meeting_s, self._everyone, tuple(begins.values()))
        return {rank: self._add(0.0, rank, (everyone,)) for rank in begins}

    @property
    def _everyone(self) -> int:
        """The lane on which all ranks meet."""
        return 2 * self._ranks + len(self._links)

    def _meet(self) -> bool:
        """At STEP: whether all ranks have run their last pass, where none updates its weights before it knows the loss of all."""
        if self._costs.ranks_meet and self._met < 0 and len(self._passed) == len(self._begins):
            self._met = self._add(self._costs.meeting_s, self._everyone, tuple(self._passed.values()))
        return not self._costs.ranks_meet or self._met >= 0

    def _end_together(self, program: Program) -> None:
        """Who updates nothing waits for the others all the same."""
        self._meet()
        for rank in self._passed:
            if not any(action.kind == "STEP" for action in program.ranks[rank]):
                self._add(0.0, rank, (self._met,))

    def _engine(self, program: Program) -> Engine:
        engine = Engine(3 * self._ranks + len(self._links) + 1)
        first = 0
        for task, lanes in self._several.items():
            self._extend(engine, first, task)
            engine.task(self._work[task], lanes, self._waits[task])
            first = task + 1
        self._extend(engine, first, len(self._work))
        for rank, own in enumerate(self._costs.ranks):
            if own is not None and program.ranks[rank]:
                engine.slow(rank, self._ranks + rank, own.overlap if self._reduced[rank] else 0.0)
        sources = {(route.link, route.source[0]) for route in self._costs.routes}
        for name, count in Counter(link for link, _ in sources).items():
            if count > 1:  # the messages of one rank follow each other in the order of its list
                engine.share(self._links[name])
        return engine

    def _extend(self, engine: Engine, first: int, stop: int) -> None:
        engine.extend(self._work[first:stop], self.lanes[first:stop], self._waits[first:stop], self._lag[first:stop])

    def _say_deadlock(self, stopped: Sequence[tuple[int, Action]]) -> str:
        where = []
        for rank, action in sorted(stopped):
            if action.kind.startswith("RECV"):
                why = "whose message is not sent before"
            elif action.kind in _TOGETHER:
                why = "to which the other devices of its stage do not come"
            else:
                why = (
                    f"for the reduction of bucket {self._queues[rank][0].index}"
                    if self._queues[rank]
                    else "for the norm"
                )
            where.append(f"rank {rank} at {action}, {why}")
        return (
            f"ranks would wait for each other for ever: {'; '.join(where)}. Put each SEND ahead of what waits for it, "
            "and REDUCE_GRAD, SCATTER, GATHER and UNSHARD in the same order on every rank"
        )
