"""What each worker did and when, as one measured Timeline.

A rank notes moments: on the host the time, on a device an event in its stream, so that nothing waits while it is measured;
they become seconds when they are asked for. `timeline` gathers the latest steps of all ranks. A collective starts when the
last of its ranks comes to it, as in the simulator. Clocks are those of the hosts; where one differs from rank 0's by more
than the exchange of a message can explain, the difference is taken out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch

from heterodyne.plan.program import COLLECTIVES, Action
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.comm.work import Work
from heterodyne.timeline import Event, Lane, Timeline

__all__ = ["Recorder", "clock_offsets_s", "joined"]

Moment: TypeAlias = float | torch.Event
EXCHANGES = 8


@dataclass(frozen=True, slots=True)
class _Mark:
    lane: Lane
    action: Action
    start: Moment
    end: Moment | Work | None


class _Step(NamedTuple):
    """The marks of a step, and its first event on the device."""

    number: int
    marks: list[_Mark]
    origin: torch.Event | None


class _During:
    """Marks the block as an action. Not a generator, which would cost more than what some actions do."""

    __slots__ = ("_action", "_lane", "_recorder", "_start")

    def __init__(self, recorder: Recorder, action: Action, lane: Lane) -> None:
        self._recorder, self._action, self._lane = recorder, action, lane

    def __enter__(self) -> None:
        self._start = self._recorder.now()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._recorder.ended(self._action, self._lane, self._start)


_NOTHING = nullcontext()


class Recorder:
    """Keeps the events of the latest steps of one rank; costs nothing while ``on`` is False.

    Args:
        rank, device: of this worker.
        on: whether steps are recorded; may be changed between steps.
        keep_steps: older steps are forgotten.

    No step waits for an accelerator; `events` does.
    """

    def __init__(self, *, rank: int, device: torch.device, on: bool = True, keep_steps: int = 8) -> None:
        self.on = on
        self._rank = rank
        self._device = device
        self._steps: deque[_Step] = deque(maxlen=keep_steps)
        self._marks: list[_Mark] = []
        self._origin: torch.Event | None = None
        # Clocks of processes on one host agree, and none of them jumps: the wall clock once, then the monotonic one.
        self._wall_s = time.time() - time.perf_counter()

    def begin(self) -> None:
        """Start a step."""
        self._marks = []
        if self.on and self._device.type != "cpu":
            self._origin = self._event_now()

    def now(self) -> Moment:
        """This moment in the order of the device's work."""
        if not self.on or self._device.type == "cpu":
            return time.perf_counter()
        return self._event_now()

    def _event_now(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def during(self, action: Action, lane: Lane = "compute") -> AbstractContextManager[None]:
        """Record what happens inside as that action: work on the lane ``compute``, or waiting for a message on ``comm``."""
        return _During(self, action, lane) if self.on else _NOTHING

    def ended(self, action: Action, lane: Lane, start: Moment) -> None:
        """That action, which began at ``start``, is over."""
        self._marks.append(_Mark(lane, action, start, self.now()))

    def collective(self, action: Action, started: Moment, pending: Work) -> None:
        """A collective that was started, on the lane ``comm``."""
        if self.on:
            self._marks.append(_Mark("comm", action, started, pending))

    def end(self, step: int) -> None:
        """End a step, whose collectives are over."""
        if not self.on:
            return
        marks = [replace(m, end=m.end.ended) if isinstance(m.end, Work) else m for m in self._marks]
        self._steps.append(_Step(step, marks, self._origin))

    def computed_s(self, kinds: Container[str]) -> float:
        """Return the seconds that actions of these kinds have computed in the step before the latest, which a device has ended by now: the
        host hardly ever waits for it."""
        if len(self._steps) < 2:
            return 0.0
        marks = [m for m in self._steps[-2].marks if m.lane == "compute" and m.action.kind in kinds]
        if marks and isinstance(end := marks[-1].end, torch.Event) and not end.query():
            end.synchronize()
        return sum(max(0.0, _between_s(m.start, m.end)) for m in marks)

    def events(self) -> tuple[Event, ...]:
        """Return the events of the latest steps, in seconds since the epoch of this host's clock. The host waits for its device."""
        last = None
        if any(step.origin is not None for step in self._steps):
            last = self._event_now()
            torch.accelerator.synchronize(self._device)
        now_s = time.perf_counter()
        found = []
        for step in self._steps:
            begun_s = now_s if step.origin is None else now_s - _between_s(step.origin, last)
            found += [self._event(mark, step, begun_s) for mark in step.marks]
        return tuple(found)

    def timeline(self, communicator: Communicator, devices: Sequence[str]) -> Timeline | None:
        """The latest steps of all ranks, on rank 0; None on the others. Collective. ``devices``: the device id of each rank."""
        offsets = clock_offsets_s(communicator)
        gathered = communicator.all_gather_object(self.events())
        if communicator.rank != 0:
            return None
        events = [
            replace(event, start_s=event.start_s - offset, end_s=event.end_s - offset)
            for offset, own in zip(offsets, gathered, strict=True)
            for event in own
        ]
        origin = min((event.start_s for event in events), default=0.0)
        shifted = (replace(e, start_s=e.start_s - origin, end_s=e.end_s - origin) for e in joined(events))
        return Timeline.of("measured", devices, shifted)

    def _event(self, mark: _Mark, of: _Step, begun_s: float) -> Event:
        """``begun_s``: when the first event of the step came, by the host's clock."""

        def seconds(moment: Moment) -> float:
            if isinstance(moment, torch.Event):
                moment = begun_s + _between_s(of.origin, moment)
            return self._wall_s + moment

        start = seconds(mark.start)
        assert not isinstance(mark.end, Work)
        return Event(
            rank=self._rank,
            lane=mark.lane,
            kind=mark.action.kind,
            name=str(mark.action),
            step=of.number,
            start_s=start,
            end_s=start if mark.end is None else max(start, seconds(mark.end)),
        )


def _between_s(start: Moment | None, end: Moment | Work | None) -> float:
    """Return the seconds between two moments of one clock."""
    if isinstance(start, torch.Event):
        assert isinstance(end, torch.Event)
        return start.elapsed_time(end) / 1e3
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start


def joined(events: Iterable[Event]) -> tuple[Event, ...]:
    """The same events, with collectives starting when the last of their ranks comes to them."""
    events = tuple(events)
    last: dict[tuple[int, str], float] = {}
    for event in events:
        if event.kind in COLLECTIVES:
            key = (event.step, event.name)
            last[key] = max(last.get(key, event.start_s), event.start_s)
    return tuple(
        replace(event, start_s=min(event.end_s, last[event.step, event.name])) if event.kind in COLLECTIVES else event
        for event in events
    )


def clock_offsets_s(communicator: Communicator) -> tuple[float, ...]:
    """For each rank its clock minus that of rank 0, as rank 0 sees it (zeros elsewhere). Collective.

    Of several exchanges the quickest counts: the other clock is read halfway (Cristian, "Probabilistic clock synchronization",
    1989). A difference within half the exchange is taken for none, as between processes of one host.
    """
    offsets = [0.0] * communicator.world_size
    for other in range(1, communicator.world_size):
        best_s = float("inf")
        for _ in range(EXCHANGES):
            clock = torch.zeros(1, dtype=torch.float64)
            if communicator.rank == 0:
                sent_s = time.time()
                communicator.send(clock, other)
                communicator.receive(clock, other)
                back_s = time.time()
                if back_s - sent_s < best_s:
                    best_s = back_s - sent_s
                    difference = clock.item() - (sent_s + back_s) / 2
                    offsets[other] = difference if abs(difference) > best_s / 2 else 0.0
            elif communicator.rank == other:
                communicator.receive(clock, 0)
                communicator.send(clock.fill_(time.time()), 0)
    return tuple(offsets)
