"""Pipelines played: bubbles as theory has them, memory in flight, messages, links that are shared, ranks that would wait for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cost.routes import Route
from heterodyne.cost.stage import StageCosts
from heterodyne.cost.step import RankCosts, StepCosts
from heterodyne.errors import PlanError
from heterodyne.plan import Action, Program
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.schedule import stage_places
from heterodyne.sim import Simulation, simulate
from pure.sim.pipelines import links, stage_costs, uniform, with_messages

SECONDS = st.integers(1, 32).map(lambda n: n / 8)  # exact in binary, so that sums are exact too


def listed(order: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, order.split()))


@given(st.sampled_from(["GPipe", "1F1B"]), st.integers(1, 6), st.integers(1, 12), SECONDS, SECONDS)
@settings(deadline=None)
def test_a_uniform_pipeline_takes_its_micro_batches_and_fills_and_drains(
    schedule: str, places: int, micro_batches: int, f: float, b: float
) -> None:
    program, costs = uniform(schedule, places, 1, micro_batches, f=f, i=b / 2, w=b / 2)
    played = simulate(program, costs)
    assert played.step_s == pytest.approx((places - 1 + micro_batches) * (f + b))
    bubble = (places - 1) / (micro_batches + places - 1)
    assert played.bubble == pytest.approx((bubble,) * places)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 4), SECONDS)
@settings(deadline=None)
def test_interleaving_divides_the_bubble_by_the_stages_of_a_place(p: int, chunks: int, rounds: int, f: float) -> None:
    program, costs = uniform("Interleaved1F1B" if chunks > 1 else "1F1B", p, chunks, p * rounds, f=f, i=f, w=f)
    played = simulate(program, costs)
    assert played.wait_s == pytest.approx(((p - 1) * 3 * f / chunks,) * p)


@pytest.mark.parametrize(("schedule", "chunks"), [("ZBH2", 1), ("ZBVZeroBubble", 2)])
@pytest.mark.parametrize(("places", "micro_batches"), [(2, 8), (4, 12), (8, 32)])
def test_zero_bubble_schedules_have_none_where_the_three_passes_take_alike(
    schedule: str, chunks: int, places: int, micro_batches: int
) -> None:
    program, costs = uniform(schedule, places, chunks, micro_batches)
    played = simulate(program, costs)
    assert played.step_s == pytest.approx(3 * micro_batches)
    assert played.bubble == pytest.approx((0.0,) * places)


def test_the_first_zero_bubble_schedule_has_a_third_of_the_bubble() -> None:
    program, costs = uniform("ZBH1", 4, 1, 16)
    assert simulate(program, costs).wait_s == pytest.approx((3.0,) * 4)


@pytest.mark.parametrize(
    ("places", "micro_batches", "speedup"), [(4, 4, 1.27), (4, 8, 1.16), (8, 8, 1.20), (8, 16, 1.12)]
)
def test_recomputing_ahead_of_the_wait_saves_what_merak_says(places: int, micro_batches: int, speedup: float) -> None:
    """F = R = 1, B = 2 (Merak, section 5): (p + 2) R less than 1F1B that recomputes inside every backward of every stage."""
    program, costs = uniform("1F1B", places, 1, micro_batches)
    everywhere = with_recompute(costs, range(places))
    inside = simulate(program, everywhere).step_s
    assert inside == pytest.approx((places - 1 + micro_batches) * 4)
    ahead, _ = uniform("ShiftedCriticalPath", places, 1, micro_batches)
    step_s = simulate(ahead, with_recompute(costs, range(places - 1))).step_s
    assert inside - step_s == pytest.approx(places + 2)
    assert inside / step_s == pytest.approx(speedup, abs=0.005)


@given(st.integers(1, 4), st.integers(0, 4), SECONDS, SECONDS, SECONDS)
def test_where_backwards_come_in_halves_all_forwards_prepare_that(
    whole: int, apart: int, h: float, i: float, w: float
) -> None:
    """A stage that runs some backwards in halves defers in all of them, so a whole one is both halves on end."""
    count = whole + apart
    costs = replace(stage_costs(count, 1, 1, 1), halved_forward_s=(h,) * count)
    costs = replace(costs, input_s=(i,) * count, weight_s=(w,) * count)
    order = listed(" ".join(f"0F{n} 0B{n}" if n < whole else f"0F{n} 0I{n} 0W{n}" for n in range(count)))
    played = simulate(Program(ranks=(order,)), StepCosts(ranks=(RankCosts(stages={0: costs}),)))
    assert played.step_s == pytest.approx(count * (h + i + w) if apart else count * 3)


@given(SECONDS, SECONDS, SECONDS, st.integers(2, 8))
def test_messages_take_from_the_computing_of_their_ends_what_is_not_done_while_they_wait(
    f: float, sent_s: float, read_s: float, micro_batches: int
) -> None:
    """Values alone, over a link that is never what all wait for. Who makes them is busy with each message too; who reads them, and waits
    for the first, has the rest to do before it goes on, unless it waits for that long anyway."""
    routes = (replace(links((0, 1), micro_batches)[0], source_s=(sent_s,) * micro_batches),)
    routes = (replace(routes[0], destination_s=(read_s,) * micro_batches),)
    stage = stage_costs(micro_batches, f, 1, 1)
    first = " ".join(f"0F{n} 0SEND_F{n}" for n in range(micro_batches))
    last = " ".join(f"1RECV_F{n} 1F{n}" for n in range(micro_batches))
    ranks = tuple(RankCosts(stages={number: stage}) for number in (0, 1))
    played = simulate(Program(ranks=(listed(first), listed(last))), StepCosts(ranks=ranks, routes=routes))
    assert played.busy_s == pytest.approx((micro_batches * (f + sent_s), micro_batches * (f + read_s)))
    reached = 0.0
    for number in range(micro_batches):
        reached = max(reached + read_s, (number + 1) * f + number * sent_s) + f
    spans = {(s.rank, str(s.action)): s.end_s for s in played.spans if s.step == 0}
    assert spans[1, f"1F{micro_batches - 1}"] == pytest.approx(reached)


@given(st.tuples(SECONDS, SECONDS), st.tuples(SECONDS, SECONDS), SECONDS)
def test_ranks_that_meet_at_both_ends_of_a_step_wait_twice_for_the_slowest(
    besides: tuple[float, float], passes: tuple[float, float], meeting_s: float
) -> None:
    """Who is slow before its passes and quick in them gains nothing by that, nor the other way round."""
    ranks = tuple(
        RankCosts(stages={0: stage_costs(1, s, s, 0)}, overhead_s=o) for o, s in zip(besides, passes, strict=True)
    )
    program = Program(ranks=(listed("0F0 0B0"),) * 2)
    costs = StepCosts(ranks=ranks, ranks_meet=True, ranks_begin_together=True, meeting_s=meeting_s)
    assert simulate(program, costs).step_s == pytest.approx(max(besides) + 2 * max(passes) + 2 * meeting_s)
    apart = simulate(program, replace(costs, ranks_begin_together=False)).step_s
    assert apart == pytest.approx(max(o + 2 * s for o, s in zip(besides, passes, strict=True)) + meeting_s)


@given(st.tuples(SECONDS, SECONDS), st.tuples(SECONDS, SECONDS), SECONDS)
def test_no_rank_updates_before_it_knows_the_loss_of_all(
    passes: tuple[float, float], updates: tuple[float, float], meeting_s: float
) -> None:
    """Who is quick in its passes cannot hide a long update beside those of another."""
    ranks = tuple(
        RankCosts(stages={0: stage_costs(1, s, s, 0)}, step_s=u) for s, u in zip(passes, updates, strict=True)
    )
    program = Program(ranks=(listed("0F0 0B0 0STEP"),) * 2)
    costs = StepCosts(ranks=ranks, ranks_meet=True, ranks_begin_together=True, meeting_s=meeting_s)
    assert simulate(program, costs).step_s == pytest.approx(2 * max(passes) + max(updates) + 2 * meeting_s)
    apart = simulate(program, replace(costs, ranks_meet=False, ranks_begin_together=False)).step_s
    assert apart == pytest.approx(max(2 * s + u for s, u in zip(passes, updates, strict=True)))


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_a_step_ends_when_the_weights_that_it_gathers_are_there(
    passes: float, update: float, scatter: float, gather: float
) -> None:
    """Nothing of the next step hides them: its first forward reads them."""
    own = RankCosts(stages={0: stage_costs(1, passes, passes, 0)}, step_s=update, ready={0: ((0, 1.0),)})
    program = Program(ranks=(listed("0F0 0B0 0SCATTER0 0STEP 0GATHER0"),) * 2)
    costs = StepCosts(ranks=(own, own), reduce_s=(scatter,), gather_s=(gather,))
    assert simulate(program, costs).step_s == pytest.approx(2 * passes + scatter + update + gather)


def with_recompute(costs: StepCosts, ranks: range) -> StepCosts:
    """Stages of those ranks keep 1 byte of a micro-batch and drop 9, which take a second to make again."""
    made = []
    for rank, own in enumerate(costs.ranks):
        assert own is not None
        stage = own.stages[rank]
        each = (1,) * len(stage.forward_s)
        dropped = replace(
            stage,
            recompute_s=(1.0,) * len(each),
            kept_bytes=each,
            recomputed_bytes=(9,) * len(each),
            redone_bytes=(4,) * len(each),
        )
        made.append(replace(own, stages={rank: dropped}) if rank in ranks else own)
    return replace(costs, ranks=tuple(made))


@given(st.integers(1, 6), st.integers(1, 12))
@settings(deadline=None)
def test_activations_in_flight(places: int, micro_batches: int) -> None:
    """1F1B holds p - r micro-batches on place r, GPipe all of them."""
    for schedule, in_flight in (
        ("1F1B", [min(micro_batches, places - r) for r in range(places)]),
        ("GPipe", [micro_batches] * places),
    ):
        program, costs = uniform(schedule, places, 1, micro_batches, kept=10)
        assert simulate(program, costs).peak_bytes == tuple(10 * n for n in in_flight)


def test_what_waits_for_its_weight_gradients_is_held_until_then() -> None:
    order = listed("0F0 0F1 0I0 0I1 0W0 0W1")
    costs = StepCosts(ranks=(RankCosts(stages={0: stage_costs(2, 1, 1, 1, kept=10, left=4)}),))
    played = simulate(Program(ranks=(order,)), costs)
    assert [size for seconds, size in played.memory(0) if seconds <= 6][:13] == [
        0,
        10,
        10,
        20,
        20,
        20,
        14,
        14,
        8,
        8,
        4,
        4,
        0,
    ]
    assert max(size for _, size in played.memory(0)) == played.peak_bytes[0] == 20


@given(st.integers(2, 4), st.integers(1, 8))
@settings(deadline=None, max_examples=30)
def test_memory_over_time_ends_where_it_began_and_reaches_the_peak(places: int, micro_batches: int) -> None:
    program, costs = uniform("ZBVZeroBubble", places, 2, max(micro_batches, 2 * places), kept=10, left=3)
    played = simulate(program, costs)
    for rank in range(places):
        sizes = [size for _, size in played.memory(rank)]
        assert sizes[-1] == 0
        assert min(sizes) >= 0
        assert max(sizes) == played.peak_bytes[rank]


def test_recompute_holds_less_until_it_runs() -> None:
    _, costs = uniform("1F1B", 1, 1, 2)
    dropped = with_recompute(costs, range(1))
    inside = Program(ranks=(listed("0F0 0F1 0B0 0B1"),))
    assert simulate(inside, dropped).peak_bytes == (2 + 4,)
    ahead = Program(ranks=(listed("0F0 0F1 0R0 0R1 0B0 0B1"),))
    assert simulate(ahead, dropped).peak_bytes == (20,)
    assert simulate(ahead, dropped).step_s == simulate(inside, dropped).step_s == 8


def test_a_message_occupies_its_link_and_then_is_under_way() -> None:
    """Two forwards of 1 s whose messages take 3 s on the wire and 5 s of latency: the second waits for the wire, not for the latency."""
    ahead = listed("0F0 0SEND_F0 0F1 0SEND_F1")
    behind = listed("1RECV_F0 1F0 1RECV_F1 1F1")
    costs = StepCosts(
        ranks=tuple(RankCosts(stages={n: stage_costs(2, 1, 0, 0)}) for n in range(2)),
        routes=links((0, 1), 2, seconds=3.0, latency_s=5.0),
    )
    when = {
        str(s.action): (s.start_s, s.end_s)
        for s in simulate(Program(ranks=(ahead, behind)), costs).spans
        if s.step == 0
    }
    assert when["0SEND_F0"] == (1, 9)
    assert when["0SEND_F1"] == (4, 12)
    assert when["1RECV_F0"] == (0, 9)
    assert when["1F0"] == (9, 10)
    assert when["1F1"] == (12, 13)


def one_way(sources: int, link: str | None, reach: float = 0.0) -> Simulation:
    """Ranks 0, 1, ... each make a value in 1, 1 + reach, ... seconds and send it to the last rank, where it takes 2 s to arrive."""
    last = sources
    ranks = [RankCosts(stages={n: StageCosts(forward_s=(1.0 + reach * n,), backward_s=(0.0,))}) for n in range(sources)]
    routes = tuple(
        Route(
            kind="F",
            source=(n, n),
            destination=(last, last),
            link=link or f"{n} -> {last}",
            bytes=(1,),
            latency_s=0.0,
            seconds=(2.0,),
        )
        for n in range(sources)
    )
    program = Program(
        ranks=(
            *((Action(n, "F", 0), Action(n, "SEND_F", 0)) for n in range(sources)),
            (Action(last, "RECV_F", 0), Action(last, "F", 0)),
        )
    )
    end = RankCosts(stages={last: StageCosts(forward_s=(1.0,), backward_s=(0.0,))})
    return simulate(program, StepCosts(ranks=(*ranks, end), routes=routes))


def ended(played: Simulation, name: str) -> float:
    return next(span.end_s for span in played.spans if str(span.action) == name and span.step == 0)


@given(st.integers(1, 5))
def test_transfers_over_one_link_follow_each_other(sources: int) -> None:
    assert ended(one_way(sources, None), f"{sources}F0") == 1 + 2 + 1
    assert ended(one_way(sources, "n0 -> n1"), f"{sources}F0") == 1 + 2 * sources + 1


def test_a_shared_link_serves_who_comes_first() -> None:
    """Rank 1 is ready first, although its message was added second."""
    played = one_way(3, "n0 -> n1", reach=-0.25)
    assert [ended(played, f"{n}SEND_F0") for n in (2, 1, 0)] == [2.5, 4.5, 6.5]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Program, StepCosts]:
    """A named schedule over unequal places, with links that cost something; some with a shared wire, some with recompute."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    schedule = SCHEDULES[name]
    places = draw(st.integers(2, 4))
    chunks = schedule.chunks or draw(st.integers(1, 2))
    micro_batches = places * draw(st.integers(2, 3))
    place_of = stage_places(schedule.placement, places, chunks)
    ranks = []
    for place in range(places):
        stages = {}
        for number in (n for n, own in enumerate(place_of) if own == place):
            f, i, w, r = (draw(SECONDS) for _ in range(4))
            stage = stage_costs(micro_batches, f, i, w, kept=draw(st.integers(0, 9)), left=0)
            stages[number] = replace(stage, recompute_s=(r,) * micro_batches) if draw(st.booleans()) else stage
        ranks.append(RankCosts(stages=stages, step_s=draw(SECONDS), clip_s=draw(SECONDS), overhead_s=draw(SECONDS)))
    program = with_messages(schedule.orders(places, chunks, micro_batches), place_of)
    update = (Action(0, "CLIP"), Action(0, "STEP"))
    return (
        Program(ranks=tuple((*actions, *update) for actions in program.ranks)),
        StepCosts(
            ranks=tuple(ranks),
            routes=links(place_of, micro_batches, draw(SECONDS), draw(SECONDS)),
            norm_s=draw(st.sampled_from([None, 0.0, 1.0])),
            ranks_meet=draw(st.booleans()),
        ),
    )


