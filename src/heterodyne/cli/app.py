"""Where the verbs come together, and where errors become one message and an exit status.

Exit status: 0 done; 1 the check that was asked for failed (``verify``); 2 something is wrong and the message says what; 79 a device was
out of memory and the run is not to go on by itself; 130 Ctrl-C;
`GAVE_UP_ON_A_PEER` from a worker that ends because another one did.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Final

import typer

import heterodyne
from heterodyne.cli import devices, emulate, kinds, measure, plan, report, simulate, train, verify
from heterodyne.cli.failure import of_the_system, tell
from heterodyne.errors import HeterodyneError

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
        return tell(error)
    except (OSError, ImportError, MemoryError, RuntimeError) as error:
        known = of_the_system(error)
        if known is None:
            raise
        return tell(known)
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
    for verb in (devices, kinds, measure, plan, simulate, train, verify, report):
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
