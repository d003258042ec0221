"""The tables of a simulated step tell what theory says of the pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cluster import Cluster
from heterodyne.plan import Layout, MicroBatches, Pipeline, Plan, Region, Stage
from heterodyne.report.plan_shares import samples_of, stages_of
from heterodyne.report.simulated import lacking, rank_shares, simulation_rows
from heterodyne.sim import simulate
from pure.build import cluster
from pure.sim.pipelines import uniform

ALONE = (Region(layout=Layout(shares=(1,))),)


def plan(machines: Cluster, micro_batches: int, chunks: int = 1) -> Plan:
    names = [device.id for device in machines.devices] * chunks
    return Plan(
        model="m",
        cluster=machines.fingerprint,
        global_batch_size=micro_batches,
        schedule="1F1B" if chunks == 1 else "Interleaved1F1B",
        pipelines=(
            Pipeline(
                micro_batches=MicroBatches.of_samples(micro_batches, 1),
                stages=tuple(Stage(ops=(n, n + 1), devices=(name,), regions=ALONE) for n, name in enumerate(names)),
            ),
        ),
    )


@given(st.integers(1, 5), st.integers(1, 9))
@settings(deadline=None, max_examples=30)
def test_shares_of_a_uniform_pipeline(places: int, micro_batches: int) -> None:
    program, costs = uniform("1F1B", places, 1, micro_batches, f=1.0, i=1.0, w=1.0)
    bubble = (places - 1) / (places - 1 + micro_batches)
    for shares in rank_shares(simulate(program, costs)):
        assert shares.bubble == pytest.approx(bubble)
        assert shares.forward == pytest.approx((1 - bubble) / 3)
        assert shares.backward == pytest.approx((1 - bubble) * 2 / 3)
        assert (shares.recompute, shares.update) == (0, 0)
        assert shares.other == pytest.approx(0, abs=1e-9)


def test_communication_is_what_is_on_its_way_and_not_the_waiting_for_it() -> None:
    program, costs = uniform("1F1B", 2, 1, 4, seconds=0.25)
    played = simulate(program, costs)
    for shares in rank_shares(played):
        assert shares.communication == pytest.approx(4 * 0.25 / played.step_s), "each rank sends four messages"


def test_the_table_has_a_row_for_each_rank_and_a_mark_where_memory_lacks() -> None:
    machines = cluster(3, memory=(10, 1, 10))
    program, costs = uniform("1F1B", 3, 1, 4, kept=2)
    played = simulate(program, costs)
    made = plan(machines, 4)
    figures, ranks = simulation_rows(played, made, machines, costs.lower_bound_s)
    assert dict(figures.rows)["step"] == "18 s"
    assert "66.7 % reached" in dict(figures.rows)["bound"]
    assert [row[2] for row in ranks.rows] == ["0", "1", "2"]
    assert [row[-1] for row in ranks.rows] == ["", f"LACKS {2 * 2 - 1} B", ""], "stage 1 of 3 holds two micro-batches"
    (told,) = lacking(played, made, machines)
    assert told == "n0/cpu:1 (stage 1) needs 4 B, has 1 B: lacks 3 B"


def test_a_device_with_several_stages_names_them() -> None:
    machines = cluster(2)
    made = plan(machines, 4, chunks=2)
    assert stages_of(made) == {"n0/cpu:0": "0, 2", "n0/cpu:1": "1, 3"}
    twice = made.model_copy(update={"pipelines": made.pipelines * 2})
    assert stages_of(twice)["n0/cpu:1"] == "1: 1, 3"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 40), st.integers(1, 8))
def test_the_devices_of_a_stage_share_its_samples(shares: list[int], samples: int, size: int) -> None:
    machines = cluster(len(shares))
    names = tuple(device.id for device in machines.devices)
    stage = Stage(ops=(0, 1), devices=names, regions=(Region(layout=Layout(shares=tuple(shares))),))
    one = Pipeline(micro_batches=MicroBatches.of_samples(samples, size), stages=(stage,))
    made = plan(machines, 1).model_copy(update={"pipelines": (one,)})
    assert sum(samples_of(made).values()) == samples


def test_an_idle_device_has_dashes() -> None:
    machines = cluster(3)
    made = plan(cluster(2), 4).model_copy(update={"idle": (machines.devices[2].id,)})
    program, costs = uniform("1F1B", 2, 1, 4)
    program, costs = replace(program, ranks=(*program.ranks, ())), replace(costs, ranks=(*costs.ranks, None))
    _, ranks = simulation_rows(simulate(program, costs), made, machines, costs.lower_bound_s)
    assert ranks.rows[2][2:4] == ("idle", "–")
