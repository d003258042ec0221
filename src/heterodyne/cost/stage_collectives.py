"""The collectives of a sharded stage in its passes, and their messages.

Conversions of tensors stand before the op that first needs the new layout, and those of the stage's outputs at its end. A few ops
communicate inside: a softmax over a sharded dim reduces maxima and sums, a mixture of experts dispatches tokens and combines them. The
backward has the conjugate collectives in reverse order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Final

from heterodyne.cost.exchange import Round, rounds, to_everyone
from heterodyne.cost.expert_rounds import MixtureRows, direct, hierarchical
from heterodyne.cost.op_shares import StageShares
from heterodyne.graph.ir import Op, Ref
from heterodyne.graph.sharding import REPLICATE, Exchange
from heterodyne.graph.sharding.layout import Collective
from heterodyne.graph.sharding.rule import Rule
from heterodyne.graph.sharding.rules import rule_of
from heterodyne.plan.mesh import lines
from heterodyne.plan.relays import hosts_of

__all__ = ["StageCollective", "conversion", "exchanges_of", "within"]

_WIDE_BYTES: Final = 4
"""Statistics are computed in single precision."""

_A_ROW: Final[Mapping[str, tuple[int, int]]] = {"cross_entropy_loss": (4, 0)}
_OTHERWISE: Final = (2, 1)
"""Numbers a row that the ops of `heterodyne.runtime.split.vocabulary` send, forward and backward, if their classes are cut."""

_MEAN: Final = 1  # as torch counts reductions


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCollective:
    """``forward``, ``backward``: the rounds of each pass; none where nothing is sent. ``inside``: in the middle of an op, so nothing can
    overlap with it.
    """

    forward: tuple[Round, ...]
    backward: tuple[Round, ...]
    inside: bool = True


def exchanges_of(parts: StageShares) -> Iterator[tuple[int, Exchange]]:
    """The conversions of a stage in the order of its forward, axis by axis, with the index of the axis."""
    return ((axis, exchange) for axis, own in enumerate(parts.along) for exchange in own.sharding.exchanges)


def conversion(axis: int, exchange: Exchange, parts: StageShares) -> StageCollective:
    """The collective that converts a tensor's layout along an axis."""
    own = parts.along[axis]
    meeting = StageCollective(
        forward=_converted(exchange, exchange.steps.forward, own),
        backward=_converted(exchange, exchange.steps.backward, own, back=True),
        inside=False,
    )
    return _on_mesh([meeting] * (parts.members // own.members), parts, axis, exchange.tensor)


def _converted(
    exchange: Exchange, kind: Collective | None, parts: StageShares, *, back: bool = False
) -> tuple[Round, ...]:
    """The gradient is converted from the new slices back to the old ones."""
    if kind is None:
        return ()
    ref, have, want = exchange.tensor, exchange.have, exchange.want
    before, after = (
        parts.sharding.sizes(ref, layout, parts.samples) if layout.kind == "shard" else () for layout in (have, want)
    )
    return rounds(
        kind,
        exchange.bytes(parts.samples),
        parts.members,
        source=after if back else before,
        target=before if back else after,
        same_dim=have.dim == want.dim,
    )


def within(op: Op, parts: StageShares) -> StageCollective | None:
    """The collective inside an op; None for most. It is along one mesh axis at most."""
    nodes = lines(parts.nodes or ("",) * parts.members, [own.members for own in parts.along])
    for axis, own in enumerate(parts.along):
        of_groups = [_within(op, own, hosts_of(of_group)) for of_group in nodes[axis]]
        made = [meeting for meeting in of_groups if meeting is not None]
        if made:
            return _on_mesh(made, parts, axis, op.operands[0])
    return None


def _on_mesh(meetings: Sequence[StageCollective], parts: StageShares, axis: int, ref: Ref) -> StageCollective:
    """The collective of one axis, run at once by each group of devices with the same coordinates along the other axes, each on its part of
    the tensor. ``meetings``: of each group.
    """
    if len(parts.along) == 1:
        return meetings[0]
    sizes = [own.members for own in parts.along]
    layouts = [REPLICATE if number == axis else layout for number, layout in enumerate(parts.lies(ref))]
    held = parts.of_tensor(ref, *layouts)
    groups = lines(range(parts.members), sizes)[axis]

    def of_all(*sent: Round) -> Round:
        full = [[0.0] * parts.members for _ in range(parts.members)]
        for group, of_group in zip(groups, sent, strict=True):
            for source, row in zip(group, of_group, strict=False):
                for target, size in zip(group, row, strict=True):
                    full[source][target] = size * held[source]
        return tuple(map(tuple, full))

    def together(sent: Iterator[tuple[Round, ...]]) -> tuple[Round, ...]:
        return tuple(of_all(*each) for each in zip_longest(*sent, fillvalue=()))

    return replace(
        meetings[0],
        forward=together(meeting.forward for meeting in meetings),
        backward=together(meeting.backward for meeting in meetings),
    )


def _within(op: Op, parts: StageShares, hosts: Sequence[int]) -> StageCollective | None:
    graph, strategy = parts.sharding.graph, parts.sharding.strategies[op.name]
    if not strategy.divides:
        return None
    rule = rule_of(op, graph)
    if strategy.name in rule.together:
        return _there_and_back(op, rule, parts, hosts)
    if strategy.name in rule.exchanged:
        return _statistics(op, rule, parts)
    if op.kind == "cross_entropy_loss" and op.argument("reduction") == _MEAN:
        # Of slices of the samples: over what all of them count.
        return StageCollective(forward=(to_everyone(_WIDE_BYTES, parts.members),), backward=())
    return None


def _statistics(op: Op, rule: Rule, parts: StageShares) -> StageCollective:
    """A few numbers per row along the sharded dim."""
    spec = parts.sharding.graph.spec(op.operands[0])
    along = spec.shape[rule.operands[0].index(parts.sharding.strategies[op.name].name)]
    sent = _WIDE_BYTES * spec.numel(parts.samples) / max(1.0, along(parts.samples))
    forward, backward = _A_ROW.get(op.kind, _OTHERWISE)
    return StageCollective(
        forward=(to_everyone(forward * sent, parts.members),),
        backward=rounds("all_reduce", backward * sent, parts.members) if backward else (),
    )


def _there_and_back(op: Op, rule: Rule, parts: StageShares, hosts: Sequence[int]) -> StageCollective:
    """The all-to-alls of a mixture: from the slices of the first letter to those of the second, and back. Over several hosts they are
    hierarchical.
    """
    strategy = parts.sharding.strategies[op.name]
    first, second = (
        next(
            parts.sharding.sizes(ref, layout, parts.samples)
            for ref, layout, dims in zip(op.operands, strategy.operands, rule.operands, strict=True)
            if layout.kind == "shard" and dims[layout.dim] == letter
        )
        for letter in strategy.name
    )
    tokens, indices, weights = (parts.sharding.graph.spec(ref) for ref in op.operands[:3])
    mixture = MixtureRows(
        tokens=first,
        experts=second,
        choices=int(indices.shape[1](1)),
        row_bytes=tokens.bytes(parts.samples) / max(1, sum(first)),
        weight_bytes=weights.bytes(parts.samples) / max(1.0, weights.numel(parts.samples)),
    )
    forward, backward = hierarchical(mixture, hosts) if max(hosts) else direct(mixture)
    return StageCollective(forward=forward, backward=backward if any(op.differentiable) else (), inside=False)
