"""One stage of the graph as something that runs on real tensors, with the model's own parameters.

A stage has its ops, and a copy of what it makes again for itself (masks, positions). Its inputs are those of the model that it
reads and what it receives; its sizes follow the number of samples, so a micro-batch may come in slices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from heterodyne.errors import CaptureError, DataError, PlanError
from heterodyne.frontend.describe import producer_of
from heterodyne.frontend.export import Traced, tensors_of
from heterodyne.frontend.regions import Regions
from heterodyne.frontend.sharded_graph import Members, Numbered, sharded_graph
from heterodyne.frontend.sizes import spec_of
from heterodyne.frontend.stage_graph import stage_graph
from heterodyne.frontend.stage_values import Pieces, values_between
from heterodyne.graph import Size, Value
from heterodyne.graph.sharding import Sharding
from heterodyne.model_output import LOSS

__all__ = ["BoundStage", "StageProgram", "Team", "stage_program"]


class Team(Protocol):
    """The devices on which a stage lies in parts, seen by one of them."""

    @property
    def position(self) -> int: ...

    def members(self, sharding: Sharding, numbered: Numbered) -> Callable[[int], Members]:
        """For each number of samples of a micro-batch what a graph calls."""


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

    def bind(self, module: nn.Module, device: torch.device, team: Team | None = None) -> BoundStage:
        """The stage on a device, with the parameters and buffers of the user's own module, of which some may be slices.

        ``team``: the devices of a stage that lies on them in parts.

        Parameters are looked up by name at each call, so that the module may be given others; those that the stage does not read may
        be on the meta device. Raises CaptureError if one is missing, or of another shape or dtype than the model that was captured.
        """
        traced = self._pieces.traced
        roles = traced.roles
        received = [n for n in self._sources if n not in roles]
        inputs = [n for n in self._sources if n in roles and roles[n].kind == "input"]
        kept = [n for n in self._sources if n in roles and roles[n].kind != "input"]
        named = {node.name: node for node in self._nodes}
        results = [*(named[value.name] for value in self.sends), *([traced.loss] if self.is_last else [])]
        given = (*inputs, *received, *kept)
        members: Callable[[int], Members] | None = None
        if self._sharding is None:
            run = stage_graph(self._pieces, device, nodes=self._nodes, given=given, results=results)
        else:
            assert team is not None, "a stage that lies in parts needs the devices that hold them"
            run, numbered = sharded_graph(
                self._pieces, device, self._sharding, nodes=self._nodes, given=given, results=results
            )
            members = team.members(self._sharding, numbered)
        stored = (lambda _: None) if self._sharding is None else self._sharding.stored
        position = 0 if team is None else team.position
        return BoundStage(
            run=run,
            members=members,
            inputs={roles[n].name: spec_of(n.meta["val"]).shape for n in inputs},
            received=tuple(n.name for n in received),
            kept=tuple(_place(traced, n, module, device, stored(roles[n].name), position) for n in kept),
            results=(*(value.name for value in self.sends), *([LOSS] if self.is_last else [])),
            training=module.training,
        )


class BoundStage:
    """Runs a stage. ``training`` turns dropout on, and lets BatchNorm take the statistics of the batch and keep them."""

    def __init__(
        self,
        *,
        run: fx.GraphModule,
        inputs: Mapping[str, tuple[Size, ...]],
        received: tuple[str, ...],
        kept: tuple[tuple[dict[str, Any], str], ...],
        results: tuple[str, ...],
        training: bool,
        members: Callable[[int], Members] | None = None,
    ) -> None:
        self.training = training
        self._members = members
        self._run = run
        self._inputs = inputs
        self._received = received
        self._kept = kept
        self._results = results

    def __call__(self, inputs: Mapping[str, Tensor], received: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        """Run it forward on ``samples`` samples.

        Args:
            inputs: the model's inputs, those that the stage reads at least, on its device.
            received: what the stage receives, by name. What differentiates through it must require gradients.

        Returns what it sends, by name, and on the last stage the loss as ``loss``. Neither inputs nor what is received is changed.
        Raises DataError for an input of another shape than that of the capture.
        """
        for name, shape in self._inputs.items():
            expected = [int(size(samples)) for size in shape]
            if list(inputs[name].shape) != expected:
                raise DataError(
                    f"the input {name!r} is {list(inputs[name].shape)} for {samples} samples, and the stages were made for {expected}. "
                    "Pad all batches to the shape of the example that the model was captured with"
                )
        with Regions() as regions:
            results = self._run.forward(
                samples,
                self.training,
                regions,
                *([] if self._members is None else [self._members(samples)]),
                *[inputs[name] for name in self._inputs],
                *[received[name] for name in self._received],
                *[owner[name] for owner, name in self._kept],
            )
        return dict(zip(self._results, results, strict=True))


def stage_program(
    pieces: Pieces, start: int, stop: int, starts: Sequence[int], sharding: Sharding | None = None
) -> StageProgram:
    """The stage with the ops ``[start, stop)`` of a graph that is cut at ``starts``; ``sharding``: as it lies on its devices.

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
    )


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


def _place(
    traced: Traced,
    node: fx.Node,
    module: nn.Module,
    device: torch.device,
    sliced: tuple[int, tuple[int, ...]] | None,
    position: int,
) -> tuple[dict[str, Any], str]:
    """Where the module keeps a parameter or buffer; a constant is kept here, on the device.

    ``sliced``: the dim in which it is cut, and the sizes of the slices, of which the module has the ``position``-th.
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
    if sliced is not None:
        shape[sliced[0]] = sliced[1][position]
    if found.dtype is not known.dtype or list(found.shape) != shape:
        raise CaptureError(
            f"the {role.kind} {role.name!r} is {found.dtype} {list(found.shape)}, and was {known.dtype} {shape} when the "
            "model was captured; capture it as it is now"
        )
    return kept, name
