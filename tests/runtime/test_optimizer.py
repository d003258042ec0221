"""The rate of each step, and an optimizer's state under names."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from heterodyne.errors import CheckpointError
from heterodyne.job import OptimizerSection
from heterodyne.runtime.weights.optimizer import (
    initialise_state,
    learning_rate,
    load_state_by_name,
    make_optimizer,
    norms_and_biases,
    optimizer_of,
    require_kept_by_name,
    state_by_name,
)

SECTIONS = [OptimizerSection(name="adamw"), OptimizerSection(name="sgd"), OptimizerSection(name="sgd", momentum=0.0)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_warm_up_is_a_straight_line_that_ends_at_the_rate() -> None:
    section = OptimizerSection(lr=0.4, warmup_steps=4)
    assert [learning_rate(section, step, 100) for step in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


def test_the_cosine_goes_from_the_rate_to_its_least() -> None:
    section = OptimizerSection(lr=1.0, warmup_steps=10, min_lr_ratio=0.2)
    rates = [learning_rate(section, step, 111) for step in range(10, 111)]
    assert rates[0] == 1.0
    assert rates[-1] == pytest.approx(0.2)
    assert rates[50] == pytest.approx(0.6)  # half-way
    assert rates == sorted(rates, reverse=True)
    assert rates[25] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert learning_rate(section, 500, 111) == pytest.approx(0.2)


def test_a_constant_rate_stays_after_the_warm_up() -> None:
    section = OptimizerSection(lr=0.3, warmup_steps=2, schedule="constant")
    assert {learning_rate(section, step, 10) for step in range(2, 30)} == {0.3}


def test_a_job_shorter_than_its_warm_up_has_a_rate_at_every_step() -> None:
    section = OptimizerSection(lr=1.0, warmup_steps=10)
    assert all(0 < learning_rate(section, step, 3) <= 1.0 for step in range(12))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: f"{s.name} {s.momentum}")
def test_state_goes_by_name_into_another_optimizer(section: OptimizerSection) -> None:
    model = nn.Linear(4, 2)
    optimizer = make_optimizer(section, dict(model.named_parameters()))
    train(model, optimizer, 3)
    other = copy.deepcopy(model)
    # In another order: names decide.
    parameters = dict(reversed(list(other.named_parameters())))
    taken_over = make_optimizer(section, parameters)
    load_state_by_name(taken_over, parameters, state_by_name(optimizer, dict(model.named_parameters())))
    train(model, optimizer, 2)
    train(other, taken_over, 2)
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


def test_a_state_of_another_model_is_refused() -> None:
    parameters = dict(nn.Linear(4, 2).named_parameters())
    with pytest.raises(CheckpointError, match="body"):
        load_state_by_name(make_optimizer(SECTIONS[0], parameters), parameters, {"body": {}})


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: f"{s.name} {s.momentum}")
def test_making_state_changes_neither_parameters_nor_what_is_there(section: OptimizerSection) -> None:
    model = nn.Linear(4, 2)
    optimizer = make_optimizer(section, dict(model.named_parameters()))
    train(model, optimizer, 2)
    model.extra = nn.Parameter(torch.randn(3))
    optimizer.add_param_group({"params": [model.extra]})
    before = copy.deepcopy(model.state_dict())
    kept = copy.deepcopy(state_by_name(optimizer, {"weight": model.weight}))
    rates = [group["lr"] for group in optimizer.param_groups]
    initialise_state(optimizer)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert all(p.grad is None for p in model.parameters())
    for key, value in kept["weight"].items() if kept else ():
        assert value is None or torch.equal(optimizer.state[model.weight][key], value)
    assert bool(optimizer.state[model.extra]) == bool(section.name == "adamw" or section.momentum)


class Odd(nn.Module):
    """A norm with a matrix, a bias of two dims, a scalar and two plain matrices, one of them tied."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(2, 2))

    def __init__(self) -> None:
        super().__init__()
        self.normed = Odd.Normed()
        self.layer = nn.Linear(4, 2)
        self.experts_bias = nn.Parameter(torch.zeros(2, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.tied = nn.Linear(4, 2, bias=False)
        self.tied.weight = self.layer.weight


def test_norms_biases_and_vectors_are_not_decayed() -> None:
    model = Odd()
    spared = norms_and_biases(model)
    assert spared == {"normed.table", "layer.bias", "experts_bias", "scale"}
    optimizer = make_optimizer(SECTIONS[0], dict(model.named_parameters()), undecayed=spared)
    (first, second) = optimizer.param_groups
    assert [id(p) for p in first["params"]] == [id(model.layer.weight)]
    assert (first["weight_decay"], second["weight_decay"]) == (SECTIONS[0].weight_decay, 0.0)
    assert len(second["params"]) == 4


def test_a_factory_is_given_names_if_it_asks_for_them() -> None:
    parameters = dict(nn.Linear(4, 2).named_parameters())

    def by_name(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": [p for n, p in named_parameters if not n.endswith("bias")]},
                {"params": [p for n, p in named_parameters if n.endswith("bias")], "weight_decay": 0.0},
            ]
        )

    assert [len(group["params"]) for group in optimizer_of(by_name, parameters).param_groups] == [1, 1]
    assert len(optimizer_of(lambda parameters: torch.optim.SGD(parameters, lr=1.0), parameters).param_groups) == 1
    assert optimizer_of(torch.optim.AdamW, parameters).param_groups[0]["params"] == list(parameters.values())


@pytest.mark.parametrize("named", [True, False])
def test_a_rank_without_parameters_has_the_same_groups(named: bool) -> None:
    def by_name(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [p for _, p in named_parameters]}, {"params": [], "lr": 0.5}])

    optimizer = optimizer_of(by_name if named else torch.optim.AdamW, {})
    assert [len(group["params"]) for group in optimizer.param_groups] == ([0, 0] if named else [0])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()


