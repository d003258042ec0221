"""The table of layer costs of a fleet of which some kinds were measured: the others as their datasheets say, times what measuring teaches.

Of a kind that was measured and has a datasheet, the seconds of a micro-batch as measured over those as predicted are its *ratio*. Kinds
that were not measured take the geometric mean of the ratios: what all of them miss alike (the model, its software). A measured kind in
parts, which nobody has measured, takes its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import exp, log

from heterodyne.cluster.fleet import Fleet, Pool
from heterodyne.cost.layers import LayerCost, Widths
from heterodyne.cost.measured_layers import MeasuredLayers
from heterodyne.errors import ClusterError
from heterodyne.predictor.graph_costs import GraphLayers, graph_layers
from heterodyne.predictor.software import Software

__all__ = ["MixedLayers", "mixed_layers"]


@dataclass(frozen=True, kw_only=True)
class MixedLayers:
    """Implements `cost.layers.LayerCosts`. ``predicted``: of every kind that has a datasheet."""

    measured: MeasuredLayers
    predicted: GraphLayers
    _made: dict[tuple[str, str, Widths, int], LayerCost | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def layers(self) -> tuple[str, ...]:
        return self.measured.layers

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        of = {*self.measured.widths(device_kind), *self.predicted.widths(device_kind)}
        return tuple(sorted(of, key=lambda own: (own.devices, own)))

    def cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost | None:
        """None for a kind of device that was not measured and has no datasheet, and as either table says."""
        alone = widths.tensor == widths.context == 1
        if alone and self.measured.widths(device_kind):
            return self.measured.cost(device_kind, layer_kind, widths, micro_batch)
        key = (device_kind, layer_kind, widths, micro_batch)
        if key not in self._made:
            cost = self.predicted.cost(*key)
            ratio = self.ratios.get(device_kind, self.ratio)
            self._made[key] = None if cost is None else _longer(cost, ratio)
        return self._made[key]

    @cached_property
    def ratios(self) -> Mapping[str, float]:
        """Of each kind that was measured and has a datasheet, at the largest micro-batch that was measured."""
        found = {}
        for kind in self.predicted.chips:
            size = self.measured.largest(kind)
            if size is None:
                continue
            measured, predicted = (self._micro_batch_s(table, kind, size) for table in (self.measured, self.predicted))
            if measured > 0 and predicted > 0:
                found[kind] = measured / predicted
        return found

    @property
    def ratio(self) -> float:
        """Of kinds that were not measured; 1 where no measured kind has a datasheet."""
        own = self.ratios.values()
        return exp(sum(map(log, own)) / len(own)) if own else 1.0

    def in_words(self, kinds: Iterable[str]) -> str:
        """Where the seconds of the kinds of a fleet are from; "" where all were measured."""
        missing = [kind for kind in kinds if not self.measured.widths(kind)]
        if not missing:
            return ""
        told = ", ".join(f"{kind} took {ratio:.2f} times" for kind, ratio in self.ratios.items())
        if not told:
            return f"{', '.join(missing)}: from datasheets as they are, since no measured kind has one to compare with"
        return f"{', '.join(missing)}: from datasheets, times {self.ratio:.2f} ({told} what its datasheet says of this model)"

    def _micro_batch_s(self, table: MeasuredLayers | GraphLayers, kind: str, size: int) -> float:
        costs = (table.cost(kind, layer, Widths(), size) for layer in self.layers)
        return sum(cost.forward_s + cost.backward_s for cost in costs if cost is not None)


def mixed_layers(measured: MeasuredLayers, fleet: Fleet, software: Software) -> MixedLayers:
    """For all kinds of a fleet. Raises ClusterError for one that was not measured and whose datasheet lacks a number that is needed."""
    known = [pool for pool in fleet.pools if not measured.widths(pool.kind) or _has_datasheet(fleet, pool.kind)]
    there = {pool.kind for pool in known}
    teach = [
        Pool(name=f"measured {kind}", kind=kind, nodes=1, devices_per_node=1, memory_bytes=1)
        for kind in measured.kinds
        if kind not in there and _has_datasheet(fleet, kind)
    ]
    with_datasheets = replace(fleet, pools=(*known, *teach)) if known or teach else None
    recipe = measured.recipe
    predicted = (
        GraphLayers(graph=measured.graph, chips={}, networks={}, recipe=recipe, software=software)
        if with_datasheets is None
        else graph_layers(measured.graph, with_datasheets, recipe=recipe, software=software)
    )
    return MixedLayers(measured=measured, predicted=predicted)


def _has_datasheet(fleet: Fleet, kind: str) -> bool:
    try:
        return fleet.accelerator(kind).memory_bandwidth_bytes_per_s is not None
    except ClusterError:
        return False


def _longer(cost: LayerCost, ratio: float) -> LayerCost:
    again_s = None if cost.forward_again_s is None else cost.forward_again_s * ratio
    return replace(cost, forward_s=cost.forward_s * ratio, backward_s=cost.backward_s * ratio, forward_again_s=again_s)
