"""Plays a program with the costs of its actions, and writes the timeline that the runtime would write.

On a rank's ``compute`` lane its passes and its update run in order; on ``comm`` its collectives do, and there stand the messages that
it sends and waits for. A collective starts when all its ranks are ready for it: the gradients of a bucket become complete *inside*
the last backward, at the fraction that `cost` gives; a rank without a micro-batch is ready at once. While a collective is in
flight, the compute of its ranks is slowed. A pass of a stage sharded over several ranks occupies all of them, from the
moment at which the last comes to it until they are done together. A message leaves when its rank reaches the SEND, occupies its link,
and is there a latency later. Copies between a device and its host run beside both, one after the other. CLIP and STEP wait for every
reduction of their rank, and a step ends when what it gathers is there. Steps follow each other at once, as they do in training; those of
an asynchronous schedule are played one behind the other until the pipeline is full, and then some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from heterodyne.cost.step import StepCosts
from heterodyne.plan.program import Action, Program
from heterodyne.plan.schedules.asynchronous import depth_of, unrolled
from heterodyne.sim.memory import host_peak, in_passes, peak
from heterodyne.sim.passes import exchange_s
from heterodyne.sim.tasks import Tasks
from heterodyne.timeline import Event, Lane, Timeline

__all__ = ["Simulation", "Span", "simulate"]


class Span(NamedTuple):
    """When one rank did one action of one step; seconds. A RECV lasts as long as the rank waits for it."""

    rank: int
    lane: Lane
    action: Action
    step: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class _Played:
    """What was played, and what it takes to tell of it."""

    program: Program
    costs: StepCosts
    tasks: Tasks
    steps: int
    micro_batches: int | None = None  # of a batch, where several batches were played as one step


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What should happen.

    Args:
        step_s: the period of a step once steps follow each other.
        busy_s: for each rank, seconds of a step in which its compute lane is occupied, overhead and slow-down included.
        wait_s: for each rank, the rest of the step.
        exchange_s: for each rank, the part of ``busy_s`` in which it exchanges something with those that hold parts of the same stages,
            undisturbed.
        peak_bytes: for each rank, the most memory at any time; 0 for an idle rank.
        host_bytes: for each rank, the most of its activations that its host has at any time.
    """

    step_s: float
    busy_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    exchange_s: tuple[float, ...]
    _played: _Played = field(repr=False, compare=False)

    @property
    def bubble(self) -> tuple[float, ...]:
        """For each rank, the share of a step in which it waits."""
        return tuple(wait / self.step_s if self.step_s > 0 else 0.0 for wait in self.wait_s)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Every action, of all steps that were played."""
        count = self._played.micro_batches
        return self._spans if count is None else tuple(_by_step(self._spans, count, self._played.program))

    @cached_property
    def _spans(self) -> tuple[Span, ...]:
        tasks = self._played.tasks
        start, end, released = tasks.engine.start, tasks.engine.end, tasks.engine.released
        spans = []
        for step in range(self._played.steps):
            at = step * len(tasks.engine)
            for rank, action, first, last in tasks.compute:
                spans.append(Span(rank, "compute", action, step, start[at + first], end[at + last]))
            for rank, action, task in tasks.reduces:
                spans.append(Span(rank, "comm", action, step, start[at + task], end[at + task]))
            for rank, action, first, last in tasks.copies:
                spans.append(Span(rank, "comm", action, step, start[at + first], end[at + last]))
            for rank, action, messages in tasks.sends:
                if messages:
                    begun = min(start[at + task] for task in messages)
                    spans.append(Span(rank, "comm", action, step, begun, max(released[at + t] for t in messages)))
            for rank, action, before, messages in tasks.receives:
                reached = end[at + before]
                arrived = max((released[at + task] for task in messages), default=reached)
                spans.append(Span(rank, "comm", action, step, reached, max(reached, arrived)))
        return tuple(spans)

    def timeline(self, devices: Sequence[str]) -> Timeline:
        """The same as events; ``devices``: the device id of each rank."""
        return Timeline.of(
            "simulated",
            devices,
            (
                Event(
                    rank=span.rank,
                    lane=span.lane,
                    kind=span.action.kind,
                    name=str(span.action),
                    step=span.step,
                    start_s=span.start_s,
                    end_s=span.end_s,
                )
                for span in self.spans
            ),
        )

    def memory(self, rank: int) -> tuple[tuple[float, int], ...]:
        """Bytes of a rank over time: ``(seconds, bytes)`` from each moment on at which they change; nothing for an idle rank."""
        costs, actions = self._played.costs.ranks[rank], self._played.program.ranks[rank]
        if costs is None or not actions:
            return ()
        made = in_passes(actions, costs)
        begin = alive = costs.fixed_bytes - costs.coming_bytes
        points, step = [(0.0, alive)], 0
        for span in self._spans:
            if span.rank == rank and span.lane == "compute":
                if span.step > step:
                    alive, step = begin, span.step
                during, after = made[span.action]
                points.append((span.start_s, alive + during))
                alive += after
                points.append((span.end_s, alive))
        return tuple(points)


def _by_step(spans: Sequence[Span], micro_batches: int, program: Program) -> Iterator[Span]:
    """Yield the spans of several batches that were played as one step, each with the step in which its rank does it: the one whose forwards
    it runs then, as the runtime has it."""
    depths = [depth_of(actions) for actions in program.ranks]
    updates = Counter({rank: 1 for rank, depth in enumerate(depths) if depth})
    for span in spans:
        depth, index = depths[span.rank], span.action.index
        if index is None:
            yield span._replace(step=updates[span.rank])
            updates[span.rank] += 1
        else:
            back = span.action.kind in ("B", "R", "SEND_B", "RECV_B")
            step = (index + depth if back else index) // micro_batches
            yield span._replace(step=step, action=replace(span.action, index=index % micro_batches))


def simulate(program: Program, costs: StepCosts, *, steps: int = 2, steady: Program | None = None) -> Simulation:
    """Play ``steps`` steps (at least 2, the first one starts cold). ``steady``: what ranks do from one step to the next, if they do not
    flush them.

    Raises PlanError for a program that would wait for ever, naming the actions, or whose actions have no costs.
    """
    if steps < 2:
        raise ValueError(f"the period of a step shows in 2 steps or more, not in {steps}")
    tasks = Tasks(program, costs)
    tasks.engine.run(steps)
    count, ranks = len(tasks.engine), len(program.ranks)
    end = tasks.engine.end
    finish = [max(end[step * count : (step + 1) * count], default=0.0) for step in (steps - 2, steps - 1)]
    load = tasks.engine.load(steps - 1)
    busy = tuple(load[:ranks])
    # What runs ahead into the next step shows its own pace only after many of them.
    step_s = max([finish[1] - finish[0], *load])
    played = _Played(program=program, costs=costs, tasks=tasks, steps=steps)
    if steady is not None:
        step_s, busy, played = _played_on(steady, costs)
        program, costs = played.program, played.costs
    return Simulation(
        step_s=step_s,
        busy_s=busy,
        wait_s=tuple(max(0.0, step_s - seconds) for seconds in busy),
        peak_bytes=tuple(peak(a, c) for a, c in zip(program.ranks, costs.ranks, strict=True)),
        host_bytes=tuple(host_peak(a, c) for a, c in zip(program.ranks, costs.ranks, strict=True)),
        exchange_s=tuple(exchange_s(a, c) for a, c in zip(program.ranks, costs.ranks, strict=True)),
        _played=played,
    )


def _played_on(steady: Program, costs: StepCosts) -> tuple[float, tuple[float, ...], _Played]:
    """Return the period of steps that are not flushed, the seconds of each rank in one, and what was played."""
    batches = 2 * sum(map(bool, steady.ranks)) + 2
    program = Program(ranks=tuple(unrolled(actions, batches) for actions in steady.ranks))
    repeated = costs.repeated(batches)
    tasks = Tasks(program, repeated)
    tasks.engine.run()
    updates: dict[int, list[float]] = {}
    for rank, action, _, last in tasks.compute:
        if action.kind == "STEP":
            updates.setdefault(rank, []).append(tasks.engine.end[last])
    # Each rank has updated by all batches but the last; the first half of them has filled the pipeline.
    first, last = batches // 2, batches - 2
    step_s = max((own[last] - own[first] for own in updates.values()), default=0.0) / (last - first)
    busy = tuple(0.0 if own is None else own.compute_s for own in costs.ranks)
    count = max(sum(action.kind == "F" for action in actions) for actions in steady.ranks)
    played = _Played(program=program, costs=repeated, tasks=tasks, steps=1, micro_batches=count)
    return max(step_s, *busy), busy, played
