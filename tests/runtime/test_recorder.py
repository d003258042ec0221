"""Moments become events, and collectives start when their last rank comes."""

from __future__ import annotations

import pytest
import torch

from heterodyne.plan.program import Action
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.comm.work import Work
from heterodyne.runtime.records.recorder import Recorder, joined
from heterodyne.timeline import Event

CPU = torch.device("cpu")


def event(rank: int, name: str, start_s: float, end_s: float, step: int = 0, kind: str = "REDUCE_GRAD") -> Event:
    return Event(rank=rank, lane="comm", kind=kind, name=name, step=step, start_s=start_s, end_s=end_s)


def test_collectives_start_when_the_last_rank_comes() -> None:
    found = joined([event(0, "r", 1, 9), event(1, "r", 5, 8), event(0, "r", 11, 12, step=1), event(0, "f", 0, 2)])
    assert [(e.start_s, e.end_s) for e in found] == [(5, 9), (5, 8), (11, 12), (0, 2)]


def test_a_wait_for_a_message_is_that_of_one_rank() -> None:
    """Two pipelines have messages of the same name."""
    found = joined([event(0, "1RECV_F0", 1, 9, kind="RECV_F"), event(3, "1RECV_F0", 5, 8, kind="RECV_F")])
    assert [e.start_s for e in found] == [1, 5]


def test_only_the_latest_steps_are_kept() -> None:
    recorder = Recorder(rank=0, device=CPU, keep_steps=2)
    for step in range(5):
        recorder.begin()
        with recorder.during(Action(0, "F", 0)):
            pass
        recorder.end(step)
    assert [e.step for e in recorder.events()] == [3, 4]


def test_nothing_is_kept_while_it_is_off() -> None:
    recorder = Recorder(rank=0, device=CPU, on=False)
    recorder.begin()
    with recorder.during(Action(0, "F", 0)):
        pass
    recorder.collective(Action(0, "REDUCE_GRAD", 0), recorder.now(), Work())
    recorder.end(0)
    assert recorder.events() == ()


def test_a_timeline_begins_with_its_first_event() -> None:
    recorder = Recorder(rank=0, device=CPU)
    recorder.begin()
    with recorder.during(Action(0, "F", 0)):
        pass
    with recorder.during(Action(0, "B", 0)):
        pass
    recorder.end(7)
    with Communicator(rank=0, world_size=1, device=CPU) as communicator:
        timeline = recorder.timeline(communicator, ["here/cpu:0"])
    assert timeline is not None
    assert timeline.origin == "measured"
    assert [(e.name, e.kind, e.step) for e in timeline.events] == [("0F0", "F", 7), ("0B0", "B", 7)]
    assert timeline.events[0].start_s == 0.0


def test_the_end_of_a_collective_is_not_after_waiting_for_it() -> None:
    pending = Work(lambda: None, timed=True)
    pending.wait()
    waited = pending.ended
    pending.note_end(waited + 1.0)  # the other thread was slow to note it
    assert pending.ended == waited


def test_what_actions_of_some_kinds_have_computed_is_that_of_the_step_before_the_latest() -> None:
    recorder = Recorder(rank=0, device=torch.device("cpu"))
    for step in range(2):
        recorder.begin()
        for kind in ("F", "B", "STEP"):
            with recorder.during(Action(0, kind, 0)):
                pass
        with recorder.during(Action(0, "F", 1), "comm"):
            pass
        recorder.end(step)
    of_passes = [e.seconds for e in recorder.events() if e.step == 0 and e.lane == "compute" and e.kind in "FB"]
    assert len(of_passes) == 2
    assert recorder.computed_s(("F", "B")) == pytest.approx(sum(of_passes), abs=1e-6)
