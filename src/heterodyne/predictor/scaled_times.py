"""Seconds on a fleet of which some kinds were measured: the others as their datasheets say, times what measuring teaches.

Of a kind that was measured and has a datasheet, the seconds of a micro-batch as measured over those as predicted are its *ratio*. Kinds
that were not measured take the geometric mean of the ratios: what all of them miss alike (the model, its software). A measured kind in
parts, which nobody has measured, takes its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, log

from heterodyne.cluster.fleet import Fleet, Pool
from heterodyne.cost.graph_layers import BlockTime, GraphLayers
from heterodyne.cost.layers import Widths, compute_s
from heterodyne.cost.measured_times import MeasuredTimes
from heterodyne.cost.recipe import Recipe
from heterodyne.errors import ClusterError
from heterodyne.graph.ir import Block, ModelGraph
from heterodyne.predictor.datasheet_times import DatasheetTimes, datasheet_times
from heterodyne.predictor.software import Software

__all__ = ["ScaledTimes", "scaled_times"]


@dataclass(frozen=True, kw_only=True)
class ScaledTimes:
    """Implements `cost.graph_layers.BlockTimes`. ``predicted``: of every kind that has a datasheet."""

    measured: MeasuredTimes
    predicted: DatasheetTimes

    @property
    def graph(self) -> ModelGraph:
        return self.measured.graph

    @property
    def recipe(self) -> Recipe:
        return self.measured.recipe

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        of = {*self.measured.widths(device_kind), *self.predicted.widths(device_kind)}
        return tuple(sorted(of, key=lambda own: (own.devices, own)))

    def time(self, device_kind: str, block: Block, widths: Widths, size: int) -> BlockTime | None:
        """None as who knows the kind of device says."""
        if widths.devices == 1 and self.measured.widths(device_kind):
            return self.measured.time(device_kind, block, widths, size)
        time, ratio = self.predicted.time(device_kind, block, widths, size), self.ratios.get(device_kind, self.ratio)
        return time and time._replace(forward_s=time.forward_s * ratio, backward_s=time.backward_s * ratio)

    @cached_property
    def ratios(self) -> Mapping[str, float]:
        """Of each kind that was measured and has a datasheet, at the largest micro-batch that was measured."""
        found = {}
        for kind in self.predicted.chips:
            size = self.measured.largest(kind)
            if size is None:
                continue
            measured, predicted = (compute_s(GraphLayers(own), kind, size) for own in (self.measured, self.predicted))
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


def scaled_times(measured: MeasuredTimes, fleet: Fleet, software: Software) -> ScaledTimes:
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
        DatasheetTimes(graph=measured.graph, chips={}, networks={}, recipe=recipe, software=software)
        if with_datasheets is None
        else datasheet_times(measured.graph, with_datasheets, recipe=recipe, software=software)
    )
    return ScaledTimes(measured=measured, predicted=predicted)


def _has_datasheet(fleet: Fleet, kind: str) -> bool:
    try:
        return fleet.accelerator(kind).memory_bandwidth_bytes_per_s is not None
    except ClusterError:
        return False
