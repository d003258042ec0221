"""Law 1 in processes: a step, or several, under a plan against one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection
from heterodyne.loss_count import LossCount
from heterodyne.plan.boxes import Box
from heterodyne.plan.placement import Placement
from heterodyne.runtime.exact.verify import compare, one_device_gradients
from heterodyne.runtime.weights.boxed import boxed
from heterodyne.runtime.weights.optimizer import learning_rate, make_optimizer, norms_and_biases
from heterodyne.runtime.worker import Worker
from multiprocess.models import Case, build, captured
from multiprocess.pool import Pool, World
from multiprocess.work import PipelineOf, Shares, copied, staged_worker, worker_of

BAR = 1e-5
SEED, STEP, TOTAL_STEPS = 5, 3, 10
Errors = list[tuple[str, float]]


@dataclass(frozen=True)
class Spread:
    """A plan of pipelines for some number of ranks. ``hosts``: see `cluster_of`."""

    world: int
    schedule: str
    pipelines: tuple[PipelineOf, ...]
    bucket_bytes: int = 4096
    precision: str = "fp32"
    compiled: bool = False
    zero: int = 0
    hosts: str = ""

    @property
    def samples(self) -> int:
        return sum(sum(pipeline.sizes) for pipeline in self.pipelines)

    def worker(self, world: World, case: Case) -> Worker:
        worker = staged_worker(
            world,
            case,
            self.pipelines,
            self.schedule,
            bucket_bytes=self.bucket_bytes,
            seed=SEED,
            precision=self.precision,
            compile_stages=self.compiled,
            zero=self.zero,
            hosts=self.hosts,
        )
        assert worker.runs_compiled or not self.compiled
        return worker


@dataclass(frozen=True)
class Replicas:
    """A plan in which each rank that is not idle has the whole model."""

    shares: Shares
    bucket_bytes: int = 4096
    backends: tuple[str, ...] | None = None

    @property
    def world(self) -> int:
        return len(self.shares)

    @property
    def samples(self) -> int:
        return sum(sum(sizes or ()) for sizes in self.shares)

    def worker(self, world: World, case: Case) -> Worker:
        return worker_of(world, case, self.shares, bucket_bytes=self.bucket_bytes, seed=SEED, backends=self.backends)


def compared(
    world: World,
    worker: Worker,
    batch: dict[str, Tensor],
    alone: Case,
    count: LossCount,
    *,
    step: int = STEP,
    seed: int = SEED,
    alone_on: str = "cpu",
    empty_parts: bool = True,
) -> tuple[Errors, set[str]]:
    """Return the largest errors of one step over all that this rank holds, the loss first, and which gradients it has (an idle rank:
    should have). The worker is closed. ``empty_parts``: whether a part of a weight in which nothing is has a gradient.
    """
    loss, gradients = worker.gradients(batch, step)
    gradients = copied(gradients)
    place = worker.placement.places[world.rank]
    buffers = {n: b.detach().clone() for n, b in worker.module.named_buffers() if not b.is_meta}
    boxes = {
        n: worker.ownership.box(world.rank, n) for n in worker.ownership.owners if worker.ownership.holds(world.rank, n)
    }
    worker.close()
    device = torch.device(alone_on)
    expected_loss, expected = one_device_gradients(
        alone.module.to(device),
        alone.batch,
        graph=alone.graph,
        placement=worker.placement,
        device=device,
        precision="fp32",
        loss_count=count,
        seed=seed,
        step=step,
    )
    if not place.active:
        assert not gradients, "an idle rank has none"
        return [("loss", compare(loss, {}, expected_loss, {}).loss)], set(expected)
    if all(len(pipeline.stages) == 1 and not pipeline.stages[0].sharded for pipeline in worker.plan.pipelines):
        assert expected.keys() <= boxes.keys(), "each rank has the whole model"
    held = {n for n, box in boxes.items() if empty_parts or all(cut.first < cut.stop for cut in box)}
    of_mine = {name: gradient for name, gradient in expected.items() if name in held}
    # The error of a slice is told in terms of the whole, as that of a whole is.
    mine = {n: with_box(expected.get(n), boxes[n], part) for n, part in gradients.items() if empty_parts or n in held}
    found = compare(loss, mine, expected_loss, of_mine)
    errors = [("loss", found.loss), *found.gradients[:2]]
    if place.micro_batches.samples:
        wanted = {n: boxed(b, boxes[n]) for n, b in alone.module.named_buffers() if n in boxes and n in buffers}
        errors += compare(0.0, {n: buffers[n] for n in wanted}, 0.0, wanted).gradients[:1]
    return errors, set(gradients)


def with_box(whole: Tensor | None, box: Box, gradient: Tensor) -> Tensor:
    """Return a gradient of which one box is replaced, or the box alone, where there is no other."""
    if whole is None or not box:
        return gradient
    replaced = whole.clone()
    boxed(replaced, box).copy_(gradient)
    return replaced


def errors_of(
    world: World, graph: ModelGraph, plan: Spread | Replicas, dtype: torch.dtype = torch.float32, alone_on: str = "cpu"
) -> Errors:
    """Return the largest errors of one step of a case of `models` under the plan."""
    case, alone = (build(graph, plan.samples, dtype=dtype) for _ in range(2))
    return compared(world, plan.worker(world, case), case.batch, alone, alone.count, alone_on=alone_on)[0]


def require_exact(
    pool: Pool,
    name: str,
    plan: Spread | Replicas,
    *more: Any,
    job: Callable[..., Errors] = errors_of,
    bar: float = BAR,
    loss_bar: float | None = None,
    **how: Any,
) -> None:
    """Require that no rank finds an error above the bar. ``more``: for the job; ``how``: for the pool."""
    for errors in pool.run(plan.world, job, captured(name), plan, *more, **how):
        for what, error in errors:
            assert error <= (loss_bar if what == "loss" and loss_bar is not None else bar), (errors, plan)


def train_alone(
    case: Case,
    placement: Placement,
    optimizer: OptimizerSection | Callable[..., torch.optim.Optimizer],
    steps: int,
    clip: float,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return the losses, the norms and what the model becomes on one device: PyTorch's optimizer on its gradients.

    Of the plan only the micro-steps matter here: what is one batch to BatchNorm is part of the mathematics.
    """
    trained = {n: p for n, p in case.module.named_parameters() if p.requires_grad}
    section = optimizer if isinstance(optimizer, OptimizerSection) else None
    made = (
        make_optimizer(section, trained, undecayed=norms_and_biases(case.module))
        if section is not None
        else optimizer(list(trained.values()))  # type: ignore[operator]
    )
    losses, norms = [], []
    for step in range(steps):
        loss, gradients = one_device_gradients(
            case.module,
            case.batch,
            graph=case.graph,
            placement=placement,
            device=torch.device("cpu"),
            precision="fp32",
            loss_count=case.count,
            seed=SEED,
            step=step,
        )
        for n, p in trained.items():
            p.grad = gradients.get(n)
        norms.append(torch.nn.utils.clip_grad_norm_(list(trained.values()), clip or float("inf")).item())
        for group in made.param_groups if section is not None else ():
            group["lr"] = learning_rate(section, step, TOTAL_STEPS)
        made.step()
        losses.append(loss)
    return losses, norms, copied(case.module.state_dict())
