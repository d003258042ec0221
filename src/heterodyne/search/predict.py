"""The prediction of a plan: lowered to its program and played on the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Final

from heterodyne.cost.compute import Pass
from heterodyne.cost.model import CostModel
from heterodyne.cost.position import slices_of, worked_on
from heterodyne.cost.traffic import traffic_between_hosts
from heterodyne.plan.lower import lower
from heterodyne.plan.plan import Layout, Pipeline, Plan, Prediction, Region, Stage
from heterodyne.plan.state_shards import state_shares
from heterodyne.search.host_room import lacking_on_hosts
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.planned import Candidate, Kind
from heterodyne.sim.run import Simulation, simulate
from heterodyne.units import format_bytes

__all__ = ["compute_seconds", "overflow", "own_rates", "plan_of", "predict", "stage_of", "weighed", "with_stages"]

_PASSES: Final[tuple[Pass, ...]] = ("F", "B")


def stage_of(
    ops: tuple[int, int],
    devices: tuple[str, ...],
    shares: tuple[int, ...] = (1,),
    *,
    recompute: tuple[int, ...] = (),
) -> Stage:
    """A stage whose devices share each micro-batch."""
    regions = (Region(layout=Layout(kind="replicate", shares=shares)),)
    return Stage(ops=ops, devices=devices, regions=regions, recompute=recompute)


def with_stages(pipeline: Pipeline, changed: Callable[[int, Stage], Stage]) -> Pipeline:
    """The pipeline with each stage as it is ``changed``, given its number."""
    return pipeline.model_copy(update={"stages": tuple(map(changed, count(), pipeline.stages))})


def plan_of(model: CostModel, samples: int, pipelines: tuple[Pipeline, ...], schedule: str = "1F1B") -> Plan:
    """The plan with these pipelines; all other devices are idle."""
    used = {device for pipeline in pipelines for stage in pipeline.stages for device in stage.devices}
    return Plan(
        model=model.graph.fingerprint,
        cluster=model.cluster.fingerprint,
        global_batch_size=samples,
        precision=model.recipe.precision,
        schedule=schedule,
        bucket_bytes=model.recipe.bucket_bytes,
        pipelines=pipelines,
        idle=tuple(d.id for d in model.cluster.devices if d.id not in used),
    )


def predict(model: CostModel, made: Plan, runs: Mapping[str, MicroBatchChoice]) -> tuple[Plan, Simulation]:
    """The plan with its prediction filled in, and how it plays. Raises PlanError for a plan that cannot run."""
    lowered = lower(made, model.graph, model.cluster, clip=model.recipe.clip)
    costs = model.of(made, lowered.weights)
    simulation = simulate(lowered.program, costs, steady=lowered.steady)
    shares = state_shares(made) if made.zero else None
    between = traffic_between_hosts(model.cluster, model.collectives, costs.routes, lowered.weights.buckets, shares)
    samples_per_s = made.global_batch_size / simulation.step_s if simulation.step_s > 0 else 0.0
    bound = sum(own_rates(model, made, runs).values())
    memory = {device: simulation.peak_bytes[model.cluster.rank(device)] for device in made.devices}
    prediction = Prediction(
        step_s=simulation.step_s,
        samples_per_s=samples_per_s,
        efficiency=samples_per_s / bound if 0 < bound < float("inf") else 0.0,
        memory_bytes=memory,
        traffic={f"{source} -> {target}": size for (source, target), size in sorted(between.items())},
    )
    return made.model_copy(update={"predicted": prediction}), simulation


def overflow(model: CostModel, made: Plan, simulation: Simulation) -> dict[str, int]:
    """For each device of the plan that has too little memory for it, the bytes that it lacks."""
    over = {}
    for device in made.devices:
        lacking = simulation.peak_bytes[model.cluster.rank(device)] - model.cluster.device(device).memory_bytes
        if lacking > 0:
            over[device] = lacking
    return over


def weighed(model: CostModel, name: str, kind: Kind, made: Plan, simulation: Simulation) -> Candidate:
    """The candidate of a plan that was simulated; without a plan, and why, where devices or hosts lack memory for it."""
    if over := overflow(model, made, simulation):
        lacks = ", ".join(f"{device} lacks {format_bytes(size)}" for device, size in over.items())
        return Candidate(name=name, kind=kind, why_not=lacks, left_out=made.idle)
    if lacking := lacking_on_hosts(model, made, simulation):
        return Candidate(name=name, kind=kind, why_not=lacking, left_out=made.idle, short_of_host=True)
    return Candidate(name=name, kind=kind, plan=made, simulation=simulation, left_out=made.idle)


def own_rates(model: CostModel, made: Plan, runs: Mapping[str, MicroBatchChoice]) -> dict[str, float]:
    """Samples/s that each device reaches when all compute at the same time, each for itself, without communicating.

    Of a device that runs the whole model for its share: its samples over the seconds of their forward and backward and of its
    optimizer step. Of one that runs a stage: its best rate of forward and backward of the whole model, whether or not that would
    fit. Of a device that the plan leaves out: the same if the model fits, else 0. The efficiency of a plan is its samples/s
    over the sum. Of whole models it never exceeds 1, because no step is shorter than what one device computes in it; of stages it
    could only where devices are unlike in what they are good at, and each does that.
    """
    rates = {device.id: runs[device.id].rate if device.id in runs else 0.0 for device in model.cluster.devices}
    for pipeline in made.pipelines:
        samples = pipeline.micro_batches.samples
        whole = len(pipeline.stages) == 1 and len(pipeline.stages[0].devices) == 1
        for place in pipeline.places if samples else ():
            for device in place:
                compute = model.compute[device]
                if whole:
                    seconds = sum(map(compute.micro_batch_s, pipeline.micro_batches.sizes)) + model.update_s(device)
                    rates[device] = samples / seconds if seconds > 0 else float("inf")
                else:
                    rates[device] = compute.rate()
    return rates


def compute_seconds(model: CostModel, made: Plan) -> dict[str, float]:
    """Seconds of forward and backward of each device in a step, recomputation apart."""
    seconds = dict.fromkeys(made.devices, 0.0)
    for pipeline in made.pipelines:
        for number, (stage, taken) in enumerate(zip(pipeline.stages, slices_of(pipeline), strict=True)):
            width, own = len(stage.rows[0]), worked_on(pipeline, number)
            for place, (device, slices) in enumerate(taken.items()):
                compute, together = model.compute[device], model.sharded_stage(pipeline, number, place // width)
                if together is None:
                    passes = [compute.seconds(kind, stage.ops, size) for _, size in slices for kind in _PASSES]
                else:
                    sizes = [size for size in own[device] if size]
                    passes = [together.alone_s(place % width, kind, size) for size in sizes for kind in _PASSES]
                seconds[device] += sum(passes)
    return seconds
