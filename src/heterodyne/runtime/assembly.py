"""What one rank works with, put together from a plan: its stages, what it exchanges with others, and its gradients' channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from heterodyne.cluster.spec import Cluster
from heterodyne.errors import PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.buckets import Bucket, planned_buckets
from heterodyne.plan.plan import Pipeline, Plan
from heterodyne.plan.program import Action, Program
from heterodyne.runtime.forward import Forward
from heterodyne.runtime.meeting.communicator import Channel, Communicator
from heterodyne.runtime.placement import Place, Placement
from heterodyne.runtime.segments import Runnable, Segment, Value, WholeModel
from heterodyne.runtime.stages import Stages
from heterodyne.runtime.transfers import Edge, Team, Transfers

__all__ = ["Parts", "StagePrograms", "assemble", "bucket_channels", "completed_gradients"]


class _Program(Protocol):
    """A piece of the captured model that can be bound to a module."""

    @property
    def receives(self) -> tuple[Value, ...]: ...
    @property
    def sends(self) -> tuple[Value, ...]: ...
    @property
    def random_before(self) -> int: ...
    def bind(self, module: nn.Module, device: torch.device) -> Runnable: ...


StagePrograms = Callable[[int, int, Sequence[int]], _Program]
"""The ops ``[start, stop)`` of the captured model, which is cut at the ops of the third argument."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """``transfers``: None where nothing is exchanged between stages."""

    forward: Forward
    stages: Stages
    transfers: Transfers | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A segment to be: ops ``[start, stop)`` of a stage."""

    stage: int
    start: int
    stop: int
    recompute: bool


def assemble(
    module: nn.Module,
    *,
    graph: ModelGraph,
    plan: Plan,
    program: Program,
    cluster: Cluster,
    placement: Placement,
    communicator: Communicator,
    programs: StagePrograms | None,
    seed: int,
) -> Parts:
    """The stages of this rank. Collective. Raises PlanError for a plan with stages or recompute where no ``programs`` are given."""
    place, device = placement.places[communicator.rank], communicator.device
    forward = Forward(
        module,
        graph,
        device=device,
        precision=plan.precision,
        seed=seed,
        statistics=_statistics(placement, communicator) if graph.batch_statistics else None,
    )
    mail = communicator.mail() if any(len(p.places) > 1 for p in plan.pipelines) else None
    halves = frozenset(action.stage for action in program.ranks[communicator.rank] if action.kind == "W")
    if place.pipeline is None:
        return Parts(forward=forward, stages=Stages({}, forward=forward, device=device), transfers=None)
    pipeline = plan.pipelines[place.pipeline]
    pieces = _pieces(pipeline, graph)
    if len(pieces) == 1 and not pieces[0].recompute and not halves:
        whole = {0: [Segment(run=WholeModel(module))]}
        return Parts(forward=forward, stages=Stages(whole, forward=forward, device=device), transfers=None)
    if programs is None:
        raise PlanError(
            "the plan cuts the model into stages, or recomputes parts of it, and the captured model was not given"
        )
    found = {
        n: programs(p.start, p.stop, [q.start for q in pieces]) for n, p in enumerate(pieces) if p.stage in place.stages
    }
    segments: dict[int, list[Segment]] = {stage: [] for stage in place.stages}
    for number, piece in found.items():
        segments[pieces[number].stage].append(
            Segment(
                run=piece.bind(module, device),
                receives=piece.receives,
                sends=piece.sends,
                recompute=pieces[number].recompute,
                random_before=piece.random_before,
            )
        )
    transfers = None
    if mail is not None and len(pipeline.places) > 1:
        stage_of = [piece.stage for piece in pieces]
        team = Team(
            ranks=tuple(tuple(map(cluster.rank, stage.devices)) for stage in pipeline.stages),
            shares=tuple(stage.shares for stage in pipeline.stages),
        )
        edges = _edges(found.values(), stage_of, pipeline, place)
        _require_cuttable(edges, team)
        transfers = Transfers(rank=place.rank, team=team, edges=edges, mail=mail)
    stages = Stages(segments, forward=forward, device=device, transfers=transfers, halves=halves)
    return Parts(forward=forward, stages=stages, transfers=transfers)


