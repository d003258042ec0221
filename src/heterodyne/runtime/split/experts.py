"""Experts on unlike devices: the tokens go to the experts that they have chosen, what comes of them goes back, and all is as on one device.

What a mixture of experts is, and how it runs on one device, is in `heterodyne.experts`. Of the E experts, member j of the group holds
the ``sizes[j]`` that follow those of the members before it: any number, also none. There are two ways to bring both together:

* `experts_between`: the tokens are cut, each member has its own. Only the rows of the choices travel, in an all-to-all of unequal sizes.
* `experts_here`: each member has all tokens. Nothing travels: it runs its own experts on them, and the results have to be added up.

Either way an expert sees its tokens in the order in which one device would give them to it.

Where experts have a capacity, each takes at most C = ceil(k * N * factor / E) choices of N tokens, and those that come later are dropped:
they add nothing (`within_capacity`; GShard, Lepikhin et al., 2020, algorithm 1; with k = 1 the Switch Transformer, Fedus et al., 2021).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from heterodyne.experts import Route, Run, by_expert, combine, dispatch
from heterodyne.graph.sharding.layout import SUM, WHOLE
from heterodyne.runtime.split.conversions import converted
from heterodyne.runtime.split.group import Group

__all__ = [
    "Gate",
    "experts_between",
    "experts_here",
    "load_balance_loss",
    "route_between",
    "route_here",
    "router_z_loss",
    "switch_gate",
    "top_k_gate",
    "within_capacity",
]


def experts_between(
    group: Group,
    tokens: Tensor,
    indices: Tensor,
    weights: Tensor,
    *,
    sizes: Sequence[int],
    run: Run,
    served: Tensor | None = None,
) -> Tensor:
    """The mixture for tokens that are cut over the group.

    Args:
        group: the members, each with its own tokens: N may differ, and be 0.
        tokens: [N, H] of this member.
        indices, weights: [N, k]: the experts that each token has chosen, all different, and how much each counts.
        sizes: how many experts each member holds.
        run: computes those of this member.
        served: [N, k]: False for choices that are dropped (see `within_capacity`).

    Returns [N, H] of this member. Collective, forward and backward.
    """
    route = route_between(group, indices, sizes, served)
    # What has a gradient here must have one on every member, else some would wait in backward for others that have nothing to do.
    anchor = torch.zeros((), device=tokens.device, requires_grad=True)
    arrived = dispatch(tokens, route, anchor)
    return combine(run(arrived, route.counts), weights, arrived, route)


def experts_here(
    group: Group,
    tokens: Tensor,
    indices: Tensor,
    weights: Tensor,
    *,
    sizes: Sequence[int],
    run: Run,
    served: Tensor | None = None,
) -> Tensor:
    """What this member's experts add to the mixture, [N, H]: the sum over the members is the whole of it. Nothing is sent.

    ``tokens``, ``indices``, ``weights`` and ``served`` are the same on each member, and so are their gradients parts that add up: in the
    words of `heterodyne.graph.sharding.layout`, it takes COPY and gives SUM. Else as `experts_between`, which takes and gives cut(0).
    """
    route = route_here(group, indices, sizes, served)
    arrived = dispatch(tokens, route)
    return combine(run(arrived, route.counts), weights, arrived, route)


# ---- where the rows go ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Between(Route):
    """Rows travel over a group. They come to a member from each of the others in turn, and have to be put in order of expert.

    Args:
        group: the members.
        sent, received: how many rows go to, and come from, each of them.
        order: [M], which of what comes here, member after member, is first in order of expert, which second...
    """

    group: Group
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: Tensor

    def outward(self, rows: Tensor) -> Tensor:
        shapes = [(count, *rows.shape[1:]) for count in self.received]
        return torch.cat(self.group.all_to_all(rows.split_with_sizes(self.sent), shapes))[self.order]

    def homeward(self, rows: Tensor) -> Tensor:
        by_member = torch.empty_like(rows)
        by_member[self.order] = rows
        shapes = [(count, *rows.shape[1:]) for count in self.sent]
        return torch.cat(self.group.all_to_all(by_member.split_with_sizes(self.received), shapes))


def route_between(group: Group, indices: Tensor, sizes: Sequence[int], served: Tensor | None = None) -> Route:
    """The route of tokens that are cut: the members tell each other how many rows they have for each expert. Collective."""
    rows, counts = by_expert(indices, sum(sizes), served)
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


def route_here(group: Group, indices: Tensor, sizes: Sequence[int], served: Tensor | None = None) -> Route:
    """The route of tokens that each member has: of all choices, those of this member's experts."""
    rows, counts = by_expert(indices, sum(sizes), served)
    first, stop = group.bounds(sizes)
    before, own = int(counts[:first].sum()), counts[first:stop].tolist()
    return Route(choices=indices.shape[1], rows=rows[before : before + sum(own)], counts=tuple(own))


