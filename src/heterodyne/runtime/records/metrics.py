"""What a run writes about itself as it goes: a line a step in ``metrics.jsonl``, and TensorBoard events.

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

Validation gives a line of its own: ``step``, ``validation_loss``, ``time_s``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from heterodyne.errors import HeterodyneError

__all__ = ["MetricsFile", "StepRecord", "TensorBoard", "Validation"]


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


Line = StepRecord | Validation


class MetricsFile:
    """``metrics.jsonl``: appended to, and flushed, line by line.

    Args:
        path: the file.
        done: steps that were done before. Lines of later steps, left by a run that got further than its last checkpoint, are
            cut off, and so is a last line that is not whole; so no step stands there twice.

    Raises HeterodyneError if the file cannot be written.
    """

    def __init__(self, path: Path, *, done: int = 0) -> None:
        try:
            keep = _length_until(path, done)
            self._file: TextIO = path.open("a", encoding="utf-8")
            self._file.truncate(keep)
        except OSError as error:
            raise HeterodyneError(
                f"{path} cannot be written ({error.strerror}); make the run directory writable"
            ) from error

    def write(self, line: Line) -> None:
        """Append a line. Numbers that are not finite become null, which JSON can say."""
        fields = {name: _json_number(value) for name, value in asdict(line).items()}
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _EventWriter(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """The same lines as TensorBoard scalars, ``train/loss``, ``validation/loss`` and so on."""

    def __init__(self, writer: _EventWriter) -> None:
        self._writer = writer

    @classmethod
    def open(cls, directory: Path, *, done: int = 0, say: Callable[[str], None]) -> TensorBoard | None:
        """None, and a word about it, where TensorBoard is not installed. Events of steps after ``done`` are hidden."""
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            say("no TensorBoard events: it is not installed (pip install 'heterodyne[tensorboard]')")
            return None
        writer: Any = SummaryWriter(str(directory), purge_step=done + 1)
        return cls(writer)

    def write(self, line: Line) -> None:
        values = asdict(line)
        step, time_s = values.pop("step"), values.pop("time_s")
        for name, value in values.items():
            if value is not None:
                tag = "validation/loss" if name == "validation_loss" else f"train/{name}"
                self._writer.add_scalar(tag, value, global_step=step, walltime=time_s)

    def close(self) -> None:
        self._writer.close()


def _length_until(path: Path, done: int) -> int:
    """Bytes up to the end of the last whole line of a step that is not after ``done``."""
    if not path.exists():
        return 0
    length = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or _step(line) > done:
                break
            length += len(line)
    return length


def _step(line: bytes) -> float:
    """The step of a line; infinite if it has none, so that nothing that cannot be read is kept."""
    try:
        content: Any = json.loads(line)
    except ValueError:
        return math.inf
    step = content.get("step") if isinstance(content, Mapping) else None
    return step if isinstance(step, int) else math.inf


def _json_number(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
