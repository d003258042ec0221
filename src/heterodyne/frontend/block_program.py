"""One block of the graph as a module that runs by itself, so that it can be timed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from heterodyne.frontend.arguments import argument, mutates, operator_name
from heterodyne.frontend.describe import differentiable, producer_of
from heterodyne.frontend.export import Traced
from heterodyne.frontend.flat_graph import Region, region_of, tensors_of
from heterodyne.frontend.node_copies import on_device
from heterodyne.frontend.numbered_rows import numbered_rows
from heterodyne.frontend.python_calls import to_python
from heterodyne.frontend.regions import Regions, Switches
from heterodyne.frontend.replay import Observed
from heterodyne.frontend.sizes import size_of, spec_of
from heterodyne.graph import Block, Size, TensorSpec
from heterodyne.graph.op_kinds import JOINS, LABELLED_LOSSES, SAME_VALUES, SLICES

__all__ = ["BlockInput", "BlockOutput", "BlockProgram", "extract"]


@dataclass(frozen=True, kw_only=True)
class BlockInput:
    """What flows into a block: a tensor (``spec``), or a number that follows the batch (``size``).

    ``name`` is that of the op or of the model's input it comes from; ``bounds``: what integers stay below.
    """

    name: str
    spec: TensorSpec | None = None
    size: Size | None = None
    differentiable: bool = False
    bounds: tuple[Size, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BlockOutput:
    """A tensor that a later block, or the loss, reads."""

    name: str
    spec: TensorSpec
    differentiable: bool


@dataclass(frozen=True, kw_only=True)
class BlockProgram:
    """A block that can be run. Its module takes `inputs` in order and returns a tuple of `outputs` in order.

    ``attributes`` tells under which attribute of the module each parameter, buffer and constant is kept.
    """

    block: Block
    inputs: tuple[BlockInput, ...]
    outputs: tuple[BlockOutput, ...]
    attributes: Mapping[str, str]
    _traced: Traced = field(repr=False)
    _nodes: tuple[fx.Node, ...] = field(repr=False)
    _sources: tuple[fx.Node, ...] = field(repr=False)
    _results: tuple[fx.Node, ...] = field(repr=False)
    _known: Mapping[str, Tensor] = field(repr=False)

    def instantiate(
        self, batch: int, device: torch.device, *, dtype: torch.dtype | None = None, seed: int = 0
    ) -> tuple[fx.GraphModule, tuple[Tensor | int, ...]]:
        """The block on a device, with random weights, and random inputs that are valid for it.

        Weights keep activations at their size (a variance of 1 / fan-in); indices are below what they index, other integers
        and booleans are 1. On the meta device there are no values. Inputs that carry gradients require them. ``dtype`` replaces float32.
        """
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        make = _Maker(device, dtype, generator)
        root = nn.Module()
        for node in self._sources:
            role = self._traced.roles.get(node)
            if role is not None and role.kind != "input":
                self._attach(root, self.attributes[role.name], role.kind, node, make)
        module = fx.GraphModule(root, self._graph(root, device, dtype))
        return module, tuple(make.input(flowing, batch) for flowing in self.inputs)

    def inputs_of(self, batch: int, device: torch.device) -> tuple[Tensor | int, ...]:
        """Random inputs for the module that `instantiate` makes, of so many samples."""
        make = _Maker(device, None, None if device.type == "meta" else torch.Generator(device).manual_seed(0))
        return tuple(make.input(flowing, batch) for flowing in self.inputs)

    def _attach(self, root: nn.Module, name: str, kind: str, node: fx.Node, make: _Maker) -> None:
        traced = node.meta["val"]
        if kind == "parameter":
            root.register_parameter(
                name, nn.Parameter(make.weight(traced), requires_grad=_trainable(self._traced, node))
            )
            return
        known = self._known.get(self._traced.roles[node].name)
        root.register_buffer(name, make.buffer(traced, known))

    def _graph(self, root: nn.Module, device: torch.device, dtype: torch.dtype | None) -> fx.Graph:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self._sources:
            role = self._traced.roles.get(node)
            if node.op == "get_attr":
                name = str(node.target).replace(".", "__")
                root.add_module(name, self._traced.root.get_submodule(str(node.target)))
                copies[node] = graph.get_attr(name)
            elif role is not None and role.kind != "input":
                copies[node] = graph.get_attr(self.attributes[role.name])
            else:
                copies[node] = graph.placeholder(node.name)
        for node in _changed_leaves(self._nodes, self._sources):
            # PyTorch forbids changing in place what requires a gradient and was not computed.
            copies[node] = graph.call_function(torch.ops.aten.clone.default, (copies[node],))
        switches = Switches(graph, device, graph.call_function(Regions))
        for node in self._nodes:
            switches.to(region_of(node))
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            on_device(copies[node], device)
            if dtype is not None:
                _in_dtype(copies[node], dtype)
            to_python(copies[node])  # as stages call it: a block is timed for what it will cost them
        switches.to(Region())
        graph.output(tuple(copies[node] for node in self._results))
        return graph


def extract(
    traced: Traced, observed: dict[fx.Node, Observed], block: Block, buffers: Mapping[str, Tensor]
) -> BlockProgram:
    """Cut a block out of the graph."""
    ops = set(traced.ops[block.start : block.stop])
    nodes = tuple(n for n in traced.graph.nodes if n in ops or (producer_of(n) is not n and producer_of(n) in ops))
    inside = set(nodes)
    sources = tuple(dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside))
    results = tuple(n for n in nodes if isinstance(n.meta.get("val"), Tensor) and any(u not in inside for u in n.users))
    roles = [role for role in (traced.roles.get(s) for s in sources) if role is not None and role.kind != "input"]
    return BlockProgram(
        block=block,
        inputs=tuple(
            _input(traced, observed, s, inside) for s in sources if s.op != "get_attr" and _flows_in(traced, s)
        ),
        outputs=tuple(
            BlockOutput(name=n.name, spec=spec_of(n.meta["val"]), differentiable=differentiable(traced, observed, n))
            for n in results
        ),
        attributes={role.name: role.name.replace(".", "__") for role in roles},
        _traced=traced,
        _nodes=nodes,
        _sources=sources,
        _results=results,
        _known={**buffers, **traced.constants},
    )


def _flows_in(traced: Traced, node: fx.Node) -> bool:
    role = traced.roles.get(node)
    return role is None or role.kind == "input"


def _input(traced: Traced, observed: dict[fx.Node, Observed], node: fx.Node, inside: set[fx.Node]) -> BlockInput:
    role = traced.roles.get(node)
    name = role.name if role else node.name
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return BlockInput(name=name, size=size_of(value))
    bounds = () if value.is_floating_point() else _index_bounds(node, inside)
    return BlockInput(
        name=name, spec=spec_of(value), differentiable=differentiable(traced, observed, node), bounds=bounds
    )


def _trainable(traced: Traced, node: fx.Node) -> bool:
    return traced.model.get_parameter(traced.roles[node].name).requires_grad


def _changed_leaves(nodes: tuple[fx.Node, ...], sources: tuple[fx.Node, ...]) -> list[fx.Node]:
    """The tensors from outside that the block changes in place, also through views of them."""
    outside = {s for s in sources if tensors_of(s)}
    base: dict[fx.Node, fx.Node] = {s: s for s in outside}
    changed: list[fx.Node] = []
    for node in nodes:
        inputs = [n for n in node.all_input_nodes if n in base]
        if inputs and tensors_of(node):
            base[node] = base[inputs[0]]  # too much if it is no view, which costs a copy and no more
        changed += [base[m] for m in mutates(node) if m in base]
    return list(dict.fromkeys(changed))


def _in_dtype(node: fx.Node, dtype: torch.dtype) -> None:
    node.args = tuple(dtype if value is torch.float32 else value for value in node.args)
    node.kwargs = {name: dtype if value is torch.float32 else value for name, value in node.kwargs.items()}


@dataclass(frozen=True)
class _Maker:
    """Random tensors on a device."""

    device: torch.device
    dtype: torch.dtype | None
    generator: torch.Generator | None

    def weight(self, like: Tensor) -> Tensor:
        shape = tuple(int(size) for size in like.shape)
        if not like.is_floating_point() or len(shape) < 2:
            return torch.ones(shape, dtype=self._type(like.dtype), device=self.device)
        scale = 1 / math.sqrt(max(1, math.prod(shape[1:])))
        return self._normal(shape, like.dtype) * scale

    def buffer(self, like: Tensor, known: Tensor | None) -> Tensor:
        if known is not None and known.device.type != "meta" and type(known) is Tensor:
            value = known.detach().to(self.device, copy=True)
            return value.to(self._type(value.dtype)) if value.is_floating_point() else value
        shape = tuple(int(size) for size in like.shape)
        # Zero is a valid index into anything; ones are valid variances, masks and scales.
        fill = torch.ones if like.is_floating_point() or like.dtype is torch.bool else torch.zeros
        return fill(shape, dtype=self._type(like.dtype), device=self.device)

    def input(self, flowing: BlockInput, batch: int) -> Tensor | int:
        if flowing.spec is None:
            assert flowing.size is not None
            return int(flowing.size(batch))
        shape = tuple(int(size(batch)) for size in flowing.spec.shape)
        dtype: torch.dtype = getattr(torch, flowing.spec.dtype)
        if flowing.differentiable:
            return self._normal(shape, dtype).requires_grad_()
        if dtype.is_floating_point:
            # Between 0 and 1: valid as an image, a probability, a mask and a target.
            return torch.rand(shape, dtype=self._type(dtype), device=self.device, generator=self.generator)
        if flowing.bounds and dtype is not torch.bool:
            high = max(1, int(min(bound(batch) for bound in flowing.bounds)))
            return torch.randint(high, shape, dtype=dtype, device=self.device, generator=self.generator)
        return torch.ones(shape, dtype=dtype, device=self.device)

    def _normal(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, dtype=self._type(dtype), device=self.device, generator=self.generator)

    def _type(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and dtype is torch.float32 else dtype


# Not those of `LIKE`: whose values they pass on depends on the place of the tensor.
_PASSES_ON = SAME_VALUES | SLICES | JOINS | {"getitem", "masked_fill", "pad", "repeat", "roll", "where"}


def _index_bounds(node: fx.Node, within: Collection[fx.Node]) -> tuple[Size, ...]:
    """The sizes that bound a node's values, from its uses ``within`` some ops; none if nothing indexes by it."""
    bounds: list[Size] = []
    seen = {node}
    waiting = [node]
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if user in seen:
                continue
            if user in within:
                bound = _bound(user, value)
                if bound is not None:
                    bounds.append(bound)
            if operator_name(user) in _PASSES_ON or "getitem" in operator_name(user):
                seen.add(user)
                waiting.append(user)
    return tuple(bounds)


def _bound(user: fx.Node, value: fx.Node) -> Size | None:
    name = operator_name(user)
    for numbered in numbered_rows(user):
        if numbered.index is value and numbered.source is not value and numbered.dim is not None:
            return _size(numbered.source, numbered.dim)
    if name in LABELLED_LOSSES and argument(user, "target") is value:
        logits = argument(user, "self")
        return _size(logits, min(1, logits.meta["val"].dim() - 1))
    if name == "experts" and argument(user, "indices") is value:
        return _size(argument(user, "gate_up"), 0)
    if name == "one_hot" and argument(user, "num_classes") > 0:
        return Size.of(argument(user, "num_classes"))
    return None


def _size(node: fx.Node, dim: int) -> Size:
    return size_of(node.meta["val"].shape[dim])
