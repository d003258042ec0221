"""The one place where errors are printed."""

from __future__ import annotations

import os
import sys

from heterodyne.errors import HeterodyneError
from heterodyne.processes import worker_exit_status

__all__ = ["of_the_system", "tell"]


def tell(error: HeterodyneError) -> int:
    """Print the message; the exit status, by which a launcher tells cause from consequence.

    Each worker prints, rank 0 on the terminal and the others into their logs: which of them is read depends on who fails.
    """
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    rank = os.environ.get("RANK", "0")
    return worker_exit_status(error, int(rank) if rank.isdigit() else 0)


def of_the_system(error: OSError) -> HeterodyneError:
    """What the operating system refused (no room, no right to write), as an error for people: the system's own words and the file."""
    where = f"{error.filename}: " if error.filename else ""
    return HeterodyneError(
        f"{where}{error.strerror or error}; what was written before it is as it was: mend the cause and try again"
    )
