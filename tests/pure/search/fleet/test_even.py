"""Plans that other frameworks can run, and why others cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterodyne.cluster.fleet import Fleet, Pool
from heterodyne.cost.layers import Widths
from heterodyne.errors import PlanError
from heterodyne.plan.export import even_plan_of_groups, megatron_arguments, schedule_csv, torchtitan_toml
from heterodyne.search.fleet.plan import Template, TemplateGroup, TemplatePlan, TemplateStage
from heterodyne.search.fleet.written import written_plan

FLEET = Fleet(
    name="two",
    pools=tuple(
        Pool(name=name, kind=kind, nodes=4, devices_per_node=8, memory_bytes=2**36)
        for name, kind in (("new", "A100-SXM-80GB"), ("more", "A100-SXM-80GB"), ("old", "V100-SXM2-32GB"))
    ),
)
STAGES = (
    TemplateStage(pool="new", widths=Widths(tensor=2), start=0, stop=6, recompute=True),
    TemplateStage(pool="new", widths=Widths(tensor=2), start=6, stop=14),
)
GROUP = TemplateGroup(template=Template(micro_batch=2, stages=STAGES), replicas=4, num_microbatches=8)
PLAN = TemplatePlan(groups=(GROUP,), global_batch=64)


def test_an_even_plan_keeps_its_degrees() -> None:
    even = even_plan_of_groups(written_plan(PLAN, FLEET))
    assert (even.dp, even.tp, even.pp, even.zero_stage) == (4, 2, 2, 1)
    assert even.layers_per_stage == (5, 7)  # without embedding and head
    assert even.recomputed_layers == (5, 0)
    assert even.num_microbatches == 8
    assert "--tensor-model-parallel-size" in megatron_arguments(replace(even, recomputed_layers=()))


def test_parts_of_the_sequence_are_cp_and_parts_of_the_micro_batch_are_replicas() -> None:
    shared = tuple(replace(stage, widths=stage.widths._replace(context=4, data=2)) for stage in STAGES)
    plan = replace(PLAN, groups=(replace(GROUP, template=replace(GROUP.template, stages=shared)),))
    even = even_plan_of_groups(written_plan(plan, FLEET, lambda *_: 16))
    assert (even.dp, even.tp, even.cp, even.ep, even.micro_batch_size) == (8, 2, 4, 16, 1)
    assert even.devices == sum(plan.devices.values())
    assert even.num_microbatches == GROUP.num_microbatches
    words = megatron_arguments(replace(even, recomputed_layers=()))
    for name, value in (("context", "4"), ("expert-model", "16"), ("expert-tensor", "1")):
        assert words[words.index(f"--{name}-parallel-size") + 1] == value


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_an_even_plan_keeps_its_level_of_state_sharding(zero: int) -> None:
    assert even_plan_of_groups(written_plan(replace(PLAN, zero=zero), FLEET)).zero_stage == zero


def test_pools_of_one_kind_are_one() -> None:
    there = tuple(replace(stage, pool="more") for stage in STAGES)
    both = replace(
        PLAN,
        groups=(replace(GROUP, replicas=2), replace(GROUP, replicas=2, template=replace(GROUP.template, stages=there))),
    )
    assert even_plan_of_groups(written_plan(both, FLEET)) == even_plan_of_groups(written_plan(PLAN, FLEET))


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (
            (STAGES[0], replace(STAGES[1], pool="old")),
            "one kind of device, and the plan has A100-SXM-80GB, V100-SXM2-32GB",
        ),
        ((STAGES[0], replace(STAGES[1], widths=Widths(4))), "widths tensor 2, tensor 4"),
    ],
)
def test_what_is_uneven_is_told(stages: tuple[TemplateStage, ...], told: str) -> None:
    uneven = replace(PLAN, groups=(replace(GROUP, template=replace(GROUP.template, stages=stages)),))
    with pytest.raises(PlanError, match=told):
        even_plan_of_groups(written_plan(uneven, FLEET))


def test_shares_that_differ_are_told_with_a_batch_that_would_be_even() -> None:
    with pytest.raises(PlanError, match=r"4 replicas do not share 60 samples evenly .* 64 would"):
        even_plan_of_groups(written_plan(replace(PLAN, global_batch=60), FLEET))
    other = replace(GROUP, template=replace(GROUP.template, micro_batch=1))
    with pytest.raises(PlanError, match="2 kinds of pipelines"):
        even_plan_of_groups(written_plan(replace(PLAN, groups=(GROUP, other), global_batch=96), FLEET))


def test_several_stages_on_each_place_keep_their_number() -> None:
    stages = tuple(
        TemplateStage(pool="new", widths=Widths(tensor=2), start=a, stop=b)
        for a, b in ((0, 4), (4, 7), (7, 10), (10, 14))
    )
    group = replace(GROUP, template=Template(micro_batch=2, stages=stages, chunks=2))
    even = even_plan_of_groups(written_plan(replace(PLAN, groups=(group,), schedule="Interleaved1F1B"), FLEET))
    assert (even.pp, even.vpp, even.devices) == (2, 2, 16)
    assert even.layers_per_stage == (3, 3, 3, 3)
    words = megatron_arguments(even)
    assert words[words.index("--num-virtual-stages-per-pipeline-rank") + 1] == "2"
    assert "Interleaved1F1B" in torchtitan_toml(even)
    rows = schedule_csv(even).splitlines()
    assert [row.split(",")[0] for row in rows] == ["0F0", "1F0"]
    assert "2F0" in rows[0]


def test_pipelines_without_samples_are_not_even() -> None:
    """Replicas that hold state for others: as many as there are devices, and fewer samples."""
    with pytest.raises(PlanError, match="pipelines without samples, which hold state for others"):
        even_plan_of_groups(
            written_plan(replace(PLAN, groups=(replace(GROUP, num_microbatches=1),), global_batch=6), FLEET)
        )