def bucket_channels(
    plan: Plan, graph: ModelGraph, cluster: Cluster, communicator: Communicator
) -> list[tuple[Bucket, Channel | None]]:
    """Every bucket of the plan with the channel between its owners; None on ranks that are none of them. Collective."""
    buckets = planned_buckets(plan, graph)
    channels: dict[tuple[str, ...], Channel | None] = {}
    for bucket in buckets:
        if bucket.owners not in channels:
            channels[bucket.owners] = communicator.channel(sorted(map(cluster.rank, bucket.owners)))
    return [(bucket, channels[bucket.owners]) for bucket in buckets]


def completed_gradients(
    actions: Sequence[Action], plan: Plan, graph: ModelGraph, place: Place
) -> dict[int, frozenset[str]]:
    """For each stage of a rank, the parameters whose gradients its last whole backward completes.

    A parameter that several of them read is completed by the one that comes last. One that is read where backwards come in
    halves is completed by none: its gradient is there when the last half is done.
    """
    if place.pipeline is None:
        return {}
    stages = plan.pipelines[place.pipeline].stages
    last = {action.stage: number for number, action in enumerate(actions) if action.kind in ("B", "W")}
    halves = {action.stage for action in actions if action.kind == "W"}
    by: dict[str, int] = {}
    for stage in sorted(last, key=last.__getitem__):
        for op in graph.ops[stages[stage].ops[0] : stages[stage].ops[1]]:
            by.update(dict.fromkeys(op.parameters, stage))
    in_halves = {
        name
        for stage in halves
        for op in graph.ops[stages[stage].ops[0] : stages[stage].ops[1]]
        for name in op.parameters
    }
    return {
        stage: frozenset(name for name, of in by.items() if of == stage and name not in in_halves) for stage in last
    }


def _statistics(placement: Placement, communicator: Communicator) -> Channel | None:
    """Joins the ranks that hold the same stages and have samples. Collective."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in placement.sharing:
        groups.setdefault(placement.places[rank].stages, []).append(rank)
    made = [communicator.channel(ranks) for ranks in groups.values()]
    return next((channel for channel in made if channel is not None), None)


def _pieces(pipeline: Pipeline, graph: ModelGraph) -> list[_Piece]:
    """Stages, and in them the blocks that are computed again, each for itself, and what lies between."""
    pieces = []
    for number, stage in enumerate(pipeline.stages):
        reached, stop = stage.ops
        for block in (graph.blocks[index] for index in sorted(stage.recompute)):
            if reached < block.start:
                pieces.append(_Piece(number, reached, block.start, recompute=False))
            pieces.append(_Piece(number, block.start, block.stop, recompute=True))
            reached = block.stop
        if reached < stop:
            pieces.append(_Piece(number, reached, stop, recompute=False))
    return pieces


def _edges(programs: Iterable[_Program], stage_of: Sequence[int], pipeline: Pipeline, place: Place) -> list[Edge]:
    """What crosses to or from other places. Both ends list the values in the same order."""
    home = pipeline.place_of_stage
    found: dict[tuple[int, int], dict[str, Value]] = {}
    for program in programs:
        for value in (*program.receives, *program.sends):
            maker = stage_of[value.producer]
            for reader in {stage_of[consumer] for consumer in value.consumers}:
                if home[maker] != home[reader] and (maker in place.stages or reader in place.stages):
                    found.setdefault((maker, reader), {})[value.name] = value
    return [
        Edge(maker=maker, reader=reader, values=tuple(sorted(values.values(), key=lambda v: (v.producer, v.name))))
        for (maker, reader), values in sorted(found.items())
    ]


def _require_cuttable(edges: Sequence[Edge], team: Team) -> None:
    for edge in edges:
        for value in edge.values:
            if not value.ordered and len(team.ranks[edge.maker]) + len(team.ranks[edge.reader]) > 2:
                raise PlanError(
                    f"{value.name} crosses from stage {edge.maker} to stage {edge.reader}, and samples cannot be cut out of it: "
                    "give both stages one device each, or cut elsewhere"
                )
