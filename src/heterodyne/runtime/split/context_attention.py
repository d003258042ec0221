"""Attention when the sequence is cut between the members, into slices of any sizes.

There are three ways. In `ring_attention` the keys and values travel from member to member, so that none ever holds more than two
slices of them; blocks of them are put together as `attention_block` says. `gathered_attention` gives each member all the keys and
values that its queries see, which takes one exchange and leaves the rest to PyTorch's own attention. `to_heads` makes a tensor that is
cut along the sequence into one that is cut along the heads, and `to_sequence` the other way: between the two each member has the whole
sequence for its own heads.

Under a causal mask a slice is read by the members behind it only, so only they are sent it (`graph.sharding.causal` gives slices
that take equally long). All gradients are cut as their tensors are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from heterodyne.graph.sharding.layout import cut
from heterodyne.runtime.split.attention_block import attend, attend_backward, merge
from heterodyne.runtime.split.conversions import converted
from heterodyne.runtime.split.group import Group
from heterodyne.runtime.split.ring import Ring, packed

__all__ = ["gathered_attention", "ring_attention", "to_heads", "to_sequence"]

_HEADS, _SEQUENCE = 1, 2


def ring_attention(
    group: Group,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Sequence[int],
    *,
    is_causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` of tensors that are cut along the sequence into ``sizes``; cut alike.

    The backward sends keys and values around again, with their gradients, so that only the own slices are kept.

    Args:
        q: [B, H, sizes[i], E].
        k, v: [B, G, sizes[i], E] and [B, G, sizes[i], Ev]; without ``enable_gqa`` G is H.
    """
    _check(group, q, k, v, sizes, enable_gqa=enable_gqa)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (tensor.to(torch.get_autocast_dtype(q.device.type)) for tensor in (q, k, v))
    result: Tensor = _RingAttention.apply(q, k, v, group, tuple(sizes), is_causal, factor)  # type: ignore[no-untyped-call]
    return result


def gathered_attention(
    group: Group,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Sequence[int],
    *,
    is_causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """The same as `ring_attention`, with all the keys and values that are seen here on this member at once.

    Args:
        attn_mask: [..., sizes[i], S] for the own queries and all S keys, as PyTorch has it: what is False is hidden, or what is
            added to the scores. Not together with ``is_causal``.
    """
    _check(group, q, k, v, sizes, enable_gqa=enable_gqa)
    if is_causal and attn_mask is not None:
        raise ValueError(
            "attention takes a mask or is_causal, not both, as PyTorch has it: add the causal mask to the mask"
        )
    both: Tensor = _Gathered.apply(torch.cat([k, v], -1), group, tuple(sizes), is_causal)  # type: ignore[no-untyped-call]
    keys, values = both.split_with_sizes([k.shape[-1], v.shape[-1]], -1)
    if not q.shape[_SEQUENCE]:
        attn_mask = None  # no queries, so nothing was gathered
    elif is_causal:
        # What was gathered ends with the own slice, so the last query sees all of it.
        attn_mask = causal_lower_right(q.shape[_SEQUENCE], keys.shape[_SEQUENCE])
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=attn_mask, scale=scale, enable_gqa=enable_gqa)


def to_heads(group: Group, x: Tensor, seq_sizes: Sequence[int], head_sizes: Sequence[int]) -> Tensor:
    """From [B, H, seq_sizes[i], E] to [B, head_sizes[i], L, E] (Jacobs et al., "DeepSpeed Ulysses", 2023)."""
    return converted(group, x, cut(_SEQUENCE), cut(_HEADS), seq_sizes, head_sizes)


def to_sequence(group: Group, x: Tensor, seq_sizes: Sequence[int], head_sizes: Sequence[int]) -> Tensor:
    """From [B, head_sizes[i], L, E] to [B, H, seq_sizes[i], E]: the inverse of `to_heads`."""
    return converted(group, x, cut(_HEADS), cut(_SEQUENCE), head_sizes, seq_sizes)


