"""One stage of the graph as something that runs on real tensors, with the model's own parameters.

A stage has its ops, and a copy of what it makes again for itself (masks, positions). Its inputs are those of the model that it
reads and what it receives; its sizes follow the number of samples, so a micro-batch may come in slices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, fx, nn

from heterodyne.errors import PlanError
from heterodyne.frontend.bound_stage import BoundStage
from heterodyne.frontend.coupled_loss import CoupledLoss
from heterodyne.frontend.describe import producer_of, ref_of
from heterodyne.frontend.export import Role
from heterodyne.frontend.flat_graph import tensors_of
from heterodyne.frontend.in_turns import Border, InTurns, overlapped_graph
from heterodyne.frontend.members import Members
from heterodyne.frontend.placed import placed
from heterodyne.frontend.sharded_graph import sharded_graph
from heterodyne.frontend.sizes import spec_of
from heterodyne.frontend.stage_graph import stage_graph
from heterodyne.frontend.stage_values import CuttableGraph, values_between
from heterodyne.graph import Value
from heterodyne.graph.sharding import Sharding, turns
from heterodyne.graph.sharding.layout import REPLICATE, conversion
from heterodyne.graph.sharding.numbered import Numbered
from heterodyne.loss_count import LossCount
from heterodyne.model_output import DIVISOR, LOSS, SAMPLES

__all__ = ["StageProgram", "Team", "stage_program"]


class Team(Protocol):
    """The devices on which a stage is sharded, seen by one of them."""

    @property
    def positions(self) -> tuple[int, ...]:
        """The position of this device along each axis."""

    def members(self, sharding: Sharding, numbered: Numbered) -> Callable[[int, range | None], Members]:
        """Return what a graph calls, for each number of samples of a micro-batch; for those of its samples, if it runs in halves."""


@dataclass(frozen=True, kw_only=True)
class StageProgram:
    """A stage that can be bound to a model and run.

    Args:
        inputs: names of the model's inputs that it reads.
        receives, sends: what crosses, in the order in which it is made; all stages of one cut agree on it.
        parameters, buffers: canonical names of those that it reads.
        random_before: how many of the graph's random ops stand before the stage.
        is_last: whether it makes the loss.
    """

    inputs: tuple[str, ...]
    receives: tuple[Value, ...]
    sends: tuple[Value, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    random_before: int
    is_last: bool
    _pieces: CuttableGraph = field(repr=False)
    _nodes: tuple[fx.Node, ...] = field(repr=False)
    _sources: tuple[fx.Node, ...] = field(repr=False)
    _sharding: Sharding | None = field(default=None, repr=False)
    _count: LossCount | None = field(default=None, repr=False)
    _coupled: CoupledLoss | None = field(default=None, repr=False)

    def bind(
        self,
        module: nn.Module,
        device: torch.device,
        team: Team | None = None,
        *,
        overlap: bool = False,
        keep: Collection[str] = (),
    ) -> BoundStage:
        """The stage on a device, with the parameters and buffers of the user's own module, of which some may be slices.

        ``team``: the devices of a stage that is divided over them. ``overlap``: it trains with micro-batches as two halves in turns
        (`heterodyne.frontend.in_turns`). ``keep``: names of its ops that keep what they make for a
        second run.

        Parameters are looked up by name at each call, so that the module may be given others; those that the stage does not read may
        be on the meta device. Raises CaptureError if one is missing, or of another shape or dtype than the model that was captured.
        """
        traced = self._pieces.traced
        roles = traced.roles
        received = [n for n in self._sources if n not in roles]
        inputs = [n for n in self._sources if n in roles and _comes_with_batch(roles[n])]
        kept = [n for n in self._sources if n in roles and n not in inputs]
        nodes, named = self._nodes, {node.name: node for node in self._nodes}
        made = {LOSS: traced.loss} if self.is_last else {}
        if self._coupled is not None and self.is_last:
            tail = self._coupled.behind  # it runs once, when all micro-batches are there
            nodes = tuple(node for node in nodes if node not in tail)
            made = {entry.node.name: entry.node for entry in self._coupled.exchanged if entry.node in nodes}
        results = [*(named[value.name] for value in self.sends), *made.values()]
        given = (*inputs, *received, *kept)
        members: Callable[[int, range | None], Members] | None = None
        halves: InTurns | None = None
        if self._sharding is None:
            run = stage_graph(self._pieces, device, nodes=nodes, given=given, results=results, keep=keep)
        else:
            assert team is not None, "a sharded stage needs the devices that hold them"
            run, numbered = sharded_graph(
                self._pieces, device, self._sharding, nodes=nodes, given=given, results=results, keep=keep
            )
            if overlap:
                halves, numbered = self._halves(run, numbered, inputs, received, dict(module.named_buffers()))
            members = team.members(self._sharding, numbered)
        positions = () if team is None else team.positions
        return BoundStage(
            run=run,
            members=members,
            halves=halves,
            inputs={roles[n].name: spec_of(n.meta["val"]).shape for n in inputs},
            received=tuple(n.name for n in received),
            kept=tuple(placed(traced, n, module, device, self._sizes(roles[n].name, positions)) for n in kept),
            results=(*(value.name for value in self.sends), *made),
            training=module.training,
        )

    def _sizes(self, name: str, positions: Sequence[int]) -> dict[int, int]:
        """Return the size, in each dim that is cut, of the slice of a parameter or buffer that the device with these positions has."""
        axes = () if self._sharding is None else self._sharding.axes
        cuts = [(axis.stored(name), position) for axis, position in zip(axes, positions, strict=True)]
        return {cut[0]: cut[1][position] for cut, position in cuts if cut is not None}

    def _halves(
        self,
        run: fx.GraphModule,
        numbered: Numbered,
        inputs: Sequence[fx.Node],
        received: Sequence[fx.Node],
        buffers: Mapping[str, Tensor],
    ) -> tuple[InTurns, Numbered]:
        """And what the numbers stand for, with those of what crosses."""
        flows, count, graph = self._pieces.graph.flows, self._count, self._pieces.graph
        meets = [conversion(t.have, t.want, differentiable=flows(ref)).meets for ref, t in numbered.steps]

        def weigh(parts: Sequence[Mapping[str, Tensor]], sizes: Sequence[int]) -> list[float]:
            assert count is not None
            own = [count.statistics(part, size, buffers) for part, size in zip(parts, sizes, strict=True)]
            whole = torch.stack(own).sum(0)
            return [count.weight(each, whole) for each in own]

        steps = {step: number for number, step in enumerate(numbered.steps)}
        named = {node.name: node for node in (*self._nodes, *received)}
        crossing = {value.name: value for value in (*self.receives, *self.sends)}

        def border(value: Value) -> Border:
            assert self._sharding is not None
            if value.batch_dim is None:
                return Border(name=value.name, dim=None)
            ref = ref_of(named[value.name])
            axes = self._sharding.axes
            own = [
                axis.wanted.get(ref, axis.layouts[ref]) if value in self.sends else axis.layouts[ref] for axis in axes
            ]
            joined, dealt = (
                tuple(steps.setdefault((ref, turn), len(steps)) for turn in turns(*ways))
                for ways in ((own, [REPLICATE] * len(axes)), ([REPLICATE] * len(axes), own))
            )
            return Border(name=value.name, dim=value.batch_dim, rows=value.rows_a_sample, joined=joined, dealt=dealt)

        halves = InTurns(
            reads=[self._pieces.traced.roles[node].name for node in inputs],
            receives=[border(crossing[node.name]) for node in received],
            sends=[border(value) for value in self.sends],
            run=overlapped_graph(run, divided=[n.name for n in (*inputs, *received)], exchanged=meets.__getitem__),
            dims={entry.name: entry.batch_dim for entry in graph.inputs},
            weigh=weigh if self.is_last else None,
        )
        return halves, numbered._replace(steps=tuple(steps))


def stage_program(
    pieces: CuttableGraph,
    start: int,
    stop: int,
    starts: Sequence[int],
    sharding: Sharding | None = None,
    count: LossCount | None = None,
    coupled: CoupledLoss | None = None,
) -> StageProgram:
    """The stage with the ops ``[start, stop)`` of a graph that is cut at ``starts``; ``sharding``: as it is laid out on its devices;
    ``count``: what the loss of some samples is divided by; ``coupled``: how it compares samples: its tail is no part of the stage.

    Raises PlanError if these are not the bounds of one of the stages, or if the cut would change the result.
    """
    traced = pieces.traced
    bounds = [*starts, len(traced.ops)]
    if bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
        raise PlanError(
            f"the stages start at ops {', '.join(map(str, starts))} of {len(traced.ops)}; the first must start at 0, and each must hold "
            "at least one op"
        )
    if (start, stop) not in pairwise(bounds):
        raise PlanError(f"ops {start} to {stop} are no stage of the cut at {', '.join(map(str, starts))}")
    stage = bisect_right(starts, start) - 1
    values = values_between(pieces, starts)
    nodes, sources = _closure(pieces, start, stop)
    roles = {traced.roles[n] for n in sources if n in traced.roles}
    names = {kind: {role.name for role in roles if role.kind == kind} for kind in ("input", "parameter", "buffer")}
    random = set(pieces.graph.random)
    return StageProgram(
        inputs=tuple(i.name for i in pieces.graph.inputs if i.name in names["input"]),
        receives=tuple(value for value in values if stage in value.consumers),
        sends=tuple(value for value in values if value.producer == stage),
        parameters=tuple(p.name for p in pieces.graph.parameters if p.name in names["parameter"]),
        buffers=tuple(b.name for b in pieces.graph.buffers if b.name in names["buffer"]),
        random_before=sum(op.name in random for op in traced.ops[:start]),
        is_last=start <= pieces.position[producer_of(traced.loss)] < stop,
        _pieces=pieces,
        _nodes=nodes,
        _sources=sources,
        _sharding=sharding,
        _count=count,
        _coupled=coupled,
    )


def _comes_with_batch(role: Role) -> bool:
    return role.kind in ("input", "number") or role.name == SAMPLES or role.name.startswith(DIVISOR)


def _closure(pieces: CuttableGraph, start: int, stop: int) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
    """The nodes that a stage runs, and those that it is given: inputs, parameters, what it receives, in the order of the graph.

    It runs its own ops, what they read that is made again, with all that writes into it before, and sizes.
    """
    run = {op for op in pieces.traced.ops[start:stop] if op not in pieces.again}
    given: set[fx.Node] = set()
    waiting = list(run)
    if start <= pieces.position[producer_of(pieces.traced.loss)] < stop:
        waiting.append(pieces.traced.loss)
    while waiting:
        node = waiting.pop()
        if not tensors_of(node) and any(tensors_of(n) for n in node.all_input_nodes):
            continue  # the size of a tensor, which is told from the number of samples
        for source in (*node.all_input_nodes, *_writers_before(pieces, node, stop)):
            if source in run or source in given:
                continue
            producer = producer_of(source)
            if source.op == "placeholder":
                given.add(source)
                written = [w for w in _writers_before(pieces, source, stop) if w not in run]
                run.update(written)
                waiting += written
            elif producer in pieces.position and not _runs(pieces, producer, start, stop):
                given.add(source)
            else:
                run.add(source)
                waiting.append(source)
    run.update(n for n in pieces.traced.graph.nodes if producer_of(n) is not n and producer_of(n) in run)
    order = list(pieces.traced.graph.nodes)
    return tuple(n for n in order if n in run), tuple(n for n in order if n in given)


def _runs(pieces: CuttableGraph, op: fx.Node, start: int, stop: int) -> bool:
    return op in pieces.again or start <= pieces.position[op] < stop


def _writers_before(pieces: CuttableGraph, node: fx.Node, stop: int) -> list[fx.Node]:
    """Return what writes into the memory of a node that is made again, or of an input."""
    if node.op != "placeholder" and node not in pieces.again:
        return []
    return [w for w in pieces.memory.writers_of(node) if w in pieces.again and pieces.position[w] < stop]
