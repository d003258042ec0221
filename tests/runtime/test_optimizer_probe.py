"""What an optimizer must see at once is found by trying it, and is what a sharded step of a larger weight shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from heterodyne.errors import HeterodyneError
from heterodyne.runtime.weights.optimizer_probe import reach_of


class Lamb(torch.optim.Optimizer):
    """The gradient, scaled so that each weight moves in proportion to its norm."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-float(group["lr"] * p.norm() / p.grad.norm()))


class OneNorm(Lamb):
    """The norm of all gradients together is clipped, above 10."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        held = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(held, 10.0)
        for p in held:
            p.add_(p.grad, alpha=-0.1)


MODEL = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 2))
Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Noisy(torch.optim.SGD):
    """SGD with Langevin's noise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


def matrices(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.1)


@pytest.mark.parametrize(
    ("factory", "reach"),
    [
        (torch.optim.AdamW, "element"),
        (lambda ps: torch.optim.AdamW(ps, fused=True, amsgrad=True), "element"),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), "element"),
        (torch.optim.Adam, "element"),
        (torch.optim.Adamax, "element"),
        (torch.optim.NAdam, "element"),
        (torch.optim.RAdam, "element"),
        (torch.optim.RMSprop, "element"),
        (torch.optim.Rprop, "element"),
        (torch.optim.Adagrad, "element"),
        (torch.optim.Adadelta, "element"),
        (torch.optim.ASGD, "element"),
        (torch.optim.Adafactor, "weight"),
        (matrices, "weight"),
        (Lamb, "weight"),
        (OneNorm, "model"),
    ],
)
def test_the_reach_is_that_of_a_step_of_whole_and_sharded_weights(factory: Factory, reach: str) -> None:
    found, *_ = reach_of(factory, dict(MODEL.named_parameters()))
    assert found == reach
    torch.manual_seed(3)
    weights, gradients = [torch.randn(8, 6), torch.randn(6, 8)], [torch.randn(8, 6), 50 * torch.randn(6, 8)]

    def stepped(held: list[torch.Tensor], of: list[torch.Tensor]) -> list[torch.Tensor]:
        parameters = [nn.Parameter(weight.clone()) for weight in held]
        optimizer = factory(parameters)
        for p, gradient in zip(parameters, of, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        return [p.detach() for p in parameters]

    def near(a: torch.Tensor, b: torch.Tensor) -> bool:
        return torch.allclose(a, b, rtol=1e-5, atol=1e-6)

    together = stepped(weights, gradients)
    alone = [stepped([w], [g])[0] for w, g in zip(weights, gradients, strict=True)]
    assert all(map(near, together, alone)) == (reach != "model")
    sharded = [
        torch.cat([stepped([a], [b])[0] for a, b in zip(w.chunk(2), g.chunk(2), strict=True)])
        for w, g in zip(weights, gradients, strict=True)
    ]
    assert all(map(near, together, sharded)) == (reach == "element")


def test_one_that_wants_a_closure_is_refused_and_one_that_cannot_be_tried_needs_all() -> None:
    parameters = dict(MODEL.named_parameters())
    with pytest.raises(HeterodyneError, match=r"LBFGS evaluates the loss in its step.*no closure"):
        reach_of(torch.optim.LBFGS, parameters)

    class Sharp(torch.optim.SGD):
        """As sharpness-aware ones do it, and says nothing of it when there is none."""

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            closure()
            return super().step()

    with pytest.raises(HeterodyneError, match="Sharp evaluates the loss in its step"):
        reach_of(Sharp, parameters)
    found = reach_of(lambda ps: (_ for _ in ()).throw(ValueError("no")), parameters)
    assert found == ("model", "the optimizer", "on small weights it fails: ValueError: no")


def test_a_factory_that_makes_no_optimizer_is_refused_and_a_rate_that_is_no_number_is_not_noise() -> None:
    parameters = dict(MODEL.named_parameters())
    with pytest.raises(HeterodyneError, match=r"optimizer= gave 3, which has no param_groups.*returns it"):
        reach_of(lambda ps: 3, parameters)  # type: ignore[arg-type,return-value]
    assert reach_of(lambda ps: torch.optim.SGD(ps, lr=float("nan")), parameters)[1] == "SGD"


def test_nothing_of_the_model_or_its_draws_changes_and_few_weights_are_tried() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))
    before = [p.detach().clone() for p in model.parameters()]
    state, made = torch.get_rng_state(), []

    def factory(named_parameters: Any) -> torch.optim.Optimizer:
        made.append(len(list(named_parameters)))
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)

    assert reach_of(factory, dict(model.named_parameters())) == ("element", "SGD", "")
    assert max(made) == 4
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("rate", [0.0, 1e-9, torch.tensor(0.0)])
def test_a_rate_too_small_to_see_hides_nothing(rate: float | torch.Tensor) -> None:
    for kind, reach in ((torch.optim.Adafactor, "weight"), (torch.optim.AdamW, "element")):
        found, *_ = reach_of(lambda ps, kind=kind: kind(ps, lr=rate), dict(MODEL.named_parameters()))
        assert found == reach
    assert float(rate) < 1e-3, "the user's own tensor is left as it is"


