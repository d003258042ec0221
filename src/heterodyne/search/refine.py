"""Plans of the class search, refined for their devices: finer cuts, virtual stages, an order of actions of their own.

The class search cuts between blocks, and its pipelines follow named schedules. Here each pipeline of whole stages is cut again
(`search.finer_cuts`); each cut gets the named schedules that suit it and the best order that is found for its costs and memory, with
recompute or activations on hosts where memory is short; and while that shortens the pipeline as played, its boundaries are moved, as
AutoPipe does (Liu et al., CLUSTER 2022). Memory is that of the cost model, whatever the class search estimated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import inf

from heterodyne.cost.compute import Pass
from heterodyne.cost.model import CostModel
from heterodyne.cost.step import StepCosts
from heterodyne.errors import InfeasibleError
from heterodyne.plan.order import orders_of
from heterodyne.plan.plan import Pipeline, Plan
from heterodyne.plan.schedules import Orders
from heterodyne.plan.schedules.clock import Clock, play
from heterodyne.plan.schedules.times import Read, StageTimes
from heterodyne.search.classes import interchangeable
from heterodyne.search.finer_cuts import FinerCuts, made_of
from heterodyne.search.orders import OWN_ORDER, Demands, demands_of, ordered, shortfalls
from heterodyne.search.planned import FOLDING_PAYS
from heterodyne.search.predict import plan_of, with_stages
from heterodyne.search.relief import choices_of, with_relief

__all__ = ["Built", "Refiner"]

_CLOSE = 1e-6
_SMALL = 8 * 16  # ranks times micro-batches up to which the search for orders is generous


@dataclass(frozen=True, kw_only=True)
class Built:
    """A pipeline with the schedule that it follows, `OWN_ORDER` for an explicit order; ``makespan_s``: of its passes."""

    pipeline: Pipeline
    schedule: str
    makespan_s: float

    @property
    def doubted_s(self) -> float:
        """The makespan with the doubt that candidates with virtual stages are compared with."""
        folded = len(self.pipeline.places) < len(self.pipeline.stages)
        return self.makespan_s / (FOLDING_PAYS if folded else 1)

    @property
    def explicit(self) -> Pipeline:
        """The pipeline with its order written out, so that it can stand beside others in a plan; 1F1B needs none."""
        if self.schedule in (OWN_ORDER, "1F1B"):
            return self.pipeline
        lines = (" ".join(map(str, row)) for row in orders_of(self.schedule, self.pipeline))
        return self.pipeline.model_copy(update={"order": tuple(lines)})


@dataclass(frozen=True, kw_only=True)
class Refiner:
    """Refines the pipelines of one model on one cluster. Pipelines on alike devices are refined once."""

    model: CostModel
    _known: dict[object, tuple[tuple[str, ...], tuple[Built, ...]]] = field(default_factory=dict, repr=False)

    @cached_property
    def cuts(self) -> FinerCuts:
        """Cuts at borders of blocks and between."""
        return FinerCuts(model=self.model)

    def plans(self, plan: Plan) -> Iterator[tuple[str, tuple[Pipeline, ...]]]:
        """Schedules and pipelines made of a bound plan, the shortest first as far as passes tell; none where no stage is whole."""
        working = [pipeline for pipeline in plan.pipelines if pipeline.micro_batches.samples]
        if not any(map(self._is_cut, working)):
            return
        if len(working) == 1:
            for built in self.built(working[0], plan.idle):
                yield built.schedule or "1F1B", (built.pipeline,)
            return
        options = [self.built(pipeline) if self._is_cut(pipeline) else () for pipeline in working]
        if all(own or not self._is_cut(pipeline) for own, pipeline in zip(options, working, strict=True)):
            yield (
                "1F1B",
                tuple(own[0].explicit if own else pipeline for own, pipeline in zip(options, working, strict=True)),
            )

    @staticmethod
    def _is_cut(pipeline: Pipeline) -> bool:
        return len(pipeline.places) > 1 and all(len(stage.devices) == 1 for stage in pipeline.stages)

    def built(self, pipeline: Pipeline, idle: Sequence[str] = ()) -> tuple[Built, ...]:
        """What is made of a pipeline whose stages have one device each, the shortest first. ``idle``: devices that may join."""
        devices = [stage.devices[0] for stage in pipeline.stages]
        key = (
            tuple(self._kinds[device] for device in devices),
            tuple(stage.ops for stage in pipeline.stages),
            pipeline.micro_batches.sizes,
            idle,
        )
        line = tuple(place[0] for place in pipeline.places)
        if key not in self._known:
            found = sorted(self._built(self._plain(pipeline), idle), key=lambda built: built.doubted_s)
            self._known[key] = line, tuple(found)
        other, known = self._known[key]
        device_of = {**dict(zip(idle, idle, strict=True)), **dict(zip(other, line, strict=True))}
        return tuple(replace(built, pipeline=_on(built.pipeline, device_of)) for built in known)

    def leanest(self, pipeline: Pipeline) -> Pipeline:
        """In the order that holds least: one micro-batch at a time on each rank, its backward in halves, nothing recomputed."""
        indices = range(len(pipeline.micro_batches))
        order = tuple(" ".join(f"{n}F{i} {n}I{i} {n}W{i}" for i in indices) for n in range(len(pipeline.stages)))
        return self._plain(pipeline).model_copy(update={"order": order})

    def _built(self, plain: Pipeline, idle: Sequence[str]) -> Iterator[Built]:
        best_s = inf
        for shape in dict.fromkeys((plain, *self.cuts.shapes(plain, idle))):
            if len(shape.stages) > len(shape.places) and self.cuts.longest_s(shape) >= best_s * FOLDING_PAYS:
                continue
            for built in self._ordered(shape):
                best_s = min(best_s, built.makespan_s)
                yield built

    def _ordered(self, shape: Pipeline) -> Iterator[Built]:
        """With the schedules and orders that fit, and again with the boundaries moved for the best of them."""
        found = list(self.variants(shape))
        yield from (built for built, _ in found)
        if not found:
            return
        built, demands = min(found, key=lambda entry: entry[0].makespan_s)
        if any(stage.recompute or stage.offload_activations for stage in built.pipeline.stages):
            return
        if len(shape.stages) > len(shape.places) and not self._small(shape):
            return
        moved = self._moved(shape, orders_of(built.schedule or "1F1B", built.pipeline), demands.reads)
        if moved != shape:
            yield from (again for again, _ in self.variants(moved))

    def variants(self, pipeline: Pipeline) -> Iterator[tuple[Built, Demands]]:
        """Without recompute, with as few micro-batches in flight as fit; and with recompute or activations on hosts for more of them."""
        count, ranks = len(pipeline.micro_batches), len(pipeline.places)
        folded = len(pipeline.stages) > ranks
        in_flight = [min(count, ranks - (0 if folded else place)) for place in pipeline.place_of_stage]
        costs = self._costs(pipeline)
        variants = [pipeline]
        if short := shortfalls(pipeline, costs, self.model.cluster, in_flight):
            alive = dict(zip(self.cuts.points.positions, self.cuts.points.crossing, strict=True))
            choices = choices_of(self.model, short)
            variants += [with_relief(self.model, pipeline, short, in_flight, alive, own) for own in choices]
        for variant in dict.fromkeys(variants):
            its = costs if variant is pipeline else self._costs(variant)
            crossing = self.model.crossings([stage.ops[0] for stage in variant.stages])
            demands = demands_of(variant, its, self.model.cluster, crossing)
            joined = self.model.graph.together_from is not None
            if not folded and not joined and not shortfalls(variant, its, self.model.cluster, in_flight):
                # Recomputed block by block inside the backward, which needs less room than to recompute ahead of it.
                makespan = play(orders_of("1F1B", variant), demands.times, reads=demands.reads).makespan_s
                yield Built(pipeline=variant, schedule="1F1B", makespan_s=makespan), demands
            try:
                actions = 200_000 if self._small(pipeline) else 30_000
                schedule, makespan, found = ordered(variant, demands, actions_played=actions, joined=joined)
            except InfeasibleError:
                continue  # not even one micro-batch at a time; the other variants hold less
            yield Built(pipeline=found, schedule=schedule, makespan_s=makespan), demands

    @staticmethod
    def _small(pipeline: Pipeline) -> bool:
        return len(pipeline.places) * len(pipeline.micro_batches) <= _SMALL

    def _moved(self, pipeline: Pipeline, orders: Orders, reads: Sequence[Read]) -> Pipeline:
        """With its boundaries where the orders end soonest, a bounded number of moves to a neighbouring point, each of which fits."""
        points = self.cuts.points.positions
        starts = [stage.ops[0] for stage in pipeline.stages]
        if not set(starts) <= set(points):
            return pipeline
        at = [*(bisect_left(points, start) for start in starts), len(points) - 1]
        homes = [stage.devices[0] for stage in pipeline.stages]
        place_of = pipeline.place_of_stage

        def times(stage: int, at: Sequence[int]) -> StageTimes:
            passes: tuple[Pass, ...] = ("H", "I", "W")
            each = [self.cuts.mean_s(homes[stage], (kind,), pipeline.micro_batches) for kind in passes]
            forward, inputs, weight = (max(0.0, float(own[at[stage + 1]] - own[at[stage]])) for own in each)
            return StageTimes(forward_s=forward, input_s=inputs, weight_s=weight)

        def makespan(times: Sequence[StageTimes]) -> float:
            clock = Clock(times, place_of, len(pipeline.micro_batches), reads)
            return clock.makespan(clock.encode(orders))

        now = [times(stage, at) for stage in range(len(homes))]
        best, made = makespan(now), pipeline
        in_flight = [
            min(len(pipeline.micro_batches), len(pipeline.places) - place) if len(homes) == len(pipeline.places) else 1
            for place in place_of
        ]
        for _ in range(8 if self._small(pipeline) else 2):
            found: list[tuple[float, list[int], list[StageTimes]]] = []
            for border, step in product(range(1, len(homes)), (-1, 1)):
                other = [*at]
                other[border] += step
                if other[border - 1] < other[border] < other[border + 1]:
                    tried = [*now]
                    for stage in (border - 1, border):
                        tried[stage] = times(stage, other)
                    found.append((makespan(tried), other, tried))
            for seconds, other, tried in sorted(found, key=lambda entry: entry[0]):
                if seconds >= best * (1 - _CLOSE):
                    return made
                moved = made_of(pipeline.micro_batches, homes, [points[n] for n in other])
                if not shortfalls(moved, self._costs(moved), self.model.cluster, in_flight):
                    best, made, at, now = seconds, moved, other, tried
                    break
            else:
                return made
        return made

    def _plain(self, pipeline: Pipeline) -> Pipeline:
        """With whole stages that keep everything, in no order yet."""
        devices = [stage.devices[0] for stage in pipeline.stages]
        return made_of(
            pipeline.micro_batches, devices, [*(stage.ops[0] for stage in pipeline.stages), len(self.model.graph.ops)]
        )

    def _costs(self, pipeline: Pipeline) -> StepCosts:
        return self.model.of(plan_of(self.model, pipeline.micro_batches.samples, (pipeline,)))

    @cached_property
    def _kinds(self) -> dict[str, int]:
        return interchangeable(self.model)


def _on(pipeline: Pipeline, device_of: Mapping[str, str]) -> Pipeline:
    """The same on other devices."""
    return with_stages(
        pipeline, lambda _, stage: stage.model_copy(update={"devices": tuple(device_of[d] for d in stage.devices)})
    )
