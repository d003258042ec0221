"""Groups are those that a factory makes of the model's own parameters, whatever is updated in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from heterodyne.errors import CheckpointError
from heterodyne.runtime.weights.optimizer import optimizer_of
from heterodyne.runtime.weights.parameter_groups import load_options, options_by_name

MODEL = nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Linear(6, 2)})
WHOLE = dict(MODEL.named_parameters())
SHARDS = {name: nn.Parameter(p.detach().reshape(-1)[:2]) for name, p in WHOLE.items() if name != "b.bias"}


def by_identity(parameters: Any) -> torch.optim.Optimizer:
    special = {id(p) for p in MODEL["a"].parameters()}
    held = list(parameters)
    groups = [[p for p in held if id(p) in special], [p for p in held if id(p) not in special]]
    return torch.optim.SGD([{"params": groups[0], "lr": 0.1}, {"params": groups[1], "lr": 0.2}])


def by_size(parameters: Any) -> torch.optim.Optimizer:
    held = list(parameters)
    groups = [[p for p in held if p.numel() > 6], [p for p in held if p.numel() <= 6]]
    return torch.optim.Adagrad([{"params": groups[0], "lr": 0.1}, {"params": groups[1], "lr": 0.2}])


def by_name(named_parameters: Any) -> torch.optim.Optimizer:
    held = list(named_parameters)
    return torch.optim.SGD(
        [{"params": [(n, p) for n, p in held if "a." in n], "lr": 0.1}, {"params": held[2:], "lr": 0.2}]
    )


@pytest.mark.parametrize("factory", [by_identity, by_size, by_name])
def test_shards_are_in_the_groups_of_their_parameters(factory: Any) -> None:
    name_of = {id(p): name for name, p in (WHOLE | SHARDS).items()} | {id(p): name for name, p in WHOLE.items()}
    of_whole = optimizer_of(factory, WHOLE, WHOLE)
    of_shards = optimizer_of(factory, SHARDS, WHOLE)
    for whole, shards in zip(of_whole.param_groups, of_shards.param_groups, strict=True):
        assert shards["lr"] == whole["lr"]
        assert [name_of[id(p)] for p in shards["params"]] == [
            name for p in whole["params"] if (name := name_of[id(p)]) in SHARDS
        ]
        assert all(any(p is shard for shard in SHARDS.values()) for p in shards["params"])
    for p in SHARDS.values():
        p.grad = torch.ones_like(p)
    of_shards.step()


def test_options_come_back_for_each_parameter_under_other_groups() -> None:
    """As after a resume on a rank that holds less."""
    before = optimizer_of(by_identity, WHOLE)
    before.param_groups[0] |= {"lr": 0.03, "step": 7, "betas": (0.9, 0.99), "what": object()}
    after = optimizer_of(by_identity, {name: p for name, p in WHOLE.items() if name.startswith("a")}, None)
    after.param_groups[0]["betas"] = (0.0, 0.0)
    load_options(after, WHOLE, options_by_name(before, WHOLE))
    group = after.param_groups[0]
    assert (group["lr"], group["step"], group["betas"]) == (0.03, 7, (0.9, 0.99))
    assert "what" not in group
    one = torch.optim.SGD(WHOLE.values(), lr=0.5)
    with pytest.raises(CheckpointError, match=r"in one group of the optimizer now.*make the same groups"):
        load_options(one, WHOLE, options_by_name(before, WHOLE))
