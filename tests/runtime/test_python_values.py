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
MARGIN = 0.25
ARGUMENTS = SimpleNamespace(smoothing=0.1)


def _above(x: Tensor) -> Tensor:
    return x - MARGIN * ARGUMENTS.smoothing


class Charbonnier:
    """A loss that is neither a function nor a module."""

    def __init__(self) -> None:
        self.eps = 1e-3

    def __call__(self, x: Tensor) -> Tensor:
        return (x.square() + self.eps**2).sqrt()


class Annealed(nn.Module):
    ramp = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.1)
        self.beta, self.epoch = 0.0, 0
        self._power, self._made, self.criterion = 1.0, None, Charbonnier()
        self.prior, self.table, self.act = torch.tensor([0.5, 0.5]), [torch.ones(2)], torch.tanh
        self.config = SimpleNamespace(scale=2.0, loss=SimpleNamespace(scale=1.0))
        self.register_buffer("temperature", torch.tensor(1.0))
        floor = 0.5
        self.loss_fn = lambda x: (x * WEIGHT[0]).clamp(min=floor)

    def counted(self) -> None:
        self.epoch += 1

    def forward(self, x: Tensor) -> Tensor:
        self._made = x.mean()
        hidden = self.act(self.drop(self.linear(x)) * self.ramp * self.prior + self.table[0]) ** self._power
        hidden = self.criterion(_above(hidden)) * self.config.loss.scale
        return self.loss_fn(hidden * self.beta * self.config.scale / self.temperature).sum()


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
        (lambda model: setattr(model, "_power", 2.0), "'_power' was 1.0"),
        (lambda model: setattr(model, "ramp", 0.5), "'ramp' was 1.0"),
        (lambda model: setattr(model, "act", torch.relu), "'act' was .*tanh"),
        (lambda model: setattr(model, "prior", torch.ones(2)), "'prior' was"),
        (lambda model: model.prior.mul_(0.9), "'prior' was"),
        (lambda model: model.table[0].data.fill_(0.0), "'table' was"),
        (lambda model: setattr(model.config.loss, "scale", 0.5), "'config'.loss.scale was 1.0"),
        (lambda model: setattr(model.criterion, "eps", 0.1), "'criterion'.eps was 0.001"),
        (
            lambda model: model.linear.register_forward_hook(lambda *_: None),
            "'linear._forward_hooks' was 0 .* and is 1",
        ),
        (lambda _: globals().update(MARGIN=MARGIN + 1), r"'MARGIN' \(read by _above\)"),
        (
            lambda _: setattr(ARGUMENTS, "smoothing", ARGUMENTS.smoothing + 1),
            r"'ARGUMENTS' \(read by _above\).smoothing",
        ),
        (lambda _: setattr(Annealed, "ramp", Annealed.ramp + 1), "'ramp' was"),
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
    model._made = torch.zeros(())
    model.temperature = torch.tensor(0.5)
    model.linear.eval()
    values.require_unchanged()
