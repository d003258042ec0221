"""Steps against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cluster.catalog import Accelerator, lookup
from heterodyne.errors import ClusterError
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.clock import play
from heterodyne.plan.schedules.times import StageTimes, chain
from heterodyne.predictor.constants import constants
from heterodyne.predictor.devices import chip_of, network_of
from heterodyne.predictor.footprint import footprint, layer_activation_bytes
from heterodyne.predictor.kernels import Attention, Kernels, Product
from heterodyne.predictor.passes import Passes
from heterodyne.predictor.roofline import kernels_s, product_s
from heterodyne.predictor.setup import Setup
from heterodyne.predictor.software import Software, software_of
from heterodyne.predictor.step import predicted
from heterodyne.predictor.transformer import Transformer

GPT = Transformer(layers=24, hidden=2048, heads=16, vocab=51200, seq=1024, ffn=8192)
A100 = lookup("A100-SXM-80GB")
NODE = network_of(A100, 8)


def step_s(**changes: object) -> float:
    return predicted(GPT, Setup(global_batch=64, micro_batch=2, **changes), A100, NODE).step_s  # type: ignore[arg-type]


def test_replicas_divide_the_work_and_pay_for_their_gradients() -> None:
    alone, eight = step_s(), step_s(dp=8)
    assert alone / 8 < eight < alone


def test_recomputing_costs_a_forward_at_most() -> None:
    assert step_s() < step_s(recompute="full") <= step_s() * 4 / 3 * 1.01


def test_a_pipeline_has_the_bubble_of_its_schedule() -> None:
    without_head = replace(GPT, vocab=1)
    setup = Setup(global_batch=16, micro_batch=1, pp=4, software=Software(overlap_sends=True, launch=0.0))
    free = replace(NODE, inside_bytes_per_s=1e18, inside_latency_s=0.0)
    told = predicted(without_head, setup, A100, free).time
    assert told.bubble_s == pytest.approx(3 / 16 * told.computing_s, rel=0.02)
    chunks = predicted(without_head, replace(setup, vpp=3), A100, free).time
    assert chunks.bubble_s == pytest.approx(told.bubble_s / 3, rel=0.05)


def test_better_schedules_are_no_slower() -> None:
    slower = step_s(pp=8)
    for schedule in ("ZBH1", "ZBH2"):
        assert step_s(pp=8, schedule=schedule) <= slower


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="no schedule '2F2B'; there are"):
        step_s(pp=2, schedule="2F2B")


@given(
    pp=st.sampled_from([2, 3, 4]),
    many=st.integers(1, 60),
    schedule=st.sampled_from(["1F1B", "GPipe", "ZBH1"]),
    seq=st.sampled_from([128, 1024]),
)
def test_a_long_row_of_micro_batches_is_as_if_all_were_played(pp: int, many: int, schedule: str, seq: int) -> None:
    model = replace(GPT, seq=seq)
    setup = Setup(global_batch=2 * many, micro_batch=2, pp=pp, schedule=schedule, software=Software(overlap_sends=True))
    told = predicted(model, setup, A100, NODE).time
    passes = Passes(
        model=model, setup=setup, chip=chip_of(A100, "bf16", setup.software), network=NODE, known=constants()
    )
    (forward, backward), head = passes.layer, passes.head
    times = []
    for stage, layers in enumerate(setup.layers_of_stages(model.layers)):
        last = stage == pp - 1
        behind = layers * backward + head[1] * last + passes.added_s
        times.append(StageTimes(forward_s=layers * forward + head[0] * last, input_s=behind / 2, weight_s=behind / 2))
    whole = play(SCHEDULES[schedule].orders(pp, 1, many), times, reads=chain(pp, passes.send_s)).makespan_s
    assert told.computing_s + told.bubble_s == pytest.approx(whole, rel=0.01)


@given(tp=st.sampled_from([1, 2, 4, 8]), seq=st.sampled_from([512, 2048]), micro_batch=st.integers(1, 8))
def test_activations_are_those_of_korthikanti(tp: int, seq: int, micro_batch: int) -> None:
    model = replace(GPT, seq=seq)
    setup = Setup(global_batch=64, micro_batch=micro_batch, tp=tp, software=Software(flash=False))
    s, b, h, a = seq, micro_batch, model.hidden, model.heads
    assert layer_activation_bytes(model, setup)[0] == pytest.approx(s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp)))
    beside = replace(setup, sequence_parallel=True)
    assert layer_activation_bytes(model, beside)[0] == pytest.approx(s * b * h / tp * (34 + 5 * a * s / h))


def test_what_is_sharded_takes_less() -> None:
    base = Setup(global_batch=64, micro_batch=2, dp=8)
    needed = [footprint(GPT, replace(base, zero=zero)).total for zero in range(4)]
    assert all(less < more for more, less in pairwise(needed))
    assert footprint(GPT, replace(base, recompute="full")).total < footprint(GPT, base).total


def test_an_early_stage_holds_the_micro_batches_under_way() -> None:
    one, four = (footprint(GPT, Setup(global_batch=64, micro_batch=2, pp=pp)) for pp in (1, 4))
    assert four.activations == pytest.approx(one.activations)  # a quarter of the layers, four micro-batches


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "found"),
    [(24, 4, 1, (6, 6, 6, 6)), (22, 8, 1, (2, 3, 3, 3, 3, 3, 3, 2)), (7, 3, 1, (2, 3, 2)), (8, 2, 2, (2, 2, 2, 2))],
)
def test_layers_are_dealt_to_stages(layers: int, pp: int, vpp: int, found: tuple[int, ...]) -> None:
    dealt = Setup(global_batch=1, micro_batch=1, pp=pp, vpp=vpp).layers_of_stages(layers)
    assert dealt == found
    assert sum(dealt) == layers


def test_a_precision_that_a_device_lacks_is_done_in_a_wider_one() -> None:
    v100 = lookup("V100-SXM2-16GB")
    assert chip_of(v100, "fp8", Software()).flops == chip_of(v100, "fp16", Software()).flops
    assert chip_of(v100, "tf32", Software()).flops <= 15.7e12
    # Who computes in bf16 only has fp32 rates where there are no units for it, and the same as anybody where there are.
    only = Software(fp16=False)
    assert chip_of(v100, "bf16", only).flops <= 15.7e12 < chip_of(v100, "bf16", Software()).flops
    assert chip_of(A100, "bf16", only) == chip_of(A100, "bf16", Software())
    assert (
        chip_of(lookup("H100-SXM-80GB"), "fp8", Software()).flops
        > chip_of(lookup("H100-SXM-80GB"), "bf16", Software()).flops
    )


def test_software_is_known_by_name() -> None:
    assert not software_of("DeepSpeed ZeRO-3").flash
    assert software_of("Megatron Core MoE DeepEP").tuned
    assert software_of("something of our own") == software_of(None) == Software()


def test_a_device_whose_datasheet_is_silent_is_refused_with_the_remedy() -> None:
    bare = Accelerator(
        kind="X1", backend="cuda", aliases=(), peak_flops={}, measured_flops={}, memory_bytes=None,
        memory_bandwidth_bytes_per_s=None, link_bandwidth_bytes_per_s=None, link_type=None, tdp_w=None, prices=(),
        sources=(), notes="",
    )  # fmt: skip
    with pytest.raises(ClusterError, match=r"memory bandwidth of X1 .* 'kinds'"):
        chip_of(bare, "bf16", Software())
    with pytest.raises(ClusterError, match=r"peak of X1 in bf16 .* 'kinds'"):
        chip_of(replace(bare, memory_bandwidth_bytes_per_s=1e12), "bf16", Software())


def test_a_partition_that_is_told_is_taken() -> None:
    setup = Setup(global_batch=64, micro_batch=2, pp=4, partition=(3, 9, 9, 3))
    assert setup.layers_of_stages(24) == (3, 9, 9, 3)
    even = predicted(GPT, replace(setup, partition=()), A100, NODE).time
    assert predicted(GPT, setup, A100, NODE).time.computing_s > even.computing_s


def test_stopping_early_spares_the_last_product_of_each_layer() -> None:
    no_head = replace(GPT, vocab=1)
    whole, early = (
        predicted(
            no_head,
            Setup(global_batch=64, micro_batch=64, recompute="full", software=Software(stops_early=stops)),
            A100,
            NODE,
        ).step_s
        for stops in (False, True)
    )
    down = Product(m=64 * GPT.seq, n=GPT.hidden, k=GPT.ffn)
    spared = GPT.layers * product_s(down, chip_of(A100, "bf16", Software()))
    assert whole - early == pytest.approx(spared)


@given(seq=st.integers(1, 10**6))
def test_a_flash_kernel_does_half_of_its_rate_at_a_length_that_is_told(seq: int) -> None:
    chip = replace(chip_of(A100, "bf16", Software()), attention_half=500.0, memory_bytes_per_s=1e30, launch_s=0.0)
    one = Kernels(attention=(Attention(flops=1e12, bytes=1.0, seq=seq),))
    long = Kernels(attention=(Attention(flops=1e12, bytes=1.0),))
    slower = [a / b for a, b in zip(kernels_s(one, chip), kernels_s(long, chip), strict=True)]
    assert slower == pytest.approx([1 + 500 / seq] * 2)
