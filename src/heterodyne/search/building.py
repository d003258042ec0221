"""From a draft to a pipeline that can run: its stages, their recompute, and the order of actions on each pipeline rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from heterodyne.cost.model import CostModel
from heterodyne.cost.step import StepCosts
from heterodyne.errors import InfeasibleError
from heterodyne.graph.size import Size
from heterodyne.plan.order import orders_of
from heterodyne.plan.plan import Pipeline
from heterodyne.plan.schedules.clock import play
from heterodyne.search.drafts import Draft, Drafting
from heterodyne.search.hosted import hosted
from heterodyne.search.orders import OWN_ORDER, Demands, demands_of, ordered, shortfalls
from heterodyne.search.predict import plan_of, stage_of
from heterodyne.search.recompute import recomputed
from heterodyne.search.refine import refined

__all__ = ["Builder", "Built", "explicit", "named"]


@dataclass(frozen=True, kw_only=True)
class Built:
    """A pipeline.

    Args:
        schedule: the named one that it follows; `OWN_ORDER` where it has an explicit order.
        makespan_s: of its passes, without communication of gradients.
    """

    draft: Draft
    pipeline: Pipeline
    schedule: str
    makespan_s: float


@dataclass(frozen=True, kw_only=True)
class Builder:
    """Args:
    actions_played: how much the search for an order may try; refinements: how many borders may be moved.
    """

    model: CostModel
    drafting: Drafting
    actions_played: int
    refinements: int

    def plain(self, draft: Draft) -> Built:
        """With 1F1B, nothing recomputed."""
        return Built(draft=draft, pipeline=self._stages(draft), schedule="1F1B", makespan_s=draft.estimate_s)

    def leanest(self, draft: Draft) -> Built:
        """In the order that holds least: one micro-batch at a time on each place, its backward in halves, nothing recomputed."""
        indices = range(len(draft.micro_batches))
        order = tuple(" ".join(f"{n}F{i} {n}I{i} {n}W{i}" for i in indices) for n in range(len(draft.place_of)))
        pipeline = self._stages(draft).model_copy(update={"order": order})
        crossing = self.model.crossings([stage.ops[0] for stage in pipeline.stages])
        demands = demands_of(pipeline, self._costs(pipeline), self.model.cluster, crossing)
        makespan = play(orders_of(OWN_ORDER, pipeline), demands.times, reads=demands.reads).makespan_s
        return Built(draft=draft, pipeline=pipeline, schedule=OWN_ORDER, makespan_s=makespan)

    def best(self, draft: Draft, *, move: bool = True) -> Iterator[Built]:
        """The best order found; if memory is short also with recompute; and with stage boundaries moved for that order."""
        found = list(self._variants(draft))
        yield from (built for built, _ in found)
        if not move or not found or len(draft.place_of) == 1:
            return
        built, demands = min(found, key=lambda entry: entry[0].makespan_s)
        if any(stage.recompute or stage.offload_activations for stage in built.pipeline.stages):
            return
        orders = orders_of(built.schedule or "1F1B", built.pipeline)
        moved = refined(draft, self.drafting, orders, demands.reads, rounds=self.refinements)
        if moved.borders != draft.borders:
            yield from (again for again, _ in self._variants(moved))

    def _variants(self, draft: Draft) -> Iterator[tuple[Built, Demands]]:
        """Without recompute, with as few micro-batches in flight as fit; and with recompute or offload for more of them."""
        pipeline = self._stages(draft)
        count = len(draft.micro_batches)
        folded = len(draft.place_of) > len(draft.line)
        in_flight = [min(count, len(draft.line) - (0 if folded else place)) for place in draft.place_of]
        costs = self._costs(pipeline)
        variants = [pipeline]
        if short := shortfalls(pipeline, costs, self.model.cluster, in_flight):
            variants.append(recomputed(self.model, pipeline, short, in_flight, self._alive))
            variants.append(hosted(self.model, pipeline, short, in_flight))
        for variant in dict.fromkeys(variants):
            its = costs if variant is pipeline else self._costs(variant)
            fits = not shortfalls(variant, its, self.model.cluster, in_flight)
            crossing = self.model.crossings([stage.ops[0] for stage in variant.stages])
            demands = demands_of(variant, its, self.model.cluster, crossing)
            if fits and not folded:
                # Recomputed block by block inside the backward, which needs less room than to recompute ahead of it.
                makespan = play(orders_of("1F1B", variant), demands.times, reads=demands.reads).makespan_s
                yield Built(draft=draft, pipeline=variant, schedule="1F1B", makespan_s=makespan), demands
            try:
                schedule, makespan, found = ordered(variant, demands, actions_played=self.actions_played)
            except InfeasibleError:
                continue  # not even one micro-batch at a time; the other variant holds less
            yield Built(draft=draft, pipeline=found, schedule=schedule, makespan_s=makespan), demands

    def _costs(self, pipeline: Pipeline) -> StepCosts:
        return self.model.of(plan_of(self.model, pipeline.micro_batches.samples, (pipeline,)))

    def _stages(self, draft: Draft) -> Pipeline:
        devices = [draft.line[place] for place in draft.place_of]
        return Pipeline(
            micro_batches=draft.micro_batches,
            stages=tuple(
                stage_of(ops, (device,)) for ops, device in zip(pairwise(draft.borders), devices, strict=True)
            ),
        )

    @property
    def _alive(self) -> dict[int, Size]:
        points = self.drafting.points
        return dict(zip(points.positions, points.crossing, strict=True))


def named(schedule: str) -> str:
    """The schedule in words."""
    return "an order of its own" if schedule == OWN_ORDER else schedule


def explicit(built: Built) -> Pipeline:
    """The pipeline with its order written out, so that it can run beside others in a plan; 1F1B needs none."""
    if built.schedule in (OWN_ORDER, "1F1B"):
        return built.pipeline
    lines = (" ".join(map(str, row)) for row in orders_of(built.schedule, built.pipeline))
    return built.pipeline.model_copy(update={"order": tuple(lines)})
