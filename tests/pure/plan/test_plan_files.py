"""Plans on disk: canonical, readable, and refused with a reason when they are not plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given

from heterodyne.errors import PlanError
from heterodyne.plan import Layout, MicroBatches, Pipeline, Plan, Region, Stage
from heterodyne.plan.bind import bind
from heterodyne.plan.plan import Group
from pure.build import cluster, graph
from pure.plan.strategies import GENERAL_PLANS


@given(GENERAL_PLANS)
def test_load_of_dump_is_the_same_plan(plan: Plan) -> None:
    text = plan.dump()
    assert Plan.parse(text) == plan
    assert Plan.parse(text).dump() == text


@given(GENERAL_PLANS)
def test_pipelines_take_slices_in_their_order(plan: Plan) -> None:
    ends = [f + p.micro_batches.samples for f, p in zip(plan.first_samples(), plan.pipelines, strict=True)]
    assert [0, *ends][: len(plan.pipelines)] == list(plan.first_samples())


BARE = Plan(model="m", cluster="c", global_batch_size=4, pipelines=())


def test_saved_and_loaded(tmp_path: Path) -> None:
    BARE.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == BARE


def edited(**changes: object) -> str:
    return json.dumps({**json.loads(BARE.dump()), **changes})


def of_stage(**changes: object) -> str:
    stage = {"regions": [{"layout": {"kind": "replicate", "shares": [1]}}], **changes}
    return edited(pipelines=[{"micro_batches": "1x4", "stages": [stage]}])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "plan version None is not 2"),
        (edited(version=3), "plan version 3 is not 2; plan again"),
        (edited(version=True), "plan version True is not 2"),
        (edited(global_batch_size=0), "global_batch_size"),
        (edited(global_batch_size="4"), "global_batch_size"),
        (edited(devices=["a"]), "devices: Extra inputs"),
        (edited(precision="fp8"), "precision"),
        (edited(zero=True), "zero: true is no whole number"),
        (edited(zero=1.0), "zero"),
        (edited(pipelines=[{"micro_batches": "4", "stages": []}]), "COUNTxSIZE"),
        (edited(pipelines=[{"micro_batches": "1x4"}]), "pipelines.0.stages: Field required"),
        (of_stage(devices=["a"], group={"kind": "cpu", "devices": 1}), "it has 'devices' and 'group'"),
        (of_stage(ops=[0, 3], blocks=[0, 1]), "it has 'ops' and 'blocks'"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=r"plan\.json") as caught:
        Plan.parse(text, path="plan.json")
    assert says in str(caught.value)


def test_a_plan_of_version_1_says_the_same() -> None:
    assert Plan.parse(edited(version=1)) == BARE


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path / "x")


def test_all_wrong_fields_are_told() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(edited(precision="fp8", bucket_bytes=0))
    assert "precision" in str(caught.value)
    assert "bucket_bytes" in str(caught.value)


def test_micro_batches_are_written_as_text() -> None:
    plan = Plan.parse(edited(pipelines=[{"micro_batches": "3x4+1x2", "stages": []}]))
    assert plan.pipelines[0].micro_batches == MicroBatches((4, 4, 4, 2))
    assert '"3x4+1x2"' in plan.dump()


def test_stages_of_one_place_ask_for_the_same_devices() -> None:
    model, machines = graph(2), cluster(4)

    def bound(second: Group) -> Plan:
        stages = tuple(
            Stage(blocks=blocks, group=group, regions=(Region(layout=Layout(kind="replicate", shares=(1,))),))
            for blocks, group in (((0, 2), Group(kind="cpu", devices=1, place=0)), ((2, 4), second))
        )
        pipeline = Pipeline(micro_batches=MicroBatches((4,)), stages=stages)
        return bind(Plan(global_batch_size=4, pipelines=(pipeline,)), model, machines)

    (pipeline,) = bound(Group(kind="cpu", devices=1, place=0)).pipelines
    assert pipeline.stages[0].devices == pipeline.stages[1].devices
    for other in (Group(kind="cpu", devices=2, place=0), Group(kind="H100", devices=1, place=0)):
        with pytest.raises(PlanError, match="stages of place 0 ask for 1 x cpu and for"):
            bound(other)
