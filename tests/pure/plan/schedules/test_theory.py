"""The clock on uniform stages gives what the papers say."""

from __future__ import annotations

import pytest

from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.clock import Played, play
from heterodyne.plan.schedules.shifted_critical_path import recomputed_ahead
from heterodyne.plan.schedules.times import StageBytes, StageTimes, blocked

SIZES = [(2, 2), (3, 7), (4, 8), (8, 32), (5, 3)]


def played(
    name: str, places: int, micro_batches: int, *, chunks: int = 1, work: tuple[float, float, float] = (1, 1, 1)
) -> Played:
    """Each place has ``work`` (F, I, W) a micro-batch, whatever the number of its stages."""
    forward, input_, weight = (seconds / chunks for seconds in work)
    stage = StageTimes(forward_s=forward, input_s=input_, weight_s=weight)
    orders = SCHEDULES[name].orders(places, chunks, micro_batches)
    count = places * chunks
    return play(orders, [stage] * count, held=[StageBytes(activation=1)] * count)


@pytest.mark.parametrize(("places", "micro_batches"), [(3, 7), (4, 8), (8, 32)])
def test_messages_that_block_cost_a_middle_stage_two_for_each_micro_batch(places: int, micro_batches: int) -> None:
    """A forward passes p - 1 messages on its way down and its backward as many on its way back; between them a stage in the middle works,
    and sends two messages, for every micro-batch."""
    stages = [StageTimes(forward_s=2, input_s=3, weight_s=1)] * places
    orders = SCHEDULES["GPipe"].orders(places, 1, micro_batches)
    waits = play(orders, blocked(stages, [1.0] * (places - 1))).makespan_s - play(orders, stages).makespan_s
    assert waits == 2 * (places - 1) + 2 * (micro_batches - 1)


@pytest.mark.parametrize("micro_batches", [8, 32])
def test_a_message_holds_its_receiver_as_long_as_its_sender(micro_batches: int) -> None:
    """Of two stages the first sends forward and receives backward, the second the other way round: as often, so both wait as long; where
    messages go both ways at once each waits for one a micro-batch."""
    stages = [StageTimes(forward_s=2, input_s=3, weight_s=1)] * 2
    alone = [stage.total_s for stage in stages]
    waits = {
        duplex: [own.total_s - was for own, was in zip(blocked(stages, [1.0], duplex=duplex), alone, strict=True)]
        for duplex in (True, False)
    }
    assert waits == {True: [1, 1], False: [2, 2]}
    orders = SCHEDULES["1F1B"].orders(2, 1, micro_batches)
    steps = [play(orders, blocked(stages, [1.0], duplex=duplex)).makespan_s for duplex in (True, False)]
    assert steps[1] - steps[0] >= micro_batches


@pytest.mark.tour("plan/schedules/")
@pytest.mark.parametrize(("places", "micro_batches"), SIZES)
def test_1f1b_takes_p_minus_1_plus_m_times_f_plus_b(places: int, micro_batches: int) -> None:
    result = played("1F1B", places, micro_batches, work=(2, 3, 1))
    assert result.makespan_s == (places - 1 + micro_batches) * (2 + 4)
    assert result.peak_bytes == tuple(min(micro_batches, places - place) for place in range(places))


@pytest.mark.parametrize(("places", "micro_batches"), SIZES)
def test_gpipe_takes_as_long_but_holds_everything(places: int, micro_batches: int) -> None:
    result = played("GPipe", places, micro_batches, work=(2, 3, 1))
    assert result.makespan_s == (places - 1 + micro_batches) * (2 + 4)
    assert result.peak_bytes == (micro_batches,) * places


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_interleaving_divides_the_bubble_by_the_stages_a_place(chunks: int) -> None:
    places, micro_batches = 4, 16
    result = played("Interleaved1F1B", places, micro_batches, chunks=chunks)
    assert result.makespan_s - 3 * micro_batches == (places - 1) * 3 / chunks
    # p (1 + (p-1)/(p v)) micro-batches of a whole place (Narayanan et al., SC 2021)
    if chunks > 1:
        assert result.peak_bytes[0] / chunks == places * (1 + (places - 1) / (places * chunks))


