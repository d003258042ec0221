"""A table of texts, printed by rich on a terminal and as plain aligned text everywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from heterodyne.printable import printable

__all__ = ["Column", "Rows", "columns", "show"]

_GAP = "  "


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """Numbers are aligned to the right, words to the left."""

    title: str
    align: Literal["left", "right"] = "left"


def columns(*titles: str) -> tuple[Column, ...]:
    """Columns; a title that begins with ``>`` is aligned to the right."""
    return tuple(Column(title=t.removeprefix(">"), align="right" if t.startswith(">") else "left") for t in titles)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Cells of text under columns.

    Args:
        title: what the table shows.
        columns: one for each cell of a row.
        rows: the cells.
        marked: indices of rows that stand out (the chosen plan).
        notes: sentences under the table.

    Raises ValueError if a row has not one cell a column.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, shown in (  # names in them may be of a stranger's file
            ("title", printable(self.title)),
            ("rows", tuple(tuple(map(printable, row)) for row in self.rows)),
            ("notes", tuple(map(printable, self.notes))),
        ):
            object.__setattr__(self, name, shown)
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r} has {len(self.columns)} columns, a row has {len(row)}: {row}")

    def __rich__(self) -> Table:
        table = Table(
            title=escape(self.title),
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            show_header=any(column.title for column in self.columns),
            caption="\n".join(map(escape, self.notes)) or None,
            caption_justify="left",
        )
        for column in self.columns:
            table.add_column(escape(column.title), justify=column.align, no_wrap=column.align == "right")
        for index, row in enumerate(self.rows):
            table.add_row(*map(escape, row), style="bold green" if index in self.marked else None)
        return table

    def text(self) -> str:
        """Aligned columns without colour, lines or wrapping; marked rows begin with ``*``."""
        header = tuple(column.title for column in self.columns)
        widths = [max(map(len, cells)) for cells in zip(header, *self.rows, strict=True)]
        margin = "  " if self.marked else ""
        lines = [self.title, *([margin + self._line(header, widths)] if any(header) else [])]
        for index, row in enumerate(self.rows):
            lines.append(("* " if index in self.marked else margin) + self._line(row, widths))
        return "\n".join([*(line.rstrip() for line in lines), *self.notes]) + "\n"

    def _line(self, cells: tuple[str, ...], widths: list[int]) -> str:
        return _GAP.join(
            cell.rjust(width) if column.align == "right" else cell.ljust(width)
            for cell, width, column in zip(cells, widths, self.columns, strict=True)
        )


def show(rows: Rows, console: Console) -> None:
    """Print with colour on a terminal, as plain text into a file or a pipe."""
    if console.is_terminal:
        console.print(rows)
    else:
        # Written around rich, which would fold long lines at the width that it assumes for a pipe.
        console.file.write(rows.text() + "\n")
