"""Weights that are predicted with all gradients at hand are those that the optimizer makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from heterodyne.errors import PlanError
from heterodyne.runtime.weights.parameter_groups import options_of
from heterodyne.runtime.weights.predicted import PredictedWeights, require_moments

Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True, maximize=True),
    "adam with decay": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_prediction_by_all_gradients_is_the_update(make: Make) -> None:
    """From the first step on, also where gradients of a half are there, whose mean is that of the whole."""
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    parameters = dict(module.named_parameters())
    optimizer = make(module.parameters())
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    predicted = PredictedWeights(module, parameters, parameters, lambda: gradients, optimizer)
    for step in range(4):
        for name, parameter in parameters.items():
            parameter.grad = torch.randn_like(parameter)
            gradients[name] = parameter.grad / 2
        predicted.predict(step, [options_of(group) for group in optimizer.param_groups], 0.5)
        with predicted.in_place(step):
            seen = {name: p.detach().clone() for name, p in (("weight", module.weight), ("bias", module.bias))}
            assert all(seen[name].data_ptr() != p.data_ptr() for name, p in parameters.items())
        predicted.release(step)
        optimizer.step()
        assert module.weight is parameters["weight"]
        for name, parameter in parameters.items():
            torch.testing.assert_close(seen[name], parameter.detach(), rtol=1e-5, atol=1e-7)


def test_gradients_at_predicted_weights_are_those_of_the_parameters() -> None:
    module = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.5)
    parameters = dict(module.named_parameters())
    predicted = PredictedWeights(module, parameters, parameters, lambda: {"weight": torch.ones(1, 4)}, optimizer)
    predicted.predict(0, [options_of(group) for group in optimizer.param_groups], 1.0)
    with predicted.in_place(0):
        loss = module(torch.ones(1, 4)).square().sum()
    loss.backward()
    expected = 2 * (module.weight.detach() - 1).sum()
    assert module.weight.grad is not None
    torch.testing.assert_close(module.weight.grad, expected.expand(1, 4))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (partial(torch.optim.SGD, lr=0.1), "weights are not predicted for SGD without momentum"),
        (partial(torch.optim.Adagrad, lr=0.1), "weights are not predicted for Adagrad"),
    ],
)
def test_an_optimizer_without_moments_is_refused(make: Make, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        require_moments(make(nn.Linear(2, 2).parameters()))
