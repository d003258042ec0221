"""Expert parallelism over unlike devices: tokens are dispatched to their experts and the results combined, with the result of one device.

`heterodyne.experts` has the mixture on one device. Of E experts, member j holds the ``sizes[j]`` that follow those of the members before
it: any number, also none. There are two ways:

* `experts_between`: tokens are sharded. Only the rows of the choices are sent, in an all-to-all of unequal sizes.
* `experts_here`: tokens are replicated. Nothing is sent: each member runs its own experts, and the results are partial sums.

Either way an expert sees its tokens in the order in which one device would give them to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heterodyne.experts import Route, Run, by_expert, permute, unpermute
from heterodyne.runtime.split.conversions import Redistribution
from heterodyne.runtime.split.group import Group, Later

__all__ = ["ExpertDispatch", "experts_between", "experts_here"]


class ExpertDispatch:
    """The mixture for sharded tokens: dispatch (when it is made), `compute` and `combine`; other work can overlap between the calls. Each
    is collective, forward and backward.

    Args:
        group: the members, each with its own tokens: N may differ, and be 0.
        tokens: [N, H] of this member.
        indices, weights: [N, k]: the experts that each token has chosen, all different, and how much each counts.
        sizes: how many experts each member holds.
        run: computes those of this member.
    """

    def __init__(
        self, group: Group, tokens: Tensor, indices: Tensor, weights: Tensor, *, sizes: Sequence[int], run: Run
    ) -> None:
        self._run, self._weights = run, weights
        self._route = route = _route_between(group, indices, sizes)
        # What has a gradient here must have one on every member, else some would wait in backward for others that have nothing to do.
        anchor = torch.zeros((), device=tokens.device, requires_grad=True)
        self._rows = permute(tokens, route, anchor)
        self._travel = Redistribution(route.dispatch, route.combine)
        self._begun = self._travel.begin(self._rows)

    def compute(self) -> None:
        """Run the experts on the rows received, and start the all-to-all of the results."""
        arrived = self._travel.end(self._begun)
        made = self._run(arrived, self._route.counts).to(arrived.dtype)
        self._travel = Redistribution(self._route.combine, self._route.dispatch)
        self._begun = self._travel.begin(made, also=arrived)

    def combine(self) -> Tensor:
        """[N, H] of this member."""
        return unpermute(self._travel.end(self._begun), self._weights, self._rows, self._route)


def experts_between(
    group: Group, tokens: Tensor, indices: Tensor, weights: Tensor, *, sizes: Sequence[int], run: Run
) -> Tensor:
    """Dispatch, compute and combine, one after the other: [N, H]."""
    dispatched = ExpertDispatch(group, tokens, indices, weights, sizes=sizes, run=run)
    dispatched.compute()
    return dispatched.combine()


def experts_here(
    group: Group,
    tokens: Tensor,
    indices: Tensor,
    weights: Tensor,
    *,
    sizes: Sequence[int],
    run: Run,
) -> Tensor:
    """What this member's experts add to the mixture, [N, H]: the sum over the members is the whole of it. Nothing is sent.

    ``tokens``, ``indices`` and ``weights`` are the same on each member, and so are their gradients parts that add up: in the
    words of `heterodyne.graph.sharding.layout`, it takes COPY and gives PARTIAL. Else as `experts_between`, which takes and gives
    sharded(0).
    """
    route = _route_here(group, indices, sizes)
    rows = permute(tokens, route)
    return unpermute(run(rows, route.counts), weights, rows, route)


# ---- where the rows go ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Between(Route):
    """An all-to-all of rows over a group, with the permutation into expert order.

    Args:
        group: the members.
        sent, received: numbers of rows to, and from, each member.
        order: [M], the permutation of the received rows (member by member) into expert order.
    """

    group: Group
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Tensor

    def dispatch(self, rows: Tensor) -> Later:
        """[S, ...] in the order of `rows` here to [M, ...] in expert order there."""
        shapes = [(count, *rows.shape[1:]) for count in self.received]
        arriving = self.group.begin_all_to_all(rows.split_with_sizes(self.sent), shapes)
        return lambda: torch.cat(arriving())[self.order]

    def combine(self, rows: Tensor) -> Later:
        """[M, ...] back to [S, ...]."""
        by_member = torch.empty_like(rows)
        by_member[self.order] = rows
        shapes = [(count, *rows.shape[1:]) for count in self.sent]
        arriving = self.group.begin_all_to_all(by_member.split_with_sizes(self.received), shapes)
        return lambda: torch.cat(arriving())


def _route_between(group: Group, indices: Tensor, sizes: Sequence[int]) -> _Between:
    """The route of sharded tokens: members exchange their row counts per expert. Collective."""
    rows, counts = by_expert(indices, sum(sizes))
    own = sizes[group.position]
    told = group.all_to_all(counts.split_with_sizes(list(sizes)), [(own,)] * group.size)
    arriving = torch.stack(told)  # [members, experts here]
    expert_of = torch.arange(own, device=indices.device).repeat(group.size).repeat_interleave(arriving.reshape(-1))
    return _Between(
        group=group,
        choices=indices.shape[1],
        rows=rows,
        sent=tuple(int(part.sum()) for part in counts.split_with_sizes(list(sizes))),
        received=tuple(arriving.sum(1).tolist()),
        order=expert_of.argsort(stable=True),
        counts=tuple(arriving.sum(0).tolist()),
    )


def _route_here(group: Group, indices: Tensor, sizes: Sequence[int]) -> Route:
    """The route of replicated tokens: of all choices, those of this member's experts."""
    rows, counts = by_expert(indices, sum(sizes))
    first, stop = group.bounds(sizes)
    before, own = int(counts[:first].sum()), counts[first:stop].tolist()
    return Route(choices=indices.shape[1], rows=rows[before : before + sum(own)], counts=tuple(own))