class _RingAttention(torch.autograd.Function):
    """Keeps the own slices, the output and l."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: Group,
        sizes: tuple[int, ...],
        causal: bool,
        scale: float,
    ) -> Tensor:
        ring = Ring(group, sizes, causal=causal, shapes=(k.shape, v.shape))
        with torch.autocast(q.device.type, enabled=False):
            wide = torch.promote_types(q.dtype, torch.float32)
            out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
            lse = torch.zeros(q.shape[:-1], dtype=wide, device=q.device)
            for source, keys, values in ring.slices(k, v):
                if source == group.position:  # the first one
                    out, lse = attend(q, keys, values, causal=causal, scale=scale)
                elif source is not None:
                    out, lse = merge(out, lse, *attend(q, keys, values, causal=False, scale=scale))
            result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.ring, ctx.causal, ctx.scale = ring, causal, scale  # type: ignore[attr-defined]
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        with torch.autocast(q.device.type, enabled=False):
            of_q = torch.zeros_like(q, dtype=lse.dtype)
            # With each slice goes what has been added up for it so far, and home after its last stop.
            carried = home = lse.new_zeros(k.numel() + v.numel())
            for step, (source, keys, values) in enumerate(ring.slices(k, v)):
                if source is not None:
                    causal = ctx.causal and source == ring.position
                    of_block = attend_backward(upstream, q, keys, values, out, lse, causal=causal, scale=ctx.scale)
                    of_q += of_block[0]
                    carried = carried + packed(*of_block[1:])
                for arrived, sums in ring.pass_on(carried, step, home=True).items():
                    if arrived == ring.position:
                        home = sums
                    else:
                        carried = sums
            of_k, of_v = ring.unpacked(home, ring.position)
            return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), *([None] * 4)


class _Gathered(torch.autograd.Function):
    """The slices that this member reads, side by side along the sequence."""

    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor, group: Group, sizes: tuple[int, ...], causal: bool) -> Tensor:
        me = group.position
        readers = [_reads(reader, me, sizes, causal=causal) for reader in range(group.size)]
        read = [size if _reads(me, source, sizes, causal=causal) else 0 for source, size in enumerate(sizes)]
        ctx.group, ctx.readers, ctx.read, ctx.shape = group, readers, read, part.shape  # type: ignore[attr-defined]
        nothing = part.new_empty(0)
        return torch.cat(
            group.all_to_all([part if reads else nothing for reads in readers], [_with(part, size) for size in read]),
            _SEQUENCE,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        group: Group = ctx.group
        own = ctx.shape
        shapes = [own if reads else _with(upstream, 0) for reads in ctx.readers]
        received = group.all_to_all(upstream.split_with_sizes(ctx.read, _SEQUENCE), shapes)
        total = upstream.new_zeros(own, dtype=torch.promote_types(upstream.dtype, torch.float32))
        for reads, gradient in zip(ctx.readers, received, strict=True):
            if reads:
                total += gradient
        return total.to(upstream.dtype), None, None, None


def _reads(reader: int, source: int, sizes: Sequence[int], *, causal: bool) -> bool:
    """Whether a member's queries see the keys of another one."""
    return sizes[reader] > 0 and (source <= reader or not causal)


def _with(part: Tensor, size: int) -> tuple[int, ...]:
    return (*part.shape[:_SEQUENCE], size, *part.shape[_SEQUENCE + 1 :])


def _check(group: Group, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int], *, enable_gqa: bool) -> None:
    own = sizes[group.position]
    if any(x.dim() != 4 or x.shape[_SEQUENCE] != own for x in (q, k, v)):
        raise ValueError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} should be [B, H, {own}, E] here"
        )
    heads, of_keys = q.shape[_HEADS], k.shape[_HEADS]
    if of_keys != v.shape[_HEADS] or (heads % max(1, of_keys) if enable_gqa else heads != of_keys):
        raise ValueError(f"{heads} heads of queries do not go with {of_keys} of keys and {v.shape[_HEADS]} of values")
