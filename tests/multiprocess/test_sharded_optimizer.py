"""An optimizer whose state is sharded by share updates weights as the whole one does, and its state is that one's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heterodyne as hd
from multiprocess.pool import World

SHARES = [5.0, 2.0, 1.0]
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "elementwise": (torch.optim.AdamW, {"lr": 1e-2}),
    "fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "whole weights": (torch.optim.Adafactor, {"lr": 1e-2}),
}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(40), nn.Tanh(), nn.Linear(40, 3))
    model(torch.zeros(1, 2, 6, 6))
    model[0].to(memory_format=torch.channels_last)  # its elements do not lie one after the other
    return model


class Mixed(nn.Module):
    """Weights of one dtype or two."""

    def __init__(self, *, double: bool) -> None:
        super().__init__()
        self.layers = build()
        if double:
            self.layers[3].double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weight = next(layer.parameters(), x)
            x = layer(x.to(weight.dtype))
        return x


def groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": weights}, {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 5e-3}]


def train(world: World, name: str) -> tuple[float, int, int, float]:
    """Six steps with clipping, a schedule and a rest from a checkpoint under other shares; the errors of weights and state."""
    kind, options = OPTIMIZERS[name]
    ddp = hd.DistributedDataParallel(Mixed(double=name != "whole weights"))
    alone = copy.deepcopy(ddp.module)
    whole = kind(groups(alone), **options)
    own = hd.ZeroRedundancyOptimizer(groups(ddp.module), kind, shares=SHARES, **options)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in (whole, own)]
    kept = 0
    for step in range(6):
        x = torch.randn(9, 2, 6, 6, generator=torch.Generator().manual_seed(step))
        part = x[3 * world.rank : 3 * world.rank + 3]
        own.zero_grad()
        ddp(part).square().mean().backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        for mine, other in zip(ddp.module.parameters(), alone.parameters(), strict=True):
            other.grad = None if mine.grad is None else mine.grad.clone()
        own.step()
        whole.step()
        for schedule in schedules:
            schedule.step()
        if step == 2:
            kept = sum(
                v.numel() for s in own._own.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()
            )
            own.consolidate_state_dict(to=1)
            saved = [own.state_dict() if world.rank == 1 else None]
            torch.distributed.broadcast_object_list(saved, src=1)
            assert saved[0] is not None
            kind(groups(alone), **options).load_state_dict(saved[0])  # the optimizer without shards takes it
            own = hd.ZeroRedundancyOptimizer(groups(ddp.module), kind, shares=SHARES[::-1], **options)
            own.load_state_dict(saved[0])
            schedules[1] = torch.optim.lr_scheduler.StepLR(own, 2, 0.5, last_epoch=2)
    own.consolidate_state_dict()
    differences = [0.0]
    if world.rank == 0:
        mine, wanted = own.state_dict(), whole.state_dict()
        assert mine["state"].keys() == wanted["state"].keys()
        assert [g["lr"] for g in mine["param_groups"]] == [g["lr"] for g in wanted["param_groups"]]
        for number, state in wanted["state"].items():
            for entry, value in state.items():
                differences.append(relative(mine["state"][number][entry], value))
    weights = max(relative(a, b) for a, b in zip(ddp.module.parameters(), alone.parameters(), strict=True))
    total = sum(v.numel() for s in whole.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim())
    return weights, kept, total, max(differences)


def relative(found: Any, wanted: Any) -> float:
    if not isinstance(wanted, Tensor):
        return float(found != wanted)
    assert found.shape == wanted.shape
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore")
def test_weights_and_state_are_those_of_the_whole_optimizer(pool: Any, name: str) -> None:
    found = pool.run(3, train, name)
    # Of the same gradients; Adafactor adds up in another order, and fused kernels round the rest of a vector otherwise.
    bar = {"whole weights": 1e-5, "fused": 1e-6}.get(name, 0.0)
    for (weights, kept, total, state), share in zip(found, SHARES, strict=True):
        assert weights <= bar
        assert state <= bar
        if name != "whole weights":
            assert kept == pytest.approx(total * share / sum(SHARES), abs=0.1 * total)
    assert sum(kept for _, kept, _, _ in found) == found[0][2]


class Unlike(torch.optim.SGD):
    """Matrices take their direction, the rest its sign; in groups with ``whole`` alone."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    of = p.grad / p.grad.norm() if group["whole"] and p.dim() > 1 else p.grad.sign()
                    p.data.sub_(group["lr"] * of)

    def __init__(self, params: Any, lr: float, whole: bool = False) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("whole", whole)


def keep_whole_what_must_be(world: World) -> float:
    """Scalars come first, and only one group needs weights whole; weights are given other memory on the way."""
    torch.manual_seed(0)
    model = nn.ParameterList(
        [torch.tensor(1.0), torch.tensor(2.0), torch.randn(7), torch.randn(6, 5), torch.randn(4, 9)]
    )
    alone = copy.deepcopy(model)

    def groups_of(parameters: Any) -> list[dict[str, Any]]:
        every = list(parameters)
        return [{"params": every[:3]}, {"params": every[3:], "whole": True}]

    own = hd.ZeroRedundancyOptimizer(groups_of(model), Unlike, lr=0.1, shares=SHARES)
    whole = Unlike(groups_of(alone), lr=0.1)
    for step in range(4):
        if step == 2:
            for parameter in model:
                parameter.data = parameter.detach().clone()
        for mine, other in zip(model, alone, strict=True):
            mine.grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(step))
            other.grad = mine.grad.clone()
        own.step()
        whole.step()
    del world
    return max(relative(a, b) for a, b in zip(model, alone, strict=True))


def test_weights_are_kept_whole_wherever_a_group_needs_them(pool: Any) -> None:
    assert max(pool.run(3, keep_whole_what_must_be)) <= 1e-6


def ask_for_too_much(world: World) -> list[str]:
    model = nn.Linear(2, 2)
    told = []
    for make in (
        lambda: hd.ZeroRedundancyOptimizer(model.parameters(), torch.optim.LBFGS),
        lambda: hd.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, shares=[1.0]),
        lambda: hd.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1).state_dict(),
        lambda: hd.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1).add_param_group({}),
    ):
        with pytest.raises((hd.HeterodyneError, RuntimeError)) as caught:
            make()
        told.append(str(caught.value))
    return told


def test_what_cannot_be_sharded_is_refused(pool: Any) -> None:
    for told in pool.run(2, ask_for_too_much):
        assert "the state of LBFGS cannot be sharded, so use it as it is" in told[0]
        assert "2 ranks" in told[1]
        assert "consolidate_state_dict" in told[2]
        assert "make another one" in told[3]
