"""Builds from a plan what one rank works with: its stages, its point-to-point edges, and the process groups of its gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from heterodyne.cluster.spec import Cluster
from heterodyne.errors import PlanError
from heterodyne.graph.cut import Value
from heterodyne.graph.ir import ModelGraph
from heterodyne.graph.module_outputs import MODULE_OUTPUT
from heterodyne.plan.kept import kept_ops
from heterodyne.plan.mesh import lines
from heterodyne.plan.placement import Placement, RankRole
from heterodyne.plan.plan import Pipeline, Plan
from heterodyne.plan.relays import hosts_of, members_of
from heterodyne.recent import Recent
from heterodyne.runtime.assignment import Assignment
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.comm.p2p import P2P
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.exact.exchange import SampleExchange
from heterodyne.runtime.split.group import Group, Hosts
from heterodyne.runtime.split.team import SplitTeam
from heterodyne.runtime.stages.forward import Forward
from heterodyne.runtime.stages.joint_loss import JointLoss, LossOfParts
from heterodyne.runtime.stages.new_shapes import NewShapes, Shapes
from heterodyne.runtime.stages.segments import Compilable, Runnable, Segment, WholeModel
from heterodyne.runtime.stages.stages import Stages
from heterodyne.runtime.stages.transfers import Edge, Team, Transfers
from heterodyne.runtime.weights.gradients import GradientBuckets

__all__ = [
    "Channels",
    "StageBuilder",
    "StagePrograms",
    "StageRuntime",
]

MOST_SHAPES = 32
"""Of so many shapes of the inputs the stages are kept: lengths up to 2048 in multiples of 64."""


class _Program(Protocol):
    """A piece of the captured model that can be bound to a module."""

    @property
    def receives(self) -> tuple[Value, ...]: ...
    @property
    def sends(self) -> tuple[Value, ...]: ...
    @property
    def random_before(self) -> int: ...
    def bind(
        self,
        module: nn.Module,
        device: torch.device,
        team: SplitTeam | None = None,
        *,
        overlap: bool = False,
        keep: Collection[str] = (),
    ) -> Compilable: ...


class StagePrograms(Protocol):
    """Cuts pieces out of the captured model."""

    def __call__(
        self,
        start: int,
        stop: int,
        starts: Sequence[int],
        batch: Mapping[str, Tensor] | None,
        sharded: tuple[Pipeline, int] | None,
    ) -> _Program:
        """The ops ``[start, stop)`` of the model, which is cut at ``starts``; for inputs of the shapes of ``batch``, None: those that
        it was captured with. ``sharded``: the stage that they are of, if it is sharded over its devices.
        """

    def coupled(
        self, batch: Mapping[str, Tensor] | None, module: nn.Module, device: torch.device, exchange: SampleExchange
    ) -> Runnable:
        """All of the model, with a loss in which the samples of all replicas see each other."""

    def loss_together(
        self, batch: Mapping[str, Tensor] | None, module: nn.Module, device: torch.device, exchange: SampleExchange
    ) -> LossOfParts:
        """The end of such a loss, where stages make what it reads."""


@dataclass(frozen=True, kw_only=True)
class StageRuntime:
    """``transfers``: None where nothing is exchanged between stages."""

    stages: Stages
    transfers: Transfers | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A segment to be: ops ``[start, stop)`` of a stage; ``keep``: names of those that keep what they make though it is computed again."""

    stage: int
    start: int
    stop: int
    recompute: bool = False
    keep: tuple[str, ...] = ()
    hosted: bool = False


class Channels:
    """The process groups and point-to-point lanes of a rank's stages, each made when it is first asked for. Asking is collective."""

    def __init__(self, communicator: Communicator) -> None:
        self.rank = communicator.rank
        self._communicator = communicator
        self._groups: dict[tuple[str, tuple[int, ...]], ProcessGroup | None] = {}

    def process_group(self, purpose: str, ranks: Sequence[int]) -> ProcessGroup | None:
        """The one of these ranks for that purpose; None where this rank is not one of them."""
        key = (purpose, tuple(ranks))
        if key not in self._groups:
            self._groups[key] = self._communicator.process_group(ranks)
        return self._groups[key]

    @cached_property
    def p2p(self) -> P2P:
        return self._communicator.p2p()


