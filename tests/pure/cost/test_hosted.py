"""Activations on the host: what passes wait for copies, and where the bytes are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cost import CostModel, MemoryAssumptions
from heterodyne.cost.hosted import Part, exposed_s
from heterodyne.errors import MeasureError
from heterodyne.plan import MicroBatches, Pipeline
from heterodyne.plan.lower import lower
from heterodyne.search.predict import plan_of, stage_of
from heterodyne.sim.run import simulate
from pure.build import cluster, graph, linear, profile

MODEL, MACHINES = graph(4, saved=1000), cluster(1, named="gpu")
MACHINES = replace(MACHINES, devices=tuple(replace(d, backend="cuda") for d in MACHINES.devices))
DEVICE = MACHINES.devices[0].id
SECONDS = st.floats(0, 10)


@given(count=st.integers(1, 6), f=SECONDS, b=SECONDS, t=SECONDS)
def test_alike_blocks_wait_for_what_is_slower_of_computing_and_copying(
    count: int, f: float, b: float, t: float
) -> None:
    """All but the first of a forward, and all but the last of a backward, which has to wait for its first copy whole."""
    parts = [Part(forward_s=f, backward_s=b, copied_s=t, bytes=1)] * count
    forward, backward = exposed_s(parts)
    assert forward == pytest.approx(f + (count - 1) * max(f, t) - count * f, abs=1e-9)
    assert backward == pytest.approx(t + (count - 1) * max(b, t) + b - count * b, abs=1e-9)


@given(f=SECONDS, t=SECONDS, behind=SECONDS)
def test_what_is_computed_behind_hides_copies(f: float, t: float, behind: float) -> None:
    last = Part(forward_s=behind, backward_s=behind)
    forward, backward = exposed_s([Part(forward_s=f, backward_s=f, copied_s=t, bytes=1), last])
    assert forward == 0
    assert backward == pytest.approx(max(0.0, t - behind), abs=1e-9)
    assert exposed_s([last, last]) == (0, 0)


def costs_of(*, copy_s_per_byte: float) -> CostModel:
    measured = profile(MODEL, MACHINES, [linear(1.0)])
    own = replace(measured.devices[DEVICE], host_copy_s_per_byte=copy_s_per_byte)
    return CostModel(
        graph=MODEL,
        cluster=MACHINES,
        profile=replace(measured, devices={DEVICE: own}),
        memory=MemoryAssumptions(other_context_bytes=0, fragmentation=0.0),
    )


def test_bytes_move_from_the_device_to_its_host_and_fast_links_cost_next_to_nothing() -> None:
    stage = stage_of((0, len(MODEL.ops)), (DEVICE,))
    plain = Pipeline(micro_batches=MicroBatches((4,) * 6), stages=(stage,))
    order = (" ".join((*(f"0F{j}" for j in range(6)), *(f"0B{j}" for j in range(6)))),)  # all are held at a time
    plain = plain.model_copy(update={"order": order})
    hosted = plain.model_copy(update={"stages": (stage.model_copy(update={"offload_activations": (1, 2, 3)}),)})
    seconds = []
    for rate in (1e-12, 1.0):
        costs = costs_of(copy_s_per_byte=rate)
        played = [
            simulate(lower(made, MODEL, MACHINES), costs.of(made))
            for made in (plan_of(costs, 24, (plain,)), plan_of(costs, 24, (hosted,)))
        ]
        seconds.append([each.step_s for each in played])
        bytes_away = 6 * 4 * 3 * 2000
        assert [each.host_bytes[0] for each in played] == [0, bytes_away]
        # Three blocks are on the device at a time.
        assert played[0].peak_bytes[0] - played[1].peak_bytes[0] == bytes_away - 4 * 3 * 2000
    assert seconds[0][1] == pytest.approx(seconds[0][0])
    assert seconds[1][1] > 2 * seconds[1][0]
    unknown = costs_of(copy_s_per_byte=0.0)
    with pytest.raises(MeasureError, match="not measured"):
        unknown.of(plan_of(unknown, 24, (hosted,)))
