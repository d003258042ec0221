"""A published run as `heterodyne plan` would have it: its fleet, its plan, and what the planner's own evaluation says of them.

Nothing here prices anything: seconds and bytes are those of `search.fleet.predict.Predictor`, which ranks the plans of every search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, cast

from row_plan import RowPlan

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cost.layers import LayerCost, Widths
from heterodyne.predictor.constants import Constants, constants
from heterodyne.predictor.devices import chip_of
from heterodyne.predictor.layer_costs import PredictedLayers
from heterodyne.predictor.network import Network
from heterodyne.predictor.setup import Setup
from heterodyne.predictor.usable import needed_bytes
from heterodyne.search.fleet.plan import LAYOUTS, ScheduleName, Template, TemplateStage
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.tables import Tables

if TYPE_CHECKING:
    from published_rows import Run

__all__ = ["Evaluated", "evaluated"]

_AMPLE = 10**15
"""Bytes of a device: a plan that ran had room."""


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Seconds of a step, and bytes of the fullest device: as its allocator has given out, and all that it is short of."""

    step_s: float
    allocated_bytes: float
    needed_bytes: float


def evaluated(run: Run, known: Constants | None = None) -> Evaluated:
    """The plan of a run. Sources do not say where on its nodes each rank was, so it is where they exchange fastest."""
    plan, known = run.plan, known or constants()
    wires, widths = run.wires(known), widths_of(plan)
    fleet = fleet_of(run, wires)
    predictor = Predictor(
        fleet=fleet,
        tables=Tables(_layers(run, wires, known)),
        global_batch=plan.global_batch,
        software=plan.software,
    )
    template = Template(micro_batch=plan.micro_batch * widths.data, stages=tuple(stages(run, widths)), chunks=plan.vpp)
    mix = ((template, max(1, plan.dp // widths.data)),)
    # What such software shards in pipelines is level 1, whatever level it is asked for: the planner has no other there.
    zero = 1 if plan.zero == 3 and plan.pp > 1 and plan.software.keeps_gathered else plan.zero
    schedule = cast(ScheduleName, plan.schedule if plan.vpp == 1 else "Interleaved1F1B")
    found = [predictor.evaluate(mix, schedule=schedule, layout=layout, zero=(zero,)) for layout in LAYOUTS]
    best = min((own.predicted for own in found if own is not None), key=lambda own: own.step_s)
    allocated = best.fullest_bytes + plan.software.buffer_bytes
    return Evaluated(step_s=best.step_s, allocated_bytes=allocated, needed_bytes=needed_bytes(allocated))


def widths_of(plan: RowPlan) -> Widths:
    """Of a stage: as many replicas as experts are spread over belong to it."""
    inside = plan.tp * plan.cp
    return Widths(tensor=plan.tp, context=plan.cp, data=lcm(inside, plan.ep * plan.etp) // inside)


def fleet_of(run: Run, wires: Network) -> Fleet:
    nodes = -(-run.devices // wires.devices)
    reached = wires.reached[min(wires.devices, run.devices) - 1] if wires.reached else 1.0
    inside = Wire(bandwidth_bytes_per_s=wires.inside_bytes_per_s * reached, latency_s=wires.inside_latency_s)
    between = Wire(bandwidth_bytes_per_s=wires.between_bytes_per_s, latency_s=wires.between_latency_s)
    pool = Pool(
        name="all", kind=run.device.kind, nodes=nodes, devices_per_node=wires.devices, memory_bytes=_AMPLE, inside=inside,
        between=between if nodes > 1 else None, backend=run.device.backend,
    )  # fmt: skip
    return Fleet(name=run.id, pools=(pool,), accelerators={run.device.kind: run.device})


def stages(run: Run, widths: Widths) -> Iterator[TemplateStage]:
    """The embedding is before the first layer, the head behind the last."""
    plan = run.plan
    counts = list(plan.layers_of_stages(run.model.layers)) if plan.pp > 1 else [run.model.layers]
    counts[0] += 1
    counts[-1] += 1
    again = plan.recompute == "full" and plan.recompute_part == 1
    tensor, context, data = widths
    for stop, count in zip(accumulate(counts), counts, strict=True):
        yield TemplateStage(
            pool="all", widths=Widths(tensor, context, data), start=stop - count, stop=stop, recompute=again
        )


@dataclass(frozen=True, kw_only=True)
class RowLayers(PredictedLayers):
    """The costs of layers as the row runs them: it says what shares experts, and what of a layer is computed again."""

    plan: RowPlan

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        return (widths_of(self.plan),) if device_kind in self.networks else ()

    def _setup(self, widths: Widths, micro_batch: int, *, routed: bool) -> Setup:
        plan = self.plan
        return Setup(
            micro_batch=micro_batch // widths.data,
            tp=plan.tp,
            cp=plan.cp,
            ep=plan.ep if routed else 1,
            etp=plan.etp if routed else 1,
            accumulates=plan.micro_batches > 1,
            precision=plan.precision,
            sequence_parallel=plan.sequence_parallel,
            selective=plan.recompute == "selective",
            software=plan.software,
        )

    def _cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost:
        cost, part = super()._cost(device_kind, layer_kind, widths, micro_batch), self.plan.recompute_part
        if self.plan.recompute != "full" or part == 1:
            return cost
        back = cost.kept_bytes - cost.kept_bytes_recomputed
        return replace(
            cost,
            backward_s=cost.backward_s + part * cost.recompute_s,
            kept_bytes=round(cost.kept_bytes - part * back),
            workspace_bytes=cost.workspace_bytes + back,
        )


def _layers(run: Run, wires: Network, known: Constants) -> RowLayers:
    plan, kind = run.plan, run.device.kind
    return RowLayers(
        model=run.model,
        precision=plan.precision,
        chips={kind: chip_of(run.device, plan.precision, plan.software, known)},
        networks={kind: wires},
        software=plan.software,
        known=known,
        plan=plan,
    )
