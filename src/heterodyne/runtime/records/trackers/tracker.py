"""What a tracker is, and what it is opened with. Free of imports that take time: a tracker's process begins here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Opening", "Record", "Tracker"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Numbers by name after a step; ``time_s`` is Unix time."""

    step: int
    values: Mapping[str, float]
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What a tracker is opened with.

    Args:
        directory: of the run; it exists, with ``logs/`` in it.
        run: the name of the run.
        done: steps that were done before: what was tracked of later steps is of another past.
        config: what is trained, as JSON values.
        options: of the tracker, as in ``metrics.trackers`` of a job.
    """

    directory: Path
    run: str
    done: int
    config: Mapping[str, Any]
    options: Mapping[str, Any]

    def id_file(self, name: str) -> Path:
        """Return where the id is kept under which a tracker knows this run."""
        return self.directory / "logs" / f"tracker-{name}.id"

    def kept_id(self, name: str, new: str) -> str:
        """The one that was kept when the run began, where it goes on; else ``new``."""
        path = self.id_file(name)
        if self.done and path.is_file():
            return path.read_text(encoding="utf-8").strip()
        path.write_text(f"{new}\n", encoding="utf-8")
        return new


class Tracker(Protocol):
    """Takes records in their order. What it raises ends this tracker and nothing else."""

    @property
    def place(self) -> str:
        """Return where people find what is tracked, empty if that is clear."""

    def write(self, records: Sequence[Record]) -> None:
        """The records that have come since the last call: one, or more where they come faster than they are taken."""

    def close(self) -> None:
        """Nothing more comes: write what is still held back."""
