"""trackio: a local dashboard, or a Hugging Face Space."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from heterodyne.runtime.records.trackers.tracker import Opening, Record

__all__ = ["REMEDY", "Trackio", "open_tracker"]

REMEDY = "see its options project and space_id, and whether the Space can be reached"


class Trackio:
    """A run of trackio, the same one again after a resume."""

    def __init__(self, opening: Opening) -> None:
        import trackio

        options = dict(opening.options)
        name = options.pop("name", None) or f"{opening.run}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        options["name"] = opening.kept_id("trackio", name)
        self._run: Any = trackio.init(config=dict(opening.config), resume="allow", **options)
        self.place = f"project {options['project']}, run {options['name']}"

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log(dict(record.values), step=record.step)

    def close(self) -> None:
        self._run.finish()


def open_tracker(opening: Opening) -> Trackio:
    return Trackio(opening)
