"""How a sharded stage runs on two halves of a micro-batch in turns: what each half gets, and how the results
become those of the whole.

At the borders of a stage the devices share the samples of a micro-batch, and those of a half otherwise than those of the whole. So what is
received is made whole on each device and cut again for the halves, and what is sent likewise the other way round.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from heterodyne.frontend.members import Members
from heterodyne.graph.sharding.dealing import halved
from heterodyne.model_output import LOSS

__all__ = ["Border", "InTurns", "overlapped_graph"]


@dataclass(frozen=True, kw_only=True)
class Border:
    """A tensor that crosses the border of a stage.

    Args:
        dim: in which its samples are, ``rows`` of it for each; None: it is the same for all samples.
        joined, dealt: the steps of `Members` from slices of the samples to all of them, and back.
    """

    name: str
    dim: int | None
    rows: int = 1
    joined: tuple[int, ...] = ()
    dealt: tuple[int, ...] = ()

    def divided(
        self, tensor: Tensor, whole: Members, halves: Sequence[Members], parts: Sequence[range]
    ) -> list[Tensor]:
        """Return what is received, for each half."""
        if self.dim is None:
            return [tensor for _ in parts]
        for step in self.joined:
            tensor = whole.convert(tensor, step)
        found = []
        for part, half in zip(parts, halves, strict=True):
            own = tensor.narrow(self.dim, self.rows * part.start, self.rows * len(part))
            for step in self.dealt:
                own = half.convert(own, step)
            found.append(own)
        return found

    def united(self, of_halves: Sequence[Tensor], whole: Members, halves: Sequence[Members]) -> Tensor:
        """Return what is sent, of both halves."""
        if self.dim is None:
            return of_halves[0]
        found = []
        for tensor, half in zip(of_halves, halves, strict=True):
            own = tensor
            for step in self.joined:
                own = half.convert(own, step)
            found.append(own)
        united = torch.cat(found, self.dim)
        for step in self.dealt:
            united = whole.convert(united, step)
        return united


@dataclass(frozen=True, kw_only=True)
class InTurns:
    """Args:
    run: the graph for both halves.
    reads: the model's inputs that the graph is given, in its order.
    dims: of each input, in which dim its samples are; None: in none.
    receives, sends: what crosses, in the order of the graph.
    weigh: what the loss of each half counts in that of the whole, by their inputs and sizes; None: the stage makes no loss.
    """

    run: fx.GraphModule
    reads: Sequence[str]
    dims: Mapping[str, int | None]
    receives: Sequence[Border] = ()
    sends: Sequence[Border] = ()
    weigh: Callable[[Sequence[Mapping[str, Tensor]], Sequence[int]], list[float]] | None

    def __call__(
        self,
        inputs: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        samples: int,
        members: Callable[[int, range | None], Members],
        *shared: object,
    ) -> dict[str, Tensor]:
        """The results for two samples or more. ``shared``: what both halves are given alike."""
        first = halved(samples)[0]
        parts = (range(first), range(first, samples))
        of_parts = [{name: self._part(name, tensor, part) for name, tensor in inputs.items()} for part in parts]
        whole, halves = members(samples, None), [members(len(part), part) for part in parts]
        arrived = [border.divided(received[border.name], whole, halves, parts) for border in self.receives]
        own: list[object] = []
        for number, (part, half) in enumerate(zip(parts, halves, strict=True)):
            own += [len(part), half, *(of_parts[number][name] for name in self.reads), *(of[number] for of in arrived)]
        results = self.run.forward(*own, *shared)
        made = {
            border.name: border.united([of_half[place] for of_half in results], whole, halves)
            for place, border in enumerate(self.sends)
        }
        if self.weigh is not None:
            weights = self.weigh(of_parts, [len(part) for part in parts])
            # A half in which nothing counts has no mean, and is no part of the loss.
            losses = [weight * of[-1] for weight, of in zip(weights, results, strict=True) if weight]
            made[LOSS] = sum(losses[1:], losses[0]) if losses else results[0][-1]
        return made

    def _part(self, name: str, tensor: Tensor, part: range) -> Tensor:
        dim = self.dims.get(name)
        return tensor if dim is None else tensor.narrow(dim, part.start, len(part))


# The graph of a sharded stage, written out for two halves of a micro-batch in turns.
#
# What one half exchanges is on its way while the other half computes (Merak's sub-pipelined tensor parallelism, section 4.3, here for
# any graph). The graph is divided where tensors are laid out otherwise, or go to experts and come back; the halves take a division each, in
# turn, and each waits for its exchange when it is its turn again:
#
#     first half    compute 0, begin |                          | end, compute 1, begin |                 | end, compute 2
#     second half                    | compute 0, begin         |                       | end, compute 1, begin |         ...
#
# Autograd goes through the nodes of a graph from the last made to the first. So the backward takes turns in the same way: the end of an
# exchange in the forward is where that of the gradients begins, and its beginning is where they are waited for.
_HALVES = 2
_OWN = ("samples", "members")
"""Parameters of a stage's graph that each half has for itself, beside what ``divided`` names."""


