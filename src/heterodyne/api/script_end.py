"""What a script has left open when it ends, by an error or not, is closed while the interpreter still runs.

Once it is being taken down no thread can be started, and ranks that wait for each other would wait forever.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from heterodyne.processes import worker_exit_status

__all__ = ["left_with_script"]


@contextmanager
def left_with_script(leave: Callable[[BaseException | None], None], *, rank: int | None = None) -> Iterator[None]:
    """If the script ends inside of the block, `leave` is called with what it died of. The block that was entered last comes first.

    Args:
        rank: of this process, given for its outermost block: what leaving has raised then becomes the exit status.
    """
    inside = [leave]  # emptied at the end of the block: what is registered is never let go of

    def at_end() -> None:
        if not inside:
            return
        try:
            inside[0](getattr(sys, "last_value", None))
        except BaseException as error:  # noqa: BLE001  # nobody is left to raise it to
            if error is not getattr(sys, "last_value", None):
                traceback.print_exception(error)
                sys.last_value = error
                _late.append(error)
        if rank is not None and _late:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(worker_exit_status(_late[0], rank))

    # Before threads are waited for that may wait for other ranks themselves, which atexit comes after.
    threading._register_atexit(at_end)  # type: ignore[attr-defined]
    del leave
    try:
        yield
    finally:
        inside.clear()


_late: list[BaseException] = []