@pytest.mark.parametrize("places", [2, 4, 8])
def test_zb_h1_leaves_a_third_of_the_bubble_in_the_memory_of_1f1b(places: int) -> None:
    micro_batches = 3 * places
    result = played("ZBH1", places, micro_batches)
    assert result.makespan_s - 3 * micro_batches == places - 1
    assert max(result.peak_bytes) == places


@pytest.mark.parametrize("places", [2, 4, 8])
def test_zb_h2_never_waits_between_its_first_and_its_last_action(places: int) -> None:
    micro_batches = 3 * places
    result = played("ZBH2", places, micro_batches)
    for starts, ends in zip(result.starts, result.ends, strict=True):
        assert ends[-1] - starts[0] == 3 * micro_batches
    assert max(result.peak_bytes) <= 2 * places


@pytest.mark.parametrize("places", [1, 2, 4, 8])
def test_zbv_never_waits_and_holds_what_1f1b_holds(places: int) -> None:
    micro_batches = 3 * places
    result = played("ZBVZeroBubble", places, micro_batches, chunks=2, work=(2, 2, 2))
    for place, (starts, ends) in enumerate(zip(result.starts, result.ends, strict=True)):
        assert starts[0] == place
        assert ends[-1] - starts[0] <= 6 * micro_batches + (places - 1 - place)
    assert result.makespan_s == 6 * micro_batches + places - 1
    assert max(result.peak_bytes) == 2 * places  # halves of what a place of 1F1B holds


@pytest.mark.parametrize(
    ("name", "chunks", "percent"),
    [
        ("GPipe", 1, 17.95),
        ("1F1B", 1, 17.95),
        ("Interleaved1F1B", 2, 9.86),
        ("Interleaved1F1B", 4, 5.19),
        ("ZBH1", 1, 6.80),
        ("InterleavedZeroBubble", 1, 6.80),
        ("InterleavedZeroBubble", 2, 3.52),
        ("ZBVZeroBubble", 2, 3.52),
    ],
)
def test_bubbles_of_8_places_and_32_micro_batches(name: str, chunks: int, percent: float) -> None:
    assert 100 * played(name, 8, 32, chunks=chunks).bubble[0] == pytest.approx(percent, abs=0.005)


@pytest.mark.parametrize(
    ("name", "chunks", "percent"),
    [("ZBVZeroBubble", 2, 4.5), ("InterleavedZeroBubble", 1, 10.5), ("Interleaved1F1B", 4, 5.2)],
)
def test_unequal_halves_change_which_schedule_is_best(name: str, chunks: int, percent: float) -> None:
    result = played(name, 8, 32, chunks=chunks, work=(1.0, 1.3, 0.7))
    assert 100 * result.bubble[0] == pytest.approx(percent, abs=0.06)


def test_dual_pipe_v_beats_1f1b_and_holds_one_micro_batch_more_than_its_depth() -> None:
    result = played("DualPipeV", 8, 32, chunks=2)
    assert result.makespan_s < played("1F1B", 8, 32).makespan_s
    assert max(result.peak_bytes) == 2 * 8 + 1


@pytest.mark.parametrize(
    ("places", "micro_batches", "speedup"), [(4, 4, 1.27), (4, 8, 1.16), (8, 8, 1.20), (8, 16, 1.12)]
)
def test_shifted_critical_path_saves_what_merak_says(places: int, micro_batches: int, speedup: float) -> None:
    again = StageTimes(forward_s=1, input_s=1, weight_s=1, recompute_s=1)
    once = StageTimes(forward_s=1, input_s=1, weight_s=1)
    everywhere, but_the_last = [again] * places, [*[again] * (places - 1), once]
    plain = SCHEDULES["1F1B"].orders(places, 1, micro_batches)
    inside = play(plain, everywhere).makespan_s
    assert inside == (places - 1 + micro_batches) * 4

    ahead = play(recomputed_ahead(plain, frozenset(range(places - 1))), but_the_last).makespan_s
    full = play(SCHEDULES["ShiftedCriticalPath"].orders(places, 1, micro_batches), but_the_last).makespan_s
    assert inside - ahead == places + 1
    assert inside - full == places + 2
    assert inside / full == pytest.approx(speedup, abs=0.005)
