"""Ops over a dim that is too large for one device: a vocabulary, or the classes, cut into unequal parts.

What has to be known of all the parts for a softmax is one pair a row, the largest logit m_i and s_i = sum exp(x - m_i); so those
are exchanged, once, and never the logits:

    m = max m_i      s = sum s_i exp(m_i - m)      log softmax x = x - m - log s

(Milakov & Gimelshein, "Online normalizer calculation for softmax", 2018; Whale, section 4 on the cross entropy of a split layer.)
Each member merges the pairs in the same order, so all have the same bits. Half precision is computed in single.

Layouts (whole, sum, cut) are those of `heterodyne.graph.sharding.layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from heterodyne.errors import PlanError
from heterodyne.runtime.split.group import Group

__all__ = ["cross_entropy", "embedding", "log_softmax", "softmax", "weights_of_rows"]

_REDUCTIONS: Final = ("mean", "sum", "none")


def embedding(
    group: Group,
    ids: Tensor,
    weight_part: Tensor,
    sizes: Sequence[int],
    *,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of a table [V, E] that is sharded along V into ``sizes``: a partial sum [*ids.shape, E], zero where another member has the row.

    Args:
        ids: replicated, any shape.
        weight_part: [sizes[i], E].
        padding_idx: the row of the whole table that gets no gradient; -1: none (as ATen has it).
    """
    if scale_grad_by_freq or sparse:
        asked = "scale_grad_by_freq" if scale_grad_by_freq else "sparse gradients"
        raise PlanError(f"an embedding with {asked} cannot be cut along its vocabulary; give it the layout replicate")
    rows = _Embedding.apply(*_own_places(group, ids, sizes), weight_part, padding_idx - group.bounds(sizes)[0])  # type: ignore[no-untyped-call]
    return _tensor(rows)


