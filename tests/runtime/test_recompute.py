"""What is computed again is what was computed before, when it is asked for or before."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from heterodyne.errors import HeterodyneError
from heterodyne.runtime.stages.kept_outputs import KeptOutputs
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


@pytest.mark.tour("runtime/stages/")
@pytest.mark.parametrize("ahead", [True, False])
def test_gradients_are_those_of_one_run_bit_for_bit(ahead: bool) -> None:
    """Though the second run ends as soon as it has made what is needed."""
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
        return block({"x": values["x"][: 3 if block.runs == 0 else 2]})

    x = torch.randn(3, 4, requires_grad=True)
    y = Recomputation(fickle, {"x": x}, nullcontext).first()["y"]
    with pytest.raises(HeterodyneError, match="goes another way each time"):
        y.sum().backward()


class Counted(TorchDispatchMode):
    """Counts what is computed below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def noted(kept: KeptOutputs | None, layer: nn.Module, x: Tensor) -> Tensor:
    """A layer that keeps what it makes, as a stage runs it."""
    if kept is None:
        return layer(x)
    kept.begin()
    try:
        return layer(x)
    finally:
        kept.end()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_what_an_op_has_kept_is_not_computed_again(precision: torch.dtype) -> None:
    """Of three products the first is kept; the last is behind all that a backward needs. In between they are all normal, and exact."""
    torch.manual_seed(0)
    first, second, third = (nn.Linear(8, 8) for _ in range(3))

    def run(kept: KeptOutputs | None, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        hidden = noted(kept, first, values["x"])
        return {"y": third(F.dropout(F.gelu(second(F.gelu(hidden)))))}

    def around() -> AbstractContextManager[object]:
        return nullcontext() if precision is torch.float32 else torch.autocast("cpu", precision)

    def found(kept: KeptOutputs | None) -> tuple[list[Tensor], Counter[str]]:
        torch.manual_seed(1)
        x = torch.randn(4, 8, requires_grad=True)
        recomputation = Recomputation(partial(run, kept), {"x": x}, around, kept=kept)
        with around():
            y = recomputation.first()["y"]
        with Counted() as second_run:
            recomputation.now()
        weights = [w for layer in (first, second, third) for w in layer.parameters()]
        return list(torch.autograd.grad(y.float().square().sum(), [x, *weights])), second_run.counts

    plain, all_again = found(None)
    kept, some_again = found(KeptOutputs())
    assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))
    assert (all_again["addmm"], some_again["addmm"]) == (2, 1)
    assert all_again["gelu"] == some_again["gelu"] == 2


def test_what_is_kept_goes_with_the_second_run() -> None:
    def alive() -> int:
        gc.collect()
        return sum(isinstance(t, Tensor) and t.shape == (3, 17) for t in gc.get_objects())

    kept, wide = KeptOutputs(), nn.Linear(4, 17)

    def run(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        hidden = noted(kept, wide, values["x"])
        return {"y": hidden.sum(1)}  # which needs nothing of it

    recomputation = Recomputation(run, {"x": torch.randn(3, 4)}, nullcontext, kept=kept)
    y = recomputation.first()["y"]
    assert alive() == 1
    y.sum().backward()
    assert alive() == 0


def test_in_parts_it_begins_with_its_backward_also_where_nothing_was_kept() -> None:
    """Others wait in the second run for a device without samples, which asks for nothing that was kept."""
    order = []

    class Told(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            order.append("forward")
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            order.append("backward")
            return gradients[0] * 2

    x = torch.ones(3, requires_grad=True)
    made = Recomputation(lambda values: {"y": Told.apply(values["x"])}, {"x": x}, nullcontext, to_end=True).first()  # type: ignore[no-untyped-call]
    made["y"].sum().backward()
    assert order == ["forward", "forward", "backward"]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full((3,), 2.0))
