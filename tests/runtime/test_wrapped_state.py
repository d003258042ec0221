"""State that wraps tensors goes where plain state goes, as what it wraps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heterodyne.errors import CheckpointError
from heterodyne.runtime.weights.optimizer import initialise_state, load_state_by_name, state_by_name
from heterodyne.runtime.weights.parameter_groups import set_rate


class Bytes(Tensor):
    """Values of 8 bits and a scale, that stand for a tensor: as 8-bit optimizers keep their moments."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Bytes:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Bytes:
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"nobody computes with it: {func}")

    def value(self) -> Tensor:
        return self.codes.float() * self.scale

    def set(self, value: Tensor) -> None:
        self.scale.copy_(value.abs().max() / 127)
        self.codes.copy_((value / self.scale.clamp(min=1e-12)).round())


class Momentum(torch.optim.Optimizer):
    """Its rate is a tensor, as compiled optimizers want it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": torch.tensor(0.1)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert isinstance(group["lr"], Tensor)
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p] = {
                        "step": torch.tensor(0.0),
                        "m": Bytes(torch.zeros(p.shape, dtype=torch.int8), torch.tensor(0.0)),
                        "name": "m",
                    }
                state = self.state[p]
                state["step"] += 1
                moment = 0.9 * state["m"].value() + p.grad
                state["m"].set(moment)
                p.sub_(group["lr"] * moment)


def made() -> tuple[dict[str, nn.Parameter], Momentum]:
    torch.manual_seed(0)
    parameters = {"a": nn.Parameter(torch.randn(3, 4)), "b": nn.Parameter(torch.randn(5))}
    return parameters, Momentum(parameters.values())


def stepped(parameters: dict[str, nn.Parameter], optimizer: Momentum, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters.values():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def test_a_state_of_wrappers_is_taken_over_bit_for_bit() -> None:
    parameters, optimizer = made()
    stepped(parameters, optimizer, 1)
    state = state_by_name(optimizer, parameters)
    assert state["a"].keys() == {"step", "m.codes", "m.scale", "name"}
    assert all(type(value) is Tensor for value in state["a"].values() if isinstance(value, Tensor))
    kept = {name: {k: v.clone() if isinstance(v, Tensor) else v for k, v in of.items()} for name, of in state.items()}
    others, resumed = made()
    with torch.no_grad():
        for name, p in others.items():
            p.copy_(parameters[name])
    set_rate(resumed.param_groups[0], 0.3)
    load_state_by_name(resumed, others, kept)
    assert float(resumed.param_groups[0]["lr"]) == pytest.approx(0.3)
    set_rate(resumed.param_groups[0], 0.1)
    for seed in (2, 3):
        stepped(parameters, optimizer, seed)
        stepped(others, resumed, seed)
    assert all(torch.equal(p, others[name]) for name, p in parameters.items())


def test_a_state_that_the_optimizer_would_not_make_is_refused() -> None:
    parameters, optimizer = made()
    initialise_state(optimizer)
    state = state_by_name(optimizer, parameters)
    del state["a"]["m.scale"]
    with pytest.raises(CheckpointError, match=r"the optimizer's state of a is .*this optimizer's is"):
        load_state_by_name(optimizer, parameters, state)
