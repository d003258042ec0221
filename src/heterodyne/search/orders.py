"""Orders for pipelines whose stages are known: the named schedules that suit them, and the best that is found for their costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heterodyne.cluster.spec import Cluster
from heterodyne.cost.stage import StageCosts
from heterodyne.cost.step import RankCosts, StepCosts
from heterodyne.graph.cut import Crossing
from heterodyne.plan.plan import Pipeline
from heterodyne.plan.schedules import SCHEDULES, Orders
from heterodyne.plan.schedules.best import best_orders
from heterodyne.plan.schedules.times import Read, StageBytes, StageTimes

__all__ = ["OWN_ORDER", "Demands", "demands_of", "ordered", "peak_of_all_kept", "shortfalls"]

OWN_ORDER = ""  # in place of the name of a schedule


@dataclass(frozen=True, kw_only=True)
class Demands:
    """What the stages of a pipeline take, as `best_orders` wants to know it; of a group the device that is worst off."""

    times: tuple[StageTimes, ...]
    held: tuple[StageBytes, ...]
    reads: tuple[Read, ...]
    free_bytes: tuple[int, ...]


def demands_of(pipeline: Pipeline, costs: StepCosts, cluster: Cluster, crossing: Sequence[Crossing]) -> Demands:
    """From the costs of a plan that has this pipeline; ``crossing``: what crosses between its stages."""
    ranks = [[_active(costs, cluster, device) for device in devices] for devices in pipeline.places]
    place_of = pipeline.place_of_stage
    free = []
    tight = []
    for devices, own in zip(pipeline.places, ranks, strict=True):
        rooms = [
            cluster.device(device).memory_bytes - rank.fixed_bytes - _passing(rank)
            for device, rank in zip(devices, own, strict=True)
        ]
        needs = [max(1, sum(_most(stage.kept_bytes) for stage in rank.stages.values())) for rank in own]
        worst = min(range(len(own)), key=lambda n: rooms[n] / needs[n])
        free.append(max(0, rooms[worst]))
        tight.append(own[worst])
    return Demands(
        times=tuple(_times([rank.stages[n] for rank in ranks[place]]) for n, place in enumerate(place_of)),
        held=tuple(_bytes(tight[place].stages[n]) for n, place in enumerate(place_of)),
        reads=_reads(costs, crossing),
        free_bytes=tuple(free),
    )


def ordered(
    pipeline: Pipeline, demands: Demands, *, actions_played: int, joined: bool = False
) -> tuple[str, float, Pipeline]:
    """The name of the schedule that makes the best order that is found, or `OWN_ORDER`; its makespan; the pipeline with it.

    ``joined``: no backward of the last stage begins before all its forwards are done.

    Raises InfeasibleError if a place has no room for one micro-batch at a time.
    """
    places = pipeline.place_of_stage
    count = len(pipeline.micro_batches)
    found = best_orders(
        demands.times,
        places,
        count,
        reads=demands.reads,
        held=demands.held,
        free_bytes=demands.free_bytes,
        actions_played=actions_played,
        joined=joined,
    )
    name = _named(found.orders, places, count)
    if name != OWN_ORDER:
        return name, found.makespan_s, pipeline
    lines = tuple(" ".join(map(str, row)) for row in found.orders)
    return OWN_ORDER, found.makespan_s, pipeline.model_copy(update={"order": lines})


def shortfalls(pipeline: Pipeline, costs: StepCosts, cluster: Cluster, in_flight: Sequence[int]) -> dict[str, int]:
    """For each device that lacks memory if each stage holds so many micro-batches whole: how much."""
    short = {}
    for device in dict.fromkeys(d for stage in pipeline.stages for d in stage.devices):
        lacking = peak_of_all_kept(_active(costs, cluster, device), in_flight) - cluster.device(device).memory_bytes
        if lacking > 0:
            short[device] = lacking
    return short


def peak_of_all_kept(rank: RankCosts, in_flight: Sequence[int] | Mapping[int, int]) -> int:
    """The most bytes of a device whose stages hold so many micro-batches each, and recompute inside their backwards."""
    kept = sum(in_flight[number] * _most(stage.kept_bytes) for number, stage in rank.stages.items())
    redone = max((_most(stage.redone_bytes) for stage in rank.stages.values()), default=0)
    return rank.fixed_bytes + max(kept + redone + _passing(rank), rank.update_bytes)


def _active(costs: StepCosts, cluster: Cluster, device: str) -> RankCosts:
    rank = costs.ranks[cluster.rank(device)]
    assert rank is not None  # the plan has it in a pipeline
    return rank


def _passing(rank: RankCosts) -> int:
    """What comes and goes inside a pass."""
    return rank.workspace_bytes + max((_most(stage.gradient_bytes) for stage in rank.stages.values()), default=0)


def _times(stages: Sequence[StageCosts]) -> StageTimes:
    """The mean micro-batch of the slowest device of a group."""

    def slowest(values: Sequence[Sequence[float]]) -> float:
        return max(sum(own) / len(own) if own else 0.0 for own in values)

    inputs, weights = slowest([s.input_s for s in stages]), slowest([s.weight_s for s in stages])
    return StageTimes(
        forward_s=slowest([s.halved_forward_s or s.forward_s for s in stages]),
        input_s=inputs,
        weight_s=weights,
        recompute_s=slowest([s.recompute_s for s in stages]),
    )


def _bytes(stage: StageCosts) -> StageBytes:
    kept, again, left = _most(stage.kept_bytes), _most(stage.recomputed_bytes), _most(stage.weight_bytes)
    return StageBytes(activation=kept + again, input_frees=max(0, kept + again - left), kept=kept if again else None)


def _reads(costs: StepCosts, crossing: Sequence[Crossing]) -> tuple[Read, ...]:
    """Who reads from whom; the seconds of the slowest route between two stages."""
    there: dict[tuple[str, int, int], float] = {}
    for route in costs.routes:
        key = (route.kind, route.source[1], route.destination[1])
        sent = [seconds for seconds, size in zip(route.seconds, route.bytes, strict=True) if size]
        mean = route.latency_s + sum(sent) / len(sent) if sent else 0.0
        there[key] = max(there.get(key, 0.0), mean)
    pairs: dict[tuple[int, int], bool] = {}
    for value in crossing:
        for reader in value.consumers:
            pair = (value.producer, reader)
            pairs[pair] = pairs.get(pair, False) or value.differentiable
    return tuple(
        Read(
            source=source,
            reader=reader,
            forward_s=there.get(("F", source, reader), 0.0),
            backward_s=there.get(("B", reader, source), 0.0) if learns else None,
        )
        for (source, reader), learns in sorted(pairs.items())
    )


def _named(orders: Orders, places: Sequence[int], micro_batches: int) -> str:
    """The schedule that makes just these orders, if there is one."""
    count = 1 + max(places)
    chunks, uneven = divmod(len(places), count)
    for schedule in SCHEDULES.values():
        suits = (
            not uneven and schedule.chunks in (None, chunks) and schedule.stage_places(count, chunks) == tuple(places)
        )
        if suits and schedule.orders(count, chunks, micro_batches) == orders:
            return schedule.name
    return OWN_ORDER


def _most(values: Sequence[int]) -> int:
    return max(values, default=0)