@pytest.mark.parametrize("section", SECTIONS[:2], ids=lambda section: section.name)
def test_a_state_of_other_entries_or_shapes_is_refused(section: OptimizerSection) -> None:
    parameters = {"weight": nn.Parameter(torch.ones(2, 3)), "bias": nn.Parameter(torch.ones(2))}
    optimizer = make_optimizer(section, parameters)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = state_by_name(optimizer, parameters)
    weights = {key: parameter.clone() for key, parameter in parameters.items()}

    other = make_optimizer(section, parameters)
    load_state_by_name(other, parameters, {"bias": state["bias"]})
    assert list(state_by_name(other, parameters)) == ["bias"], "one that was never updated has none"
    load_state_by_name(other, parameters, state)
    assert all(torch.equal(parameter, weights[key]) for key, parameter in parameters.items())
    for key in state["weight"]:
        without = {entry: value for entry, value in state["weight"].items() if entry != key}
        changes = [without, {**state["weight"], key: torch.ones(7)}, {**state["weight"], key: "text"}]
        if isinstance(state["weight"][key], torch.Tensor):
            for change in changes:
                with pytest.raises(CheckpointError, match="the optimizer's state of weight is"):
                    load_state_by_name(other, parameters, {**state, "weight": change})
    with pytest.raises(CheckpointError, match="the optimizer's state of weight is"):
        load_state_by_name(other, parameters, {**state, "weight": {**state["weight"], "more": torch.ones(())}})


class Lookahead(torch.optim.SGD):
    """Keeps slow weights beside the state of parameters (Zhang et al., 2019)."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"slow": [torch.zeros(2)]}


def test_state_beside_that_of_parameters_is_refused_before_it_is_lost() -> None:
    held = [nn.Parameter(torch.ones(2))]
    with pytest.raises(CheckpointError, match=r"Lookahead.*slow.*optimizer.state"):
        require_kept_by_name(Lookahead(held))
    plain = torch.optim.SGD(held)
    require_kept_by_name(plain)
    plain.register_state_dict_post_hook(lambda _, state: state | {"slow": 1})
    with pytest.raises(CheckpointError, match="slow"):
        require_kept_by_name(plain)
