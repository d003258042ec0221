"""One stage of the graph as something that runs on real tensors, with the model's own parameters.

A stage has its ops, and a copy of what it makes again for itself (masks, positions). Its inputs are those of the model that it
reads and what it receives; its sizes follow the number of samples, so a micro-batch may come in slices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from heterodyne.errors import CaptureError, PlanError
from heterodyne.frontend.bound_stage import BoundStage, InTurns
from heterodyne.frontend.describe import producer_of
from heterodyne.frontend.export import Role, Traced, tensors_of
from heterodyne.frontend.overlapped_graph import overlapped_graph
from heterodyne.frontend.sharded_graph import Members, sharded_graph
from heterodyne.frontend.sizes import spec_of
from heterodyne.frontend.stage_graph import stage_graph
from heterodyne.frontend.stage_values import Pieces, values_between
from heterodyne.graph import Value
from heterodyne.graph.sharding import Sharding
from heterodyne.graph.sharding.layout import conversion
from heterodyne.graph.sharding.numbered import Numbered
from heterodyne.loss_count import LossCount
from heterodyne.model_output import DIVISOR, LOSS, SAMPLES

__all__ = ["StageProgram", "Team", "placed", "stage_program"]


class Team(Protocol):
    """The devices on which a stage lies in parts, seen by one of them."""

    @property
    def positions(self) -> tuple[int, ...]:
        """Of this one along each axis."""

    def members(self, sharding: Sharding, numbered: Numbered) -> Callable[[int, range | None], Members]:
        """What a graph calls, for each number of samples of a micro-batch; for those of its samples, if it runs in halves."""


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
    _pieces: Pieces = field(repr=False)
    _nodes: tuple[fx.Node, ...] = field(repr=False)
    _sources: tuple[fx.Node, ...] = field(repr=False)
    _sharding: Sharding | None = field(default=None, repr=False)
    _count: LossCount | None = field(default=None, repr=False)

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

        ``team``: the devices of a stage that lies on them in parts. ``overlap``: it is all of the model, and trains with micro-batches
        as two halves in turns (`heterodyne.frontend.overlapped_graph`). ``keep``: names of its ops that keep what they make for a
        second run.

        Parameters are looked up by name at each call, so that the module may be given others; those that the stage does not read may
        be on the meta device. Raises CaptureError if one is missing, or of another shape or dtype than the model that was captured.
        """
        traced = self._pieces.traced
        roles = traced.roles
        received = [n for n in self._sources if n not in roles]
        inputs = [n for n in self._sources if n in roles and _comes_with_batch(roles[n])]
        kept = [n for n in self._sources if n in roles and n not in inputs]
        named = {node.name: node for node in self._nodes}
        results = [*(named[value.name] for value in self.sends), *([traced.loss] if self.is_last else [])]
        given = (*inputs, *received, *kept)
        members: Callable[[int, range | None], Members] | None = None
        halves: InTurns | None = None
        if self._sharding is None:
            run = stage_graph(self._pieces, device, nodes=self._nodes, given=given, results=results, keep=keep)
        else:
            assert team is not None, "a stage that lies in parts needs the devices that hold them"
            run, numbered = sharded_graph(
                self._pieces, device, self._sharding, nodes=self._nodes, given=given, results=results, keep=keep
            )
            members = team.members(self._sharding, numbered)
            if overlap:
                assert not received, "only a stage that is all of the model runs in halves"
                halves = self._halves(run, numbered, [node.name for node in inputs], dict(module.named_buffers()))
        positions = () if team is None else team.positions
        return BoundStage(
            run=run,
            members=members,
            halves=halves,
            inputs={roles[n].name: spec_of(n.meta["val"]).shape for n in inputs},
            received=tuple(n.name for n in received),
            kept=tuple(placed(traced, n, module, device, self._sizes(roles[n].name, positions)) for n in kept),
            results=(*(value.name for value in self.sends), *([LOSS] if self.is_last else [])),
            training=module.training,
        )

    def _sizes(self, name: str, positions: Sequence[int]) -> dict[int, int]:
        """Of the slice of a parameter or buffer that the device with these positions has: of each dim that is cut."""
        axes = () if self._sharding is None else self._sharding.axes
        cuts = [(axis.stored(name), position) for axis, position in zip(axes, positions, strict=True)]
        return {cut[0]: cut[1][position] for cut, position in cuts if cut is not None}

    def _halves(
        self, run: fx.GraphModule, numbered: Numbered, inputs: Sequence[str], buffers: Mapping[str, Tensor]
    ) -> InTurns:
        flows, count, graph = self._pieces.graph.flows, self._count, self._pieces.graph
        meets = [conversion(t.have, t.want, differentiable=flows(ref)).meets for ref, t in numbered.steps]

        def weigh(parts: Sequence[Mapping[str, Tensor]], sizes: Sequence[int]) -> list[float]:
            assert count is not None
            own = [count.statistics(part, size, buffers) for part, size in zip(parts, sizes, strict=True)]
            whole = torch.stack(own).sum(0)
            return [count.weight(each, whole) for each in own]

        return InTurns(
            run=overlapped_graph(run, divided=inputs, exchanged=meets.__getitem__),
            dims={entry.name: entry.batch_dim for entry in graph.inputs},
            weigh=weigh,
        )


