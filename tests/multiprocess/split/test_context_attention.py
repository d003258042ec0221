"""Attention over unequal slices of a sequence is that of one device: values and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from heterodyne.runtime.split import attention_block, context_attention
from heterodyne.runtime.split.group import Group
from multiprocess.pool import Pool
from multiprocess.split.members import Counting, error, on_members, quick, several

ALONE = Group(None, 0, 1)
BARS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-6}
WAYS = ("ring_attention", "gathered_attention")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Tokens of each member, heads of queries and of keys, and their widths."""

    sizes: tuple[int, ...]
    heads: tuple[int, int] = (2, 2)
    widths: tuple[int, int] = (4, 4)
    causal: bool = True
    mask: str | None = None
    scale: float | None = None
    way: str = "ring_attention"
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def values(self) -> tuple[list[Tensor], Tensor | None, Tensor]:
        """q, k, v [2, H, L, E], the mask [..., L, L], and what weighs the outputs."""
        generator = torch.Generator().manual_seed(self.seed)
        length, (of_q, of_k), (of_keys, of_values) = sum(self.sizes), self.heads, self.widths
        shapes = [(2, of_q, length, of_keys), (2, of_k, length, of_keys), (2, of_k, length, of_values)]
        q, k, v, upstream = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
            for shape in (*shapes, (2, of_q, length, of_values))
        )
        drawn = torch.randn(2, of_q, length, length, generator=generator, dtype=torch.float64).to(self.dtype)
        mask = {None: None, "float": drawn, "bool": drawn[0] > 0, "causal": drawn[0, 0].isfinite().tril()}[self.mask]
        return [q, k, v], mask, upstream


@st.composite
def attentions(draw: st.DrawFn, members: int) -> Attention:
    way = draw(st.sampled_from(WAYS))
    mask = draw(st.sampled_from([None, "float", "bool", "causal"])) if way == "gathered_attention" else None
    return Attention(
        sizes=tuple(draw(st.lists(st.integers(0, 9), min_size=members, max_size=members).filter(any))),
        heads=draw(st.sampled_from([(2, 2), (4, 2), (3, 1)])),
        widths=draw(st.sampled_from([(4, 4), (8, 8), (3, 5)])),
        causal=mask is None and draw(st.booleans()),
        mask=mask,
        scale=draw(st.sampled_from([None, 0.3])),
        way=way,
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        seed=draw(st.integers(0, 99)),
    )


def part_of_attention(group: Counting, case: Attention) -> list[Tensor]:
    """This member's output, and the gradients of its queries, keys, values and mask."""
    own = slice(*group.bounds(case.sizes))
    whole, mask, upstream = case.values()
    leaves = [tensor[:, :, own].clone().requires_grad_() for tensor in whole]
    options = {"is_causal": case.causal, "scale": case.scale, "enable_gqa": case.heads[0] != case.heads[1]}
    if mask is not None:
        mask = mask[..., own, :].clone()
        if mask.is_floating_point():
            leaves.append(mask.requires_grad_())
        options["attn_mask"] = mask
    out = getattr(context_attention, case.way)(group, *leaves[:3], case.sizes, **options)
    return [out.detach(), *gradients(out, leaves, upstream[:, :, own])]


def on_one_device(case: Attention) -> list[Tensor]:
    whole, mask, upstream = case.values()
    leaves = [tensor.requires_grad_() for tensor in whole]
    if mask is not None and mask.is_floating_point():
        leaves.append(mask.requires_grad_())
    gqa = case.heads[0] != case.heads[1]
    out = F.scaled_dot_product_attention(
        *whole, attn_mask=mask, is_causal=case.causal, scale=case.scale, enable_gqa=gqa
    )
    return [out.detach(), *gradients(out, leaves, upstream)]


