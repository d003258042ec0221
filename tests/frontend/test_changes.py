"""A forward that changes what the model keeps cannot be the same on every device."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from heterodyne.errors import CaptureError
from heterodyne.frontend import capture


class Model(nn.Module):
    steps: Tensor
    running: Tensor

    def __init__(self, change: Callable[[Model, Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.slow = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("running", torch.zeros(3, 4))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.change(self, y.detach())  # it changes
        return (y * self.running[0] + y @ self.slow).pow(2).mean()


def reassigned(model: Model, y: Tensor) -> None:
    model.steps = model.steps + 1


CHANGES: dict[str, tuple[str, Callable[[Model, Tensor], object]]] = {
    "a counter": ("steps", lambda model, y: model.steps.add_(1)),
    "a running mean": ("running", lambda model, y: model.running.mul_(0.9).add_(0.1 * y.mean(0))),
    "a part of a buffer": ("running", lambda model, y: model.running[0].copy_(y.mean(0))),
    "a slow copy of the weights": ("slow", lambda model, y: model.slow.lerp_(model.linear.weight.detach(), 0.1)),
    "a buffer that is set anew": ("steps", reassigned),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_forward_changes_is_refused_with_its_line(name: str) -> None:
    changed, change = CHANGES[name]
    with pytest.raises(CaptureError, match=f"forward changes '{changed}'") as caught:
        capture(Model(change), {"x": torch.zeros(2, 4)})
    assert "test_changes.py:" in str(caught.value) or change is reassigned, "a trace does not show where"


@pytest.mark.parametrize(
    ("module", "refused"),
    [
        (nn.BatchNorm1d(4), False),
        (nn.BatchNorm1d(4).eval(), False),
        (nn.InstanceNorm1d(4), False),
        (nn.InstanceNorm1d(4, track_running_stats=True), True),
        (nn.InstanceNorm1d(4, track_running_stats=True).eval(), False),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)), True),
    ],
)
def test_running_statistics_are_known_for_batch_norm_alone(module: nn.Module, refused: bool) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)
            self.norm = module

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x)).pow(2).mean()

    if refused:
        with pytest.raises(CaptureError, match="forward changes 'norm"):
            capture(Normed(), {"x": torch.zeros(2, 4, 5)})
    else:
        capture(Normed(), {"x": torch.zeros(2, 4, 5)})


class Counts(nn.Module):
    def __init__(self, cached: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls, self.longest, self.cached = 0, 0, cached

    def forward(self, x: Tensor) -> Tensor:
        if self.cached:
            self.longest = max(self.longest, x.shape[1])
        else:
            self.calls += 1
        return (self.linear(x) / (1 + self.calls + self.longest)).pow(2).mean()


def test_a_counter_in_python_is_refused_with_its_line_and_a_cache_is_not() -> None:
    with pytest.raises(CaptureError, match=r"test_changes.py:\d+: self.calls \+= 1\nforward changes 'calls'"):
        capture(Counts(cached=False), {"x": torch.zeros(2, 4)})
    model = Counts(cached=True)
    capture(model, {"x": torch.zeros(2, 4)})
    assert model.longest == 0


class Keeps(nn.Module):
    """Counts its calls somewhere, and changes its mind after many of them: no check of a few calls sees that."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.where, self.by_name, self.by_place = where, {"calls": 0}, [0]
        self.logged: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "a dict":
            self.by_name["calls"] += 1
        elif self.where == "a list":
            self.by_place[0] += 1
        elif self.where == "a late attribute":
            self.late = getattr(self, "late", 0) + 1
        else:
            self.logged.append(float(x.shape[1]))
        calls = max(self.by_name["calls"], self.by_place[0], getattr(self, "late", 0))
        return (self.linear(x) * (2 if calls > 100 else 1)).pow(2).mean()


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("a dict", r"self.by_name\[\"calls\"\] \+= 1\nforward changes \"by_name\['calls'\]\""),
        ("a list", r"self.by_place\[0\] \+= 1\nforward changes 'by_place\[0\]'"),
        ("a late attribute", r"self.late = getattr.*\nforward changes 'late'"),
    ],
)
def test_a_counter_is_refused_wherever_the_model_keeps_it(where: str, line: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_changes.py:\d+: {line}"):
        capture(Keeps(where), {"x": torch.zeros(2, 4)})
    model = Keeps("a list that grows")
    capture(model, {"x": torch.zeros(2, 4)})
    assert not model.logged, "a trace runs a copy"


OWN = np.random.default_rng(0)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, OWN.random, None])
def test_random_numbers_of_python_are_refused_at_the_line_after_them(draw: Callable[[], float] | None) -> None:
    class Skips(nn.Module):
        """A layer is left out once in a while, so seldom that no check sees it."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.own = random.Random(0)

        def forward(self, x: Tensor) -> Tensor:
            kept = (draw or self.own.random)() > 1e-9
            return (self.linear(x) if kept else x).pow(2).mean()

    with pytest.raises(
        CaptureError, match=r"test_changes.py:\d+: return \(self.linear(.|\n)*draws random numbers from Python"
    ):
        capture(Skips(), {"x": torch.zeros(2, 4)})


def test_a_seed_set_in_forward_is_refused_at_the_line_after_it() -> None:
    class Seeds(nn.Module):
        """Wants the same mask in each step; a plan draws masks for each sample from the run's seed and the step."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(0)
            return nn.functional.dropout(self.linear(x), 0.5).pow(2).mean()

    model, state = Seeds(), torch.get_rng_state()
    with pytest.raises(
        CaptureError, match=r"test_changes.py:\d+: return nn.functional.dropout(.|\n)*seeds torch's generator"
    ):
        capture(model, {"x": torch.zeros(2, 4)})
    assert torch.equal(torch.get_rng_state(), state), "a trace leaves the generator as it was"


def test_tensors_that_are_made_in_forward_may_change() -> None:
    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.zeros_like(x)
            y[:, 1:] = self.linear(x)[:, 1:]
            return y.pow(2).mean()

    capture(Fills(), {"x": torch.zeros(2, 4)})
