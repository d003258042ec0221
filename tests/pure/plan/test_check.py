"""A plan is checked as a whole: each fault is named, all of them at once, each with a way out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.errors import PlanError
from heterodyne.graph import Loss, ModelGraph, ModuleOnly, Ref
from heterodyne.plan import Axis, Layout, MicroBatches, Pipeline, Plan, Region, Stage
from heterodyne.plan.check import require_valid, violations
from heterodyne.plan.kept import names_of
from heterodyne.plan.plan import Exchange
from pure.build import cluster, graph
from pure.cost.transformer import transformer
from pure.plan.strategies import MICRO_BATCHES, valid_plan

MODEL, MACHINES = graph(2), cluster(3)
PLAN = valid_plan(MODEL, MACHINES, [MicroBatches((4, 4)), MicroBatches((2,)), None])


def of_stage(plan: Plan, **changes: Any) -> Plan:
    first, *rest = plan.pipelines
    stage = first.stages[0].model_copy(update=changes)
    return plan.model_copy(update={"pipelines": (first.model_copy(update={"stages": (stage,)}), *rest)})


def of_plan(**changes: Any) -> Plan:
    return PLAN.model_copy(update=changes)


def region(name: str, kind: str = "replicate", shares: tuple[int, ...] = (1,)) -> Region:
    return Region(task_graph=name, layout=Layout(kind=kind, shares=shares))  # type: ignore[arg-type]


def test_what_cannot_be_kept_is_told_with_its_reason_and_its_neighbours_can() -> None:
    """Of a block with dropout between two products, whose second one is chosen by its module."""
    names = {"layer0.up": "draws random numbers", "layer0.down": "is changed later"}
    dropout, changed = (replace(op, memory=op.name if op.name == "layer0.down" else None) for op in MODEL.ops[1:3])
    model = replace(MODEL, ops=(MODEL.ops[0], dropout, changed, *MODEL.ops[3:]), random=("layer0.up",))
    for name, why in names.items():
        part = name.rpartition(".")[2]
        (sentence,) = of_keep(model, (1,), (f"{part}.linear",))
        assert why in sentence
    assert of_keep(model, (2,), ("up.linear", "down.linear")) == of_keep(model, (2,), ("linear",)) == ()
    assert sorted(names_of(model, model.blocks[2])) == ["down.linear", "up.linear"]
    assert not names_of(model, model.blocks[1])


def test_a_name_that_chooses_an_op_that_cannot_be_kept_is_not_offered() -> None:
    """As a kind, of an op outside of modules beside one in a module; or in another block that is computed again with it."""
    bare = replace(MODEL.ops[1], module="layer0")
    for changed, offered in ((MODEL.ops[2], ()), (MODEL.ops[4], ("up.linear",))):
        ops = {op.name: op for op in MODEL.ops} | {changed.name: replace(changed, memory=changed.name)}
        again = (1,) if not offered else (1, 2)
        model = replace(MODEL, ops=tuple((ops | ({} if offered else {bare.name: bare})).values()))
        assert names_of(model, *(model.blocks[number] for number in again)) == offered
        assert not of_keep(model, again, offered)


def of_keep(model: ModelGraph, recompute: tuple[int, ...], keep: tuple[str, ...]) -> tuple[str, ...]:
    plan = of_stage(valid_plan(model, MACHINES, [MicroBatches((4,)), None, None]), recompute=recompute, keep=keep)
    return violations(plan, model, MACHINES)


@given(st.lists(st.none() | MICRO_BATCHES, min_size=3, max_size=3))
def test_a_valid_plan_breaks_nothing(micro_batches: list[MicroBatches | None]) -> None:
    if any(m is not None and m.samples for m in micro_batches):
        assert violations(valid_plan(MODEL, MACHINES, micro_batches), MODEL, MACHINES) == ()


def test_batch_norm_is_not_given_a_single_value() -> None:
    """Of one value a channel there is no variance; replicas count together."""
    for sizes, places, faults in (([3, 1], (), 1), ([3, 1], (1, 1), 1), ([3, 1], (1, 2), 0), ([2, 2], (), 0)):
        model, shares = graph(2, places=places, batch_statistics=True), [MicroBatches(tuple(sizes))]
        found = violations(valid_plan(model, MACHINES, [*shares, None, None]), model, MACHINES)
        assert len(found) == faults
        assert all("model.py:1" in fault and "make the micro-batches larger" in fault for fault in found)
    model = graph(2, batch_statistics=True)
    both = valid_plan(model, MACHINES, [MicroBatches((3, 1)), MicroBatches((1, 1)), None])
    assert violations(both, model, MACHINES) == ()


FAULTS = {
    "made for another model": of_plan(model="0" * 16),
    "made for another cluster": of_plan(cluster="0" * 16),
    "device 'gpu:9' is not in the cluster": of_plan(idle=(*PLAN.idle, "gpu:9")),
    "is used 2 times": of_plan(idle=(*PLAN.idle, PLAN.devices[0])),
    "devices without a place: n0/cpu:2": of_plan(idle=()),
    "add up to 10 samples (8 + 2), the global batch has 11": of_plan(global_batch_size=11),
    "has no pipeline": of_plan(pipelines=()),
    "schedule 'Magic' is not known": of_plan(schedule="Magic"),
    "stage 1 runs ops 0 to 6, the ones before end at 6": of_plan(
        pipelines=(PLAN.pipelines[0].model_copy(update={"stages": PLAN.pipelines[0].stages * 2}), PLAN.pipelines[1])
    ),
    "has no stage": of_plan(pipelines=(PLAN.pipelines[0].model_copy(update={"stages": ()}), PLAN.pipelines[1])),
    "pipeline 0 ends at op 3, the model has 6": of_stage(PLAN, ops=(0, 3)),
    "has no device": of_stage(PLAN, devices=()),
    "names a device twice": of_stage(PLAN, devices=("n0/cpu:0", "n0/cpu:0"), regions=(region("*", shares=(1, 1)),)),
    "pipeline 0: order: 'F0' is not an action": of_plan(
        pipelines=(PLAN.pipelines[0].model_copy(update={"order": ("F0 B0",)}), PLAN.pipelines[1])
    ),
    "pipeline 0: order: lines 2, places 1": of_plan(
        pipelines=(PLAN.pipelines[0].model_copy(update={"order": ("0F0 0B0", "0F0 0B0")}), PLAN.pipelines[1])
    ),
    "order: place 0 (n0/cpu:0) has 1F0, and its stages are 0": of_plan(
        pipelines=(PLAN.pipelines[0].model_copy(update={"order": ("1F0 1B0",)}), PLAN.pipelines[1])
    ),
    "must have one share a device": of_stage(PLAN, regions=(region("*", shares=(1, 1)),)),
    "with no share": of_stage(PLAN, regions=(region("*", shares=(0,)),)),
    "has region 'moe'; the model has *": of_stage(PLAN, regions=(region("*"), region("moe"))),
    "has region '*' 2 times": of_stage(PLAN, regions=(region("*"), region("*"))),
    "has no region '*'": of_stage(PLAN, regions=()),
    "recomputes block 9; the model has blocks 0 to 3": of_stage(PLAN, recompute=(9,)),
    "has 'keep', and recomputes nothing": of_stage(PLAN, keep=("linear",)),
    "keeps 'gelu', and no op of the blocks that it recomputes": of_stage(PLAN, recompute=(1,), keep=("linear", "gelu")),
    "offloads activations of block 9; the model has blocks 0 to 3": of_stage(PLAN, offload_activations=(9,)),
    "recomputes blocks 1 and offloads their activations": of_stage(PLAN, recompute=(1, 2), offload_activations=(0, 1)),
    "recomputes block 0 more than once": of_stage(PLAN, recompute=(0, 0)),
    "state_shares": of_stage(PLAN, state_shares=(1,)),
    "give it the same in all of its stages": of_plan(
        zero=3,
        pipelines=(
            PLAN.pipelines[0].model_copy(
                update={
                    "stages": tuple(
                        PLAN.pipelines[0].stages[0].model_copy(update={"state_shares": (n,)}) for n in (1, 2)
                    )
                }
            ),
            PLAN.pipelines[1],
        ),
    ),
    "has 'overlap', and exchanges nothing": of_stage(PLAN, overlap=True),
    "has 'hierarchical', and no tokens go": of_stage(PLAN, hierarchical=True),
}


@pytest.mark.parametrize("says", FAULTS)
def test_each_fault_is_named(says: str) -> None:
    assert any(says in sentence for sentence in violations(FAULTS[says], MODEL, MACHINES))


@pytest.mark.parametrize("ops", [(0, 3), (1, 6), (3, 1), (2, 9)])
def test_of_stages_that_do_not_make_up_the_model_only_that_is_told(ops: tuple[int, int]) -> None:
    """How tensors lie in a stage in parts follows from all stages together."""
    pair = (PLAN.devices[0], *PLAN.idle)
    parts = of_stage(PLAN, ops=ops, devices=pair, regions=(region("*", "split", (1,) * len(pair)),))
    found = violations(parts.model_copy(update={"idle": ()}), MODEL, MACHINES)
    assert found
    assert all("runs ops" in sentence or "ends at op" in sentence for sentence in found)


def test_stages_of_one_place_that_would_cut_a_tied_weight_in_two_ways_are_refused() -> None:
    """By columns where it makes queries, and by rows where it puts heads together."""
    model = transformer(2)
    (tied,) = (op for op in model.ops if op.parameters == ("w10",))
    arguments = tuple((name, Ref("w0") if value == Ref("w10") else value) for name, value in tied.arguments)
    again = replace(tied, parameters=("w0",), arguments=arguments)
    model = replace(model, ops=tuple(again if op is tied else op for op in model.ops))
    machines, middle = cluster(2), model.blocks[2].start
    free, pair = Exchange(latency_bytes=0, flops_per_byte=1), region("*", "split", (1, 1))
    stages = tuple(
        Stage(ops=ops, devices=tuple(device.id for device in machines.devices), regions=(pair,), exchange=free)
        for ops in ((0, middle), (middle, len(model.ops)))
    )
    plan = valid_plan(model, machines, [MicroBatches((4,)), None])
    pipeline = plan.pipelines[0].model_copy(update={"stages": stages, "order": ("0F0 1F0 1B0 0B0",)})
    plan = plan.model_copy(update={"pipelines": (pipeline,), "idle": ()})
    (sentence,) = violations(plan, model, machines)
    assert "'w0' is read by several stages" in sentence


def test_halves_in_turns_ask_for_stages_in_parts_that_keep_everything() -> None:
    def told(*ops: tuple[int, int], batch_statistics: bool = False, **changes: Any) -> list[str]:
        model = graph(2, batch_statistics=batch_statistics)
        split = Region(layout=Layout(kind="split", shares=(1, 1)))
        pairs = [tuple(device.id for device in cluster(4).devices[at : at + 2]) for at in (0, 2)]
        stages = tuple(
            Stage(ops=bounds, devices=devices, regions=(split,), overlap=True, **changes)
            for bounds, devices in zip(ops, pairs, strict=False)
        )
        plan = valid_plan(model, cluster(4), [MicroBatches((4,)), None, None, None])
        cut = plan.model_copy(
            update={
                "pipelines": (Pipeline(micro_batches=MicroBatches((4,)), stages=stages),),
                "idle": pairs[1] if len(stages) == 1 else (),
            }
        )
        return [fault for fault in violations(cut, model, cluster(4)) if "overlap" in fault]

    assert told((0, 6)) == []
    assert told((0, 3), (3, 6)) == []
    assert ["recomputes" in fault for fault in told((0, 6), recompute=(0,))] == [True]
    assert ["cuts each micro-batch into two halves" in fault for fault in told((0, 6), batch_statistics=True)] == [True]


def meshed(*layouts: Layout, devices: int = 4) -> str:
    """What is wrong with a stage that has a region for each layout, all of them but the first for a TaskGraph."""
    machines = cluster(devices)
    model = replace(MODEL, ops=(replace(MODEL.ops[0], annotation="head"), *MODEL.ops[1:]))
    stage = Stage(
        ops=(0, len(model.ops)),
        devices=tuple(device.id for device in machines.devices),
        regions=tuple(
            Region(task_graph=name, layout=layout) for name, layout in zip(("*", "head"), layouts, strict=False)
        ),
    )
    plan = Plan(
        model=model.fingerprint,
        cluster=machines.fingerprint,
        global_batch_size=4,
        pipelines=(Pipeline(micro_batches=MicroBatches((4,)), stages=(stage,)),),
    )
    return "; ".join(violations(plan, model, machines))


def test_the_axes_of_a_stage_fill_its_devices_and_agree() -> None:
    """Unequal shares are none of it; every fault names the layouts."""
    rows = Layout(shares=(3, 1), inner=(Axis(kind="split", shares=(1, 2)),))
    assert meshed(rows) == ""
    assert meshed(rows, rows.model_copy(update={"inner": (Axis(shares=(2, 1)),)})) == ""
    assert "'*', which must have one share a device: 2 x 2 members are not 6 devices" in meshed(rows, devices=6)
    flat = meshed(rows, Layout(kind="split", shares=(1, 1, 1, 1)))
    assert "regions on different meshes ('*' replicate [3, 1] x split [1, 2], 'head' split [1, 1, 1, 1])" in flat
    assert "shares samples over its rows in different ways" in meshed(rows, rows.model_copy(update={"shares": (1, 1)}))
    assert "with no share" in meshed(Layout(shares=(1, 1), inner=(Axis(kind="split", shares=(0, 0)),)))
    assert meshed(Layout(kind="context", shares=(1, 2), inner=(Axis(kind="split", shares=(2, 1)),))) == ""


def test_batch_statistics_need_one_number_of_micro_batches() -> None:
    model = graph(2, batch_statistics=True)
    uneven = valid_plan(model, MACHINES, [MicroBatches((4, 4)), MicroBatches((2,)), None])
    (sentence,) = violations(uneven, model, MACHINES)
    assert "layer0.up (model.py:1) mixes the samples of a micro-batch" in sentence
    assert "pipelines of 1, 2 micro-batches" in sentence
    even = valid_plan(model, MACHINES, [MicroBatches((4, 4)), MicroBatches((1, 1)), MicroBatches()])
    assert violations(even, model, MACHINES) == ()


def test_a_loss_that_compares_samples_is_named_with_its_line() -> None:
    compared = replace(MODEL, loss=Loss(reduction="coupled"), together_from=len(MODEL.ops) - 1)
    plan = valid_plan(compared, MACHINES, [MicroBatches((4, 4)), MicroBatches((2,)), None])
    (sentence,) = violations(plan, compared, MACHINES)
    assert "before all its forwards, and samples see each other in the loss of this model (model.py:1)" in sentence
    assert violations(plan.model_copy(update={"schedule": "GPipe"}), compared, MACHINES) == ()


def test_the_last_stage_has_all_ops_from_where_a_loss_compares_samples() -> None:
    ops, machines = len(MODEL.ops), cluster(2)
    compared = replace(MODEL, loss=Loss(reduction="coupled"), together_from=ops - 2)
    whole = valid_plan(compared, machines, [MicroBatches((4,)), None])
    for start in (ops - 2, ops - 1):
        stages = tuple(
            Stage(ops=cut, devices=(device.id,), regions=(region("*"),))
            for cut, device in zip(((0, start), (start, ops)), machines.devices, strict=True)
        )
        pipelines = (whole.pipelines[0].model_copy(update={"stages": stages}),)
        faults = violations(whole.model_copy(update={"pipelines": pipelines, "idle": ()}), compared, machines)
        assert len(faults) == (start > ops - 2)
        assert all("begin the last stage there or before" in fault for fault in faults)


def test_pieces_of_a_model_that_only_the_module_trains_are_refused() -> None:
    whole = replace(MODEL, module_only=(ModuleOnly(what="'head' has a backward hook", source="net.py:3"),))
    valid = valid_plan(whole, MACHINES, [MicroBatches((4, 4)), MicroBatches((2,)), None])
    assert violations(valid, whole, MACHINES) == ()
    (sentence,) = violations(of_stage(valid, recompute=(0,)), whole, MACHINES)
    assert "pipeline 0, stage 0 recomputes 1 blocks" in sentence
    assert "'head' has a backward hook (net.py:3)" in sentence


def test_all_faults_are_told_at_once() -> None:
    bad = of_stage(of_plan(model="x", idle=(), global_batch_size=99), recompute=(9,))
    with pytest.raises(PlanError) as caught:
        require_valid(bad, MODEL, MACHINES)
    assert str(caught.value).count("\n  - ") == len(violations(bad, MODEL, MACHINES)) == 4
