"""Models that run as they are: loss and gradients are those of plain PyTorch on one device, also where ranks take other branches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from heterodyne.errors import CaptureError, DataError
from heterodyne.frontend.opaque import opaque, read_count
from heterodyne.graph.ir import ModelGraph
from heterodyne.loss_count import LossCount
from heterodyne.plan.lower import lower
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.recapture.variants import Capture
from heterodyne.runtime.worker import Worker
from multiprocess.exactness import BAR, Errors, compared
from multiprocess.models import Case
from multiprocess.opaque_models import WIDTH, Forces, graph_of, make
from multiprocess.pool import Pool, World
from multiprocess.work import Shares, cluster_of, plan_of

CPU = torch.device("cpu")


def worker_of(
    world: World, name: str, shares: Shares, *, backend: Callable[..., Any] | None = None
) -> tuple[Worker, dict[str, Tensor]]:
    module, batch, given = make(name, sum(sum(sizes) for sizes in shares if sizes is not None))
    graph, count = graph_of(copy.deepcopy(module), batch, given)
    return _worker(world, module, graph, count, shares, backend), batch


def _worker(
    world: World,
    module: nn.Module,
    graph: ModelGraph,
    count: LossCount,
    shares: Shares,
    backend: Callable[..., Any] | None = None,
) -> Worker:
    cluster = cluster_of(world.world_size)
    plan = plan_of(graph, cluster, shares, bucket_bytes=200)
    return Worker(
        module,
        lowered=lower(plan, graph, cluster, clip=False),
        communicator=Communicator(rank=world.rank, world_size=world.world_size, device=CPU),
        loss_count=count,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        total_steps=3,
        compiled=None if backend is None else torch.compile(module, backend=backend),
        again=lambda *_: Capture(graph=graph, loss_count=count, programs=None),
    )


def errors_of(world: World, name: str, shares: Shares) -> tuple[Errors, list[str]]:
    """One step under the plan against one device, as each rank sees it; and the parameters without a gradient."""
    worker, batch = worker_of(world, name, shares)
    worker.evaluate(batch)  # in other parts than it is trained in
    alone = Case(module=make(name, worker.plan.global_batch_size)[0], graph=worker.graph, batch=batch)
    errors, given = compared(world, worker, batch, alone, worker.loss_count, step=0, seed=0)
    return errors, sorted(worker._model.parameters.keys() - given)


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("early", ((4,), (1, 2), None)),
        ("routed", ((1, 1), (3, 2), None)),
        ("normed", ((3, 1), (1, 1), None)),
        ("forces", ((3, 1), (2,), None)),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(pool: Pool, name: str, shares: Shares) -> None:
    for errors, untouched in pool.run(3, errors_of, name, shares):
        assert all(error <= BAR for _, error in errors), errors
        expected = {"early": ["never.bias", "never.weight"], "forces": []}
        assert untouched == expected.get(name, []), "as on one device"


def test_a_gradient_inside_forward_does_not_go_through_statistics_of_all_devices() -> None:
    class NormedForces(Forces):
        def __init__(self) -> None:
            super().__init__()
            self.energy.insert(1, nn.BatchNorm1d(WIDTH))

    _, batch, given = make("forces", 6)
    with pytest.raises(CaptureError, match=r"takes a gradient .* and has BatchNorm in training"):
        graph_of(NormedForces(), batch, given)


def trained(world: World, shares: Shares, compiled: bool) -> tuple[list[float], float, float]:
    """Losses of steps in which other branches are taken, validation, and the largest difference of weights to plain PyTorch; the last
    step is done again from the state after the first."""
    ran: list[int] = []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        ran.append(len(graph.graph.nodes))
        return graph.forward

    warnings.simplefilter("ignore")  # Dynamo looks at the .grad of whatever it meets
    worker, batch = worker_of(world, "early", shares, backend=backend if compiled else None)
    plain = make("early", 7)[0]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        now = {"x": batch["x"], "y": batch["y"] - (3.0 if step == 1 else 0.0)}  # nobody takes the rare branch
        if step == 1:
            state = copy.deepcopy(worker.state.state_dict())
        loss = worker.step(now).loss
        optimizer.zero_grad()
        expected = plain(**now)
        expected.backward()
        optimizer.step()
        losses.append(abs(loss - expected.item()) / expected.item())
    worker.state.load_state_dict(state)
    for shift in (3.0, 0.0):
        worker.step({"x": batch["x"], "y": batch["y"] - shift})
    validation = worker.evaluate({"x": batch["x"][:5], "y": batch["y"][:5]})
    expected = plain.eval()(batch["x"][:5], batch["y"][:5]).item()
    weights = worker.state.state_dict()["model"]
    worker.close()
    assert bool(ran) == (compiled and world.rank < 2), "compiled code runs where there are samples"
    return (
        losses,
        abs(validation - expected) / expected,
        max(float((weights[name] - value).abs().max()) for name, value in plain.state_dict().items()),
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_training_is_that_of_plain_pytorch_when_branches_come_and_go(pool: Pool, compiled: bool) -> None:
    for losses, validation, weights in pool.run(3, trained, ((4,), (1, 2), None), compiled, timeout_s=120.0):
        assert max(losses) <= BAR
        assert validation <= BAR
        assert weights <= BAR


class Sometimes(nn.Module):
    """With some batches it goes where the example did not: to BatchNorm in some micro-batches, or to draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, norm: Tensor, draw: Tensor) -> Tensor:
        y = self.layer(x)
        y = self.norm(y) if norm.sum() > 0 else y
        return (torch.dropout(y, 0.5, True) if draw.sum() > 0 else y).pow(2).mean()


def refused(world: World, batch: dict[str, Tensor], batch_norm: bool) -> str:
    count = read_count("samples")
    torch.manual_seed(0)
    made = opaque(Sometimes(), batch, reason="", loss=count.loss, count=count, random=False, batch_norm=batch_norm)
    worker = _worker(world, Sometimes(), made.graph, count, ((2, 2), (2, 2)))
    with pytest.raises(CaptureError) as told:
        worker.gradients(batch)
    worker.close()
    return str(told.value)


@pytest.mark.parametrize(("what", "told"), [("norm", "a rank has reached BatchNorm"), ("draw", "draws random numbers")])
def test_a_model_that_leaves_its_way_is_refused_and_not_waited_for(pool: Pool, what: str, told: str) -> None:
    nothing, some = torch.zeros(8), torch.tensor([1.0, 1, 0, 0, 0, 0, 1, 1])
    batch = {"x": torch.ones(8, 4), "norm": nothing, "draw": nothing} | {what: some if what == "norm" else some + 1}
    for said in pool.run(2, refused, batch, what == "norm"):
        assert told in said


class Unseen(nn.Module):
    """Its labels are looked up where no graph shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(x)
        return scores.sum() if scores.isnan().any() else nn.functional.cross_entropy(scores, labels)


def test_a_label_outside_of_the_classes_is_told_with_step_module_and_line() -> None:
    batch = {"x": torch.randn(4, WIDTH), "labels": torch.tensor([0, 1, 2, 3])}
    module = Unseen()
    worker = _worker(World(rank=0, world_size=1), module, *graph_of(copy.deepcopy(module), batch, "samples"), ((4,),))
    worker.step(batch)
    batch["labels"][2] = 4
    with pytest.raises(DataError, match="step 2, in Unseen: IndexError: Target 4 is out of bounds") as told:
        worker.step(batch)
    assert f"{__file__}:" in str(told.value)
    with pytest.raises(DataError, match="evaluation, in Unseen: IndexError: Target 4 is out of bounds"):
        worker.evaluate(batch)