def on_one_wire(costs: StepCosts) -> StepCosts:
    return replace(costs, routes=tuple(replace(route, link="wire") for route in costs.routes))


@given(pipelines(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_no_step_is_shorter_than_its_lower_bound(made: tuple[Program, StepCosts], shared: bool) -> None:
    program, costs = made
    costs = on_one_wire(costs) if shared else costs
    assert simulate(program, costs).step_s >= costs.lower_bound_s - 1e-9


@given(pipelines(), SECONDS)
@settings(deadline=None, max_examples=60)
def test_slower_links_never_make_a_step_shorter(made: tuple[Program, StepCosts], more: float) -> None:
    program, costs = made
    costs = replace(costs, ranks_meet=True)  # so that a step is what it takes from a common start
    slower = replace(
        costs,
        routes=tuple(
            replace(r, seconds=tuple(s + more for s in r.seconds), latency_s=r.latency_s + more) for r in costs.routes
        ),
    )
    assert simulate(program, slower).step_s >= simulate(program, costs).step_s - 1e-9
    assert simulate(program, on_one_wire(costs)).step_s >= costs.lower_bound_s - 1e-9


@given(pipelines())
@settings(deadline=None, max_examples=40)
def test_a_wire_for_each_rank_plays_alike_whichever_way_it_is_played(made: tuple[Program, StepCosts]) -> None:
    """A collective of no length that slows its ranks changes nothing, but makes the engine play event by event."""
    program, costs = made
    plain = simulate(program, costs)
    ranks = tuple(None if r is None else replace(r, ready={0: ()}, overlap=1.0) for r in costs.ranks)
    reduces = Program(
        ranks=tuple((*actions[:-2], Action(0, "REDUCE_GRAD", 0), *actions[-2:]) for actions in program.ranks)
    )
    slowed = simulate(reduces, replace(costs, ranks=ranks, reduce_s=(0.0,)))
    assert slowed.busy_s == pytest.approx(plain.busy_s)
    both = [
        [(s.action, s.step, s.start_s, s.end_s) for s in sorted(p.spans) if s.lane == "compute"]
        for p in (plain, slowed)
    ]
    assert both[0] == both[1]


def test_a_bucket_of_several_stages_is_complete_when_the_last_of_them_is() -> None:
    """Rank 0 has stages 0 and 1; a bucket of both is complete half-way through the last W of stage 0, a quarter of W is 0.5 s."""
    order = "0F0 1F0 1I0 1W0 0I0 0W0 0REDUCE_GRAD0 0STEP"
    stage = stage_costs(1, 1, 1, 2)
    rank = RankCosts(stages={0: stage, 1: stage}, ready={0: ((0, 0.5), (1, 1.0))}, step_s=1.0)
    other = RankCosts(stages={}, ready={0: ()}, step_s=1.0)
    program = Program(ranks=(listed(order), (Action(0, "REDUCE_GRAD", 0), Action(0, "STEP"))))
    played = simulate(program, StepCosts(ranks=(rank, other), reduce_s=(3.0,)))
    when = {(s.rank, str(s.action)): (s.start_s, s.end_s) for s in played.spans if s.step == 0}
    assert when[0, "0W0"] == (6, 8)
    assert when[0, "0REDUCE_GRAD0"] == when[1, "0REDUCE_GRAD0"] == (7, 10)
    assert when[0, "0STEP"] == when[1, "0STEP"] == (10, 11)


def test_ranks_that_hold_different_parameters_clip_together() -> None:
    program, costs = uniform("1F1B", 2, 1, 2)
    program = Program(ranks=tuple((*actions, Action(0, "CLIP")) for actions in program.ranks))
    when = {
        s.rank: s.start_s
        for s in simulate(program, replace(costs, norm_s=0.5)).spans
        if str(s.action) == "0CLIP" and s.step == 0
    }
    assert when == {0: 9.5, 1: 9.5}
    alone = {s.rank: s.start_s for s in simulate(program, costs).spans if str(s.action) == "0CLIP" and s.step == 0}
    assert alone == {0: 9, 1: 7}


def test_ranks_that_meet_start_the_next_step_together() -> None:
    program, costs = uniform("ZBH2", 4, 1, 12)
    free, met = simulate(program, costs), simulate(program, replace(costs, ranks_meet=True))
    assert free.step_s == 36
    assert met.step_s == 36 + 3  # the last place begins three forwards late
    assert {s.start_s for s in met.spans if s.step == 1 and str(s.action) == "0F0"} == {39.0}


def test_a_program_that_waits_for_ever_is_refused_with_what_waits() -> None:
    program, costs = uniform("1F1B", 2, 1, 2)
    first, second = program.ranks
    starved = Program(ranks=(tuple(a for a in first if str(a) != "0SEND_F1"), second))
    with pytest.raises(
        PlanError, match=r"for ever: rank 0 at 0RECV_B1, .*; rank 1 at 1RECV_F1, whose message is not sent"
    ):
        simulate(starved, costs)
    update = Action(0, "CLIP")
    alone = Program(
        ranks=((*first, Action(0, "REDUCE_GRAD", 0), update), (*second, Action(0, "REDUCE_GRAD", 1), update))
    )
    with pytest.raises(PlanError, match="rank 1 has no cost of 0REDUCE_GRAD1"):
        simulate(alone, costs)


def test_a_pass_without_a_cost_is_named() -> None:
    program, costs = uniform("1F1B", 2, 1, 2)
    for wrong in ("0F2", "1F0", "0W0"):
        ranks = (RankCosts(stages={0: StageCosts(forward_s=(1.0, 1.0), backward_s=(1.0, 1.0))}), costs.ranks[1])
        with pytest.raises(PlanError, match=f"rank 0 has no cost of {wrong}"):
            simulate(
                Program(ranks=((Action.parse(wrong), *program.ranks[0]), program.ranks[1])), replace(costs, ranks=ranks)
            )
