"""Kinds that were measured teach what datasheets leave out of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterodyne.cluster.fleet import Fleet, Pool
from heterodyne.cluster.profile import Profile
from heterodyne.cost.graph_layers import GraphLayers
from heterodyne.cost.layers import Widths
from heterodyne.cost.measured_times import MeasuredTimes
from heterodyne.cost.recipe import Recipe
from heterodyne.predictor.datasheet_profile import datasheet_profile
from heterodyne.predictor.datasheet_times import graph_layers
from heterodyne.predictor.scaled_times import ScaledTimes, scaled_times
from heterodyne.predictor.software import Software
from pure.build import graph

MODEL = graph(3, width=4096)


def _fleet(*kinds: str) -> Fleet:
    pools = (Pool(name=kind, kind=kind, nodes=1, devices_per_node=4, memory_bytes=2**36) for kind in kinds)
    return Fleet(name="lab", pools=tuple(pools))


def _measured(slower: float, kind: str = "A100-SXM-80GB", called: str | None = None) -> MeasuredTimes:
    """One device that takes so many times what its datasheet says."""
    found = datasheet_profile(MODEL, _fleet(kind), sizes=(1, 8), recipe=Recipe())
    device = next(iter(found.devices.values()))
    longer = {
        name: tuple(replace(s, forward_s=slower * s.forward_s, backward_s=slower * s.backward_s) for s in samples)
        for name, samples in device.blocks.items()
    }
    return MeasuredTimes(
        graph=MODEL, profile=Profile(key="x", devices={f"n/{called or kind}:0": replace(device, blocks=longer)})
    )


def _mixed(measured: MeasuredTimes, *kinds: str) -> ScaledTimes:
    return scaled_times(measured, _fleet(*kinds), Software())


@pytest.mark.parametrize("there", [("A100-SXM-80GB", "H100-SXM-80GB"), ("H100-SXM-80GB",)])
def test_other_kinds_take_as_much_longer_as_what_was_measured(there: tuple[str, ...]) -> None:
    mixed, plain = _mixed(_measured(1.7), *there), graph_layers(MODEL, _fleet(*there))
    assert mixed.ratio == pytest.approx(1.7)
    for widths in (Widths(), Widths(data=2), Widths(2)):
        own, by_datasheet = (table.cost("H100-SXM-80GB", "layer", widths, 8) for table in (GraphLayers(mixed), plain))
        assert (own is None) == (by_datasheet is None)
        if own is not None and by_datasheet is not None:
            assert own.backward_s == pytest.approx(1.7 * by_datasheet.backward_s)
            assert own.kept_bytes == by_datasheet.kept_bytes
    assert "H100-SXM-80GB: from datasheets, times 1.70" in mixed.in_words(there)


def test_what_was_measured_stays_as_it_was_measured() -> None:
    measured = _measured(0.5)
    mixed = _mixed(measured, "A100-SXM-80GB")
    for size in (1, 4, 8, 16):
        assert GraphLayers(mixed).cost("A100-SXM-80GB", "layer", Widths(), size) == GraphLayers(measured).cost(
            "A100-SXM-80GB", "layer", Widths(), size
        )
    assert mixed.in_words(["A100-SXM-80GB"]) == ""


def test_of_kinds_without_a_datasheet_nothing_is_learned() -> None:
    mixed = _mixed(_measured(3.0, called="our-own-chip"), "H100-SXM-80GB")
    assert mixed.ratio == 1.0
    assert "as they are" in mixed.in_words(["H100-SXM-80GB"])
    assert GraphLayers(mixed).cost("our-own-chip", "layer", Widths(), 4) is not None
