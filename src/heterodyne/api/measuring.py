"""What every rank measures of a model, and at which micro-batch sizes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from heterodyne.api.before_measuring import measuring_s
from heterodyne.api.compiled import compile_module
from heterodyne.api.measured_draws import MeasuredDraws
from heterodyne.api.session import Session
from heterodyne.api.settings import Settings
from heterodyne.api.stage_cutting import StageCutter
from heterodyne.cluster.profile import WHOLE, Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.doctor.faults import LinkFacts, slow_links
from heterodyne.frontend import Captured, CapturedModel
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection
from heterodyne.measure.block_run import BlockProgram
from heterodyne.measure.cache import Cache, default_folder
from heterodyne.measure.session import Request, measure
from heterodyne.measure.step_overhead import LoneSteps
from heterodyne.measure.whole_model import WholeModel
from heterodyne.plan.lower import lower
from heterodyne.plan.precision import Precisions, precision_of
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.exact.one_device import one_device_plan
from heterodyne.runtime.stages.deferred import DeferredWeights
from heterodyne.runtime.worker import Worker
from heterodyne.units import counted, format_seconds

__all__ = ["lone_steps", "measure_everywhere", "sizes_to_measure"]


_TELL_EVERY_S = 5.0
_SEVERAL = 2


def sizes_to_measure(graph: ModelGraph, settings: Settings) -> tuple[Sequence[int], bool]:
    """The micro-batch sizes to measure and try, and whether to stop at those that are no faster.

    Where a replica takes all its samples in one micro-batch, any share is a size of one; where BatchNorm sees one value a sample, one
    sample has no statistics."""
    given, largest = settings.parallelism.micro_batch_sizes, settings.global_batch_size
    doubled = sorted({*(1 << power for power in range(largest.bit_length())), largest})
    if graph.loss.reduction == "coupled":
        return doubled, False
    sizes: Sequence[int] = doubled if given == "auto" else given
    if any(op.name in graph.batch_statistics and len(op.outputs[0].shape) == 2 for op in graph.ops):
        sizes = [size for size in sizes if size > 1] or [2]
    return sizes, given == "auto"


def measure_everywhere(
    session: Session,
    captured: CapturedModel,
    whole: WholeModel,
    settings: Settings,
    *,
    fresh: bool = False,
    to_plan: bool = False,
) -> Profile:
    """The profile of this model on this cluster, from the cache where it still holds. Raises MeasureError.

    ``to_plan``: for a plan of these devices alone, for which one device takes less time (see `measuring_s`).
    """
    graph = captured.graph
    sizes, while_faster = sizes_to_measure(graph, settings)
    asked_s = settings.parallelism.measure_s
    budget_s = measuring_s(session.world_size if to_plan else _SEVERAL, asked_s)
    follows_training = to_plan and asked_s == "auto" and settings.training_steps is not None
    request = Request(
        graph=graph,
        programs=_programs(captured, whole),
        cluster=session.cluster,
        device=session.device,
        micro_batch_sizes=sizes,
        while_faster=while_faster,
        precision=precision_of(settings.precision, session.cluster.devices[session.rank].kind),
        optimizer=settings.optimizer.name,
        budget_s=budget_s,
        training_samples=(settings.training_steps or 0) * settings.global_batch_size if follows_training else None,
        halves=DeferredWeights
        if len(session.cluster.devices) > 1 and graph.opaque is None and not settings.compile
        else None,
        compile=compile_module if settings.compile else None,
        around=MeasuredDraws.of(graph, session.device),
        lone_steps=None
        if settings.compile or whole.weightless
        else lone_steps(session, captured, whole, optimizer=settings.optimizer, precision=settings.precision),
        model_bytes=whole.resident_bytes,
    )
    with session.announced(
        f"measuring {counted(session.world_size, 'device')}, which may take {format_seconds(budget_s)}"
    ):
        profile = measure(
            request,
            session.communicator,
            cache=Cache(folder=default_folder(os.environ)),
            refresh=fresh,
            say=session.say,
            progress=_progress(session),
        )
    for fault in slow_links(_links_of(profile, session.cluster), session.cluster):
        session.say(f"{fault.host}: {fault.what}; the plan goes by what was measured. {fault.remedy}")
    return profile


def _links_of(profile: Profile, cluster: Cluster) -> list[LinkFacts]:
    """Return what was measured of the link between each two nodes."""
    rates: dict[tuple[str, str], float] = {}
    for each in profile.links:
        a, b, *_ = sorted(cluster.device(name).node for name in each.devices)
        if each.op == "send" and a != b:
            rates[a, b] = max(rates.get((a, b), 0.0), each.bytes / each.seconds)
    return [LinkFacts(hosts=hosts, bandwidth_bytes_per_s=rate, latency_s=0.0) for hosts, rate in rates.items()]


def _programs(captured: CapturedModel, whole: WholeModel) -> dict[str, BlockProgram]:
    """Return what is measured: each kind of block, and the model in one piece; of a model without a graph that is its one block."""
    kinds = captured.graph.kinds
    if captured.graph.opaque is not None:
        return dict.fromkeys(kinds, whole)
    return {**{kind: captured.block(block) for kind, block in kinds.items()}, WHOLE: whole}


def _progress(session: Session) -> Callable[[str, int, int], None]:
    """Tells every few seconds how far measuring has come on this rank."""
    told_s = time.monotonic()

    def tell(what: str, number: int, total: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s > _TELL_EVERY_S:
            told_s = time.monotonic()
            session.say(f"  {what}: {number} of {total}")

    return tell


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
            module = whole.build(session.device)
            worker = Worker(
                module,
                lowered=lower(plan, graph, cluster, clip=False),
                communicator=alone,
                loss_count=captured.loss_count,
                stage_programs=StageCutter(captured, module) if isinstance(captured, Captured) else None,
                optimizer=optimizer,
                total_steps=1,
                clip_grad_norm=0.0,
            )
            try:
                yield lambda: worker.step(batch)
            finally:
                worker.close()

    return steps
