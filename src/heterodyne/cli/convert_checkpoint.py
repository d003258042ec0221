"""``heterodyne convert-checkpoint``: a checkpoint of an earlier release."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heterodyne.errors import CheckpointError
from heterodyne.printable import printable

__all__ = ["command"]


def command(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="STEP_DIR", help="RUN/checkpoint/step-N of an earlier release.")
    ],
    trust: Annotated[
        bool, typer.Option("--trust", help="You know who wrote it: reading it runs what is in it.")
    ] = False,
) -> None:
    """Rewrite a checkpoint of an earlier release, which held Python objects, so that --resume takes it.

    Reading Python objects (pickles) can run any program on this machine. Convert only checkpoints that you or people you trust
    have written.
    """
    from heterodyne.api import convert_checkpoint, require_first_version

    require_first_version(checkpoint)
    if not trust:
        raise CheckpointError(
            f"{checkpoint} is read with Python's pickle, which runs whatever its writer put into it; if you trust the writer, say --trust"
        )
    typer.echo(f"wrote {printable(str(convert_checkpoint(checkpoint)))}")
