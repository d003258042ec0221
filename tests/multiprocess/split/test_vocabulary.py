"""Embedding, softmax and cross entropy over an unequally cut vocabulary are those of one device: values and gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from heterodyne.errors import PlanError
from heterodyne.runtime.split import vocabulary
from heterodyne.runtime.split.group import Group
from multiprocess.pool import Pool
from multiprocess.split.members import Counting, error, on_members, quick, several

ALONE = Group(None, 0, 1)
BARS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def sizes_of(members: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, 6), min_size=members, max_size=members).filter(lambda s: sum(s) > 1).map(tuple)


# ---- embedding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of each member, the shape of the ids, the row of padding or -1."""

    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    padding: int = -1
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def values(self) -> tuple[Tensor, Tensor, Tensor]:
        """ids, weight [V, 3], and what weighs the outputs."""
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(sum(self.sizes), self.shape, generator=generator)
        weight = torch.randn(sum(self.sizes), 3, generator=generator, dtype=torch.float64).to(self.dtype)
        upstream = torch.randn(*self.shape, 3, generator=generator, dtype=torch.float64).to(self.dtype)
        return ids, weight, upstream


@st.composite
def tables(draw: st.DrawFn, members: int) -> Table:
    sizes = draw(sizes_of(members))
    return Table(
        sizes=sizes,
        shape=tuple(draw(st.lists(st.integers(0, 5), max_size=3))),
        padding=draw(st.integers(-1, sum(sizes) - 1)),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        seed=draw(st.integers(0, 99)),
    )


def rows_of_a_table(group: Counting, case: Table) -> tuple[Tensor, Tensor]:
    ids, weight, upstream = case.values()
    part = weight[slice(*group.bounds(case.sizes))].clone().requires_grad_()
    rows = vocabulary.embedding(group, ids, part, case.sizes, padding_idx=case.padding)
    rows.backward(upstream)
    assert group.exchanges == 0
    assert part.grad is not None
    return rows.detach(), part.grad


@quick
@given(cases=several(tables))
def test_an_embedding_cut_along_the_vocabulary(pool: Pool, cases: list[Table]) -> None:
    for case, found in zip(cases, on_members(pool, rows_of_a_table, cases), strict=True):
        ids, weight, upstream = case.values()
        expected = F.embedding(ids, weight.requires_grad_(), None if case.padding < 0 else case.padding)
        expected.backward(upstream)
        assert torch.equal(torch.stack([rows for rows, _ in found]).sum(0), expected)
        for (rows, _), (first, stop) in zip(found, pairwise(accumulate(case.sizes, initial=0)), strict=True):
            assert not rows[(ids < first) | (ids >= stop)].any()
        assert weight.grad is not None
        assert error(torch.cat([gradient for _, gradient in found]), weight.grad) <= BARS[case.dtype]


def test_an_id_that_no_table_has_is_refused_as_on_one_device() -> None:
    for wrong in (7, -1):
        with pytest.raises(IndexError):
            vocabulary.embedding(ALONE, torch.tensor([0, wrong]), torch.zeros(7, 2), [7])


def test_gradients_that_cannot_be_cut_are_refused() -> None:
    for wrong in ("sparse", "scale_grad_by_freq"):
        with pytest.raises(PlanError, match="cannot be cut along its vocabulary"):
            vocabulary.embedding(ALONE, torch.tensor([0]), torch.zeros(7, 2), [7], **{wrong: True})


