"""Optimizers whose update depends on what came before: running norms, options that follow the gradients, draws, modes."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from heterodyne.errors import HeterodyneError
from heterodyne.runtime.weights.optimizer_probe import reach_of

MODEL = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 2))


class Plain(torch.optim.Optimizer):
    """SGD, scaled by what a subclass says of the step."""

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "d": 1e-6, "count": 0, **options})
        self.average = 0.0
        self.history: deque[float] = deque(maxlen=100)

    @property
    def held(self) -> Iterator[nn.Parameter]:
        return (p for group in self.param_groups for p in group["params"])

    @property
    def norm(self) -> float:
        return sum(float(p.grad.square().sum()) for p in self.held if p.grad is not None) ** 0.5

    def scale(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        scale = self.scale()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * scale)


class RunningNorm(Plain):
    """The norm is clipped at twice its running average, once 25 steps have warmed that up."""

    seen = 0

    def scale(self) -> float:
        norm, self.seen = self.norm, self.seen + 1
        clip = min(1.0, 2 * self.average / norm) if self.seen > 25 else 1.0
        self.average = 0.9 * self.average + 0.1 * norm
        return clip


class RunningNormInState(Plain):
    def scale(self) -> float:
        kept = self.state["norm"]  # type: ignore[index]  # a key of its own
        kept["average"] = 0.9 * kept.get("average", torch.zeros(())) + 0.1 * self.norm
        return 1.0 if len(self.history) < 50 else 1 / float(kept["average"])


class Percentile(Plain):
    def scale(self) -> float:
        self.history.append(self.norm)
        return 1.0 if len(self.history) < 25 else float(np.percentile(list(self.history), 10)) / self.history[-1]


class Distance(Plain):
    """As Prodigy: the distance to the solution is estimated over the group, and hardly grows at first."""

    def scale(self) -> float:
        for group in self.param_groups:
            moved = sum(float((p.grad * p).sum()) for p in group["params"] if p.grad is not None)
            group["d"] = max(group["d"], 1e-9 * abs(moved))
        return 1.0 + self.param_groups[0]["d"]


class FollowedRate(Plain):
    """The rate follows the gradients of the group."""

    def scale(self) -> float:
        for group in self.param_groups:
            group["lr"] *= 1 + 1e-3 * float(np.tanh(self.norm))
        return 1.0


class Bookkeeping(Plain):
    """Elementwise, and keeps the time, a count, and a copy of each weight by its place, object and id."""

    def scale(self) -> float:
        self.last_s = time.perf_counter()
        self.places = [p.clone() for p in self.held]
        self.objects = {p: p.clone() for p in self.held}
        self.ids = {id(p): p.mean() for p in self.held} if len(list(self.held)) > 99 else {}
        for group in self.param_groups:
            group["count"] += 1
        return 1.0


class Lookahead(Plain):
    """Around another optimizer: every third step goes half of the way."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(list(parameters))
        self.inner = torch.optim.Adam(self.param_groups, lr=0.1)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.held:
            self.state[p].setdefault("slow", p.clone())
        self.inner.step()
        self.steps += 1
        for p in self.held:
            if self.steps % 3 == 0:
                slow = self.state[p]["slow"]
                p.copy_(slow.lerp_(p, 0.5))


@pytest.mark.parametrize(
    ("factory", "reach"),
    [
        (RunningNorm, "model"),
        (RunningNormInState, "model"),
        (Percentile, "model"),
        (Distance, "model"),
        (FollowedRate, "model"),
        (Bookkeeping, "element"),
        (Lookahead, "element"),
    ],
)
def test_what_an_update_will_depend_on_shows_before_it_does(factory: Callable[..., Any], reach: str) -> None:
    assert reach_of(factory, dict(MODEL.named_parameters()))[::2] == (reach, "")


def of_torch(p: Tensor) -> Tensor:
    return torch.randn_like(p)


def of_numpy(p: Tensor) -> Tensor:
    return torch.from_numpy(np.random.randn(*p.shape)).to(p)  # as people write it


def of_python(p: Tensor) -> Tensor:
    return torch.full_like(p, random.random())


def of_its_own(p: Tensor) -> Tensor:
    return torch.from_numpy(np.random.default_rng().standard_normal(p.shape)).to(p)


@pytest.mark.parametrize("draw", [of_torch, of_numpy, of_python, of_its_own])
def test_noise_too_small_to_see_beside_an_update_is_seen(draw: Callable[[Tensor], Tensor]) -> None:
    class Langevin(Plain):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            super().step()
            for p in self.held:
                p.add_(draw(p), alpha=1e-6)

    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    with pytest.raises(HeterodyneError, match="the step of Langevin draws random numbers"):
        reach_of(Langevin, dict(MODEL.named_parameters()))
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index,union-attr]


def test_one_that_steps_in_train_mode_only_is_put_into_it() -> None:
    class Modes(Plain):
        training = False

        def train(self) -> None:
            self.training = True

        def step(self, closure: Any = None) -> None:
            if not self.training:
                raise RuntimeError("call optimizer.train() before step")
            super().step()

    assert reach_of(Modes, dict(MODEL.named_parameters())) == ("element", "Modes", "")


def by_layer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], kind: Any = torch.optim.AdamW
) -> torch.optim.Optimizer:
    """A rate for each layer, by its number: it fails where one of them is missing."""
    found = dict(named_parameters)
    groups = [{"params": [found[f"{n}.weight"], found[f"{n}.bias"]], "lr": 0.1 * 0.9**n} for n in range(6)]
    made: torch.optim.Optimizer = kind(groups)
    return made


@pytest.mark.parametrize(("kind", "reach"), [(torch.optim.AdamW, "element"), (Distance, "model")])
def test_a_factory_that_asks_for_layers_by_number_gets_all_of_them(kind: Any, reach: str) -> None:
    """Also where a half of the weights is tried, which it cannot be made of."""

    def factory(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return by_layer(named_parameters, kind)

    deep = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    assert reach_of(factory, dict(deep.named_parameters())) == (reach, kind.__name__, "")
