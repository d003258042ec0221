"""PyTorch's schedule files: CSV, one row a rank, one cell an action; an empty cell is a slot in which the rank waits.

Both its simple files (what is computed) and its lowered ones (with SEND_F, RECV_F, SEND_B, RECV_B) can be read. What has no meaning here
is left out: UNSHARD, RESHARD, and REDUCE_GRAD, which is by stage there and by bucket here. ``(0F1;3B0)OVERLAP_F_B``, which
PyTorch runs side by side, becomes the two in turn.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from heterodyne.errors import PlanError
from heterodyne.plan.program import Action
from heterodyne.plan.schedules.schedule import Orders
from heterodyne.text_files import read_text

__all__ = ["computing", "format_csv", "load_csv", "parse_csv"]

_COMPUTING = ("F", "B", "I", "W", "R")
_NO_MEANING = re.compile(r"^[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)$")
_OVERLAP = re.compile(r"^\(([^()]*)\)OVERLAP_F_B$")


def parse_csv(text: str, *, path: str | None = None) -> Orders:
    """The actions of each row. Raises PlanError with the row and the cell that is no action."""
    return tuple(
        tuple(action for column, cell in enumerate(row, start=1) for action in _actions(cell, line, column, path))
        for line, row in enumerate(csv.reader(io.StringIO(text)), start=1)
    )


def format_csv(orders: Orders) -> str:
    """The inverse of `parse_csv`, without empty cells; what PyTorch reads."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([str(action) for action in row] for row in orders)
    return text.getvalue()


def load_csv(path: Path) -> Orders:
    """Raises PlanError if the file is not there or holds what is no action."""
    try:
        text = read_text(path)
    except OSError as error:
        raise PlanError(f"cannot be read: {error.strerror}", path=str(path)) from error
    except UnicodeDecodeError as error:
        raise PlanError("cannot be read: it is not UTF-8 text", path=str(path)) from error
    return parse_csv(text, path=str(path))


def computing(orders: Orders) -> Orders:
    """Return what is computed, without the communication: orders as the checker and the lowering take them."""
    return tuple(tuple(action for action in row if action.kind in _COMPUTING) for row in orders)


def _actions(cell: str, line: int, column: int, path: str | None) -> list[Action]:
    text = cell.strip()
    overlapped = _OVERLAP.match(text)
    parts = overlapped[1].split(";") if overlapped else [text]
    try:
        return [Action.parse(part.strip()) for part in parts if part.strip() and not _NO_MEANING.match(part.strip())]
    except ValueError as error:
        raise PlanError(f"cell {column}: {error}", path=path, line=line) from error
