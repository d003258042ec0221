"""TensorBoard: event files in ``tensorboard/`` of the run directory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heterodyne.runtime.records.trackers.tracker import Opening, Record

__all__ = ["REMEDY", "TensorBoard", "open_tracker"]

REMEDY = "see whether tensorboard/ in the run directory can be written"


class TensorBoard:
    """Scalars. Needs tensorboard alone, not torch."""

    place = ""

    def __init__(self, opening: Opening) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._writer: Any = EventFileWriter(str(opening.directory / "tensorboard"))
        if opening.done:  # hides what was written of later steps, as torch's SummaryWriter does with purge_step
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(event_pb2.Event(step=opening.done + 1, session_log=start))

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in record.values.items()]
            summary = self._summary(value=values)
            self._writer.add_event(self._event(step=record.step, wall_time=record.time_s, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open_tracker(opening: Opening) -> TensorBoard:
    return TensorBoard(opening)
