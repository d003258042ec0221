"""Losses in which samples see each other (contrastive losses, in-batch negatives, the balance of experts), under data parallelism.

The graph is cut where the samples depend on each other. In front of that is the body, which treats each sample by itself; behind it is the
tail, which needs all of them: similarities, a softmax over the batch, a product of means. Each replica runs the body on its own samples.
What the tail reads is exchanged: rows of samples are gathered, sums and means over samples are added up. Then each replica runs the tail
for the whole batch, and takes the gradients of its own rows (the features, not the samples, travel).

A tail holds no weight matrix that is multiplied with the samples: each replica would have to run that part of the model for the whole
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import fx, nn

from heterodyne.errors import CaptureError
from heterodyne.frontend.annotations import read_annotations
from heterodyne.frontend.arguments import argument, leading_to, mutates, operator_name
from heterodyne.frontend.batch_statistics import is_batch_norm
from heterodyne.frontend.bound_coupled_loss import BoundCoupledLoss, CrossReplica, FeatureExchange, GraphPart
from heterodyne.frontend.coupling import computed_with, couplings, mixed, refuse_sizes
from heterodyne.frontend.describe import random_ops
from heterodyne.frontend.export import Traced
from heterodyne.frontend.faults import line_of
from heterodyne.frontend.flat_graph import is_op, tensors_of
from heterodyne.frontend.loss import LossWalk
from heterodyne.frontend.placed import placed
from heterodyne.frontend.sample_order import samples_in
from heterodyne.frontend.sizes import degree
from heterodyne.frontend.stage_graph import stage_graph
from heterodyne.frontend.stage_values import CuttableGraph
from heterodyne.graph.op_kinds import LABELLED_LOSSES

__all__ = ["CoupledLoss", "coupled_loss", "divide_labelled_means"]


@dataclass(frozen=True, kw_only=True)
class CoupledLoss:
    """A graph cut where the samples depend on each other."""

    exchanged: tuple[CrossReplica, ...]
    tail: frozenset[fx.Node] = field(repr=False)

    def first_op(self, traced: Traced) -> int:
        """Return the place of the first op that computes with what was exchanged."""
        return next(place for place, node in enumerate(traced.ops) if node in self.behind)

    @cached_property
    def behind(self) -> frozenset[fx.Node]:
        """Return what of the tail computes with what was exchanged; the rest is made of inputs alone, as the body makes it."""
        found: set[fx.Node] = set()
        waiting = [entry.node for entry in self.exchanged]
        while waiting:
            for user in waiting.pop().users:
                if user in self.tail and user not in found:
                    found.add(user)
                    waiting.append(user)
        return frozenset(found)

    def bind(
        self,
        pieces: CuttableGraph,
        module: nn.Module,
        device: torch.device,
        exchange: FeatureExchange,
        *,
        whole: bool = True,
    ) -> BoundCoupledLoss:
        """Body and tail on a device, with the weights of the user's own module; not ``whole``: the tail alone."""
        roles = pieces.traced.roles
        made = [m.node for m in self.exchanged if m.node not in roles]
        changes = [n for n in pieces.traced.ops if mutates(n) and n not in self.tail]
        return BoundCoupledLoss(
            exchanged=self.exchanged,
            inputs={m.node: roles[m.node].name for m in self.exchanged if m.node in roles},
            made=made,
            body=_part(pieces, module, device, made, also=changes) if whole else None,
            tail=_part(pieces, module, device, [pieces.traced.loss], met=[m.node for m in self.exchanged]),
            exchange=exchange,
            training=module.training,
        )


def coupled_loss(traced: Traced, cause: CaptureError) -> CoupledLoss:
    """Cut a graph where its samples depend on each other. Raises ``cause``, what else is wrong with such a loss, where it cannot be cut
    there.
    """
    walk = LossWalk(traced)
    from_inputs = _descendants(traced)
    met = {node for node, _ in couplings(traced, ())}
    order = samples_in(traced.graph)
    tail: set[fx.Node] = set()
    sums: dict[fx.Node, Literal["sum", "mean"]] = {}
    for node in leading_to([traced.loss]):
        if node.op != "call_function" or not tensors_of(node):
            continue
        if any(source in tail or source in sums for source in computed_with(node)):
            tail.add(node)
        elif node in from_inputs and (node in met or _reduces(node, from_inputs) or any(map(mixed, tensors_of(node)))):
            kind = _kind_of_sum(walk, node)
            if kind is None:
                tail.add(node)
            else:
                sums[node] = kind
    if not tail:
        raise cause
    exchanged: dict[fx.Node, CrossReplica] = {}
    read = [n for node in traced.graph.nodes if node in tail for n in node.all_input_nodes]
    for node in read:
        if node in tail or node in exchanged or node not in from_inputs:
            continue
        samples = order.get(node)
        if node in sums:
            exchanged[node] = CrossReplica(node=node, kind=sums[node])
        elif samples is not None and samples.dim is not None and samples.groups:
            exchanged[node] = CrossReplica(
                node=node, kind="rows", dim=samples.dim, rows=samples.rows, groups=samples.groups
            )
        elif node.op == "call_function":
            tail.add(node)  # what samples cannot be cut out of is made of all of them again
            read += node.all_input_nodes
        else:
            raise cause
    _refuse(traced, tail, from_inputs, cause)
    in_order = [exchanged[node] for node in traced.graph.nodes if node in exchanged]
    refuse_sizes(traced, list(exchanged), ())  # the tail has the whole batch
    return CoupledLoss(exchanged=tuple(in_order), tail=frozenset(tail))


