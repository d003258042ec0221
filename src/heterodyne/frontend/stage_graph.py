"""The nodes of a stage, written out as a graph for a device.

The graph takes the number of samples, whether it is in training, and the switches of its regions (`Regions`); then what the stage
is given. It returns what the stage sends, and the loss if it makes it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from heterodyne.frontend.arguments import mutates
from heterodyne.frontend.flat_graph import Region, region_of, tensors_of
from heterodyne.frontend.node_copies import evaluated, on_device
from heterodyne.frontend.python_calls import follow_training, to_python
from heterodyne.frontend.regions import Switches
from heterodyne.frontend.sizes import size_of
from heterodyne.frontend.stage_values import CuttableGraph

__all__ = ["Writer", "stage_graph"]


def stage_graph(
    pieces: CuttableGraph,
    device: torch.device,
    *,
    nodes: Sequence[fx.Node],
    given: Sequence[fx.Node],
    results: Sequence[fx.Node],
    keep: Collection[str] = (),
) -> fx.GraphModule:
    """``nodes`` to run, in order; ``given``: what they are given, in the order of the call; ``results``: what is returned; ``keep``:
    names of ops that keep what they make.
    """
    writer = Writer(pieces, device, keep)
    writer.take(given, nodes)
    root = writer.run(nodes)
    return fx.GraphModule(root, writer.returning(results))


class Writer:
    """Writes the graph of a stage, node by node."""

    def __init__(self, pieces: CuttableGraph, device: torch.device, keep: Collection[str] = ()) -> None:
        self._pieces = pieces
        self._keep = frozenset(keep)
        self._device = device
        self._graph = fx.Graph()
        self._samples = self._graph.placeholder("samples")
        self._training = self._graph.placeholder("training")
        self._regions = self._graph.placeholder("regions")
        self._switches = Switches(self._graph, device, self._regions)
        self._copies: dict[fx.Node, Any] = {}

    def take(self, given: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> None:
        """The parameters of the call. What ``nodes`` write into is copied first, unless the model keeps it."""
        for node in given:
            self._copies[node] = self._graph.placeholder(node.name)
        written = {self._pieces.memory.group_of[n] for node in nodes for n in mutates(node)}
        for node in given:
            role = self._pieces.traced.roles.get(node)
            if (role is None or role.kind == "input") and self._pieces.memory.group_of[node] in written:
                # It belongs to the caller; nor may a leaf that requires gradients be written into.
                self._copies[node] = self._graph.call_function(torch.clone, (self._copies[node],))

    def run(self, nodes: Sequence[fx.Node]) -> nn.Module:
        """The ops, in their regions. Returns the module that holds what the graph refers to by name."""
        root = nn.Module()
        for node in nodes:
            if node.op == "get_attr":
                name = str(node.target).replace(".", "__")
                root.add_module(name, self._pieces.traced.root.get_submodule(str(node.target)))
                self._copies[node] = self._graph.get_attr(name)
            elif tensors_of(node):
                copy = self._copies[node] = self._op(node)
                if node.name in self._keep and not self._meets(copy):
                    self._switches.around_kept(copy)
            else:
                self._copies[node] = self._size(node)
        self._switches.to(Region())
        return root

    def _meets(self, copy: fx.Node) -> bool:
        """Return whether an op does something with other devices, which they do together each time that it is run."""
        del copy
        return False

    def _op(self, node: fx.Node) -> Any:
        self._switches.to(region_of(node))
        return self._finish(node, self._graph.node_copy(node, lambda n: self._copies[n]))

    def _finish(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        """An op as the stage calls it: on its device, in its mode, by its Python function."""
        on_device(copy, self._device)
        follow_training(copy, self._training)
        if self._changes_kept(node):
            return self._only_in_training(copy)
        to_python(copy)
        if copy.target is Tensor.view and not self._pieces.memory.writers_of(node):
            # What was received lies in memory as its dims say, which the tensor of the trace need not have done.
            copy.target = torch.reshape
        return copy

    def _changes_kept(self, node: fx.Node) -> bool:
        """Return whether an op writes into a buffer: BatchNorm counts its batches."""
        roles = self._pieces.traced.roles
        groups = {self._pieces.memory.group_of[n] for n in mutates(node)}
        return bool(groups) and any(
            role.kind != "input" and self._pieces.memory.group_of[n] in groups for n, role in roles.items()
        )

    def _only_in_training(self, copy: fx.Node) -> fx.Node:
        arguments: Any = (self._training, copy.target, *copy.args)
        copy.args = arguments
        copy.target = _if_training
        return copy

    def _size(self, node: fx.Node) -> Any:
        """A number that follows the samples. That of a tensor follows from their number, all others by the model's arithmetic."""
        if not any(tensors_of(n) for n in node.all_input_nodes):
            return self._graph.node_copy(node, lambda n: self._copies[n])
        return evaluated(self._graph, size_of(node.meta["val"]), self._samples)

    def returning(self, results: Sequence[fx.Node]) -> fx.Graph:
        """The graph, complete. What crosses has the dtype of the trace, whatever autocast made of it."""
        self._graph.output(tuple(self._as_traced(node) for node in results))
        return self._graph

    def _result(self, node: fx.Node) -> Any:
        return self._copies[node]

    def _as_traced(self, node: fx.Node) -> Any:
        copy = self._result(node)
        dtype = node.meta["val"].dtype
        if not dtype.is_floating_point or node is self._pieces.traced.loss:
            return copy
        return self._graph.call_function(Tensor.to, (copy, dtype))


def _if_training(training: bool, change: Any, changed: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Change a tensor that the model keeps, in training alone."""
    if training:
        change(changed, *arguments, **options)
    return changed