def test_one_made_of_other_parameters_is_not_stepped() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    before = model.weight.detach().clone()
    reach, _, why = reach_of(lambda _: torch.optim.SGD(model.parameters(), lr=0.1), dict(MODEL.named_parameters()))
    assert reach == "model"
    assert "other parameters than those it is given" in why
    assert torch.equal(model.weight, before)


def test_one_that_moves_nothing_when_it_is_tried_needs_all() -> None:
    found = reach_of(lambda ps: torch.optim.SGD(ps[:0] or [{"params": []}], lr=0.1), dict(MODEL.named_parameters()))
    assert found == ("model", "SGD", "on small weights it moves none of them")


def test_a_step_that_draws_random_numbers_is_refused() -> None:
    """Each replica of a weight would get other noise."""
    with pytest.raises(HeterodyneError, match="the step of Noisy draws random numbers"):
        reach_of(Noisy, dict(MODEL.named_parameters()))


def test_one_that_keeps_gradients_from_step_to_step_is_refused() -> None:
    """It accumulates: three steps of four do nothing, and leave the gradients where they are."""

    class Fourth(torch.optim.SGD):
        count = 0

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            self.count += 1
            return super().step(closure) if self.count % 4 == 0 else None

        def zero_grad(self, set_to_none: bool = True) -> None:
            if self.count % 4 == 0:
                super().zero_grad(set_to_none)

    with pytest.raises(HeterodyneError, match="the zero_grad of Fourth keeps gradients for the next step"):
        reach_of(lambda ps: Fourth(ps, lr=0.1), dict(MODEL.named_parameters()))


def test_state_that_is_kept_in_blocks_shows_in_a_large_weight() -> None:
    """An 8-bit optimizer quantizes large weights only, a block at a time: shards that cut a block are updated otherwise."""

    class Blocks(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    whole = p.numel() >= 4096 and p.numel() % 256 == 0
                    rows = p.grad.view(-1, 256) if whole else p.grad.view(-1, 1)
                    p.sub_((rows / rows.abs().amax(1, keepdim=True).clamp(min=1e-9)).view_as(p))

    large = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    assert reach_of(Blocks, dict(large.named_parameters()))[0] == "weight"
    assert reach_of(torch.optim.AdamW, dict(large.named_parameters()))[0] == "element"


def test_an_eps_that_the_first_weight_decides_couples_weights_of_several_dtypes() -> None:
    weights = {"a": torch.zeros(3, 4), "b": torch.zeros((), dtype=torch.float64), "c": torch.zeros(4, 2)}
    assert reach_of(lambda p: torch.optim.Adafactor(p), weights)[0] == "model"
    assert reach_of(lambda p: torch.optim.Adafactor(p, eps=(1e-7, 1e-3)), weights)[0] == "weight"
    assert reach_of(lambda p: torch.optim.AdamW(p), weights)[0] == "element"
