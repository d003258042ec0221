"""What the workers record is the program that they were given."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import torch

from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.program import Action
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.executor import Step
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.timeline import Timeline
from multiprocess.models import build, captured
from multiprocess.pool import Pool, World
from multiprocess.work import PipelineOf, StageOf, cluster_of, staged_worker, worker_of

SHARES = ((2, 2), (1,), (), None)


def record(world: World, graph: ModelGraph, steps: int, keep: int) -> tuple[list[str], Timeline | None]:
    case = build(graph, 5)
    recorder = Recorder(rank=world.rank, device=torch.device("cpu"), keep_steps=keep)
    worker = worker_of(world, case, SHARES, clip=1.0, bucket_bytes=2000, recorder=recorder)
    for _ in range(steps):
        worker.step(case.batch)
    actions = [str(action) for action in worker._executor._actions]
    cluster = cluster_of(world.world_size)
    communicator = Communicator(rank=world.rank, world_size=world.world_size, device=torch.device("cpu"))
    return actions, recorder.timeline(communicator, [device.id for device in cluster.devices])


def record_stages(world: World, graph: ModelGraph) -> tuple[list[str], Timeline | None]:
    case, device = build(graph, 4), torch.device("cpu")
    recorder = Recorder(rank=world.rank, device=device)
    ops = len(graph.ops)
    stages = tuple(StageOf(stop, (rank,), (1,)) for rank, stop in enumerate((ops // 3, ops // 2, ops)))
    worker = staged_worker(world, case, (PipelineOf((1, 1, 2), stages),), "ZBH1", recorder=recorder)
    worker.step(case.batch)
    actions = [str(action) for action in worker._executor._actions]
    communicator = Communicator(rank=world.rank, world_size=world.world_size, device=device)
    return actions, recorder.timeline(communicator, [device.id for device in cluster_of(world.world_size).devices])


def test_a_rank_computes_when_what_it_waited_for_has_come(pool: Pool) -> None:
    (_, timeline), *_ = results = pool.run(3, record_stages, captured("gpt"))
    assert timeline is not None
    for rank, (actions, _) in enumerate(results):
        own = {event.name: event for event in timeline.events if event.rank == rank}
        assert sorted(own) == sorted(name for name in actions if "SEND" not in name)
        waits = [name for name in own if "RECV_F" in name]
        assert len(waits) == (3 if rank else 0)
        for name in waits:
            assert own[name].lane == "comm"
            assert own[name].end_s <= own[name.replace("RECV_", "")].start_s


def test_the_timeline_holds_each_action_of_each_rank_once_a_step(pool: Pool) -> None:
    (_, timeline), *others = results = pool.run(4, record, captured("gpt"), 3, 2)
    assert timeline is not None
    assert [other for _, other in others] == [None] * 3
    assert timeline.devices == ("here/cpu:0", "here/cpu:1", "here/cpu:2", "here/cpu:3")
    assert {event.step for event in timeline.events} == {1, 2}  # the first one was forgotten
    for rank, (actions, _) in enumerate(results):
        own = [event for event in timeline.of_step(2).events if event.rank == rank]
        assert sorted(event.name for event in own) == sorted(actions)
        computed = [event for event in own if event.lane == "compute"]
        assert [event.name for event in computed] == [name for name in actions if "REDUCE" not in name]
        # One action at a time, in the order of the list.
        assert all(a.end_s <= b.start_s for a, b in pairwise(computed))
        assert all(event.seconds >= 0 for event in own)


def test_the_update_begins_when_the_last_bucket_is_there(pool: Pool) -> None:
    (_, timeline), *_ = pool.run(4, record, captured("gpt"), 1, 1)
    assert timeline is not None
    for rank in range(3):
        own = [event for event in timeline.events if event.rank == rank]
        reduced = max(event.end_s for event in own if event.kind == "REDUCE_GRAD")
        clip = next(event for event in own if event.kind == "CLIP")
        assert clip.start_s >= reduced


def test_a_collective_starts_at_one_moment_on_all_its_ranks(pool: Pool) -> None:
    (_, timeline), *_ = pool.run(4, record, captured("gpt"), 1, 1)
    assert timeline is not None
    starts: dict[str, list[float]] = {}
    for event in timeline.events:
        if event.kind == "REDUCE_GRAD":
            starts.setdefault(event.name, []).append(event.start_s)
    assert len(starts) > 2
    for moments in starts.values():
        assert len(moments) == 3
        assert max(moments) - min(moments) < 1e-6


class Clock:
    """One that whatever else the machine does cannot delay: it goes on by a microsecond where it is read, and else where it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s


def slowed(world: World, graph: ModelGraph, at: int) -> list[str | None]:
    """What each step finds to be slower, where the forward of rank 1 takes three times as long from some step on, by its own clock."""
    case, clock = build(graph, 5), Clock()
    with mock.patch("time.perf_counter", clock):
        worker = worker_of(world, case, SHARES, recorder=Recorder(rank=world.rank, device=torch.device("cpu")))
        run = worker._executor._do

        def do(action: Action, name: str, step: Step) -> None:
            longest_s = 0.6 if step.number >= at else 0.2  # of rank 0, or of rank 1
            if action.kind == "F":
                with worker.recorder.during(action):
                    clock.now_s += longest_s if world.rank == 1 else 0.1
            if action.kind == "STEP":  # for which all ranks wait
                clock.now_s = max(clock.now_s, begun_s + longest_s)
            run(action, name, step)

        worker._executor._do = do  # type: ignore[method-assign]
        found = []
        for _ in range(at + 20):
            begun_s = clock.now_s
            found.append(worker.step(case.batch).slower)
    return found


def test_a_rank_that_becomes_slow_is_named_on_all_ranks(pool: Pool) -> None:
    at = 14
    for found in pool.run(4, slowed, captured("gpt"), at):
        ((step, words),) = ((step, words) for step, words in enumerate(found) if words is not None)
        assert words.startswith(
            "rank 1 (here/cpu:1) computes 3.0 times slower than in the first steps since about step "
        )
        assert at <= step < at + 10
