"""A loop of one's own on several ranks: outputs, metrics, states and the weights at the end are those of one device under any plan."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import heterodyne as hd
from heterodyne.api.loop.batches import batch_format
from heterodyne.api.loop.model_with_loss import with_loss
from heterodyne.api.session import Session
from heterodyne.errors import CaptureError, DataError, PlanError
from heterodyne.frontend import trace
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan
from heterodyne.processes import GAVE_UP_ON_A_PEER
from heterodyne.processes.status import TOLD
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.liveness.failure_detector import WatchLimits
from heterodyne.runtime.rendezvous.distributed import init_distributed
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from multiprocess.crowd import Crowd
from multiprocess.pool import Pool, World
from multiprocess.work import PipelineOf, StageOf, cluster_of, plan_of, staged_plan
from pure.build import linear, profile

SAMPLES, STEPS = 6, 3


class Labelled(nn.Module):
    """A buffer that is not in the state dict, and one that is; a layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.last = self.layers[3]
        self.head = nn.Linear(8, 4, bias=False)
        self.register_buffer("scale", torch.tensor([2.0]), persistent=False)
        self.register_buffer("shift", torch.tensor([0.5]))

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layers(points * self.shift)
        return self.head(hidden) * self.scale, hidden


def loss_of(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], labels)


def batch_of(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    points = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))
    return points, points.argmax(1)


