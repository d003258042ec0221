"""The graph of a sharded stage, written out for two halves of a micro-batch in turns.

What one half exchanges is on its way while the other half computes (Merak's sub-pipelined tensor parallelism, section 4.3, here for
any graph). The graph is divided where tensors are laid out otherwise, or go to experts and come back; the halves take a division each, in
turn, and each waits for its exchange when it is its turn again:

    first half    compute 0, begin |                          | end, compute 1, begin |                 | end, compute 2
    second half                    | compute 0, begin         |                       | end, compute 1, begin |         ...

Autograd goes through the nodes of a graph from the last made to the first. So the backward takes turns in the same way: the end of an
exchange in the forward is where that of the gradients begins, and its beginning is where they are waited for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

__all__ = ["overlapped_graph"]

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
