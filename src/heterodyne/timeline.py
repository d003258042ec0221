"""What happened, or what should happen: the one shape that the runtime and the simulator both write.

A Timeline is a set of events. An event is one action of one rank on one lane (``compute`` or ``comm``), with start and
end in seconds since the timeline began. Files are JSON lines: a header, then one event a line, so that a run that was
cut short is still readable up to its last whole line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from heterodyne.arguments import checked_arguments
from heterodyne.errors import HeterodyneError
from heterodyne.json_files import EXACT, Count, checked, parse_json
from heterodyne.text_files import read_text, replacing

__all__ = ["Event", "Lane", "Timeline"]

Lane = Literal["compute", "comm"]
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One action of one rank. ``kind`` is an action kind ("F"), ``name`` the whole action ("0F3")."""

    __pydantic_config__ = EXACT

    rank: Count
    lane: Lane
    kind: str
    name: str
    step: Count
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Header:
    """The first line of a file."""

    __pydantic_config__ = EXACT

    version: Literal[1]
    origin: Literal["measured", "simulated"]
    devices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Events in order of (start, rank, lane, name), and whose word they are.

    Args:
        origin: ``measured`` (written by the runtime) or ``simulated``.
        devices: the device id of each rank, in order of rank.
        events: what each rank did.
    """

    origin: Literal["measured", "simulated"]
    devices: tuple[str, ...]
    events: tuple[Event, ...]

    @classmethod
    def of(cls, origin: Literal["measured", "simulated"], devices: Iterable[str], events: Iterable[Event]) -> Timeline:
        """A timeline of events in any order."""
        ordered = sorted(events, key=lambda e: (e.start_s, e.rank, e.lane, e.name))
        return cls(origin=origin, devices=tuple(devices), events=tuple(ordered))

    @property
    def span_s(self) -> float:
        """Seconds from the first start to the last end; 0 without events."""
        if not self.events:
            return 0.0
        return max(e.end_s for e in self.events) - min(e.start_s for e in self.events)

    def busy_s(self, rank: int, lane: Lane = "compute") -> float:
        """Seconds that a lane of a rank is occupied; overlapping events are counted once."""
        total, reached = 0.0, float("-inf")
        for event in self.events:
            if event.rank == rank and event.lane == lane and event.end_s > reached:
                total += event.end_s - max(event.start_s, reached)
                reached = event.end_s
        return total

    def of_step(self, step: int) -> Timeline:
        """The events of one step, with time counted from the first of them."""
        chosen = [e for e in self.events if e.step == step]
        if not chosen:
            return replace(self, events=())
        origin_s = min(e.start_s for e in chosen)
        return replace(
            self, events=tuple(replace(e, start_s=e.start_s - origin_s, end_s=e.end_s - origin_s) for e in chosen)
        )

    def save(self, path: Path) -> None:
        """Write JSON lines: a header, then an event a line."""
        header = {"version": FORMAT_VERSION, "origin": self.origin, "devices": list(self.devices)}
        with replacing(path) as place, place.open("w", encoding="utf-8") as file:
            file.write(json.dumps(header) + "\n")
            file.writelines(json.dumps(asdict(event)) + "\n" for event in self.events)

    @classmethod
    @checked_arguments
    def load(cls, path: Path | str) -> Timeline:
        """Read what `save` wrote; a last line that was cut short is left out. Raises HeterodyneError."""
        try:
            lines = read_text(path, most_bytes=2**30).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise HeterodyneError(f"{path}: the timeline cannot be read ({error})") from error
        try:
            header = checked(_Header, parse_json(lines[0]))
        except (IndexError, ValueError) as error:
            raise HeterodyneError(f"{path}: not a timeline (its first line is no header)") from error
        events = []
        for number, line in enumerate(lines[1:], start=2):
            try:
                events.append(checked(Event, parse_json(line)))
                if events[-1].rank >= len(header.devices):
                    raise ValueError("its rank is none of the header's devices")
            except ValueError as error:
                if number == len(lines):
                    break
                raise HeterodyneError(f"{path}:{number}: not an event of a timeline") from error
        return cls.of(header.origin, header.devices, events)

    def to_perfetto(self) -> dict[str, object]:
        """The trace-event JSON that Perfetto and chrome://tracing open; a process a rank, a thread a lane."""
        lanes = {"compute": 1, "comm": 2}
        trace: list[dict[str, object]] = []
        for rank, device in enumerate(self.devices):
            trace.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}: {device}"}})
            trace.extend(
                {"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": lane}}
                for lane, tid in lanes.items()
            )
        trace.extend(
            {
                "ph": "X",
                "pid": event.rank,
                "tid": lanes[event.lane],
                "name": event.name,
                "cat": event.kind,
                "ts": event.start_s * 1e6,
                "dur": event.seconds * 1e6,
                "args": {"step": event.step},
            }
            for event in self.events
        )
        return {"traceEvents": trace, "displayTimeUnit": "ms", "otherData": {"origin": self.origin}}
