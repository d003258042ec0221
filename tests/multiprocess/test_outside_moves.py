"""What an optimizer moves outside of its step reaches every rank that computes with it: validation and training are those of one device."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heterodyne.errors import PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan
from multiprocess.pool import Pool, World
from multiprocess.test_own_loop import SAMPLES, Labelled, batch_of, graph, loss_of, start
from multiprocess.work import PipelineOf, StageOf, cluster_of, plan_of, staged_plan

STEPS, BAR = 6, 1e-5


class Moving(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        super().__init__(parameters, {"lr": 0.3, **options})

    @property
    def stepped(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        return ((p, self.state[p]) for group in self.param_groups for p in group["params"] if self.state[p])


class ScheduleFree(Moving):
    """Schedule-free SGD (Defazio et al., 2024): gradients are taken at y = (1 - b) z + b x, and x is the average to validate with.

    ``written``: the tensor that the modes write to, as people do it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], written: Callable[[nn.Parameter], Tensor]) -> None:
        super().__init__(parameters, beta=0.9, count=0, training=True)
        self._written = written

    @torch.no_grad()
    def _turn(self, training: bool, share: Callable[[float], float]) -> None:
        for group in self.param_groups:
            if group["training"] is training:
                continue
            group["training"] = training
            for p in group["params"]:
                if "z" in self.state[p]:
                    self._written(p).lerp_(self.state[p]["z"], share(group["beta"]))

    def eval(self) -> None:
        self._turn(False, lambda beta: 1 - 1 / beta)

    def train(self) -> None:
        self._turn(True, lambda beta: 1 - beta)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("call optimizer.train() before step")
            group["count"] += 1
            share = 1 / group["count"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share).sub_(p.grad, alpha=group["lr"] * (1 - group["beta"] * (1 - share)))
                z.sub_(p.grad, alpha=group["lr"])


