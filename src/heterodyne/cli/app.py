"""Where the verbs come together, and where errors become one message and an exit status.

Exit status: 0 done; 1 the check that was asked for failed (``verify``); 2 something is wrong and the message says what; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click
import typer

import heterodyne
from heterodyne.cli import devices, emulate, measure, plan, report, train, verify
from heterodyne.errors import HeterodyneError

__all__ = ["main"]

app = typer.Typer(
    name="heterodyne",
    help="Train one PyTorch model on accelerators of different power: fast, exact, with no rewrite of the model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (devices, measure, plan, train, verify, report):
    app.command()(verb.command)
app.command(name="emulate", context_settings={"allow_interspersed_args": False})(emulate.command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"heterodyne {heterodyne.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Train one PyTorch model on accelerators of different power: fast, exact, with no rewrite of the model."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; no exception leaves it but a defect of ours."""
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        # The arguments travel along, because a verb may start itself again once for each device.
        status: Any = app(args=given, standalone_mode=False, obj=given)
    except HeterodyneError as error:
        # Every worker meets the same mistake; rank 0 speaks for all, unless the error is about a rank.
        if os.environ.get("RANK", "0") == "0" or type(error).__name__ == "WorkerError":
            print(f"error: {error}", file=sys.stderr)  # noqa: T201  # the one place where errors are printed
        return 2
    except click.exceptions.Abort:
        return 130
    except KeyboardInterrupt:
        return 130
    except click.ClickException as error:
        error.show()
        return 2
    return status if isinstance(status, int) else 0
