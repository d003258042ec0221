"""What a run has seen of devices whose memory ended: a line each in its directory, written by the rank that lacked it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from heterodyne.errors import HeterodyneError
from heterodyne.json_files import EXACT, Count, checked, parse_json
from heterodyne.text_files import read_text
from heterodyne.units import format_bytes

__all__ = ["Shortage", "note_shortage", "read_shortages"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """A request for memory that a device could not serve.

    Args:
        device, rank: whose.
        step: counted from 0, None outside of one.
        where: the action, with the stage that it is of.
        used_bytes: that this process held of the device (of a CPU worker: that it occupied).
        asked_bytes: the request that failed.
        free_bytes: of the device, beside; less than was asked for.
        predicted_bytes: the peak that the plan predicted; 0 where it predicted none.
        longer: the samples were longer than those that the plan was made for.
        attempt: the same for all that is lacked at one time, by whichever ranks.
    """

    __pydantic_config__ = EXACT

    device: str
    rank: Annotated[int, Field(ge=0)]
    step: Count | None
    where: str
    used_bytes: Count
    asked_bytes: Annotated[Count, Field(ge=1)]
    free_bytes: Count
    predicted_bytes: Count
    longer: bool
    attempt: str = ""

    @property
    def usable_bytes(self) -> int:
        """Return what the process was seen to have."""
        return self.used_bytes + self.free_bytes

    @property
    def needed_bytes(self) -> int:
        """Return what it would have had to have at that moment."""
        return self.used_bytes + self.asked_bytes

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ({self.device}) in {self.where}: {format_bytes(self.asked_bytes)} were asked for beside "
            f"{format_bytes(self.used_bytes)} in use, and {format_bytes(self.usable_bytes)} are all that it was seen to have"
        )


def note_shortage(path: Path, shortage: Shortage) -> None:
    """Add a line; several ranks may do so at the same time. Raises OSError."""
    line = json.dumps(asdict(shortage)) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_shortages(path: Path) -> tuple[Shortage, ...]:
    """All of them, in the order in which they came; none where there is no file. Raises HeterodyneError for what was not written so."""
    try:
        lines: Sequence[str] = read_text(path).splitlines()
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise HeterodyneError(
            f"{path} cannot be read ({error}); remove it to forget what devices have lacked"
        ) from error
    try:
        return tuple(checked(Shortage, parse_json(line)) for line in lines)
    except ValueError as error:
        raise HeterodyneError(f"{path} is damaged ({error}); remove it to forget what devices have lacked") from error
