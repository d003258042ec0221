"""Whatever forward and loss read beside the batch is seen when it is another."""

from __future__ import annotations

import multiprocessing
import os
import re
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from fractions import Fraction
from functools import cached_property
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.runtime.recapture.read_state import ReadState

WEIGHT = [1.0]
MARGIN = 0.25
DEFAULT = [1.0]
ARGUMENTS = SimpleNamespace(smoothing=0.1)


SHIFT: ContextVar[float] = ContextVar("SHIFT", default=0.0)


def _above(x: Tensor) -> Tensor:
    if os.environ.get("RECTIFIED"):
        return F.relu(x)
    return x - MARGIN * ARGUMENTS.smoothing - SHIFT.get()


class Charbonnier:
    """A loss that is neither a function nor a module."""

    def __init__(self) -> None:
        self.eps = 1e-3

    def __call__(self, x: Tensor) -> Tensor:
        return (x.square() + self.eps**2).sqrt()


class Nested:
    """A number eight attributes deep, one behind ``__getattr__``, one in a descriptor of the class, and one behind a weak reference."""

    def __init__(self, deep: int = 8) -> None:
        self.v, self.exact, self.rows, self.shared = 1.0, Fraction(1, 2), np.ones(500), multiprocessing.Value("d", 1.0)
        self.n = Nested(deep - 1) if deep else None
        self._hidden = {"gain": 1.0}
        self.weak = weakref.ref(self.n) if self.n else None

    def __getattr__(self, name: str) -> float:
        return float(self._hidden[name])

    def __call__(self, x: Tensor) -> Tensor:
        deepest = self.n.n.n.n.n.n.n.n.v * float(self.exact) * self.rows.sum() * self.shared.value * self.gain
        return x * deepest * self.weak().v


class Task:
    """An object of the script whose method the model calls."""

    def __init__(self) -> None:
        self.gain = 1.0

    def compute(self, x: Tensor, scale: list[float] = DEFAULT) -> Tensor:
        return x * self.gain * scale[0]


class Annealed(nn.Module):
    ramp = 1.0
    table_of_class = {"a": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.1)
        self.beta, self.epoch = 0.0, 0
        self._power, self._made, self.criterion = 1.0, None, Charbonnier()
        self.prior, self.table, self.act = torch.tensor([0.5, 0.5]), [torch.ones(2)], torch.tanh
        self.config = SimpleNamespace(scale=2.0, loss=SimpleNamespace(scale=1.0))
        self.register_buffer("temperature", torch.tensor(1.0))
        self.task = Task()
        self.nested = Nested()
        self.compute = self.task.compute
        floor = 0.5
        self.loss_fn = lambda x: (x * WEIGHT[0]).clamp(min=floor)

    def counted(self) -> None:
        self.epoch += 1

    def forward(self, x: Tensor) -> Tensor:
        self._made = x.mean()
        hidden = self.act(self.drop(self.linear(x)) * self.ramp * self.prior + self.table[0]) ** self._power
        hidden = self.criterion(_above(hidden)) * self.config.loss.scale
        hidden = self.compute(self.nested(hidden)) * self.table_of_class["a"]
        return self.loss_fn(hidden * self.beta * self.config.scale / self.temperature).sum()


def _weigh(_: Annealed) -> None:
    WEIGHT[0] += 1.0


