"""``heterodyne report``: one page that shows a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heterodyne.printable import printable

__all__ = ["command"]


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Default: RUN/report.html.")] = None,
    reference: Annotated[
        Path | None,
        typer.Option("--reference", metavar="RUN", help="A one-device run of the same job, drawn beside it."),
    ] = None,
) -> None:
    """Write the page of a run.

    report.html (self-contained) and trace.json (for Perfetto). A run that was cut short is shown as far as it got.
    """
    from heterodyne.report.html import write_report

    page = write_report(run, out, reference_metrics=reference)
    typer.echo(f"wrote {printable(str(page))}")
