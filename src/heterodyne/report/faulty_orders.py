"""Orders that cannot run, drawn for people: the part of the grid in which the fault is, and what is wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from heterodyne.plan.schedules import Orders
from heterodyne.plan.schedules.check import Fault
from heterodyne.plan.schedules.csv_file import computing
from heterodyne.plan.schedules.grid import grid

__all__ = ["drawn_faults"]

_MOST_TOLD = 8
_MISSING = re.compile(r"^place [0-9]+: ([0-9]+)[FBIW]([0-9]+) is missing")


def drawn_faults(orders: Orders, faults: Sequence[Fault], width: int) -> str:
    """The grid, cut to ``width`` characters around the first action that is marked, then the faults, the first few of them.

    Where an action is missing, the one that it should have followed or gone before is marked.
    """
    # Only what computes is drawn.
    drawn = computing(orders)
    marked = [_placed(_among_drawn(fault, orders), drawn) for fault in faults]
    told = [f"fault: {fault.message}" for fault in faults[:_MOST_TOLD]]
    if len(faults) > _MOST_TOLD:
        told.append(f"and {len(faults) - _MOST_TOLD} more")
    # The grid lists every fault below its rows.
    rows = grid(drawn, faults=marked).splitlines()[: len(orders)]
    return "\n".join([*_cut(rows, width), *told])


def _among_drawn(fault: Fault, orders: Orders) -> Fault:
    """The fault, its position counted without what is not drawn; at the action after it if it is not drawn itself."""
    if fault.position is None:
        return fault
    return replace(fault, position=len(computing((orders[fault.place][: fault.position],))[0]))


def _placed(fault: Fault, orders: Orders) -> Fault:
    """The fault, at an action of the same micro-batch of the same stage if its own is not there."""
    found = _MISSING.match(fault.message)
    if fault.position is not None or found is None:
        return fault
    stage, index = int(found[1]), int(found[2])
    near = (n for n, action in enumerate(orders[fault.place]) if (action.stage, action.index) == (stage, index))
    return replace(fault, position=next(near, None))


def _cut(rows: Sequence[str], width: int) -> list[str]:
    """The columns around the first mark, the same ones of every row."""
    margin = max((row.index("|") + 2 for row in rows), default=0)
    cells = [row[margin:] for row in rows]
    longest = max(map(len, cells), default=0)
    room = max(20, width - margin - 4)
    if longest <= room:
        return list(rows)
    marks = [cell.index(">") for cell in cells if ">" in cell]
    first = max(0, min((marks[0] if marks else 0) - room // 2, longest - room))
    before, after = ("… " if first else "  "), (" …" if first + room < longest else "")
    return [
        row[:margin] + before + cell[first : first + room].ljust(room) + after
        for row, cell in zip(rows, cells, strict=True)
    ]