def cross_entropy(
    group: Group,
    logits_part: Tensor,
    target: Tensor,
    sizes: Sequence[int],
    weight: Tensor | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits that are cut along the classes into ``sizes``; whole.

    With y the label, w the weights of C classes, W their sum and e the smoothing, a row that is not ignored loses

        (1 - e) w_y (log s + m - x_y)  +  e / C (W (log s + m) - sum_c w_c x_c)

    and a mean divides by the sum of w_y. Each member sends four numbers a row at most. The backward communicates nothing.

    Args:
        logits_part: [sizes[i]], [N, sizes[i]] or [N, sizes[i], d1, ...].
        target: whole, indices of classes, of the shape of the logits without the classes.
        weight: [C], whole.
    """
    dim = 0 if logits_part.dim() == 1 else 1
    if target.is_floating_point():
        raise PlanError("a cross entropy with probabilities for a target cannot be cut along the classes; replicate it")
    expected = (*logits_part.shape[:dim], *logits_part.shape[dim + 1 :])
    if logits_part.shape[dim] != sizes[group.position] or target.shape != expected:
        raise ValueError(
            f"logits {tuple(logits_part.shape)} with {sizes[group.position]} classes here and labels {tuple(target.shape)}"
            f" do not fit: labels must have the shape {expected}"
        )
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{reduction!r} is not one of {', '.join(_REDUCTIONS)}")
    rows = _CrossEntropy.apply(logits_part, target, group, tuple(sizes), dim, weight, ignore_index, label_smoothing)  # type: ignore[no-untyped-call]
    losses = _tensor(rows)
    # Autocast has losses in single precision.
    dtype = losses.dtype if torch.is_autocast_enabled(losses.device.type) else logits_part.dtype
    if reduction == "none":
        return losses.to(dtype)
    total = losses.sum()
    if reduction == "mean":
        total = total / weights_of_rows(target, weight, ignore_index, losses.dtype).sum()
    return total.to(dtype)


def log_softmax(group: Group, part: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The logarithm of the softmax over a dim that is sharded into ``sizes``; sharded alike."""
    return _tensor(_LogSoftmax.apply(part, group, _checked(group, part, dim, sizes), _dtype(torch.log_softmax, part)))  # type: ignore[no-untyped-call]


def softmax(group: Group, part: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The softmax over a dim that is sharded into ``sizes``; sharded alike."""
    return _tensor(_Softmax.apply(part, group, _checked(group, part, dim, sizes), _dtype(torch.softmax, part)))  # type: ignore[no-untyped-call]


class _Embedding(torch.autograd.Function):
    """Looks up ``places`` in the own part of a table, where they are ``own``; ``padding`` is a place as well."""

    @staticmethod
    def forward(ctx: FunctionCtx, places: Tensor, own: Tensor, part: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(places, own)
        ctx.rows, ctx.padding = len(part), padding  # type: ignore[attr-defined]
        if not len(part):
            return part.new_zeros(*places.shape, part.shape[1])
        return F.embedding(places, part).masked_fill_(~own.unsqueeze(-1), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        places, own = ctx.saved_tensors
        # One row more than there are, for what is of no one here: the kernel leaves out its row of padding.
        nowhere = ctx.rows
        places = places.masked_fill(~own | (places == ctx.padding), nowhere)
        gradient = torch.ops.aten.embedding_dense_backward(upstream, places, nowhere + 1, nowhere, False)
        return None, None, gradient[:nowhere], None


class _CrossEntropy(torch.autograd.Function):
    """The losses of the rows, unreduced, in single precision or double.

    Kept for the backward are the logits, from which p = exp(x - m) / s is computed again, and a few numbers a row.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        part: Tensor,  # [N, C_i, ...]
        target: Tensor,  # [N, ...]
        group: Group,
        sizes: tuple[int, ...],
        dim: int,
        weight: Tensor | None,  # [C]
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        with _without_autocast(part):
            dtype = _wide(part.dtype)
            weights = torch.ones(sum(sizes), dtype=dtype, device=part.device) if weight is None else weight.to(dtype)
            first, stop = group.bounds(sizes)
            counted = target != ignore_index
            places, own = _own_places(group, target, sizes, leave_out=~counted)
            of_label = _at(part, places, dim).to(dtype).masked_fill(~own.unsqueeze(dim), 0)
            more = [of_label]
            peak = _peak(part, dim)
            shifted = part.to(dtype) - peak
            if smoothing:
                more.append(_weighted_sum(shifted, None if weight is None else weights[first:stop], dim))
            total = shifted.exp_().sum(dim, keepdim=True)
            del shifted
            peaks, totals, *others = _exchanged(group, [peak, total, *more])
            top, total = _merged(peaks, totals)
            log_total = total.log()
            row_weight = weights_of_rows(target, weight, ignore_index, dtype).unsqueeze(dim)
            losses = (1 - smoothing) * row_weight * (log_total - (_sum_in_order(others[0]) - top))
            if smoothing:
                share = smoothing / sum(sizes)
                # What the members sent is relative to their own peaks.
                of_parts = [w.sum() for w in weights.split_with_sizes(list(sizes))]
                sums = [s + w * (p - top) for s, w, p in zip(others[1], of_parts, peaks, strict=True)]
                losses = losses + share * (weights.sum() * log_total - _sum_in_order(sums))
            losses = losses.squeeze(dim).masked_fill(~counted, 0)
            ctx.save_for_backward(part, top, total, places, own, counted, row_weight, weight)  # type: ignore[arg-type]  # None is allowed
            ctx.dim, ctx.smoothing, ctx.bounds, ctx.classes = dim, smoothing, (first, stop), sum(sizes)  # type: ignore[attr-defined]
            return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Of the logits: u (p_c ((1 - e) w_y + e W / C) - (1 - e) w_y [c = y] - e w_c / C), with u the upstream of the row."""
        part, top, total, places, own, counted, row_weight, weight = ctx.saved_tensors
        with _without_autocast(part):
            dim, share = ctx.dim, ctx.smoothing / ctx.classes
            upstream = upstream.masked_fill(~counted, 0).unsqueeze(dim)
            of_label = upstream * row_weight * (1 - ctx.smoothing)
            of_all = of_label
            if ctx.smoothing:
                sum_of_weights = ctx.classes if weight is None else weight.to(total.dtype).sum()
                of_all = of_label + upstream * (share * sum_of_weights)
            gradient = (part.to(total.dtype) - top).exp_().mul_(of_all / total)
            if ctx.smoothing:
                own_weights = upstream.new_ones(1) if weight is None else weight[slice(*ctx.bounds)].to(total.dtype)
                gradient.addcmul_(upstream, _along(own_weights, gradient.dim(), dim), value=-share)
            if gradient.shape[dim]:
                gradient.scatter_add_(dim, places.unsqueeze(dim), -of_label.masked_fill(~own.unsqueeze(dim), 0))
            return gradient.to(part.dtype), *([None] * 7)


class _LogSoftmax(torch.autograd.Function):
    """Keeps the result. Of the input: u - p sum u."""

    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor, group: Group, dim: int, dtype: torch.dtype) -> Tensor:
        with _without_autocast(part):
            top, total = _statistics(group, part, dim)
            result = (part.to(top.dtype) - top).sub_(total.log()).to(dtype)
        ctx.save_for_backward(result)
        ctx.group, ctx.dim, ctx.dtype = group, dim, part.dtype  # type: ignore[attr-defined]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (result,) = ctx.saved_tensors
        with _without_autocast(result):
            wide = _wide(result.dtype)
            total = ctx.group.all_reduce(upstream.to(wide).sum(ctx.dim, keepdim=True))
            gradient = torch.addcmul(upstream.to(wide), result.to(wide).exp(), total, value=-1)
            return gradient.to(ctx.dtype), None, None, None


class _Softmax(torch.autograd.Function):
    """Keeps the result. Of the input: p (u - sum u p)."""

    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor, group: Group, dim: int, dtype: torch.dtype) -> Tensor:
        with _without_autocast(part):
            top, total = _statistics(group, part, dim)
            result = (part.to(top.dtype) - top).exp_().div_(total).to(dtype)
        ctx.save_for_backward(result)
        ctx.group, ctx.dim, ctx.dtype = group, dim, part.dtype  # type: ignore[attr-defined]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (result,) = ctx.saved_tensors
        with _without_autocast(result):
            weighted = upstream.to(_wide(result.dtype)) * result
            total = ctx.group.all_reduce(weighted.sum(ctx.dim, keepdim=True))
            return weighted.addcmul_(result.to(total.dtype), total, value=-1).to(ctx.dtype), None, None, None


def _statistics(group: Group, part: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """m and s of the module's docstring over all members, with ``dim`` of size 1."""
    peak = _peak(part, dim)
    total = (part.to(peak.dtype) - peak).exp_().sum(dim, keepdim=True)
    peaks, totals = _exchanged(group, [peak, total])
    return _merged(peaks, totals)


def _peak(part: Tensor, dim: int) -> Tensor:
    """m_i, wide; of a part that is empty, or -inf throughout, the least number there is, so that nothing is subtracted from itself."""
    dtype = _wide(part.dtype)
    least = torch.finfo(dtype).min
    if not part.shape[dim]:
        return torch.full((*part.shape[:dim], 1, *part.shape[dim + 1 :]), least, dtype=dtype, device=part.device)
    return part.amax(dim, keepdim=True).to(dtype).clamp_(min=least)


def _merged(peaks: Sequence[Tensor], totals: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    top = peaks[0]
    for peak in peaks[1:]:
        top = torch.maximum(top, peak)
    return top, _sum_in_order([total * (peak - top).exp() for peak, total in zip(peaks, totals, strict=True)])


def _exchanged(group: Group, rows: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """For each of the tensors, all of one shape, what every member has of it; in one exchange."""
    stacked = torch.stack(list(rows))
    of_members = group.all_gather_uneven(stacked, [stacked.shape] * group.size)
    return [[of_member[i] for of_member in of_members] for i in range(len(rows))]


def _sum_in_order(tensors: Sequence[Tensor]) -> Tensor:
    """Added up in the order of the members, so that all get the same bits."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def _own_places(
    group: Group, ids: Tensor, sizes: Sequence[int], *, leave_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """For each id its place in this member's part, and whether it is there; 0 for what another member has.

    An id that no member has keeps a place outside of the part: to look it up fails as it does on one device.
    """
    first, stop = group.bounds(sizes)
    own = (ids >= first) & (ids < stop)
    elsewhere = (ids >= 0) & (ids < sum(sizes)) & ~own
    if leave_out is not None:
        own, elsewhere = own & ~leave_out, elsewhere | leave_out
    return (ids - first).masked_fill(elsewhere, 0), own


def _at(part: Tensor, places: Tensor, dim: int) -> Tensor:
    """The element of each row at its place, with ``dim`` of size 1; 0 for a part that is empty."""
    if not part.shape[dim]:
        return part.new_zeros(places.unsqueeze(dim).shape)
    return part.gather(dim, places.unsqueeze(dim))


def weights_of_rows(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """w_y of each row, 0 where it is ignored."""
    counted = target != ignore_index
    if weight is None:
        return counted.to(dtype)
    return weight.to(dtype)[target.masked_fill(~counted, 0)].masked_fill(~counted, 0)


def _weighted_sum(shifted: Tensor, weights: Tensor | None, dim: int) -> Tensor:
    """sum_c w_c x_c over the own classes, with ``dim`` of size 1."""
    if weights is None:
        return shifted.sum(dim, keepdim=True)
    return (shifted.movedim(dim, -1) @ weights).unsqueeze(dim)


def _along(vector: Tensor, dims: int, dim: int) -> Tensor:
    shape = [1] * dims
    shape[dim] = -1
    return vector.view(shape)


def _checked(group: Group, part: Tensor, dim: int, sizes: Sequence[int]) -> int:
    """The dim, counted from the front."""
    dim %= part.dim()
    if part.shape[dim] != sizes[group.position]:
        raise ValueError(f"dim {dim} of {tuple(part.shape)} should have the size {sizes[group.position]} here")
    return dim


def _dtype(op: Callable[[Tensor, int], Tensor], part: Tensor) -> torch.dtype:
    """What an op makes of such a tensor, under the autocast that is on: each device has its own list of what is computed in what."""
    probe: Tensor = op(part.detach().new_empty(1), 0)
    return probe.dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In what is computed: single precision at least."""
    return torch.promote_types(dtype, torch.float32)


def _without_autocast(tensor: Tensor) -> torch.autocast:
    """What is computed wide shall stay so."""
    return torch.autocast(tensor.device.type, enabled=False)


def _tensor(value: Any) -> Tensor:
    result: Tensor = value
    return result
