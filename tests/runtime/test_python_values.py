"""Plain Python values of a model are as they were captured, or told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from heterodyne.errors import PlanError
from heterodyne.runtime.stages.python_values import PythonValues

WEIGHT = [1.0]


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.1)
        self.beta, self.epoch = 0.0, 0
        self.config = SimpleNamespace(scale=2.0)
        self.register_buffer("temperature", torch.tensor(1.0))
        floor = 0.5
        self.loss_fn = lambda x: (x * WEIGHT[0]).clamp(min=floor)

    def counted(self) -> None:
        self.epoch += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.loss_fn(self.drop(self.linear(x)) * self.beta * self.config.scale / self.temperature).sum()


def _weigh(_: Annealed) -> None:
    WEIGHT[0] += 1.0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: setattr(model, "beta", 0.5), "'beta' was 0.0 .* and is 0.5"),
        (lambda model: setattr(model.config, "scale", 3), "'config'.scale was 2.0"),
        (lambda model: setattr(model.drop, "p", 0.0), "'drop.p' was 0.1"),
        (lambda model: model.eval(), "'drop.training' was True .* and is False"),
        (_weigh, r"'WEIGHT' \(read by 'loss_fn'\)"),
    ],
)
def test_what_the_graph_has_as_a_number_may_not_change(change: Callable[[Annealed], None], told: str) -> None:
    model = Annealed()
    values = PythonValues(model)
    values.require_unchanged()
    change(model)
    with pytest.raises(PlanError, match=told):
        values.require_unchanged()


def test_what_forward_does_not_read_may_change() -> None:
    model = Annealed()
    values = PythonValues(model)
    model.counted()
    model.temperature = torch.tensor(0.5)
    model.linear.eval()
    values.require_unchanged()