# ---- cross entropy -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Classes of each member; the shape of the labels, and the options of `cross_entropy`."""

    sizes: tuple[int, ...]
    shape: tuple[int, ...] = (5,)
    options: tuple[tuple[str, Any], ...] = ()
    weighted: bool = False
    ignored: float = 0.3
    offset: float = 0.0
    hidden: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def dim(self) -> int:
        return 1 if self.shape else 0

    def values(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Logits [N, C, ...], labels [N, ...], weights [C], and what weighs the losses."""
        generator = torch.Generator().manual_seed(self.seed)
        classes = sum(self.sizes)
        shape = (*self.shape[:1], classes, *self.shape[1:])
        logits = 3 * torch.randn(shape, generator=generator, dtype=torch.float64) + self.offset
        target = torch.randint(classes, self.shape, generator=generator)
        if self.hidden:  # a class that is never the label, as a mask has it
            logits.select(self.dim, 0).fill_(-torch.inf)
            target.clamp_(min=1)
        target[torch.rand(self.shape, generator=generator) < self.ignored] = -100
        weight = torch.rand(classes, generator=generator, dtype=torch.float64).to(self.dtype) if self.weighted else None
        upstream = torch.randn(self.shape, generator=generator, dtype=torch.float64).to(self.dtype)
        return logits.to(self.dtype), target, weight, upstream

    def part(self, group: Group, logits: Tensor) -> Tensor:
        first, stop = group.bounds(self.sizes)
        return logits.narrow(self.dim, first, stop - first).clone().requires_grad_()


@st.composite
def batches(draw: st.DrawFn, members: int) -> Rows:
    return Rows(
        sizes=draw(sizes_of(members)),
        shape=tuple(draw(st.lists(st.integers(1, 4), max_size=3))),
        options=(
            ("reduction", draw(st.sampled_from(["mean", "sum", "none"]))),
            ("label_smoothing", draw(st.sampled_from([0.0, 0.1, 1.0]))),
        ),
        weighted=draw(st.booleans()),
        ignored=draw(st.sampled_from([0.0, 0.3, 1.0])),
        offset=draw(st.sampled_from([0.0, -50.0, 300.0])),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        seed=draw(st.integers(0, 99)),
    )


def losses_of(group: Counting, case: Rows) -> tuple[Tensor, Tensor]:
    logits, target, weight, upstream = case.values()
    part = case.part(group, logits)
    loss = vocabulary.cross_entropy(group, part, target, case.sizes, weight, **dict(case.options))
    assert group.sent <= 4 * target.numel() * (group.size - 1), "never the logits"
    loss.backward(upstream if loss.dim() else upstream.new_ones(()))
    assert group.exchanges == 1, "the backward communicates nothing"
    assert part.grad is not None
    return loss.detach(), part.grad


def on_one_device(case: Rows) -> tuple[Tensor, Tensor]:
    logits, target, weight, upstream = case.values()
    logits.requires_grad_()
    loss = F.cross_entropy(logits, target, weight, **dict(case.options))
    loss.backward(upstream if loss.dim() else upstream.new_ones(()))
    assert logits.grad is not None
    return loss.detach(), logits.grad


SMOOTHED = (("label_smoothing", 0.2),)
EDGES = [
    Rows(sizes=(3, 0, 2), ignored=1.0),
    Rows(sizes=(3, 0, 2), ignored=1.0, weighted=True, options=SMOOTHED),
    Rows(sizes=(1, 0, 4), hidden=True),  # one member sees nothing but -inf
    Rows(sizes=(2, 3, 0), hidden=True, dtype=torch.float32),
    Rows(sizes=(2, 3, 1), offset=1e4, options=SMOOTHED),
]


@quick
@given(cases=several(batches))
@example(cases=EDGES)
def test_a_cross_entropy_cut_along_the_classes(pool: Pool, cases: list[Rows]) -> None:
    for case, found in zip(cases, on_members(pool, losses_of, cases), strict=True):
        loss, gradient = on_one_device(case)
        assert all(torch.equal(part.nan_to_num(), found[0][0].nan_to_num()) for part, _ in found), "the same bits"
        assert error(found[0][0], loss) <= BARS[case.dtype]
        assert error(torch.cat([part for _, part in found], case.dim), gradient) <= BARS[case.dtype]


def test_half_precision_is_computed_in_single(pool: Pool) -> None:
    halves = [(dtype, options) for dtype in (torch.bfloat16, torch.float16) for options in ((), SMOOTHED)]
    cases = [Rows(sizes=(4, 1, 6), shape=(6,), options=options, dtype=dtype) for dtype, options in halves]
    for case, found in zip(cases, on_members(pool, losses_of, cases), strict=True):
        logits, target, _, _ = case.values()
        wide = logits.float().requires_grad_()
        exact = F.cross_entropy(wide, target, **dict(case.options))
        exact.backward()
        assert found[0][0].dtype is F.cross_entropy(logits, target).dtype is case.dtype
        assert error(found[0][0], exact.detach()) <= BARS[case.dtype]
        assert wide.grad is not None
        assert error(torch.cat([part for _, part in found], 1), wide.grad) <= BARS[case.dtype]


def test_under_autocast_the_loss_is_in_single_precision_as_on_one_device() -> None:
    logits, target, _, _ = replace(Rows(sizes=(7,)), dtype=torch.bfloat16).values()
    with torch.autocast("cpu", torch.bfloat16):
        found = vocabulary.cross_entropy(ALONE, logits, target, [7])
        expected = F.cross_entropy(logits, target)
        ours, theirs = vocabulary.softmax(ALONE, logits, 1, [7]), logits.softmax(1)
    assert found.dtype is expected.dtype is torch.float32
    assert error(found, expected) <= 1e-6
    assert ours.dtype is theirs.dtype


def test_kept_for_the_backward_are_the_logits_and_a_few_numbers_a_row() -> None:
    rows, classes = 16, 1000
    logits = torch.randn(rows, classes, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        vocabulary.cross_entropy(ALONE, logits, torch.zeros(rows, dtype=torch.long), [classes], label_smoothing=0.1)
    assert kept.pop(logits.data_ptr()) == rows * classes
    assert sum(kept.values()) <= 10 * rows


def test_what_does_not_fit_is_refused() -> None:
    logits = torch.zeros(4, 7)
    with pytest.raises(PlanError, match="probabilities"):
        vocabulary.cross_entropy(ALONE, logits, torch.zeros(4, 7), [7])
    with pytest.raises(ValueError, match=r"must have the shape \(4,\)"):
        vocabulary.cross_entropy(ALONE, logits, torch.zeros(5, dtype=torch.long), [7])
    with pytest.raises(ValueError, match="6 classes here"):
        vocabulary.cross_entropy(ALONE, logits, torch.zeros(4, dtype=torch.long), [6])
    with pytest.raises(ValueError, match="not one of mean, sum, none"):
        vocabulary.cross_entropy(ALONE, logits, torch.zeros(4, dtype=torch.long), [7], reduction="median")  # type: ignore[arg-type]
    for label in (7, -1):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            vocabulary.cross_entropy(ALONE, logits, torch.full((4,), label), [7])


# ---- softmax -----------------------------------------------------------------------------------------------------------

OPS = {
    "softmax": (vocabulary.softmax, torch.softmax),
    "log_softmax": (vocabulary.log_softmax, torch.log_softmax),
}


@dataclass(frozen=True, kw_only=True)
class Scores:
    """A tensor [2, sum of sizes, 3] that is cut along dim 1, or [3, 2, sum of sizes] along the last one."""

    op: str
    sizes: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    seed: int

    def values(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (2, sum(self.sizes), 3) if self.dim == 1 else (3, 2, sum(self.sizes))
        x, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for _ in range(2))
        return x * 5, upstream


@st.composite
def scores(draw: st.DrawFn, members: int) -> Scores:
    return Scores(
        op=draw(st.sampled_from(sorted(OPS))),
        sizes=draw(sizes_of(members)),
        dim=draw(st.sampled_from([1, -1])),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        seed=draw(st.integers(0, 99)),
    )


def results_of(group: Counting, case: Scores) -> tuple[Tensor, Tensor]:
    x, upstream = case.values()
    first, stop = group.bounds(case.sizes)
    part = x.narrow(case.dim, first, stop - first).clone().requires_grad_()
    result = OPS[case.op][0](group, part, case.dim, case.sizes)
    result.backward(upstream.narrow(case.dim, first, stop - first))
    assert part.grad is not None
    return result.detach(), part.grad


@quick
@given(cases=several(scores))
def test_a_softmax_cut_along_its_dim(pool: Pool, cases: list[Scores]) -> None:
    for case, found in zip(cases, on_members(pool, results_of, cases), strict=True):
        x, upstream = case.values()
        expected = OPS[case.op][1](x.requires_grad_(), case.dim)
        expected.backward(upstream)
        results = [result for result, _ in found]
        whole = torch.cat(results, case.dim)
        assert error(whole, expected.detach()) <= BARS[case.dtype]
        assert x.grad is not None
        assert error(torch.cat([part for _, part in found], case.dim), x.grad) <= BARS[case.dtype]


def test_infinities_are_those_of_one_device() -> None:
    x = torch.tensor([[-torch.inf, -torch.inf], [-torch.inf, 1.0], [torch.inf, 1.0]])
    for ours, theirs in OPS.values():
        assert torch.equal(ours(ALONE, x, 1, [2]).nan_to_num(7.0), theirs(x, 1).nan_to_num(7.0))