def divide_labelled_means(traced: Traced) -> Traced:
    """With each mean loss of labels as a sum divided by their count, which both add up over the samples. Changes the graph."""
    graph, loss = traced.graph, traced.loss
    for node in list(graph.nodes):
        if (
            operator_name(node) not in LABELLED_LOSSES
            or argument(node, "reduction") != 1
            or argument(node, "weight") is not None
        ):
            continue
        target = argument(node, "target")
        if not isinstance(target, fx.Node) or target.meta["val"].is_floating_point():
            continue
        names = [declared.name for declared in node.target._schema.arguments]
        place = names.index("reduction")
        if place < len(node.args):
            node.update_arg(place, 2)
        else:
            node.update_kwarg("reduction", 2)
        value = node.meta["val"]
        with graph.inserting_after(node):
            counted = graph.call_function(torch.ops.aten.ne.Scalar, (target, argument(node, "ignore_index")))
        with graph.inserting_after(counted):
            total = graph.call_function(torch.ops.aten.sum.dim_IntList, (counted, []), {"dtype": value.dtype})
        with graph.inserting_after(total):
            mean = graph.call_function(torch.ops.aten.div.Tensor, (node, total))
        with value.fake_mode:
            counted.meta = {**node.meta, "val": torch.ops.aten.ne.Scalar(target.meta["val"], -1)}
        total.meta = mean.meta = dict(node.meta)
        node.replace_all_uses_with(mean, lambda user, mean=mean: user is not mean)
        loss = mean if node is loss else loss
    ops = tuple(node for node in graph.nodes if is_op(node))
    return replace(traced, ops=ops, loss=loss, annotations=read_annotations(ops))


def _kind_of_sum(walk: LossWalk, node: fx.Node) -> Literal["sum", "mean"] | None:
    if not tensors_of(node) or any(degree(tensor) > 0 for tensor in tensors_of(node)):
        return None
    found = walk.sum_of_samples(node)
    return None if found is None else "mean" if found.samples else "sum"


def _reduces(node: fx.Node, from_inputs: set[fx.Node]) -> bool:
    """Return whether it makes of samples something that has none."""
    read = any(n in from_inputs and any(degree(t) > 0 for t in tensors_of(n)) for n in node.all_input_nodes)
    return read and not any(degree(tensor) > 0 for tensor in tensors_of(node))


def _refuse(traced: Traced, tail: set[fx.Node], from_inputs: set[fx.Node], cause: CaptureError) -> None:
    """Raises where the tail holds what every replica would have to do for the whole batch, or differently."""
    random = set(random_ops(traced))
    matrices = _matrices(traced)
    for node in (node for node in traced.graph.nodes if node in tail):  # in one order in each run
        if node.name in random or any(n not in tail for n in mutates(node)) or is_batch_norm(node):
            raise cause
        if any(n in matrices for n in node.all_input_nodes) and any(n in from_inputs for n in node.all_input_nodes):
            place = f"{line}\n" if (line := line_of(node, full=True)) else ""
            raise CaptureError(
                f"{cause}\n{place}here a weight matrix is multiplied with samples that depend on each other, so each device would have to "
                "run the rest of the model for the whole batch. Compare the samples behind the last layer."
            ) from cause


def _matrices(traced: Traced) -> set[fx.Node]:
    """Parameters of two dims or more, and what is computed from them alone."""
    found = {n for n, r in traced.roles.items() if r.kind == "parameter" and n.meta["val"].dim() > 1}
    for node in traced.graph.nodes:
        if node.op == "call_function" and any(n in found for n in node.all_input_nodes):
            own = [n for n in node.all_input_nodes if tensors_of(n)]
            if all(n in found for n in own) and any(t.dim() > 1 for t in tensors_of(node)):
                found.add(node)
    return found


def _descendants(traced: Traced) -> set[fx.Node]:
    """Return what is computed from the samples, by their values."""
    found = {
        node
        for node, role in traced.roles.items()
        if role.kind == "input" and any(degree(tensor) > 0 for tensor in tensors_of(node))
    }
    for node in traced.graph.nodes:
        if tensors_of(node) and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _part(
    pieces: CuttableGraph,
    module: nn.Module,
    device: torch.device,
    results: Sequence[fx.Node],
    *,
    met: Sequence[fx.Node] = (),
    also: Sequence[fx.Node] = (),
) -> GraphPart:
    """Return what leads to ``results`` and to the ops ``also`` from what was met and from placeholders on."""
    nodes: set[fx.Node] = set()
    given: set[fx.Node] = set()
    waiting = [*results, *also]
    while waiting:
        node = waiting.pop()
        if node in nodes or node in given or node in met:
            continue
        if node.op == "placeholder":
            given.add(node)
            continue
        nodes.add(node)
        if tensors_of(node) or not any(tensors_of(n) for n in node.all_input_nodes):
            waiting += node.all_input_nodes
    order = list(pieces.traced.graph.nodes)
    roles = pieces.traced.roles
    inputs = [n for n in order if n in given and roles[n].kind in ("input", "number")]
    kept = [n for n in order if n in given and n not in inputs]
    run = stage_graph(
        pieces,
        device,
        nodes=[n for n in order if n in nodes],
        given=(*met, *inputs, *kept),
        results=list(results),
    )
    return GraphPart(
        run=run,
        inputs=tuple(roles[n].name for n in inputs),
        kept=tuple(placed(pieces.traced, n, module, device) for n in kept),
    )