# ---- which experts a token chooses ----------------------------------------------------------------------------------


class Gate(NamedTuple):
    """``indices`` and ``weights`` [N, k], the best first; ``probabilities`` [N, E], which the router gives to all experts."""

    indices: Tensor
    weights: Tensor
    probabilities: Tensor


def top_k_gate(logits: Tensor, k: int, *, normalise: bool) -> Gate:
    """The k experts with the largest probabilities softmax(logits), logits [N, E]; in single precision at least.

    ``normalise``: the weights of a token add up to 1 (GShard, Mixtral; Qwen if it says norm_topk_prob).
    """
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    weights, indices = probabilities.topk(k, dim=-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Gate(indices, weights, probabilities)


def switch_gate(logits: Tensor) -> Gate:
    """One expert, which counts with its probability, so that the router learns (Fedus et al., 2021, section 2.1)."""
    return top_k_gate(logits, 1, normalise=False)


def within_capacity(indices: Tensor, experts: int, factor: float, group: Group | None = None) -> Tensor:
    """Which choices their experts have room for: [..., N, k] of truth values for indices [..., N, k].

    Each expert takes C = ceil(k * N * factor / E), first come, first served: the first choices of all tokens in order of token, then
    the second choices, and so on. With ``group``, N are the tokens of all its members, one member's after the other's (collective, for
    indices [N, k]). Leading dims are GShard's groups: the tokens of each have a capacity of their own.
    """
    *groups, tokens, k = indices.shape
    lines = indices.reshape(math.prod(groups), tokens, k)
    first = torch.arange(lines.shape[0] * k, device=indices.device).view(-1, 1, k) * experts
    cells = first + lines  # one for each group, choice and expert
    place, counts = _places(cells.reshape(-1), lines.shape[0] * k * experts)
    counts = counts.view(-1, k, experts)
    earlier = counts.cumsum(1) - counts  # those of the choices before
    if group is not None:
        members = torch.stack(group.all_gather_uneven(counts[0], [counts.shape[1:]] * group.size))
        everyone = members.sum(0)  # [k, E]
        earlier = everyone.cumsum(0) - everyone + members[: group.position].sum(0)
        tokens = int(everyone.sum()) // k
    capacity = math.ceil(k * tokens * factor / experts)
    return (place + earlier.reshape(-1)[cells.reshape(-1)] < capacity).view(indices.shape)


def _places(cells: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """How many before it are in the same cell, for each; and how many each of ``size`` cells has."""
    counts = torch.bincount(cells, minlength=size)
    order = cells.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    place = torch.empty_like(cells)
    place[order] = torch.arange(cells.shape[0], device=cells.device) - starts[cells[order]]
    return place, counts


# ---- what keeps the router balanced ---------------------------------------------------------------------------------


def load_balance_loss(probabilities: Tensor, indices: Tensor, group: Group | None = None) -> Tensor:
    """E * sum_e f_e P_e: f_e = the choices of expert e over the tokens, P_e = the mean of its probability. k where all are alike.

    Args:
        probabilities: [N, E], see `Gate`.
        indices: [N, k], the choices that count. ``indices[:, :1]``: the loss of the Switch Transformer (Fedus et al., 2021, equations 4 to
            6), which is E^2 times that of GShard; all of them: that of Mixtral in Transformers.
        group: N are the tokens of all its members (collective forward, not backward).

    Returns the same number on each member; the gradient of ``probabilities`` is that of its own tokens.
    """
    experts = probabilities.shape[1]
    counts = torch.bincount(indices.reshape(-1), minlength=experts)
    tokens = counts.new_full((1,), probabilities.shape[0])
    counted = torch.cat([counts, tokens])
    if group is not None:
        counted = group.all_reduce(counted)
    total = counted[-1].to(probabilities.dtype)
    fractions = counted[:-1].to(probabilities.dtype) / total
    return (fractions * (_added_up(probabilities.sum(0), group) / total)).sum() * experts


def router_z_loss(logits: Tensor, group: Group | None = None) -> Tensor:
    """The mean over the tokens of logsumexp(logits)^2, which keeps them small (Zoph et al., "ST-MoE", 2022, equation 5).

    logits [N, E]; ``group`` as for `load_balance_loss`.
    """
    squares = logits.logsumexp(-1, keepdim=True).square().sum(0)
    tokens = logits.new_tensor([logits.shape[0]], dtype=torch.int64)
    if group is not None:
        tokens = group.all_reduce(tokens)
    return (_added_up(squares, group) / tokens).sum()


def _added_up(part: Tensor, group: Group | None) -> Tensor:
    return part if group is None else converted(group, part, SUM, WHOLE, (), ())
