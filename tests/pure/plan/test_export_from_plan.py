"""From a plan to an even one: which plans are even, and what is told of those that are not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given

from heterodyne.errors import PlanError
from heterodyne.graph import ModelGraph
from heterodyne.plan import Layout, MicroBatches, Pipeline, Plan, Region, Stage
from heterodyne.plan.export import even_plan, megatron_arguments, torchtitan_toml
from heterodyne.plan.export.from_plan import model_shape
from pure.build import graph
from pure.cost.transformer import HEADS, TOKENS, transformer
from pure.plan.strategies import GENERAL_PLANS

MODEL = graph(6)  # ops: embed, six layers of two, head


def stage(
    start: int, stop: int, devices: str, kind: str = "replicate", shares: tuple[int, ...] = (), **other: Any
) -> Stage:
    layout = Layout(kind=kind, shares=shares or (1,) * len(devices))  # type: ignore[arg-type]
    return Stage(ops=(start, stop), devices=tuple(devices), regions=(Region(layout=layout),), **other)


def plan(*pipelines: tuple[Stage, ...], micro_batches: str = "4x2", model: ModelGraph = MODEL, **other: Any) -> Plan:
    made = tuple(Pipeline(micro_batches=MicroBatches.parse(micro_batches), stages=stages) for stages in pipelines)
    samples = sum(pipeline.micro_batches.samples for pipeline in made)
    return Plan(model=model.fingerprint, cluster="", global_batch_size=samples, pipelines=made, **other)


def test_pipelines_of_stages_that_lie_in_parts() -> None:
    even = even_plan(
        plan(
            (stage(0, 9, "ab", "split"), stage(9, 14, "cd", "split")), (stage(0, 9, "ef", "split"), stage(9, 14, "gh", "split"))
        ),
        MODEL,
    )  # fmt: skip
    assert (even.dp, even.tp, even.pp, even.vpp, even.cp) == (2, 2, 2, 1, 1)
    assert even.layers_per_stage == (4, 2)
    assert (even.micro_batch_size, even.global_batch_size, even.num_microbatches) == (2, 16, 4)
    assert "--pipeline-model-parallel-layout" in megatron_arguments(even)


def test_devices_that_share_the_samples_are_data_parallel() -> None:
    even = even_plan(plan((stage(0, 5, "ab"), stage(5, 14, "cd")), micro_batches="3x4"), MODEL)
    assert (even.dp, even.tp, even.pp, even.micro_batch_size, even.num_microbatches) == (2, 1, 2, 2, 3)


def test_devices_that_share_the_positions_are_context_parallel() -> None:
    assert even_plan(plan((stage(0, 14, "abc", "context"),)), MODEL).cp == 3


def test_several_stages_on_a_place() -> None:
    cuts = [0, 3, 7, 11, 14]
    stages = tuple(stage(a, b, "ab"[i % 2]) for i, (a, b) in enumerate(pairwise(cuts)))
    even = even_plan(plan(stages, schedule="Interleaved1F1B"), MODEL)
    assert (even.pp, even.vpp, even.layers_per_stage) == (2, 2, (1, 2, 2, 1))
    with pytest.raises(PlanError, match="stage 2 is on place 0; ZBVZeroBubble has it on place 1"):
        even_plan(plan(stages, schedule="ZBVZeroBubble"), MODEL)


def test_what_is_computed_again_and_who_holds_states() -> None:
    even = even_plan(
        plan((stage(0, 7, "ab", recompute=(0, 1, 2)), stage(7, 14, "cd", recompute=(4, 5, 6))), zero=1),
        MODEL,
    )  # fmt: skip
    assert even.recomputed_layers == (2, 3)
    assert even.zero_stage == 1


def test_what_is_left_out_is_noted() -> None:
    even = even_plan(plan((stage(0, 14, "a"),), idle=("b", "c")), MODEL)
    assert "2 devices of the cluster take no part" in even.notes
    assert "# 2 devices" in torchtitan_toml(even)


UNEVEN = {
    "pipeline 1 takes": plan((stage(0, 14, "a"),)).model_copy(
        update={
            "pipelines": tuple(
                Pipeline(micro_batches=MicroBatches.parse(m), stages=(stage(0, 14, d),))
                for m, d in (("4x2", "a"), ("2x2", "b"))
            ),
            "global_batch_size": 12,
        }
    ),
    "micro-batches of unequal sizes .3x2.1x1": plan((stage(0, 14, "a"),), micro_batches="3x2+1x1"),
    "stage 0 has unequal shares .2:1": plan((stage(0, 14, "ab", shares=(2, 1)),), micro_batches="3x3"),
    "stage 0: micro-batches of 3 samples cannot be shared out evenly over 2": plan(
        (stage(0, 14, "ab"),), micro_batches="2x3"
    ),
    "stage 1 is on 1 devices, stage 0 on 2": plan((stage(0, 7, "ab"), stage(7, 14, "c"))),
    "stage 1 is replicate and split": plan((stage(0, 7, "ab"), stage(7, 14, "cd", "split"))),
    "pipeline 1 has 1 stages and pipeline 0 2": plan((stage(0, 7, "a"), stage(7, 14, "b")), (stage(0, 14, "c"),)),
    "pipeline 1 stage 0 runs ops .0, 5. and that of pipeline 0 .0, 7": plan(
        (stage(0, 7, "a"), stage(7, 14, "b")), (stage(0, 5, "c"), stage(5, 14, "d"))
    ),
    "pipeline 1 stage 0 is laid out otherwise": plan((stage(0, 14, "ab", "split"),), (stage(0, 14, "cd"),)),
    "pipeline 1 stage 0 computes other blocks again": plan((stage(0, 14, "a"),), (stage(0, 14, "b", recompute=(1,)),)),
    "pipeline 1 stage 0 has unequal shares": plan((stage(0, 14, "ab"),), (stage(0, 14, "cd", shares=(3, 1)),)),
    "stage 0 begins or ends inside block 'layer1'": plan((stage(0, 4, "a"), stage(4, 14, "b"))),
    "unequal state_shares .2:1": plan((stage(0, 14, "ab", state_shares=(2, 1)),), zero=1),
    "some have more than others": plan((stage(0, 3, "a"), stage(3, 7, "b"), stage(7, 14, "a"))),
    "'Magic' is not known": plan((stage(0, 14, "a"),), schedule="Magic"),
    "stage 1 runs ops 8 to 14, the ones before end at 7": plan((stage(0, 7, "a"), stage(8, 14, "b"))),
    "the stages end at op 13, the model has 14": plan((stage(0, 13, "a"),)),
    "stage 0 has no device": plan((stage(0, 14, ""),)),
    "has no pipeline": plan((stage(0, 14, "a"),)).model_copy(update={"pipelines": ()}),
}


@pytest.mark.parametrize("told", UNEVEN)
def test_a_plan_that_is_not_even_is_told_by_its_stage(told: str) -> None:
    with pytest.raises(PlanError, match=told):
        even_plan(UNEVEN[told], MODEL)


def test_an_order_of_its_own_is_no_named_schedule() -> None:
    own = plan((stage(0, 14, "a"),))
    pipeline = own.pipelines[0].model_copy(update={"order": ("0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3",)})
    with pytest.raises(PlanError, match="order of its own"):
        even_plan(own.model_copy(update={"pipelines": (pipeline,)}), MODEL)


def test_a_model_without_layers() -> None:
    with pytest.raises(PlanError, match="no repeated layers"):
        even_plan(plan((stage(0, 4, "a"),), model=graph(1)), graph(1))


def renamed(block: int, **changes: str) -> ModelGraph:
    blocks = tuple(replace(b, **changes) if b.index == block else b for b in MODEL.blocks)  # type: ignore[arg-type]
    return replace(MODEL, blocks=blocks)


def test_a_layer_of_another_kind_is_a_layer() -> None:
    model = renamed(1, kind="dense")
    assert even_plan(plan((stage(0, 14, "a"),), model=model), model).layers == 6


def test_what_stands_before_the_layers_is_in_the_first_stage() -> None:
    model = renamed(1, kind="stem", name="stem")
    assert even_plan(plan((stage(0, 3, "a"), stage(3, 14, "b")), model=model), model).layers_per_stage == (0, 5)
    with pytest.raises(PlanError, match="stage 1 has 'stem'"):
        even_plan(plan((stage(0, 1, "a"), stage(1, 14, "b")), model=model), model)


def test_the_shape_of_a_transformer() -> None:
    shape = model_shape(transformer())
    assert (shape.num_attention_heads, shape.sequence_length) == (HEADS, TOKENS)


@given(GENERAL_PLANS)
def test_any_plan_is_even_or_told_why_not(plan: Plan) -> None:
    try:
        even = even_plan(plan.model_copy(update={"model": MODEL.fingerprint}), MODEL)
    except PlanError:
        return
    assert even.devices == len(plan.devices)


def test_a_plan_of_another_model() -> None:
    with pytest.raises(PlanError, match="made for another model"):
        even_plan(plan((stage(0, 14, "a"),)), graph(5))
