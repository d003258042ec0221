"""Weights that are changed between two steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from heterodyne.errors import PlanError
from heterodyne.runtime.weights.between_steps import WeightWatch, require_alike, sample_of
from heterodyne.runtime.weights.masters import MasterWeights


def _held(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "w": torch.randn(40, 30).to(dtype),
        "scale": torch.tensor(2.0),
        "none": torch.empty(0),
        "ids": torch.arange(5),
    }


def _samples(*held: dict[str, Tensor]) -> list[dict[tuple[str, tuple[()]], tuple[float, ...]]]:
    return [dict(sample_of({(name, ()): tensor for name, tensor in of.items()})) for of in held]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("w", lambda w: w.clamp_(-0.1, 0.1)),
        ("w", lambda w: w.add_(torch.randn(40, 30), alpha=0.01)),
        ("w", lambda w: w.mul_(torch.nan)),
        ("scale", lambda scale: scale.clamp_(max=1.0)),
        ("ids", lambda ids: ids.flip(0)),
    ],
)
def test_what_one_rank_has_otherwise_is_told(name: str, change: Callable[[Tensor], Tensor]) -> None:
    one, other = _held(), _held()
    other[name] = change(other[name])
    with pytest.raises(PlanError, match=f"before step 3 {name!r} has other values on rank 2 than on rank 0"):
        require_alike(_samples(one, {}, other), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_other_value(dtype: torch.dtype) -> None:
    one, other = _held(dtype), _held(dtype)
    other["w"].mul_(1 + torch.finfo(dtype).eps)
    require_alike(_samples(one, other), 0)


@pytest.mark.parametrize(
    ("look", "change"),
    [
        (False, lambda w: w.detach().mul_(0.9)),
        (False, lambda w: setattr(w, "data", w.data.clone())),
        (True, lambda w: w.data.mul_(0.9)),
    ],
)
def test_a_weight_in_parts_is_left_as_it_is(look: bool, change: Callable[[nn.Parameter], object]) -> None:
    weight = nn.Parameter(torch.randn(4, 3))
    parts = WeightWatch({"w": weight}, {})
    parts.leave(look=look)
    parts.require_as_left()
    change(weight)
    with pytest.raises(PlanError, match=r"'w' was changed between two steps, and .* has a part of it"):
        parts.require_as_left()
    parts.leave(look=look)
    parts.require_as_left()


def test_what_is_written_to_a_copy_past_autograd_is_told() -> None:
    """It would be overwritten; what autograd counts, or lies elsewhere, is taken over."""
    weight = nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16))
    masters = MasterWeights({"w": weight})
    parts = WeightWatch({}, masters.copies)
    for change in (lambda w: w.detach().mul_(0.9), lambda w: setattr(w, "data", w.data.clone())):
        parts.leave(look=True)
        change(weight)
        parts.require_as_left()
    parts.leave(look=True)
    weight.data.clamp_(-0.1, 0.1)
    with pytest.raises(PlanError, match=r"'w' was written to through \.data between two steps"):
        parts.require_as_left()
