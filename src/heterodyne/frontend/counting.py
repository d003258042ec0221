"""What the loss of any batch is divided by, computed from the part of the graph that leads to it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from heterodyne.errors import CaptureError, DataError
from heterodyne.frontend.arguments import leading_to
from heterodyne.frontend.denominator import Denominator, Statistic
from heterodyne.frontend.example import Batch, Example
from heterodyne.frontend.export import Traced
from heterodyne.frontend.loss_reading import LossReading
from heterodyne.frontend.node_copies import evaluated, on_device
from heterodyne.frontend.sizes import size_of
from heterodyne.loss_count import LossCount
from heterodyne.model_output import DIVISOR, SAMPLES
from heterodyne.recent import Recent

__all__ = ["LossCounter"]

_HOST = torch.device("cpu")
_MOST_SIZES = 32  # each keeps a graph
_Place: TypeAlias = tuple[str, int, int]
"""An input, one of its dims, and the size there."""


class LossCounter:
    """Counts what a loss is divided by; see `heterodyne.loss_count.LossCount`.

    Made before `split_loss` rewrites the graph: what it needs of that is copied.

    Args:
        again: captures the model for inputs of other sizes than the example's (longer sequences), of which the graph may hold numbers:
            ``torch.arange(x.shape[1]) < lengths``, ``mask.numel()``; None: it holds none.
    """

    def __init__(
        self,
        traced: Traced,
        example: Example,
        reading: LossReading,
        buffers: Mapping[str, Tensor],
        again: Callable[[Batch], LossCount] | None = None,
    ) -> None:
        self._example = example
        self._again = again
        self._indifferent: frozenset[_Place] = frozenset()
        self._at_sizes: Recent[frozenset[_Place], LossCounter] = Recent(_MOST_SIZES)
        self.split = reading.split
        self._power = reading.reduction.samples
        self._denominators = reading.denominators
        self._buffers = dict(buffers)
        self._constants = dict(traced.constants)
        self._statistics: tuple[Statistic, ...] = tuple(
            {s.node: s for d in self._denominators for s in d.statistics}.values()
        )
        self._of_batch = _StatisticsGraph(traced, self._statistics)
        self._values = [_ValueGraph(traced, d, self._statistics) for d in self._denominators]
        tiny = any(
            size in (1, 2) for shape in example.shapes for size in shape[1:]
        )  # a 1 may be such a size, or one less
        self._may_hold_sizes = again is not None and (
            tiny or self._of_batch.may_hold_sizes or any(value.may_hold_sizes for value in self._values)
        )

    @property
    def counts_data(self) -> bool:
        """Whether the samples must be read to know the statistics; else their number is all there is to know."""
        return bool(self._statistics)

    @property
    def together(self) -> bool:
        """Whether the loss compares samples."""
        return False

    @property
    def size(self) -> int:
        """How many statistics there are, with the number of samples."""
        return 1 + sum(_entries(statistic) for statistic in self._statistics)

    def statistics(self, part: Batch, samples: int, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        """What adds up over the parts of a batch: ``[1 + n]`` in float64 on the host, the number of samples first.

        Args:
            part: tensors on any one device, by the names or in the order of the example.
            buffers: of the model, for a loss that divides by class weights in a model that was captured on the meta device.
        """
        head = torch.tensor([float(samples)], dtype=torch.float64)
        if not self._statistics:
            return head
        inputs = dict(zip(self._example.names, self._example.values(part), strict=True))
        return torch.cat([head, self._at(inputs)._counted(inputs, samples, buffers)])

    def _at(self, inputs: Mapping[str, Tensor]) -> LossCounter:
        """What counts in inputs of these sizes. Raises DataError if a denominator is another function of its statistics there."""
        places = self._places(inputs) if self._may_hold_sizes else frozenset[_Place]()
        if {(name, dim) for name, dim, _ in places} <= {(name, dim) for name, dim, _ in self._indifferent}:
            return self
        return self._at_sizes.get(places, lambda: self._captured_at(places, inputs))

    def _captured_at(self, places: frozenset[_Place], inputs: Mapping[str, Tensor]) -> LossCounter:
        assert self._again is not None
        other = self._again(dict(inputs))
        if not isinstance(other, LossCounter) or other._form() != self._form():
            sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
            raise DataError(
                f"for inputs of the sizes {sizes} the loss is divided in another way than for the example: pad the batches to one "
                "length, or divide by a sum over the data, such as (labels != -100).sum()"
            )
        if other._of_batch.text == self._of_batch.text:
            self._indifferent |= places
            return self
        return other

    def _places(self, inputs: Mapping[str, Tensor]) -> frozenset[_Place]:
        """Where sizes differ from those of the example, but for the batch."""
        return frozenset(
            (name, dim, size)
            for name, shape, follows in zip(
                self._example.names, self._example.shapes, self._example.follows, strict=True
            )
            for dim, size in enumerate(inputs[name].shape)
            if (dim or not follows) and (dim >= len(shape) or size != shape[dim])
        )

    def _form(self) -> tuple[object, ...]:
        """What of it the sizes of the inputs may not change."""
        return self.split, self._power, self.size, tuple(value.text for value in self._values)

    def _counted(self, inputs: Mapping[str, Tensor], samples: int, buffers: Mapping[str, Tensor] | None) -> Tensor:
        known = {**self._constants, **self._buffers, **(buffers or {})}
        return self._of_batch(inputs, known, samples)

    def statistics_of(self, batch: Batch, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        """The same for all that is in a batch."""
        return self.statistics(batch, self._example.size_of(batch), buffers)

    def weight(self, part: Tensor, whole: Tensor) -> float:
        """By what the loss of a part is multiplied to be its part of the loss of the whole, given the statistics of both.

        It is 0 for a part whose denominator is 0: such a part has no mean.
        """
        if self.split:
            return 1.0
        own, total = self._value(part), self._value(whole)
        return own / total if own and total else 0.0

    def divisors(self, whole: Tensor) -> dict[str, Tensor]:
        """What the graph of a split loss is given beside the batch; nothing for any other."""
        if not self.split:
            return {}
        values = [graph(whole) for graph in self._values]
        return {
            SAMPLES: whole[0].float(),
            **{
                f"{DIVISOR}{number}": value.reshape(d.shape).to(torch.float64 if d.double else torch.float32)
                for number, (d, value) in enumerate(zip(self._denominators, values, strict=True))
            },
        }

    def total(self, whole: Tensor) -> float:
        """What people are told that the loss counts: its one denominator, else the samples."""
        one = not self.split and len(self._denominators) == 1
        return float(self._values[0](whole)) if one else float(whole[0])

    def is_defined(self, whole: Tensor) -> bool:
        """Whether no denominator is 0: else one device would divide by it."""
        return all(bool((value != 0).all()) for value in (graph(whole) for graph in self._values))

    def _value(self, statistics: Tensor) -> float:
        value = float(statistics[0]) ** self._power if self._power else 1.0
        return math.prod((float(graph(statistics)) for graph in self._values), start=value)


class _StatisticsGraph:
    """From inputs to the statistics, in a row. It is written out anew for each device."""

    def __init__(self, traced: Traced, statistics: Sequence[Statistic]) -> None:
        targets = [n for s in statistics for n in (s.node, s.weight) if n is not None]
        self._root = traced.root
        self._graphs: dict[torch.device, fx.GraphModule] = {}
        self._graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in leading_to(targets):
            copies[node] = self._graph.node_copy(node, lambda n: copies[n])
        self._roles = [traced.roles[node] for node in copies if node.op == "placeholder"]
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
        return torch.cat([value.double().flatten().to(_HOST) for value in found])

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


class _ValueGraph:
    """From the statistics of a batch to a denominator, on the host."""

    def __init__(self, traced: Traced, denominator: Denominator, statistics: Sequence[Statistic]) -> None:
        self._ranges: list[tuple[Statistic, slice]] = []
        reached = 1
        for statistic in statistics:
            count = _entries(statistic)
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
                root.register_buffer(name, _known(traced.constants, traced.roles[node].name, _HOST))
                copies[node] = graph.get_attr(name)
            else:
                made = graph.node_copy(node, copied)
                on_device(made, _HOST)
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
    """Whether it has one that may be a size. Those that stand in any graph are not: 0 and 1 (a dim, a shift), the largest (an end)."""
    values = pytree.tree_leaves([(node.args, node.kwargs) for node in graph.nodes])
    return any(type(value) is int and 1 < value < sys.maxsize for value in values)


def _entries(statistic: Statistic) -> int:
    return 1 if statistic.labels else math.prod(map(int, statistic.node.meta["val"].shape))


def _known(known: Mapping[str, Tensor], name: str, device: torch.device) -> Tensor:
    value = known.get(name)
    if value is None or value.device.type == "meta":
        raise CaptureError(
            f"the loss divides by something that is computed from {name!r}, which has no values yet: the model was captured on "
            "the meta device. Pass the buffers of the materialised model."
        )
    return value.detach().to(device)
