"""Expert parallelism over unlike devices: tokens are dispatched to their experts and the results combined, with the result of one device.

`heterodyne.experts` has the mixture on one device. Of E experts, member j holds the ``sizes[j]`` that follow those of the members before
it: any number, also none. There are three ways:

* `ExpertDispatch`: tokens are sharded. Only the rows of the choices are sent, in an all-to-all of unequal sizes.
* `HierarchicalDispatch`: the same, but a token is sent once to each host that has experts which it has chosen, and one row comes back.
* `experts_here`: tokens are replicated. Nothing is sent: each member runs its own experts, and the results are partial sums.

Either way an expert sees its tokens in the order in which one device would give them to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from heterodyne.experts import Route, Run, by_expert, permute, unpermute
from heterodyne.plan.relays import relays
from heterodyne.runtime.split.conversions import Redistribution
from heterodyne.runtime.split.group import Group, Later

__all__ = ["Dispatch", "ExpertDispatch", "HierarchicalDispatch", "dispatch", "experts_between", "experts_here"]


class ExpertDispatch:
    """The mixture for sharded tokens: dispatch (when it is made), `compute` and `combine`; other work can overlap between the calls. Each
    is collective, forward and backward.

    Args:
        group: the members, each with its own tokens: N may differ, and be 0.
        tokens: [N, H] of this member.
        indices, weights: [N, k]: the experts that each token has chosen, all different, and how much each counts.
        sizes: how many experts each member holds.
        run: computes those of this member.
        origins: how many of the tokens come from each of several members, in this order, of which no other member here has any. None:
            all are this member's own. Choices of ``sum(sizes)`` are of experts that are elsewhere, and add nothing.
    """

    def __init__(
        self,
        group: Group,
        tokens: Tensor,
        indices: Tensor,
        weights: Tensor,
        *,
        sizes: Sequence[int],
        run: Run,
        origins: Sequence[int] | None = None,
    ) -> None:
        self._run, self._weights = run, weights
        self._route = route = _route_between(group, indices, sizes, (indices.shape[0],) if origins is None else origins)
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


class HierarchicalDispatch:
    """`ExpertDispatch` for members on several hosts, in two stages: tokens between hosts, their rows inside.

    A token is sent once to each host that has experts which it has chosen, to the relay there (`heterodyne.plan.relays`), with the
    weights of its choices. There an `ExpertDispatch` among the members of the host makes of it what these experts add, and that one
    row comes back; the token adds up those of its hosts. Gradients go the same ways back, those of the weights from the relays.
    """

    def __init__(
        self, group: Group, tokens: Tensor, indices: Tensor, weights: Tensor, *, sizes: Sequence[int], run: Run
    ) -> None:
        assert group.hosts is not None
        self._group, self._hosts, self._sizes, self._run = group, group.hosts, sizes, run
        self._tokens, self._dtypes = tokens.shape[0], (tokens.dtype, weights.dtype)
        self._route = route = _route_to_hosts(group, self._hosts.of_members, indices, sizes)
        # As in `ExpertDispatch`: a gradient on every member.
        anchor = torch.zeros((), device=tokens.device, requires_grad=True)
        # In one message; a wider dtype keeps the values of a narrower one.
        rows = torch.cat([permute(each, route, anchor) for each in (tokens, weights)], 1)
        chosen = indices.to(torch.int32)[route.rows // route.choices]
        shapes = [(count, indices.shape[1]) for count in route.received]
        self._chosen = group.begin_all_to_all(chosen.split_with_sizes(route.sent), shapes)
        self._travel = Redistribution(route.dispatch, route.combine)
        self._begun = self._travel.begin(rows)

    def compute(self) -> None:
        """Hand the tokens received on inside of the host, run the experts, and start the all-to-all of what they add there."""
        arrived = self._travel.end(self._begun)
        chosen = torch.cat(self._chosen()).long()
        columns = (arrived.shape[1] - chosen.shape[1], chosen.shape[1])
        tokens, weights = (
            part.to(dtype) for part, dtype in zip(arrived.split_with_sizes(columns, 1), self._dtypes, strict=True)
        )
        hosts, own = self._hosts, self._hosts.of_members[self._group.position]
        inside = ExpertDispatch(
            hosts.inside,
            tokens,
            _numbers_inside(hosts.of_members, own, self._sizes).to(chosen.device)[chosen],
            weights,
            sizes=[size for host, size in zip(hosts.of_members, self._sizes, strict=True) if host == own],
            run=self._run,
            origins=self._route.received,
        )
        inside.compute()
        self._travel = Redistribution(self._route.combine, self._route.dispatch)
        self._begun = self._travel.begin(inside.combine(), also=arrived)

    def combine(self) -> Tensor:
        """[N, H] of this member."""
        return self._route.at_choices(self._travel.end(self._begun), self._tokens).sum(1)


Dispatch: TypeAlias = ExpertDispatch | HierarchicalDispatch


def dispatch(
    group: Group, tokens: Tensor, indices: Tensor, weights: Tensor, *, sizes: Sequence[int], run: Run
) -> Dispatch:
    """Start the mixture for sharded tokens, hierarchically where the group has `Hosts`. Collective."""
    way = ExpertDispatch if group.hosts is None else HierarchicalDispatch
    return way(group, tokens, indices, weights, sizes=sizes, run=run)


def experts_between(
    group: Group, tokens: Tensor, indices: Tensor, weights: Tensor, *, sizes: Sequence[int], run: Run
) -> Tensor:
    """Dispatch, compute and combine, one after the other: [N, H]."""
    dispatched = dispatch(group, tokens, indices, weights, sizes=sizes, run=run)
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
        order: [M], the permutation of the received rows (member by member) into expert order; or all of them, as they come.
    """

    group: Group
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Tensor | slice

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