def stage_program(
    pieces: Pieces,
    start: int,
    stop: int,
    starts: Sequence[int],
    sharding: Sharding | None = None,
    count: LossCount | None = None,
) -> StageProgram:
    """The stage with the ops ``[start, stop)`` of a graph that is cut at ``starts``; ``sharding``: as it lies on its devices;
    ``count``: what the loss of some samples is divided by.

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
    )


def _comes_with_batch(role: Role) -> bool:
    return role.kind == "input" or role.name == SAMPLES or role.name.startswith(DIVISOR)


def _closure(pieces: Pieces, start: int, stop: int) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]:
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


def _runs(pieces: Pieces, op: fx.Node, start: int, stop: int) -> bool:
    return op in pieces.again or start <= pieces.position[op] < stop


def _writers_before(pieces: Pieces, node: fx.Node, stop: int) -> list[fx.Node]:
    """What writes into the memory of a node that is made again, or of an input."""
    if node.op != "placeholder" and node not in pieces.again:
        return []
    return [w for w in pieces.memory.writers_of(node) if w in pieces.again and pieces.position[w] < stop]


def _constant(traced: Traced, name: str, module: nn.Module) -> Tensor:
    """A tensor of the trace that is no parameter or buffer: its values, or those of the attribute of the module that it was."""
    value = traced.constants[name]
    if type(value) is not Tensor or value.device.type == "meta":
        path, _, attribute = name.rpartition(".")
        found = getattr(module.get_submodule(path), attribute, None) if path in dict(module.named_modules()) else None
        if not isinstance(found, Tensor):
            raise CaptureError(
                f"the constant {name!r} of the model has no values; keep it as a buffer (register_buffer)"
            )
        value = found
    return value.detach()


def placed(
    traced: Traced,
    node: fx.Node,
    module: nn.Module,
    device: torch.device,
    sliced: Mapping[int, int] = MappingProxyType({}),
) -> tuple[dict[str, Any], str]:
    """Where the module keeps a parameter or buffer; a constant is kept here, on the device.

    ``sliced``: of each dim in which the module has a slice of it, the size of that.
    """
    role = traced.roles[node]
    if role.kind == "constant":
        return {role.name: _constant(traced, role.name, module).to(device)}, role.name
    path, _, name = role.name.rpartition(".")
    owner = dict(module.named_modules(remove_duplicate=False)).get(path)
    kept: dict[str, Any] = {}
    if owner is not None:
        kept = owner._parameters if role.kind == "parameter" else owner._buffers
    found, known = kept.get(name), node.meta["val"]
    if found is None:
        raise CaptureError(f"the model has no {role.kind} {role.name!r}; it is not the one that was captured")
    shape = list(known.shape)
    for dim, size in sliced.items():
        shape[dim] = size
    if found.dtype is not known.dtype or list(found.shape) != shape:
        raise CaptureError(
            f"the {role.kind} {role.name!r} is {found.dtype} {list(found.shape)}, and was {known.dtype} {shape} when the "
            "model was captured; capture it as it is now"
        )
    return kept, name
