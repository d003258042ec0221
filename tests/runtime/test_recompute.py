"""What is computed again is what was computed before, when it is asked for or before."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.errors import HeterodyneError
from heterodyne.runtime.stages.recompute import Recomputation


class Block:
    """Counts its runs, and draws."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        self.runs = 0

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.runs += 1
        return {"y": F.dropout(self.layers(values["x"]), 0.5)}


def gradients(block: Block, *, again: bool, ahead: bool = False) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(3, 4, requires_grad=True)
    if again:
        recomputation = Recomputation(block, {"x": x}, nullcontext)
        y = recomputation.first()["y"]
        torch.rand(7)  # whatever else draws in between
        if ahead:
            recomputation.now()
            recomputation.now()
    else:
        y = block({"x": x})["y"]
    weights = list(block.layers.parameters())
    return list(torch.autograd.grad(y.square().sum(), [x, *weights]))


@pytest.mark.parametrize("ahead", [True, False])
def test_gradients_are_those_of_one_run_bit_for_bit(ahead: bool) -> None:
    expected = gradients(Block(), again=False)
    block = Block()
    assert all(torch.equal(a, b) for a, b in zip(gradients(block, again=True, ahead=ahead), expected, strict=True))
    assert block.runs == 2


@pytest.mark.parametrize("ahead", [True, False])
def test_nothing_of_the_second_run_stays(ahead: bool) -> None:
    """An op that keeps its output (sigmoid) must not hold itself through what is kept in its place."""

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    def once() -> None:
        x = torch.randn(3, 4, requires_grad=True)
        recomputation = Recomputation(lambda values: {"y": values["x"].exp().sigmoid()}, {"x": x}, nullcontext)
        y = recomputation.first()["y"]
        if ahead:
            recomputation.now()
        y.sum().backward()

    once()
    before = alive()
    once()
    assert alive() == before


def test_nothing_in_between_is_kept() -> None:
    kept = []
    block = Block()
    x = torch.randn(3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape), lambda _: None):
        Recomputation(block, {"x": x}, nullcontext).first()
    assert kept == []


def test_what_a_block_keeps_goes_before_the_block_ahead_of_it_is_run_again() -> None:
    """Else the blocks of a stage would be there all at once in its backward, as if nothing were computed again."""

    def inner() -> int:
        gc.collect()
        return sum(isinstance(t, Tensor) and t.shape == (3, 16) for t in gc.get_objects())

    first, second = Block(), Block()
    before, x = inner(), torch.randn(3, 4, requires_grad=True)
    recomputations = [Recomputation(first, {"x": x}, nullcontext)]
    between = recomputations[0].first()["y"]
    recomputations.append(Recomputation(second, {"x": between}, nullcontext))
    y = recomputations[1].first()["y"]
    seen: list[tuple[int, int]] = []
    between.register_hook(lambda _: seen.append((first.runs, inner() - before)))
    y.square().sum().backward()
    assert seen == [(1, 0)]
    assert (first.runs, second.runs) == (2, 2)


def test_torchs_generator_is_left_as_it_was() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    recomputation = Recomputation(Block(), {"x": x}, nullcontext)
    recomputation.first()
    before = torch.get_rng_state()
    recomputation.now()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_part_that_goes_another_way_the_second_time_is_told() -> None:
    block = Block()

    def fickle(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        y = block(values)["y"]
        return {"y": y if block.runs == 1 else torch.tanh(y)}

    x = torch.randn(3, 4, requires_grad=True)
    y = Recomputation(fickle, {"x": x}, nullcontext).first()["y"]
    with pytest.raises(HeterodyneError, match="goes another way each time"):
        y.sum().backward()
