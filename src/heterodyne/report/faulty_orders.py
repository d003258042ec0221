"""Orders that cannot run, drawn for people: the part of the grid in which the fault is, and what is wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from heterodyne.plan.program import Action
from heterodyne.plan.schedules.check import Fault
from heterodyne.plan.schedules.clock import Clock, place_of_stage
from heterodyne.plan.schedules.csv_file import computing
from heterodyne.plan.schedules.schedule import Orders
from heterodyne.plan.schedules.times import Read, StageTimes

__all__ = ["drawn_faults", "grid"]

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


# Orders drawn as text: a row for each place, a column for each slot of time, played by the clock.
#
#     place 0 | 0F0 0F1  .   .  0B0 ...
#
# A ``.`` is a slot of waiting, ``=`` goes on with what is left of it. Where a fault was found the action is drawn as ``>0B0<``,
# and the faults are written below. What can never run is drawn behind all that can.
_UNIT = StageTimes(forward_s=1.0, input_s=1.0, weight_s=1.0, recompute_s=0.0)
_UNIT_WITH_R = StageTimes(forward_s=1.0, input_s=1.0, weight_s=1.0, recompute_s=1.0)


def grid(
    orders: Orders,
    times: Sequence[StageTimes] | None = None,
    *,
    reads: Sequence[Read] | None = None,
    faults: Sequence[Fault] = (),
    most_columns: int = 400,
) -> str:
    """The picture, one line a place.

    Args:
        times: by stage; by default F, I, W and R take a slot each, and B two.
        faults: what `check.order_faults` found.
        most_columns: a column is as long as the shortest action, or longer where there would be more of them than these.
    """
    drawn = tuple(tuple(a for a in row if a.kind in ("F", "B", "I", "W", "R")) for row in orders)
    stages = 1 + max((a.stage for row in drawn for a in row), default=-1)
    micro_batches = 1 + max((a.index or 0 for row in drawn for a in row), default=-1)
    if times is None:
        again = {a.stage for row in drawn for a in row if a.kind == "R"}
        times = [_UNIT_WITH_R if stage in again else _UNIT for stage in range(stages)]
    near = None if reads is None else [read for read in reads if max(read.source, read.reader) < stages]
    clock = Clock(times[:stages], place_of_stage(drawn, stages), micro_batches, near)
    rows = clock.encode(drawn)
    starts, ends = clock.run(rows)
    lengths = [[clock.duration[code] for code in row] for row in rows]
    last = max((done[-1] for done in ends if done), default=0.0)
    slot = _slot(lengths, last, most_columns)
    marked = {(fault.place, fault.position) for fault in faults}
    tables = [
        _columns(row, starts[place], ends[place], slot, round(last / slot), {n for p, n in marked if p == place})
        for place, row in enumerate(drawn)
    ]
    return _text(tables, faults)


def _slot(lengths: Sequence[Sequence[float]], last: float, most_columns: int) -> float:
    shortest = min((seconds for row in lengths for seconds in row if seconds > 0), default=1.0)
    return max(shortest, last / most_columns) or 1.0


def _columns(
    row: Sequence[Action],
    starts: Sequence[float],
    ends: Sequence[float],
    slot: float,
    after: int,
    marked: set[int | None],
) -> list[str]:
    """The cells of one place. Each action has a cell at least, so where many are shorter than a slot the row runs late."""
    cells: list[str] = []
    for position, action in enumerate(row):
        name = f">{action}<" if position in marked else str(action)
        if position < len(ends):
            first, stop = round(starts[position] / slot), round(ends[position] / slot)
        else:
            first, stop = after, 0
        cells += ["."] * (first - len(cells))
        cells.append(name)
        cells += ["="] * (stop - len(cells))
    return cells


def _text(tables: Sequence[Sequence[str]], faults: Sequence[Fault]) -> str:
    width = max((len(cell) for table in tables for cell in table), default=1)
    columns = max((len(table) for table in tables if table), default=1)
    lines = [
        f"place {place} | "
        + " ".join(cell.center(width) for cell in [*table, *["."] * (columns - len(table))]).rstrip()
        for place, table in enumerate(tables)
    ]
    lines += [f"fault: {fault.message}" for fault in faults]
    return "\n".join(lines)
