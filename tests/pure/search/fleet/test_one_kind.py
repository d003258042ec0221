"""Plans on one kind of device, against what can be worked out by hand: how software changes their seconds and bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cost.layers import Widths
from heterodyne.predictor.layer_costs import PredictedLayers, predicted_layers
from heterodyne.predictor.setup import Setup
from heterodyne.predictor.software import Software
from heterodyne.predictor.transformer import Transformer
from heterodyne.search.fleet.plan import Candidate, ScheduleName, Template, TemplateStage
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.tables import Tables

KIND = "A100-SXM-80GB"
# A small vocabulary: the ends of the model hardly count.
MODEL = Transformer(layers=16, hidden=4096, heads=32, vocab=4096, seq=2048, ffn=16384, tied=False)
FREE = Wire(bandwidth_bytes_per_s=1e18, latency_s=0.0)
NVLINK = Wire(bandwidth_bytes_per_s=2e11, latency_s=1e-5)
CARDS = Wire(bandwidth_bytes_per_s=1e10, latency_s=1e-5)
OPEN = Software(overlap_gradients=False)


def layers_of(model: Transformer, software: Software, fleet: Fleet) -> PredictedLayers:
    return predicted_layers(model, fleet, software=software)


def evaluated(
    dp: int, tp: int, pp: int, micro_batches: int, *, zero: int = 0, model: Transformer = MODEL, chunks: int = 1,
    software: Software = OPEN, inside: Wire = NVLINK, between: Wire = CARDS, recompute: bool = False,
    schedule: ScheduleName = "1F1B", each: int = 8,
) -> Candidate | None:  # fmt: skip
    """``dp`` pipelines, each of ``pp`` places with ``chunks`` stages on ``tp`` devices, on nodes of ``each``."""
    pool = Pool(
        name="all", kind=KIND, nodes=max(1, dp * tp * pp // each), devices_per_node=each, memory_bytes=10**15, inside=inside,
        between=between,
    )  # fmt: skip
    fleet = Fleet(name="one kind", pools=(pool,))
    predictor = Predictor(
        fleet=fleet,
        tables=Tables(layers_of(model, software, fleet)),
        global_batch=2 * dp * micro_batches,
        software=software,
    )
    stages = pp * chunks
    cuts = [0, *(1 + model.layers // stages * stage for stage in range(1, stages)), model.layers + 2]
    template = Template(
        micro_batch=2,
        stages=tuple(
            TemplateStage(pool="all", widths=Widths(tensor=tp), start=a, stop=b, recompute=recompute)
            for a, b in pairwise(cuts)
        ),
        chunks=chunks,
    )
    return predictor.evaluate(((template, dp),), schedule=schedule, zero=(zero,))


def step_s(*degrees: int, **options: object) -> float:
    found = evaluated(*degrees, **options)  # type: ignore[arg-type]
    assert found is not None
    return found.predicted.step_s


def held_bytes(*degrees: int, **options: object) -> float:
    """Of the fullest device."""
    found = evaluated(*degrees, **options)  # type: ignore[arg-type]
    assert found is not None
    return found.predicted.fullest_bytes


def test_replicas_divide_the_work_and_pay_for_their_gradients() -> None:
    alone, eight = step_s(1, 1, 1, 64), step_s(8, 1, 1, 8)
    assert alone / 8 < eight < alone
    ring = 2 * 7 / 8 * 4 * MODEL.parameters / NVLINK.bandwidth_bytes_per_s
    update = alone / 64 * 8
    assert eight == pytest.approx(update + ring, rel=0.02)


def test_recompute_costs_a_forward_at_most_and_spares_memory() -> None:
    plain, again = step_s(1, 1, 1, 8), step_s(1, 1, 1, 8, recompute=True)
    assert plain < again <= plain * 4 / 3 * 1.01
    assert held_bytes(1, 1, 1, 8, recompute=True) < held_bytes(1, 1, 1, 8)


def test_a_layer_that_holds_no_less_by_it_is_not_recomputed() -> None:
    pool = Pool(name="all", kind=KIND, nodes=1, devices_per_node=8, memory_bytes=10**12, inside=NVLINK)
    layers = layers_of(MODEL, OPEN, Fleet(name="one", pools=(pool,)))
    costs = [layers.cost(KIND, layer, Widths(), 2) for layer in ("embedding", "block", "head")]
    assert [cost is not None and cost.recompute_s > 0 for cost in costs] == [False, True, False]


@pytest.mark.parametrize("pp", [2, 4])
def test_a_pipeline_has_the_bubble_of_its_schedule(pp: int) -> None:
    whole = step_s(1, 1, 1, 32, inside=FREE)
    gpipe = step_s(1, 1, pp, 32, inside=FREE, schedule="GPipe")
    assert gpipe == pytest.approx(whole / pp * (1 + (pp - 1) / 32), rel=0.03)
    assert step_s(1, 1, pp, 32, inside=FREE) == pytest.approx(gpipe, rel=1e-3)
    chunks = step_s(1, 1, pp, 32, inside=FREE, schedule="Interleaved1F1B", chunks=2)
    assert chunks == pytest.approx(whole / pp * (1 + (pp - 1) / 64), rel=0.03)
    zero_bubble = [step_s(1, 1, pp, 32, inside=FREE, schedule=name) for name in ("ZBH2", "ZBH1")]
    assert zero_bubble[0] <= zero_bubble[1] * (1 + 1e-12)
    assert zero_bubble[1] <= gpipe


def test_devices_that_wait_for_their_messages_take_longer() -> None:
    """A stage in the middle sends two messages for each micro-batch, and computes nothing meanwhile."""
    slow = Wire(bandwidth_bytes_per_s=1e9, latency_s=1e-5)
    beside = step_s(1, 1, 4, 64, inside=slow, schedule="GPipe")
    waiting = step_s(1, 1, 4, 64, inside=slow, schedule="GPipe", software=replace(OPEN, overlap_sends=False))
    message = 2 * MODEL.seq * MODEL.hidden * 2 / slow.bandwidth_bytes_per_s
    assert waiting - beside == pytest.approx(64 * 2 * message, rel=0.15)


def test_neighbours_that_do_not_divide_what_they_send_send_all_of_it() -> None:
    """Without slices of the sequence each of them has the whole."""

    class Whole(PredictedLayers):
        def _setup(self, widths: Widths, micro_batch: int, *, routed: bool) -> Setup:
            return replace(super()._setup(widths, micro_batch, routed=routed), sequence_parallel=False)

    pool = Pool(name="all", kind=KIND, nodes=1, devices_per_node=8, memory_bytes=10**12, inside=NVLINK)
    made = layers_of(MODEL, OPEN, Fleet(name="one", pools=(pool,)))
    for scatters, times in ((False, 4), (True, 1)):
        software = replace(OPEN, scatters_sends=scatters)
        layers = Whole(model=MODEL, precision="bf16", chips=made.chips, networks=made.networks, software=software)
        cost, alone = layers.cost(KIND, "block", Widths(4), 2), layers.cost(KIND, "block", Widths(), 2)
        assert cost is not None
        assert alone is not None
        assert cost.output_bytes == times * alone.output_bytes


def test_what_is_sharded_takes_less() -> None:
    needed = [held_bytes(8, 1, 1, 8, zero=zero) for zero in range(4)]
    assert all(less < more for more, less in pairwise(needed))


def test_software_that_keeps_parameters_gathered_shards_no_further_in_pipelines() -> None:
    keeps = Software(keeps_gathered=True)
    for zero in (2, 3):
        assert evaluated(8, 1, 2, 8, zero=zero, software=keeps) is None
        assert evaluated(8, 1, 1, 8, zero=zero, software=keeps) is not None
        assert evaluated(8, 1, 2, 8, zero=zero) is not None


def test_parameters_that_are_not_gathered_beside_computing_are_waited_for() -> None:
    hides, waits = (
        step_s(
            16, 1, 1, 8, zero=3, software=Software(overlap_parameters=overlaps), between=replace(CARDS, latency_s=0.0)
        )
        for overlaps in (True, False)
    )
    # Gathered for the forward and for the backward of each micro-batch, gradients scattered behind it.
    once = 15 / 16 * MODEL.parameters / CARDS.bandwidth_bytes_per_s
    assert waits - step_s(1, 1, 1, 8, zero=0) == pytest.approx(8 * once * (2 + 2 + 4), rel=0.05)
    assert hides < waits


def test_states_that_neighbours_share_stay_in_a_node() -> None:
    """Each node has all of them, so updated parameters cross NVLink only, and gradients are summed over all."""
    slow, fast = (Wire(bandwidth_bytes_per_s=rate, latency_s=0.0) for rate in (1e9, 5e10))
    software = replace(OPEN, state_group=8)
    waits = [step_s(64, 1, 1, 2, zero=1, software=software, between=wire) for wire in (slow, fast)]
    ring = [2 * 63 / 64 * 4 * MODEL.parameters / wire.bandwidth_bytes_per_s for wire in (slow, fast)]
    assert waits[0] - waits[1] == pytest.approx(ring[0] - ring[1], rel=0.01)
    whole, grouped = (held_bytes(64, 1, 1, 2, zero=1, software=own) for own in (OPEN, software))
    assert grouped - whole == pytest.approx(12 * MODEL.parameters * (1 / 8 - 1 / 64), rel=0.01)


def test_broadcasts_of_many_owners_wait_for_each_other() -> None:
    late, soon = (replace(CARDS, latency_s=latency) for latency in (1e-3, 0.0))
    for dp in (16, 64):
        waits = [
            step_s(dp, 1, 1, 2, zero=1, software=replace(OPEN, broadcasts=broadcasts), between=wire)
            for broadcasts in (True, False)
            for wire in (late, soon)
        ]
        nodes = dp // 8
        assert (waits[0] - waits[1]) - (waits[2] - waits[3]) == pytest.approx((dp - 1) * (nodes - 1) * 1e-3)


def test_a_stage_that_keeps_its_output_has_it_for_each_micro_batch_under_way() -> None:
    freed, kept = (
        held_bytes(1, 1, 4, 8, recompute=True, software=replace(OPEN, keeps_outputs=keeps)) for keeps in (False, True)
    )
    assert kept - freed == pytest.approx(4 * 2 * MODEL.seq * MODEL.hidden * 2)


def test_combined_collectives_leave_everything_whole() -> None:
    combined = replace(OPEN, combined=True)
    for zero in (2, 3):
        assert held_bytes(8, 1, 1, 8, zero=zero, software=combined) == held_bytes(8, 1, 1, 8, zero=zero - 1)


def test_tied_parameters_of_one_device_are_there_once() -> None:
    tied = replace(MODEL, vocab=64000, tied=True)
    apart, once = (
        (held_bytes(8, 1, 1, 8, model=model), step_s(8, 1, 1, 8, model=model))
        for model in (replace(tied, tied=False), tied)
    )
    parameters = tied.embedding_parameters
    assert apart[0] - once[0] == pytest.approx(parameters * (2 + 4 + 12))
    ring = 2 * 7 / 8 * 4 * parameters / NVLINK.bandwidth_bytes_per_s
    update = 30 * parameters / 1.9e12
    assert apart[1] - once[1] == pytest.approx(ring + update, rel=0.05)
