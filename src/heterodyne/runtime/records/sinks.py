"""Where rank 0 writes the numbers of a run: its own file and its trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from heterodyne.runtime.records.metrics import Line, MetricsFile, tracked
from heterodyne.runtime.records.run_directory import RunDirectory
from heterodyne.runtime.records.trackers.trackers import Trackers
from heterodyne.tracker_options import TrackerOptions

__all__ = ["Sinks"]


class Sinks:
    """``metrics.jsonl`` and trackers; neither delays or ends the run. See `MetricsFile` and `Trackers` for the arguments."""

    def __init__(self, file: MetricsFile, trackers: Trackers) -> None:
        self._file = file
        self._trackers = trackers

    @classmethod
    def open(
        cls,
        run: RunDirectory,
        wanted: Sequence[str | Mapping[str, Any] | TrackerOptions],
        *,
        done: int,
        config: Mapping[str, Any],
        flush_s: float,
        say: Callable[[str], None],
    ) -> Self:
        """Raises HeterodyneError if the run directory cannot be written."""
        file = MetricsFile(run.metrics, done=done, say=say)
        return cls(file, Trackers(wanted, run.path, done=done, config=config, flush_s=flush_s, say=say))

    def write(self, line: Line) -> None:
        self._file.write(line)
        numbers = tracked(line)
        if numbers:
            self._trackers.write(line.step, numbers, time_s=line.time_s)

    def close(self) -> None:
        self._file.close()
        self._trackers.close()
