"""What a run writes about itself as it goes: a line a step in ``metrics.jsonl``, the same numbers for trackers.

A step has the number of steps that are done when it is over: the first is 1, and ``checkpoint/step-N`` goes with line N.
Where the numbers come from:

    loss, grad_norm, lr    of the whole global batch, as the worker returns them
    step_s                 wall time on rank 0 from the begin of the step to its end, reading the batch included;
                           validation and checkpoints, which come between steps, are not in it
    samples_per_s          global batch size / step_s
    tokens_per_s           samples_per_s * tokens of a sample
    efficiency             samples_per_s / what the devices reach together when each computes for itself (given, if measured)
    memory_bytes           the most that rank 0 has used until now: its device's allocator, or the process on a CPU
    time_s                 Unix time

Validation gives a line of its own: ``step``, ``validation_loss``, ``time_s``; and so does a rank or a link that has become slower than
in the first steps: ``step``, ``slower`` (in words; empty when it is as fast as before again), ``time_s``. An outer step with other sites
gives one too, see `OuterStep`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heterodyne.errors import HeterodyneError
from heterodyne.json_files import parse_json
from heterodyne.processes import to_standard_error
from heterodyne.runtime.records.whole_lines import WholeLines
from heterodyne.text_files import open_regular

__all__ = ["Line", "MetricsFile", "OuterStep", "Slower", "StepRecord", "Validation", "tracked"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One training step; None for what is not known. See the module for the source of each number."""

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    step_s: float
    samples_per_s: float
    tokens_per_s: float | None
    efficiency: float | None
    memory_bytes: int
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """The loss over the fixed validation samples after so many steps."""

    step: int
    validation_loss: float
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Slower:
    """What has become slower, as was found after so many steps; "" if nothing is slower any more."""

    step: int
    slower: str
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterStep:
    """An outer step with other sites, which was taken over after so many steps.

    Args:
        outer_step: its number, from 1.
        fragment: of the parameters, from 0.
        sites: who took part, with the part of the outer average that is of each.
        sent_bytes, received_bytes: by this site since the line before; where the sites meet, by all that others sent and received there.
        wait_s: for the others, and for the link.
    """

    step: int
    outer_step: int
    fragment: int
    sites: str
    sent_bytes: int
    received_bytes: int
    wait_s: float
    time_s: float


Line = StepRecord | Validation | Slower | OuterStep


class MetricsFile:
    """``metrics.jsonl``: appended to line by line. A disk that is full later on costs lines and one warning, not the run.

    Args:
        path: the file.
        done: steps that were done before. Lines of later steps, left by a run that got further than its last checkpoint, are
            cut off, and so is a last line that is not whole; so no step stands there twice.
        say: takes the warning.

    Raises HeterodyneError if the file cannot be opened for writing.
    """

    def __init__(self, path: Path, *, done: int = 0, say: Callable[[str], None] = to_standard_error) -> None:
        def complain(why: str) -> None:
            say(
                f"warning: {path} cannot be written ({why}): training goes on, and the file lacks the steps until it can; make room on "
                "that disk"
            )

        try:
            length = _length_until(path, done)
            self._file = path.open("ab", buffering=0)
            self._lines = WholeLines(self._file.fileno(), length=length, complain=complain)
        except OSError as error:
            raise HeterodyneError(
                f"{path} cannot be written ({error.strerror}); make the run directory writable"
            ) from error

    def write(self, line: Line) -> None:
        """Append a line, whole or not at all. Numbers that are not finite become null, which JSON can say."""
        self._lines.write(json.dumps({name: _json_number(value) for name, value in asdict(line).items()}))

    def close(self) -> None:
        with suppress(OSError):  # some file systems report only now that they have no room
            self._file.close()


def tracked(line: Line) -> dict[str, float]:
    """The numbers of a line as trackers show them: ``train/loss`` and so on, ``validation/loss``."""
    values = asdict(line)
    del values["step"], values["time_s"]
    group = "sites" if isinstance(line, OuterStep) else "train"
    names = {name: "validation/loss" if name == "validation_loss" else f"{group}/{name}" for name in values}
    return {names[name]: value for name, value in values.items() if isinstance(value, int | float)}


_LONGEST_LINE = 2**20
"""Bytes; a longer line is none that a run has written."""


def _length_until(path: Path, done: int) -> int:
    """Bytes up to the end of the last whole line of a step that is not after ``done``."""
    if not path.exists():
        return 0
    length = 0
    with open_regular(path) as file:
        while line := file.readline(_LONGEST_LINE):
            if not line.endswith(b"\n") or _step(line) > done:
                break
            length += len(line)
    return length


def _step(line: bytes) -> float:
    """The step of a line; infinite if it has none, so that nothing that cannot be read is kept."""
    try:
        content: Any = parse_json(line.decode("utf-8"))
    except ValueError:
        return math.inf
    step = content.get("step") if isinstance(content, Mapping) else None
    return step if isinstance(step, int) else math.inf


def _json_number(value: float | str | None) -> float | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value
