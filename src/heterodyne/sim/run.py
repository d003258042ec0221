"""Plays a program with the costs of its actions, and writes the timeline that the runtime would write.

Each rank has two lanes. On ``compute`` its actions run in order; on ``comm`` its collectives do. A collective starts when all
its ranks are ready for it: the gradients of a bucket become complete *inside* the last backward, at the fraction that `cost`
gives; a rank without a micro-batch is ready at once. While a collective is in flight, the compute of its ranks is slowed.
CLIP and STEP wait for every reduction of their rank. Steps follow each other at once, as they do in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from heterodyne.cost.step import RankCosts, StepCosts
from heterodyne.errors import PlanError
from heterodyne.plan.program import Action, Program
from heterodyne.plan.verify import collective_order
from heterodyne.sim.engine import Engine
from heterodyne.timeline import Event, Lane, Timeline

__all__ = ["Simulation", "Span", "simulate"]


class Span(NamedTuple):
    """When one rank did one action of one step; seconds."""

    rank: int
    lane: Lane
    action: Action
    step: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What should happen.

    Args:
        step_s: the period of a step once steps follow each other.
        busy_s: for each rank, seconds of a step in which its compute lane is occupied, overhead and slow-down included.
        wait_s: for each rank, the rest of the step.
        peak_bytes: for each rank, the most memory at any time; 0 for an idle rank.
        spans: every action, of all steps that were played.
    """

    step_s: float
    busy_s: tuple[float, ...]
    wait_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    spans: tuple[Span, ...]

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


class _Piece(NamedTuple):
    """The tasks of one action; the last backward is cut in several, where its gradient buckets become complete."""

    rank: int
    lane: Lane
    action: Action
    step: int
    first: int
    last: int


@dataclass
class _Stage:
    """The set being built: tasks in the engine, and what they stand for."""

    engine: Engine
    pieces: list[_Piece] = field(default_factory=list)
    ready: dict[Action, list[int]] = field(default_factory=dict)  # collective: tasks that it waits for
    waiting: list[tuple[int, Action]] = field(default_factory=list)  # (task, collective that it waits for)
    overheads: list[tuple[int, int, int]] = field(default_factory=list)  # (rank, step, task)


def simulate(program: Program, costs: StepCosts, *, steps: int = 2) -> Simulation:
    """Play ``steps`` steps (at least 2, the first one starts cold). Raises PlanError for a program that would wait for ever."""
    if steps < 2:
        raise ValueError(f"the period of a step shows in 2 steps or more, not in {steps}")
    order = collective_order(program)
    stage = _Stage(engine=Engine(2 * len(program.ranks)))
    for rank, rank_costs in enumerate(costs.ranks):
        if rank_costs is not None:
            stage.engine.slow(2 * rank, 2 * rank + 1, rank_costs.overlap)
    for step in range(steps):
        stage.ready.clear()
        stage.waiting.clear()
        for rank, actions in enumerate(program.ranks):
            if actions:
                _add_rank(stage, rank, step, actions, costs)
        tasks = {}
        for action, ranks in order:
            lanes = [2 * rank + 1 for rank in ranks]
            tasks[action] = stage.engine.task(costs.seconds(ranks[0], action), lanes, stage.ready[action])
            stage.pieces += [_Piece(rank, "comm", action, step, tasks[action], tasks[action]) for rank in ranks]
        for task, action in stage.waiting:
            stage.engine.wait(task, tasks[action])
    stage.engine.run()
    return _result(stage, program, costs, steps)


