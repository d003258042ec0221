"""No step is shorter than its bound, and where nothing can win by more than doubt, nothing is made."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cluster.profile import DeviceProfile
from heterodyne.cost.model import CostModel
from heterodyne.search.bound import all_at_work_s
from heterodyne.search.planner import plan
from pure.build import cluster, graph, linear, profile

MODEL = graph(3)


def better_at(own: DeviceProfile, kind: str, factor: float) -> DeviceProfile:
    """So many times as long for the blocks of a kind."""
    samples = (replace(s, forward_s=s.forward_s * factor, backward_s=s.backward_s * factor) for s in own.blocks[kind])
    return replace(own, blocks={**own.blocks, kind: tuple(samples)})


@given(
    st.lists(st.tuples(st.floats(0.1, 1), st.floats(0.2, 5)), min_size=2, max_size=3),
    st.floats(0, 0.1),
    st.integers(1, 8),
)
@settings(max_examples=6)
def test_no_plan_takes_less_whatever_each_device_is_good_at(
    devices: list[tuple[float, float]], overhead_s: float, samples: int
) -> None:
    machines = cluster(len(devices))
    known = profile(MODEL, machines, [linear(s) for s, _ in devices], overhead_s=overhead_s)
    factors = dict(zip(known.devices, (factor for _, factor in devices), strict=True))
    known = replace(known, devices={d: better_at(own, "layer", factors[d]) for d, own in known.devices.items()})
    bound = all_at_work_s(CostModel(graph=MODEL, cluster=machines, profile=known), samples, 2)
    found = plan(MODEL, machines, known, global_batch_size=samples, micro_batch_sizes=(1, 2), near=inf)
    steps = [c.step_s for c in found.candidates if c.step_s is not None]
    assert len(steps) > 4
    assert min(steps) >= bound * (1 - 1e-9)


def test_of_devices_that_are_as_good_at_every_block_it_is_the_samples_over_the_sum_of_their_speeds() -> None:
    machines = cluster(3)
    known = profile(MODEL, machines, [linear(1 / speed) for speed in (1.0, 2.0, 5.0)])
    assert all_at_work_s(CostModel(graph=MODEL, cluster=machines, profile=known), 16, 4) == pytest.approx(2)
    (cut,) = [c for c in plan(MODEL, machines, known, global_batch_size=16).candidates if c.kind == "pipeline"]
    assert "takes at least 2 s" in cut.why_not
