"""Both halves of a backward together are the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from heterodyne import products
from heterodyne.runtime.stages.deferred import DeferredWeights


class Model(nn.Module):
    """Linear layers with and without bias, a transposed one, one that is used twice, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.twice = nn.Linear(8, 8, bias=False)
        self.transposed = nn.Parameter(torch.randn(8, 8))
        self.offset = nn.Parameter(torch.randn(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """As the graph of a stage calls them."""
        hidden = self.norm(products.linear(x, self.first.weight, self.first.bias).relu_())
        hidden = products.linear(torch.tanh(products.linear(hidden, self.twice.weight)), self.twice.weight)
        flat = products.addmm(self.offset, hidden.reshape(-1, 8), self.transposed)
        return products.linear(flat, self.frozen.weight, self.frozen.bias).square().mean()


def whole(precision: torch.dtype | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    model, x = Model(), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.autocast("cpu", precision, enabled=precision is not None):
        model(x).backward()
    assert x.grad is not None
    return x.grad, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.tour("products.py")
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_the_first_half_gives_the_inputs_and_the_second_the_weights(precision: torch.dtype | None) -> None:
    expected_input, expected = whole(precision)
    model, x = Model(), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    deferred = DeferredWeights()
    with torch.autocast("cpu", precision, enabled=precision is not None), deferred:
        loss = model(x)
    loss.backward()
    torch.testing.assert_close(x.grad, expected_input)
    assert model.first.weight.grad is None
    assert model.transposed.grad is None
    assert model.norm.weight.grad is not None, "what is no product is done in the first half"
    deferred.run()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    tolerance = {} if precision is None else {"rtol": 0.02, "atol": 0.02}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, **tolerance)


class Home:
    """Gradients side by side in one tensor, as a bucket has them."""

    def __init__(self, model: nn.Module) -> None:
        self.places = {id(p): torch.full_like(p, torch.nan) for p in model.parameters()}
        self.seen: list[int] = []

    def place(self, parameter: Tensor) -> Tensor | None:
        return self.places[id(parameter)]

    def added(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.seen.append(id(parameter))


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_the_second_half_writes_into_the_place_of_a_gradient_and_adds_to_what_is_there(
    precision: torch.dtype | None,
) -> None:
    _, expected = whole(precision)
    model, x = Model(), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    home = Home(model)
    for times in (1, 2):
        deferred = DeferredWeights(home)
        with torch.autocast("cpu", precision, enabled=precision is not None), deferred:
            loss = model(x)
        loss.backward()
        deferred.run()
        tolerance = {} if precision is None else {"rtol": 0.02, "atol": 0.02 * times}
        for name in ("first.weight", "first.bias", "twice.weight", "transposed", "offset"):
            parameter = model.get_parameter(name)
            assert parameter.grad is home.places[id(parameter)]
            torch.testing.assert_close(parameter.grad, times * expected[name], **tolerance)
    assert home.seen.count(id(model.first.weight)) == 2
    assert home.seen.count(id(model.twice.weight)) == 4, "it is used twice in each"


def test_without_gradients_nothing_is_deferred() -> None:
    model, deferred = Model(), DeferredWeights()
    with deferred, torch.no_grad():
        assert not model(torch.randn(2, 3, 4)).requires_grad
    assert deferred._later == []
