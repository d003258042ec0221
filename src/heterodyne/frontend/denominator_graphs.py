"""The parts of a graph that lead to what its loss is divided by: from inputs to statistics, from statistics to a denominator."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from heterodyne.errors import CaptureError
from heterodyne.frontend.arguments import leading_to
from heterodyne.frontend.denominator import Denominator, Statistic
from heterodyne.frontend.export import Traced
from heterodyne.frontend.node_copies import evaluated, on_device
from heterodyne.frontend.sizes import size_of
from heterodyne.model_output import NUMBER

__all__ = ["HOST", "StatisticsGraph", "ValueGraph", "entries_of"]


HOST = torch.device("cpu")


class StatisticsGraph:
    """From inputs to the statistics, in a row. It is written out again for each device."""

    def __init__(self, traced: Traced, statistics: Sequence[Statistic]) -> None:
        targets = [n for s in statistics for n in (s.node, s.weight) if n is not None]
        self._root = traced.root
        self._graphs: dict[torch.device, fx.GraphModule] = {}
        self._graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in leading_to(targets):
            copies[node] = self._graph.node_copy(node, lambda n: copies[n])
        self._roles = [traced.roles[node] for node in copies if node.op == "placeholder"]
        for role in self._roles:
            if role.kind == "number":
                _known({}, role.name, HOST)
        self._samples = self._graph.placeholder("samples_of_part")
        self._graph.output(tuple(self._number(s, copies) for s in statistics))
        self.text = _text(self._graph)
        self.may_hold_sizes = _has_numbers(self._graph) or any(role.kind == "constant" for role in self._roles)

    def __call__(self, inputs: Mapping[str, Tensor], known: Mapping[str, Tensor], samples: int) -> Tensor:
        device = next(iter(inputs.values())).device
        if device not in self._graphs:
            graph = fx.Graph()
            graph.output(graph.graph_copy(self._graph, {}))
            for node in graph.nodes:
                on_device(node, device)
            self._graphs[device] = fx.GraphModule(self._root, graph)
        values = [inputs[r.name] if r.kind == "input" else _known(known, r.name, device) for r in self._roles]
        with torch.no_grad():
            # Not by a call of the module, which prints what an error says before it raises it: some labels are only tried.
            found = self._graphs[device].forward(*values, samples)
        return torch.cat([value.double().flatten().to(HOST) for value in found])

    def _number(self, statistic: Statistic, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
        graph, entries = self._graph, copies[statistic.node]
        if statistic.mean:
            return graph.call_function(torch.mul, (entries, self._samples))
        if not statistic.labels:
            return entries
        kept = graph.call_function(torch.ne, (entries, statistic.ignore))
        if statistic.weight is None:
            return graph.call_function(torch.sum, (kept,))
        labels = graph.call_function(torch.where, (kept, entries, 0))
        weights = graph.call_function(torch.take, (copies[statistic.weight], labels))
        return graph.call_function(torch.sum, (graph.call_function(torch.mul, (weights, kept)),))


class ValueGraph:
    """From the statistics of a batch to a denominator, on the host."""

    def __init__(self, traced: Traced, denominator: Denominator, statistics: Sequence[Statistic]) -> None:
        self._ranges: list[tuple[Statistic, slice]] = []
        reached = 1
        for statistic in statistics:
            count = entries_of(statistic)
            if statistic in denominator.statistics:
                self._ranges.append((statistic, slice(reached, reached + count)))
            reached += count
        self._run = None if denominator.value is None else self._graph(traced, denominator.value)
        self.text = "" if self._run is None else _text(self._run.graph)
        self.may_hold_sizes = self._run is not None and _has_numbers(self._run.graph)

    def __call__(self, statistics: Tensor) -> Tensor:
        if self._run is None:
            return statistics[self._ranges[0][1]].reshape(())
        samples = float(statistics[0])
        values = []
        for statistic, where in self._ranges:
            known = statistic.node.meta["val"]
            value = statistics[where].reshape(known.shape)
            values.append((value / samples if statistic.mean and samples else value).to(known.dtype))
        with torch.no_grad():
            found: Tensor = self._run(int(samples), *values)
        return found.double()

    def _graph(self, traced: Traced, value: fx.Node) -> fx.GraphModule:
        graph = fx.Graph()
        samples = graph.placeholder("samples_of_batch")
        copies: dict[fx.Node, Any] = {
            s.node: graph.placeholder(f"statistic_{number}") for number, (s, _) in enumerate(self._ranges)
        }
        root = torch.nn.Module()

        def copied(node: fx.Node) -> Any:
            if node in copies:
                return copies[node]
            size = node.meta.get("val")
            if isinstance(size, int | torch.SymInt):
                copies[node] = evaluated(graph, size_of(size), samples)
            elif node.op == "placeholder":
                name = f"constant_{len(copies)}"
                root.register_buffer(name, _known(traced.constants, traced.roles[node].name, HOST))
                copies[node] = graph.get_attr(name)
            else:
                made = graph.node_copy(node, copied)
                on_device(made, HOST)
                copies[node] = made
            return copies[node]

        graph.output(copied(value))
        return fx.GraphModule(root, graph)


def _text(graph: fx.Graph) -> str:
    """Equal for graphs that compute the same, whatever their nodes are called."""
    places = {node: number for number, node in enumerate(graph.nodes)}

    def written(values: Any) -> Any:
        return fx.node.map_arg(values, lambda node: fx.immutable_collections.immutable_list([places[node]]))

    return "\n".join(
        f"{node.op} {'' if node.op == 'placeholder' else node.target} {written(node.args)} {written(node.kwargs)}"
        for node in graph.nodes
    )


def _has_numbers(graph: fx.Graph) -> bool:
    """Return whether it has one that may be a size. Those that stand in any graph are not: 0 and 1 (a dim, a shift), the largest (an
    end)."""
    values = pytree.tree_leaves([(node.args, node.kwargs) for node in graph.nodes])
    return any(type(value) is int and 1 < value < sys.maxsize for value in values)


def entries_of(statistic: Statistic) -> int:
    return 1 if statistic.labels else math.prod(map(int, statistic.node.meta["val"].shape))


def _known(known: Mapping[str, Tensor], name: str, device: torch.device) -> Tensor:
    value = known.get(name)
    if name.startswith(NUMBER):
        raise CaptureError("what the loss divides by depends on a number that changes during the run")
    if value is None or value.device.type == "meta":
        raise CaptureError(
            f"the loss divides by something that is computed from {name!r}, which has no values yet: the model was captured on "
            "the meta device. Pass the buffers of the materialised model."
        )
    return value.detach().to(device)
