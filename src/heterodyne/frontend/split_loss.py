"""A loss whose terms have denominators of their own, rewritten so that the losses of the parts of a batch add up.

Each term is divided by its denominator of the whole batch, which the graph is given with the batch; a term that is a mean over the
samples, or does not depend on them, is multiplied by the part's share of the samples. Then

    loss of the batch = sum over its parts of the loss of the part,

and so are the gradients: no weights are needed, and a part in which a term counts nothing still adds its numerator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, fx

from heterodyne.frontend.annotations import read_annotations
from heterodyne.frontend.arguments import mutates
from heterodyne.frontend.export import Role, Traced
from heterodyne.frontend.flat_graph import is_op
from heterodyne.frontend.loss_reading import Division, LossReading
from heterodyne.model_output import DIVISOR, SAMPLES

__all__ = ["split_loss"]

_SUM: Final = 2  # as torch counts reductions
_REDUCTION: Final = "reduction"


def split_loss(traced: Traced, reading: LossReading) -> Traced:
    """The graph with the terms of its loss divided by what it is given. The graph itself is changed.

    It is given the constants ``loss.samples`` and ``loss.divisor.0`` ..., in the order of ``reading.denominators``, for the whole batch.
    """
    writer = _Splitter(traced)
    names = {d.key: f"{DIVISOR}{number}" for number, d in enumerate(reading.denominators)}
    for division in reading.divisions:
        writer.divide(division, names[division.denominator.key])
    writer.share(reading.shares)
    ops = tuple(node for node in traced.graph.nodes if is_op(node))
    return replace(
        traced,
        ops=ops,
        loss=writer.loss,
        constants={**traced.constants, **writer.constants},
        roles={**traced.roles, **writer.roles},
        annotations=read_annotations(ops),
    )


class _Splitter:
    def __init__(self, traced: Traced) -> None:
        self._graph = traced.graph
        self._traced = traced
        self._fake: Any = traced.loss.meta["val"].fake_mode
        self.loss = traced.loss
        self.constants: dict[str, Tensor] = {}
        self.roles: dict[fx.Node, Role] = {}
        self._given: dict[str, fx.Node] = {}

    def divide(self, division: Division, name: str) -> None:
        """Let a quotient be divided by what is given; a mean of labels becomes their sum, divided by it."""
        found = division.denominator
        given = self._constant(name, found.shape, torch.float64 if found.double else torch.float32)
        node = division.node
        if division.argument is not None:
            node.replace_input_with(division.argument, given)
            self._erase(division.argument)
            return
        names = [declared.name for declared in node.target._schema.arguments]  # type: ignore[union-attr]  # an operator of PyTorch
        at = names.index(_REDUCTION)
        if at < len(node.args):
            node.update_arg(at, _SUM)
        else:
            node.update_kwarg(_REDUCTION, _SUM)
        with self._graph.inserting_after(node):
            divided = self._graph.call_function(torch.ops.aten.div.Tensor, (node, given))
        divided.meta = dict(node.meta)
        node.replace_all_uses_with(divided, lambda user: user is not divided)
        self.loss = divided if node is self.loss else self.loss

    def share(self, shares: Iterable[tuple[fx.Node, fx.Node]]) -> None:
        """Multiply operands by the part's share of the samples."""
        order = {node: number for number, node in enumerate(self._graph.nodes)}
        wanted = sorted(dict.fromkeys(shares), key=lambda edge: order[edge[0]])
        if not wanted:
            return
        share = self._part_of_batch(wanted[0][0])
        for node, operand in wanted:
            scaled = self._call(node, torch.ops.aten.mul.Tensor, (operand, share), operand.meta["val"])
            node.replace_input_with(operand, scaled)

    def _part_of_batch(self, before: fx.Node) -> fx.Node:
        """The samples of the part over those of the batch."""
        batch = self._constant(SAMPLES, (), torch.float32)
        (source, *_) = [
            node
            for node, role in self._traced.roles.items()
            if role.kind == "input" and any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape[:1])
        ]
        size = source.meta["val"].shape[0]
        samples = self._call(before, torch.ops.aten.sym_size.int, (source, 0), size)
        inverse = self._call(before, torch.ops.aten.reciprocal.default, (batch,), batch.meta["val"])
        return self._call(before, torch.ops.aten.mul.Tensor, (inverse, samples), batch.meta["val"])

    def _call(self, before: fx.Node, target: Any, arguments: tuple[Any, ...], value: Any) -> fx.Node:
        with self._graph.inserting_before(before):
            made = self._graph.call_function(target, arguments)
        made.meta = {**before.meta, "val": value}
        return made

    def _constant(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        if name not in self._given:
            last = self._graph.find_nodes(op="placeholder")[-1]
            with self._graph.inserting_after(last):
                node = self._graph.placeholder(name.replace(".", "_"))
            with self._fake:
                node.meta["val"] = torch.ones(shape, dtype=dtype)
            self.constants[name] = torch.ones(shape, dtype=dtype)
            self.roles[node] = Role("constant", name)
            self._given[name] = node
        return self._given[name]

    def _erase(self, node: fx.Node) -> None:
        """Erase what nothing reads any more."""
        if node.users or node.op != "call_function" or mutates(node):
            return
        sources = node.all_input_nodes
        self._graph.erase_node(node)
        for source in sources:
            self._erase(source)