def gradients(out: Tensor, leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(out, leaves, upstream, allow_unused=True)
    # A mask of no queries is not read.
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


ODD = [Attention(sizes=(0, 5, 0, 3), way=way, causal=causal, heads=(4, 2)) for way in WAYS for causal in (True, False)]
LONE = [Attention(sizes=sizes, way=way) for way in WAYS for sizes in ((0, 6), (6, 0), (1, 1))]


@quick
@given(cases=several(attentions))
@example(cases=ODD)
@example(cases=LONE)
def test_attention_over_slices_of_the_sequence(pool: Pool, cases: list[Attention]) -> None:
    for case, found in zip(cases, on_members(pool, part_of_attention, cases), strict=True):
        for parts, expected in zip(zip(*found, strict=True), on_one_device(case), strict=True):
            assert error(torch.cat(parts, 2), expected) <= BARS[case.dtype]


@pytest.mark.parametrize("way", WAYS)
def test_slices_of_many_lengths_in_single_precision(pool: Pool, way: str) -> None:
    cases = [
        Attention(sizes=(130, 7, 300), heads=(4, 2), widths=(16, 16), way=way, causal=causal, dtype=torch.float32)
        for causal in (True, False)
    ]
    for case, found in zip(cases, on_members(pool, part_of_attention, cases), strict=True):
        exact = on_one_device(replace(case, dtype=torch.float64))
        for parts, expected in zip(zip(*found, strict=True), exact, strict=True):
            assert error(torch.cat(parts, 2), expected) <= BARS[torch.float32]


def test_half_precision_is_put_together_in_single(pool: Pool) -> None:
    cases = [
        Attention(sizes=(5, 0, 9), way=way, causal=causal, widths=widths, dtype=torch.bfloat16)
        for way in WAYS
        for causal in (True, False)
        for widths in ((8, 8), (3, 5))
    ]
    for case, found in zip(cases, on_members(pool, part_of_attention, cases), strict=True):
        whole, _, upstream = case.values()
        leaves = [tensor.float().requires_grad_() for tensor in whole]
        exact = F.scaled_dot_product_attention(*leaves, is_causal=case.causal)
        expected = [exact.detach(), *gradients(exact, leaves, upstream.float())]
        for parts, single in zip(zip(*found, strict=True), expected, strict=True):
            assert all(part.dtype is torch.bfloat16 for part in parts)
            assert error(torch.cat(parts, 2), single) <= BARS[case.dtype]


def under_autocast(group: Counting, case: Attention) -> Tensor:
    own = slice(*group.bounds(case.sizes))
    q, k, v = (tensor[:, :, own].clone().requires_grad_() for tensor in case.values()[0])
    with torch.autocast("cpu", torch.bfloat16):
        out: Tensor = getattr(context_attention, case.way)(group, q, k, v, case.sizes, is_causal=True)
    out.sum().backward()  # a gradient without strides of its own
    assert k.grad is not None
    assert k.grad.dtype is case.dtype
    return out.detach()


def test_autocast_has_the_precision_that_it_has_on_one_device(pool: Pool) -> None:
    cases = [Attention(sizes=(2, 4, 1), way=way, widths=(8, 8), dtype=torch.float32) for way in WAYS]
    for case, parts in zip(cases, on_members(pool, under_autocast, cases), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            expected = F.scaled_dot_product_attention(*case.values()[0], is_causal=True)
        assert parts[0].dtype is expected.dtype is torch.bfloat16
        assert error(torch.cat(parts, 2), expected) <= BARS[torch.bfloat16]


def sent_and_kept(group: Counting, case: Attention) -> tuple[int, int, int]:
    """Elements that this member sends in the forward and in the backward, and those that it keeps in between."""
    own = slice(*group.bounds(case.sizes))
    q, k, v = (tensor[:, :, own].clone().requires_grad_() for tensor in case.values()[0])
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out: Tensor = getattr(context_attention, case.way)(group, q, k, v, case.sizes, is_causal=case.causal)
    forward = group.sent
    out.sum().backward()
    return forward, group.sent - forward, kept


def test_slices_go_only_where_they_are_seen(pool: Pool) -> None:
    sizes = (3, 0, 5, 2)
    ring, whole_ring, gathered = (
        Attention(sizes=sizes, way="ring_attention"),
        Attention(sizes=sizes, way="ring_attention", causal=False),
        Attention(sizes=sizes, way="gathered_attention"),
    )
    each = 2 * 2 * (4 + 4)  # batch, heads, keys and values: of a token
    found = on_members(pool, sent_and_kept, [ring, whole_ring, gathered])
    assert [forward // each for forward, _, _ in found[0]] == [3, 0, 3 + 5, 0]
    # The same again, with the gradients of all that were here. The last member sends those of others home.
    assert [backward // each for _, backward, _ in found[0]] == [2 * 3, 0, 2 * (3 + 5), 3 + 5]
    assert [forward // each for forward, _, _ in found[1]] == [3 + 2, 0, 5 + 3, 2 + 5]
    assert [forward // each for forward, _, _ in found[2]] == [2 * 3, 0, 5, 0]
    assert [backward // each for _, backward, _ in found[2]] == [0, 0, 3, 3 + 5]


def test_a_ring_keeps_its_own_slices_only(pool: Pool) -> None:
    case = Attention(sizes=(3, 0, 5, 2), causal=False)
    (found,) = on_members(pool, sent_and_kept, [case])
    for (_, _, kept), size in zip(found, case.sizes, strict=True):
        assert kept == size * 2 * 2 * (4 * 4 + 1)  # q, k, v and the output, and one number a query


# ---- heads -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Tokens and heads of each member."""

    sizes: tuple[int, ...]
    heads: tuple[int, ...]
    seed: int = 0

    def values(self) -> tuple[Tensor, Tensor]:
        """x [2, H, L, 3], and what weighs the result."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (2, sum(self.heads), sum(self.sizes), 3)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@st.composite
def heads(draw: st.DrawFn, members: int) -> Heads:
    sizes = st.lists(st.integers(0, 5), min_size=members, max_size=members).map(tuple)
    return Heads(sizes=draw(sizes), heads=draw(sizes), seed=draw(st.integers(0, 99)))


def there_and_back(group: Counting, case: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """This member's heads of the whole sequence, the gradient of x from those, and what comes back."""
    x, upstream = case.values()
    of_sequence, of_heads = slice(*group.bounds(case.sizes)), slice(*group.bounds(case.heads))
    x = x[:, :, of_sequence].clone().requires_grad_()
    mine = context_attention.to_heads(group, x, case.sizes, case.heads)
    back = context_attention.to_sequence(group, mine, case.sizes, case.heads)
    (gradient,) = torch.autograd.grad(mine, x, upstream[:, of_heads], retain_graph=True)
    (same,) = torch.autograd.grad(back, x, upstream[:, :, of_sequence])
    assert torch.equal(same, upstream[:, :, of_sequence])
    return mine.detach(), gradient, back.detach()


@quick
@given(cases=several(heads))
def test_slices_of_the_sequence_become_heads_and_slices_again(pool: Pool, cases: list[Heads]) -> None:
    for case, found in zip(cases, on_members(pool, there_and_back, cases), strict=True):
        mine, of_x, back = zip(*found, strict=True)
        x, upstream = case.values()
        assert torch.equal(torch.cat(mine, 1), x)
        assert torch.equal(torch.cat(of_x, 2), upstream)
        assert torch.equal(torch.cat(back, 2), x)


# ---- one block ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 1024])
def test_a_block_without_a_kernel_is_computed_in_slices_of_its_queries(causal: bool, rows: int) -> None:
    (q, k, v), _, upstream = Attention(sizes=(7,), heads=(4, 2), widths=(8, 8)).values()
    options = {"causal": causal, "scale": 0.4}
    expected = attention_block.attend(q, k, v, **options)
    with (
        mock.patch.object(attention_block, "_has_kernel", return_value=False),
        mock.patch.object(attention_block, "_ROWS", rows),
    ):
        found = attention_block.attend(q, k, v, **options)
        of_found = attention_block.attend_backward(upstream, q, k, v, *found, **options)
    of_expected = attention_block.attend_backward(upstream, q, k, v, *expected, **options)
    for ours, theirs in zip((*found, *of_found), (*expected, *of_expected), strict=True):
        assert error(ours, theirs) <= BARS[torch.float64]


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(2, 4, 5, 8)
    calls: list[tuple[str, Callable[[], Tensor]]] = [
        ("should be", lambda: context_attention.ring_attention(ALONE, x, x, x, [6], is_causal=True)),
        ("should be", lambda: context_attention.ring_attention(ALONE, x[0], x[0], x[0], [5], is_causal=True)),
        ("heads of", lambda: context_attention.ring_attention(ALONE, x, x[:, :2], x[:, :2], [5], is_causal=True)),
        (
            "not both",
            lambda: context_attention.gathered_attention(
                ALONE, x, x, x, [5], is_causal=True, attn_mask=torch.ones(5, 5, dtype=torch.bool)
            ),
        ),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()
