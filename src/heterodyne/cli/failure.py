"""The one place where errors are printed."""

from __future__ import annotations

import errno
import os
import sys

from heterodyne.errors import FileError, HeterodyneError
from heterodyne.processes import worker_exit_status
from heterodyne.runtime.rendezvous.file_handles import TOO_MANY_OPEN

__all__ = ["of_the_system", "tell"]

# Of the loader of libraries, of threads, and of torch's allocator, which raise no MemoryError.
_NO_MEMORY = (
    "annot allocate memory",
    "failed to map segment",
    "can't start new thread",
    "can't allocate memory",
    "bad_alloc",
)


def tell(error: HeterodyneError) -> int:
    """Print the message, unless another worker does; the exit status, by which a launcher distinguishes cause from consequence.

    What every rank knows is told by rank 0, a mistake in a file by the first worker of each machine, the rest by whom it concerns.
    """
    rank, local_rank = _number("RANK"), _number("LOCAL_RANK")
    told_by_another = rank > 0 if error.shared else local_rank > 0 and isinstance(error, FileError)
    if not told_by_another:
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
    return worker_exit_status(error, rank)


def _number(variable: str) -> int:
    """Read from the environment, because the error may be one of reading it properly."""
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def of_the_system(error: Exception) -> HeterodyneError | None:
    """What the operating system refused (no room, no right to write, no memory), as an error for people: the system's own words and the
    file; None for anything else.
    """
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        said = str(error).partition("\n")[0] or "no more is given to this process"
        return HeterodyneError(
            f"there is not enough memory ({said}): end other programs, or raise the limit (ulimit -v, or that of the container)"
        )
    if not isinstance(error, OSError):
        return None
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return HeterodyneError(f"too many files are open ({error.strerror}): {TOO_MANY_OPEN}")
    where = f"{error.filename}: " if error.filename else ""
    return HeterodyneError(
        f"{where}{error.strerror or error}; what was written before it is as it was: mend the cause and try again"
    )
