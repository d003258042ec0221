"""Orders for unlike stages: never slower than a named schedule that fits, never more than the memory has room for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.errors import InfeasibleError
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.best import best_orders, named_orders
from heterodyne.plan.schedules.check import order_faults
from heterodyne.plan.schedules.clock import play
from heterodyne.plan.schedules.held import peak_bytes
from heterodyne.plan.schedules.schedule import stage_places
from heterodyne.plan.schedules.times import Read, StageBytes, StageTimes, chain

SECONDS = st.floats(1.0, 4.0)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, object]:
    """Stages within a factor of 4 of each other, on places with room for between one micro-batch and a whole pipeline of them."""
    places = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 2))
    on = stage_places(draw(st.sampled_from(["loop", "v"])), places, chunks)
    again = draw(st.booleans())
    times = [
        StageTimes(
            forward_s=draw(SECONDS),
            input_s=draw(SECONDS),
            weight_s=draw(SECONDS),
            recompute_s=draw(SECONDS) if again else 0.0,
        )
        for _ in on
    ]
    held = [
        StageBytes(activation=size, input_frees=size // 3, kept=size // 4 if again else None)
        for size in draw(st.lists(st.integers(8, 40), min_size=len(on), max_size=len(on)))
    ]
    free = []
    for place in range(places):
        mine = [held[stage] for stage, where in enumerate(on) if where == place]
        one = sum(b.activation - b.again for b in mine)
        free.append(int(one * draw(st.floats(1.0, 6.0))) + max(b.again for b in mine))
    reads = list(chain(len(on), draw(st.sampled_from([0.0, 0.5]))))
    if len(on) > 2 and draw(st.booleans()):
        reads.append(Read(source=0, reader=len(on) - 1, forward_s=1.0, backward_s=draw(st.sampled_from([None, 1.0]))))
    return {
        "times": times,
        "places": on,
        "micro_batches": draw(st.integers(0, 9)),
        "reads": reads,
        "held": held,
        "free_bytes": free,
    }


@settings(max_examples=40, deadline=None)
@given(problems())
def test_found_orders_keep_all_rules_and_beat_all_named_ones_that_fit(problem: dict) -> None:
    found = best_orders(**problem, actions_played=3000)
    times, on, count = problem["times"], problem["places"], problem["micro_batches"]
    rules = {"reads": problem["reads"], "held_bytes": problem["held"], "free_bytes": problem["free_bytes"]}
    assert order_faults(found.orders, on, count, **rules) == ()
    result = play(found.orders, times, reads=problem["reads"], held=problem["held"])
    assert result.makespan_s == pytest.approx(found.makespan_s)
    assert result.peak_bytes == found.peak_bytes
    assert found.makespan_s >= found.bound_s * (1 - 1e-9)
    for orders in named_orders(on, count, frozenset()).values():
        # as the schedules have it: recompute, if any, inside the backward
        if order_faults(orders, on, count, **rules) == ():
            assert found.makespan_s <= play(orders, times, reads=problem["reads"]).makespan_s * (1 + 1e-9)


def test_one_slow_place_is_kept_busy_all_the_time() -> None:
    slow = StageTimes(forward_s=4, input_s=4, weight_s=4)
    fast = StageTimes(forward_s=1, input_s=1, weight_s=1)
    found = best_orders([fast, slow, fast, fast], range(4), 12)
    assert found.makespan_s == pytest.approx(found.bound_s)
    assert found.makespan_s < play(SCHEDULES["1F1B"].orders(4, 1, 12), [fast, slow, fast, fast]).makespan_s


def test_uniform_stages_get_what_the_papers_have() -> None:
    unit = StageTimes(forward_s=1, input_s=1, weight_s=1)
    held = [StageBytes(activation=1)] * 4
    found = best_orders([unit] * 4, range(4), 12, held=held, free_bytes=[4] * 4)
    assert found.makespan_s <= 3 * 12 + 3
    assert max(found.peak_bytes) <= 4


def test_little_memory_costs_time_but_is_never_exceeded() -> None:
    times = [StageTimes(forward_s=1, input_s=1, weight_s=2), StageTimes(forward_s=2, input_s=1, weight_s=1)]
    held = [StageBytes(activation=10)] * 2
    tight = best_orders(times, (0, 1), 6, held=held, free_bytes=[10, 10])
    roomy = best_orders(times, (0, 1), 6, held=held, free_bytes=[30, 30])
    assert tight.peak_bytes == (10, 10)
    assert tight.makespan_s > roomy.makespan_s


def test_no_room_for_one_micro_batch_is_told_with_what_lacks() -> None:
    held = [StageBytes(activation=10), StageBytes(activation=12, kept=2)]
    with pytest.raises(InfeasibleError, match="place 1 lacks 4 bytes for one micro-batch") as caught:
        best_orders([StageTimes(forward_s=1, input_s=1, weight_s=1)] * 2, (0, 1), 3, held=held, free_bytes=[10, 8])
    assert caught.value.shortfalls == {"place 1": 4}


def test_the_same_question_has_the_same_answer() -> None:
    times = [StageTimes(forward_s=1 + n, input_s=2, weight_s=3 - n / 2) for n in range(4)]
    assert best_orders(times, range(4), 8) == best_orders(times, range(4), 8)


def test_halves_that_nobody_needs_apart_are_one_backward() -> None:
    found = best_orders([StageTimes(forward_s=1, input_s=1, weight_s=1)], (0,), 3)
    assert " ".join(map(str, found.orders[0])).count("B") == 3
    assert peak_bytes(found.orders, [StageBytes(activation=1)])[0] <= 3
