"""Where the verbs come together, and where errors become one message and an exit status.

Exit status: 0 done; 1 the check that was asked for failed (``verify``); 2 something is wrong and the message says what; 79 a device was
out of memory and the run is not to go on by itself; 130 Ctrl-C;
`GAVE_UP_ON_A_PEER` from a worker that ends because another one did.
"""

from __future__ import annotations

import errno
import functools
import re
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Final

import typer

import heterodyne
from heterodyne.cli import (
    devices,
    doctor,
    emulate,
    kinds,
    launch,
    measure,
    plan,
    report,
    simulate,
    study,
    submit,
    train,
    verify,
)
from heterodyne.errors import FileError, HeterodyneError, WorkerError
from heterodyne.processes import worker_exit_status
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from heterodyne.runtime.rendezvous.file_handles import TOO_MANY_OPEN

__all__ = ["application", "run"]

_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; no exception leaves it but Ctrl-C and a defect of ours."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _require_sayable(given)
        # The arguments travel along, because a verb may start itself again once for each device.
        application()(args=given, obj=given)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 2
    except HeterodyneError as error:
        return _tell(error)
    except (OSError, ImportError, MemoryError, RuntimeError) as error:
        known = _of_the_system(error)
        if known is None:
            raise
        return _tell(known)
    return 0


def _require_sayable(arguments: Sequence[str]) -> None:
    """A usage error shows its argument. Raises HeterodyneError for control characters in one that is ours (``--`` ends those), and for an
    empty one, which as a path would be this directory.
    """
    before = "heterodyne"
    for argument in takewhile(lambda each: each != "--", arguments):
        if _CONTROL.search(argument):
            raise HeterodyneError(f"the argument {argument[:200]} has control characters: write it without them")
        if not argument or (argument.startswith("--") and argument.endswith("=") and "=" not in argument[:-1]):
            place = argument or f"an argument, after {before!r},"
            raise HeterodyneError(f"{place} is empty: give it a value, or leave the option out")
        before = argument


def application() -> typer.Typer:
    """Every verb with its options."""
    app = typer.Typer(
        name="heterodyne",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for verb in (devices, kinds, measure, plan, simulate, train, study, verify, report, doctor, launch, submit):
        app.command(verb.__name__.rpartition(".")[2].replace("_", "-"))(_ending(verb.command))
    app.command("emulate", context_settings={"allow_interspersed_args": False})(_ending(emulate.command))
    return app


def _ending(command: Callable[..., int | None]) -> Callable[..., None]:
    """The same command, whose result becomes the exit status."""

    @functools.wraps(command)
    def run(*args: object, **kwargs: object) -> None:
        raise typer.Exit(command(*args, **kwargs) or 0)

    return run


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"heterodyne {heterodyne.__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Train one PyTorch model on accelerators of different power: fast, exact, with no rewrite of the model."""


# Of the loader of libraries, of threads, and of torch's allocator, which raise no MemoryError.
_NO_MEMORY = (
    "annot allocate memory",
    "failed to map segment",
    "can't start new thread",
    "can't allocate memory",
    "bad_alloc",
)


def _tell(error: HeterodyneError) -> int:
    """Print the message, unless another worker does; the exit status, by which a launcher distinguishes cause from consequence.

    What every rank knows is printed by rank 0, a mistake in a file by the first worker of each machine, the rest by whom it concerns.
    """
    try:
        own = WorkerEnvironment.read()
        rank, local_rank = (0, 0) if own is None else (own.rank, own.local_rank)
    except WorkerError as unread:  # which may be the error
        rank, local_rank = unread.rank or 0, 0
    told_by_another = rank > 0 if error.shared else local_rank > 0 and isinstance(error, FileError)
    if not told_by_another:
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
    return worker_exit_status(error, rank)


def _of_the_system(error: Exception) -> HeterodyneError | None:
    """Return what the operating system refused (no room, no right to write, no memory), as an error for people: the system's own words and
    the file; None for anything else.
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
