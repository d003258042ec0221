"""What a script changes between two steps: the next step is that of one device, or all ranks refuse it by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.api.loop.batches import batch_format
from heterodyne.api.loop.model_with_loss import with_loss
from heterodyne.api.stage_cutting import StageCutter, again_of
from heterodyne.errors import HeterodyneError
from heterodyne.frontend import Captured, CapturedModel, trace
from heterodyne.plan.lower import lower
from heterodyne.plan.plan import Plan
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.worker import Worker
from multiprocess.pool import Pool, World
from multiprocess.work import PipelineOf, StageOf, cluster_of, plan_of, staged_plan

SAMPLES, STEPS, CLASSES = 6, 5, 4
KINDS = ("data", "1F1B", "split", "zero 3")
BAR = 1e-5


class Network(nn.Module):
    """With nearly everything that a script may change: numbers, masks, a head that is used in training only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.head, self.extra = nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)
        self.act: Any = nn.Tanh()
        self.beta, self.config = 0.0, {"scale": 1.0}
        self.helps, self.squash = False, torch.tanh
        self.rests, self.warm = False, False
        self.prior = torch.ones(16)
        self.register_buffer("mask", torch.ones(16))
        self.register_buffer("gate", None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.warm):
            hidden = self.act(self.first(x)) * self.mask
        hidden = self.squash(self.second(hidden)) * self.prior * self.config["scale"]
        if self.rests:
            hidden = hidden.detach()
        if self.gate is not None:
            hidden = hidden * self.gate
        penalty = hidden.square().mean(1) * self.beta if self.beta > 0 else hidden.new_zeros(hidden.shape[0])
        logits = self.head(hidden)
        if self.helps and self.training:
            logits = logits + 0.3 * self.extra(hidden)
        return logits, penalty


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight: Tensor | None = None
        self.register_buffer("counts", torch.ones(CLASSES))
        self.ignore_index = -100
        self.kind = "labels"

    def forward(self, outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        logits, penalty = outputs
        if self.kind == "smooth":
            return F.cross_entropy(logits, labels, self.counts, label_smoothing=0.1) + penalty.sum() / 3
        if self.kind == "both":
            return F.cross_entropy(logits, labels, self.counts) + 0.5 * F.cross_entropy(logits, labels) + penalty.mean()
        weight = self.counts if self.weight is None else self.weight
        loss = F.cross_entropy(logits, labels, weight, ignore_index=self.ignore_index)
        return loss + penalty.mean()


class Task:
    """The object of a script that knows the loss; its method is passed as the loss."""

    def __init__(self) -> None:
        self.gain = 1.0
        self.criterion = Criterion()

    def loss(self, outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return self.criterion(outputs, labels) * self.gain


Call = Callable[[dict[str, Tensor]], float]
Change = Callable[[Network, Any], None]


def _scale(hook_of: nn.Module, factor: float) -> None:
    hook_of.register_forward_hook(lambda _module, _inputs, output: output * factor)


def _set(owner: str, name: str, *values: Any) -> list[Change]:
    def change(value: Any) -> Change:
        return lambda model, loss: setattr(model if owner == "model" else loss, name, value)

    return [change(value) for value in values]


def _in_place(tensor: Callable[[Network, Any], Tensor], value: float) -> Change:
    def change(model: Network, loss: Any) -> None:
        with torch.no_grad():
            tensor(model, loss)[0] = value

    return change


def _weigh(_: Network, loss: Any) -> None:
    loss.counts = WEIGHTS[0]


WEIGHTS = (torch.tensor([3.0, 1.0, 1.0, 0.2]), torch.tensor([0.1, 1.0, 5.0, 1.0]))
MASK = torch.linspace(0.2, 2.0, 16)

LIVES: dict[str, list[Change]] = {
    "a term joins the loss": _set("model", "beta", 0.5, 0.5, 0.0, 0.7),
    "another class is ignored": _set("loss", "ignore_index", 1, 1, 2, -100),
    "class weights are another attribute": _set("loss", "weight", WEIGHTS[0], WEIGHTS[0], WEIGHTS[1], None),
    "a buffer of the loss is replaced": _set("loss", "counts", *WEIGHTS, WEIGHTS[0], WEIGHTS[1]),
    "a buffer of the loss is written to": [_in_place(lambda _, loss: loss.counts, 3.0), *[lambda *_: None] * 3],
    "a mask is replaced": _set("model", "mask", MASK, MASK, 1 - MASK, torch.ones(16)),
    "a tensor that is an attribute is replaced": _set("model", "prior", MASK, MASK, 1 - MASK, torch.ones(16)),
    "a tensor that is an attribute is written to": [_in_place(lambda model, _: model.prior, 3.0)] * 2,
    "an entry of a dict": [
        lambda model, _: model.config.update(scale=0.5),
        lambda model, _: model.config.update(scale=1),
    ],
    "another activation": _set("model", "act", nn.ReLU(), nn.GELU(), nn.Tanh()),
    "another function": _set("model", "squash", torch.sigmoid, torch.tanh),
    "a hook": [lambda model, _: _scale(model.second, 0.5), lambda model, _: model.second._forward_hooks.clear()],
    "gradients stop in a part": _set("model", "rests", True, True, False, True),
    "a part runs without gradients": _set("model", "warm", True, False, False, True),
    "an extra head in training": _set("model", "helps", True, True, False, True),
    "a mask of another shape": _set("model", "mask", torch.tensor(0.5), torch.tensor(0.5), MASK, torch.ones(16)),
    "a buffer where there was none": _set("model", "gate", MASK, MASK, None, 1 - MASK),
    "another forward": [
        lambda model, _: setattr(model.second, "forward", lambda x: x * 2.0),
        lambda *_: None,
        lambda model, _: delattr(model.second, "forward"),
        lambda *_: None,
    ],
    "two denominators in one function": [_weigh, *_set("loss", "kind", "both", "both", "labels")],
    "the model is moved": [lambda model, _: model._apply(torch.clone), lambda *_: None],
    "the model goes to shared memory": [lambda model, _: model.share_memory()],
    "a criterion of another form": _set("loss", "kind", "smooth", "labels", "smooth", "smooth"),
}


@dataclass(frozen=True)
class Run:
    losses: list[float]
    validation: list[float]
    weights: dict[str, Tensor]


def batch_of(seed: int, samples: int = SAMPLES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=generator)
    return {"x": x, "target": torch.randint(0, CLASSES, (samples,), generator=generator)}


def module_of(loss: Any) -> tuple[nn.Module, Network]:
    model = Network()
    batch = batch_of(0)
    return with_loss(model, loss, batch_format(model, tuple(batch.values()), has_loss=True), batch, withheld=()), model


def lived(
    step: Call,
    evaluate: Call,
    model: Network,
    loss: Any,
    changes: Iterable[Change],
) -> tuple[list[float], list[float]]:
    losses, validation = [step(batch_of(0))], [evaluate(batch_of(100, 5))]
    for number, change in enumerate(changes):
        change(model, loss)
        losses.append(step(batch_of(1 + number)))
        validation.append(evaluate(batch_of(100 + number, 5)))
    return losses, validation


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain(changes: list[Change], loss: Any) -> Run:
    module, model = module_of(loss)
    optimizer = sgd(module.parameters())

    def step(batch: dict[str, Tensor]) -> float:
        optimizer.zero_grad()
        value = module(**batch)
        value.backward()
        optimizer.step()
        return float(value.item())

    def evaluate(batch: dict[str, Tensor]) -> float:
        module.eval()
        value = float(module(**batch).item())
        module.train()
        return value

    losses, validation = lived(step, evaluate, model, loss, changes)
    return Run(losses, validation, {n: p.detach().clone() for n, p in module.named_parameters()})


def plan_for(kind: str, captured: CapturedModel, ranks: int) -> Plan:
    graph, cluster = captured.graph, cluster_of(ranks)
    if kind == "data":
        return plan_of(graph, cluster, ((2, 2), (1, 1)))
    end = len(graph.ops)
    if kind == "zero 3":
        whole = [StageOf(end, (rank,), (1,)) for rank in range(2)]
        return staged_plan(
            graph, cluster, [PipelineOf((2, 2), (whole[0],)), PipelineOf((1, 1), (whole[1],))], "1F1B", zero=3
        )
    if kind == "split":
        return staged_plan(
            graph, cluster, [PipelineOf((4, 2), (StageOf(end, (0, 1), (5, 3), kind="split", free=True),))], "1F1B"
        )
    middle = next(i for i, op in enumerate(graph.ops) if "second.weight" in "".join(op.parameters))
    stages = StageOf(middle, (0,), (1,)), StageOf(end, (1,), (1,))
    return staged_plan(graph, cluster, [PipelineOf((2, 2, 2), stages)], "1F1B")


def worker_for(world: World, kind: str, module: nn.Module, captured: Captured) -> Worker:
    plan, cluster = plan_for(kind, captured, world.world_size), cluster_of(world.world_size)
    return Worker(
        module,
        lowered=lower(plan, captured.graph, cluster, clip=False),
        communicator=Communicator(rank=world.rank, world_size=world.world_size, device=torch.device("cpu")),
        loss_count=captured.loss_count,
        optimizer=sgd,
        total_steps=STEPS,
        clip_grad_norm=0.0,
        stage_programs=StageCutter(captured, module),
        again=again_of(captured, module),
    )


def stepping(worker: Worker) -> Call:
    return lambda batch: worker.step(batch).loss


def ours(world: World, kind: str, names: list[str]) -> dict[str, Run | str]:
    captured = trace(module_of(Criterion())[0], batch_of(0))
    found: dict[str, Run | str] = {}
    for name in names:
        loss = Criterion()
        module, model = module_of(loss)
        worker = worker_for(world, kind, module, captured)
        try:
            losses, validation = lived(stepping(worker), worker.evaluate, model, loss, LIVES[name])
            weights = {n: tensor.clone() for n, tensor in worker.state.tensors().items()}
            found[name] = Run(losses, validation, weights)
        except HeterodyneError as error:
            found[name] = str(error)
        finally:
            worker.close()
    return found


CHOSEN = {
    "data": [
        "a term joins the loss",
        "another class is ignored",
        "a buffer of the loss is replaced",
        "another forward",
        "the model is moved",
    ],
    "1F1B": [
        "a term joins the loss",
        "class weights are another attribute",
        "a mask is replaced",
        "an entry of a dict",
        "a hook",
        "a mask of another shape",
        "a buffer where there was none",
        "two denominators in one function",
        "gradients stop in a part",
        "a part runs without gradients",
        "an extra head in training",
    ],
    "split": [
        "a mask is replaced",
        "a mask of another shape",
        "a tensor that is an attribute is replaced",
        "a criterion of another form",
    ],
    "zero 3": ["a mask is replaced", "an entry of a dict", "gradients stop in a part"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_life_is_that_of_one_device(pool: Pool, kind: str) -> None:
    of_ranks = pool.run(2, ours, kind, CHOSEN[kind], timeout_s=200.0)
    for name in CHOSEN[kind]:
        wanted = plain(LIVES[name], Criterion())
        for found in of_ranks:
            run = found[name]
            assert isinstance(run, Run), (name, run)
            assert run.losses == pytest.approx(wanted.losses, rel=BAR), name
            assert run.validation == pytest.approx(wanted.validation, rel=BAR), name
            for of, weight in wanted.weights.items():
                assert (run.weights[of] - weight).norm() <= BAR * weight.norm(), (name, of)


def test_a_head_that_no_stage_gathers_or_that_is_not_cut_is_refused_by_name(pool: Pool) -> None:
    for kind, why in (
        ("zero 3", "would be read by a stage that does not gather it"),
        ("split", "would be cut in another way"),
    ):
        for found in pool.run(2, ours, kind, ["an extra head in training"], timeout_s=60.0):
            told = found["an extra head in training"]
            assert isinstance(told, str)
            assert "'model.helps' was False and is True" in told
            assert why in told


def test_gradients_that_other_ranks_would_read_elsewhere_are_refused_with_the_remedy(pool: Pool) -> None:
    name = "the model goes to shared memory"
    for found in pool.run(2, ours, "data", [name], timeout_s=60.0):
        told = found[name]
        assert isinstance(told, str)
        assert "was moved between two steps, as model.share_memory() does" in told


ANNEALED = [0.1 * step for step in range(8)]


def annealed(world: World, kind: str) -> tuple[list[float], int, str]:
    """Losses while a number follows a schedule, how often the model was captured for it, and what refuses one that cannot be an input."""
    captured = trace(module_of(Criterion())[0], batch_of(0))
    module, model = module_of(Criterion())
    worker = worker_for(world, kind, module, captured)
    said: list[str] = []
    worker._variants._say = said.append
    losses = []
    for step, beta in enumerate(ANNEALED):
        model.beta = beta
        losses.append(worker.step(batch_of(step)).loss)
    told = ""
    try:
        for step in range(10):
            model.config["scale"] = 1.0 + step
            worker.step(batch_of(step))
    except HeterodyneError as error:
        told = str(error)
    worker.close()
    return losses, len([line for line in said if "model.beta" in line]), told


@pytest.mark.parametrize("kind", ["data", "1F1B"])
def test_a_number_that_follows_a_schedule_is_an_input_of_the_graph(pool: Pool, kind: str) -> None:
    module, model = module_of(Criterion())
    optimizer, wanted = sgd(module.parameters()), []
    for step, beta in enumerate(ANNEALED):
        model.beta = beta
        optimizer.zero_grad()
        loss = module(**batch_of(step))
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    for losses, captures, told in pool.run(2, annealed, kind, timeout_s=100.0):
        assert losses == pytest.approx(wanted, rel=BAR)
        assert captures == 1, "what Python decides by it is the same from the second value on"
        assert "'model.config['scale']' was" in told
        assert "before each of 5 steps in a row" in told


ALONE: dict[str, tuple[Change, str]] = {
    "a number": (lambda model, _: setattr(model, "beta", 0.5), "'model.beta' was 0.0 and is 0.5, on rank 1 alone"),
    "a buffer": (lambda model, _: setattr(model, "mask", MASK), "the buffer 'model.mask' .* on rank 1 alone"),
    "a mode": (lambda model, _: model.eval() and None, "'model.training' was True and is False, on rank 1 alone"),
    "a head": (lambda model, _: setattr(model, "helps", True), "'model.helps' was False and is True, on rank 1 alone"),
    "a weight": (
        _in_place(lambda model, _: model.head.weight, 3.0),
        "'model.head.weight' was as the last step left it and is written to, on rank 1 alone",
    ),
}


def changed_alone(world: World, kind: str, names: list[str]) -> dict[str, str]:
    """What each rank is told where rank 1 changes something by itself before the fifth step; "" if nothing is refused."""
    captured = trace(module_of(Criterion())[0], batch_of(0))
    found = {}
    for name in names:
        loss = Criterion()
        module, model = module_of(loss)
        worker = worker_for(world, kind, module, captured)
        found[name] = ""
        try:
            for step in range(6):
                if step == 4 and world.rank == 1:
                    ALONE[name][0](model, loss)
                worker.step(batch_of(step))
        except HeterodyneError as error:
            found[name] = str(error) if worker.steps_done == 4 else f"after {worker.steps_done} steps: {error}"
        worker.close()
    return found


@pytest.mark.parametrize("kind", ["data", "1F1B"])
def test_a_change_on_one_rank_alone_is_refused_on_all_before_the_update(pool: Pool, kind: str) -> None:
    names = [name for name in ALONE if kind == "data" or name != "a weight"]  # a pipeline has it on one rank alone
    for found in pool.run(2, changed_alone, kind, names, timeout_s=100.0):
        for name, told in found.items():
            assert re.match(ALONE[name][1], told), (name, told)
