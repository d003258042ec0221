"""Cases in which the planner may keep something on hosts: what it chooses, and the other way, both run in turns on the same devices.

No time here is that of a GPU. On the test accelerator, whose kernels run on the processor, layers sleep for as long as they are told
(`sleeping_model`), and a copy between device and host takes its bytes times a rate that the case sets, on a thread that sleeps too. So
copies hide behind what is computed as on a link of its own, while runtime, streams and order of the copies are those of any device.
Rates are multiples of what a layer takes forward for each byte that it keeps: below 1 copies hide, above they do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from memory_truth import sample
from results import Results, spread
from sleeping_model import sleeping, traced

from device.slow_copies import SlowCopies
from device.test_exactness import A
from heterodyne.api.stage_cutting import StageCutter
from heterodyne.cluster.profile import WHOLE, BlockSample, DeviceProfile, LinkSample, Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection
from heterodyne.loss_count import LossCount
from heterodyne.measure.block_run import BlockRun
from heterodyne.measure.clock import clock_of
from heterodyne.measure.whole_model import WholeModel, without_weights
from heterodyne.model_output import loss_of
from heterodyne.plan.lower import lower
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Pipeline, Plan
from heterodyne.processes.heap import keep_freed_memory
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.stages import host_link
from heterodyne.runtime.worker import Worker
from heterodyne.search.planner import plan as search_plan
from heterodyne.search.predict import plan_of, stage_of
from heterodyne.search.relief import with_relief
from multiprocess.pool import Pool, World, accelerator
from multiprocess.work import cluster_of

__all__ = ["CASES", "choices", "tell_worst"]

SAMPLES = 8
MEMORY = MemoryAssumptions(fragmentation=0.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """``lacks``: the part of its activations for which a device has no room, or, ``of_state``, of the state of the last device.

    ``rate``: of copies. ``devices``: as many; with several they are replicas.
    """

    lacks: float
    rate: float
    of_state: bool = False
    devices: int = 1


CASES: Mapping[str, Case] = {
    "room for all, a fast link": Case(lacks=-0.5, rate=0.5),
    "room for all, a slow link": Case(lacks=-0.5, rate=4.0),
    "a fifth of activations lacks, a fast link": Case(lacks=0.2, rate=0.1),
    "a fifth of activations lacks, a slow link": Case(lacks=0.2, rate=8.0),
    "a third of activations lacks, a fast link": Case(lacks=0.35, rate=0.1),
    "a third of activations lacks, a slow link": Case(lacks=0.35, rate=8.0),
    "half of the state lacks, one device": Case(lacks=0.5, rate=1.0, of_state=True),
    "a third of the state of one of two lacks, a fast link": Case(lacks=0.3, rate=0.02, of_state=True, devices=2),
    "a third of the state of one of two lacks, a slow link": Case(lacks=0.3, rate=4.0, of_state=True, devices=2),
    "room for the state of both, a fast link": Case(lacks=-0.5, rate=0.02, of_state=True, devices=2),
}


def choices(results: Results, pool: Pool, parts: Collection[str], *, rounds: int) -> None:
    """The cases with these numbers, from 1 on."""
    wanted = {str(number): of for number, of in enumerate(CASES.items(), 1) if str(number) in parts}
    counts = sorted({case.devices for _, case in wanted.values()})
    profiles = {n: pool.run(n, measured, devices=(A,) * n, timeout_s=300.0)[0] for n in counts}
    for part, (name, case) in wanted.items():
        devices = (A,) * case.devices
        found = pool.run(
            case.devices, both_ways, case, profiles[case.devices], rounds, devices=devices, timeout_s=300.0
        )[0]
        told = {way: spread(seconds) for way, seconds in found["seconds"].items()}
        if "other" not in told:
            results.row(
                f"{name}: {found['chosen']}, the only way",
                part=part,
                step_s=told["chosen"],
                predicted_s=found["predicted"],
            )
            continue
        ratio = median(a / b for a, b in zip(*(found["seconds"][way] for way in ("chosen", "other")), strict=True))
        results.row(
            f"{name}: {found['chosen']}",
            part=part,
            step_s=told["chosen"],
            other_s=told["other"],
            ratio=ratio,
            predicted_s=found["predicted"],
        )


def tell_worst(results: Results) -> None:
    """The bar, of all cases that were run two ways."""
    ratios = [row["ratio"] for row in results.rows if "ratio" in row]
    if ratios:
        results.bar("the planner's choice over the other way, worst case", max(ratios), "<= 1.03")
        results.bar("cases that were run", sum("predicted_s" in row for row in results.rows), f">= {len(CASES)}")


# ---- What is known of the devices ----------------------------------------------------------------------------------


def measured(world: World) -> Profile:
    """By all devices at the same time."""
    keep_freed_memory()
    device = torch.device(accelerator(world.device).name)
    module, captured, batch = traced()
    whole = WholeModel(
        build=lambda where: sleeping().to(where),
        inputs=captured.graph.inputs,
        example={name: value[:4] for name, value in batch.items()},
        loss=loss_of,
        build_empty=lambda: without_weights(module),
    )
    programs = {**{kind: captured.block(block) for kind, block in captured.graph.kinds.items()}, WHOLE: whole}
    blocks = {
        kind: tuple(timed(program, size, device) for size in (SAMPLES // 2, SAMPLES))
        for kind, program in programs.items()
    }
    update = update_s_per_byte(captured.graph)
    own = DeviceProfile(blocks=blocks, optimizer_s_per_byte=update, host_update_s_per_byte=update)
    ids = tuple(d.id for d in cluster_of(world.world_size, world.devices).devices)
    links = tuple(
        LinkSample(op="all_reduce", devices=ids, bytes=size, seconds=1e-3 + 2e-9 * size, spread=0.0)
        for size in (1000, 1_000_000)
    )
    return Profile(key="", devices=dict.fromkeys(ids, own), links=links if world.world_size > 1 else ())


def timed(program: Any, size: int, device: torch.device) -> BlockSample:
    """Its memory, and the median of its times."""
    run, clock = BlockRun(program, size, device, precision="fp32", seed=0, clock=clock_of(device)), clock_of(device)
    run()
    marks = [run() for _ in range(5)]
    forward, backward = (median(clock.seconds(m[i], m[i + 1]) for m in marks) for i in (0, 2))
    half = {"input_s": backward / 2, "weight_s": backward / 2}
    return replace(sample(program, size, device, "fp32"), forward_s=forward, backward_s=backward, **half)


def update_s_per_byte(graph: ModelGraph) -> float:
    weights = [torch.nn.Parameter(torch.zeros(p.shape)) for p in graph.parameters if p.trainable]
    optimizer = torch.optim.AdamW(weights, fused=True)
    seconds = []
    for _ in range(4):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        started_s = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - started_s)
    return median(seconds[1:]) / graph.trainable_bytes


def with_rate(profile: Profile, s_per_byte: float) -> Profile:
    """Copies between devices and hosts take so long; 0: nothing may go there."""

    def of(own: DeviceProfile) -> DeviceProfile:
        update = own.optimizer_s_per_byte + 2 * s_per_byte  # gradients there, weights back
        return replace(
            own, host_copy_s_per_byte=s_per_byte, host_update_s_per_byte=update if s_per_byte else 0.0
        )  # fmt: skip

    return replace(profile, devices={name: of(own) for name, own in profile.devices.items()})


# ---- The two ways --------------------------------------------------------------------------------------------------


def both_ways(world: World, case: Case, profile: Profile, rounds: int) -> dict[str, Any]:
    """What was chosen, seconds of the steps of both ways, one a round, and what was predicted of them."""
    keep_freed_memory()
    _, captured, batch = traced()
    graph, cluster = captured.graph, cluster_of(world.world_size, world.devices)
    layer = next(profile.devices[cluster.devices[0].id].blocks[b.kind][-1] for b in graph.blocks if b.index == 1)
    rate = case.rate * layer.forward_s / layer.saved_bytes
    profile = with_rate(profile, rate)
    cluster = limited(graph, cluster, profile, case)
    ask = partial(
        search_plan,
        graph,
        cluster,
        global_batch_size=SAMPLES * case.devices,
        micro_batch_sizes=(SAMPLES,),
        memory=MEMORY,
    )
    chosen = ask(profile)
    plans = {"chosen": chosen.plan}
    other = other_way(chosen.plan, case, graph, cluster, profile, lambda: ask(with_rate(profile, 0.0)).plan)
    if other is not None:
        plans["other"] = other
    predicted = {way: ask(profile, given=plan).chosen.step_s for way, plan in plans.items()}
    samples = {name: value[: SAMPLES * case.devices] for name, value in batch.items()}
    slow = SlowCopies(accelerator(world.device), torch.device(world.device, 0), seed=0, most_s=0.0, s_per_byte=rate)
    with mock.patch.object(host_link, "copy", slow.copy):
        workers = {way: worker_of(world, plan, graph, cluster, captured.loss_count) for way, plan in plans.items()}
        seconds = {way: [] for way in workers}
        for number in range(rounds + 1):
            for way, worker in workers.items():
                started_s = time.perf_counter()
                worker.step(samples)
                torch.accelerator.synchronize(torch.device(world.device, 0))
                if world.world_size > 1:
                    dist.barrier()  # a step is over when it is on all devices, their updates included
                if number:
                    seconds[way].append(time.perf_counter() - started_s)
    for worker in workers.values():
        worker.close()
    slow.close()
    return {"chosen": said(chosen.plan), "seconds": seconds, "predicted": predicted}


def limited(graph: ModelGraph, cluster: Cluster, profile: Profile, case: Case) -> Cluster:
    """Devices with as much memory as the case gives them."""
    use = CostModel(graph=graph, cluster=cluster, profile=profile, memory=MEMORY).memory_use(
        cluster.devices[0].id, SAMPLES
    )
    part = use.optimizer if case.of_state else use.activations
    enough, little = int(use.total * 1.5), int(use.total - case.lacks * part)
    last = len(cluster.devices) - 1
    return replace(
        cluster,
        devices=tuple(replace(d, memory_bytes=little if n == last else enough) for n, d in enumerate(cluster.devices)),
    )


def other_way(
    chosen: Plan, case: Case, graph: ModelGraph, cluster: Cluster, profile: Profile, without: Callable[[], Plan]
) -> Plan | None:
    """Without hosts if they are used, with them if not; None: there is none."""
    stages = [stage for pipeline in chosen.pipelines for stage in pipeline.stages]
    if any(stage.offload or stage.offload_activations for stage in stages):
        try:
            return without()
        except InfeasibleError:
            return None
    model = CostModel(graph=graph, cluster=cluster, profile=profile, memory=MEMORY)
    if case.of_state:
        pipelines = []
        for number, device in enumerate(cluster.devices):
            stage = stage_of((0, len(graph.ops)), (device.id,)).model_copy(
                update={"offload": number == case.devices - 1}
            )
            pipelines.append(Pipeline(micro_batches=MicroBatches((SAMPLES,)), stages=(stage,)))
        return plan_of(model, SAMPLES * case.devices, tuple(pipelines))
    device = cluster.devices[0].id
    plain = Pipeline(micro_batches=MicroBatches((SAMPLES,)), stages=(stage_of((0, len(graph.ops)), (device,)),))
    lacking = int(max(0.2, case.lacks) * model.memory_use(device, SAMPLES).activations)
    return plan_of(model, SAMPLES, (with_relief(model, plain, {device: lacking}, [1], {}, ("host",)),))


def said(plan: Plan) -> str:
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    ways = {
        "activations on the host": any(stage.offload_activations for stage in stages),
        "state on the host": any(stage.offload for stage in stages),
        "recompute": any(stage.recompute for stage in stages),
        "state shared out": bool(plan.zero),
        f"{len(plan.idle)} idle": bool(plan.idle),
    }
    return ", ".join(way for way, taken in ways.items() if taken) or "all on the devices"


def worker_of(world: World, plan: Plan, graph: ModelGraph, cluster: Cluster, count: LossCount) -> Worker:
    module, (_, captured, _) = sleeping(), traced()
    return Worker(
        module,
        lowered=lower(plan, graph, cluster, clip=True),
        communicator=Communicator(rank=world.rank, world_size=world.world_size, device=torch.device(world.device)),
        loss_count=count,
        optimizer=OptimizerSection(lr=1e-4),
        total_steps=100,
        stage_programs=StageCutter(captured, module),
    )