class StageBuilder:
    """Makes the stages of one rank, once for each shape of the inputs (sequences may be longer in one batch than in another), of which
    the latest are kept. ``say`` takes a line for people about many of them. ``home`` gives the gradients of the rank, once there are parts.

    Making one is collective. It leaves the module as it is, and so does `cut_out`: what they refuse has changed nothing. Raises PlanError
    for a plan with stages or recompute where no ``programs`` are given.
    """

    def __init__(
        self,
        module: nn.Module,
        assignment: Assignment,
        channels: Channels,
        *,
        programs: StagePrograms | None,
        home: Callable[[], GradientBuckets],
        seed: int,
        first_sample: int = 0,
        compiled: Callable[..., object] | None = None,
        compile_stages: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        graph, plan, placement = assignment.lowered.graph, assignment.lowered.plan, assignment.lowered.placement
        self._module = module
        self._compiled = compiled
        self._compile_stages = compile_stages
        self._device = assignment.communicator.device
        self._cluster = assignment.lowered.cluster
        self._role = assignment.role
        self._precisions = [role.precision for role in placement.places]
        self._programs = programs
        self._home = home
        self._forward = Forward(
            module,
            graph,
            device=self._device,
            precision=self._role.precision,
            seed=seed,
            first_sample=first_sample,
            statistics=_statistics(placement, channels) if graph.batch_statistics else None,
        )
        self._p2p = channels.p2p if any(len(p.places) > 1 for p in plan.pipelines) else None
        self._divided = graph.loss.reduction == "terms"
        self._coupled = graph.loss.reduction == "coupled"
        self._shows = any(op.kind == MODULE_OUTPUT for op in graph.ops)
        self._exchange = _exchange(placement, channels) if self._coupled else SampleExchange(None, 0)
        self._halves = frozenset(action.stage for action in assignment.actions if action.kind == "W")
        self._pipeline = None if self._role.pipeline is None else plan.pipelines[self._role.pipeline]
        self._pieces = [] if self._pipeline is None else _pieces(self._pipeline, graph)
        self._ends = [placement.places[rank].spans() for rank in _ends(placement)]
        self._joined = self._coupled and (len(self._pieces) > 1 or len(self._role.micro_batches.sizes) > 1)
        self._captured = captured_shapes(graph)
        self._teams = _teams(plan, self._cluster, channels)
        self._made: Recent[Shapes, StageRuntime] = Recent(MOST_SHAPES)
        self._new_shapes = NewShapes(self._captured, MOST_SHAPES, say)
        self._cut_out: dict[int, _Program] | None = None  # of the shapes of the capture, until `parts` binds them
        if self.cut and programs is None:
            raise PlanError(
                "the plan cuts the model into stages, recomputes parts of it, or its loss has terms with denominators of their own, and "
                "the captured model was not given"
            )

    @property
    def cut(self) -> bool:
        """Whether this rank runs pieces of the captured model, and not the module as it is."""
        if self._coupled:
            return True
        in_pieces = len(self._pieces) > 1 or any(piece.recompute or piece.hosted for piece in self._pieces)
        return in_pieces or bool(self._halves) or bool(self._role.sharded) or self._divided

    @property
    def runs_compiled(self) -> bool:
        """Whether compiled code runs: that of the user's module in its place, or that of stages."""
        if self._pipeline is None:
            return True
        if (
            self._forward.intercepts or self._coupled or self._shows
        ):  # compiled code would not notice what is called in their place
            return False
        if not self.cut:
            return self._compiled is not None
        return self._compile_stages and not self._halves and not self._role.sharded

    def parts(self, batch: Mapping[str, Tensor] | None = None) -> StageRuntime:
        """For inputs of these shapes; None: those that the model was captured with. Raises DataError if the model is another then."""
        shapes = self._shapes(batch)
        return self._made.get(shapes, lambda: self._made_for(shapes, batch))

    def has_parts(self, batch: Mapping[str, Tensor] | None = None) -> bool:
        """Whether `parts` has made them before; else the model is captured for these shapes, which may take long."""
        return self._shapes(batch) in self._made

    def _made_for(self, shapes: Shapes, batch: Mapping[str, Tensor] | None) -> StageRuntime:
        if shapes == self._captured:
            return self._make(None)
        started_s = time.perf_counter()
        made = self._make(batch)
        self._new_shapes.captured(shapes, time.perf_counter() - started_s)
        return made

    def _shapes(self, batch: Mapping[str, Tensor] | None) -> Shapes:
        return self._captured if batch is None or not self.cut else shapes_of(batch, self._captured)

    def _make(self, batch: Mapping[str, Tensor] | None) -> StageRuntime:
        if self._pipeline is None:
            return StageRuntime(stages=Stages({}, forward=self._forward, device=self._device), transfers=None)
        if not self.cut:
            run = self._compiled if self.runs_compiled else None
            whole = {0: [Segment(run=WholeModel(self._module, run))]}
            return StageRuntime(stages=Stages(whole, forward=self._forward, device=self._device), transfers=None)
        assert self._programs is not None
        if self._coupled and not self._joined:
            together = self._programs.coupled(batch, self._module, self._device, self._exchange)
            whole = {0: [Segment(run=together)]}
            return StageRuntime(stages=Stages(whole, forward=self._forward, device=self._device), transfers=None)
        found = self._cut_out if batch is None else None
        found, self._cut_out = self._programs_of(batch) if found is None else found, None
        transfers = self._transfers(found.values(), self._pipeline)
        stages = Stages(
            self._segments(found),
            forward=self._forward,
            device=self._device,
            transfers=transfers,
            halves=self._halves,
            home=self._home(),
            in_parts=self._role.sharded,
            joint=self._joint(batch) if self._joined and self._role.last else None,
        )
        return StageRuntime(stages=stages, transfers=transfers)

    def cut_out(self) -> bool:
        """Cut the pieces that this rank runs out of the captured model; return whether it runs any. It waits for no other rank.

        Raises PlanError for a cut that would change the result.
        """
        if self.cut and (self._joined or not self._coupled) and self._pipeline is not None:
            self._cut_out = self._programs_of(None)
        return self.cut

    def _joint(self, batch: Mapping[str, Tensor] | None) -> JointLoss:
        assert self._programs is not None
        loss = self._programs.loss_together(batch, self._module, self._device, self._exchange)
        return JointLoss(self._role.stages[-1], loss, self._ends)

    def _programs_of(self, batch: Mapping[str, Tensor] | None) -> dict[int, _Program]:
        """By the number of its piece, each program that this rank runs."""
        assert self._programs is not None
        assert self._pipeline is not None
        starts = [piece.start for piece in self._pieces]
        found = {
            number: self._programs(piece.start, piece.stop, starts, batch, self._sharded(piece.stage))
            for number, piece in enumerate(self._pieces)
            if piece.stage in self._role.stages
        }
        _require_cuttable(self._edges_of(found.values(), self._pipeline), self._team(self._pipeline))
        return found

    def _sharded(self, stage: int) -> tuple[Pipeline, int] | None:
        assert self._pipeline is not None
        return (self._pipeline, stage) if stage in self._role.sharded else None

    def _segments(self, found: Mapping[int, _Program]) -> dict[int, list[Segment]]:
        segments: dict[int, list[Segment]] = {stage: [] for stage in self._role.stages}
        assert self._pipeline is not None
        for number, program in found.items():
            piece = self._pieces[number]
            stage = piece.stage
            run = program.bind(
                self._module,
                self._device,
                self._teams.get(stage),
                overlap=self._pipeline.stages[stage].overlap,
                keep=piece.keep,
            )
            if (
                self._compile_stages and self.runs_compiled and not piece.keep
            ):  # compiled code would not tell its ops apart
                run.compile()
            segments[stage].append(
                Segment(
                    run=run,
                    receives=program.receives,
                    sends=program.sends,
                    recompute=piece.recompute,
                    keeps=run if piece.keep else None,
                    hosted=piece.hosted,
                    random_before=program.random_before,
                )
            )
        return segments

    def _transfers(self, programs: Iterable[_Program], pipeline: Pipeline) -> Transfers | None:
        if self._p2p is None or len(pipeline.places) == 1:
            return None
        return Transfers(
            rank=self._role.rank,
            team=self._team(pipeline),
            edges=self._edges_of(programs, pipeline),
            p2p=self._p2p,
            precisions=self._precisions,
        )

    def _team(self, pipeline: Pipeline) -> Team:
        return Team(
            ranks=tuple(tuple(map(self._cluster.rank, stage.devices)) for stage in pipeline.stages),
            stages=pipeline.stages,
        )

    def _edges_of(self, programs: Iterable[_Program], pipeline: Pipeline) -> list[Edge]:
        return _edges(programs, [piece.stage for piece in self._pieces], pipeline, self._role)


def captured_shapes(graph: ModelGraph) -> Shapes:
    """Those that the model was captured with."""
    return tuple(
        (entry.name, tuple(int(size(1)) for dim, size in enumerate(entry.spec.shape) if dim != entry.batch_dim))
        for entry in graph.inputs
    )


def shapes_of(batch: Mapping[str, Tensor], captured: Shapes) -> Shapes:
    """Those of a batch. An input has as many dims as it was captured with or one more, its batch, first."""
    return tuple((name, tuple(batch[name].shape[batch[name].dim() - len(shape) :])) for name, shape in captured)


def _statistics(placement: Placement, channels: Channels) -> ProcessGroup | None:
    """Joins the ranks that hold the same stages and have samples. Collective."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in placement.sharing:
        groups.setdefault(placement.places[rank].stages, []).append(rank)
    made = [channels.process_group("statistics", ranks) for ranks in groups.values()]
    return next((process_group for process_group in made if process_group is not None), None)


def _exchange(placement: Placement, channels: Channels) -> SampleExchange:
    """Joins the ranks that end in the loss, in the order of their samples. Collective."""
    order = _ends(placement)
    process_group = channels.process_group("samples", sorted(order))
    return SampleExchange(process_group, order.index(channels.rank) if process_group is not None else 0)


def _ends(placement: Placement) -> list[int]:
    """The ranks with samples that end in the loss, in the order of their first samples."""
    ends = [rank for rank in placement.sharing if placement.places[rank].last]
    return sorted(ends, key=lambda rank: placement.places[rank].spans()[0])


def _teams(plan: Plan, cluster: Cluster, channels: Channels) -> dict[int, SplitTeam]:
    """For each sharded stage the devices with which this rank holds them: those of its row. Collective."""
    made: dict[tuple[tuple[int, ...], bool], Group | None] = {}
    found = {}
    for pipeline in plan.pipelines:
        for number, stage in enumerate(pipeline.stages):
            for row in stage.rows if stage.sharded else ():
                groups = []
                for along in lines(row, stage.of_row.layout.sizes):
                    for devices in along:
                        key = (tuple(map(cluster.rank, devices)), stage.hierarchical)
                        if key not in made:
                            nodes = [cluster.device(device).node for device in devices if stage.hierarchical]
                            made[key] = _group(key[0], channels, hosts_of(nodes))
                        if (group := made[key]) is not None:
                            groups.append(group)
                if groups:
                    found[number] = SplitTeam(groups)
    return found


def _group(ranks: tuple[int, ...], channels: Channels, hosts: tuple[int, ...] = ()) -> Group | None:
    """The group of these ranks. ``hosts``: of each, where all-to-alls shall be hierarchical. Collective."""
    process_group = channels.process_group("shards", sorted(ranks))
    inside = None
    for members in members_of(hosts) if max(hosts, default=0) else ():
        of_host = _group(tuple(ranks[member] for member in members), channels)
        inside = inside or of_host
    if channels.rank not in ranks:
        return None
    places = [sorted(ranks).index(rank) for rank in ranks]
    known = None if inside is None else Hosts(hosts, inside)
    return Group(process_group, ranks.index(channels.rank), len(ranks), places, known)


def _pieces(pipeline: Pipeline, graph: ModelGraph) -> list[_Piece]:
    """Stages, and in them the blocks that are computed again or kept on the host, each for itself, and what lies between."""
    pieces = []
    for number, stage in enumerate(pipeline.stages):
        reached, stop = stage.ops
        for index in sorted((*stage.recompute, *stage.offload_activations)):
            block = graph.blocks[index]
            if reached < block.start:
                pieces.append(_Piece(number, reached, block.start))
            hosted = index in stage.offload_activations
            keep = () if hosted else tuple(op.name for op in kept_ops(graph, block, stage.keep))
            pieces.append(_Piece(number, block.start, block.stop, recompute=not hosted, keep=keep, hosted=hosted))
            reached = block.stop
        if reached < stop:
            pieces.append(_Piece(number, reached, stop))
    return pieces


def _edges(programs: Iterable[_Program], stage_of: Sequence[int], pipeline: Pipeline, role: RankRole) -> list[Edge]:
    """What crosses to or from other places. Both ends list the values in the same order."""
    home = pipeline.place_of_stage
    found: dict[tuple[int, int], dict[str, Value]] = {}
    for program in programs:
        for value in (*program.receives, *program.sends):
            maker = stage_of[value.producer]
            for reader in {stage_of[consumer] for consumer in value.consumers}:
                if home[maker] != home[reader] and (maker in role.stages or reader in role.stages):
                    found.setdefault((maker, reader), {})[value.name] = value
    return [
        Edge(maker=maker, reader=reader, values=tuple(sorted(values.values(), key=lambda v: (v.producer, v.name))))
        for (maker, reader), values in sorted(found.items())
    ]


def _require_cuttable(edges: Sequence[Edge], team: Team) -> None:
    """Raises PlanError for what the rules of plans cannot know: a graph does not tell a count of samples from a constant."""
    for edge in edges:
        for value in edge.values:
            if not value.ordered and len(team.ranks[edge.maker]) + len(team.ranks[edge.reader]) > 2:
                raise PlanError(
                    f"{value.name} ({value.source}) crosses from stage {edge.maker} to stage {edge.reader}, and samples cannot be cut out "
                    "of it: give both stages one device each, or cut elsewhere"
                )