class Lookahead(Moving):
    """Its slow weights are brought up to date by hand."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("slow", p.clone())
                    p.sub_(p.grad, alpha=group["lr"])

    def sync(self) -> None:
        for p, state in self.stepped:
            p.data.copy_(state["slow"].lerp_(p.data, 0.5))


class Averaged(Moving):
    """SGD, with a running average to swap with: by its values, or by its memory."""

    def __init__(self, parameters: Iterable[nn.Parameter], by_memory: bool) -> None:
        super().__init__(parameters)
        self._by_memory = by_memory

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
                    self.state[p].setdefault("average", p.detach().clone()).lerp_(p, 0.3)

    @torch.no_grad()
    def swap(self) -> None:
        for p, state in self.stepped:
            if self._by_memory:
                p.data, state["average"] = state["average"], p.data
            else:
                kept = p.clone()
                p.copy_(state["average"])
                state["average"].copy_(kept)


def itself(p: nn.Parameter) -> Tensor:
    return p


def data_of(p: nn.Parameter) -> Tensor:
    return p.data


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "schedule-free": lambda ps: ScheduleFree(ps, itself),
    "schedule-free by .data": lambda ps: ScheduleFree(ps, data_of),
    "lookahead": Lookahead,
    "swap": lambda ps: Averaged(ps, by_memory=False),
    "swap of memory": lambda ps: Averaged(ps, by_memory=True),
}


def between(kind: str, optimizer: Any, number: int, validate: Callable[[], list[float]]) -> list[float]:
    """What the loop does after a step, and the losses of its validations."""
    if kind == "lookahead":
        if number % 2:
            optimizer.sync()
        return []
    there, back = (optimizer.eval, optimizer.train) if "schedule" in kind else (optimizer.swap,) * 2
    if number % 2 == 0:
        return validate()
    there()
    found = validate()
    back()
    return found


def validations() -> list[tuple[Tensor, Tensor]]:
    return [batch_of(5, 100), batch_of(4, 101)]


def on_one_device(kind: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = Labelled()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(model(batch[0]), batch[1])

    def validate() -> list[float]:
        with torch.no_grad():
            found = [(float(loss(batch)), len(batch[1])) for batch in validations()]
            return [
                sum(of * size for of, size in found) / sum(size for _, size in found),
                float(model(batch_of(3)[0])[0].abs().sum()),
            ]

    losses, validated = [], []
    for number in range(STEPS):
        optimizer.zero_grad()
        found = loss(batch_of(SAMPLES, number))
        found.backward()
        optimizer.step()
        losses.append(found.item())
        validated += between(kind, optimizer, number, validate)
    validated += validate()
    return losses, validated, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def train(world: World, found: ModelGraph, plan: Plan, kind: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model, losses, validated = Labelled(), [], []
    with start(world, model, plan, found, optimizer=OPTIMIZERS[kind]) as trainer:

        def validate() -> list[float]:
            outputs = trainer.predict(batch_of(3))[0]
            return [trainer.validate(validations())["loss"], float(outputs.abs().sum())]

        for number in range(STEPS):
            losses.append(trainer.step(batch_of(SAMPLES, number)).loss)
            validated += between(kind, trainer.optimizer, number, validate)
        validated += validate()
    return losses, validated, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def plans() -> dict[str, Plan]:
    """On three ranks, where weights are whole, ranges of them, parts, or stages; one rank of some is idle."""
    here, found = cluster_of(3), graph()
    cut = next(i for i, op in enumerate(found.ops) if "tanh" in op.target) + 1
    end, unequal = len(found.ops), ((2, 1), (2,), (1,))
    stages = (StageOf(cut, (0,), (1,)), StageOf(end, (1,), (1,)))
    shared = tuple(replace(stage, ranks=(0, 1), shares=(2, 1), state=(1, 2)) for stage in stages)
    return {
        "data": plan_of(found, here, ((2, 2), None, (1, 1))),
        "zero 1": plan_of(found, here, unequal, zero=1),
        "zero 2": plan_of(found, here, ((2, 2), None, (1, 1)), zero=2),
        "zero 3": plan_of(found, here, unequal, zero=3),
        "pipeline": staged_plan(found, here, [PipelineOf((2, 2, 2), stages)], "1F1B"),
        "pipeline, zero 1": staged_plan(found, here, [PipelineOf((3, 3), shared)], "GPipe", zero=1),
        "on hosts": plan_of_hosts(found),
    }


def plan_of_hosts(found: ModelGraph) -> Plan:
    stages = (StageOf(len(found.ops), (0, 1, 2), (2, 2, 2), state=(1, 0, 2), offload=True),)
    return staged_plan(found, cluster_of(3), [PipelineOf((6,), stages)], "GPipe", zero=1)


CASES = [
    *(("zero 1", kind) for kind in OPTIMIZERS),
    ("data", "schedule-free"),
    ("zero 2", "schedule-free by .data"),
    ("zero 3", "schedule-free"),
    ("pipeline", "swap"),
    ("pipeline, zero 1", "lookahead"),
    ("pipeline, zero 1", "swap of memory"),
    ("on hosts", "schedule-free by .data"),
    ("on hosts", "swap of memory"),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_validation_and_training_are_those_of_one_device(pool: Pool, name: str, kind: str) -> None:
    losses, validated, state = on_one_device(kind)
    for found in pool.run(3, train, graph(), plans()[name], kind):
        assert found[0] == pytest.approx(losses, rel=BAR)
        assert found[1] == pytest.approx(validated, rel=BAR)
        for tensor_name, tensor in state.items():
            torch.testing.assert_close(found[2][tensor_name], tensor, rtol=BAR, atol=BAR)


def read_by_hand(world: World, found: ModelGraph, plan: Plan) -> tuple[str, float, bool]:
    """What the script is told of weights that are moved in parts, and what they are once the parts have been exchanged."""
    model = Labelled()
    with start(world, model, plan, found, optimizer=OPTIMIZERS["schedule-free by .data"]) as trainer:
        for number in range(3):
            trainer.step(batch_of(SAMPLES, number))
        weight = max(model.parameters(), key=Tensor.numel)
        with torch.no_grad():
            weight.mul_(0.5).mul_(2.0)
            weight.clamp_(-100, 100)
        copied = copy.deepcopy(model).state_dict()
        equal = all(torch.equal(copied[name], tensor) for name, tensor in model.state_dict().items())
        trainer.optimizer.eval()
        with pytest.raises(PlanError) as refused, torch.no_grad():
            weight.sum()
        trainer.predict(batch_of(3))
        return (
            str(refused.value),
            float(weight.detach().sum()),
            equal and pickle.loads(pickle.dumps(weight)).shape == weight.shape,
        )


def test_weights_whose_parts_were_moved_are_not_read_before_they_are_exchanged(pool: Pool) -> None:
    model = Labelled()
    optimizer = OPTIMIZERS["schedule-free"](list(model.parameters()))
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model(batch_of(SAMPLES, number)[0]), batch_of(SAMPLES, number)[1]).backward()
        optimizer.step()
    optimizer.eval()
    for told, read, copied in pool.run(3, read_by_hand, graph(), plans()["zero 1"]):
        assert "has moved it outside of its step" in told
        assert read == pytest.approx(float(max(model.parameters(), key=Tensor.numel).detach().sum()), rel=1e-4)
        assert copied


def refused(world: World, found: ModelGraph, plan: Plan) -> str:
    with pytest.raises(PlanError) as fault:
        train(world, found, plan, "swap of memory")
    return str(fault.value)


def test_memory_of_which_ranks_have_parts_cannot_be_replaced(pool: Pool) -> None:
    for message in pool.run(3, refused, graph(), plans()["zero 3"]):
        assert "has put another tensor in the place of" in message
        assert "p.copy_()" in message
