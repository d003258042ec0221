"""What forward reads beside its own module is seen when it is another: objects, classes, registries, teachers, orders."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial, reduce
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.errors import PlanError
from heterodyne.frontend import trace
from heterodyne.runtime.recapture.read_state import ReadState
from heterodyne.runtime.recapture.script_writes import ScriptWrites

KNOBS = ModuleType("knobs_of_a_test")
KNOBS.__file__ = "knobs_of_a_test.py"


GAIN_OF = attrgetter("namespace.gain")
LOOKED_UP = 1.0
DEEP = "namespace.deep.bend"
SHOWN = "{0.shown}"
OF_THREAD = threading.local()


class Config:
    temperature = 1.0


class Registry:
    values: dict[str, float] = {"w": 1.0}

    @classmethod
    def get(cls) -> float:
        return cls.values["w"]


OF_META = {"slope": 1.0}


class Meta(type):
    def __getattr__(cls, name: str) -> float:
        return OF_META[name]


class Knobs(metaclass=Meta):
    pass


class Scaled(float):
    unit = 1.0


class Missing(dict[str, float]):
    default = 1.0

    def __missing__(self, key: str) -> float:
        return self.default


class Factor:
    def __init__(self) -> None:
        self.inner = 1.0

    def __rmul__(self, x: Tensor) -> Tensor:
        return x * self.inner


class Helper:
    def bend(self, x: Tensor) -> Tensor:
        return x


def scale(x: Tensor, *, by: float = 1.0) -> Tensor:
    return x * by * scale.gain  # type: ignore[attr-defined]


class Base(nn.Module):
    def out(self, x: Tensor) -> Tensor:
        return x


class Model(Base):
    def __init__(self, around: Any) -> None:
        super().__init__()
        self.linear, self.sign, self.k = nn.Linear(4, 4), 0.0, Scaled(1.0)
        self.ops = {"a": torch.tanh, "b": torch.exp}
        self.acts = nn.ModuleDict({"t": nn.Tanh(), "s": nn.Softplus()})
        self.context: Any = contextlib.nullcontext()
        self.pair: Any = (1, 2)
        self.of_partial, self.entry = partial(getattr, around.namespace, "of_partial"), around.table.get
        self.forward = lambda x: self.whole(x, around)  # type: ignore[method-assign]

    def whole(self, x: Tensor, around: Any) -> Tensor:
        import knobs_of_a_test

        with self.context:
            x = self.linear(x)
        for act in (*self.ops.values(), *self.acts.values()):
            x = act(x)
        x = (
            x
            * GAIN_OF(around)
            * self.of_partial()
            * self.entry("gain")
            * around.missing["any"]
            * globals()["LOOKED_UP"]
            * getattr(sys.modules[__name__], "LATE", 1.0)
            * getattr(self.linear.weight, "factor", 1.0)
            * around.factors[0]
            * float(SHOWN.format(around.namespace))
            * getattr(OF_THREAD, "gain", 1.0)
            * reduce(getattr, DEEP.split("."), around)
        )
        x = around.helper.bend(scale(self.out(x))) * around.config.temperature * Registry.get()
        x = (x + around.offset) * math.copysign(1.0, self.sign) * self.k.unit * self.pair[0] * knobs_of_a_test.gain
        x = x * Knobs.slope
        return (x - around.teacher(x.detach())).square().sum() * (2.0 if self.trains() else 1.0)

    def trains(self) -> bool:
        return self.training


class Around:
    def __init__(self) -> None:
        self.config, self.helper = Config(), Helper()
        self.table, self.missing, self.factors = {"gain": 1.0}, Missing(), [Factor()]
        self.namespace = SimpleNamespace(gain=1.0, of_partial=1.0, shown=1.0, deep=SimpleNamespace(bend=1.0))
        self.teacher = nn.BatchNorm1d(4).eval().requires_grad_(False)
        self.offset = nn.Parameter(torch.zeros(4), requires_grad=False)


Change = Callable[[Model, Around], object]


def _method_of_subclass(_: Model, __: Around) -> None:
    Model.out = lambda self, x: x * 2  # type: ignore[method-assign]


def _again(entries: Any, key: str) -> None:
    entries[key] = entries.pop(key)


CHANGES: dict[str, Change] = {
    "an attribute of an object hides that of its class": lambda _, a: setattr(a.config, "temperature", 2.0),
    "an attribute of an object hides a method": lambda _, a: setattr(a.helper, "bend", torch.relu),
    "a subclass hides a method": _method_of_subclass,
    "what a classmethod reads": lambda *_: Registry.values.update(w=2.0),
    "another order of a dict": lambda m, _: _again(m.ops, "a"),
    "another order of modules": lambda m, _: _again(m.acts, "t"),
    "another teacher": lambda _, a: setattr(a, "teacher", nn.LayerNorm(4).requires_grad_(False)),
    "a teacher of the same class": lambda _, a: setattr(a, "teacher", _filled(nn.BatchNorm1d(4).eval())),
    "a weight of a teacher by .data": lambda _, a: setattr(a.teacher.weight, "data", torch.full((4,), 3.0)),
    "a buffer of a teacher": lambda _, a: setattr(a.teacher, "running_mean", torch.ones(4)),
    "a parameter of an object": lambda _, a: setattr(a, "offset", nn.Parameter(torch.ones(4), requires_grad=False)),
    "an attribute of a function": lambda *_: setattr(scale, "gain", 2.0),
    "what the class of a class reads": lambda *_: OF_META.update(slope=2.0),
    "keyword defaults": lambda *_: setattr(scale, "__kwdefaults__", {"by": 2.0}),
    "what forward imports": lambda *_: setattr(KNOBS, "gain", 2.0),
    "a mode that a method asks for": lambda m, _: setattr(m, "training", False),
    "negative zero": lambda m, _: setattr(m, "sign", -0.0),
    "an attribute of a number": lambda m, _: setattr(m.k, "unit", 2.0),
    "another context": lambda m, _: setattr(m, "context", torch.no_grad()),
    "a list for a tuple": lambda m, _: setattr(m, "pair", [1, 2]),
    "what an attrgetter reads": lambda _, a: setattr(a.namespace, "gain", 2.0),
    "a name that code takes apart": lambda _, a: setattr(a.namespace.deep, "bend", 2.0),
    "an attribute of the thread that was not there": lambda *_: setattr(OF_THREAD, "gain", 2.0),
    "what a partial getattr reads": lambda _, a: setattr(a.namespace, "of_partial", 2.0),
    "the dict of a bound method in C": lambda _, a: a.table.update(gain=2.0),
    "an attribute of a dict of the user": lambda _, a: setattr(a.missing, "default", 2.0),
    "what an operator of an entry reads": lambda _, a: setattr(a.factors[0], "inner", 2.0),
    "a field of a format": lambda _, a: setattr(a.namespace, "shown", 2.0),
    "an attribute of a weight": lambda m, _: setattr(m.linear.weight, "factor", 2.0),
    "a global that is looked up": lambda *_: setattr(sys.modules[__name__], "LOOKED_UP", 2.0),
    "a global that was not there": lambda *_: setattr(sys.modules[__name__], "LATE", 2.0),
    "the default type": lambda *_: torch.set_default_dtype(torch.float64),
    "a function of torch": lambda *_: setattr(F, "linear", lambda x, w, b=None: x @ w),
}


def _filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.fill_(0.5)
    return module.requires_grad_(False)


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Iterator[Around]:
    monkeypatch.setitem(sys.modules, "knobs_of_a_test", KNOBS)
    monkeypatch.setattr(KNOBS, "gain", 1.0, raising=False)
    monkeypatch.setattr(Registry, "values", {"w": 1.0})
    monkeypatch.setattr(scale, "gain", 1.0, raising=False)
    monkeypatch.setattr(scale, "__kwdefaults__", {"by": 1.0})
    monkeypatch.setattr(F, "linear", F.linear)
    yield Around()
    vars(OF_THREAD).clear()
    OF_META.update(slope=1.0)
    torch.set_default_dtype(torch.float32)
    globals().pop("LATE", None)
    globals()["LOOKED_UP"] = 1.0
    if "out" in vars(Model):
        del Model.out


@pytest.mark.parametrize("name", CHANGES)
def test_it_is_seen_when_it_is_another(around: Around, name: str) -> None:
    model = Model(around)
    model(torch.ones(2, 4))
    read = ReadState(model)
    read.leave()
    assert read.is_same()
    before = read.state
    CHANGES[name](model, around)
    assert not read.is_same()
    assert before.changes(read.take()), name
    assert read.is_same(), "seen once, it is as it is"


def test_names_are_those_of_every_process() -> None:
    """Ranks compare changes by name, and Python orders words in another way in each process."""
    script = """if True:
        import sys
        from runtime.test_read_elsewhere import KNOBS, Around, Model, ReadState, scale
        sys.modules["knobs_of_a_test"], KNOBS.gain, scale.gain = KNOBS, 1.0, 1.0
        print(*ReadState(Model(Around())).state.values, sep=chr(10))
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2, 3)
    ]
    first, *others = [process.communicate()[0].splitlines() for process in processes]
    assert len(first) > 20
    assert all(other == first for other in others)


