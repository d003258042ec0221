"""What the colours of a timeline mean: its kinds of actions, or its stages and the kinds that are of no stage."""

from __future__ import annotations

from collections.abc import Sequence

from heterodyne.report.palette import SERIES, STAGE_COLOURS, event_key, has_stages, kind_key, stage_of
from heterodyne.report.step_times import in_order
from heterodyne.report.words import kind_name
from heterodyne.timeline import Event

__all__ = ["legend"]

_OF_BOTH_DIRECTIONS = {"SEND": "send", "RECV": "wait for a message"}


def legend(events: Sequence[Event]) -> tuple[tuple[str, str], ...]:
    """``(key in the palette, words)``, each key once; stages whose hues are the same stand together."""
    by_stage = has_stages(events)
    stages: dict[int, set[int]] = {}
    kinds = set()
    for event in events:
        if event_key(event, by_stage=by_stage) in STAGE_COLOURS:
            stages.setdefault(stage_of(event.name) % SERIES, set()).add(stage_of(event.name))
        else:
            kinds.add(event.kind)
    named: dict[str, str] = {}
    for kind in in_order(kinds):
        key = kind_key(kind)
        named.setdefault(key, _OF_BOTH_DIRECTIONS.get(key, kind_name(kind)))
    entries = [(f"B{hue}", f"stage {', '.join(map(str, sorted(of)))}") for hue, of in sorted(stages.items())]
    return (*entries, *named.items())
