"""Attention of some queries to some of the keys, such that blocks can be put together to the attention to all of them.

Besides its output a block gives the logarithm of the sum of its exponentials, l, a number for each query. Two blocks then merge into

    l = log(exp l_1 + exp l_2)      out = out_1 exp(l_1 - l) + out_2 exp(l_2 - l)

and with the l and the output of the whole row, each block's part of the gradients can be computed by itself (Dao, "FlashAttention-2",
2023, section 3.1; Liu et al., "Ring Attention with Blockwise Transformers", 2023). On CPU PyTorch's own fused kernels give l and
take it; elsewhere the block is computed in slices of its queries, in single precision or double.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

__all__ = ["attend", "attend_backward", "merge"]

_ROWS: Final = 1024
"""Queries of a slice: the scores of so many are kept at a time."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The output [B, H, L, Ev] and l [B, H, L], both wide (single precision at least).

    Args:
        q: [B, H, L, E].
        k, v: [B, G, S, E] and [B, G, S, Ev], S > 0; the query head h belongs to the head h // (H / G) of these.
        causal: query i sees the keys up to i; L and S are equal.
    """
    k, v = _for_each_head(q, k), _for_each_head(q, v)
    if _has_kernel(q, v):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out.to(_wide(q)), lse.to(_wide(q))
    keys, values = k.to(_wide(q)), v.to(_wide(q))
    outs, sums = [], []
    for _, scores in _scores(q, keys, causal=causal, scale=scale):
        lse = scores.logsumexp(-1)
        outs.append(scores.sub_(lse.unsqueeze(-1)).exp_() @ values)
        sums.append(lse)
    return torch.cat(outs, -2), torch.cat(sums, -1)


def attend_backward(
    upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block adds to the gradients of q, k and v, wide.

    Args:
        upstream: of the merged output.
        out, lse: the merged ones, of all blocks. The rest as for `attend`.
    """
    groups = k.shape[1]
    k, v = _for_each_head(q, k), _for_each_head(q, v)
    if _has_kernel(q, v):
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            upstream, q, k, v, out.to(q.dtype), lse, 0.0, causal, scale=scale
        )
        of_q, of_k, of_v = (gradient.to(_wide(q)) for gradient in found)
        return of_q, _of_each_group(of_k, groups), _of_each_group(of_v, groups)
    keys, values, upstream = k.to(_wide(q)), v.to(_wide(q)), upstream.to(_wide(q))
    mean = (upstream * out).sum(-1, keepdim=True)
    of_q = []
    of_k, of_v = torch.zeros_like(keys), torch.zeros_like(values)
    for rows, scores in _scores(q, keys, causal=causal, scale=scale):
        weights = scores.sub_(lse[..., rows].unsqueeze(-1)).exp_()
        of_v += weights.mT @ upstream[..., rows, :]
        of_scores = weights.mul_(upstream[..., rows, :] @ values.mT - mean[..., rows, :]).mul_(scale)
        of_k += of_scores.mT @ q[..., rows, :].to(keys.dtype)
        of_q.append(of_scores @ keys)
    return torch.cat(of_q, -2), _of_each_group(of_k, groups), _of_each_group(of_v, groups)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two blocks of the same queries put together; the first one is overwritten."""
    # exp(l_2 - l) = 1 / (1 + exp(l_1 - l_2))
    out.lerp_(other, torch.sigmoid(other_lse - lse).unsqueeze(-1))
    return out, torch.logaddexp(lse, other_lse)


def _scores(q: Tensor, keys: Tensor, *, causal: bool, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the queries with their scores [B, H, rows, S], hidden ones -inf."""
    for start in range(0, max(1, q.shape[-2]), _ROWS):
        rows = slice(start, min(start + _ROWS, q.shape[-2]))
        scores = (q[..., rows, :].to(keys.dtype) @ keys.mT).mul_(scale)
        if causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril_(start)
            scores.masked_fill_(~seen, -torch.inf)
        yield rows, scores


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and q.numel() > 0


def _for_each_head(q: Tensor, grouped: Tensor) -> Tensor:
    """Heads of keys or values, repeated for the query heads that belong to them."""
    repeats = q.shape[1] // grouped.shape[1] if grouped.shape[1] else 1
    return grouped if repeats == 1 else grouped.repeat_interleave(repeats, 1)


def _of_each_group(gradient: Tensor, groups: int) -> Tensor:
    """The transpose of `_for_each_head`."""
    return (
        gradient
        if gradient.shape[1] == groups
        else gradient.reshape(len(gradient), groups, -1, *gradient.shape[2:]).sum(2)
    )


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