CHANGES: list[tuple[Callable[[Annealed], object], str]] = [
    (lambda model: setattr(model, "beta", 0.5), "'beta' was 0.0 and is 0.5"),
    (lambda model: setattr(model, "beta", 0), "'beta' was 0.0 and is 0"),
    (lambda model: setattr(model.config, "scale", 3), "'config.scale' was 2.0"),
    (lambda model: setattr(model.drop, "p", 0.0), "'drop.p' was 0.1"),
    (lambda model: model.eval(), "'drop.training' was True and is False"),
    (_weigh, r"'WEIGHT\[0\]' \(read by .*\) was"),
    (lambda model: setattr(model, "_power", 2.0), "'_power' was 1.0"),
    (lambda model: setattr(model, "ramp", 0.5), "'ramp' was 1.0"),
    (lambda model: setattr(model, "act", torch.relu), "'act' was .*tanh and is relu"),
    (lambda model: setattr(model, "prior", torch.ones(2)), "'prior' was"),
    (lambda model: model.prior.mul_(0.9), "'prior' was"),
    (lambda model: model.table[0].data.fill_(0.0), r"'table\[0\]' was"),
    (lambda model: model.table.append(torch.ones(2)), "the number of entries of 'table' was 1 and is 2"),
    (lambda model: setattr(model.config.loss, "scale", 0.5), "'config.loss.scale' was 1.0"),
    (lambda model: setattr(model.criterion, "eps", 0.1), "'criterion.eps' was 0.001"),
    (lambda model: model.linear.register_forward_hook(lambda *_: None), "the hooks in 'linear._forward_hooks' was"),
    (lambda _: globals().update(MARGIN=MARGIN + 1), r"'MARGIN' \(read by _above\) was"),
    (lambda _: setattr(ARGUMENTS, "smoothing", ARGUMENTS.smoothing + 1), r"'ARGUMENTS.smoothing' \(read by _above\)"),
    (lambda _: setattr(Annealed, "ramp", Annealed.ramp + 1), "'ramp' was"),
    (lambda model: setattr(model.task, "gain", 3.0), "'compute.__self__.gain' was 1.0 and is 3.0"),
    (lambda _: DEFAULT.__setitem__(0, DEFAULT[0] + 1), r"'scale\[0\]' \(read by Task.compute\) was"),
    (lambda model: model.table_of_class.update(a=model.table_of_class["a"] + 1), r"'table_of_class\['a'\]' was"),
    (lambda model: model.linear.weight.requires_grad_(False), "requires_grad of 'linear.weight' was True and is False"),
    (lambda model: setattr(model, "drop", nn.Identity()), "'drop' was Dropout and is Identity"),
    (lambda _: os.environ.update(RECTIFIED="1"), "the variable 'RECTIFIED' of the environment was None and is '1'"),
    (lambda _: SHIFT.set(SHIFT.get() + 1), r"'SHIFT' \(read by _above\) was 0.0 and is 1.0"),
    (lambda _: setattr(F, "relu", F.silu), r"'F.relu' \(read by _above\) was relu and is silu"),
    (lambda _: setattr(nn.Linear, "forward", nn.Identity.forward), r"'Linear.forward' was forward and is forward"),
    (lambda model: setattr(model, "forward", torch.relu), "'forward' is new"),
    (lambda model: setattr(model.nested.n.n.n.n.n.n.n.n, "v", 2.0), r"'nested(\.n){8}\.v' was 1.0 and is 2.0"),
    (
        lambda model: setattr(model.nested, "exact", Fraction(1, 3)),
        r"'nested.exact' was Fraction\(1, 2\) and is Fraction\(1, 3\)",
    ),
    (lambda model: model.nested.rows.__imul__(2.0), r"'nested.rows' was an array of \[500\]"),
    (lambda model: setattr(model.nested.shared, "value", 2.0), "'nested.shared' was 1.0 and is 2.0"),
    (lambda model: model.nested._hidden.update(gain=2.0), r"'nested._hidden\['gain'\]' was 1.0"),
    (lambda model: model.double(), "the type of 'linear.weight' was 'float32' and is 'float64'"),
]


@pytest.fixture(autouse=True)
def _torch_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "relu", F.relu)
    monkeypatch.setattr(nn.Linear, "forward", nn.Linear.forward)
    monkeypatch.setenv("RECTIFIED", "")
    monkeypatch.delenv("RECTIFIED")


@pytest.mark.parametrize(("change", "told"), CHANGES)
def test_what_is_read_is_seen_when_it_changes(change: Callable[[Annealed], object], told: str) -> None:
    model = Annealed()
    read = ReadState(model)
    before = read.state
    assert read.is_same()
    change(model)
    assert not read.is_same()
    assert any(re.search(told, str(each)) for each in before.changes(read.take())), before.changes(read.state)


def test_what_comes_back_is_the_same_state() -> None:
    model = Annealed()
    read = ReadState(model)
    before = read.state
    model.beta, model.prior = 0.5, torch.ones(2)
    assert before.changes(read.take())
    model.beta, model.prior = 0.0, torch.tensor([0.5, 0.5])
    assert not before.changes(read.take())


@pytest.mark.tour("code_read.py", "runtime/recapture/")
def test_what_forward_does_not_read_may_change() -> None:
    model = Annealed()
    read = ReadState(model)
    model(torch.ones(1, 2))
    model.counted()
    model._made = torch.zeros(())
    model.temperature.fill_(0.5)
    model.linear.weight.data.fill_(0.0)
    model.linear.eval()
    before = read.state
    assert read.is_same() or not before.changes(read.take())
    assert read.is_same()


def test_a_buffer_in_the_place_of_another_is_seen_and_is_the_same_state() -> None:
    model = Annealed()
    read = ReadState(model)
    before = read.state
    model.temperature = torch.tensor(0.5)
    assert not read.is_same()
    assert not before.changes(read.take())


def test_what_a_forward_changes_is_its_own() -> None:
    model = Annealed()
    read = ReadState(model)
    model.beta = 0.5  # as a forward would
    read.leave()
    before = read.state
    model.beta = 0.7
    assert not before.changes(read.take())
    model.ramp = 3.0
    assert before.changes(read.take())


class Caching(nn.Module):
    k = 1.0
    _past: Tensor | None = None

    @cached_property
    def gain(self) -> float:
        return 1 + self.k

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.gain if self._past is None else x + self._past
        if not self.training:
            self._past = y.detach()
        return y


def test_where_a_graph_runs_what_forward_would_set_is_changed_by_the_script_alone() -> None:
    model = Caching()
    read = ReadState(model, runs=False)
    before = read.state
    model._past = torch.ones(2)
    assert not read.is_same()
    assert any("_past" in change.name for change in before.changes(read.take()))
    model._past = None
    assert not read.is_same()
    assert not before.changes(read.take())


def test_what_a_cached_property_reads_is_read() -> None:
    model = Caching()
    read = ReadState(model)
    before = read.state
    model.k = 0.5
    assert [change.name for change in before.changes(read.take())] == ["'k'"]
