"""Activations on the host: what passes wait for copies, and where the bytes are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cost.activation_offload import Part, exposed_s, lead_s
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.cost.model import CostModel
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
            simulate(lower(made, MODEL, MACHINES).program, costs.of(made))
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


PARTS = st.lists(
    st.builds(Part, forward_s=SECONDS, backward_s=SECONDS, copied_s=SECONDS, bytes=st.integers(0, 1)), max_size=5
)


@given(parts=PARTS, before=SECONDS)
def test_copies_that_begin_before_a_backward_spare_it_what_they_are_ahead(parts: list[Part], before: float) -> None:
    """Played copy by copy: they begin ``before`` the backward, one behind the other, and each block waits for its own."""
    now, copied = 0.0, -before
    for part in reversed(parts):
        if part.bytes:
            copied += part.copied_s
            now = max(now, copied)
        now += part.backward_s
    waited = now - sum(part.backward_s for part in parts)
    assert waited == pytest.approx(max(0.0, lead_s(parts) - before), abs=1e-9)


def test_a_pipeline_that_asks_for_activations_ahead_hides_the_copies_and_needs_the_room() -> None:
    """Two stages, of which the first waits for gradients anyway."""
    machines = cluster(2, named="gpu")
    machines = replace(machines, devices=tuple(replace(d, backend="cuda") for d in machines.devices))
    measured = profile(MODEL, machines, [linear(1.0)] * 2)
    # A block of a micro-batch of 2 is copied in half of the second that its forward takes.
    own = {name: replace(of, host_copy_s_per_byte=0.5 / 4000) for name, of in measured.devices.items()}
    costs = CostModel(
        graph=MODEL,
        cluster=machines,
        profile=replace(measured, devices=own),
        memory=MemoryAssumptions(other_context_bytes=0, fragmentation=0.0),
    )
    border = MODEL.blocks[2].start
    first, second = (
        stage_of(ops, (device.id,))
        for ops, device in zip(((0, border), (border, len(MODEL.ops))), machines.devices, strict=True)
    )
    played = {}
    for ahead in (None, 0, 1):
        hosted = first.model_copy(update={"offload_activations": (0, 1), "reload_ahead": ahead})
        pipeline = Pipeline(micro_batches=MicroBatches((2,) * 6), stages=(hosted, second))
        made = plan_of(costs, 12, (pipeline,), schedule="GPipe")
        played[ahead] = simulate(lower(made, MODEL, machines).program, costs.of(made))
    assert played[1].step_s < played[None].step_s
    assert played[0].step_s <= played[None].step_s + 1e-9
    assert played[1].peak_bytes[0] > played[None].peak_bytes[0]
    assert played[1].host_bytes == played[None].host_bytes
    lanes = {(span.action.kind, span.lane) for span in played[1].spans if span.action.kind in ("OFFLOAD", "RELOAD")}
    assert ("RELOAD", "comm") in lanes
    ends = {span.action: span for span in played[1].spans if span.rank == 0 and span.step == 0}
    for action, span in ends.items():
        if action.kind == "B" and (back := ends.get(replace(action, kind="RELOAD"))):
            assert back.start_s < span.start_s