# Constants that no graph may refuse for what they are


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.limit, self.table = nn.Linear(4, 4), float("nan"), torch.eye(4).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) @ self.table.to_dense()
        return (x if math.isnan(self.limit) else x * self.limit).square().mean()


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.weight.factor = 3.0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * getattr(self.linear.weight, "factor", 1.0)).square().mean()


def test_attributes_of_weights_are_captured() -> None:
    assert any(op.argument("other") == 3.0 for op in trace(Marked(), {"x": torch.randn(4, 4)}).graph.ops)


def test_a_number_that_is_none_and_a_sparse_table_are_captured() -> None:
    assert trace(Odd(), {"x": torch.randn(4, 4)}).graph.ops


# Optimizers that have parts of the weights


SCALE = 1.0


class Switched(torch.optim.SGD):
    """One of the user's, with options and an attribute that switch something."""

    trust = False

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert SCALE
        return super().step(closure)


def writes_of(optimizer: torch.optim.Optimizer, *, in_parts: bool = True) -> ScriptWrites:
    return ScriptWrites(dict, (), optimizer, in_parts=in_parts)


def stepped(kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.1, momentum=0.9)  # type: ignore[call-arg]
    weight.sum().backward()
    optimizer.step()
    return optimizer


def _options(optimizer: torch.optim.Optimizer, **options: object) -> None:
    optimizer.param_groups[0].update(options)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda o: o.register_step_pre_hook(lambda *_: None), "a hook before the step"),
        (lambda o: o.register_step_post_hook(lambda *_: None), "a hook after the step"),
        (lambda o: setattr(o, "step", lambda closure=None: None), r"the method step\(\)"),
        (lambda o: setattr(o, "__class__", torch.optim.SGD), "the class"),
        (lambda o: _options(o, nesterov=True), "the option 'nesterov'"),
        (lambda o: setattr(o, "trust", True), "the attribute 'trust'"),
        (lambda _: globals().update(SCALE=2.0), r"the variable 'SCALE' in step\(\)"),
        (lambda o: o.state[o.param_groups[0]["params"][0]]["momentum_buffer"].mul_(2), None),
    ],
)
def test_an_optimizer_of_parts_stays_what_was_tried(
    change: Callable[[torch.optim.Optimizer], object], told: str | None
) -> None:
    for in_parts in (True, False):
        globals().update(SCALE=1.0)
        optimizer = stepped(Switched)
        writes = writes_of(optimizer, in_parts=in_parts)
        change(optimizer)
        if in_parts and told:
            with pytest.raises(PlanError, match=rf"{told} of the optimizer is another .*optimizer="):
                writes.find(1)
        else:
            writes.find(1)


def test_rates_schedules_and_cleared_state_are_no_change_of_an_optimizer() -> None:
    optimizer = stepped()
    writes = writes_of(optimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 * step)
    _options(optimizer, weight_decay=0.5)
    writes.find(1)
    (state,) = optimizer.state.values()
    state["momentum_buffer"].zero_()
    writes.find(2)
    state["momentum_buffer"].add_(1.0)
    with pytest.raises(PlanError, match=r"state of the optimizer was written to .*trainer\.load_state_dict"):
        writes.find(3)