def adamw(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    named = list(named_parameters)
    matrices = [p for name, p in named if p.dim() > 1 and name.startswith(("layers", "head", "none"))]
    others = [p for _, p in named if p.dim() < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": others}], lr=0.01, eps=1e-3)


def hits(outputs: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[float, int]:
    return (outputs[0].argmax(1) == batch[1]).sum().item(), len(batch[1])


def f1() -> Any:
    return pytest.importorskip("torchmetrics").classification.MulticlassF1Score(num_classes=4, average="macro")


def first_and_labels(outputs: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return outputs[0], batch[1]


@functools.cache
def graph() -> ModelGraph:
    model, batch = Labelled(), batch_of(SAMPLES)
    format = batch_format(model, batch, has_loss=True)
    named = format.named(batch)
    assert isinstance(named, dict)
    return trace(with_loss(model, loss_of, format, named, withheld=()), named, name="Labelled").graph


def plans() -> dict[str, Plan]:
    """On three ranks: unequal shares and one that is idle; two stages and an idle rank; a stage in parts and one behind it."""
    here = cluster_of(3)
    found = graph()
    cut = next(i for i, op in enumerate(found.ops) if "tanh" in op.target) + 1
    end = len(found.ops)
    first, second = StageOf(cut, (0,), (1,)), StageOf(end, (1,), (1,))
    in_parts = StageOf(cut, (0, 2), (5, 3), kind="split")
    return {
        "data": plan_of(found, here, ((2, 2), None, (1, 1))),
        "1F1B": staged_plan(found, here, [PipelineOf((2, 2, 2), (first, second))], "1F1B"),
        "split": staged_plan(found, here, [PipelineOf((4, 2), (in_parts, second))], "1F1B"),
    }


def session_of(world: World) -> Session:
    return Session(
        cluster=cluster_of(world.world_size),
        device=torch.device("cpu"),
        communicator=Communicator(rank=world.rank, world_size=world.world_size, device=torch.device("cpu")),
        agreement=Agreement.of_all(),
        watchdog=None,
    )


def start(
    world: World, model: nn.Module, plan: Plan, found: ModelGraph, *, check_s: float = 10.0, **more: Any
) -> hd.Distributed:
    here = more.get("session") or session_of(world)
    known = profile(found, here.cluster, [linear(1e-3)] * world.world_size, reduce=lambda _: 1e-6)
    found_so = hd.PlanOptions(plan, profile=known, check_s=check_s)
    options = {"loss": loss_of, "optimizer": adamw, "plan": found_so, "session": here, **more}
    return hd.distribute(model, batch_of(SAMPLES), **options)


def loop(world: World, found: ModelGraph, plan: Plan, folder: str) -> dict[str, Any]:
    model = Labelled()
    optimizer = adamw(model.named_parameters())  # as a script has them before
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with start(world, model, plan, found, optimizer=optimizer, run=Path(folder) / "run") as trainer:
        assert optimizer.state is trainer.optimizer.state
        losses = []
        for step in range(STEPS):
            losses.append(trainer.step(batch_of(SAMPLES, step)).loss)
            scheduler.step()
        results = {
            "losses": losses,
            "rates": [group["lr"] for group in trainer.optimizer.param_groups],
            "outputs": trainer.predict(batch_of(5)),
            "first": trainer.predict(batch_of(5)[:1], on="rank0"),
            "metrics": trainer.validate(
                [batch_of(5), batch_of(2, 9)], {"accuracy": hits, "f1": (f1(), first_and_labels)}
            ),
            "state": {name: tensor.clone() for name, tensor in trainer.state_dict()["model"].items()},
        }
        trainer.save_pretrained(Path(folder) / "model")
        trainer.save_checkpoint(extra={"scheduler": scheduler.state_dict()})
    return {
        **results,
        "model": {name: tensor.detach() for name, tensor in model.state_dict().items()},
        "scale": model.scale,
    }


def hooked(world: World, found: ModelGraph, plan: Plan) -> str:
    model = Labelled()
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.raises(CaptureError) as refused, start(world, model, plan, found, check_s=0):
        pass
    return str(refused.value)


def test_a_hook_on_a_gradient_is_refused_on_the_ranks_too_that_do_not_hold_it(pool: Pool) -> None:
    for told in pool.run(3, hooked, graph(), plans()["1F1B"]):
        assert "head.weight' has a hook on its gradient" in told


def goes_on_after_outputs(world: World, found: ModelGraph, plan: Plan) -> list[float]:
    with start(world, Labelled(), plan, found) as trainer:
        losses = [trainer.step(batch_of(SAMPLES)).loss]
        trainer.predict(batch_of(5))
        return [*losses, trainer.step(batch_of(SAMPLES)).loss]


@pytest.mark.parametrize("plan", ["1F1B", "split"])
def test_a_layer_under_two_names_has_its_weights_again_after_outputs(pool: Pool, plan: str) -> None:
    model = Labelled()
    optimizer = adamw(model.named_parameters())
    expected = []
    for _ in range(2):
        points, labels = batch_of(SAMPLES)
        loss = loss_of(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in pool.run(3, goes_on_after_outputs, graph(), plans()[plan]):
        assert losses == pytest.approx(expected, rel=1e-5)


def resumed(world: World, found: ModelGraph, plan: Plan, folder: str) -> tuple[float, int]:
    with start(
        world, Labelled(), plan, found, run=hd.RunOptions(Path(folder) / "run", resume=True, weights_at_end="none")
    ) as trainer:
        for group in trainer.optimizer.param_groups:
            group["lr"] = trainer.extra["scheduler"]["_last_lr"][0]
        return trainer.step(batch_of(SAMPLES, STEPS)).loss, trainer.steps_done


@functools.cache
def on_one_device() -> tuple[list[float], nn.Module, torch.optim.Optimizer]:
    model = Labelled()
    optimizer = adamw(model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    losses = []
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        points, labels = batch_of(SAMPLES, step)
        loss = loss_of(model(points), labels)
        losses.append(loss.item())
        if step < STEPS:
            loss.backward()
            optimizer.step()
            scheduler.step()
    return losses, model, optimizer


@pytest.mark.parametrize(("name", "other"), [("data", "1F1B"), ("1F1B", "data"), ("split", "1F1B")])
def test_a_loop_under_a_plan_is_that_of_one_device(pool: Pool, tmp_path: Path, name: str, other: str) -> None:
    losses, plain, optimizer = on_one_device()
    results = pool.run(3, loop, graph(), plans()[name], str(tmp_path))
    outputs = plain(batch_of(5)[0])
    points, labels = (torch.cat(both) for both in zip(batch_of(5), batch_of(2, 9), strict=True))
    accuracy = (plain(points)[0].argmax(1) == labels).float().mean().item()
    for rank, found in enumerate(results):
        assert found["losses"] == pytest.approx(losses[:STEPS], rel=1e-5)
        assert found["rates"] == [group["lr"] for group in optimizer.param_groups], (
            "schedulers step alike on every rank"
        )
        for one, of in zip(found["outputs"], outputs, strict=True):
            torch.testing.assert_close(one, of.detach())
        assert (found["first"] is None) == (rank > 0)
        assert found["metrics"]["accuracy"] == pytest.approx(accuracy)
        assert found["metrics"]["f1"] == pytest.approx(f1()(plain(points)[0], labels).item())
        assert found["metrics"]["loss"] == pytest.approx(loss_of(plain(points), labels).item(), rel=1e-5)
        for weights in (found["state"], found["model"]):
            torch.testing.assert_close(dict(weights), dict(plain.state_dict()))
        assert found["scale"].item() == 2.0
    torch.testing.assert_close(results[0]["first"][0], outputs[0].detach())
    torch.testing.assert_close(load_file(tmp_path / "model" / "model.safetensors"), dict(plain.state_dict()))
    again = pool.run(3, resumed, graph(), plans()[other], str(tmp_path))
    assert again == [(pytest.approx(losses[STEPS], rel=1e-5), STEPS + 1)] * 3


def own_batches(world: World, found: ModelGraph, plan: Plan, differ_at: Sequence[int]) -> str:
    with start(world, Labelled(), plan, found, run=hd.RunOptions(weights_at_end="rank0")) as trainer:
        for step in range(6):
            seed = world.rank + 1 if step in differ_at else 0
            try:
                trainer.step(batch_of(SAMPLES, seed))
            except DataError as error:
                return f"{step}: {error}"
    return "not noticed"


def test_batches_that_differ_between_ranks_are_noticed_on_every_rank(pool: Pool) -> None:
    told = pool.run(3, own_batches, graph(), plans()["data"], [4])
    assert all(
        text.startswith("4: the batches of step 4 differ: ranks 1, 2 have another one than rank 0") for text in told
    )
    assert "take a DistributedSampler out" in told[0]


def changed_between(world: World, found: ModelGraph, plan: Plan) -> str:
    """Rank 0 alone clamps its weights."""
    model = Labelled()
    with start(world, model, plan, found, run=hd.RunOptions(weights_at_end="none")) as trainer:
        trainer.step(batch_of(SAMPLES))
        for weight in model.parameters() if world.rank == 0 else ():
            weight.data = weight.data.clamp(-0.1, 0.1)
        try:
            trainer.step(batch_of(SAMPLES))
        except PlanError as error:
            return str(error)
    return "not noticed"


def test_weights_that_ranks_change_each_in_its_own_way_are_noticed(pool: Pool) -> None:
    found = pool.run(3, changed_between, graph(), plans()["data"])
    assert all("has other values on rank 2" in text for text in found), found


class Wrong:
    """Labels of which one, sample 9 of 12, is none of the classes."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        points, labels = batch_of(12)
        return {"points": points[index], "target": labels[index] + 4 * (index == 9)}


def with_a_wrong_label(environment: WorkerEnvironment, found: ModelGraph, plan: Plan) -> None:
    with init_distributed(environment, backend="gloo", timeout_s=30.0) as meeting:
        world = World(rank=environment.rank, world_size=environment.world_size)
        here = dataclasses.replace(session_of(world), watchdog=meeting.watchdog)
        with start(world, Labelled(), plan, found, session=here) as trainer:
            for batch in hd.batches(Wrong(), global_batch_size=SAMPLES, shuffle=False):
                trainer.step(batch)


def test_a_label_that_only_one_rank_sees_ends_all_with_its_words() -> None:
    plan = plan_of(graph(), cluster_of(2), ((2,), (4,)))
    told = re.compile(
        r"DataError: step 2, sample 3 \(number 9 of the dataset\): target holds \d; the loss at \S+:\d+ has 4 classes"
    )
    with Crowd() as crowd:
        workers = [crowd.start(with_a_wrong_label, graph(), plan, rank=rank, world_size=2) for rank in range(2)]
        assert [worker.wait() for worker in workers] == [GAVE_UP_ON_A_PEER, TOLD], [worker.output for worker in workers]
        assert "rank 1 on" in workers[0].output
        assert all(told.search(worker.output) for worker in workers), workers[0].output


def alone_in_a_call(environment: WorkerEnvironment, found: ModelGraph, plan: Plan) -> None:
    """Rank 1 comes late to a step; after that rank 0 alone asks for the state."""
    limits = WatchLimits(interval_s=0.1, call_s=1.0)
    with init_distributed(environment, backend="gloo", timeout_s=30.0, limits=limits) as meeting:
        world = World(rank=environment.rank, world_size=environment.world_size)
        here = dataclasses.replace(session_of(world), watchdog=meeting.watchdog)
        with start(world, Labelled(), plan, found, session=here) as trainer:
            trainer.step(batch_of(SAMPLES))
            if trainer.rank == 1:
                time.sleep(2.0)
            trainer.step(batch_of(SAMPLES))
            if trainer.rank == 0:
                trainer.state_dict()
            trainer.step(batch_of(SAMPLES))
            time.sleep(60.0)


def test_a_call_that_only_one_rank_makes_is_named_instead_of_hanging() -> None:
    plan = plan_of(graph(), cluster_of(2), ((4,), (2,)))
    with Crowd() as crowd:
        workers = [crowd.start(alone_in_a_call, graph(), plan, rank=rank, world_size=2) for rank in range(2)]
        assert [worker.wait() for worker in workers] == [GAVE_UP_ON_A_PEER] * 2, [worker.output for worker in workers]
        assert "rank 0 waits in step() for 1 s: rank 1 has not come to it" in workers[0].output
        for worker in workers:
            assert "the ranks call different things: rank 0 is in state_dict(); rank 1 is in step()" in worker.output


def asked_to_stop(world: World, found: ModelGraph, plan: Plan) -> list[int]:
    """Rank 1 alone gets the signal, in its third step. Return after which steps the loop went on."""
    went_on = []
    with start(world, Labelled(), plan, found, optimizer=adamw) as trainer:
        while not trainer.should_stop:
            if trainer.steps_done == 2 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            trainer.step(batch_of(SAMPLES, trainer.steps_done))
            went_on.append(trainer.steps_done)
    return went_on


def test_a_signal_that_one_rank_gets_is_known_to_all_after_the_same_step(pool: Pool) -> None:
    plan = plan_of(graph(), cluster_of(2), ((4,), (2,)))
    assert pool.run(2, asked_to_stop, graph(), plan, timeout_s=60.0) == [[1, 2, 3]] * 2


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(points), labels)


class Weighted(Chain):
    def forward(self, points: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(points), labels, weight=weights)


def weighted_batch() -> dict[str, Tensor]:
    """As many samples as there are classes."""
    points, labels = batch_of(4)
    return {"points": points, "labels": labels, "weights": torch.tensor([1.0, 2.0, 0.5, 3.0])}


def with_shared_weights(world: World, plan: str) -> list[float]:
    torch.manual_seed(0)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    with hd.distribute(
        Weighted(),
        weighted_batch(),
        shared=("weights",),
        optimizer=sgd,
        plan=hd.PlanOptions(plan, measure_s=0.3, rehearsal_s=0, micro_batch_sizes=(1, 2)),
        session=session_of(world),
    ) as trainer:
        return [trainer.step(weighted_batch()).loss for _ in range(2)]


def test_an_entry_that_all_samples_share_goes_to_every_rank_whole(pool: Pool) -> None:
    torch.manual_seed(0)
    model = Weighted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(**weighted_batch())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for plan in ("data", "pipeline"):
        for found in pool.run(2, with_shared_weights, plan, timeout_s=60.0):
            assert found == pytest.approx(losses, rel=1e-5)


def trained_from_rank_0(world: World) -> float:
    """A model whose weights only one rank has is measured, planned and trained."""
    with torch.device("meta" if world.rank else "cpu"):
        torch.manual_seed(0)
        model = Chain()
    points, labels = batch_of(SAMPLES)
    batch = {"points": points, "labels": labels}
    with hd.distribute(
        model,
        batch,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        session=session_of(world),
        plan=hd.PlanOptions(measure_s=3, rehearsal_s=0, check_s=0, micro_batch_sizes=(1, 2)),
    ) as trainer:
        return trainer.step(batch).loss


def test_weights_may_be_on_one_rank_alone(pool: Pool) -> None:
    torch.manual_seed(0)
    alone = Chain()(*batch_of(SAMPLES)).item()
    assert pool.run(2, trained_from_rank_0, timeout_s=60.0) == pytest.approx([alone] * 2, rel=1e-5)