def _route_between(group: Group, indices: Tensor, sizes: Sequence[int], origins: Sequence[int]) -> _Between:
    """The route of sharded tokens: members exchange their row counts per origin and expert. Collective."""
    experts, own, choices = sum(sizes), sizes[group.position], indices.shape[1]
    rows, counted = by_expert(indices, experts)
    origin = torch.arange(len(origins)).repeat_interleave(torch.tensor(origins)).to(indices.device)
    places = (origin.unsqueeze(1) * experts + indices)[indices < experts]
    counts = torch.bincount(places, minlength=len(origins) * experts).view(len(origins), experts)
    told = group.all_to_all(counts.split_with_sizes(list(sizes), 1), [(len(origins), own)] * group.size)
    # From each member rows come in order of expert, for one expert in order of origin; here the order of members is the last one.
    arriving = torch.stack(told).transpose(1, 2)  # [members, experts here, origins]
    keys = torch.arange(own * len(origins), device=indices.device).repeat(group.size)
    sent = [int(part.sum()) for part in counted[:experts].split_with_sizes(list(sizes))]
    return _Between(
        group=group,
        choices=choices,
        rows=rows[: sum(sent)],
        sent=tuple(sent),
        received=tuple(arriving.sum((1, 2)).tolist()),
        order=keys.repeat_interleave(arriving.reshape(-1)).argsort(stable=True),
        counts=tuple(arriving.sum((0, 2)).tolist()),
    )


def _route_to_hosts(group: Group, hosts: Sequence[int], indices: Tensor, sizes: Sequence[int]) -> _Between:
    """The route of sharded tokens to relays, on which the choices of a token are its hosts. Collective."""
    to = relays(hosts)[group.position]
    in_order = sorted(range(len(to)), key=to.__getitem__)
    host_of = torch.tensor(hosts).repeat_interleave(torch.tensor(sizes)).to(indices.device)
    goes = torch.zeros(indices.shape[0], len(to), dtype=torch.bool, device=indices.device)
    goes = goes.scatter_(1, host_of[indices], True)
    most = min(indices.shape[1], len(to))
    numbers = torch.arange(indices.shape[0], device=indices.device).unsqueeze(1) * most + goes.cumsum(1) - 1
    counts = dict(zip(to, goes.sum(0).tolist(), strict=True))
    sent = [counts.get(member, 0) for member in range(group.size)]
    told = group.all_to_all(torch.tensor(sent, device=indices.device).view(-1, 1).unbind(), [(1,)] * group.size)
    return _Between(
        group=group,
        choices=most,
        rows=numbers[:, in_order].T[goes[:, in_order].T],
        sent=tuple(sent),
        received=tuple(torch.cat(told).tolist()),
        order=slice(None),
        counts=(),
    )


def _numbers_inside(hosts: Sequence[int], own: int, sizes: Sequence[int]) -> Tensor:
    """[E]: the number of each expert among those of this host; of those elsewhere, how many are here."""
    here = torch.tensor([host == own for host in hosts]).repeat_interleave(torch.tensor(sizes))
    return torch.where(here, here.cumsum(0) - 1, here.sum())


def _route_here(group: Group, indices: Tensor, sizes: Sequence[int]) -> Route:
    """The route of replicated tokens: of all choices, those of this member's experts."""
    rows, counts = by_expert(indices, sum(sizes))
    first, stop = group.bounds(sizes)
    before, own = int(counts[:first].sum()), counts[first:stop].tolist()
    return Route(choices=indices.shape[1], rows=rows[before : before + sum(own)], counts=tuple(own))
