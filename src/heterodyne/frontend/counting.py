"""The denominator of the loss for any batch, from the part of the graph that leads to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from heterodyne.errors import CaptureError, DataError
from heterodyne.frontend.arguments import leading_to
from heterodyne.frontend.example import Batch, Example
from heterodyne.frontend.export import Traced
from heterodyne.frontend.loss import Count

__all__ = ["LossCounter"]


class LossCounter:
    """Counts what the mean of the loss divides by; the samples, if it is the samples or if the loss is a sum."""

    def __init__(self, traced: Traced, example: Example, count: Count | None, buffers: Mapping[str, Tensor]) -> None:
        self._traced = traced
        self._example = example
        self._count = count
        self._buffers = dict(buffers)
        self._nodes = leading_to([n for n in (count.node, count.weight) if n is not None]) if count else []
        self._graphs: dict[torch.device, fx.GraphModule] = {}

    def __call__(self, batch: Batch, buffers: Mapping[str, Tensor] | None = None) -> float:
        """The value for a batch. ``buffers`` are those of a model that was on the meta device when it was captured."""
        if self._count is None:
            return float(self._example.size_of(batch))
        inputs = dict(zip(self._example.names, self._example.values(batch), strict=True))
        device = next(iter(inputs.values())).device
        if device not in self._graphs:
            self._graphs[device] = self._graph_on(device)
        known = {**self._traced.constants, **self._buffers, **(buffers or {})}
        values = [self._value(node, inputs, known, device) for node in self._nodes if node.op == "placeholder"]
        with torch.no_grad():
            count = float(self._graphs[device](*values))
        if 0 < count < self._count.least:
            raise DataError(
                f"a part of the batch counts {count:g}, and the loss guards its division so that it divides by another number below "
                f"{self._count.least:g}: the parts would not add up to the whole. Let the weights of a sample add up to more, or leave the "
                "guard out (a part that counts nothing is left out anyway)"
            )
        return count

    def _value(
        self, node: fx.Node, inputs: Mapping[str, Tensor], known: Mapping[str, Tensor], device: torch.device
    ) -> Tensor:
        role = self._traced.roles[node]
        if role.kind == "input":
            return inputs[role.name]
        value = known.get(role.name)
        if value is None or value.device.type == "meta":
            raise CaptureError(
                f"the loss divides by something that is computed from {role.name!r}, which has no values yet: the model was captured on "
                "the meta device. Pass the buffers of the materialised model."
            )
        return value.detach().to(device)

    def _graph_on(self, device: torch.device) -> fx.GraphModule:
        assert self._count is not None
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            on_device(copies[node], device)
        graph.output(_total(graph, self._count, copies))
        return fx.GraphModule(self._traced.root, graph)


def on_device(node: fx.Node, device: torch.device) -> None:
    """Let an op that names a device make its tensors on another."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    node.args = tuple(moved(value) for value in node.args)
    node.kwargs = {name: moved(value) for name, value in node.kwargs.items()}


def _total(graph: fx.Graph, count: Count, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    entries = copies[count.node]
    if count.ignore is None:
        return graph.call_function(torch.sum, (entries,))
    kept = graph.call_function(torch.ne, (entries, count.ignore))
    if count.weight is None:
        return graph.call_function(torch.sum, (kept,))
    labels = graph.call_function(torch.where, (kept, entries, 0))
    weights = graph.call_function(torch.take, (copies[count.weight], labels))
    return graph.call_function(torch.sum, (graph.call_function(torch.mul, (weights, kept)),))
