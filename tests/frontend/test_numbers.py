"""Numbers that change during a run are inputs of the graph, which holds for the values by which Python decides alike."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from heterodyne.frontend import trace
from heterodyne.frontend.trace import Captured

BATCH = {"x": torch.randn(4, 3)}


class Weighed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.beta, self.how = nn.Linear(3, 3), 0.5, how

    def forward(self, x: Tensor) -> Tensor:
        loss = self.linear(x).square().mean()
        penalty = self.linear(x).abs().mean()
        if self.how == "if":
            return loss + self.beta * penalty if self.beta > 0.1 else loss
        if self.how == "rest":
            return (1 - self.beta) * loss + penalty * min(self.beta, 0.8)
        if self.how == "exp":
            return loss + math.exp(self.beta) * penalty
        if self.how == "kind":
            return loss + penalty / self.beta if isinstance(self.beta, float) else loss
        return nn.functional.dropout(self.linear(x), self.beta).square().mean()


def captured(how: str) -> Captured:
    model = Weighed(how)
    return trace(model, BATCH).again(model, numbers=["beta"])


@pytest.mark.parametrize(
    ("how", "holds", "not_for"),
    [
        ("if", [0.5, 0.11, 7.0, 3], [0.1, 0.0, -2.0, float("nan")]),
        ("rest", [0.5, 0.0, 0.79, -4.0], [0.81, 2.0]),
        ("exp", [0.5], [0.51]),
        ("kind", [0.5, 0.25], [1]),
    ],
)
def test_a_graph_holds_where_python_decides_alike(how: str, holds: list[float], not_for: list[float]) -> None:
    numbers = captured(how).numbers
    assert numbers.names == ("beta",)
    assert [value for value in holds if type(value) is float and not numbers.hold({"beta": value})] == []
    assert [value for value in not_for if numbers.hold({"beta": value})] == []


def test_what_is_computed_of_it_is_computed_again() -> None:
    given = captured("rest").numbers.tensors({"beta": 0.25})
    assert sorted(value.item() for value in given.values()) == [0.25, 0.75]


def test_what_cannot_be_an_input_is_a_constant() -> None:
    assert captured("dropout").numbers.names == ()
