"""The detector blames the one at fault, and nobody while there is an innocent explanation. Time here is only a number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from heterodyne.runtime.liveness.failure_detector import (
    CallProgress,
    Failure,
    FailureDetector,
    Heartbeat,
    Kind,
    Life,
    WatchLimits,
)
from heterodyne.runtime.liveness.members import Member
from heterodyne.runtime.liveness.tree import Report, children, telling

LIMITS = WatchLimits(interval_s=1.0, silence_s=10.0, phase_silence_s=20.0, stuck_s=20.0, phase_s=100.0)
MEMBERS = [Member(rank=rank, host=f"node{rank}", pid=100 + rank, machine=f"m{rank}") for rank in range(3)]


def heartbeat(
    number: int, kind: Kind = "work", *, state: str = "0F0", age_s: float = 0.0, limit_s: float = 20.0, count: int = 1
) -> Heartbeat:
    return Heartbeat(number=number, count=count, kind=kind, state=state, age_s=age_s, limit_s=limit_s)


def detector() -> FailureDetector:
    return FailureDetector(rank=0, members=MEMBERS, limits=LIMITS, now=0.0)


def test_workers_that_beat_are_not_blamed() -> None:
    it = detector()
    for second in range(1, 200):
        it.observe(second, {rank: heartbeat(second) for rank in range(3)})
        assert it.failure() is None


def test_a_silent_worker_is_blamed_after_the_limit_and_not_before() -> None:
    it = detector()
    it.observe(1, {rank: heartbeat(1) for rank in range(3)})
    for second in range(2, 12):
        it.observe(second, {0: heartbeat(second), 1: heartbeat(second), 2: heartbeat(1, state="0F7")})
        assert it.failure() is None
    it.observe(12, {0: heartbeat(12), 1: heartbeat(12), 2: heartbeat(1, state="0F7")})
    failure = it.failure()
    assert failure is not None
    assert (failure.rank, failure.host) == (2, "node2")
    assert "rank 2 on node2 (process 102) has given no sign of life for 11 s" in failure.text


def test_what_a_silent_worker_did_last_is_not_taken_for_what_it_does() -> None:
    """It may have come out of that collective since, and compute with the lock of Python: all waiting would be a deadlock."""
    it = FailureDetector(rank=0, members=MEMBERS, limits=LIMITS, now=0.0, life=lambda _: "connected")
    waits = heartbeat(1, "wait", state="0REDUCE_GRAD1")
    it.observe(1, dict.fromkeys(range(3), waits))
    for second in range(2, 60):
        of_others = heartbeat(second, "wait", state="0REDUCE_GRAD3", age_s=second)
        it.observe(second, {0: of_others, 1: waits, 2: of_others})
        assert it.failure() is None
    it.observe(60, dict.fromkeys(range(3), heartbeat(60, "wait", age_s=25.0)))
    failure = it.failure()
    assert failure is not None
    assert "all wait for each other" in failure.text


def test_silence_is_borne_longer_in_a_phase() -> None:
    it = detector()
    for second in range(1, 20):
        it.observe(second, {0: heartbeat(second), 1: heartbeat(second), 2: heartbeat(1, "phase", limit_s=100)})
    assert it.failure() is None


def test_a_worker_that_never_beat_is_blamed() -> None:
    it = detector()
    for second in range(1, 22):
        it.observe(second, {0: heartbeat(second), 1: heartbeat(second)})
    failure = it.failure()
    assert failure is not None
    assert failure.rank == 2


def test_the_sleep_of_the_judge_is_not_the_silence_of_others() -> None:
    it = detector()
    it.observe(1, {rank: heartbeat(1) for rank in range(3)})
    it.observe(
        1000, {rank: heartbeat(1) for rank in range(3)}
    )  # all were stopped together, and nobody heartbeat again yet
    assert it.failure() is None


def test_who_left_in_peace_may_be_silent() -> None:
    it = detector()
    for second in range(1, 200):
        it.observe(second, {0: heartbeat(second), 1: heartbeat(second), 2: heartbeat(1, "left")})
        assert it.failure() is None


def test_who_works_too_long_is_blamed_only_while_somebody_waits() -> None:
    long_action = {0: heartbeat(1), 1: heartbeat(1), 2: heartbeat(1, age_s=21.0, state="0F3")}
    it = detector()
    it.observe(1, long_action)
    assert it.failure() is None
    it.observe(2, long_action | {1: heartbeat(2, "wait", age_s=19.0)})
    assert it.failure() is None, "the other has only come to wait, and may have been as long about it"
    it.observe(3, long_action | {1: heartbeat(3, "wait", age_s=21.0)})
    failure = it.failure()
    assert failure is not None
    assert failure.rank == 2
    assert "hangs in 0F3" in failure.text
    assert "rank 1 waits for it" in failure.text


def test_who_is_busy_between_the_calls_of_a_loop_is_told_of_phase() -> None:
    called = CallProgress().begun("step()").ended()
    busy = Heartbeat(number=1, count=9, kind="work", state="between steps", age_s=31.0, limit_s=20.0, calls=called)
    phase = replace(busy, kind="phase", state="uploading")
    job = replace(busy, calls=CallProgress())  # a job has no loop of the user's own
    for stuck, words in (
        (busy, "is busy outside of the calls of its trainer"),
        (phase, "in uploading"),
        (job, "hangs"),
    ):
        it = detector()
        it.observe(1, {0: stuck, 1: heartbeat(1, "wait", age_s=30.0), 2: heartbeat(1)})
        failure = it.failure()
        assert failure is not None
        assert failure.rank == 0
        assert words in failure.text
        assert ('with trainer.phase("uploading", limit_s=3600)' in failure.text) == (stuck is not job)


def test_a_slow_worker_may_take_as_long_as_it_said() -> None:
    it = detector()
    waiting = heartbeat(1, "wait", age_s=300.0)
    it.observe(1, {0: waiting, 1: waiting, 2: heartbeat(1, age_s=300.0, limit_s=400.0)})
    assert it.failure() is None


def test_a_phase_may_last_until_its_own_limit() -> None:
    it = detector()
    waiting = {rank: heartbeat(1, "wait", age_s=99.0) for rank in (0, 1)}
    it.observe(1, waiting | {2: heartbeat(1, "phase", age_s=99.0, limit_s=100.0)})
    assert it.failure() is None
    it.observe(2, waiting | {2: heartbeat(2, "phase", age_s=101.0, limit_s=100.0)})
    assert it.failure() is not None


@pytest.mark.tour("runtime/liveness/")
def test_when_all_wait_for_each_other_the_last_one_is_named_with_what_each_waits_for() -> None:
    it = detector()
    heartbeats = {
        rank: heartbeat(1, "wait", age_s=21.0, count=10 - rank, state=f"0REDUCE_GRAD{rank}") for rank in range(3)
    }
    it.observe(1, heartbeats | {0: heartbeat(1, "wait", age_s=19.0)})
    assert it.failure() is None
    it.observe(2, heartbeats | {0: heartbeat(2, "wait", age_s=21.0, count=10, state="0REDUCE_GRAD0")})
    failure = it.failure()
    assert failure is not None
    assert failure.rank == 2
    assert "rank 1 in 0REDUCE_GRAD1" in failure.text


def test_who_left_while_the_others_wait_is_named() -> None:
    it = detector()
    waiting = heartbeat(1, "wait", age_s=21.0)
    it.observe(1, {0: waiting, 1: heartbeat(1, "left"), 2: waiting})
    failure = it.failure()
    assert failure is not None
    assert failure.rank == 1


def test_what_goes_through_the_store_comes_back() -> None:
    failure = Failure(rank=3, host="node3", text="rank 3 died", interrupted=True)
    assert Failure.load(failure.dump().encode()) == failure
    raised = replace(heartbeat(5), calls=CallProgress().begun("step()").ended(ValueError("no")))
    report = Report(own=heartbeat(4), others={7: raised}, heard=3)
    assert Report.load(report.dump()) == report
    assert Member.load(MEMBERS[1].dump()) == MEMBERS[1]


def calling(number: int, calls: CallProgress, *, age_s: float = 0.0, kind: Kind = "work") -> Heartbeat:
    return Heartbeat(
        number=number, count=1, kind=kind, state="x", age_s=0.0, limit_s=1e3, calls=calls, call_age_s=age_s
    )


def test_ranks_in_different_calls_are_named_with_them() -> None:
    stepped = CallProgress().begun("step()").ended()
    it = detector()
    it.observe(
        1, {0: calling(1, stepped.begun("state_dict()")), **{r: calling(1, stepped.begun("step()")) for r in (1, 2)}}
    )
    failure = it.failure()
    assert failure is not None
    assert "rank 0 is in state_dict(); ranks 1, 2 are in step()" in failure.text
    assert Heartbeat.of(calling(1, stepped.begun("close()")).fields()).calls == CallProgress(
        2, "close()", "step()", inside=True
    )


def test_calls_that_differ_are_named_also_where_their_collectives_matched_and_they_ended() -> None:
    stepped = CallProgress().begun("step()").ended()
    it = detector()
    alone = stepped.begun("state_dict()").ended().begun("step()").ended()
    it.observe(1, {0: calling(1, alone), **{r: calling(1, stepped.begun("step()").ended()) for r in (1, 2)}})
    failure = it.failure()
    assert failure is not None
    assert "rank 0 is in state_dict(); ranks 1, 2 are in step()" in failure.text


def test_a_rank_that_is_a_call_ahead_is_in_order_if_it_has_made_the_same_ones() -> None:
    first = CallProgress().begun("step()")
    it = detector()
    it.observe(
        1, {0: calling(1, first), 1: calling(1, first.ended().begun("evaluate()")), 2: calling(1, first.ended())}
    )
    assert it.failure() is None
    it.observe(
        2,
        {
            0: calling(2, CallProgress().begun("evaluate()")),
            1: calling(2, first.ended().begun("step()")),
            2: calling(2, first),
        },
    )
    assert it.failure() is not None


def test_who_has_left_without_a_call_that_others_are_in_is_blamed() -> None:
    done = CallProgress().begun("step()").ended()
    it = detector()
    it.observe(
        1,
        {0: calling(1, done.begun("close()")), 1: calling(1, done.begun("close()")), 2: calling(1, done, kind="left")},
    )
    failure = it.failure()
    assert failure is not None
    assert failure.rank == 2
    assert "rank 2 has left, and rank 0 waits in close()" in failure.text


def test_a_call_that_others_may_still_come_to_is_told_after_a_while() -> None:
    done = CallProgress().begun("step()").ended()
    it = detector()
    heartbeats = {1: calling(1, done), 2: calling(1, done, kind="phase")}
    it.observe(1, {0: calling(1, done.begun("state_dict()"), age_s=LIMITS.call_s - 1), **heartbeats})
    assert not it.waits_alone()
    it.observe(2, {0: calling(2, done.begun("state_dict()"), age_s=LIMITS.call_s + 1), **heartbeats})
    assert "rank 0 waits in state_dict() for 16 s: rank 1 has not come to it" in it.waits_alone()
    assert it.failure() is None


def called(calls: CallProgress, age_s: float = 0.0, kind: Kind = "wait", number: int = 1) -> Heartbeat:
    return replace(heartbeat(number, kind, state="x", limit_s=1e3), calls=calls, call_age_s=age_s)


def test_an_error_of_one_rank_that_its_script_caught_is_named_and_one_of_all_ranks_is_not() -> None:
    inside = CallProgress().begun("step()")
    raised = inside.ended(ValueError("no such word\nand more"))
    on = raised.begun("close()")
    for others, age_s, found in (
        (inside, LIMITS.raised_s - 0.5, False),  # they may come to the same error
        (inside, LIMITS.raised_s + 2.0, True),
        (inside.ended(), 0.0, True),  # they have not had it
        (raised, 5.0, False),
        (on, 5.0, False),
    ):
        it = detector()
        it.observe(1, {0: called(others, age_s), 1: called(on, 10.0), 2: called(others, age_s)})
        failure = it.failure()
        assert (failure is not None) == found, others
        if failure is not None:
            assert failure.rank == 1
            assert "step() raised ValueError: no such word; its script caught that" in failure.text


def silence_borne(life: Life, late_s: float = 0.0) -> tuple[int, Failure]:
    it = FailureDetector(rank=0, members=MEMBERS, limits=LIMITS, now=0.0, life=lambda _: life)
    of_others = {rank: replace(heartbeat(1), late_s=late_s) for rank in (1, 2)}
    for second in range(1, 1000):
        it.observe(second, {0: heartbeat(second), 1: replace(of_others[1], number=second), 2: of_others[2]})
        if (failure := it.failure()) is not None:
            return second, failure
    raise AssertionError


def test_a_starved_worker_is_borne_longer_than_a_dead_one_and_what_is_wrong_is_named() -> None:
    dead, _ = silence_borne("unknown")
    late, _ = silence_borne("unknown", late_s=2.0)
    starved, why_starved = silence_borne("alive")
    stopped, why_stopped = silence_borne("stopped")
    assert dead == stopped < late < starved
    assert "it is stopped (SIGSTOP" in why_stopped.text
    assert "next to no time" in why_starved.text


def test_who_is_silent_does_not_hang() -> None:
    it = detector()
    for second in range(1, 9):
        it.observe(
            second,
            {0: heartbeat(second, "wait", age_s=30.0 + second), 1: heartbeat(second), 2: heartbeat(1, age_s=30.0)},
        )
        assert second < 6 or it.failure() is None


def at_root(of_all: Sequence[Heartbeat]) -> tuple[dict[int, Heartbeat], dict[int, Heartbeat], int]:
    """What rank 0 reads, what it is told of the others, and of how many, once every worker has handed on what it heard."""
    reports: dict[int, Report] = {}
    for rank in reversed(range(len(of_all))):
        below = {child: reports[child] for child in children(rank, len(of_all))}
        others = {r: b for report in below.values() for r, b in report.others.items()}
        seen = others | {child: report.own for child, report in below.items()}
        heard = 1 + sum(report.heard for report in below.values())
        reports[rank] = Report(own=of_all[rank], others=telling(seen), heard=heard)
    direct = {rank: reports[rank].own for rank in (0, *children(0, len(of_all)))}
    below = [reports[rank] for rank in children(0, len(of_all))]
    return direct, {r: b for report in below for r, b in report.others.items()}, reports[0].heard


def test_the_root_of_many_workers_judges_as_one_that_hears_them_all() -> None:
    draw, size = random.Random(0), 300
    members = [Member(rank=rank, host="h", pid=rank + 1, machine=f"m{rank}") for rank in range(size)]
    step, evaluation = CallProgress().begun("step()"), CallProgress().begun("evaluate()")

    def waits(age_s: float, calls: CallProgress = step) -> Heartbeat:
        return replace(heartbeat(1, "wait", age_s=age_s, count=9), calls=calls)

    odd = {
        "hangs": heartbeat(1, age_s=30.0, state="0F3"),
        "works": heartbeat(1, age_s=3.0),
        "waits as all do": waits(21.0),
        "is elsewhere": waits(1.0, evaluation),
        "raised": replace(
            heartbeat(1), calls=replace(step, inside=False, raised=1, error="step() raised"), call_age_s=9.0
        ),
        "left": replace(heartbeat(1, "left"), calls=CallProgress()),
    }
    for what, its in odd.items():
        victim = draw.randrange(size)
        of_all = [its if rank == victim else replace(waits(21.0), call_age_s=9.0) for rank in range(size)]
        flat = FailureDetector(rank=0, members=members, limits=LIMITS, now=0.0)
        flat.observe(1, dict(enumerate(of_all)))
        tree = FailureDetector(rank=0, members=members, limits=LIMITS, now=0.0, watched=[0, *children(0, size)])
        tree.observe(1, *at_root(of_all))
        ours, expected = tree.failure(), flat.failure()
        assert (ours is None) == (expected is None) == (what == "works"), what
        assert what == "waits as all do" or (ours and ours.rank) == (expected and expected.rank), what