_PHASES: Mapping[str, tuple[str, ...]] = {
    "convert": ("begin", "end"),
    "experts_between": ("begin_experts", "run_experts", "end_experts"),
}
"""What `Members` does at once, in the calls between which the other half has its turn."""


@dataclass
class _Division:
    """Nodes to run, after what has been begun before has gone on: by the methods of `Members` that are named."""

    going_on: list[tuple[fx.Node, str]] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)


def overlapped_graph(
    run: fx.GraphModule, *, divided: Sequence[str], exchanged: Callable[[int], bool]
) -> fx.GraphModule:
    """``run`` for two halves: the same parameters, but first ``samples``, ``members`` and those that ``divided`` names, in the order of
    ``run``, for the first half, then for the second one, then all others once. It returns the results of the first half and of the second.

    Args:
        exchanged: whether a conversion, by its number, exchanges anything in the forward or in the backward.
    """
    graph = fx.Graph()
    parameters = [node for node in run.graph.nodes if node.op == "placeholder"]
    own = [node for node in parameters if node.target in _OWN or node.target in divided]
    copies: list[dict[fx.Node, fx.Node]] = [{} for _ in range(_HALVES)]
    for half, copied in enumerate(copies):
        copied.update({node: graph.placeholder(f"{node.target}_of_half_{half}") for node in own})
    for node in parameters:
        if node not in own:
            shared = graph.placeholder(str(node.target))
            for copied in copies:
                copied[node] = shared
    for division in _divided(run.graph, exchanged):
        for copied in copies:
            _write(graph, division, copied, exchanged)
    (returned,) = (node for node in run.graph.nodes if node.op == "output")
    graph.output(tuple(fx.node.map_arg(returned.args[0], copied.__getitem__) for copied in copies))
    return fx.GraphModule(run, graph)


def _divided(graph: fx.Graph, exchanged: Callable[[int], bool]) -> list[_Division]:
    """A division ends behind the exchanges that stand together: those between which nothing is computed."""
    divisions, begun = [_Division()], list[fx.Node]()
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        follows = any(read in begun for read in node.all_input_nodes)
        if begun and node.target is not operator.getitem and (follows or not _phases(node, exchanged)):
            divisions += _going_on(begun, exchanged)
            begun = []
        divisions[-1].nodes.append(node)
        if _phases(node, exchanged):
            begun.append(node)
    return divisions + _going_on(begun, exchanged) if begun else divisions


def _going_on(begun: Sequence[fx.Node], exchanged: Callable[[int], bool]) -> list[_Division]:
    """The divisions that begin with the later calls of what has begun."""
    divisions = []
    for number in range(1, max(len(_phases(node, exchanged)) for node in begun)):
        calls = [(node, phases[number]) for node in begun if number < len(phases := _phases(node, exchanged))]
        divisions.append(_Division(going_on=calls))
    return divisions


def _phases(node: fx.Node, exchanged: Callable[[int], bool]) -> tuple[str, ...]:
    """The calls of an exchange; () for anything else."""
    if node.op != "call_method" or (node.target == "convert" and not exchanged(int(str(node.args[2])))):
        return ()
    return _PHASES.get(str(node.target), ())


def _write(
    graph: fx.Graph, division: _Division, copied: dict[fx.Node, fx.Node], exchanged: Callable[[int], bool]
) -> None:
    members = next(copy for node, copy in copied.items() if node.target == "members")
    graph.call_method("take_turn", (members,))
    for node, method in division.going_on:
        copied[node] = graph.call_method(method, (members, copied[node]))
    for node in division.nodes:
        phases = _phases(node, exchanged)
        copied[node] = graph.node_copy(node, copied.__getitem__)
        if phases:
            copied[node].target = phases[0]
