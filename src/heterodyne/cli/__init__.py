"""The command line: one small file a verb."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from heterodyne.cli.streams import prepare_streams

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; no exception leaves it but a defect of ours."""
    if arguments is None:  # else it is called by a program, whose streams are its own
        prepare_streams()
    try:
        from heterodyne.cli.app import run  # here, so that Ctrl-C while it is loaded is no traceback

        return run(arguments)
    except KeyboardInterrupt:
        return 130
    finally:
        if arguments is None:
            gc.freeze()  # the process ends: a last search for garbage in all that torch has made takes a second
