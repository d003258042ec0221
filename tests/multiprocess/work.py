"""Plans written by hand, and workers that run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heterodyne.api.stage_cutting import StageCutter, again_of
from heterodyne.cluster.spec import Cluster, Device
from heterodyne.frontend import Captured
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection, Reach
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.lower import lower
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Axis, Exchange, Layout, Pipeline, Plan, Region, Stage
from heterodyne.runtime.checkpoint.checkpoints import Checkpoints
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.liveness.watchdog import Watchdog
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.worker import Worker
from multiprocess.models import Case, capture_of
from multiprocess.pool import World

IDLE = None
Shares = Sequence[Sequence[int] | None]  # for each rank the sizes of its micro-batches, or IDLE


def cluster_of(size: int, backends: Sequence[str] | None = None, hosts: str = "") -> Cluster:
    """``hosts``: a letter for that of each device; "": all are on one."""
    kinds = backends or ["cpu"] * size
    return Cluster(
        name="test",
        devices=tuple(
            Device(id=f"{node}/{kind}:{rank}", kind=kind, node=node, memory_bytes=2**30, backend=kind)
            for rank, (kind, node) in enumerate(zip(kinds, hosts or ["here"] * size, strict=True))
        ),
    )


def plan_of(graph: ModelGraph, cluster: Cluster, shares: Shares, *, bucket_bytes: int = 4096, **more: Any) -> Plan:
    pipelines = []
    for device, sizes in zip(cluster.devices, shares, strict=True):
        if sizes is not IDLE:
            region = Region(layout=Layout(kind="replicate", shares=(1,)))
            stage = Stage(ops=(0, len(graph.ops)), devices=(device.id,), regions=(region,))
            pipelines.append(Pipeline(micro_batches=MicroBatches(tuple(sizes)), stages=(stage,)))
    return Plan(
        model=graph.fingerprint,
        cluster=cluster.fingerprint,
        global_batch_size=sum(sum(sizes) for sizes in shares if sizes is not IDLE),
        bucket_bytes=bucket_bytes,
        pipelines=tuple(pipelines),
        idle=tuple(d.id for d, sizes in zip(cluster.devices, shares, strict=True) if sizes is IDLE),
        **more,
    )


def worker_of(
    world: World,
    case: Case,
    shares: Shares,
    *,
    bucket_bytes: int = 4096,
    clip: float = 0.0,
    optimizer: Any = None,
    seed: int = 5,
    recorder: Recorder | None = None,
    backends: Sequence[str] | None = None,
    precision: str = "fp32",
) -> Worker:
    cluster = cluster_of(world.world_size, backends or world.devices)
    plan = plan_of(case.graph, cluster, shares, bucket_bytes=bucket_bytes, precision=precision)
    device = torch.device(cluster.devices[world.rank].backend)
    return Worker(
        case.module,
        lowered=lower(plan, case.graph, cluster, clip=clip > 0),
        communicator=Communicator(rank=world.rank, world_size=world.world_size, device=device),
        loss_count=case.count,
        optimizer=optimizer or OptimizerSection(lr=1e-2, warmup_steps=2),
        total_steps=10,
        seed=seed,
        clip_grad_norm=clip,
        recorder=recorder,
        again=again_of(capture_of(case.graph.name), case.module),
    )


def save(worker: Worker, folder: Path) -> None:
    """Write a checkpoint of all ranks."""
    checkpoints = Checkpoints(folder, agreement=Agreement.of_all())
    checkpoints.save(worker.steps_done, worker.state.own(), identity={}, plan=worker.plan.dump())


def go_on(worker: Worker, folder: Path) -> dict[str, Any]:
    """Take over the latest checkpoint there; return what was read of it."""
    checkpoints = Checkpoints(folder, agreement=Agreement.of_all())
    found = checkpoints.latest()
    assert found is not None
    state = checkpoints.load(found, identity={}, wanted=worker.state.needs).state
    worker.state.load_state_dict(state)
    return state


def copied(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: gradient.detach().cpu().clone() for name, gradient in gradients.items()}


@dataclass(frozen=True)
class StageOf:
    """Ops up to ``stop`` on ``ranks``, who take ``shares``, as ``kind`` says; ``recompute``: blocks, and what they
    ``keep``; ``marked``: layouts of TaskGraphs.

    ``rows``: shares of an outer axis whose members take samples of their own; (): there is none. ``inner``: kinds and shares of others.
    ``free``: exchanges count for nothing beside work, so that all is cut that can be; else little of a small model is.
    ``hierarchical``: its tokens go to their experts once to each host. ``state``: shares of its devices of the optimizer's state.
    ``offload``: hosts keep it. ``hosted``: blocks whose activations they keep,
    ``reload``: from how many passes ahead of a backward on they come back. ``kept``: parameters stay between forward and backward.
    """

    stop: int
    ranks: tuple[int, ...]
    shares: tuple[int, ...]
    recompute: tuple[int, ...] = ()
    kind: str = "replicate"
    marked: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    overlap: bool = False
    hierarchical: bool = False
    rows: tuple[int, ...] = ()
    inner: tuple[tuple[str, tuple[int, ...]], ...] = ()
    free: bool = False
    state: tuple[int, ...] | None = None
    offload: bool = False
    keep: tuple[str, ...] = ()
    hosted: tuple[int, ...] = ()
    reload: int | None = None
    kept: bool = False

    @property
    def regions(self) -> tuple[Region, ...]:
        return (
            Region(layout=self._layout(self.kind, self.shares)),
            *(Region(task_graph=name, layout=self._layout(kind, shares)) for name, kind, shares in self.marked),
        )

    def _layout(self, kind: Any, shares: tuple[int, ...]) -> Layout:
        axes = ([("replicate", self.rows)] if self.rows else []) + [(kind, shares), *self.inner]
        (kind, shares), *others = axes
        inner = tuple(Axis(kind=way, shares=of) for way, of in others)  # type: ignore[arg-type]  # one of the kinds
        return Layout(kind=kind, shares=shares, inner=inner)


@dataclass(frozen=True)
class PipelineOf:
    """``sizes``: of its micro-batches."""

    sizes: tuple[int, ...]
    stages: tuple[StageOf, ...]
    order: tuple[str, ...] = ()


def staged_plan(
    graph: ModelGraph, cluster: Cluster, pipelines: Sequence[PipelineOf], schedule: str, **more: Any
) -> Plan:
    made = []
    for pipeline in pipelines:
        stages, start = [], 0
        for stage in pipeline.stages:
            stages.append(
                Stage(
                    ops=(start, stage.stop),
                    devices=tuple(cluster.devices[rank].id for rank in stage.ranks),
                    regions=stage.regions,
                    recompute=stage.recompute,
                    keep=stage.keep,
                    offload_activations=stage.hosted,
                    reload_ahead=stage.reload if stage.hosted else None,
                    reshard_after_forward=not stage.kept,
                    overlap=stage.overlap,
                    hierarchical=stage.hierarchical,
                    state_shares=stage.state,
                    offload=stage.offload,
                    exchange=Exchange(latency_bytes=0, flops_per_byte=1) if stage.free else Exchange(),
                )
            )
            start = stage.stop
        made.append(Pipeline(micro_batches=MicroBatches(pipeline.sizes), stages=tuple(stages), order=pipeline.order))
    used = {rank for pipeline in pipelines for stage in pipeline.stages for rank in stage.ranks}
    return Plan(
        model=graph.fingerprint,
        cluster=cluster.fingerprint,
        global_batch_size=sum(sum(pipeline.sizes) for pipeline in pipelines),
        schedule=schedule,
        pipelines=tuple(made),
        idle=tuple(d.id for rank, d in enumerate(cluster.devices) if rank not in used),
        **more,
    )


def staged_worker(
    world: World,
    case: Case,
    pipelines: Sequence[PipelineOf],
    schedule: str,
    *,
    bucket_bytes: int = 4096,
    clip: float = 0.0,
    optimizer: Any = None,
    seed: int = 5,
    precision: str = "fp32",
    recorder: Recorder | None = None,
    communicator: Communicator | None = None,
    compile_stages: bool = False,
    watch: Watchdog | None = None,
    capture: Captured | None = None,
    zero: int = 0,
    reach: Reach = "element",
    programs: Any = None,
    hosts: str = "",
    **more: Any,
) -> Worker:
    cluster = cluster_of(world.world_size, world.devices, hosts)
    plan = staged_plan(
        case.graph, cluster, pipelines, schedule, bucket_bytes=bucket_bytes, precision=precision, zero=zero
    )
    return Worker(
        case.module,
        lowered=lower(plan, case.graph, cluster, clip=clip > 0, able=Capabilities(case.graph, reach)),
        communicator=communicator
        or Communicator(rank=world.rank, world_size=world.world_size, device=torch.device(world.device)),
        loss_count=case.count if capture is None else capture.loss_count,
        optimizer=optimizer or OptimizerSection(lr=1e-2, warmup_steps=2),
        total_steps=10,
        seed=seed,
        clip_grad_norm=clip,
        recorder=recorder,
        watch=watch,
        compile_stages=compile_stages,
        stage_programs=programs or StageCutter(capture or capture_of(case.graph.name), case.module),
        again=again_of(capture or capture_of(case.graph.name), case.module),
        **more,
    )
