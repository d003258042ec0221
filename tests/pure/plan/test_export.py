"""Even plans in the words of Megatron-LM, torchtitan and PyTorch: what is written, and what they cannot run."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from heterodyne.errors import PlanError
from heterodyne.plan.export import (
    EvenPlan,
    ModelShape,
    megatron_arguments,
    megatron_layout,
    pytorch_takes,
    schedule_csv,
    torchtitan_toml,
)
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.csv_file import parse_csv

UNEVEN = EvenPlan(
    dp=4, tp=2, pp=4, layers_per_stage=(12, 10, 6, 4), micro_batch_size=2, global_batch_size=64, zero_stage=1,
    shape=ModelShape(hidden_size=4096, num_attention_heads=32, num_query_groups=8, sequence_length=2048),
)  # fmt: skip


def arguments(plan: EvenPlan) -> dict[str, str | None]:
    """Each argument with its value; None for a flag."""
    words = megatron_arguments(plan)
    return {
        word: None if number + 1 == len(words) or words[number + 1].startswith("--") else words[number + 1]
        for number, word in enumerate(words)
        if word.startswith("--")
    }


def layers_of(layout: str) -> list[int]:
    """Layers of each stage, read as Megatron-LM reads them."""
    return [
        sum(int(part[1:] or 1) for part in stage.strip("EL").replace("t*", " t").replace("tt", "t t").split())
        for stage in layout.split("|")
    ]


@st.composite
def even_plans(draw: st.DrawFn) -> EvenPlan:
    pp = draw(st.integers(1, 4))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    dp, micro = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    layers = draw(st.lists(st.integers(1, 9), min_size=pp * vpp, max_size=pp * vpp).map(tuple))
    return EvenPlan(
        dp=dp, pp=pp, vpp=vpp, tp=draw(st.integers(1, 4)), cp=draw(st.integers(1, 2)), layers_per_stage=layers,
        micro_batch_size=micro, global_batch_size=dp * micro * draw(st.integers(1, 5)),
        zero_stage=draw(st.sampled_from([0, 1, 2, 3])), schedule="1F1B" if vpp == 1 else "Interleaved1F1B",
        recomputed_layers=draw(st.sampled_from([(), layers])),
    )  # fmt: skip


def test_arguments_of_megatron() -> None:
    given_ = arguments(UNEVEN)
    assert given_["--tensor-model-parallel-size"] == "2"
    assert given_["--pipeline-model-parallel-size"] == "4"
    assert given_["--pipeline-model-parallel-layout"] == "Et*12|t*10|t*6|t*4L"
    assert given_["--num-layers"] == "32"
    assert given_["--micro-batch-size"] == "2"
    assert given_["--global-batch-size"] == "64"
    assert given_["--num-query-groups"] == "8"
    flags = {"--sequence-parallel", "--use-distributed-optimizer", "--bf16", "--group-query-attention"}
    assert {name for name, value in given_.items() if value is None} == flags


@given(even_plans())
def test_megatron_is_given_every_degree_and_all_layers(plan: EvenPlan) -> None:
    assume(plan.vpp == 1 or plan.num_microbatches % plan.pp == 0)
    given_ = arguments(plan)
    sizes = [int(given_[f"--{name}-parallel-size"] or 0) for name in ("tensor-model", "pipeline-model", "context")]
    assert sizes == [plan.tp, plan.pp, plan.cp]
    assert plan.devices == plan.dp * plan.tp * plan.pp * plan.cp
    assert ("--pipeline-model-parallel-layout" in given_) == (not plan.alike_stages)
    assert not {"--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank"} <= given_.keys()
    assert layers_of(megatron_layout(plan)) == list(plan.layers_per_stage)


@pytest.mark.parametrize("places", [2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", range(1, 30))
def test_megatron_interleaves_only_what_it_takes(places: int, micro_batches: int) -> None:
    """Its own rule on ``--microbatch-group-size-per-virtual-pipeline-stage``: at least as many as there are places, no more than there are
    micro-batches; and so many are left over, or none.
    """
    plan = EvenPlan(
        pp=places, vpp=2, layers_per_stage=(1,) * (2 * places), schedule="Interleaved1F1B",
        micro_batch_size=1, global_batch_size=micro_batches,
    )  # fmt: skip
    try:
        megatron_arguments(plan)
    except PlanError as refused:
        assert micro_batches % places
        told = re.search(r"places; ([\d or]+) would do", str(refused))
        assert told is not None
        for other in map(int, told[1].split(" or ")):
            assert megatron_arguments(replace(plan, global_batch_size=other))
        return
    assert micro_batches >= places
    size = int(arguments(plan).get("--microbatch-group-size-per-virtual-pipeline-stage") or places)
    assert places <= size <= micro_batches
    assert micro_batches % size == 0 or micro_batches % size >= places


def test_a_stage_of_just_an_embedding_or_a_head() -> None:
    plan = EvenPlan(pp=4, layers_per_stage=(0, 3, 1, 0), micro_batch_size=1, global_batch_size=4)
    assert megatron_layout(plan) == "E|t*3|t|L"


@pytest.mark.parametrize(
    ("again", "method", "number"),
    [((12, 10, 6, 4), "uniform", "1"), ((5, 5, 5, 4), "block", "5"), ((12, 10, 6, 3), None, None), ((1, 0, 0, 0), None, None)],
)  # fmt: skip
def test_layers_that_compute_again(again: tuple[int, ...], method: str | None, number: str | None) -> None:
    plan = replace(UNEVEN, recomputed_layers=again)
    if method is None:
        with pytest.raises(PlanError, match=r"stage [13] has [03] of its"):
            megatron_arguments(plan)
        return
    given_ = arguments(plan)
    assert (given_["--recompute-granularity"], given_["--recompute-method"]) == ("full", method)
    assert given_["--recompute-num-layers"] == number


def test_sharing_out_more_than_states_is_fsdp() -> None:
    given_ = arguments(replace(UNEVEN, zero_stage=3))
    assert given_["--data-parallel-sharding-strategy"] == "optim_grads_params"
    assert {"--use-megatron-fsdp", "--use-distributed-optimizer", "--no-gradient-accumulation-fusion"} <= given_.keys()


def test_a_schedule_that_megatron_does_not_run() -> None:
    with pytest.raises(PlanError, match="runs 1F1B with 1 stage on each place, not GPipe"):
        megatron_arguments(replace(UNEVEN, schedule="GPipe"))


def test_a_configuration_of_torchtitan() -> None:
    read = tomllib.loads(torchtitan_toml(UNEVEN, model="llama3", flavor="8B"))
    assert read["model"] == {"name": "llama3", "flavor": "8B"}
    assert read["training"] == {
        "local_batch_size": 16, "global_batch_size": 64, "seq_len": 2048, "mixed_precision_param": "bfloat16",
    }  # fmt: skip
    parallelism = read["parallelism"]
    assert parallelism["data_parallel_shard_degree"] == 4
    assert parallelism["pipeline_parallel_schedule"] == "1F1B"
    parts = parallelism["module_fqns_per_model_part"]
    assert [sum(name.startswith("layers.") for name in part) for part in parts] == [12, 10, 6, 4]
    assert (parts[0][0], parts[-1][-2:]) == ("tok_embeddings", ["norm", "output"])
    assert "ZeRO 2" in torchtitan_toml(UNEVEN)


@given(even_plans())
def test_torchtitan_covers_the_same_devices_layers_and_samples(plan: EvenPlan) -> None:
    read = tomllib.loads(torchtitan_toml(plan, schedule_csv=None if pytorch_takes(plan) else "own.csv"))
    parallelism, training = read["parallelism"], read["training"]
    names = (
        "data_parallel_replicate",
        "data_parallel_shard",
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
    )
    devices = 1
    for name in names:
        devices *= parallelism[f"{name}_degree"]
    assert devices == plan.devices
    accumulated = training["global_batch_size"] / (training["local_batch_size"] * plan.dp)
    assert accumulated == (1 if plan.pp > 1 else plan.num_microbatches)
    parts = parallelism.get("module_fqns_per_model_part", [])
    named = [name for part in parts for name in part]
    assert len(parts) == (plan.pp * plan.vpp if plan.pp > 1 else 0)
    assert not parts or named == ["tok_embeddings", *(f"layers.{i}" for i in range(plan.layers)), "norm", "output"]


def test_a_schedule_that_has_no_name_in_pytorch_goes_as_csv() -> None:
    plan = replace(UNEVEN, schedule="ZBH1")
    with pytest.raises(PlanError, match="no schedule ZBH1; write it as CSV"):
        torchtitan_toml(plan)
    parallelism = tomllib.loads(torchtitan_toml(plan, schedule_csv="zbh1.csv"))["parallelism"]
    assert parallelism["pipeline_parallel_schedule_csv"] == "zbh1.csv"
    assert parse_csv(schedule_csv(plan)) == SCHEDULES["ZBH1"].orders(4, 1, plan.num_microbatches)


def test_what_torchtitan_cannot_run() -> None:
    with pytest.raises(PlanError, match="stage 1 has 5 of its 10"):
        torchtitan_toml(replace(UNEVEN, recomputed_layers=(12, 5, 6, 4)))
    with pytest.raises(PlanError, match="not in fp16"):
        torchtitan_toml(replace(UNEVEN, precision="fp16"))
    with pytest.raises(PlanError, match="ep 2 needs zero_stage 1"):
        torchtitan_toml(replace(UNEVEN, ep=2, zero_stage=0))
    with pytest.raises(PlanError, match="no schedule Magic; it has 1F1B"):
        torchtitan_toml(replace(UNEVEN, schedule="Magic"))
    with pytest.raises(PlanError, match="'Magic' is not known"):
        schedule_csv(replace(UNEVEN, schedule="Magic"))


def test_the_layout_of_stages() -> None:
    assert UNEVEN.stage_layout == "[12, 10, 6, 4]"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dp": 0}, "dp is 0"),
        ({"pp": 3}, "4 stages for pp 3 x vpp 1"),
        ({"global_batch_size": 63}, "no multiple of dp 4 x micro-batches of 2"),
        ({"layers_per_stage": (12, 0, 6, 4)}, "stage 1 has no layers"),
        ({"layers_per_stage": (12, 1, 6, -4)}, "stage 3 has -4 layers"),
        ({"ep": 3}, "ep 3 does not divide dp 4 x cp 1"),
        ({"recomputed_layers": (1,)}, "1 recomputed_layers for 4 stages"),
        ({"recomputed_layers": (13, 0, 0, 0)}, "stage 0 computes 13 of its 12 layers again"),
        ({"pp": 1, "vpp": 4}, "vpp is 4 where there is no pipeline"),
    ],
)
def test_numbers_that_do_not_go_together(changes: dict[str, int], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        replace(UNEVEN, **changes)  # type: ignore[arg-type]
