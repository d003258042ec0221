"""What a run writes its numbers to: all its trackers."""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from heterodyne.arguments import checked_arguments
from heterodyne.errors import HeterodyneError
from heterodyne.processes import to_standard_error
from heterodyne.runtime.records.trackers.handle import TrackerHandle
from heterodyne.runtime.records.trackers.process import END
from heterodyne.runtime.records.whole_lines import WholeLines
from heterodyne.secret_names import without_secrets
from heterodyne.tracker_options import TrackerOptions, tracker_options

__all__ = ["Trackers"]


class Trackers:
    """Writes numbers to trackers that never delay or end the training: one that hangs, raises or has no disk costs one warning.

    For one process of a run, rank 0 as a rule::

        with hd.Trackers(["tensorboard", {"wandb": {"project": "mine", "mode": "offline"}}], "runs/mine") as trackers:
            trackers.write(step, {"loss": loss})

    Args:
        wanted: as ``metrics.trackers`` of a job: names, or a mapping from a name to its options.
        directory: of the run; made if it is not there. Logs of the trackers go to its ``logs/``.
        done: steps that were done before, where a run goes on.
        config: what is trained, for the trackers that show it; JSON values.
        flush_s: the seconds that all of them together may take to finish when they are closed.
        say: takes each line for people.

    Raises JobError for a tracker or an option that does not exist, and HeterodyneError if the directory cannot be made.
    """

    @checked_arguments
    def __init__(
        self,
        wanted: Sequence[str | Mapping[str, Any] | TrackerOptions],
        directory: Path | str,
        *,
        done: int = 0,
        config: Mapping[str, Any] | None = None,
        flush_s: float = 30.0,
        say: Callable[[str], None] = to_standard_error,
    ) -> None:
        directory = Path(directory).absolute()
        self._say = say
        self._flush_s = flush_s
        self._odd: set[str] = set()
        self._trackers: list[TrackerHandle] = []
        chosen = [each for each in tracker_options(wanted) if self._is_installed(each)]
        if not chosen:
            return
        logs = directory / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=logs, buffering=0)  # noqa: SIM115  # goes with its last reader
        except OSError as error:
            raise HeterodyneError(
                f"{logs} cannot be made ({error.strerror}); make the run directory writable"
            ) from error
        self._records = WholeLines(
            self._file.fileno(),
            complain=lambda why: say(
                f"warning: {logs} cannot be written ({why}): training goes on, and trackers lack the steps until it can; make room on "
                "that disk"
            ),
        )
        header = {
            "flush_s": flush_s,
            "opening": {
                "directory": str(directory),
                "run": directory.name,
                "done": done,
                "config": without_secrets(config or {}),
            },
            "options": {each.name: each.options for each in chosen},
        }
        if self._records.write(json.dumps(header)):
            self._trackers = [
                TrackerHandle(each.name, self._file, log=logs / f"tracker-{each.name}.log", flush_s=flush_s, say=say)
                for each in chosen
            ]
        else:
            self._file.close()

    @checked_arguments
    def write(self, step: int, values: Mapping[str, Any], *, time_s: float | None = None) -> None:
        """Numbers by name after a step. What is no number is left out, with one warning a name; None is left out."""
        if all(tracker.is_over for tracker in self._trackers):
            return
        numbers = {name: number for name, value in values.items() if (number := self._number(name, value)) is not None}
        if self._records.write(json.dumps([step, time.time() if time_s is None else time_s, numbers])):
            for tracker in self._trackers:
                tracker.given()

    def close(self) -> None:
        """Let all finish, for ``flush_s`` seconds at most. A second call does nothing."""
        trackers, self._trackers = self._trackers, []
        if not trackers:
            return
        self._records.write(END)
        self._file.close()
        until_s = time.monotonic() + self._flush_s
        for tracker in trackers:
            tracker.close(max(0.0, until_s - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_installed(self, wanted: TrackerOptions) -> bool:
        if wanted.package is None or _found(wanted.package):
            return True
        self._say(f"no {wanted.name} records: it is not installed (pip install 'heterodyne[{wanted.name}]')")
        return False

    def _number(self, name: str, value: Any) -> float | None:
        if value is None:
            return None
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # a tensor of several elements raises the last
            if name not in self._odd:
                self._odd.add(name)
                self._say(f"warning: trackers take numbers, and {name!r} is a {type(value).__name__}: it is left out")
            return None


def _found(package: str) -> bool:
    """A directory of that name in the working directory, as W&B leaves one, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
