"""Steps of a device that trains the whole model by itself, to be timed: those of the runtime, with all that it does besides passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from heterodyne.api.session import Session
from heterodyne.cluster.spec import Cluster
from heterodyne.frontend import CapturedModel
from heterodyne.job import OptimizerSection
from heterodyne.measure.step_overhead import LoneSteps
from heterodyne.measure.whole_model import WholeModel
from heterodyne.plan.lower import lower
from heterodyne.plan.precision import Precisions, precision_of
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.exact.one_device import one_device_plan
from heterodyne.runtime.worker import Worker

__all__ = ["lone_steps"]


def lone_steps(
    session: Session,
    captured: CapturedModel,
    whole: WholeModel,
    *,
    optimizer: OptimizerSection,
    precision: Precisions,
) -> LoneSteps:
    """On the device of this rank, with a copy of the model and one micro-batch a step."""
    graph, own = captured.graph, session.cluster.devices[session.rank]
    cluster = Cluster(name="one device", devices=(own,))

    @contextmanager
    def steps(size: int) -> Iterator[Callable[[], object]]:
        plan = one_device_plan(graph, cluster, (0,), (size,))
        plan = plan.model_copy(update={"precision": precision_of(precision, own.kind)})
        batch = dict(zip((i.name for i in graph.inputs), whole.inputs_of(size, torch.device("cpu")), strict=True))
        with (
            torch.random.fork_rng(devices=[]),
            Communicator(rank=0, world_size=1, device=session.device) as alone,
        ):
            worker = Worker(
                whole.build(session.device),
                lowered=lower(plan, graph, cluster, clip=False),
                communicator=alone,
                loss_count=captured.loss_count,
                optimizer=optimizer,
                total_steps=1,
                clip_grad_norm=0.0,
            )
            try:
                yield lambda: worker.step(batch)
            finally:
                worker.close()

    return steps
