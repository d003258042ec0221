"""Simulated steps: what theory says of programs whose costs are known."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cost.stage import StageCosts
from heterodyne.cost.step import RankCosts, StepCosts
from heterodyne.errors import PlanError
from heterodyne.plan import Action, Program
from heterodyne.sim import simulate
from heterodyne.timeline import Timeline

SECONDS = st.integers(0, 40).map(lambda n: n / 8)  # exact in binary, so that sums are exact too


@st.composite
def costs(draw: st.DrawFn, *, buckets: st.SearchStrategy[int] = st.integers(0, 3)) -> StepCosts:  # noqa: B008
    """Random costs of 1 to 4 ranks, some idle, some without a share."""
    count = draw(buckets)
    ranks: list[RankCosts | None] = []
    for _ in range(draw(st.integers(1, 4))):
        micro_batches = draw(st.integers(0, 3))
        ready = sorted(draw(st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=count, max_size=count)))
        stage = StageCosts(
            forward_s=tuple(draw(SECONDS) for _ in range(micro_batches)),
            backward_s=tuple(draw(SECONDS) for _ in range(micro_batches)),
            kept_bytes=tuple(draw(st.integers(0, 99)) for _ in range(micro_batches)),
        )
        made = RankCosts(
            stages={0: stage},
            ready={bucket: ((0, at),) if micro_batches else () for bucket, at in enumerate(ready)},
            clip_s=draw(SECONDS),
            step_s=draw(SECONDS),
            overhead_s=draw(SECONDS),
            overlap=draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])),
            fixed_bytes=1000,
        )
        ranks.append(draw(st.sampled_from([made, made, made, None])))
    return StepCosts(ranks=tuple(ranks), reduce_s=tuple(draw(SECONDS) for _ in range(count)))


def program(made: StepCosts) -> Program:
    """What `plan.lower` makes of a plan with those micro-batches and buckets."""
    return Program(
        ranks=tuple(
            ()
            if rank is None
            else (
                *(Action(0, kind, index) for index in range(len(rank.stages[0].forward_s)) for kind in ("F", "B")),
                *(Action(0, "REDUCE_GRAD", index) for index in range(len(made.reduce_s))),
                Action(0, "CLIP"),
                Action(0, "STEP"),
            )
            for rank in made.ranks
        )
    )


def step_s(made: StepCosts) -> float:
    return simulate(program(made), made).step_s


def active(made: StepCosts) -> list[RankCosts]:
    return [rank for rank in made.ranks if rank is not None]


@pytest.mark.tour("sim/")
@given(costs())
def test_no_step_is_shorter_than_its_lower_bound(made: StepCosts) -> None:
    if active(made):
        assert step_s(made) >= made.lower_bound_s - 1e-9


@given(costs())
def test_with_free_collectives_the_slowest_rank_is_the_step(made: StepCosts) -> None:
    free = replace(made, reduce_s=(0.0,) * len(made.reduce_s))
    assert step_s(free) == pytest.approx(max([rank.compute_s for rank in active(made)], default=0.0))


@given(costs(buckets=st.integers(1, 3)))
def test_what_does_not_hide_is_added(made: StepCosts) -> None:
    """Gradients that are complete only at the end of the backward: nothing overlaps, so everything adds up."""
    late = replace(
        made,
        ranks=tuple(
            None if r is None else replace(r, ready={k: ((0, 1.0),) * bool(at) for k, at in r.ready.items()})
            for r in made.ranks
        ),
    )
    if active(made):
        expected = max(rank.compute_s for rank in active(made)) + sum(made.reduce_s)
        assert step_s(late) == pytest.approx(expected)


@given(costs(), st.floats(0, 1), st.integers(0, 3), st.sampled_from(["forward_s", "backward_s", "step_s", "clip_s"]))
def test_a_faster_device_never_makes_a_step_longer(made: StepCosts, by: float, which: int, field: str) -> None:
    rank = made.ranks[which % len(made.ranks)]
    if rank is None:
        return
    if field in ("step_s", "clip_s"):
        faster = replace(rank, **{field: getattr(rank, field) * by})
    else:
        stage = rank.stages[0]
        faster = replace(rank, stages={0: replace(stage, **{field: tuple(v * by for v in getattr(stage, field))})})
    ranks = tuple(faster if r is rank else r for r in made.ranks)
    # A collective that starts earlier may slow a rank that would have been done by then; it loses less than was gained
    # by no more than what overlapping costs, which is why this holds exactly only without such a loss.
    free = tuple(None if r is None else replace(r, overlap=0.0) for r in ranks)
    plain = tuple(None if r is None else replace(r, overlap=0.0) for r in made.ranks)
    assert step_s(replace(made, ranks=free)) <= step_s(replace(made, ranks=plain)) + 1e-9
    slowed = sum(made.reduce_s) * max(r.overlap for r in active(made))
    assert step_s(replace(made, ranks=ranks)) <= step_s(made) + slowed + 1e-9


@given(costs(buckets=st.integers(1, 3)), st.floats(0, 1))
def test_a_faster_link_never_makes_a_step_longer(made: StepCosts, by: float) -> None:
    faster = replace(made, reduce_s=tuple(seconds * by for seconds in made.reduce_s))
    assert step_s(faster) <= step_s(made) + 1e-9


@given(costs())
def test_the_period_is_steady_once_every_rank_waits_for_all(made: StepCosts) -> None:
    # The last bucket is complete when the backward is over, so no rank runs ahead of the others into the next step.
    late = len(made.reduce_s) - 1
    waits = tuple(
        r if r is None or not r.ready.get(late) else replace(r, ready={**r.ready, late: ((0, 1.0),)})
        for r in made.ranks
    )
    made = replace(made, ranks=waits)
    if not made.reduce_s:
        return
    lowered = program(made)
    assert simulate(lowered, made, steps=5).step_s == pytest.approx(simulate(lowered, made).step_s, abs=1e-9)


@given(costs())
def test_busy_and_waiting_make_up_the_step(made: StepCosts) -> None:
    played = simulate(program(made), made)
    for rank, busy, wait in zip(made.ranks, played.busy_s, played.wait_s, strict=True):
        assert busy + wait == pytest.approx(played.step_s)
        assert busy >= (0.0 if rank is None else rank.compute_s - 1e-9)


@given(costs())
def test_the_timeline_keeps_the_order_of_the_program(made: StepCosts) -> None:
    lowered = program(made)
    timeline = simulate(lowered, made, steps=2).timeline([f"d{i}" for i in range(len(made.ranks))])
    for rank, actions in enumerate(lowered.ranks):
        for step in range(2):
            mine = [e for e in timeline.events if e.rank == rank and e.step == step]
            assert sorted(e.name for e in mine) == sorted(map(str, actions))
            for lane in ("compute", "comm"):
                names = [str(a) for a in actions if (a.kind == "REDUCE_GRAD") == (lane == "comm")]
                by_name = {e.name: e for e in mine if e.lane == lane}
                ends = [(by_name[name].start_s, by_name[name].end_s) for name in names]
                assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(ends))
            reduces = [e.end_s for e in mine if e.kind == "REDUCE_GRAD"]
            updates = [e.start_s for e in mine if e.kind in ("CLIP", "STEP")]
            assert not reduces or not updates or max(reduces) <= min(updates) + 1e-9


@given(costs(buckets=st.integers(1, 3)))
def test_a_collective_is_at_one_time_on_all_its_ranks(made: StepCosts) -> None:
    spans = [s for s in simulate(program(made), made).spans if s.lane == "comm"]
    assert all(
        len({(s.start_s, s.end_s) for s in spans if (s.action, s.step) == key}) == 1
        for key in {(s.action, s.step) for s in spans}
    )


def rank(
    passes: int = 2, kept: tuple[int, ...] = (), ready: tuple[float, ...] = (0.5, 1.0), **changes: int | float
) -> RankCosts:
    stage = StageCosts(forward_s=(1.0,) * passes, backward_s=(2.0,) * passes, kept_bytes=kept)
    return RankCosts(
        stages={0: stage},
        ready={bucket: ((0, at),) if passes else () for bucket, at in enumerate(ready)},
        step_s=0.5,
        **changes,  # type: ignore[arg-type]
    )


def test_a_bucket_starts_inside_the_last_backward() -> None:
    made = StepCosts(ranks=(rank(), rank()), reduce_s=(0.75, 0.25))
    played = simulate(program(made), made)
    first = [s for s in played.spans if s.rank == 0 and s.step == 0]
    when = {str(s.action): (s.start_s, s.end_s) for s in first}
    assert when["0B1"] == (4.0, 6.0)
    assert when["0REDUCE_GRAD0"] == (5.0, 5.75)
    assert when["0REDUCE_GRAD1"] == (6.0, 6.25)
    assert when["0STEP"] == (6.25, 6.75)
    assert played.step_s == 6.75


def test_a_collective_slows_compute_by_the_measured_overlap() -> None:
    made = StepCosts(ranks=(rank(overlap=0.5), rank()), reduce_s=(0.5, 0.0))
    when = {(s.rank, str(s.action)): s.end_s for s in simulate(program(made), made).spans if s.step == 0}
    assert when[0, "0B1"] == 6.25  # half a second in flight costs a quarter
    assert when[1, "0B1"] == 6.0


def test_a_rank_without_a_share_waits_for_nobody_and_nobody_for_it() -> None:
    nothing = rank(0)
    made = StepCosts(ranks=(rank(), nothing), reduce_s=(0.25, 0.25))
    played = simulate(program(made), made)
    assert played.step_s == 6.75
    assert played.busy_s == (6.5, 0.5)


def test_activations_of_one_micro_batch_are_alive_at_a_time() -> None:
    made = StepCosts(ranks=(rank(kept=(10, 30), ready=(), fixed_bytes=100, workspace_bytes=5, update_bytes=20), None))
    assert simulate(program(made), made).peak_bytes == (135, 0)
    together = Program(ranks=(tuple(Action(0, k, i) for k in ("F", "B") for i in (0, 1)), ()))
    assert simulate(together, made).peak_bytes == (145, 0)
    small = replace(made, ranks=(rank(kept=(1, 1), ready=(), fixed_bytes=100, update_bytes=20), None))
    assert simulate(program(small), small).peak_bytes == (120, 0)


@pytest.mark.tour("law 3", "sim/")
def test_the_timeline_is_written_like_that_of_a_run(tmp_path: Path) -> None:
    made = StepCosts(ranks=(rank(), None), reduce_s=(0.5, 0.5))
    timeline = simulate(program(made), made).timeline(["a", "b"])
    assert timeline.origin == "simulated"
    timeline.save(tmp_path / "t.jsonl")
    assert Timeline.load(tmp_path / "t.jsonl") == timeline


def test_programs_that_cannot_be_played_are_refused() -> None:
    made = StepCosts(ranks=(rank(), rank()), reduce_s=(0.5, 0.5))
    one, two = (program(made).ranks[i] for i in (0, 1))
    crossed = (*two[:4], two[5], two[4], *two[6:])
    with pytest.raises(PlanError, match="for ever"):
        simulate(Program(ranks=(one, crossed)), made)
    with pytest.raises(PlanError, match="rank 1 has actions but no costs"):
        simulate(Program(ranks=(one, two)), replace(made, ranks=(rank(), None)))
    with pytest.raises(ValueError, match="2 steps or more"):
        simulate(Program(ranks=(one, two)), made, steps=1)
