"""The nodes of a stage sharded over several devices, written out as the graph of one of them.

It is the graph of the stage with three changes: what an op reads is laid out first as its strategy wants it; sizes that name a dim
which is cut name the slice; and an op that needs something of the other devices is done by them together (`Members`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from heterodyne.errors import PlanError
from heterodyne.frontend.arguments import argument, mutates, operator_name
from heterodyne.frontend.describe import ref_of
from heterodyne.frontend.flat_graph import Region, is_op, region_of, tensors_of
from heterodyne.frontend.node_copies import evaluated
from heterodyne.frontend.sizes import spec_of
from heterodyne.frontend.stage_graph import Writer
from heterodyne.frontend.stage_values import CuttableGraph
from heterodyne.graph import Ref, Size
from heterodyne.graph.module_outputs import MODULE_OUTPUT
from heterodyne.graph.sharding import REPLICATE, Layout, OpStrategy, Sharding, turns
from heterodyne.graph.sharding.numbered import Numbered, Slot, Step
from heterodyne.graph.sharding.rules import rule_of

__all__ = ["sharded_graph"]


# The arguments that are shapes of what an op returns.
_SHAPES: Final[Mapping[str, str]] = {
    "view": "size", "_unsafe_view": "size", "reshape": "shape", "expand": "size", "broadcast_to": "size", "unflatten": "sizes",
}  # fmt: skip
_GROUPED: Final = {"group_norm": 1, "conv1d": 6, "conv2d": 6, "conv3d": 6}  # and where they name the number of groups
_MEAN: Final = 1  # as torch counts reductions
_Layouts: TypeAlias = tuple[Layout, ...]
"""How a tensor is laid out along each axis."""
_MATRICES: Final = 3  # the first operand of a mixture of experts that holds something for each of them


def sharded_graph(
    pieces: CuttableGraph,
    device: torch.device,
    sharding: Sharding,
    *,
    nodes: Sequence[fx.Node],
    given: Sequence[fx.Node],
    results: Sequence[fx.Node],
    keep: Collection[str] = (),
) -> tuple[fx.GraphModule, Numbered]:
    """``nodes`` to run, in order; ``given``: what they are given; ``results``: what is returned, as it is wanted; ``keep``: names
    of ops that keep what they make, as far as they need no other device.

    Returns the graph, and what the numbers in it stand for.
    """
    writer = _ShardedWriter(pieces, device, sharding, keep)
    writer.take(given, nodes)
    root = writer.run(nodes)
    graph = writer.returning(results)
    return fx.GraphModule(root, graph), Numbered(tuple(writer.slots), tuple(writer.steps), tuple(writer.functions))


class _ShardedWriter(Writer):
    def __init__(self, pieces: CuttableGraph, device: torch.device, sharding: Sharding, keep: Collection[str]) -> None:
        super().__init__(pieces, device, keep)
        self._members = self._graph.placeholder("members")
        self._axes = sharding.axes
        self.slots: dict[Slot, int] = {}
        self.steps: dict[Step, int] = {}
        self.functions: dict[Callable[..., Any], int] = {}
        self._converted: dict[tuple[fx.Node, _Layouts], fx.Node] = {}
        self._received: dict[Ref, _Layouts] = {}

    def take(self, given: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> None:
        """As it is taken; what another piece of this stage has made for others too has been laid out for them."""
        super().take(given, nodes)
        refs = {self._ref(node) for node in given if node not in self._pieces.traced.roles}
        self._received = {ref: self._wanted(ref) for ref in self._axes[0].wanted if ref in refs}

    def _meets(self, copy: fx.Node) -> bool:
        return copy.op == "call_method" and copy.args[0] is self._members

    def _op(self, node: fx.Node) -> Any:
        if not is_op(node):
            return super()._op(node)
        strategies = [axis.strategies[node.name] for axis in self._axes]
        if operator_name(node) == MODULE_OUTPUT:
            return self._output_of_module(node, strategies)
        operands = self._operands(node, strategies)
        self._switches.to(region_of(node))
        copy = self._graph.node_copy(node, lambda n: self._copies[n])
        copy.args, copy.kwargs = operands
        for axis, strategy in enumerate(strategies):
            self._local_sizes(node, copy, axis, strategy)
        _name_ones(node, copy)
        written = self._pieces.memory.writers_of(node) or mutates(node)
        finished = self._finish(node, copy)
        for axis, strategy in enumerate(strategies):
            if strategy.divides:
                self._together(node, finished, axis, strategy)
        if written:
            self._forget(node)
        return finished

    def _output_of_module(self, node: fx.Node, strategies: Sequence[OpStrategy]) -> fx.Node:
        """The script sees and changes whole tensors; how they are laid out before and after is as if it did not."""
        source, *others = node.args
        assert isinstance(source, fx.Node)
        whole = (REPLICATE,) * len(self._axes)
        operand = self._in_layout(source, whole)
        self._switches.to(region_of(node))
        made = self._finish(node, self._graph.call_function(node.target, (operand, *others)))  # type: ignore[arg-type]  # an operator
        laid_out = self._converting(ref_of(node), made, whole, tuple(strategy.outputs[0] for strategy in strategies))
        # What follows may write into it, and what a conversion gives is a view of what others read.
        return laid_out if laid_out is made else self._graph.call_function(torch.clone, (laid_out,))

    def _operands(self, node: fx.Node, strategies: Sequence[OpStrategy]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an op as its strategies want them, in the order of its schema, as `Op.operands` has them."""
        layouts = zip(*(strategy.operands for strategy in strategies), strict=True)

        def laid_out(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(laid_out(entry) for entry in value)
            if not isinstance(value, fx.Node):
                return value
            if not tensors_of(value):
                return self._copies[value]
            if not isinstance(value.meta["val"], Tensor):  # all outputs of an op at once
                return [self._in_layout(value, next(layouts), place) for place in range(len(tensors_of(value)))]
            return self._in_layout(value, next(layouts))

        assert isinstance(node.target, OpOverload)
        placed: dict[str, Any] = {}
        for position, declared in enumerate(node.target._schema.arguments):
            if position < len(node.args):
                placed[declared.name] = laid_out(node.args[position])
            elif declared.name in node.kwargs:
                placed[declared.name] = laid_out(node.kwargs[declared.name])
        names = [declared.name for declared in node.target._schema.arguments]
        return (
            tuple(placed[name] for name in names[: len(node.args)]),
            {name: placed[name] for name in node.kwargs},
        )

    def _in_layout(self, node: fx.Node, want: _Layouts, place: int | None = None) -> Any:
        copy = self._copies[node]
        ref = self._ref(node)
        if place is not None:
            ref, copy = Ref(ref.name, place), self._graph.call_function(operator.getitem, (copy, place))
        have = self._received.get(ref) or tuple(axis.layouts[ref] for axis in self._axes)
        if have == want:
            return copy
        key = (copy, want)
        if key not in self._converted:
            self._converted[key] = self._converting(ref, copy, have, want)
        return self._converted[key]

    def _converting(self, ref: Ref, copy: fx.Node, have: _Layouts, want: _Layouts) -> fx.Node:
        self._switches.to(Region())  # what is converted under no_grad would have no gradient elsewhere
        for turn in turns(have, want):
            number = self.steps.setdefault((ref, turn), len(self.steps))
            copy = self._graph.call_method("convert", (self._members, copy, number))
        return copy

    def _wanted(self, ref: Ref) -> _Layouts:
        return tuple(axis.wanted.get(ref, axis.layouts[ref]) for axis in self._axes)

    def _ref(self, node: fx.Node) -> Ref:
        role = self._pieces.traced.roles.get(node)
        return ref_of(node) if role is None else Ref(role.symbol)

    def _forget(self, node: fx.Node) -> None:
        """Forget what was converted of memory that has been written into."""
        changed = {self._pieces.memory.group_of[n] for n in mutates(node)}
        of = {copy: original for original, copy in self._copies.items() if isinstance(copy, fx.Node)}
        for copy, want in list(self._converted):
            original = of.get(copy)
            if original is not None and self._pieces.memory.group_of.get(original) in changed:
                del self._converted[copy, want]

    def _slot(self, axis: int, ref: Ref, layout: Layout) -> int:
        return self.slots.setdefault((axis, ref, layout), len(self.slots))

    def _local_sizes(self, node: fx.Node, copy: fx.Node, axis: int, strategy: OpStrategy) -> None:
        """The shape of what is returned names this device's slice."""
        name = operator_name(node)
        layout = strategy.outputs[0]
        if layout.kind != "shard":
            return
        if name == "repeat_interleave" and "output_size" in copy.kwargs:
            copy.kwargs = {**copy.kwargs, "output_size": None}
        wanted = _SHAPES.get(name)
        if wanted is None:
            return
        first = _first_of_sizes(node) if name == "unflatten" else 0
        dim = layout.dim - first
        names = [declared.name for declared in node.target._schema.arguments]  # type: ignore[union-attr]  # `_operands` has asserted it
        at = names.index(wanted)
        shape = list(copy.args[at] if at < len(copy.args) else copy.kwargs[wanted])  # type: ignore[arg-type]
        with self._graph.inserting_before(copy):
            for place, size in enumerate(shape):
                if place == dim:
                    slot = self._slot(axis, ref_of(node), layout)
                    shape[place] = self._graph.call_method("length", (self._members, slot))
                elif size == -1:  # which cannot be told where the slice is empty
                    shape[place] = self._full_size(node, place - dim + layout.dim)
        if at < len(copy.args):
            copy.args = (*copy.args[:at], shape, *copy.args[at + 1 :])
        else:
            copy.kwargs = {**copy.kwargs, wanted: shape}

    def _full_size(self, node: fx.Node, dim: int) -> Any:
        return evaluated(self._graph, spec_of(node.meta["val"]).shape[dim], self._samples)

    def _together(self, node: fx.Node, copy: fx.Node, axis: int, strategy: OpStrategy) -> None:
        """Ops that need to know where their slice is, or something of the other devices along an axis, become calls of `Members`."""
        name = operator_name(node).rstrip("_")
        cuts = _cuts(node, strategy, self._operand_refs(node))
        slot = next(cuts, None)
        if slot is None:
            return
        number = self._slot(axis, *slot)
        if name == "scaled_dot_product_attention" and strategy.name == "l":
            self._attention(copy, self._slot(axis, ref_of(node), strategy.outputs[0]))
        elif node.name in self._pieces.graph.random:
            layout = strategy.outputs[0]
            assert layout.kind == "shard"
            number = self._slot(axis, ref_of(node), layout)
            if copy.op == "call_method":  # of a slice along another axis already
                self._call_within(copy, number)
            else:
                self._call(copy, "drawn", number, self._function(copy.target))
        elif name == "mean" and strategy.outputs[0].kind == "partial":
            self._call(copy, "part_of_mean", number)
        elif name == "embedding" and strategy.operands[0].kind == "shard" and strategy.operands[0].dim == 0:
            self._call(copy, "embedding", number)
        elif name in ("softmax", "log_softmax") and strategy.name == "Z":
            self._call(copy, name, number)
        elif name == "cross_entropy_loss" and strategy.outputs[0].kind != "shard":
            self._call(copy, "cross_entropy", number)
        elif strategy.outputs[0].kind == "partial" and argument(node, "reduction") == _MEAN:
            self._call(copy, "part_of_mean_loss", number, self._function(copy.target))
        elif name == "experts" and "e" in strategy.name:
            number = self._slot(axis, self._operand_refs(node)[_MATRICES], strategy.operands[_MATRICES])
            self._call(copy, "experts_here" if strategy.name == "e" else "experts_between", number)
        elif name in _GROUPED and strategy.name in self._rule_units(node):
            self._local_groups(node, copy, axis, strategy)

    def _rule_units(self, node: fx.Node) -> Mapping[str, object]:
        graph = self._pieces.graph
        return rule_of(graph.op_by_name[node.name], graph).units

    def _local_groups(self, node: fx.Node, copy: fx.Node, axis: int, strategy: OpStrategy) -> None:
        """The number of groups is that of this device's channels."""
        at = _GROUPED[operator_name(node)]
        with self._graph.inserting_before(copy):
            slot = self._slot(axis, ref_of(node), strategy.outputs[0])
            groups = self._graph.call_method("portion", (self._members, slot, copy.args[at]))
        copy.update_arg(at, groups)

    def _function(self, function: Any) -> int:
        """The text of a graph cannot name a function as an argument, so it goes by number."""
        return self.functions.setdefault(function, len(self.functions))

    def _operand_refs(self, node: fx.Node) -> tuple[Ref, ...]:
        return self._pieces.graph.op_by_name[node.name].operands

    def _call(self, copy: fx.Node, method: str, *before: Any) -> None:
        copy.op = "call_method"
        copy.target, arguments = method, copy.args
        copy.args = (self._members, *before, *arguments)

    def _attention(self, copy: fx.Node, slot: int) -> None:
        if copy.op != "call_method":
            self._call(copy, "attention", slot)
            return
        members, drawn, _, *arguments = copy.args  # of a slice along another axis already
        copy.target, copy.args = "attention", (members, slot, *arguments)
        self._call_within(copy, int(str(drawn)))

    def _call_within(self, copy: fx.Node, slot: int) -> None:
        """Call it such that it draws for a slice of what it would draw for."""
        members, *arguments = copy.args
        copy.target, copy.args = "drawn_within", (members, slot, copy.target, *arguments)

    def _result(self, node: fx.Node) -> Any:
        ref = self._ref(node)
        return self._in_layout(node, self._wanted(ref))


def _cuts(node: fx.Node, strategy: OpStrategy, operands: Sequence[Ref]) -> Iterator[tuple[Ref, Layout]]:
    """The tensors that an op reads or returns cut, those that it reads first."""
    for ref, layout in zip(operands, strategy.operands, strict=True):
        if layout.kind == "shard":
            yield ref, layout
    for place, layout in enumerate(strategy.outputs):
        if layout.kind == "shard":
            yield Ref(ref_of(node).name, place), layout


def _name_ones(node: fx.Node, copy: fx.Node) -> None:
    """The dims that ``squeeze`` takes away are those that are 1 in the whole tensor, not in a slice."""
    if operator_name(node) != "squeeze":
        return
    source, given = node.args[0], argument(node, "dim")
    assert isinstance(source, fx.Node)
    shape = source.meta["val"].shape
    named = range(len(shape)) if given is None else [given] if isinstance(given, int) else given
    gone = sorted({dim % len(shape) for dim in named if spec_of(source.meta["val"]).shape[dim] == Size.of(1)})
    copy.target, copy.args = torch.ops.aten.squeeze.dims, (copy.args[0], gone)


def _first_of_sizes(node: fx.Node) -> int:
    """Return which dim of its operand ``unflatten`` replaces by several."""
    source, dim = argument(node, "self"), argument(node, "dim")
    assert isinstance(source, fx.Node)
    if not isinstance(dim, int):
        raise PlanError(f"{node.name}: {dim!r} is no dim")
    dims: int = source.meta["val"].dim()
    return dim % dims