def _add_rank(stage: _Stage, rank: int, step: int, actions: Sequence[Action], costs: StepCosts) -> None:
    """One step of one rank: its tasks on the compute lane, and where its collectives become ready."""
    engine, lane = stage.engine, 2 * rank
    rank_costs = costs.ranks[rank]
    if rank_costs is None:
        raise PlanError(f"rank {rank} has actions but no costs: it is idle in the plan")
    # All passes but the last are played in one go: nothing happens inside them, and they are most of a program.
    plain = max(0, next((n for n, a in enumerate(actions) if a.kind not in ("F", "B")), len(actions)) - 1)
    start, *passes = engine.chain([rank_costs.overhead_s, *(costs.seconds(rank, a) for a in actions[:plain])], lane)
    stage.overheads.append((rank, step, start))
    stage.pieces += [_Piece(rank, "compute", a, step, t, t) for a, t in zip(actions, passes, strict=False)]
    ends: dict[float, int] = {
        1.0: passes[-1] if passes else start
    }  # fraction of the action before: the task that reaches it
    pending: list[Action] = []
    for place, action in enumerate(actions[plain:], start=plain):
        if action.kind == "REDUCE_GRAD":
            stage.ready.setdefault(action, []).append(ends.get(_ready(rank_costs, action), ends[1.0]))
            pending.append(action)
            continue
        before = ends[1.0]
        cuts = _cuts(rank_costs, actions, place)
        seconds = costs.seconds(rank, action)
        tasks = engine.chain([seconds * (high - low) for low, high in zip([0.0, *cuts], cuts, strict=False)], lane)
        ends = {0.0: before, **dict(zip(cuts, tasks, strict=True))}
        if action.kind in ("CLIP", "STEP"):
            stage.waiting += [(tasks[0], collective) for collective in pending]
            pending = []
        stage.pieces.append(_Piece(rank, "compute", action, step, tasks[0], tasks[-1]))


def _ready(costs: RankCosts, reduce: Action) -> float:
    assert reduce.index is not None
    return min(1.0, max(0.0, costs.ready[reduce.index]))


def _cuts(costs: RankCosts, actions: Sequence[Action], place: int) -> list[float]:
    """Where to cut an action: at the fractions at which the buckets that are reduced right behind it become complete."""
    cuts = {1.0}
    if actions[place].kind == "B":
        for action in actions[place + 1 :]:
            if action.kind != "REDUCE_GRAD":
                break
            cuts.add(_ready(costs, action))
    return sorted(cuts - {0.0})


def _result(stage: _Stage, program: Program, costs: StepCosts, steps: int) -> Simulation:
    start, end = stage.engine.start, stage.engine.end
    spans = tuple(Span(p.rank, p.lane, p.action, p.step, start[p.first], end[p.last]) for p in stage.pieces)
    finish = [max((s.end_s for s in spans if s.step == step), default=0.0) for step in (steps - 2, steps - 1)]
    step_s = finish[1] - finish[0]
    busy = [0.0] * len(program.ranks)
    for span in spans:
        if span.step == steps - 1 and span.lane == "compute":
            busy[span.rank] += span.end_s - span.start_s
    for rank, step, task in stage.overheads:
        if step == steps - 1:
            busy[rank] += end[task] - start[task]
    # A rank that runs ahead into the next step shows its own pace only after many of them.
    step_s = max([step_s, *busy])
    return Simulation(
        step_s=step_s,
        busy_s=tuple(busy),
        wait_s=tuple(max(0.0, step_s - seconds) for seconds in busy),
        peak_bytes=tuple(_peak(a, c) for a, c in zip(program.ranks, costs.ranks, strict=True)),
        spans=spans,
    )


def _peak(actions: Sequence[Action], costs: RankCosts | None) -> int:
    """The most bytes at any time: activations live from the forward of a micro-batch to its backward."""
    if costs is None or not actions:
        return 0
    alive = peak = 0
    for action in actions:
        if action.kind == "F" and action.index is not None:
            alive += costs.activation_bytes[action.index]
            peak = max(peak, alive + costs.workspace_bytes)
        elif action.kind == "B" and action.index is not None:
            alive -= costs.activation_bytes[action.index]
    return costs.fixed_bytes + max(peak, costs.update_bytes)
