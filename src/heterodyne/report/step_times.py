"""Where the time of one optimizer step goes, on each rank.

The step lasts from the first start to the last end over all ranks. On one rank that time is split in two ways:

- by action kind, as the difference of prediction and measurement is given: seconds of F, B, STEP, ... on the compute lane, of
  the collectives on the comm lane, and ``wait``: the rest of the step, in which the compute lane does nothing;
- without overlap, so that the parts add up to the step: the compute kinds, then the part of the communication that is
  not hidden behind compute, then idle. Messages between stages (SEND, RECV) are no part of it: a rank does not wait for what it
  sends, and while it waits to receive it is idle, most often because the sender has not got so far.

Over several steps each number is a median of its own, so that one disturbed step does not decide; only the parts of a
single step add up exactly.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from heterodyne.timeline import Event, Timeline

__all__ = [
    "EXPOSED",
    "IDLE",
    "MESSAGES",
    "WAIT",
    "StepTimes",
    "by_rank",
    "in_order",
    "kinds_in_order",
    "median_step",
    "step_spans",
    "typical",
]

WAIT = "wait"
EXPOSED = "exposed"
IDLE = "idle"
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_ORDER = (
    "F",
    "B",
    "I",
    "W",
    "R",
    *MESSAGES,
    "REDUCE_GRAD",
    "SCATTER",
    "CLIP",
    "STEP",
    "GATHER",
    "UNSHARD",
    "OFFLOAD",
    "RELOAD",
    WAIT,
)

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one rank, medians over the steps.

    Args:
        span_s: seconds of the whole step.
        kinds: seconds of each action kind; those of one kind that overlap are counted once.
        exposed_s: seconds in which only a collective works.
        idle_s: the rest.
    """

    rank: int
    span_s: float
    kinds: dict[str, float]
    exposed_s: float
    idle_s: float

    @property
    def wait_s(self) -> float:
        return self.exposed_s + self.idle_s

    def seconds(self, kind: str) -> float:
        """Seconds of an action kind, of `WAIT`, `EXPOSED` or `IDLE`; 0 for a kind that did not happen."""
        special = {WAIT: self.wait_s, EXPOSED: self.exposed_s, IDLE: self.idle_s}
        return special[kind] if kind in special else self.kinds.get(kind, 0.0)


def by_rank(timeline: Timeline) -> tuple[StepTimes, ...]:
    """One entry a rank; the medians over all steps of the timeline. Empty without events."""
    steps: dict[int, list[Event]] = {}
    for event in timeline.events:
        steps.setdefault(event.step, []).append(event)
    each = [_one_step(events, len(timeline.devices)) for events in steps.values()]
    return tuple(_median(times) for times in zip(*each, strict=True))


def step_spans(timeline: Timeline) -> dict[int, float]:
    """Seconds of each step, by step."""
    bounds: dict[int, Interval] = {}
    for event in timeline.events:
        start, end = bounds.get(event.step, (event.start_s, event.end_s))
        bounds[event.step] = (min(start, event.start_s), max(end, event.end_s))
    return {step: end - start for step, (start, end) in sorted(bounds.items())}


def median_step(timeline: Timeline) -> int | None:
    """The step whose length is the (lower) median of all, to show one that is typical; None without events."""
    spans = step_spans(timeline)
    return sorted(spans, key=lambda step: (spans[step], step))[(len(spans) - 1) // 2] if spans else None


def typical(timeline: Timeline | None) -> Timeline | None:
    """The step of median length alone, with time counted from its start; None without events."""
    step = median_step(timeline) if timeline is not None else None
    return timeline.of_step(step) if timeline is not None and step is not None else None


def kinds_in_order(times: Iterable[StepTimes]) -> tuple[str, ...]:
    """The action kinds that occur, in the order in which a step goes through them, `WAIT` last."""
    return in_order({kind for t in times for kind in t.kinds} | {WAIT})


def in_order(kinds: Iterable[str]) -> tuple[str, ...]:
    """Action kinds in the order in which a step goes through them; unknown ones before `WAIT`."""
    return tuple(sorted(kinds, key=lambda k: (_ORDER.index(k) if k in _ORDER else len(_ORDER) - 1.5, k)))


def _one_step(events: Sequence[Event], ranks: int) -> list[StepTimes]:
    start = min(e.start_s for e in events)
    end = max(e.end_s for e in events)
    of_rank: list[list[Event]] = [[] for _ in range(ranks)]
    for event in events:
        # An event that only says "waited" is no work: it is what is left over.
        if event.rank < ranks and event.kind.lower() != WAIT:
            of_rank[event.rank].append(event)
    return [_one_rank(rank, events, end - start) for rank, events in enumerate(of_rank)]


def _one_rank(rank: int, events: Sequence[Event], span_s: float) -> StepTimes:
    kinds: dict[str, list[Interval]] = {}
    for event in events:
        kinds.setdefault(event.kind, []).append((event.start_s, event.end_s))
    compute = _length((e.start_s, e.end_s) for e in events if e.lane == "compute")
    either = _length((e.start_s, e.end_s) for e in events if e.kind not in MESSAGES)
    return StepTimes(
        rank=rank,
        span_s=span_s,
        kinds={kind: _length(intervals) for kind, intervals in kinds.items()},
        exposed_s=either - compute,
        idle_s=max(0.0, span_s - either),
    )


def _length(intervals: Iterable[Interval]) -> float:
    """Seconds that at least one of the intervals covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def _median(times: Sequence[StepTimes]) -> StepTimes:
    kinds = {kind for t in times for kind in t.kinds}
    return StepTimes(
        rank=times[0].rank,
        span_s=statistics.median(t.span_s for t in times),
        kinds={kind: statistics.median(t.kinds.get(kind, 0.0) for t in times) for kind in sorted(kinds)},
        exposed_s=statistics.median(t.exposed_s for t in times),
        idle_s=statistics.median(t.idle_s for t in times),
    )
